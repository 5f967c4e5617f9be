"""`readyplane workers` of a worker of several ranks."""

from io import StringIO

import pytest
from rich.console import Console

from readyplane.core.gate_checks import SHARD_COVERAGE
from readyplane.core.worker import CheckResult, Role, Worker, WorkerOffer, WorkerState
from readyplane.wire import worker_from_proto, worker_to_proto
from readyplane_lab.cli.workers import fleet_table, ranks_table, worker_row
from readyplane_router.group import STEPS, Group, publish, report

HELD = {"rank_tensors": [3, 3], "rank_bytes": [2_000_000, 2_500_000]}


def worker(ranks: int, steps: tuple[str, ...], *, held: bool = False) -> Worker:
    offer = WorkerOffer("p-1", "i-1", Role.PREFILL, "m", "h200", ranks=ranks)
    checks = (CheckResult(SHARD_COVERAGE, True, HELD),) if held else ()
    return Worker(offer, 1, WorkerState.PROVISIONED, checks=checks, rank_steps=steps)


def text(table: object) -> str:
    out = StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def test_the_steps_and_the_memory_of_each_rank_are_shown() -> None:
    row = worker_row(worker(2, ("canary_passed", ""), held=True))
    assert row["ranks"] == [
        {"rank": 0, "step": "canary_passed", "tensors": 3, "bytes": 2_000_000},
        {"rank": 1, "step": None, "tensors": 3, "bytes": 2_500_000},
    ]
    assert "2.5" in text(ranks_table(row["ranks"]))
    fleet = {"version": 1, "degraded": "", "workers": [row]}
    assert "ranks 1/2" in text(fleet_table(fleet))


def test_what_is_not_known_is_not_shown_as_nothing() -> None:
    row = worker_row(worker(2, ()))
    assert [rank["step"] for rank in row["ranks"]] == [None, None]
    assert [rank["bytes"] for rank in row["ranks"]] == [None, None]
    assert worker_row(worker(1, ()))["ranks"] is None


@pytest.mark.parametrize("steps", [(), ("placed", ""), STEPS[-1:] * 2])
def test_steps_go_over_the_wire(steps: tuple[str, ...]) -> None:
    made = worker(2, steps)
    assert worker_from_proto(worker_to_proto(made, now_s=5.0), now_s=5.0).rank_steps == steps


def test_a_group_says_the_last_step_of_each_rank() -> None:
    group = report(Group(2, "sha256:m"), rank=1, step="connected")
    assert group.steps() == ("", "connected")
    for rank in range(2):
        group = report(group, rank=rank, step=STEPS[-1])
    assert publish(group, 7).steps() == ("canary_passed",) * 2
    assert Group(2, epoch=7).steps() == ("canary_passed",) * 2, "another router published it"
