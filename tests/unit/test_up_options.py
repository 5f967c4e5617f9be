"""What `up` refuses before anything is started, and which running stack commands find."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import InvalidField, NotFound, Unavailable
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane.ports import Order
from readyplane_lab.up.actuator import LocalActuator, WorkerPlace
from readyplane_lab.up.address_book import (
    AddressBook,
    book_path,
    read_book,
    remove_book,
    write_book,
)
from readyplane_lab.up.demo_policy import ClassProfiles, learn, profiles_of
from readyplane_lab.up.options import UpOptions, read_policy
from readyplane_lab.up.pids import start_mark
from readyplane_lab.up.processes import ProcessTable
from readyplane_lab.up.run import make_workload
from readyplane_planner.policy import overlay


@pytest.mark.parametrize(
    "options, where",
    [
        ({"report_file": Path("/nope/x.json")}, "--report"),
        ({"report_file": Path("/")}, "--report"),
        ({"speed": float("nan")}, "--speed"),
        ({"rate_rps": -1.0}, "--rate"),
        ({"duration_s": 0.0}, "--duration"),
        ({"model_bytes": 5}, "--model-mb"),
        ({"model_bytes": 8_000_000}, "--model-mb"),
        ({"workers_max": 1}, "--workers-max"),
        ({"page_port": 70_000}, "--page-port"),
        ({"trace": Path("t.csv"), "load": False}, "--trace"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidField, match=where):
        UpOptions(**options)


def test_arguments_of_the_other_engine_are_shown_as_they_were_given() -> None:
    with pytest.raises(InvalidField, match=r"--engine-arg: '--x --y' is not valid"):
        UpOptions(engine_args=("--x", "--y"))
    with pytest.raises(InvalidField, match="--engine-arg"):
        UpOptions(engine_args=("",))


def test_a_self_check_without_traffic_is_refused() -> None:
    with pytest.raises(InvalidField, match="--quick"):
        make_workload(UpOptions(quick=True, load=False))


def test_a_policy_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(InvalidField, match="--policy"):
        read_policy(path)


def test_objects_are_merged_key_by_key() -> None:
    merged = overlay({"a": {"x": 1, "y": 2}, "b": 1}, {"a": {"y": 3}, "c": 4})
    assert merged == {"a": {"x": 1, "y": 3}, "b": 1, "c": 4}


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for another stack's `up`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def book(pid: int, model: str) -> AddressBook:
    texts = dict.fromkeys(
        (
            *("registry", "router", "planner", "actuator", "registry_http", "router_http"),
            *("planner_http", "gateway_http", "token", "data_dir", "logs_dir"),
        ),
        "x",
    )
    return AddressBook(pid=pid, mark=start_mark(pid) or "", model=model, **texts)


def test_when_the_newest_stack_ends_the_older_one_is_found_again(
    other: subprocess.Popen[bytes],
) -> None:
    write_book(book(other.pid, "older"))
    write_book(book(os.getpid(), "newer"))
    found = read_book()
    assert found is not None
    assert found.model == "newer"
    remove_book(os.getpid())
    found = read_book()
    assert found is not None
    assert found.model == "older"
    remove_book(other.pid)
    assert read_book() is None
    assert not list(book_path().parent.glob("up*.json"))


def test_an_older_stack_that_ends_leaves_the_newest_alone(other: subprocess.Popen[bytes]) -> None:
    write_book(book(other.pid, "older"))
    write_book(book(os.getpid(), "newer"))
    remove_book(other.pid)
    found = read_book()
    assert found is not None
    assert found.model == "newer"


def test_a_dead_stack_is_not_believed(other: subprocess.Popen[bytes]) -> None:
    write_book(book(other.pid, "dead"))
    other.kill()
    other.wait()
    assert read_book() is None


def test_a_class_starts_with_the_profile_that_the_policy_names() -> None:
    """Which may be a measured file; what no policy names is a profile that ships."""
    pools = {
        "prefill": {"worker_class": "b300", "profile": "mine/b300.json"},
        "decode": {
            "worker_class": "x",
            "profile": "unknown",
            "classes": [{"worker_class": "y", "profile": "h100-tp4-llama70b"}],
        },
    }
    find = profiles_of(pools)
    assert find("b300") == str(Path("mine/b300.json").absolute())
    assert find("y") == "h100-tp4-llama70b"
    assert find("x") == "unknown" and find("h200-slow10") == "h200-slow10"
    with pytest.raises(NotFound, match=r"worker_class, profile.*b300, x, y"):
        find("nobody's")


class RunningPolicy:
    """A planner that knows a policy, or is away; it counts how often it is asked."""

    def __init__(self) -> None:
        self.document: dict[str, Any] | None = None
        self.version, self.asked = 1, 0

    async def get_policy(self, model: str = "") -> tuple[dict[str, Any], int]:
        """The document."""
        self.asked += 1
        await asyncio.sleep(0)
        if self.document is None:
            raise Unavailable("planner", "start it")
        return self.document, self.version


def order_of(worker_class: str, *, version: int = 0, worker_id: str = "p-1") -> Order:
    """An order of one class, decided under a version of the policy."""
    return Order(worker_id, Role.PREFILL, "demo", worker_class, "sha256:x", policy_version=version)


async def test_a_class_that_comes_into_the_policy_later_is_learnt_before_an_order() -> None:
    planner, known = RunningPolicy(), profiles_of({"prefill": {"worker_class": "h200-slow10"}})
    planner.document = {
        "prefill": {"worker_class": "h100-tp4", "profile": "h100-tp4-llama70b"},
        "decode": {"worker_class": "tp2", "profile": "mine/tp2.json", "classes": []},
    }
    await learn(known, planner, order_of("h100-tp4"))
    assert known("h100-tp4") == "h100-tp4-llama70b"
    assert known("tp2") == str(Path("mine/tp2.json").absolute())
    planner.document = None
    await learn(known, planner, order_of("tp2", version=9))
    assert known("tp2").endswith("tp2.json"), "what was known stays while nobody can be asked"
    with pytest.raises(Unavailable, match="worker class tp8 is not known"):
        await learn(known, planner, order_of("tp8"))
    planner.asked = 0
    waiting = [learn(known, planner, order_of("tp8")) for _ in range(4)]
    failed = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(e) for e in failed] == [Unavailable] * 4
    assert planner.asked == 1, "who waits for a planner that is away waits once, side by side"


async def test_the_planner_is_asked_only_where_an_order_goes_by_what_is_not_known() -> None:
    """Its answer is one that every order would wait for, up to two seconds."""
    planner, known = RunningPolicy(), profiles_of({"prefill": {"worker_class": "h200-slow10"}})
    planner.document = {"prefill": {"worker_class": "h200-slow10"}}
    for _ in range(3):
        await learn(known, planner, order_of("h200-slow10"))
    assert planner.asked == 0
    same = order_of("h200-slow10", version=1)
    await asyncio.gather(*(learn(known, planner, same) for _ in range(4)))
    assert planner.asked == 1, "orders that come together ask once"
    # The class of that name has another profile from now on.
    planner.document, planner.version = (
        {"prefill": {"worker_class": "h200-slow10", "profile": "x.json"}},
        2,
    )
    await learn(known, planner, same)
    assert known("h200-slow10") == "h200-slow10"
    await learn(known, planner, order_of("h200-slow10", version=2))
    assert known("h200-slow10") == str(Path("x.json").absolute()) and planner.asked == 2


async def test_an_order_of_an_unknown_class_reads_the_policy_in_force(tmp_path: Path) -> None:
    planner, known = RunningPolicy(), ClassProfiles()
    planner.document = {"prefill": {"worker_class": "h100-tp4", "profile": "h100-tp4-llama70b"}}
    async with ProcessTable(tmp_path / "run", on_exit=lambda *_: None) as table:
        place = WorkerPlace("r:1", "r:2", tmp_path, tmp_path, {}, engine="vllm")
        made = LocalActuator(
            table,
            place,
            clock=SystemClock(),
            profile_of=known,
            learn=partial(learn, known, planner),
        )
        order = order_of("h100-tp4", version=1)
        first = await made.provision(order)
        assert first.state == "running"
        # A later leader gives the order again, by another policy: it is the same worker.
        again = replace(order, scale_decision_id="d-2", policy_version=2)
        assert (await made.provision(again)).pid == first.pid
        with pytest.raises(NotFound, match="nobody's"):
            await made.provision(order_of("nobody's", worker_id="p-2"))
        await made.release_all(grace_s=0.0, reason="test")
