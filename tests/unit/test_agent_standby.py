"""Standbys that hold an engine process only, and standbys that sleep, in whole lives."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.startup import SegmentName
from readyplane.core.worker import Holds
from readyplane.ports import Directive, RenewalAnswer
from readyplane_agent import life as life_module
from readyplane_agent import waiting as waiting_module
from readyplane_agent.engines.modelled.group import ModelledGroup
from readyplane_agent.engines.offers import SleepDepth
from readyplane_agent.lifecycle import ExitCode, State
from tests.unit.agent_world import World, begin, living, until
from tests.unit.staged_twin import StagedTwin

ACTIVATE = Directive("activate", 30.0, "a burst")


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINE_WATCH_S", "DRAIN_NEWS_S", "STANDBY_NEWS_S"):
        monkeypatch.setattr(life_module, name, 0.05)


def with_twin(w: World) -> StagedTwin:
    w.engine = engine = StagedTwin()
    w.life = w._life("w1-abc")
    return engine


def told(w: World) -> list[Holds | None]:
    return [r.stands_by for r in w.router.renewals]


async def bare(w: World) -> tuple[StagedTwin, asyncio.Task[ExitCode]]:
    engine = with_twin(w)
    running = begin(w)
    await until(lambda: Holds.PROCESS in told(w) or running.done())
    assert w.life.state is State.BARE, w.life.trace.failure
    return engine, running


async def test_a_bare_standby_loads_when_it_is_told_and_its_start_is_what_came_after(
    tmp_path: Path,
) -> None:
    async with living(tmp_path, standby=True, holds=Holds.PROCESS) as w:
        engine, running = await bare(w)
        offer = w.router.offers[0]
        assert offer.standby and offer.holds is Holds.PROCESS
        assert w.router.steps == [] and w.life.started.arena is None and engine.spec is None
        assert engine.bare is not None and engine.bare.engine_id == "w1-abc"
        await asyncio.sleep(0.3)
        waited_s = w.life._clock.monotonic_s()
        w.router.directives = [ACTIVATE]
        await until(lambda: w.life.state is State.READY or running.done())
        w.router.directives = []
        assert w.life.state is State.READY, w.life.trace.failure
        assert engine.spec is not None and engine.calls.count("stand_by") == 1
        assert w.life.ready_s is not None and told(w)[-1] is None
        trace = w.life.trace
        assert trace.begin_s >= waited_s and trace.ordered_at_s is None
        imports = [s for s in trace.segments() if s.name is SegmentName.RUNTIME_IMPORT]
        assert sum(s.saved_s for s in imports) == pytest.approx(2.5, abs=0.01)
        assert "readyplane_agent_start_saved_seconds" in w.life.metrics()


@pytest.mark.parametrize("holds", [Holds.ASLEEP, Holds.PROCESS])
async def test_a_group_that_is_to_wait_as_it_cannot_loads_nothing(
    tmp_path: Path, holds: Holds
) -> None:
    """Every such start would meet it: it is told as a dead end, with where it ended."""
    async with living(tmp_path, standby=True, holds=holds, tp=2) as w:
        w.engine = ModelledGroup()  # type: ignore[assignment]
        w.life = w._life("w1-abc")
        async with asyncio.timeout(8.0):
            assert await begin(w) is ExitCode.START_FAILED
        assert "engine modelled in several ranks is not supported" in w.life.trace.failure
        assert w.life.started.arena is None and w.life.started.manifest is None
        told = w.router.renewals[-1].progress
        assert told is not None and (told.dead_end, told.failure != "") == ("not_offered", True)
        assert [s.name for s in told.segments if s.end_s is None] == [SegmentName.RUNTIME_IMPORT]


async def test_the_word_to_serve_is_heard_without_a_renewal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it says so at once, nobody waits for the next renewal, nor for one after a quiet one."""
    monkeypatch.setattr(life_module, "STANDBY_NEWS_S", 1e6)
    async with living(tmp_path, standby=True, holds=Holds.PROCESS) as w:
        w.router.ttl_s = 1e6
        _, running = await bare(w)
        renewals = len(w.router.renewals)
        w.router.say(ACTIVATE)
        assert w.life._waiting.told.is_set() and len(w.router.renewals) == renewals
        await until(lambda: w.life.state is State.READY or running.done())
        assert w.life.state is State.READY, w.life.trace.failure


async def test_a_word_for_an_earlier_lease_is_not_obeyed(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True, holds=Holds.PROCESS) as w:
        await bare(w)
        assert w.router.lease is not None and w.router.told is not None
        past = replace(w.router.lease, epoch=w.router.lease.epoch - 1)
        w.router.told(RenewalAnswer(past, (ACTIVATE,)))
        assert not w.life._waiting.told.is_set()


@pytest.mark.parametrize("kind", ["drain", "leave", "stop"])
async def test_a_bare_standby_that_is_not_wanted_leaves(tmp_path: Path, kind: str) -> None:
    async with living(tmp_path, standby=True, holds=Holds.PROCESS) as w:
        engine, running = await bare(w)
        w.router.directives = [Directive(kind, 30.0, "too many")]
        assert await asyncio.wait_for(running, 5) is ExitCode.LEFT
        assert engine.stopped == 1 and engine.spec is None


async def test_a_bare_standby_whose_process_dies_ends_with_it(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True, holds=Holds.PROCESS) as w:
        engine, running = await bare(w)
        engine.returncode = -9
        assert await asyncio.wait_for(running, 5) is ExitCode.START_FAILED
        assert "ended with -9" in w.life.trace.failure


async def test_a_bare_standby_whose_process_is_held_still_is_none_unless_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting_module, "STOPPED_S_MAX", 1.0)
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        try:
            async with living(tmp_path, standby=True, holds=Holds.PROCESS) as w:
                engine = with_twin(w)
                engine.pid = process.pid
                running = begin(w)
                await until(lambda: w.life.state is State.BARE or running.done())
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.4)
                process.send_signal(signal.SIGCONT)
                await asyncio.sleep(1.0)
                assert w.life.state is State.BARE, "it went on in time"
                process.send_signal(signal.SIGSTOP)
                assert await asyncio.wait_for(running, 5) is ExitCode.START_FAILED
                why = f"process {process.pid} was stopped by a signal while it stood by"
                assert why in w.life.trace.failure
        finally:
            process.kill()


async def test_a_router_that_came_back_empty_gets_a_bare_standby(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True, holds=Holds.PROCESS) as w:
        _engine, running = await bare(w)
        w.router.lease = None
        await until(lambda: len(w.router.offers) == 2)
        count = len(w.router.renewals)
        await until(lambda: len(w.router.renewals) > count)
        assert w.life.state is State.BARE and told(w)[-1] is Holds.PROCESS and not running.done()


async def test_told_before_it_waits_a_bare_standby_waits_no_longer(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True, holds=Holds.PROCESS) as w:
        with_twin(w)
        w.router.directives = [ACTIVATE]
        running = begin(w)
        await until(lambda: w.life.state is State.READY or running.done())
        assert w.life.state is State.READY, w.life.trace.failure


@pytest.mark.parametrize("holds", [Holds.PROCESS, Holds.ASLEEP])
async def test_an_engine_that_cannot_wait_so_fails_before_it_loads(
    tmp_path: Path, holds: Holds
) -> None:
    async with living(tmp_path, standby=True, holds=holds) as w:
        assert await asyncio.wait_for(begin(w), 5) is ExitCode.START_FAILED
        assert "is not supported" in w.life.trace.failure and w.engine.spec is None


async def asleep(w: World, **faults: Any) -> tuple[StagedTwin, asyncio.Task[ExitCode]]:
    engine = with_twin(w)
    for name, value in faults.items():
        setattr(engine, name, value)
    w.router.standby = True
    running = begin(w)
    await until(lambda: w.life.state is State.STANDBY or running.done())
    await until(lambda: bool(told(w)) and told(w)[-1] is not None)
    return engine, running


async def test_a_standby_sleeps_after_the_gate_and_is_proved_whole_when_it_wakes(
    tmp_path: Path,
) -> None:
    async with living(tmp_path, standby=True, holds=Holds.ASLEEP) as w:
        engine, running = await asleep(w)
        await until(lambda: told(w)[-1] is Holds.ASLEEP)
        assert engine.depth is SleepDepth.WEIGHTS_IN_HOST
        steps = len(w.router.steps)
        # A router that came back empty has it proved, and it sleeps again.
        w.router.lease = None
        await until(lambda: len(w.router.offers) == 2 and len(w.router.steps) > steps)
        await until(lambda: w.life.state is State.STANDBY and engine.depth is not None)
        assert engine.calls.count("wake") == 1
        w.router.standby, w.router.directives = False, [ACTIVATE]
        await until(lambda: w.life.state is State.READY or running.done())
        w.router.directives = []
        assert w.life.state is State.READY, w.life.trace.failure
        assert engine.calls.count("wake") == 2
        ((_, checks),) = w.router.admitted
        assert len(checks) >= 10, "the whole proof, not the canary alone"


async def test_b129_a_standby_that_wakes_without_its_weights_never_serves(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True, holds=Holds.ASLEEP) as w:
        engine, running = await asleep(w)
        await until(lambda: told(w)[-1] is Holds.ASLEEP)
        engine.weights_lost = True
        w.router.standby, w.router.directives = False, [ACTIVATE]
        assert await asyncio.wait_for(running, 8) is ExitCode.START_FAILED
        assert "weights_missing" in w.life.trace.failure and w.router.admitted == []


async def test_an_engine_that_is_busy_stands_by_awake_and_says_so(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True, holds=Holds.ASLEEP) as w:
        engine, running = await asleep(w, busy=True)
        assert told(w)[-1] is Holds.WEIGHTS and engine.depth is None and not running.done()


async def test_the_word_that_comes_while_it_falls_asleep_finds_it_awake_in_the_end(
    tmp_path: Path,
) -> None:
    async with living(tmp_path, standby=True, holds=Holds.ASLEEP) as w:
        engine, running = await asleep(w, sleep_s=0.4)
        await until(lambda: "sleep" in engine.calls)  # which takes a while
        w.router.standby, w.router.directives = False, [ACTIVATE]
        await until(lambda: w.life.state is State.READY or running.done())
        w.router.directives = []
        assert w.life.state is State.READY, w.life.trace.failure
        await asyncio.sleep(0.5)
        assert engine.depth is None and engine.calls.count("wake") == engine.calls.count("sleep")
