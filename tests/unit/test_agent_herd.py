"""No herd at the store (R8.4): on a cold start a few read from it, and the others behind them."""

import asyncio
import threading

import pytest

from readyplane_agent import loader as loader_module
from readyplane_agent.source_use import Fetched
from tests.unit.agent_twins import artifact, serving
from tests.unit.herd_world import Starter, Turns, given, registry_of, starters


def tiers(fetched: Fetched) -> set[str]:
    return {use.source_id.partition(":")[0] for use in fetched.uses if use.bytes_read}


async def test_of_eight_that_start_at_once_few_read_from_the_store() -> None:
    art = artifact(floats=200_000)
    with serving(art.files, Turns(0.01)) as store:
        registry = await registry_of(art, store.url)
        async with starters(8, art, registry) as made:
            found = await asyncio.gather(*(each.run() for each in made))
            assert all(each.whole for each in made)
        ratio = given(store) / art.manifest.size_bytes
    assert ratio <= 2.0
    assert sum("storage" in tiers(each) for each in found) <= 2


async def test_an_artifact_of_one_chunk_reaches_all_without_a_herd() -> None:
    """Nobody can pass a part of it on: they wait for the one that has it, or find it at the store."""
    art = artifact(shards=1, floats=2000)
    files = len(art.manifest.files)
    turns = Turns(0.2)
    with serving(art.files, turns) as store:
        registry = await registry_of(art, store.url)
        async with starters(8, art, registry) as made:
            await asyncio.gather(*(each.run() for each in made))
            assert all(each.whole for each in made)
        assert len(store.asked) <= 5 * files, "not each of them for itself"


async def test_when_the_first_reader_dies_the_next_takes_its_place() -> None:
    art = artifact(floats=200_000)
    with serving(art.files, Turns(0.03)) as store:
        registry = await registry_of(art, store.url)
        async with starters(4, art, registry) as made:
            first = asyncio.create_task(made[0].run())
            while not any(made[0].load.fetched.uses):
                await asyncio.sleep(0.01)
            others = [asyncio.create_task(each.run()) for each in made[1:]]
            while made[0].arena.progress.count(2) < 6:
                await asyncio.sleep(0.01)
            made[0].load.stop()
            await made[0].server.stop()
            await registry.withdraw_source("peer:w0:w0-x")
            await asyncio.wait([first])
            found = await asyncio.gather(*others)
            assert first.exception() is not None
            assert all(each.whole for each in made[1:])
        assert given(store) <= 2.0 * art.manifest.size_bytes
    assert any("storage" in tiers(each) for each in found)


async def test_when_the_first_reader_stalls_the_next_takes_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store answers the first of them nothing, and the others at once."""
    monkeypatch.setattr("readyplane_agent.fanout.STALL_S", 0.3)
    monkeypatch.setattr(loader_module, "STORE_PATIENCE_S", 0.6)
    art, hold = artifact(floats=100_000), threading.Event()

    def spoil(path: str, start: int, count: int, data: bytes) -> None:
        if count <= 4:  # its connections
            hold.wait(20)

    with serving(art.files, spoil) as store:
        registry = await registry_of(art, store.url)
        async with starters(4, art, registry) as made:
            first = asyncio.create_task(made[0].run())
            while len(store.asked) < 4:
                await asyncio.sleep(0.01)
            await asyncio.gather(*(each.run() for each in made[1:]))
            assert all(each.whole for each in made[1:])
            hold.set()
            await first
        assert given(store) <= 2.2 * art.manifest.size_bytes, "the stalled one, and one more"


async def test_nobody_starves_where_nobody_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """No chain is possible and the store has two places: they take turns, beyond any count of tries."""
    monkeypatch.setattr(loader_module, "ROUND_WAIT_S", 0.01)
    art, turns = artifact(shards=1, floats=30_000), Turns(0.1)
    with serving(art.files, turns) as store:
        registry = await registry_of(art, store.url, places=2)
        async with starters(8, art, registry, gives=False) as made:
            await asyncio.gather(*(each.run() for each in made))
            assert all(each.whole for each in made)
        assert turns.most <= 2 * 4, "two readers with four connections each"
        assert given(store) == 8 * art.manifest.size_bytes


async def test_waiting_for_a_place_ends_with_the_limit_of_the_load() -> None:
    art = artifact(shards=1, floats=2000)
    with serving(art.files) as store:
        registry = await registry_of(art, store.url, places=1)
        plan = await registry.plan_fetch(
            art.manifest.digest, worker_id="x", incarnation="x", node="n"
        )
        await registry.acquire_transfer(
            plan.sources[-1].source.source_id,
            art.manifest.digest,
            worker_id="x",
            incarnation="x",
            request_id="1",
        )
        each = Starter("w1", art, registry)
        await each.begin()
        each.load._limit_s = 0.3
        with pytest.raises(Exception, match="reader places of source"):
            await each.run()
        await each.end()
        assert not store.asked
