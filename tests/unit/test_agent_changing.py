"""A standby that is told to serve, and a worker that is told to serve the other stage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from readyplane.core.errors import LostLease
from readyplane.core.worker import Role
from readyplane.ports import Directive
from readyplane_agent import life as life_module
from readyplane_agent.lifecycle import ExitCode, State
from tests.unit.agent_world import World, begin, living, ready, until

ACTIVATE = Directive("activate", 30.0, "a burst")
FLIP = Directive("flip", 30.0, "decode is short", Role.DECODE)


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINE_WATCH_S", "DRAIN_NEWS_S", "STANDBY_NEWS_S"):
        monkeypatch.setattr(life_module, name, 0.05)


async def standing_by(w: World) -> asyncio.Task[ExitCode]:
    w.router.standby = True
    running = begin(w)
    await until(lambda: w.life.state is State.STANDBY or running.done())
    assert w.life.state is State.STANDBY, w.life.trace.failure
    return running


async def test_a_standby_waits_proved_and_serves_when_told(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True) as w:
        running = await standing_by(w)
        assert w.router.offers[0].standby and w.life.ready_s is None and w.life.up_s is not None
        await until(lambda: len(w.router.renewals) > 5)
        assert w.router.renewals[-1].load is not None, "it tells of its engine while it waits"
        assert w.life.state is State.STANDBY and w.router.admitted == []
        w.router.standby, w.router.directives = False, [ACTIVATE]
        await until(lambda: w.life.state is State.READY)
        w.router.directives = []
        assert len(w.router.admitted) == 1 and w.life.ready_s is not None
        # What it is from now on does not depend on what it was ordered as.
        w.router.lease = None
        await until(lambda: len(w.router.offers) == 2)
        assert not w.router.offers[1].standby
        await until(lambda: w.life.state is State.READY)
        assert not running.done() and w.engine.stopped == 0


async def test_told_too_late_it_stands_by_again(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True) as w:
        running = await standing_by(w)
        before = len(w.router.steps)
        w.router.directives = [ACTIVATE]  # while the gate would not have it serve any more
        await until(lambda: len(w.router.steps) > before)
        w.router.directives = []
        await until(lambda: w.life.state is State.STANDBY)
        assert w.router.admitted == [] and not running.done()


async def test_a_standby_that_answers_wrongly_by_now_never_serves(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True) as w:
        running = await standing_by(w)
        w.engine.answer_of = lambda _prompt: (9, 9, 9, 2)
        w.router.standby, w.router.directives = False, [ACTIVATE]
        assert await asyncio.wait_for(running, 8) is ExitCode.START_FAILED
        assert w.router.admitted == [] and "could not be activated" in w.life.trace.failure


@pytest.mark.parametrize("kind", ["drain", "leave"])
async def test_a_standby_that_is_not_wanted_leaves_at_once(tmp_path: Path, kind: str) -> None:
    async with living(tmp_path, standby=True) as w:
        running = await standing_by(w)
        w.engine.idle = False
        w.router.directives = [Directive(kind, 30.0, "too many")]
        assert await asyncio.wait_for(running, 5) is ExitCode.LEFT


async def test_a_router_that_came_back_empty_gets_a_standby(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True) as w:
        running = await standing_by(w)
        w.router.lease = None
        await until(lambda: len(w.router.offers) == 2)
        await until(lambda: w.life.state is State.STANDBY)
        assert w.router.offers[1].standby and w.router.admitted == [] and not running.done()


async def test_a_flip_drains_and_comes_back_for_the_other_stage(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        running = await ready(w)
        w.engine.idle = False
        w.router.directives = [FLIP]
        await until(lambda: w.life.state is State.FLIPPING)
        await asyncio.sleep(0.3)
        assert len(w.router.offers) == 1, "work is left: nothing changes yet"
        w.engine.idle = True
        await until(lambda: len(w.router.admitted) == 2)
        w.router.directives = []
        await until(lambda: w.life.state is State.READY)
        first, second = w.router.offers
        assert (first.role, second.role) == (Role.PREFILL, Role.DECODE)
        assert first.incarnation == second.incarnation and w.router.epoch == 2
        assert w.router.left == ["it becomes decode"]
        assert w.engine.stopped == 0 and not running.done()
        assert 'pool="decode"' in w.life.metrics()
        # The same word once more, late: it serves that stage already.
        w.router.directives = [FLIP]
        count = len(w.router.renewals)
        await until(lambda: len(w.router.renewals) > count + 2)
        assert w.life.state is State.READY and len(w.router.offers) == 2


async def test_a_flip_that_the_gate_refuses_ends_the_worker_with_its_reason(
    tmp_path: Path,
) -> None:
    async with living(tmp_path) as w:
        running = await ready(w)
        w.router.refuse = ("kv_connector: no",)
        w.router.directives = [FLIP]
        assert await asyncio.wait_for(running, 8) is ExitCode.ENGINE_DIED
        assert "could not serve decode" in w.life.trace.failure
        assert "kv_connector: no" in w.life.trace.failure


async def test_a_flip_that_the_router_forgot_leaves_the_stage_as_it_was(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        running = await ready(w)
        w.engine.idle = False
        w.router.directives = [FLIP]
        await until(lambda: w.life.state is State.FLIPPING)
        w.router.directives, w.router.lease = [], None
        await until(lambda: w.life.state is State.READY and len(w.router.offers) == 2)
        assert w.router.offers[1].role is Role.PREFILL and not running.done()


async def test_a_lease_lost_just_before_a_change_is_not_changed(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        await ready(w)
        called: list[int] = []
        w.router.lease = None
        w.life.session._changing = None
        change = asyncio.ensure_future(w.life.session.change("why", lambda: called.append(1)))
        await asyncio.sleep(0)
        w.life.session._give_up_change(LostLease("w1", "i", "gone"))
        with pytest.raises(LostLease):
            await change
        assert called == []


async def test_a_drain_comes_before_a_flip(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        running = await ready(w)
        w.engine.idle = False
        w.router.directives = [FLIP]
        await until(lambda: w.life.state is State.FLIPPING)
        w.router.directives = [Directive("drain", 30.0, "it goes")]
        await until(lambda: w.life.state is State.DRAINING)
        w.engine.idle = True
        assert await asyncio.wait_for(running, 5) is ExitCode.LEFT
        assert len(w.router.offers) == 1
