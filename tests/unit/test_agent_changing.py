"""A standby that is told to serve, and a worker that is told to serve the other stage."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import LostLease
from readyplane.core.worker import Lease, Role, WorkerOffer
from readyplane.ports import Directive, GateVerdict
from readyplane_agent import life as life_module
from readyplane_agent.engines.port import GenerateResult
from readyplane_agent.lifecycle import ExitCode, State
from tests.unit.agent_twins import TwinRouter
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


class GivingWords(TwinRouter):
    """Gives a standby the word to serve; who says that he was told is told on, as the router does.

    Attributes:
        told_epoch: of the lease whose holder is to serve now; anybody else stands by.
    """

    told_epoch = 0

    async def register(self, offer: WorkerOffer) -> Lease:
        lease = await super().register(offer)
        if offer.told_left_s is not None:
            self.told_epoch = lease.epoch
        return lease

    async def admit(self, *args: Any, **kwargs: Any) -> GateVerdict:
        self.standby = self.epoch != self.told_epoch
        return await super().admit(*args, **kwargs)


def giving_words(w: World) -> GivingWords:
    w.router = router = GivingWords()
    w.life = w._life("w1-abc")
    return router


async def test_the_word_to_serve_outlives_the_lease_that_is_lost_while_it_is_followed(
    tmp_path: Path,
) -> None:
    """The router comes back empty while the canary is asked: it is told what was told before."""
    async with living(tmp_path, standby=True) as w:
        router = giving_words(w)
        running = await standing_by(w)
        asked, answer = asyncio.Event(), asyncio.Event()
        generate = w.engine.generate

        async def slow(*args: Any, **kwargs: Any) -> GenerateResult:
            asked.set()
            await answer.wait()
            return await generate(*args, **kwargs)

        w.engine.generate = slow  # type: ignore[method-assign]
        router.told_epoch, router.directives = 1, [ACTIVATE]
        await until(lambda: asked.is_set() and w.life.state is State.ACTIVATING)
        router.lease, router.directives, router.told_epoch = None, [], 0
        await until(lambda: len(router.offers) == 2)
        again = router.offers[1]
        assert again.standby and again.told_reason == "a burst"
        assert again.told_left_s is not None and 0 < again.told_left_s <= 30.0
        assert router.epoch == 2
        await until(lambda: w.life.state is State.REJOINING)
        answer.set()
        await until(lambda: w.life.state is State.READY or running.done())
        assert w.life.state is State.READY, w.life.trace.failure
        assert w.life.ready_s is not None and w.life.session.epoch == 2
        assert len(router.admitted) == 1, "and once only"
        router.lease = None
        await until(lambda: len(router.offers) == 3)
        assert router.offers[2].told_left_s is None and not router.offers[2].standby


async def test_a_word_that_has_run_out_is_not_told_on(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True) as w:
        router = giving_words(w)
        await standing_by(w)
        steps = len(router.steps)
        router.say(Directive("activate", 0.2, "a burst"))
        router.directives = []
        await until(lambda: len(router.steps) > steps and w.life.state is State.STANDBY)
        await asyncio.sleep(0.25)
        router.lease = None
        await until(lambda: len(router.offers) == 2)
        assert router.offers[1].standby and router.offers[1].told_left_s is None
        await until(lambda: w.life.state is State.STANDBY)
        assert router.admitted == [] and w.life.ready_s is None


async def test_a_word_that_comes_while_it_loads_outlives_the_lease(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True) as w:
        router = giving_words(w)
        loaded, wait_ready = asyncio.Event(), w.engine.wait_ready

        async def slow(**limits: Any) -> None:
            await loaded.wait()
            await wait_ready(**limits)

        w.engine.wait_ready = slow  # type: ignore[method-assign]
        running = begin(w)
        await until(lambda: w.life.state is State.STARTING or running.done())
        router.say(ACTIVATE)
        router.lease, router.directives = None, []
        await until(lambda: len(router.offers) == 2)
        assert router.offers[1].told_left_s is not None
        loaded.set()
        await until(lambda: w.life.state is State.READY or running.done())
        assert w.life.state is State.READY, w.life.trace.failure


async def test_an_activation_under_a_lost_lease_ends_with_it(tmp_path: Path) -> None:
    """It would hand in what was asked under the lost one, and its refusal would end the worker."""
    async with living(tmp_path, standby=True) as w:
        router = giving_words(w)
        running = await standing_by(w)
        admit, first = router.admit, asyncio.Event()

        async def lost(*args: Any, **kwargs: Any) -> GateVerdict:
            if not first.is_set():  # the router comes back empty as it is asked
                first.set()
                router.lease, router.directives, router.told_epoch = None, [], 0
            return await admit(*args, **kwargs)

        router.admit = lost  # type: ignore[method-assign]
        steps = len(router.steps)
        router.told_epoch, router.directives = 1, [ACTIVATE]
        await until(lambda: w.life.state is State.READY or running.done())
        assert w.life.state is State.READY, w.life.trace.failure
        under_the_next = router.steps[steps + 1 :]
        assert under_the_next == ["connected", "placed", "canary_passed"], "proved whole, once"
        assert len(router.admitted) == 1
        await asyncio.sleep(0.1)
        assert not running.done()
