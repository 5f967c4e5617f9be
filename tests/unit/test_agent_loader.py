"""The verified load: any fault anywhere, and never a wrong byte in a sealed arena (R10.3, R11)."""

import asyncio
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from readyplane.core.errors import IdentityMismatch, InvalidField, Unavailable
from readyplane.core.startup import SegmentName, WeightTier
from readyplane.kit.clock import SystemClock
from readyplane.ports import RankedSource, Source
from readyplane_agent import loader as loader_module
from readyplane_agent import ranges
from readyplane_agent.arena import Arena, prefault
from readyplane_agent.cache import WeightCache
from readyplane_agent.loader import Loader, cache_source
from readyplane_agent.pipeline import StagingBudget
from readyplane_agent.reading import Reader
from readyplane_agent.source_use import SourceUse
from readyplane_agent.trace import StartTrace
from tests.unit.agent_twins import (
    CHUNK,
    Artifact,
    TwinRegistry,
    artifact,
    serving,
    source,
)

ME = Reader("w1", "w1-abc", "local")


def make(
    art: Artifact,
    registry: TwinRegistry,
    *,
    cache: WeightCache | None = None,
    limit_s: float = 20.0,
    **more: int,
) -> tuple[Loader, Arena, StartTrace]:
    clock = SystemClock()
    trace = StartTrace(clock, process_start_s=clock.monotonic_s())
    arena = Arena(art.manifest)
    load = Loader(
        arena,
        registry=registry,  # type: ignore[arg-type]
        clock=clock,
        reader=ME,
        trace=trace,
        cache=cache,
        limit_s=limit_s,
        **more,  # type: ignore[arg-type]
    )
    return load, arena, trace


def ranked(*sources: Source) -> list[RankedSource]:
    return [RankedSource(s, 1.0, "") for s in sources]


def same(arena: Arena, art: Artifact) -> bool:
    return all(bytes(arena.view(path)) == data for path, data in art.files.items())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "ROUND_WAIT_S", 0.01)
    monkeypatch.setattr(loader_module, "HOPELESS_S", 0.1)
    monkeypatch.setattr(loader_module, "PLACE_WAIT_S", 0.3)


async def test_a_load_places_every_byte_and_counts_it() -> None:
    art, registry = artifact(), TwinRegistry()
    load, arena, trace = make(art, registry)
    with serving(art.files) as server:
        faulted = await prefault(arena)
        fetched = await load.run(ranked(source(server.url)))
    assert faulted == arena.size_bytes
    assert arena.complete and same(arena, art)
    assert fetched.tier is WeightTier.L4_OBJECT
    assert fetched.uses[0].bytes_read == art.manifest.size_bytes
    assert registry.released == [("t-storage:1", art.manifest.size_bytes, "")]
    (segment,) = [s for s in trace.segments() if s.name is SegmentName.WEIGHT_TRANSFER]
    assert "GB/s" in segment.detail and segment.end_s is not None
    arena.seal()
    arena.close()


def test_efficiency_is_bound_over_measured() -> None:
    """R7.1: M over the fastest rate that was measured, beside what it took."""
    use = SourceUse("peer:1", WeightTier.L1_HOST)
    for n in range(20):  # 10 chunks at 1 GB/s, then 10 at 0.1 GB/s
        use.done(10**6, n * 1e-3 if n < 10 else 9e-3 + (n - 9) * 1e-2)
    use.elapsed_s = 0.11
    assert use.bandwidth_bytes_per_s == pytest.approx(1e9)
    assert "bound 0.02 s at the fastest measured 1.00 GB/s, efficiency 0.18" in use.text()


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["flip", "cut", "empty", "html", "close", "whole", "other"]),
    at=st.integers(1, 9),
    connections=st.integers(1, 4),
    chunk_bytes=st.sampled_from([4096, 65536, 100_000]),
)
def test_a_fault_anywhere_leads_to_the_next_source(
    seed: int, kind: str, at: int, connections: int, chunk_bytes: int
) -> None:
    """B115, B117, B122: whatever a source does from its nth answer on, bytes come out right."""
    art = artifact(seed=seed, floats=30_000, chunk_bytes=chunk_bytes)
    rng = random.Random(seed)
    assume(at <= sum(len(entry.chunks) for entry in art.manifest.files))

    def spoil(path: str, start: int, count: int, data: bytes) -> bytes | str | None:
        if count < at:
            return None
        if kind == "flip":
            place = rng.randrange(len(data))
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        if kind == "other":
            return bytes(len(data))
        if kind == "whole" and start == 0 and len(data) == len(art.files[path]):
            return None  # the whole file was asked for, so this is no fault
        return kind

    async def run() -> None:
        registry = TwinRegistry()
        load, arena, _ = make(art, registry, connections=connections)
        with serving(art.files, spoil) as bad, serving(art.files) as good:
            fetched = await load.run(
                ranked(
                    source(bad.url, "peer:1", WeightTier.L1_HOST, worker_id="w9"),
                    source(good.url),
                )
            )
            first, second = fetched.uses
            assert arena.complete and same(arena, art)
            assert first.fault is not None
            assert first.fault.kind in {"corrupt", "dead"}
            assert first.bytes_read + second.bytes_read == art.manifest.size_bytes
            # Only what was missing is asked of the next source.
            asked_again = sum(end - start for _, start, end in good.asked)
            assert asked_again == art.manifest.size_bytes - first.bytes_read
            failure = registry.released[0][2]
            assert failure.startswith(first.fault.kind)
        assert load.budget.peak_bytes <= load.budget.limit_bytes
        arena.close()

    asyncio.run(run())


async def test_a_lying_only_source_is_never_ready() -> None:
    """B117: one flipped byte; the load fails, names the chunk, and asks no liar twice."""
    art, registry = artifact(), TwinRegistry()
    wrong = dict(art.files)
    data = bytearray(wrong["model-1.safetensors"])
    data[CHUNK + 17] ^= 0x40
    wrong["model-1.safetensors"] = bytes(data)
    load, arena, _ = make(art, registry)
    with serving(wrong) as server:
        registry.sources = [source(server.url)]
        with pytest.raises(IdentityMismatch, match=r"model-1\.safetensors: chunk 1"):
            await load.run(ranked(*registry.sources))
    assert not arena.complete
    with pytest.raises(InvalidField, match="verify every chunk"):
        arena.seal()
    assert len(registry.released) == 1
    arena.close()


async def test_a_dead_source_is_asked_again_and_recovers() -> None:
    art, registry = artifact(), TwinRegistry()
    load, arena, _ = make(art, registry)

    # A round asks once or more (the connections stop each other): two faults are two rounds at most.
    def spoil(path: str, start: int, count: int, data: bytes) -> str | None:
        return "close" if count <= 2 else None

    with serving(art.files, spoil) as server:
        registry.sources = [source(server.url)]
        fetched = await load.run(ranked(*registry.sources))
    assert same(arena, art) and len(fetched.uses) >= 2
    assert registry.plans >= 1
    arena.close()


async def test_nobody_holds_it() -> None:
    art, registry = artifact(), TwinRegistry()
    load, arena, _ = make(art, registry, limit_s=0.3)
    with pytest.raises(Unavailable, match="no source holds this artifact"):
        await load.run([])
    arena.close()


async def test_a_full_source_is_passed_over_and_said_so() -> None:
    """R8.4: a source's places are bounded; who finds none goes to the next."""
    art, registry = artifact(), TwinRegistry()
    load, arena, _ = make(art, registry)
    with serving(art.files) as peer, serving(art.files) as store:
        registry.full = {"peer:1"}
        fetched = await load.run(
            ranked(
                source(peer.url, "peer:1", WeightTier.L1_HOST, worker_id="w9"), source(store.url)
            )
        )
        assert not peer.asked
    assert str(fetched.uses[0].fault).startswith("busy")
    assert fetched.tier is WeightTier.L4_OBJECT
    arena.close()


async def test_a_peer_spares_the_store() -> None:
    """B125: with a peer ready, the origin gives no weight byte."""
    art, registry = artifact(), TwinRegistry()
    load, arena, _ = make(art, registry)
    with serving(art.files) as peer, serving(art.files) as store:
        fetched = await load.run(
            ranked(
                source(peer.url, "peer:1", WeightTier.L1_HOST, worker_id="w9"), source(store.url)
            )
        )
        assert not store.asked
    assert fetched.tier is WeightTier.L1_HOST
    arena.close()


async def test_b144_we_never_read_from_ourselves() -> None:
    """B144: an old record of this very worker is not a source for it."""
    art, registry = artifact(), TwinRegistry()
    load, arena, _ = make(art, registry)
    with serving(art.files) as own, serving(art.files) as store:
        await load.run(
            ranked(
                source(own.url, "peer:w1:old", WeightTier.L1_HOST, worker_id="w1"),
                source(store.url),
            )
        )
        assert not own.asked
    arena.close()


async def test_a_slow_source_is_left_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "RECEIVE_WAIT_S", 1.0)
    original = ranges.HttpReader.__init__

    def hasty(self: ranges.HttpReader, url: str, **more: Any) -> None:
        original(self, url, **{**more, "chunk_limit_s": 0.5})

    monkeypatch.setattr(ranges.HttpReader, "__init__", hasty)
    art, registry = artifact(shards=1), TwinRegistry()
    load, arena, _ = make(art, registry)
    hold = threading.Event()

    def spoil(path: str, start: int, count: int, data: bytes) -> bytes | None:
        hold.wait(10)
        return None

    with serving(art.files, spoil) as slow, serving(art.files) as good:
        fetched = await load.run(
            ranked(source(slow.url, "peer:1", WeightTier.L1_HOST, worker_id="w9"), source(good.url))
        )
        hold.set()
    assert fetched.uses[0].fault is not None and fetched.uses[0].fault.kind == "slow"
    assert same(arena, art)
    arena.close()


# --------------------------------------------------------------------------- budget


async def test_the_budget_bounds_what_is_not_verified() -> None:
    """R11.1: three chunks of room, eight connections: never more than three are on their way."""
    art, registry = artifact(floats=120_000, chunk_bytes=CHUNK), TwinRegistry()
    load, arena, _ = make(art, registry, staging_bytes=3 * CHUNK, connections=8)
    running, most, lock = 0, 0, threading.Lock()

    def watch(path: str, start: int, count: int, data: bytes) -> None:
        nonlocal running, most
        with lock:
            running += len(data)
            most = max(most, running)
        threading.Event().wait(0.002)
        with lock:
            running -= len(data)

    with serving(art.files, watch) as server:
        fetched = await load.run(ranked(source(server.url)))
    assert most <= 3 * CHUNK, "as the server saw it"
    assert fetched.staging_peak_bytes <= 3 * CHUNK
    assert fetched.staging_peak_bytes > CHUNK, "it did overlap"
    arena.close()


async def test_a_chunk_beyond_the_budget_is_refused_before_anything_is_read() -> None:
    art = artifact()
    with pytest.raises(InvalidField, match="--staging-bytes"):
        make(art, TwinRegistry(), staging_bytes=CHUNK - 1)


def test_a_waiting_reader_ends_with_the_load() -> None:
    budget, stop = StagingBudget(10), threading.Event()
    assert budget.take(10, stop=stop)
    stop.set()
    assert not budget.take(1, stop=stop)
    budget.give(10)
    assert budget.take(10, stop=stop)


# --------------------------------------------------------------------------- local files


async def test_the_nodes_cache_comes_before_the_network(tmp_path: Path) -> None:
    art, registry = artifact(), TwinRegistry()
    cache = filled(art, tmp_path / "cache")
    load, arena, trace = make(art, registry, cache=cache)
    with serving(art.files) as store:
        fetched = await load.run(ranked(source(store.url)))
        assert not store.asked
    assert fetched.tier is WeightTier.L2_NVME and same(arena, art)
    assert [s.name for s in trace.segments()] == [SegmentName.WEIGHT_READ]
    arena.close()


async def test_an_announced_cache_keeps_its_place_in_the_plan(tmp_path: Path) -> None:
    """The registry measured a peer as faster: the plan's order counts (R8.2)."""
    art, registry = artifact(), TwinRegistry()
    cache = filled(art, tmp_path / "cache")
    load, arena, _ = make(art, registry, cache=cache)
    with serving(art.files) as peer:
        fetched = await load.run(
            ranked(
                source(peer.url, "peer:1", WeightTier.L1_HOST, worker_id="w9"),
                cache_source(cache, art.manifest.digest, "local"),
            )
        )
    assert fetched.tier is WeightTier.L1_HOST
    arena.close()


async def test_another_nodes_cache_is_no_file_of_ours(tmp_path: Path) -> None:
    art, registry = artifact(), TwinRegistry()
    cache = WeightCache(tmp_path / "cache", bytes_max=2**30)
    load, arena, _ = make(art, registry, cache=cache)
    with serving(art.files) as store:
        fetched = await load.run(
            ranked(cache_source(cache, art.manifest.digest, "elsewhere"), source(store.url))
        )
    assert [u.tier for u in fetched.uses] == [WeightTier.L4_OBJECT]
    arena.close()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
async def test_a_damaged_cache_file_is_taken_out(tmp_path: Path, damage: str) -> None:
    """B121: what lies in the cache is verified like everything else; the rest comes from L4."""
    art, registry = artifact(), TwinRegistry()
    cache = filled(art, tmp_path / "cache")
    victim = cache.locate(art.manifest.files[1])
    victim.chmod(0o600)
    data = bytearray(victim.read_bytes())
    if damage == "flip":
        data[100] ^= 1
        victim.write_bytes(data)
    load, arena, _ = make(art, registry, cache=cache)
    plan = [cache_source(cache, art.manifest.digest, "local")]
    with serving(art.files) as store:
        plan.append(source(store.url))
        if damage == "truncate":
            assert cache.holds(art.manifest)
            sources = load._ordered(ranked(*plan))
            victim.write_bytes(data[:-1])
            await load._round(sources)
        else:
            if damage == "remove":
                victim.unlink()
            await load.run(ranked(*plan))
    assert arena.complete and same(arena, art)
    if damage != "remove":
        assert not victim.exists(), "the damaged file is gone, the next start does not meet it"
    arena.close()


async def test_unreachable_store_and_a_truncated_copy_is_a_clear_refusal(tmp_path: Path) -> None:
    """B121: no fallback accepts what the first path refuses."""
    art, registry = artifact(), TwinRegistry()
    cache = filled(art, tmp_path / "cache")
    victim = cache.locate(art.manifest.files[2])
    victim.chmod(0o600)
    victim.write_bytes(victim.read_bytes()[:-5])
    load, arena, _ = make(art, registry, cache=cache, limit_s=0.5)
    dead = source("http://127.0.0.1:9/v1/blobs/x")
    with pytest.raises(Unavailable, match="could not be fetched"):
        await load.run(ranked(dead))
    assert not arena.complete
    arena.close()


def filled(art: Artifact, folder: Path) -> WeightCache:
    """A cache that an earlier start on this node has written."""
    cache = WeightCache(folder, bytes_max=2**30)
    arena = Arena(art.manifest)
    for path, data in art.files.items():
        entry = arena.entry(path)
        assert entry is not None
        for index in range(len(entry.chunks)):
            start, size = arena.span(path, index)
            with arena.window(path, index) as window:
                window[:] = data[start : start + size]
            arena.mark(path, index)
    arena.seal()
    assert cache.store(arena) == art.manifest.size_bytes
    assert cache.store(arena) == 0
    arena.close()
    return cache


async def test_a_rack_store_is_read_by_path(tmp_path: Path) -> None:
    art, registry = artifact(), TwinRegistry()
    folder = art.write(tmp_path / "rack")
    load, arena, _ = make(art, registry)
    rack = source(f"file://{folder}", "rack:1", WeightTier.L3_RACK)
    fetched = await load.run(ranked(rack))
    assert fetched.tier is WeightTier.L3_RACK and same(arena, art)
    arena.close()


async def test_an_odd_url_is_a_dead_source_not_a_crash() -> None:
    art, registry = artifact(), TwinRegistry()
    load, arena, _ = make(art, registry)
    with serving(art.files) as store:
        fetched = await load.run(ranked(source("ftp://x/y", "odd:1"), source(store.url)))
    assert fetched.uses[0].fault is not None
    assert same(arena, art)
    arena.close()


async def test_stopping_ends_the_threads() -> None:
    art, registry = artifact(floats=200_000), TwinRegistry()
    load, arena, _ = make(art, registry)

    def slow(path: str, start: int, count: int, data: bytes) -> None:
        threading.Event().wait(0.05)

    with serving(art.files, slow) as server:
        running = asyncio.create_task(load.run(ranked(source(server.url))))
        await asyncio.sleep(0.1)
        load.stop()
        with pytest.raises(Unavailable):
            await running
    assert not [t for t in threading.enumerate() if t.name.startswith("load")]
    arena.close()


LOAD_ALONE = """
import asyncio, sys, threading, time
from pathlib import Path
from tests.unit.agent_twins import TwinRegistry, artifact, source
from tests.unit.test_agent_loader import make, ranked

def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024

art = artifact(shards=2, floats=10_000_000, chunk_bytes=2**20)
art.files.clear()
load, arena, _ = make(art, TwinRegistry(), staging_bytes=8 * 2**20, connections=4)
before, peak, going = anonymous(), 0, True

def watch():
    global peak
    while going:
        peak = max(peak, anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
asyncio.run(load.run(ranked(source(sys.argv[1]))))
going = False
thread.join()
print(max(peak, anonymous()) - before, arena.complete)
"""


def test_extra_memory_is_bounded_by_the_budget_not_by_the_model() -> None:
    """R11.1, B131: as the kernel counts it, for a model ten times as large as the budget."""
    art = artifact(shards=2, floats=10_000_000, chunk_bytes=2**20)
    with serving(art.files) as server:
        done = subprocess.run(
            [sys.executable, "-c", LOAD_ALONE, server.url],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    grown, complete = done.stdout.split()
    assert complete == "True"
    assert int(grown) <= 8 * 2**20 + 4 * 2**20, "the budget, and 4 MiB for threads and the like"
    assert art.manifest.size_bytes > 9 * 8 * 2**20
