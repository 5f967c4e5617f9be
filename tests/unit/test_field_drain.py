"""Field reports of drains and scale-downs, each by its number."""

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from readyplane import profiles
from readyplane.core.work import EventKind, RequestEvent
from readyplane.core.worker import Role, WorkerState
from readyplane.ports import Pair
from readyplane_agent import life as life_module
from readyplane_agent.engines.modelled.core import EngineModel
from readyplane_agent.engines.modelled.core_events import EngineRequest, KvExpired, RequestMode
from readyplane_agent.lifecycle import ExitCode
from readyplane_planner.decide import victims
from readyplane_planner.signals import WorkerView
from readyplane_router.service import RouterService
from tests.router_world import FakeWorker, World, events, on_virtual_time, shape
from tests.unit import gateway_world as gw
from tests.unit.agent_world import living, ready, until

PROFILE = profiles.load("h200-llama8b-fp8")


# --------------------------------------------------------------------------- B60: open transfers


def test_b60_a_prefill_engine_is_not_idle_before_its_readers_have_read() -> None:
    """Three transfers are open: it lives until each is acknowledged, or its hold has run out."""
    model = EngineModel(PROFILE, block_size=16, kv_blocks=256, hold_s=30.0)
    for name in ("a", "b", "c"):
        model.submit(EngineRequest(name, 64, 1, mode=RequestMode.REMOTE_DECODE), 0.0)
    model.advance(5.0)
    assert model.stats().running == 0  # nothing is left to compute
    assert model.stats().held == 3
    assert not model.is_idle()
    assert model.kv_pulled("a", 6.0)
    assert model.kv_pulled("b", 7.0)
    assert not model.is_idle()
    (expired,) = [e for e in model.advance(60.0) if isinstance(e, KvExpired)]
    assert expired.request_id == "c"
    assert model.is_idle()


def test_b60_the_router_lets_a_prefill_worker_go_only_when_its_kv_was_read() -> None:
    async def story(world: World) -> None:
        router = await world.router()
        p = await world.worker(router, "p", Role.PREFILL, renewing=False)
        await world.worker(router, "d", Role.DECODE)
        pairs = [await router.route(shape(f"r{n}", first=n * 500)) for n in range(3)]
        for pair in pairs:  # the prefills themselves are over
            await router.complete(events(pair, EventKind.PREFILL_DONE))
        await router.drain("p", reason="scale down")

        async def words() -> list[str]:
            return [d.kind for d in (await p.renew(drained=True)).directives]

        for pair in pairs:
            assert await words() == ["drain"]
            await router.complete(events(pair, EventKind.FIRST_TOKEN))  # its KV has been read
        assert await words() == ["leave"]

    on_virtual_time(story)


@pytest.mark.parametrize(
    "says", ["KV load failed: no answer from 10.0.0.1:5600 in 5 s", "NIXL transfer aborted"]
)
def test_b60_a_reader_that_loses_its_source_goes_to_another_prefill_worker(says: str) -> None:
    """The source is to blame, not the reader: the only decode worker serves it in the end."""

    async def story(world: gw.World) -> None:
        decode = world.engine("d1")
        decode.plans.append(gw.Plan(how="500"))
        decode.fails_with = says
        got = await world.ask(stream=True)
        assert got.status == 200
        assert got.text == "t0t1t2t3t4"  # computed anew as a whole, never from half of the KV
        assert got.headers["x-readyplane-decode"] == "d1"
        assert got.headers["x-readyplane-prefill"] == "p2"
        await world.settle()
        (failed,) = [
            e
            for r in world.router.reservations.values()
            for e in r.events
            if e.kind is EventKind.LEG_FAILED
        ]
        assert failed.failed_worker_id == "p1"

    workers = [w for w in gw.FLEET if w.worker_id != "d2"]
    gw.play(story, workers=workers)


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_b60_a_reader_that_says_nothing_is_to_blame_unless_its_source_is_gone(
    stream: bool, gone: bool
) -> None:
    """vLLM says `Internal server error` when KV did not come. Its source does not answer any more."""

    async def story(world: gw.World) -> None:
        decode = world.engine("d1")
        decode.plans.append(gw.Plan(how="500", after_s=0.5))
        decode.fails_with = "Internal server error"
        asked = asyncio.create_task(world.ask(stream=stream))
        await asyncio.sleep(0.3)  # the prefill leg is over
        if gone:
            source = world.engines.pop(world.engine("p1").url)
            world.held.clear()  # its KV goes with it
            for transport in world.http.transports:
                if transport._engine is source:
                    transport.drop()
        got = await asked
        if not gone:  # there is no other reader
            assert got.status == 502
            assert "decode leg on worker d1" in got.error["message"]
            return
        assert got.status == 200
        assert got.headers["x-readyplane-decode"] == "d1"
        assert got.headers["x-readyplane-prefill"] == "p2"

    workers = [w for w in gw.FLEET if w.worker_id != "d2"]
    gw.play(story, workers=workers)


# --------------------------------------------------------------------------- B61: long decodes


async def _long_decode(world: World, router: RouterService) -> tuple[FakeWorker, Pair]:
    await world.worker(router, "p", Role.PREFILL)
    d = await world.worker(router, "d1", Role.DECODE, renewing=False)
    pair = await router.route(shape("long"))
    await router.complete(events(pair, EventKind.PREFILL_DONE, EventKind.FIRST_TOKEN))
    await world.worker(router, "d2", Role.DECODE)
    return d, pair


async def _decodes_for(
    router: RouterService, d: FakeWorker, pair: Pair, seconds: int
) -> list[tuple[str, ...]]:
    """Tokens come, the worker renews; what it is told each time."""
    heard = []
    for second in range(seconds):
        await asyncio.sleep(1.0)
        told = RequestEvent(pair.reservation_id, EventKind.PROGRESS, output_tokens=2 + second)
        await router.complete([told])
        heard.append(tuple(x.kind for x in (await d.renew(drained=False)).directives))
    return heard


def test_b61_two_minutes_of_work_are_waited_for_and_nothing_is_aborted() -> None:
    async def story(world: World) -> None:
        router = await world.router()
        d, pair = await _long_decode(world, router)
        assert (await router.drain("d1", deadline_s=300.0)).state is WorkerState.DRAINING
        heard = await _decodes_for(router, d, pair, 120)
        assert set(heard) == {("drain",)}
        for n in range(3):  # no new work meanwhile
            other = await router.route(shape(f"new{n}"))
            assert other.decode.worker_id == "d2"
            await router.complete(events(other, EventKind.FINISHED))
        assert await router.complete(events(pair, EventKind.FINISHED, output_tokens=122)) == 0
        assert [x.kind for x in (await d.renew(drained=True)).directives] == ["leave"]
        signals = (await router.signals()).models["demo"]
        assert signals.aborted_total == 0
        assert router.members.counts["drain_aborts"] == 0

    on_virtual_time(story)


def test_b61_after_the_deadline_what_is_left_is_aborted_and_counted() -> None:
    async def story(world: World) -> None:
        router = await world.router()
        d, pair = await _long_decode(world, router)
        await router.drain("d1", deadline_s=30.0)
        heard = await _decodes_for(router, d, pair, 40)
        assert heard[20] == ("drain",)
        assert heard[-1] == ("leave",)
        assert router.members.counts["drain_aborts"] == 1

    on_virtual_time(story)


def test_b61_a_stream_that_the_deadline_cuts_ends_with_a_typed_error() -> None:
    """Not a silent end, and not an answer that looks complete: a client may ask again."""

    async def story(world: gw.World) -> None:
        world.engine("d1").plans.append(gw.Plan(tokens=400, every_s=0.1))
        asking = asyncio.ensure_future(world.ask(stream=True))
        await asyncio.sleep(3.0)
        gone = [
            replace(w, state=WorkerState.GONE) if w.worker_id == "d1" else w
            for w in world.router.fleet.workers.values()
        ]
        world.router.set_fleet(gone)
        got = await asking
        assert got.events[-1]["error"]["code"] == "worker_failed"
        assert "the worker has ended" in got.events[-1]["error"]["message"]
        assert "[DONE]" not in got.events

    gw.play(story)


# --------------------------------------------------------------------------- B62: the gap


@pytest.mark.parametrize("how", ["ok", "503", "refuse", "reset"])
def test_b62_requests_in_the_gap_before_the_router_knows_are_served(how: str) -> None:
    """For two seconds at 200 rps the router still sends to a worker that is leaving."""

    async def story(world: gw.World) -> None:
        world.engine("p1").plans.extend(gw.Plan(how=how) for _ in range(300))
        statuses = []

        async def one(number: int) -> None:
            await asyncio.sleep(number / 200)
            got = await world.ask({"model": gw.MODEL, "prompt": [number + 1, 2], "max_tokens": 5})
            statuses.append(got.status)

        asks = [asyncio.ensure_future(one(n)) for n in range(400)]
        await asyncio.sleep(2.0)
        leaves = [
            replace(w, state=WorkerState.DRAINING) if w.worker_id == "p1" else w
            for w in world.router.fleet.workers.values()
        ]
        world.router.set_fleet(leaves)
        await asyncio.gather(*asks)
        assert statuses == [200] * 400
        await world.settle(3)

    gw.play(story)


# --------------------------------------------------------------------------- B65: the order


async def test_b65_sigterm_ends_in_an_order_that_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to the router, its source of weights withdrawn, drained, lease given up, engine stopped,
    exit 0; and a supervisor that repeats itself changes nothing of it.
    """
    monkeypatch.setattr(life_module, "DRAIN_NEWS_S", 0.05)
    order: list[str] = []

    def noting(name: str, work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def noted(*args: Any, **more: Any) -> Any:
            order.append(name)
            return await work(*args, **more)

        return noted

    async with living(tmp_path) as w:
        running = await ready(w)
        for name, owner, method in (
            ("router told", w.router, "drain"),
            ("source withdrawn", w.registry, "withdraw_source"),
            ("lease given up", w.router, "leave"),
            ("engine stopped", w.engine, "stop"),
        ):
            monkeypatch.setattr(owner, method, noting(name, getattr(owner, method)))
        w.engine.idle = False
        asked_s = asyncio.get_running_loop().time()
        w.life.signalled(signal.SIGTERM)
        await until(lambda: "router told" in order)
        assert asyncio.get_running_loop().time() - asked_s < 5.0
        for _ in range(3):
            w.life.signalled(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert not running.done()  # it decodes still
        assert "engine stopped" not in order
        assert "lease given up" not in order
        w.engine.idle = True
        assert await running is ExitCode.LEFT
        assert int(ExitCode.LEFT) == 0
        assert order.count("router told") == 1
        steps = sorted(set(order), key=order.index)
        assert set(steps[:2]) == {"router told", "source withdrawn"}  # both at once
        assert steps[2:] == ["lease given up", "engine stopped"]


# --------------------------------------------------------------------------- B64, B66: whom


def view(name: str, **changes: object) -> WorkerView:
    made = WorkerView(
        name, f"{name}-1", Role.DECODE, WorkerState.READY, "h200", ready_age_s=600.0, kv_usage=0.0
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def chosen(*workers: WorkerView, count: int = 1, min_ready_s: float = 30.0) -> list[str]:
    found = victims.from_ready(workers, count, digest="", min_ready_s=min_ready_s)
    return [w.worker_id for w in found]


def test_b64_what_the_router_has_just_sent_counts_and_not_an_older_report_of_zero() -> None:
    sent = view("sent", active=40, running=0)
    assert chosen(sent, view("idle", active=0, running=12)) == ["idle"]
    assert chosen(sent, view("a", active=1), view("b", active=2), count=3) == ["a", "b"]


def test_b64_a_worker_that_has_just_come_is_no_victim() -> None:
    fresh = view("fresh", ready_age_s=5.0)
    assert chosen(fresh, view("old", active=3), view("busiest", active=9)) == ["old"]
    assert chosen(fresh) == []
    assert chosen(view("unknown", ready_age_s=None)) == []


@pytest.mark.parametrize(
    ("dear", "cheap"),
    [
        ({"active": 2}, {"active": 1}),
        ({"promised_prefill_tokens": 500}, {}),
        ({"kv_usage": 0.6}, {"kv_usage": 0.2}),
        ({"kv_usage": None}, {"kv_usage": 0.2}),  # not known is not empty
        ({"ready_age_s": 900.0}, {"ready_age_s": 100.0}),  # the older cache, and source of weights
    ],
)
def test_b66_the_least_valuable_goes_and_the_record_says_why(
    dear: dict[str, object], cheap: dict[str, object]
) -> None:
    a, b = view("a", **dear), view("b", **cheap)
    assert chosen(a, b) == chosen(b, a) == ["b"]
    shown = victims.shown(b)
    assert f"{b.active} sequences" in shown
    assert "promised tokens" in shown
    assert "of its KV" in shown


def test_b66_equals_are_told_apart_by_their_name() -> None:
    equals = [view(name) for name in ("c", "a", "b")]
    assert chosen(*equals, count=2) == ["a", "b"]
    assert chosen(*reversed(equals), count=2) == ["a", "b"]
