"""The routers' store on a real Redis Cluster and behind a real Sentinel, as on one server."""

import asyncio
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from readyplane.core.errors import Unavailable
from readyplane.core.worker import Role, WorkerState
from readyplane.kit.redis import check_eviction, connect
from readyplane_router.redis import RedisStore
from readyplane_router.seats import ALL_SIDES, Side, Take, Use
from readyplane_router.store import Change, KvEntry, Record, Renew
from tests.contract.test_router_store_machine import StoreMachine
from tests.integration.redis_shapes import cluster, watched
from tests.router_world import offer

LONG_S = 60.0
FAIL_OVER_S_MAX = 90.0


def record(model: str, name: str, epoch: int = 1) -> Record:
    role = Role.PREFILL if name == "p0" else Role.DECODE
    return Record(offer(name, role, model=model), epoch, WorkerState.READY)


async def taken(store: RedisStore, model: str) -> None:
    """Every kind of call once."""
    for name in ("p0", "d0"):
        assert isinstance(await store.grant(record(model, name), ttl_s=LONG_S), Record)
        assert await store.seat(model, name, 1, is_open=True, sequences=1, blocks=9)
    sides = (Side("p0", 1, Use(1, 3)), Side("d0", 1, Use(1, 4)))
    assert not (await store.take(model, Take("r", sides, "pair", LONG_S))).refused
    assert (await store.take(model, Take("s", sides, "pair", LONG_S))).refused
    assert await store.grow(model, "r", 1, 2)
    await store.extend(model, ["r"], ttl_s=LONG_S)
    assert await store.usage(model) == {"p0": Use(1, 3), "d0": Use(1, 6)}
    assert await store.release(model, [("r", ALL_SIDES)]) == 0
    assert await store.sweep(model) == []
    assert await store.renew([Renew(model, "p0", 1, LONG_S)]) == ["ok"]
    await store.append_kv(model, [KvEntry("", "router", "p0", "p0-1", b"x")])
    assert [entry.packed for entry in await store.read_kv(model, "")] == [b"x"]
    await store.put_snapshot(model, "p0", "p0-1", b"y")
    assert await store.snapshot(model, "p0", "p0-1") == b"y"


async def test_a_cluster_holds_each_model_on_one_node(tmp_path: Path) -> None:
    async with cluster(tmp_path) as url:
        client = connect(url)
        await check_eviction(client)
        store = RedisStore(client, call_timeout_s=5.0)
        seen: list[Change] = []

        async def follow() -> None:
            async for change in store.watch():
                seen.append(change)

        following = asyncio.create_task(follow())
        models = [f"model-{number}" for number in range(6)]  # on all three nodes
        for model in models:
            await taken(store, model)
        assert {r.offer.model for r, _ in await store.workers()} == set(models)
        assert await store.attend("one", ttl_s=LONG_S) == 1
        assert await store.attend("two", ttl_s=LONG_S) == 2
        await store.put_signals("two", b"word", ttl_s=LONG_S)
        kept = await store.signals()
        assert kept["one"] is None and kept["two"] is not None and kept["two"][0] == b"word"
        assert [await store.fence("model-0", n) for n in (3, 2)] == [3, 3]
        assert (await store.identity()).count("+") == 2
        assert await store.expire() == []
        async with asyncio.timeout(60.0):
            while Change("model-5", "p0") not in seen:  # told on whichever node, heard here
                await store.put(record("model-5", "p0"))
                await asyncio.sleep(0.05)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await store.aclose()

        class OnCluster(StoreMachine):
            redis_url = url

        await asyncio.to_thread(  # it has a loop of its own
            run_state_machine_as_test,
            OnCluster,
            settings=settings(
                max_examples=4, stateful_step_count=20, suppress_health_check=list(HealthCheck)
            ),
        )


async def test_the_master_behind_a_sentinel_is_followed(tmp_path: Path) -> None:
    """A fail-over is an absence, then another life of the store: it is refilled, like any."""
    async with watched(tmp_path) as (url, servers, master):
        client = connect(url)
        await check_eviction(client)
        store = RedisStore(client, call_timeout_s=2.0)
        first = await store.identity()
        await taken(store, "demo")
        await servers.kill(master)
        absences = 0
        async with asyncio.timeout(FAIL_OVER_S_MAX):
            while True:
                try:
                    if await store.identity() != first:
                        break
                except Unavailable:
                    absences += 1
                await asyncio.sleep(0.1)
        assert absences
        assert await store.restore(record("demo", "p0", 7), ttl_s=LONG_S, vitals=None)
        assert await store.renew([Renew("demo", "p0", 7, LONG_S)]) == ["ok"]
        await store.aclose()
