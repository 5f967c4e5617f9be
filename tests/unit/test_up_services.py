"""`up`: services are started again within a bound in time, and an end that is asked for orders nothing."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from readyplane.core.errors import Refused
from readyplane_lab.up.run import _ending
from readyplane_lab.up.services import RESTART_WINDOW_S, RESTARTS_MAX, Services, may_start_again
from readyplane_lab.up.stack import Stack
from tests.unit.test_up_actuator import ScriptActuator, actuator, order

__all__ = ["actuator"]


class HandClock:
    """Time that passes when somebody sleeps, or the test says so."""

    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


class Table:
    """Processes that are up at once."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.failing: list[int] = []  # codes with which the next starts end before they are ready
        self.on_exit: Any = None
        self._code: int | None = None

    async def spawn(self, name: str, *_: Any) -> int:
        self.started.append(name)
        self._code = self.failing.pop(0) if self.failing else None
        if self._code is None:
            (self.run_dir / f"{name}.ready").write_text('{"pid": 1}')
        else:
            self.on_exit(name, self._code)
        return 1

    def returncode(self, _name: str) -> int | None:
        return self._code

    def log_tail(self, _name: str) -> str:
        return "the end of its log"

    async def stop(self, name: str, *, grace_s: float) -> None:
        self.stopped.append(name)


def services(tmp_path: Path) -> tuple[Services, Table, HandClock, list[str]]:
    table, clock, gave_up = Table(tmp_path), HandClock(), list[str]()
    made = Services(
        cast("Any", table),
        run_dir=tmp_path,
        logs_dir=tmp_path,
        environment={},
        clock=cast("Any", clock),
        gave_up=gave_up.append,
    )
    made.plan("router", http_port=1)
    return made, table, clock, gave_up


async def ended(made: Services, code: int = 1) -> None:
    made.exited("router", code)
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("before", "now_s", "may"),
    [
        ([], 0.0, True),
        ([0.0, 1.0, 2.0, 3.0], 4.0, True),
        ([0.0, 1.0, 2.0, 3.0, 4.0], 5.0, False),
        ([0.0, 1.0, 2.0, 3.0, 4.0], RESTART_WINDOW_S - 0.1, False),
        ([0.0, 1.0, 2.0, 3.0, 4.0], RESTART_WINDOW_S, True),
    ],
)
def test_starts_count_within_a_window(before: list[float], now_s: float, may: bool) -> None:
    assert may_start_again(deque(before), now_s) is may


async def test_a_service_that_ends_now_and_then_is_kept(tmp_path: Path) -> None:
    made, table, clock, gave_up = services(tmp_path)
    for _ in range(4 * RESTARTS_MAX):
        await ended(made)
        clock.now_s += RESTART_WINDOW_S / (RESTARTS_MAX - 1)
    assert not gave_up and len(table.started) == 4 * RESTARTS_MAX
    assert made.restarts == {"router": 4 * RESTARTS_MAX}, "all are told in the summary"


async def test_a_service_that_ends_again_and_again_is_given_up(tmp_path: Path) -> None:
    made, table, clock, gave_up = services(tmp_path)
    begun_s = clock.now_s
    for _ in range(RESTARTS_MAX):
        await ended(made)
        clock.now_s += 1.0
    assert not gave_up and len(table.started) == RESTARTS_MAX
    await ended(made, 7)
    assert len(table.started) == RESTARTS_MAX
    (said,) = gave_up
    assert said == f"router ended 6 times in {clock.now_s - begun_s:.0f} s, last with 7"


async def test_a_start_again_that_fails_is_tried_again(tmp_path: Path) -> None:
    """The planner and its database were killed together: the database takes longer to come back."""
    made, table, _clock, gave_up = services(tmp_path)
    table.on_exit, table.failing = made.exited, [1, 1]
    await ended(made, -9)
    assert (table.started, gave_up) == (["router"] * 3, []), "each failed start is told once"
    assert made.restarts == {"router": 3}


async def test_starts_again_that_all_fail_are_bounded(tmp_path: Path) -> None:
    made, table, _clock, gave_up = services(tmp_path)
    table.on_exit, table.failing = made.exited, [1] * 9
    await ended(made, -9)
    assert len(table.started) == RESTARTS_MAX
    (said,) = gave_up
    assert "service router ended with code 1" in said and "the end of its log" in said


async def test_a_start_again_that_refuses_its_settings_is_the_last(tmp_path: Path) -> None:
    made, table, _clock, gave_up = services(tmp_path)
    table.on_exit, table.failing = made.exited, [2]
    await ended(made, -9)
    assert len(table.started) == 1 and "refused its settings" in gave_up[0]


async def test_a_service_waits_for_the_stores_that_come_back(tmp_path: Path) -> None:
    made, table, _clock, _gave_up = services(tmp_path)
    whole = asyncio.Event()
    made._stores_whole = cast("Any", whole.wait)
    await ended(made, -9)
    assert table.started == []
    whole.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert table.started == ["router"]


async def test_a_service_that_was_stopped_stays_so(tmp_path: Path) -> None:
    made, table, _clock, gave_up = services(tmp_path)
    await made.stop("router")
    await ended(made)
    assert (table.started, gave_up) == ([], [])


async def test_nothing_is_ordered_once_the_end_is_asked_for(
    actuator: ScriptActuator, tmp_path: Path
) -> None:
    """Open requests go on for a while; a planner that saw them to their end would grow the fleet."""
    made, table, _clock, _gave_up = services(tmp_path)
    made.plan("planner", http_port=2)
    told: list[str] = []

    async def look() -> None:
        told.append("look")
        with pytest.raises(Refused):
            await actuator.provision(order("p-9"))

    none = cast("Any", None)
    stack = Stack(none, none, none, none, made, actuator, none, none, none)
    stop = asyncio.Event()
    traffic = SimpleNamespace(stop=lambda: told.append("no more requests"))
    observer = SimpleNamespace(look=look)
    ending = asyncio.create_task(_ending(stack, cast("Any", traffic), cast("Any", observer), stop))
    await actuator.provision(order("p-1"))
    await asyncio.sleep(0)
    assert told == []
    stop.set()
    await asyncio.wait_for(ending, 5.0)
    assert told == ["no more requests", "look"] and table.stopped == ["planner"]
    assert [i.state for i in await actuator.list_instances()] == ["running"], (
        "who serves, serves on"
    )
