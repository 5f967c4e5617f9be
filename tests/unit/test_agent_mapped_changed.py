"""Mapped weights that somebody changes in place: noticed, out of the cache, given to nobody, named."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from readyplane.core.identity import FileEntry
from readyplane_agent import mapped_watch
from readyplane_agent.arena import Arena
from readyplane_agent.engines.exit_status import status_text
from readyplane_agent.lifecycle import ExitCode
from readyplane_agent.mapped_memory import MappedMemory
from readyplane_agent.ranges import HttpReader
from tests.unit.agent_twins import artifact
from tests.unit.agent_world import ART, World, living, ready
from tests.unit.test_agent_mapped import CLOCK, cached, mapped


def in_place(path: Path, change: Callable[[Path], None]) -> None:
    """Change the file itself, as its owner can."""
    path.chmod(0o600)
    change(path)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))


def cut(path: Path) -> None:
    os.truncate(path, 4096)


def entry_of(path: str) -> FileEntry:
    return next(e for e in ART.manifest.files if e.path == path)


def fill(world: World) -> None:
    """The node's cache has everything already."""
    for path, data in ART.files.items():
        world.cache.locate(entry_of(path)).write_bytes(data)


@pytest.mark.parametrize(
    ("change", "says"), [(flip, "written to after it was verified"), (cut, "4096 B instead of")]
)
async def test_a_worker_whose_mapped_file_is_changed_leaves_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], says: str
) -> None:
    monkeypatch.setattr(mapped_watch, "WATCH_EVERY_S", 0.05)
    async with living(tmp_path, weights_memory="map") as world:
        fill(world)
        running = await ready(world)
        files = {path: world.cache.locate(entry_of(path)) for path in ART.files}
        in_place(files["model-1.safetensors"], change)
        async with asyncio.timeout(8.0):
            assert await running == ExitCode.ENGINE_DIED
        assert "model-1.safetensors" in world.life.trace.failure
        assert says in world.life.trace.failure
        # It was no drain; the file is nobody's any more, and the right ones stay.
        assert not world.router.drains
        assert says in world.router.left[0]
        assert not files.pop("model-1.safetensors").exists()
        assert all(path.exists() for path in files.values())
        assert world.registry.withdrawn


async def test_an_engine_that_dies_of_a_cut_file_is_told_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine meets the missing page first: the watch has not looked yet."""
    monkeypatch.setattr(mapped_watch, "WATCH_EVERY_S", 60.0)
    async with living(tmp_path, weights_memory="map") as world:
        fill(world)
        running = await ready(world)
        in_place(world.cache.locate(entry_of("model-0.safetensors")), cut)
        world.engine.returncode = -7
        async with asyncio.timeout(8.0):
            assert await running == ExitCode.ENGINE_DIED
        failure = world.life.trace.failure
        assert "model-0.safetensors" in failure and "4096 B instead of" in failure
        assert "ended with -7 (SIGBUS" in failure
        assert not world.cache.locate(entry_of("model-0.safetensors")).exists()


async def test_what_others_do_with_a_file_is_no_change(tmp_path: Path) -> None:
    """Use by another worker, another mode, eviction, a new file under the name: it is as verified."""
    art = artifact(floats=120_000)
    cache = cached(tmp_path, art)
    found, _ = await mapped(cache, art)
    assert isinstance(found, Arena) and isinstance(found.memory, MappedMemory)
    path = cache.locate(art.manifest.files[0])
    before = path.stat()
    os.utime(path, ns=(0, before.st_mtime_ns))
    cache.used(art.manifest)
    after = path.stat()
    assert after.st_mtime_ns == before.st_mtime_ns
    assert time.time() - after.st_atime < 60.0, "it is the latest that was used"
    path.chmod(0o640)
    assert found.memory.changed() == {}
    other = path.with_name("new")
    other.write_bytes(path.read_bytes())
    other.replace(path)
    assert found.memory.changed() == {}
    assert not found.memory.is_file(path), "a right file under that name is not discarded"
    path.unlink()
    assert found.memory.changed() == {}
    found.close()
    assert found.memory.changed() == {}


async def test_nothing_is_given_after_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_watch, "WATCH_EVERY_S", 60.0)
    async with living(tmp_path, weights_memory="map") as world:
        fill(world)
        await ready(world)
        reader = HttpReader(
            f"{world.life.transfer.url}/v1/chunks/{ART.manifest.digest}",
            clock=CLOCK,
            incarnation="w1-abc",
        )
        entry, into = entry_of("model-0.safetensors"), memoryview(bytearray(65536))
        assert await asyncio.to_thread(reader.read_into, entry, 0, into) is None
        in_place(world.cache.locate(entry), cut)
        assert "model-0.safetensors" in world.life._mapped.look()
        fault = await asyncio.to_thread(reader.read_into, entry, 0, into)
        assert fault is not None
        reader.close()
        arena = world.life.started.arena
        assert arena is not None
        assert bytes(arena.view(entry.path)) == b"", "the agent reads none of its pages any more"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (None, "None"),
        (3, "3"),
        (-7, "-7 (SIGBUS, a page"),
        (-9, "-9 (SIGKILL, killed"),
        (-11, "-11 (SIGSEGV)"),
        (-99, "-99"),
    ],
)
def test_an_exit_status_in_words(code: int | None, text: str) -> None:
    assert status_text(code).startswith(text)
