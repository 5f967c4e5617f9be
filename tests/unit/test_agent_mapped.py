"""Files of the node's cache as an arena: mapped, verified where they lie, given on, kept from eviction."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import InvalidField
from readyplane.core.startup import SegmentName, WeightTier
from readyplane.kit.clock import SystemClock
from readyplane_agent import mapped_memory
from readyplane_agent.adopt import adopt
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.engines.layout import arena_layout, tensor_table_document
from readyplane_agent.engines.mapping import ArenaMap, read_file_parts
from readyplane_agent.mapped_memory import MappedMemory, files_of, mapped_arena
from readyplane_agent.ranges import HttpReader
from readyplane_agent.trace import StartTrace
from readyplane_agent.transfer import TransferServer
from tests.unit.agent_twins import Artifact, artifact
from tests.unit.agent_world import ART, living, ready
from tests.unit.peer_world import put

CLOCK = SystemClock()


def cached(tmp_path: Path, art: Artifact) -> WeightCache:
    """The node's cache with all of an artifact."""
    cache = WeightCache(tmp_path / "node", bytes_max=2**30)
    arena = Arena(art.manifest)
    for path, index in arena.chunks:
        put(arena, art, path, index)
    arena.seal()
    assert cache.store(arena) > 0
    arena.close()
    return cache


async def mapped(cache: WeightCache, art: Artifact) -> tuple[Arena | str, str]:
    """What a start gets, and what its segment says."""
    trace = StartTrace(CLOCK, process_start_s=CLOCK.monotonic_s())
    found = await mapped_arena(art.manifest, cache, node="n1", clock=CLOCK, trace=trace)
    segments = trace.segments()
    assert [s.name for s in segments] == [SegmentName.WEIGHT_READ] * len(segments)
    return found, segments[0].detail if segments else ""


def table(arena: Arena) -> str:
    """As an agent writes it."""
    (document,) = arena.tables()
    return json.dumps({**document, **files_of(arena, document["arena_bytes"])})


async def test_every_byte_is_there_verified_and_nothing_was_copied(tmp_path: Path) -> None:
    art = artifact(floats=120_000)
    cache = cached(tmp_path, art)
    found, detail = await mapped(cache, art)
    assert isinstance(found, Arena)
    assert found.complete and found.sealed
    assert "mapped, nothing copied" in detail
    for path, data in art.files.items():
        assert bytes(found.view(path)) == data
    assert isinstance(found.memory, MappedMemory) and found.memory.use is not None
    assert found.memory.use.tier is WeightTier.L1_HOST
    assert found.memory.use.bytes_read == art.manifest.size_bytes
    maps = Path("/proc/self/smaps").read_text()
    inode = str(cache.locate(art.manifest.files[0]).stat().st_ino)
    assert inode in maps, "the cache's own file is what is mapped"
    with pytest.raises(TypeError):
        found.view(art.manifest.files[0].path)[0] = 1
    found.close()
    found.close()


async def test_an_engine_adopts_it_and_what_it_maps_is_not_evicted(tmp_path: Path) -> None:
    art = artifact(floats=120_000)
    cache = cached(tmp_path, art)
    found, _ = await mapped(cache, art)
    assert isinstance(found, Arena)
    engine = adopt(found.path, table(found))
    plain = Arena(art.manifest)
    for path, index in plain.chunks:
        put(plain, art, path, index)
    wanted = adopt(
        plain.path,
        json.dumps(
            tensor_table_document(arena_layout(art.manifest), manifest_digest=art.manifest.digest)
        ),
    )
    assert list(engine) == list(wanted)
    for name in wanted:
        assert engine[name].tobytes() == wanted[name].tobytes()
    found.close()
    small = WeightCache(cache.folder, bytes_max=art.manifest.size_bytes)
    other = artifact(seed=9, floats=120_000)
    arena = Arena(other.manifest)
    for path, index in arena.chunks:
        put(arena, other, path, index)
    arena.seal()
    weights = [e for e in art.manifest.files if e.purpose == "weights"]
    small.store(arena)
    assert all(cache.locate(entry).exists() for entry in weights)
    view = engine["layer.0.a"]
    engine.close()  # a view is still held: it stays adopted
    small.store(arena)
    assert all(cache.locate(entry).exists() for entry in weights)
    assert view.tobytes() == wanted["layer.0.a"].tobytes()
    del view
    engine.close()
    assert small.store(arena) > 0
    assert not any(cache.locate(entry).exists() for entry in weights)


async def test_a_file_that_is_not_what_its_name_says_is_taken_out(tmp_path: Path) -> None:
    art = artifact(floats=120_000)
    cache = cached(tmp_path, art)
    bad = cache.locate(art.manifest.files[1])
    bad.chmod(0o600)
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 1
    bad.write_bytes(data)
    found, detail = await mapped(cache, art)
    assert isinstance(found, str)
    assert "taken out of the cache" in detail
    assert not bad.exists()
    again, why = await mapped(cache, art)
    assert isinstance(again, str) and "does not hold all of it" in again
    assert not why, "that is no fall-back: the weights are fetched"


@pytest.mark.parametrize(
    ("share", "why"), [(0.42, "42% of it is in the page cache"), (None, "kernel does not say")]
)
async def test_what_lies_on_the_disk_is_read_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float | None, why: str
) -> None:
    art = artifact()
    cache = cached(tmp_path, art)
    monkeypatch.setattr(MappedMemory, "resident_share", lambda _: share)
    found, detail = await mapped(cache, art)
    assert isinstance(found, str)
    assert why in detail


async def test_what_the_kernel_says_of_the_page_cache_is_right(tmp_path: Path) -> None:
    art = artifact(floats=400_000)
    cache = cached(tmp_path, art)
    found = mapped_memory.open_mapped(art.manifest, cache)
    assert isinstance(found, Arena) and isinstance(found.memory, MappedMemory)
    share = found.memory.resident_share()
    assert share is not None
    assert 0.95 <= share <= 1.0
    found.close()


def test_files_of_one_content_are_mapped_at_each_of_their_places(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"xy" * 3000)
    twice = [["a", 0, 6000], ["a", 8192, 6000]]
    parts = read_file_parts(json.dumps({"arena_bytes": 16384, "files": twice}))
    both = ArenaMap(tmp_path, 16384, parts)
    assert bytes(both.view[:6000]) == bytes(both.view[8192:14192]) == b"xy" * 3000
    both.close()


async def test_a_mapped_arena_gives_to_peers(tmp_path: Path) -> None:
    art = artifact(floats=120_000)
    found, _ = await mapped(cached(tmp_path, art), art)
    assert isinstance(found, Arena)
    server = TransferServer(incarnation="i1", clock=CLOCK)
    await server.start()
    server.offer(found)
    reader = HttpReader(
        f"{server.url}/v1/chunks/{art.manifest.digest}", clock=CLOCK, incarnation="i1"
    )
    for path, index in found.chunks:
        entry = found.entry(path)
        assert entry is not None
        start, size = found.span(path, index)
        into = bytearray(size)
        fault = await asyncio.to_thread(reader.read_into, entry, start, memoryview(into))
        assert fault is None
        assert bytes(into) == art.files[path][start : start + size]
    reader.close()
    await server.stop()
    found.close()


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        ([["../secret", 0, 4096]], "name a file of the arena's folder"),
        ([["/etc/passwd", 0, 4096]], "name a file of the arena's folder"),
        ([["..", 0, 4096]], "name a file of the arena's folder"),
        ([["a", 0, 5000], ["b", 4096, 10]], "begin at a page behind"),
        ([["a", 17, 10]], "begin at a page"),
        ([["a", 0, 10**9]], "stay within"),
        ([["a", 0, -1]], "begin at a page"),
        ("abc", "list"),
        ([["a", 0]], "list"),
        ([["a", None, 4096]], "list"),
    ],
)
def test_a_hostile_table_is_refused_by_name(files: Sequence[Any], remedy: str) -> None:
    text = json.dumps({"arena_bytes": 8192, "files": files})
    with pytest.raises(InvalidField, match=remedy):
        read_file_parts(text)


def test_a_file_of_another_length_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    parts = read_file_parts(json.dumps({"arena_bytes": 4096, "files": [["a", 0, 101]]}))
    with pytest.raises(InvalidField, match=r"arena\.a"):
        ArenaMap(tmp_path, 4096, parts)


async def test_a_worker_starts_from_mapped_files_and_says_so(tmp_path: Path) -> None:
    async with living(tmp_path, weights_memory="map") as world:
        for path, data in ART.files.items():
            entry = next(e for e in ART.manifest.files if e.path == path)
            world.cache.locate(entry).write_bytes(data)
        await ready(world)
        assert world.engine.spec is not None
        assert world.engine.spec.arena_path == world.cache.folder
        assert world.engine.tensors["layer.0.a"]
        read = [s for s in world.life.trace.segments() if s.name is SegmentName.WEIGHT_READ]
        assert len(read) == 1
        assert "mapped, nothing copied" in read[0].detail


async def test_a_worker_whose_cache_lacks_a_file_fetches_it(tmp_path: Path) -> None:
    async with living(tmp_path, weights_memory="map") as world:
        await ready(world)
        details = [s.detail for s in world.life.trace.segments()]
        assert not any("mapped" in detail for detail in details)
        assert world.engine.spec is not None
        assert world.engine.spec.arena_path != world.cache.folder
