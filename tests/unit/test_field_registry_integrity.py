"""Field reports of the registry's bytes: what is stored, what is served, and what may be taken away."""

import asyncio
import errno
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore

from readyplane.core.errors import (
    BytesMissing,
    Conflict,
    IdentityMismatch,
    InvalidField,
    Overloaded,
    Refused,
    Unavailable,
)
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import SystemClock
from readyplane.ports import Source
from readyplane_agent import loader
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.reading import Reader
from readyplane_agent.trace import StartTrace
from readyplane_registry.__main__ import StoreState
from readyplane_registry.blob_files import FileBlobs
from readyplane_registry.blob_objects import ObjectBlobs
from readyplane_registry.blob_removal import FolderRemoval
from readyplane_registry.collecting import Collected, Collecting
from readyplane_registry.ingest import Published, publish_directory
from readyplane_registry.keeping import MemoryKeeping
from readyplane_registry.live import MemoryLive
from readyplane_registry.retention import RetentionPolicy
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from tests.registry_data import document, model_folder, sha256
from tests.unit.agent_twins import TwinRegistry, artifact

DAY_S = 86_400.0
POLICY = RetentionPolicy(keep_untagged_s=30 * DAY_S, keep_history_s=30 * DAY_S, grace_s=3600.0)


class Clock:
    """Its wall is ahead of the file system's by what was slept."""

    def __init__(self) -> None:
        import time

        self._began_s, self.now = time.time(), 0.0

    def monotonic_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return self._began_s + self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


class Stubborn(FolderRemoval):
    """A store whose disk refuses for a while."""

    refuses = False

    async def remove(self, sha256: str) -> int:
        if self.refuses:
            raise Unavailable("the disk is read-only", "mount it again")
        return await super().remove(sha256)


class World:
    def __init__(self, root: Path, policy: RetentionPolicy = POLICY) -> None:
        self.clock = Clock()
        self.catalog, self.live = MemoryCatalog(), MemoryLive(self.clock, weight=0.3)
        self.keeping = MemoryKeeping(self.catalog, self.clock)
        self.blobs = FileBlobs(root / "blobs")
        self.removal = Stubborn(self.blobs.root, self.clock)
        self.collecting = Collecting(
            store=self.catalog,
            keeping=self.keeping,
            live=self.live,
            removal=self.removal,
            clock=self.clock,
            policy=policy,
        )
        ids = iter(range(100_000))
        self.registry = RegistryService(
            store=self.catalog,
            live=self.live,
            blobs=self.blobs,
            clock=self.clock,
            make_id=lambda: f"id{next(ids)}",
            storage_url=lambda: "http://127.0.0.1:1/v1/blobs",
            collecting=self.collecting,
        )

    async def publish(self, folder: Path, **more: Any) -> Published:
        return await publish_directory(
            folder, model="m", registry=self.registry, sink=self.blobs, **more
        )

    def disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.blobs.root.glob("sha256/*/*"))

    async def collect(self, after_days: float = 0.0, *, dry_run: bool = False) -> Collected:
        self.clock.now += after_days * DAY_S
        return await self.registry.collect(dry_run=dry_run)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def once(data: bytes) -> AsyncIterator[bytes]:
    if data:
        yield data


# --------------------------------------------------------------------------------- what is stored


async def test_b115_wrong_bytes_never_take_a_digests_place(world: World) -> None:
    good, name = b"good bytes", sha256(b"good bytes")
    with pytest.raises(InvalidField):
        await world.blobs.put_stream(name, once(b"other bytes"))
    assert world.blobs.size(name) is None
    assert await world.blobs.put_stream(name, once(good)), "a later good one is taken"
    digest, _ = await world.registry.publish_manifest(document(data=good))
    await world.registry.announce_source(
        Source("peer", digest, WeightTier.L1_HOST, "http://peer/x", "peer", "peer-1")
    )
    taken = await world.registry.acquire_transfer(
        "peer", digest, worker_id="r", incarnation="r-1", request_id="q"
    )
    assert await world.registry.release_transfer(
        taken.transfer_id, transferred_bytes=10, elapsed_s=1.0, failure="corrupt: chunk 0"
    ), "the source is quarantined"
    plan = await world.registry.plan_fetch(digest, worker_id="r", incarnation="r-1", node="n")
    assert [r.source.source_id for r in plan.sources] == ["storage:registry"]
    with pytest.raises(Overloaded):
        await world.registry.acquire_transfer(
            "peer", digest, worker_id="s", incarnation="s-1", request_id="q2"
        )


def _bring(root: str, name: str, path: str, hang: bool) -> None:
    blobs = FileBlobs(Path(root))

    def progress(_count: int) -> None:
        if hang:
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(blobs.put_file(name, Path(path), progress=progress))


def test_b116_ten_processes_bring_one_blob_and_one_is_killed_on_the_way(tmp_path: Path) -> None:
    """The registry's half; the node's cache has its own test beside the agent."""
    data = os.urandom(9 * 1024 * 1024)
    (tmp_path / "source").write_bytes(data)
    root, name = tmp_path / "blobs", sha256(data)
    FileBlobs(root)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_bring, args=(str(root), name, str(tmp_path / "source"), n == 3))
        for n in range(10)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [p.exitcode for p in processes] == [0] * 3 + [-signal.SIGKILL] + [0] * 6
    (stored,) = root.glob("sha256/*/*")
    assert sha256(stored.read_bytes()) == name
    FileBlobs(root)
    assert list((root / "tmp").iterdir()) == [], "what the killed one left is swept"


async def test_b117_a_flipped_byte_of_the_right_size_is_found_and_named(
    world: World, tmp_path: Path
) -> None:
    done = await world.publish(model_folder(tmp_path / "m"))
    entry = next(f for f in done.manifest.files if f.purpose == "weights")
    name = entry.sha256.removeprefix("sha256:")
    path = world.blobs.root / "sha256" / name[:2] / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    found = await world.registry.verify(done.digest)
    assert not found.ok
    assert [c.path for c in found.files if c.problem] == [entry.path]
    plan = await world.registry.plan_fetch(done.digest, worker_id="r", incarnation="i", node="n")
    assert plan.sources == () and any(entry.path in why for why in plan.excluded)


@pytest.mark.parametrize(
    ("body", "told"), [(b"", "empty body"), (b"<html>502</html>", "bytes"), (b"cut o", "5 bytes")]
)
async def test_b122_a_body_that_is_no_body_is_called_so(
    world: World, body: bytes, told: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        await world.blobs.put_stream(sha256(b"cut off"), once(body))
    assert told in str(caught.value) or "HTML" in str(caught.value)


async def test_b123_success_without_bytes_is_no_success(world: World) -> None:
    """A sink that says OK and stores nothing: the registry looks for itself."""

    class Lying(FileBlobs):
        async def put_file(self, sha256: str, path: Path, *, progress: Any = None) -> bool:
            return True

    folder = model_folder(world.blobs.root.parent / "m")
    with pytest.raises(Refused, match="no bytes of"):
        await publish_directory(
            folder, model="m", registry=world.registry, sink=Lying(world.blobs.root)
        )
    assert await world.registry.list_manifests() == []


async def test_b125_a_ready_peer_stands_before_the_origin(world: World, tmp_path: Path) -> None:
    done = await world.publish(model_folder(tmp_path / "m"))
    await world.registry.announce_source(
        Source("peer", done.digest, WeightTier.L1_HOST, "http://peer/x", "peer", "peer-1", "n2")
    )
    plan = await world.registry.plan_fetch(done.digest, worker_id="r", incarnation="i", node="n")
    assert [r.source.source_id for r in plan.sources] == ["peer", "storage:registry"]


# ------------------------------------------------------------------------- what may be taken away


async def test_b119_nothing_is_missed_that_is_published_while_collection_runs(
    tmp_path: Path,
) -> None:
    """Two hundred publications, each sharing bytes with others, beside a collection without a pause."""
    world = World(tmp_path, RetentionPolicy(keep_untagged_s=0, keep_history_s=0, grace_s=0))
    shared = [model_folder(tmp_path / f"m{n}", salt=n, shard_bytes=500) for n in range(5)]
    ended, rounds = False, 0

    async def collecting() -> None:
        nonlocal rounds
        while not ended:
            await world.registry.collect()
            rounds += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(collecting())
    try:
        for n in range(25):
            (shared[n % 5] / "README.md").write_text(f"edition {n}")
            done = await asyncio.gather(
                *(world.publish(shared[n % 5], tag=f"m/{n % 3}-{k}") for k in range(8)),
                return_exceptions=True,
            )
            for one in done:
                assert isinstance(one, Published), one
                assert await world.blobs.missing(one.manifest.files) == ()
    finally:
        ended = True
        await task
    assert rounds > 20
    for tag in await world.registry.list_tags():
        assert (await world.registry.verify(tag.digest)).ok, "what a tag points at is whole"
    assert (await world.registry.collect()).failed == ()
    named = {
        entry.sha256
        for tag in await world.registry.list_tags()
        for entry in (await world.registry.get_manifest(tag.digest)).files
    }
    newest = (await world.registry.list_manifests())[0].digest
    named |= {e.sha256 for e in (await world.registry.get_manifest(newest)).files}
    assert {b.sha256 for b in await world.removal.stored()} == named, "and nothing else is left"


async def test_b119_an_upload_that_is_under_way_is_held(world: World, tmp_path: Path) -> None:
    name = sha256(b"on its way")
    await world.registry.hold_upload("up", [name])
    await world.blobs.put_stream(name, once(b"on its way"))
    world.clock.now += 2 * POLICY.grace_s
    await world.registry.hold_upload("up", ())
    assert (await world.collect()).evicted == ()
    await world.registry.hold_upload("up", (), release=True)
    assert (await world.collect()).evicted == (name,)


async def test_b120_bytes_that_a_worker_reads_stay_and_a_failed_deletion_is_tried_again(
    world: World, tmp_path: Path
) -> None:
    old = await world.publish(model_folder(tmp_path / "old"))
    new = await world.publish(model_folder(tmp_path / "new", salt=1), tag="m:prod")
    full = world.disk_bytes()
    await world.collect(after_days=29.9)
    await world.registry.acquire_transfer(
        "storage:registry", old.digest, worker_id="r", incarnation="r-1", request_id="q"
    )
    kept = {k.digest: k.why for k in (await world.collect(after_days=10)).kept}
    assert "a worker asked for it" in kept[old.digest] and "m:prod" in kept[new.digest]
    assert world.disk_bytes() == full
    foreseen = await world.collect(after_days=25, dry_run=True)
    assert foreseen.retired == (old.digest,) and world.disk_bytes() == full
    assert (await world.collect()).retired == (old.digest,)
    assert world.disk_bytes() == full, "bytes outlive the retirement: somebody may be reading"
    world.removal.refuses = True
    failed = await world.collect(after_days=1)
    assert failed.evicted == () and len(failed.failed) == 2 and failed.freed_bytes == 0
    assert "read-only" in failed.failed[0].why
    assert {e.attempts for e in await world.keeping.evicting()} == {1}
    world.removal.refuses = False
    done = await world.collect()
    assert len(done.evicted) == 2 and done.failed == ()
    assert world.disk_bytes() == full - done.freed_bytes < full, "disk use really falls"
    assert await world.keeping.evicting() == []
    assert (await world.registry.verify(new.digest)).ok


async def test_b120_a_worker_that_holds_it_keeps_an_artifact(world: World, tmp_path: Path) -> None:
    old = await world.publish(model_folder(tmp_path / "old"))
    await world.publish(model_folder(tmp_path / "new", salt=1))
    world.clock.now += 40 * DAY_S
    await world.registry.announce_source(
        Source("w1", old.digest, WeightTier.L1_HOST, "http://w1/x", "w1", "w1-1")
    )
    found = await world.collect()
    assert found.retired == ()
    assert [k.why for k in found.kept if k.digest == old.digest] == ["source w1 holds it"]
    with pytest.raises(Refused, match="source w1 holds it"):
        await world.registry.retire(old.digest)


async def test_what_is_not_known_of_workers_ends_a_collection(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unknown is never nobody."""
    await world.publish(model_folder(tmp_path / "old"))

    async def away() -> tuple[int, int]:
        raise Unavailable("Redis does not answer", "check that it runs")

    monkeypatch.setattr(world.live, "count", away)
    with pytest.raises(Unavailable):
        await world.collect(after_days=99)
    assert len(await world.registry.list_manifests()) == 1


async def test_a_tags_earlier_target_stays_for_a_while(world: World, tmp_path: Path) -> None:
    old = await world.publish(model_folder(tmp_path / "old"), tag="m:prod")
    new = await world.publish(model_folder(tmp_path / "new", salt=1))
    world.clock.now += 40 * DAY_S
    await world.registry.set_tag("m:prod", new.digest, expected_digest=old.digest)
    kept = {k.digest: k.why for k in (await world.collect(after_days=29)).kept}
    assert "a tag moved away" in kept[old.digest], "a roll-back needs no download"
    assert (await world.collect(after_days=2)).retired == (old.digest,)


async def test_b124_after_collection_the_same_content_is_asked_for_again(
    world: World, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "old")
    old = await world.publish(folder)
    await world.publish(model_folder(tmp_path / "new", salt=1), tag="m:prod")
    await world.collect(after_days=40)
    assert len((await world.collect(after_days=1)).evicted) == 2
    with pytest.raises(Refused, match="no bytes of"):
        await world.registry.publish_manifest(old.manifest.document())
    with pytest.raises(Refused, match="retired"):
        await world.registry.resolve(old.digest)
    again = await world.publish(folder)
    assert again.digest == old.digest and again.uploaded_bytes > 40_000
    assert (await world.registry.verify(again.digest)).ok
    assert (await world.registry.resolve(old.digest)).digest == old.digest
    events = [e.event for e in (await world.registry.trail(old.digest)).events]
    assert events == ["retired", "restored"]


async def test_only_one_collection_runs_at_a_time(world: World) -> None:
    answers = await asyncio.gather(
        *(world.registry.collect() for _ in range(3)), return_exceptions=True
    )
    assert all(isinstance(a, Collected | Exception) for a in answers)
    assert any(isinstance(a, Collected) for a in answers)


class Away(TwinRegistry):
    """A registry that cannot be reached."""

    async def plan_fetch(self, *_: Any, **__: Any) -> Any:
        raise Unavailable("the registry cannot be reached", "start it")


@pytest.mark.parametrize("damage", ["truncated", "filled up with zeroes"])
@pytest.mark.parametrize("registry", [TwinRegistry, Away])
async def test_b121_no_way_of_loading_takes_a_truncated_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, registry: type[TwinRegistry]
) -> None:
    """B121: with the registry there or away, the node's damaged copy is refused and taken out."""
    monkeypatch.setattr(loader, "HOPELESS_S", 0.1)
    monkeypatch.setattr(loader, "ROUND_WAIT_S", 0.001)
    art = artifact()
    cache = WeightCache(tmp_path, bytes_max=2**30)
    for entry in art.manifest.files:
        cache.locate(entry).write_bytes(art.files[entry.path])
    assert cache.holds(art.manifest)
    victim = next(entry for entry in art.manifest.files if entry.purpose == "weights")
    os.truncate(cache.locate(victim), victim.size_bytes - 5)
    if damage != "truncated":
        os.truncate(cache.locate(victim), victim.size_bytes)  # as a power cut may leave it
    clock = SystemClock()
    arena = Arena(art.manifest)
    load = loader.Loader(
        arena,
        registry=registry(),  # type: ignore[arg-type]
        clock=clock,
        reader=Reader("w1", "w1-abc", "local"),
        trace=StartTrace(clock, process_start_s=clock.monotonic_s()),
        cache=cache,
        limit_s=0.5,
    )
    with pytest.raises((Unavailable, IdentityMismatch)):
        await load.run([])
    assert not arena.complete
    if damage != "truncated":
        assert not cache.locate(victim).exists()
        (fault,) = load.fetched.faults[:1]
        assert f"{victim.path}: chunk" in fault
    arena.close()


@pytest.mark.parametrize("published_before", [True, False])
@pytest.mark.parametrize("spoilt", ["flipped", "cut off"])
async def test_b117_rotten_bytes_are_brought_again_by_the_next_publication(
    world: World, tmp_path: Path, *, published_before: bool, spoilt: str
) -> None:
    """Neither refused for good, nor told to be published already over what has rotted."""
    folder = model_folder(tmp_path / "m")
    first = await world.publish(folder)
    victim = next(f for f in first.manifest.files if f.purpose == "weights")
    name = victim.sha256.removeprefix("sha256:")
    path = world.blobs.root / "sha256" / name[:2] / name
    path.chmod(0o644)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if spoilt == "flipped" else data[:100])
    if not published_before:  # a registry that has never looked at it
        world.registry = World(tmp_path).registry
    again = await world.publish(folder)
    assert again.digest == first.digest and again.uploaded_bytes == victim.size_bytes
    assert path.read_bytes() == data
    assert (world.blobs.root / "corrupt" / name).exists() == (spoilt == "flipped")
    assert (await world.registry.verify(first.digest)).ok


async def test_b117_a_publisher_is_told_by_type_that_bytes_have_to_come_again(
    world: World, tmp_path: Path
) -> None:
    first = await world.publish(model_folder(tmp_path / "m"))
    name = first.manifest.files[-1].sha256.removeprefix("sha256:")
    path = world.blobs.root / "sha256" / name[:2] / name
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    for told in ("taken out", "no bytes"):
        with pytest.raises(BytesMissing, match=told):
            await world.registry.publish_manifest(first.manifest.document())


async def test_b114_who_loses_a_race_for_a_tag_hears_that_only_the_tag_is_missing(
    world: World, tmp_path: Path
) -> None:
    other = await world.publish(model_folder(tmp_path / "other", salt=1))

    def race(_progress: object) -> None:
        world.racing = asyncio.run_coroutine_threadsafe(  # type: ignore[attr-defined]
            world.registry.set_tag("m:x", other.digest, force=True), loop
        )

    loop = asyncio.get_running_loop()
    with pytest.raises(Conflict, match="only the tag") as caught:
        await world.publish(model_folder(tmp_path / "m"), tag="m:x", progress=race)
    (published,) = {m.digest for m in await world.registry.list_manifests()} - {other.digest}
    assert published in caught.value.remedy


async def test_a_full_disk_is_told_with_the_stores_folder_and_logged(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Unavailable, match="No space left") as caught:
        await world.blobs.put_stream(sha256(b"x" * 9), once(b"x" * 9))
    monkeypatch.undo()
    assert str(world.blobs.root) in caught.value.remedy
    assert any(str(world.blobs.root) in str(vars(record)) for record in caplog.records)


async def test_a_store_that_never_answered_is_told_apart_from_one_that_is_away(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def away(_sha256: str) -> int:
        raise Unavailable("s3://b cannot be asked: 403", "give credentials")

    state = StoreState(world.blobs)
    with monkeypatch.context() as patch:
        patch.setattr(world.blobs, "length", away)
        for _ in range(3):
            await state.ask()
        assert not state.answered and "403" in state.why
    await state.ask()
    assert state.answered and not state.why
    with monkeypatch.context() as patch:
        patch.setattr(world.blobs, "length", away)
        await state.ask()
    assert state.answered and "403" in state.why
    said = [r.message for r in caplog.records if r.message == "the byte store cannot be asked"]
    assert len(said) == 2, "once a change"


async def test_b117_a_part_of_an_object_is_replaced_within_one_publication(tmp_path: Path) -> None:
    objects = MemoryStore()
    clock = Clock()
    blobs = ObjectBlobs(objects, name="s3://b", clock=clock, random=lambda: 1.0, signs=False)
    world = World(tmp_path)
    registry = RegistryService(
        store=world.catalog, live=world.live, blobs=blobs, clock=clock, make_id=lambda: "t"
    )

    async def publish() -> Published:
        folder = model_folder(tmp_path / "m")
        return await publish_directory(folder, model="m", registry=registry, sink=blobs)

    first = await publish()
    for spoilt in (lambda data: data[:50], lambda data: b"x" + data[1:]):
        name = first.manifest.files[-1].sha256.removeprefix("sha256:")
        path = f"sha256/{name[:2]}/{name}"
        data = bytes(objects.get(path).bytes())
        objects.put(path, spoilt(data))
        assert (await publish()).digest == first.digest
        assert bytes(objects.get(path).bytes()) == data
