"""Pooled memory: no step outside the table, and no byte of one content in the hands of another (R15)."""

import ctypes
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField
from readyplane.core.startup import SegmentName, WeightTier
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane_agent import pool as pool_module
from readyplane_agent.adopt import adopt
from readyplane_agent.arena import Arena, arena_bytes
from readyplane_agent.engines.layout import arena_layout, tensor_table_document
from readyplane_agent.pool import ArenaPool, PooledMemory, zero
from readyplane_agent.pool_slots import OWNED, TABLE, Event, Slot, State, left_alone, step
from readyplane_agent.settings import AgentSettings
from readyplane_agent.source_use import SourceUse
from readyplane_agent.start_memory import arena_for, fault_in, take_held
from readyplane_agent.trace import StartTrace
from tests.unit.agent_twins import Artifact, artifact

SIZE = 3 * 2**20 + 4096


# --------------------------------------------------------------------------- the table

STEPS = st.lists(
    st.tuples(
        st.sampled_from(list(Event)),
        st.sampled_from(["", "w1", "w2"]),
        st.sampled_from(["", "sha256:a", "sha256:b"]),
        st.sampled_from([0, SIZE - 1, SIZE]),
    ),
    max_size=60,
)


@given(steps=STEPS)
def test_no_way_leads_to_another_content_but_through_a_whole_proof(
    steps: list[tuple[Event, str, str, int]],
) -> None:
    """R15.1: whatever happens in whatever order, and whatever is asked of the table."""
    slot = Slot("s", State.DIRTY, SIZE)
    written_by, proved = "somebody", False
    for event, owner, content, proof in steps:
        try:
            after = step(slot, event, owner=owner, content=content, proved_bytes=proof)
        except InvalidField:
            continue
        if event is Event.PROVED:
            assert proof == SIZE
            written_by, proved = "", True
        if after.state is State.RESERVED:
            assert after.owner and after.content
            assert proved or written_by == after.content
        if after.state is State.FILLING:
            written_by, proved = after.content, False
        assert (after.state in OWNED) == bool(after.owner)
        assert (after.state is State.FREE) == (after.proved_bytes == SIZE)
        if after.state in (State.DIRTY, State.FREE, State.ZEROING):
            assert not after.content
        slot = after


@pytest.mark.parametrize("state", list(State))
def test_every_state_has_a_way_back_to_free(state: State) -> None:
    """Roll-back from each: nothing is stuck, also when an owner ends without a word."""
    reached, edge = {state}, [state]
    while edge:
        at = edge.pop()
        for (before, _), after in TABLE.items():
            if before is at and after not in reached:
                reached.add(after)
                edge.append(after)
    assert State.FREE in reached
    if state in OWNED:
        alone = left_alone(Slot("s", state, SIZE, "sha256:a", "w1"))
        assert not alone.owner
        whole = state in (State.SEALED, State.ADOPTED)
        assert alone.state is (State.RELEASED if whole else State.DIRTY)


# --------------------------------------------------------------------------- the memory


def lent(pool: ArenaPool, content: str, owner: str = "w1", size: int = SIZE) -> PooledMemory:
    memory = pool.lend(size, content=content, owner=owner)
    assert memory is not None
    return memory


def test_the_same_content_is_found_again_and_another_gets_zeroes(tmp_path: Path) -> None:
    pool = ArenaPool(tmp_path, bytes_max=SIZE)
    first = lent(pool, "sha256:a")
    assert not first.held and bytes(first.view) == bytes(SIZE)
    first.view[:] = b"a" * SIZE
    first.seal()
    first.close()
    again = lent(pool, "sha256:a", "w2")
    assert again.held and bytes(again.view) == b"a" * SIZE
    again.seal()
    again.close()
    other = lent(pool, "sha256:b")
    assert not other.held and bytes(other.view) == bytes(SIZE)
    other.close()
    assert [slot.state for slot in pool.slots()] == [State.DIRTY]


def test_what_was_not_whole_is_never_held(tmp_path: Path) -> None:
    pool = ArenaPool(tmp_path, bytes_max=SIZE)
    first = lent(pool, "sha256:a")
    first.view[:5] = b"wrong"
    first.close()
    again = lent(pool, "sha256:a")
    assert not again.held and bytes(again.view) == bytes(SIZE)
    again.close()


def test_memory_that_cannot_be_proved_is_lent_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = ArenaPool(tmp_path, bytes_max=SIZE)
    first = lent(pool, "sha256:a")
    first.view[:] = b"a" * SIZE
    first.close()
    monkeypatch.setattr(pool_module, "zero", lambda memory: memory.size_bytes - 1)
    assert pool.lend(SIZE, content="sha256:b", owner="w2") is None
    assert all(slot.state is not State.FREE for slot in pool.slots())
    monkeypatch.undo()
    again = lent(pool, "sha256:b", "w2")
    assert bytes(again.view) == bytes(SIZE)
    again.close()


def test_the_proof_reads_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ArenaPool(tmp_path, bytes_max=SIZE)
    memory = lent(pool, "sha256:a")
    memory.view[SIZE - 1 :] = b"x"
    monkeypatch.setattr(ctypes, "memset", lambda *_: None)
    assert zero(memory) < SIZE
    monkeypatch.undo()
    assert zero(memory) == SIZE
    memory.close()


def test_memory_is_resized_and_bounded(tmp_path: Path) -> None:
    pool = ArenaPool(tmp_path, bytes_max=2 * SIZE)
    first = lent(pool, "sha256:a", size=2 * SIZE)
    assert pool.lend(SIZE, content="sha256:b", owner="w2") is None, "the bound counts what is lent"
    first.view[:] = b"a" * (2 * SIZE)
    first.close()
    small, other = lent(pool, "sha256:b", "w2"), lent(pool, "sha256:c", "w3")
    assert bytes(small.view) == bytes(SIZE) == bytes(other.view)
    assert sum(slot.size_bytes for slot in pool.slots()) <= 2 * SIZE
    small.close()
    other.close()


def fill_and_hang(folder: str, seal: bool) -> None:
    memory = lent(ArenaPool(Path(folder), bytes_max=SIZE), "sha256:a", f"w{os.getpid()}")
    memory.view[:] = b"s" * SIZE
    if seal:
        memory.seal()
    Path(folder, "there").touch()
    time.sleep(60)


@pytest.mark.parametrize("seal", [False, True])
def test_an_owner_that_is_killed(tmp_path: Path, seal: bool) -> None:
    """Half-written memory is zeroed; whole memory is found again, and verified by its taker."""
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=fill_and_hang, args=(str(tmp_path), seal))
    process.start()
    until_s = time.monotonic() + 20
    while not (tmp_path / "there").exists():
        assert time.monotonic() < until_s and process.is_alive()
        time.sleep(0.01)
    pool = ArenaPool(tmp_path, bytes_max=SIZE)
    assert pool.lend(SIZE, content="sha256:a", owner="w2") is None, "it has it still"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    memory = lent(pool, "sha256:a", "w2")
    assert memory.held is seal
    assert bytes(memory.view) == (b"s" * SIZE if seal else bytes(SIZE))
    memory.close()


# --------------------------------------------------------------------------- with an arena


def test_what_an_engine_has_adopted_is_lent_to_nobody(tmp_path: Path) -> None:
    """B126: an engine that outlives its agent keeps what it maps."""
    art = artifact()
    size = Arena(art.manifest).size_bytes
    pool = ArenaPool(tmp_path, bytes_max=size)
    arena = Arena(art.manifest, lent(pool, art.manifest.digest, size=size))
    for path, index in arena.missing():
        start, count = arena.span(path, index)
        with arena.window(path, index) as window:
            window[:] = art.files[path][start : start + count]
        arena.mark(path, index)
    arena.seal()
    table = tensor_table_document(arena_layout(art.manifest), manifest_digest=art.manifest.digest)
    engine = adopt(arena.path, json.dumps(table))
    arena.close()
    assert pool.lend(size, content="sha256:b", owner="w2") is None
    weight = engine["layer.0.a"].copy()
    assert weight.dtype == "float32" and weight.any()
    assert engine["layer.0.empty"].shape == (0, 4)
    with pytest.raises(ValueError, match="read-only"):
        engine["layer.0.a"][0] = 1
    engine.close()
    other = lent(pool, "sha256:b", "w2", size)
    assert bytes(other.view) == bytes(size)
    other.close()


async def test_a_worker_that_starts_again_finds_its_weights(tmp_path: Path) -> None:
    """R8.1, R15.1: across agents; another content in between leaves nothing of the first."""
    art, other = artifact(seed=1), artifact(seed=2)
    clock = SystemClock()
    size = arena_bytes(art.manifest)
    assert arena_bytes(other.manifest) == size
    settings = AgentSettings(
        worker_id="w1", role=Role.PREFILL, model="tiny", router="r:1", work_dir=tmp_path,
        pool_dir=tmp_path, pool_bytes_max=size,
    )  # fmt: skip

    async def start(which: Artifact, owner: str) -> tuple[Arena, tuple[SourceUse, ...]]:
        trace = StartTrace(clock, process_start_s=clock.monotonic_s())
        arena = await arena_for(
            which.manifest, settings, cache=None, owner=owner, clock=clock, trace=trace
        )
        held = await take_held(arena, node="local", clock=clock, trace=trace)
        await fault_in(arena, trace)
        names = [segment.name for segment in trace.segments()]
        assert names == [SegmentName.WEIGHT_READ] * len(held) + [SegmentName.ARENA_PREFAULT]
        return arena, held

    def fill(arena: Arena, which: Artifact) -> None:
        for path, index in arena.missing():
            begin, count = arena.span(path, index)
            with arena.window(path, index) as window:
                window[:] = which.files[path][begin : begin + count]
            arena.mark(path, index)
        arena.seal()
        arena.close()

    arena, held = await start(art, "w1")
    assert not held
    fill(arena, art)
    (slot,) = ArenaPool(tmp_path, bytes_max=size).slots()
    bytes_at = tmp_path / f"{slot.name}.arena"
    bytes_at.chmod(0o600)
    data = bytearray(bytes_at.read_bytes())
    data[70_000] ^= 1
    bytes_at.write_bytes(data)
    arena, (use,) = await start(art, "w2")
    assert use.tier is WeightTier.L1_HOST and len(arena.missing()) == 1, "a changed byte is noticed"
    fill(arena, art)
    arena, (use,) = await start(art, "w3")
    assert arena.complete and use.bytes_read == art.manifest.size_bytes
    arena.seal()
    none = StartTrace(clock, process_start_s=clock.monotonic_s())
    full = await arena_for(
        other.manifest, settings, cache=None, owner="w4", clock=clock, trace=none
    )
    assert not isinstance(full.memory, PooledMemory), "no room: memory of its own"
    full.close()
    arena.close()
    arena, held = await start(other, "w5")
    assert not held and bytes(arena.memory.view) == bytes(size)
    arena.close()
