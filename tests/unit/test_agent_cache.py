"""The node's weight cache under several writers, kills, and a full disk (B116, B121)."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from readyplane.core.errors import InvalidField
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.files import FileReader
from tests.unit.agent_twins import Artifact, artifact


def loaded(art: Artifact) -> Arena:
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
    return arena


def whole(cache: WeightCache, art: Artifact) -> bool:
    return all(cache.locate(e).read_bytes() == art.files[e.path] for e in art.manifest.files)


def slow_store(folder: str, seed: int, pause_s: float) -> None:
    """A writer that takes its time, as one on a busy disk does."""
    real = os.write

    def write(fd: int, data: bytes) -> int:
        time.sleep(pause_s)
        return real(fd, data[: 64 * 1024])

    os.write = write  # type: ignore[assignment]
    WeightCache(Path(folder), bytes_max=2**30).store(loaded(artifact(seed=seed)))


def test_many_writers_one_killed(tmp_path: Path) -> None:
    """B116: ten processes, one killed in the middle: the rest end with verified files."""
    art = artifact(seed=3)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.unit.agent_twins", "readyplane_agent.cache"])
    victim = context.Process(target=slow_store, args=(str(tmp_path), 3, 0.2))
    victim.start()
    until_s = time.monotonic() + 20
    while not list(tmp_path.glob("*.part")):
        assert time.monotonic() < until_s and victim.is_alive()
        time.sleep(0.005)
    others = [context.Process(target=slow_store, args=(str(tmp_path), 3, 0.0)) for _ in range(9)]
    for other in others:
        other.start()
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    for other in others:
        other.join(20)
        assert other.exitcode == 0
    cache = WeightCache(tmp_path, bytes_max=2**30)
    # The file the dead one held may be missing, but nothing half-written has a final name.
    for entry in art.manifest.files:
        path = cache.locate(entry)
        assert not path.exists() or path.read_bytes() == art.files[entry.path]
    # Its lock went with it: the next start completes the cache.
    cache.store(loaded(art))
    assert cache.holds(art.manifest) and whole(cache, art)
    assert not list(tmp_path.glob("*.part"))


def test_a_full_disk_leaves_nothing_under_a_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    art = artifact()
    cache = WeightCache(tmp_path, bytes_max=2**30)

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        cache.store(loaded(art))
    assert not cache.holds(art.manifest)
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []


def test_the_bound_evicts_the_least_used_and_never_what_is_wanted(tmp_path: Path) -> None:
    first, second = artifact(seed=1), artifact(seed=2)
    size = first.manifest.size_bytes
    cache = WeightCache(tmp_path, bytes_max=size + size // 2)
    cache.store(loaded(first))
    for entry in first.manifest.files:
        os.utime(cache.locate(entry), (1, 1))
    cache.store(loaded(second))
    assert cache.holds(second.manifest) and not cache.holds(first.manifest)
    held = sum(p.stat().st_size for p in tmp_path.iterdir() if len(p.name) == 64)
    assert held <= size + size // 2


def test_an_artifact_beyond_the_bound_is_not_cached(tmp_path: Path) -> None:
    art = artifact()
    cache = WeightCache(tmp_path, bytes_max=1000)
    assert cache.store(loaded(art)) == 0
    assert not cache.holds(art.manifest)


def test_files_are_shared_by_content(tmp_path: Path) -> None:
    """B114: two artifacts live side by side; what they share is stored once."""
    art, other = artifact(seed=1), artifact(seed=1, golden=(9, 9))
    assert art.manifest.digest != other.manifest.digest
    cache = WeightCache(tmp_path, bytes_max=2**30)
    cache.store(loaded(art))
    assert cache.holds(other.manifest)
    assert cache.store(loaded(other)) == 0


def test_a_file_that_is_being_read_is_not_evicted(tmp_path: Path) -> None:
    """B120: deferred while a reader has it open; once it is done the room is really there."""
    first, second = artifact(seed=1), artifact(seed=2)
    size = first.manifest.size_bytes
    cache = WeightCache(tmp_path, bytes_max=size + size // 2)
    cache.store(loaded(first))
    reader = FileReader(cache.locate)
    assert reader.lanes(first.manifest.files) > 0, "opens every file at once"
    assert cache.store(loaded(second)) == 0
    assert cache.holds(first.manifest)
    reader.close()
    assert cache.store(loaded(second)) > 0
    assert not cache.holds(first.manifest) and cache.holds(second.manifest)


def test_what_a_killed_writer_left_is_neither_kept_nor_counted(tmp_path: Path) -> None:
    art = artifact()
    cache = WeightCache(tmp_path, bytes_max=art.manifest.size_bytes)
    left = tmp_path / ("f" * 64 + ".part")
    left.write_bytes(bytes(art.manifest.size_bytes))
    assert cache.store(loaded(art)) == art.manifest.size_bytes
    assert not left.exists()


def test_a_part_that_somebody_writes_counts_whole(tmp_path: Path) -> None:
    art = artifact()
    size = art.manifest.size_bytes
    cache = WeightCache(tmp_path, bytes_max=size + 10)
    (tmp_path / ("f" * 64 + ".part")).write_bytes(bytes(11))
    with cache._lock_name("f" * 64) as mine:
        assert mine
        assert cache.store(loaded(art)) == 0
    assert cache.store(loaded(art)) == size


def test_who_waits_for_a_writer_that_dies_writes_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B116: a dead holder does not block, and leaves no hole either."""
    art = artifact()
    cache = WeightCache(tmp_path, bytes_max=2**30)
    entry = art.manifest.files[0]
    holding = cache._lock(entry)
    assert holding.__enter__()
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            holding.__exit__(None, None, None)  # as the end of its process does

    monkeypatch.setattr(time, "sleep", nap)
    assert cache.store(loaded(art)) == art.manifest.size_bytes
    assert len(naps) == 3 and whole(cache, art)


def test_bytes_are_on_the_disk_before_they_have_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    art = artifact(shards=1)
    done: list[str] = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(fd: int) -> None:
        done.append(os.path.realpath(f"/proc/self/fd/{fd}").rpartition("/")[2][-5:])
        real_sync(fd)

    def replace(self: Path, target: Path) -> Path:
        done.append("rename")
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    WeightCache(tmp_path, bytes_max=2**30).store(loaded(art))
    folder = tmp_path.name[-5:]
    assert done == [".part", "rename", folder] * len(art.manifest.files)


@pytest.mark.parametrize("odd", ["folder", "full folder", "link", "dangling link", "pipe"])
@pytest.mark.parametrize("suffix", ["", ".part", ".lock"])
def test_odd_entries_do_not_end_the_cache(tmp_path: Path, odd: str, suffix: str) -> None:
    """What is no file of ours is set aside; truncated neighbours are written anew beside it."""
    art = artifact()
    cache = WeightCache(tmp_path / "cache", bytes_max=2**30)
    first, second = art.manifest.files[:2]
    cache.locate(second).write_bytes(art.files[second.path][:-7])
    victim = cache.locate(first).with_name(cache.locate(first).name + suffix)
    other = tmp_path / "other"
    if odd in {"folder", "full folder"}:
        victim.mkdir()
        if odd == "full folder":
            (victim / "kept").write_text("x")
    elif odd == "pipe":
        os.mkfifo(victim)
    else:
        victim.symlink_to(other)
        if odd == "link":
            other.write_bytes(art.files[first.path])
    assert not cache.holds(art.manifest)
    arena = loaded(art)
    cache.store(arena)
    arena.close()
    assert cache.holds(art.manifest) and whole(cache, art)
    assert not list(cache.folder.glob("*.part"))
    assert (odd == "link") == other.exists(), "nothing was written through the link"
    if odd == "full folder":
        assert [p.read_text() for p in cache.folder.glob("*.odd-0/kept")] == ["x"]


def test_a_part_is_removed_when_it_cannot_get_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    art = artifact()
    cache = WeightCache(tmp_path, bytes_max=2**30)

    def refuse(_self: Path, _to: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", refuse)
    arena = loaded(art)
    with pytest.raises(OSError, match="Input/output"):
        cache.store(arena)
    arena.close()
    assert not list(tmp_path.glob("*.part"))


def test_what_never_fits_is_said_with_both_sizes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    art = artifact()
    cache = WeightCache(tmp_path, bytes_max=1000)
    assert cache.store(loaded(art)) == 0
    told = caplog.records[-1].getMessage()
    assert "--cache-bytes-max" in told
    assert "1000 B" in told
    assert f"{art.manifest.size_bytes} B" in told


def test_a_folder_that_cannot_be_made_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidField, match=r"--cache-dir: .*file/x.* is not valid"):
        WeightCache(tmp_path / "file" / "x", bytes_max=1000)
