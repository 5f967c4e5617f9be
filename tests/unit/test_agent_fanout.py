"""Several sources at once, sources that still load, leave or pause: whose chunk comes from where."""

import asyncio
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.errors import Unavailable
from readyplane.ports import Transfer
from readyplane_agent import loader as loader_module
from readyplane_agent import ranges
from readyplane_agent.arena import Arena
from readyplane_agent.chunk_order import (
    COMING,
    MISSING,
    VERIFIED,
    Held,
    begin_at,
    next_chunk,
    own_order,
)
from readyplane_agent.fanout import Fanout
from readyplane_agent.pacing import Foreground
from readyplane_agent.ranges import Fault, HttpReader
from readyplane_agent.transfer import TransferServer
from tests.unit.agent_twins import TwinRegistry, artifact, serving, source
from tests.unit.peer_world import CLOCK, given_by, make, peer, put

# ---------------------------------------------------------------------------- the choice


def test_starters_begin_apart_and_small_files_come_first() -> None:
    begins = {begin_at(f"w{n}-x", 1000) for n in range(50)}
    assert len(begins) > 40
    assert begin_at("w1-x", 1000) == begin_at("w1-x", 1000)
    assert own_order([0, 1, 2, 3, 4, 5], [4], 3) == [4, 3, 5, 0, 1, 2]
    assert own_order([], [], 0) == []


def test_rarest_first_and_storage_is_spared() -> None:
    ours = bytearray(4)
    neighbour = Held(bytes([VERIFIED, COMING, MISSING, MISSING]))
    whole, storage = Held(), Held(storage=True)
    order = [0, 1, 2, 3]
    assert next_chunk(order, ours, whole, [neighbour]) == 2
    assert next_chunk(order, ours, neighbour, []) == 0
    assert next_chunk(order, ours, storage, [neighbour]) == 2
    assert next_chunk([0], ours, storage, [neighbour]) is None
    assert next_chunk([1], ours, storage, [neighbour]) == 1
    assert next_chunk(order, ours, storage, [whole]) is None
    assert next_chunk([0], ours, whole, [neighbour]) == 0


states = st.sampled_from([MISSING, COMING, VERIFIED])


@given(data=st.data(), total=st.integers(1, 400))
def test_what_is_chosen_is_missing_here_and_held_there(data: st.DataObject, total: int) -> None:
    def held() -> Held:
        kind = data.draw(st.sampled_from(["whole", "partial", "storage"]))
        if kind == "partial":
            return Held(bytes(data.draw(st.lists(states, min_size=total, max_size=total))))
        return Held(storage=kind == "storage")

    ours = bytearray(data.draw(st.lists(states, min_size=total, max_size=total)))
    order = own_order(range(total), [], data.draw(st.integers(0, total)))
    asked, others = held(), [held() for _ in range(data.draw(st.integers(0, 3)))]
    found = next_chunk(order, ours, asked, others)
    could = [n for n in range(total) if ours[n] == MISSING and asked.has(n)]
    if found is None:
        assert not could or asked.storage
    else:
        assert found in could
        if asked.storage:
            assert not any(o.progress is not None and o.has(found) for o in others)


# ---------------------------------------------------------------------------- the account


def test_a_chunk_is_asked_of_one_source_at_a_time_and_comes_back_after_a_fault() -> None:
    art = artifact()
    arena = Arena(art.manifest)
    stop = threading.Event()
    fanout = Fanout(arena, clock=CLOCK, incarnation="w1-x", stop=stop)
    left, right = (
        fanout.join(name, gone=threading.Event(), whole=True) for name in ("left", "right")
    )
    taken = {fanout.take(side) for side in (left, right) for _ in range(len(arena.chunks) // 2)}
    assert None not in taken
    assert len(taken) == 2 * (len(arena.chunks) // 2)
    back = next(iter(taken))
    assert back is not None
    assert left.done(back, Fault("early", "not yet"))
    assert not right.done(back, Fault("dead", "gone"))
    rest = {fanout.take(right) for _ in range(3)}
    assert back in rest
    stop.set()
    assert left.take(HttpReader("http://127.0.0.1:1/x", clock=CLOCK)) is None
    arena.close()


# ---------------------------------------------------------------------------- whole loads


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "ROUND_WAIT_S", 0.01)
    monkeypatch.setattr(loader_module, "HOPELESS_S", 0.1)
    monkeypatch.setattr(loader_module, "PLAN_EVERY_S", 0.05)
    monkeypatch.setattr(loader_module, "PLACE_WAIT_S", 0.3)


async def test_a_starter_reads_behind_one_that_still_loads() -> None:
    """R8.4: each chunk passes on once it is verified, and storage gives nothing."""
    art = artifact(floats=200_000)
    async with peer(art, "w1", chunks=1) as (server, theirs, told):
        with serving(art.files) as store:
            load, arena, plan = make(art, TwinRegistry(), told, source(store.url))
            running = asyncio.create_task(load.run(plan))
            for path, index in theirs.chunks[1:]:
                await asyncio.sleep(0.01)
                put(theirs, art, path, index)
            fetched = await running
            assert not store.asked
    assert given_by(fetched) == {"peer:w1": art.manifest.size_bytes}
    assert all(bytes(arena.view(p)) == d for p, d in art.files.items())
    assert server.bytes_served == art.manifest.size_bytes
    arena.close()


async def test_one_that_still_loads_and_stalls_is_left_for_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("readyplane_agent.fanout.STALL_S", 0.2)
    art = artifact()
    async with peer(art, "w1", chunks=2) as (_, theirs, told):
        first_two = sum(theirs.span(*chunk)[1] for chunk in theirs.chunks[:2])
        with serving(art.files) as store:
            load, arena, plan = make(art, TwinRegistry(), told, source(store.url))
            fetched = await load.run(plan)
    assert given_by(fetched)["peer:w1"] == first_two
    assert given_by(fetched)["storage:1"] == art.manifest.size_bytes - first_two
    arena.close()


async def test_idle_peers_that_hold_everything_share_the_load() -> None:
    art = artifact(floats=400_000)
    async with (
        peer(art, "w1", bytes_per_s=4e6) as (_, _, one),
        peer(art, "w2", bytes_per_s=4e6) as (_, _, two),
        peer(art, "w3") as (busy, _, three),
    ):
        load, arena, plan = make(art, TwinRegistry(), one, two, replace(three, readers=1))
        fetched = await load.run(plan)
        assert busy.bytes_served == 0  # who is read from has a chain behind it already
    shares = given_by(fetched)
    assert sum(shares.values()) == art.manifest.size_bytes
    assert min(shares["peer:w1"], shares["peer:w2"]) > art.manifest.size_bytes / 4
    arena.close()


async def test_a_reader_keeps_to_the_rate_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """R9.1: the registry says with the place how fast a source may be read."""
    art, registry = artifact(floats=200_000), TwinRegistry()
    original = registry.acquire_transfer

    async def bounded(*args: Any, **more: Any) -> Transfer:
        return replace(await original(*args, **more), bytes_per_s=2e6)

    monkeypatch.setattr(registry, "acquire_transfer", bounded)
    async with peer(art, "w1") as (_, _, one):
        load, arena, plan = make(art, registry, one)
        fetched = await load.run(plan)
    slowest_s = (art.manifest.size_bytes - art.manifest.chunk_bytes) / 2e6
    assert slowest_s <= fetched.elapsed_s < slowest_s + 2.0
    arena.close()


async def let_go(leaving: TransferServer) -> None:
    """Nobody reads there any more; its last thread may need a moment to end."""
    async with asyncio.timeout(20):
        while leaving.in_use:
            await asyncio.sleep(0.01)


async def test_a_source_that_drains_hands_its_reader_over() -> None:
    """R22.3: told with a chunk, the reader goes on elsewhere with the missing chunks only."""
    art = artifact(floats=400_000)
    async with (
        peer(art, "w1", bytes_per_s=4e6) as (leaving, _, one),
        peer(art, "w2") as (staying, _, two),
    ):
        registry = TwinRegistry()
        load, arena, plan = make(art, registry, one)
        running = asyncio.create_task(load.run(plan))
        while leaving.bytes_served < 300_000:
            await asyncio.sleep(0.005)
        registry.sources = [two]
        leaving.drain()
        assert leaving.in_use
        fetched = await running
        assert leaving.refused == {}
        assert leaving.bytes_served + staying.bytes_served == art.manifest.size_bytes
        await let_go(leaving)
    assert fetched.faults == ()
    assert {use.source_id for use in fetched.uses} == {"peer:w1", "peer:w2"}
    assert [told for _, _, told in registry.released] == ["", ""]
    arena.close()


async def test_a_source_that_drains_alone_lets_its_reader_finish() -> None:
    art = artifact(floats=200_000)
    async with peer(art, "w1", bytes_per_s=4e6) as (leaving, _, one):
        registry = TwinRegistry()
        load, arena, plan = make(art, registry, one)
        running = asyncio.create_task(load.run(plan))
        while leaving.bytes_served < 100_000:
            await asyncio.sleep(0.005)
        registry.sources = []
        leaving.drain()
        fetched = await running
    assert given_by(fetched) == {"peer:w1": art.manifest.size_bytes}
    arena.close()


async def test_a_peer_that_hangs_is_left_for_the_missing_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R9.2: it takes connections and says nothing, as a stopped process does."""
    monkeypatch.setattr(ranges, "RECEIVE_WAIT_S", 1.0)
    monkeypatch.setattr(ranges, "SILENT_LIMIT_S", 0.5)
    art = artifact()
    with socket.create_server(("127.0.0.1", 0)) as door, serving(art.files) as store:
        url = f"http://127.0.0.1:{door.getsockname()[1]}/v1/chunks/{art.manifest.digest}"
        hung = source(url, "peer:w1", worker_id="w1", incarnation="w1-x")
        load, arena, plan = make(art, TwinRegistry(), hung, source(store.url))
        async with asyncio.timeout(5.0):
            fetched = await load.run(plan)
    assert fetched.faults[0].startswith("peer:w1: slow: ")
    assert given_by(fetched)["storage:1"] == art.manifest.size_bytes
    arena.close()


async def test_a_drain_is_bounded() -> None:
    """After its bound the source is gone, whoever reads, and the reader is told."""
    art = artifact(floats=400_000)
    async with peer(art, "w1", bytes_per_s=1e6) as (leaving, _, one):
        load, arena, plan = make(art, TwinRegistry(), one)
        load._limit_s = 5.0  # until then it hopes for another source
        running = asyncio.create_task(load.run(plan))
        while not leaving.bytes_served:
            await asyncio.sleep(0.005)
        leaving.drain(limit_s=0.2)
        with pytest.raises(Unavailable, match="it leaves"):
            await running
        await let_go(leaving)
    arena.close()


async def test_a_pause_is_waited_out_and_a_long_one_leads_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R9.1: serving comes first; nobody waits for ever."""
    monkeypatch.setattr(ranges, "PAUSED_TURN_S", 0.02)
    art = artifact(floats=200_000)
    async with peer(art, "w1", tpot_target_s=0.05) as (server, _, one):
        for _ in range(2):
            server.observe(Foreground(tpot_s=0.06), given_bytes_per_s=1.0)
        assert server.pace.paused_s is not None
        load, arena, plan = make(art, TwinRegistry(), one)
        running = asyncio.create_task(load.run(plan))
        while server.refused.get("503", 0) < 5:
            await asyncio.sleep(0.01)
        assert server.bytes_served == 0
        server.pace = replace(server.pace, paused_s=None, bytes_per_s=1e9)
        assert given_by(await running) == {"peer:w1": art.manifest.size_bytes}
        arena.close()

        server.pace = replace(server.pace, paused_s=CLOCK.monotonic_s() - 60, bytes_per_s=0.0)
        with serving(art.files) as store:
            load, arena, plan = make(art, TwinRegistry(), one, source(store.url))
            fetched = await load.run(plan)
            assert given_by(fetched)["storage:1"] == art.manifest.size_bytes
        assert "busy" in fetched.faults[0]
        arena.close()
