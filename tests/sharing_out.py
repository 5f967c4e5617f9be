"""Which files of the tests that start real processes run in one test process, and which of them first.

Owns the scheduler of pytest-xdist for that stage (`--dist loadfile`). A file's tests stay together,
as what they share is started once; files that look at the one full system stay together, too. The
long ones begin first, so that none begins when the others are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

FULL_STACK = "the full system"
# The last one changes it: in the order of their names, which is the order of collection.
FULL_STACK_FILES = (
    "test_deploy_dashboard.py",
    "test_docs_guides.py",
    "test_explain.py",
    "test_traces.py",
    "test_upgrade.py",
)
# Over 15 s on two cores, the longest first. What is not here follows in the order of collection.
LONG = (
    FULL_STACK,
    "test_up.py",
    "test_upgrade_groups.py",
    "test_router_cluster.py",
    "test_registry_process.py",
    "test_deploy_compose_run.py",
    "test_rank_group.py",
    "test_planner_signals.py",
    "test_planner_leaders.py",
    "test_router_process.py",
    "test_engine_modelled.py",
    "test_gateway_process.py",
    "test_start_segments.py",
    "test_registry_trust.py",
    "test_transfer_process.py",
)


def scope(nodeid: str) -> str:
    """The name of what a test shares a process with: its file, or the full system."""
    file = PurePosixPath(nodeid.partition("::")[0])
    return FULL_STACK if file.name in FULL_STACK_FILES else str(file)


def turn(nodeid: str) -> int:
    """The lower the earlier."""
    name = PurePosixPath(scope(nodeid)).name
    return LONG.index(name) if name in LONG else len(LONG)


def put_in_order(items: list[pytest.Item]) -> None:
    """The long ones first, in place.

    Raises:
        UsageError: a test asks for the full system outside of the files that share it.
    """
    for item in items:
        asks: Sequence[str] = getattr(item, "fixturenames", ())
        if "full_stack" in asks and scope(item.nodeid) != FULL_STACK:
            text = f"{item.nodeid} asks for full_stack: write its file into FULL_STACK_FILES"
            raise pytest.UsageError(f"{text} of tests/sharing_out.py, or a second one is started")
    items.sort(key=lambda item: turn(item.nodeid))


class LongFirst(LoadFileScheduling):  # type: ignore[misc]
    """Files in the order of collection; a process is given its next file with its last test.

    The scheduler it is made of sorts files by their number of tests, and gives a file to a process
    that has two tests left, which may be two long ones while another process has nothing.
    """

    PENDING_MAX = 1  # with none pending the last test would not begin: it must know what follows it

    def __init__(self, config: pytest.Config, log: object = None) -> None:
        config.option.loadscopereorder = False
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)

    def _reschedule(self, node: object) -> None:
        left = self._pending_of(self.assigned_work[node])
        if not self.workqueue or left <= self.PENDING_MAX:
            super()._reschedule(node)
