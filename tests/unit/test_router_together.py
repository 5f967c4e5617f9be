"""Several routers over one store: whoever is asked tells of the requests of all."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from readyplane.core.work import EventKind
from readyplane.core.worker import Role
from readyplane.ports import RouterSignals
from readyplane_router.metrics import RouterCollector
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore
from readyplane_router.together import unpack
from tests.router_faults import FaultyStore
from tests.router_world import MODEL, World, events, on_virtual_time, shape

P, D = Role.PREFILL, Role.DECODE


async def fleet(world: World, router: RouterService) -> None:
    await world.worker(router, "p0", P)
    await world.worker(router, "d0", D)


async def serve(router: RouterService, name: str, **more: Any) -> None:
    pair = await router.route(shape(name, first=1_000 * int(name[1:]), **more))
    await router.complete(
        [
            *events(pair, EventKind.PREFILL_DONE),
            *events(pair, EventKind.FIRST_TOKEN, ttft_s=0.5),
            *events(pair, EventKind.FINISHED, tpot_s=0.02, attained=True),
        ]
    )


def missing(router: RouterService) -> float | None:
    registry = CollectorRegistry()
    registry.register(RouterCollector(router))
    return registry.get_sample_value("readyplane_router_signals_missing")


def test_requests_routed_at_one_are_told_by_the_other() -> None:
    async def main(world: World) -> None:
        a = await world.router()
        await fleet(world, a)
        await serve(a, "a0")
        await world.clock.sleep(2.0)
        b = await world.router()
        await world.clock.sleep(3.0)
        before = (await a.signals()).models[MODEL]
        assert before.arrivals_total == 1
        for n in range(3):
            await serve(b, f"b{n + 1}", tenant="acme", priority=4)
        await b.route(shape("b9"))
        await world.clock.sleep(2.5)
        found = (await a.signals(MODEL)).models[MODEL]
        assert (found.arrivals_total, found.finished_total, found.attained_total) == (5, 4, 4)
        assert found.prefilling_requests + found.decoding_requests == 1
        assert found.ttft_actual.count == 4 and found.ttft_actual.p99_s == pytest.approx(0.5)
        assert [c.client for c in found.clients] == ["acme"]
        assert {p.priority: p.arrivals_total for p in found.priorities} == {4: 3, 0: 2}
        assert sum(g.finished_total for g in found.generations) == 4
        assert sum(map(sum, found.length_counts)) == pytest.approx(4.0)
        # The newer one's own life: what was counted before it began is not in it.
        assert (await b.signals(MODEL)).models[MODEL].arrivals_total == 4
        assert not (await a.signals()).fleet.degraded and missing(a) == 0

    on_virtual_time(main, shared=True)


def test_a_router_that_ends_keeps_its_counts_and_loses_its_gauges() -> None:
    async def main(world: World) -> None:
        a = await world.router()
        await fleet(world, a)
        b = await world.router()
        await world.clock.sleep(3.0)
        await b.route(shape("b8"))
        await world.clock.sleep(2.5)
        world._tasks.pop().cancel()  # d0's renewals go on; the newest task is b's housekeeping
        told = (await a.signals()).models[MODEL]
        assert told.arrivals_total == 1 and told.prefilling_requests == 1
        await world.clock.sleep(5.0)
        silent = await a.signals()
        assert "signals of 1 of 2 routers are not heard: router-2" in silent.fleet.degraded
        assert missing(a) == silent.routers_missing == 1, (
            "it may live and have work: unknown, not idle"
        )
        await world.clock.sleep(10.0)
        gone = await a.signals()
        assert gone.models[MODEL].arrivals_total == 1
        assert gone.models[MODEL].prefilling_requests == 0
        assert not gone.fleet.degraded and missing(a) == 0

    on_virtual_time(main, shared=True)


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.9])
def test_a_router_that_ends_in_order_is_missed_by_nobody(after_s: float) -> None:
    """Killed it would be: it may live and have work. Its last counts are told, and then it is gone."""

    async def main(world: World) -> None:
        a = await world.router()
        await fleet(world, a)
        b = await world.router()
        await world.clock.sleep(3.0 + after_s)
        await serve(b, "b1")
        world._tasks.pop().cancel()  # b's housekeeping
        await b.aclose()
        counted = []
        for _ in range(60):
            told = await a.signals()
            assert told.routers_missing == 0 and not told.fleet.degraded
            counted.append(told.models[MODEL].arrivals_total if MODEL in told.models else 0)
            await world.clock.sleep(0.25)
        assert counted == sorted(counted) and counted[-1] == 1, "and nothing of it is lost"
        assert a.link.routers == 1

    on_virtual_time(main, shared=True)


def test_a_router_that_follows_one_that_ended_is_alone_at_once() -> None:
    async def main(world: World) -> None:
        a = await world.router()
        await world.clock.sleep(2.0)
        world._tasks.pop().cancel()
        await a.aclose()
        await a.tick()  # one that was under way, or comes late, does not bring it back
        b = await world.router()
        await world.clock.sleep(1.5)
        assert b.link.routers == 1 and (await b.signals()).routers_missing == 0

    on_virtual_time(main, shared=True)


def test_an_end_without_a_store_is_no_failure() -> None:
    async def main(world: World) -> None:
        store = FaultyStore(world.clock)
        a = await world.router(store)
        await world.router(store)
        await world.clock.sleep(2.0)
        store.away = True
        await a.aclose()

    on_virtual_time(main, shared=True)


def test_a_router_that_tells_nothing_or_in_another_form_is_missing() -> None:
    async def main(world: World) -> None:
        a = await world.router()
        await fleet(world, a)
        for word in (b"", b"\xff not ours", b"\x93\x07\xcb" + b"\x00" * 8 + b"\x90"):
            await world.store.attend("older", ttl_s=30.0)
            if word:
                await world.store.put_signals("older", word, ttl_s=30.0)
            await world.clock.sleep(2.5)
            assert "not heard: older" in (await a.signals()).fleet.degraded
            assert unpack(word) is None

    on_virtual_time(main, shared=True)


def test_while_the_store_is_away_the_others_are_missing_and_nothing_goes_back() -> None:
    async def main(world: World) -> None:
        store = FaultyStore(world.clock)
        a = await world.router(store)
        await fleet(world, a)
        b = await world.router(store)
        await world.clock.sleep(3.0)
        await serve(b, "b1")
        await world.clock.sleep(2.5)
        counted = [(await a.signals()).models[MODEL].arrivals_total]
        store.away = True
        await world.clock.sleep(5.0)
        away = await a.signals()
        assert "store is away" in away.fleet.degraded and "1 of 2 routers" in away.fleet.degraded
        await serve(b, "b2")
        store.away = False
        for _ in range(20):
            await world.clock.sleep(1.0)
            counted.append((await a.signals()).models[MODEL].arrivals_total)
        assert counted == sorted(counted) and (counted[0], counted[-1]) == (1, 2)

    on_virtual_time(main, shared=True)


class Watched(MemoryStore):
    """Refuses what one router alone has no need of."""

    async def put_signals(self, router_id: str, packed: bytes, *, ttl_s: float) -> None:
        raise AssertionError("nobody is there to read it")


@pytest.mark.parametrize("shared", [False, True])
def test_alone_nothing_is_written_and_the_answer_is_its_own(shared: bool) -> None:
    async def main(world: World) -> None:
        a = await world.router(Watched(world.clock, shared=shared))
        await fleet(world, a)
        await serve(a, "a0")
        await world.clock.sleep(5.0)
        found: RouterSignals = await a.signals()
        assert found.models[MODEL].arrivals_total == 1 and not found.fleet.degraded
        assert missing(a) == 0

    on_virtual_time(main)
