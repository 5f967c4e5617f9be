"""The registry's use-cases where its stores fail, and what is counted."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import IdentityMismatch, NotFound, Overloaded, Refused, Unavailable
from readyplane.core.identity import Manifest
from readyplane.core.startup import WeightTier
from readyplane.ports import Source, Transfer
from readyplane_registry.blob_files import FileBlobs
from readyplane_registry.blobs import FileCheck, MemoryBlobs
from readyplane_registry.fetching import RegistryPolicy
from readyplane_registry.live import MemoryLive, Place
from readyplane_registry.metrics import COUNTERS, PrometheusTally
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from tests.registry_data import document, sha256


class Clock:
    """Time that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        return 1.7e9 + self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class BrokenLive(MemoryLive):
    """A live store that can be away."""

    away = False

    def _check(self) -> None:
        if self.away:
            raise Unavailable("Redis does not answer", "check that it runs")

    async def sources(self, digest: str) -> list[Any]:
        self._check()
        return await super().sources(digest)

    async def tiers(self) -> Any:
        self._check()
        return await super().tiers()

    async def readers(self, source_id: str) -> int:
        self._check()
        return await super().readers(source_id)

    async def acquire(self, place: Place) -> Transfer:
        self._check()
        return await super().acquire(place)


class CountingTally:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        assert tuple(labels) == COUNTERS[name][1], "the labels are those of the catalogue"
        self.counts[" ".join([name, *labels.values()])] += int(amount)


class World:
    def __init__(self) -> None:
        self.clock = Clock()
        self.live = BrokenLive(self.clock, weight=0.3)
        self.blobs = MemoryBlobs()
        self.tally = CountingTally()
        ids = iter(range(1000))
        self.registry = RegistryService(
            store=MemoryCatalog(),
            live=self.live,
            blobs=self.blobs,
            clock=self.clock,
            make_id=lambda: f"t{next(ids)}",
            storage_url=lambda: "http://r/v1/blobs",
            policy=RegistryPolicy(storage_readers_max=1, source_ttl_s=15, transfer_ttl_s=15),
            tally=self.tally,
        )

    async def publish(self, salt: str = "x") -> str:
        digest, _ = await self.registry.publish_manifest(document(salt=salt), bytes_elsewhere=True)
        self.blobs.put((await self.registry.get_manifest(digest)).files)
        return digest

    async def take(self, source_id: str, digest: str, reader: str = "me") -> Transfer:
        return await self.registry.acquire_transfer(
            source_id, digest, worker_id=reader, incarnation=reader, request_id="q"
        )

    async def announce(self, digest: str, name: str) -> None:
        await self.registry.announce_source(
            Source(name, digest, WeightTier.L1_HOST, f"http://{name}/x", name, f"{name}-1")
        )


@pytest.fixture
def world() -> World:
    return World()


async def test_without_the_live_store_storage_is_still_offered_and_still_bounded(
    world: World,
) -> None:
    digest = await world.publish()
    await world.announce(digest, "w1")
    world.live.away = True
    plan = await world.registry.plan_fetch(digest, worker_id="me", incarnation="me", node="")
    assert [r.source.source_id for r in plan.sources] == ["storage:registry"]
    assert "Redis does not answer" in plan.excluded[0], "no fallback is silent"
    place = await world.take("storage:registry", digest)
    with pytest.raises(Overloaded):
        await world.take("storage:registry", digest, "other")
    with pytest.raises(Unavailable):
        await world.take("w1", digest)
    await world.registry.release_transfer(place.transfer_id, transferred_bytes=9, elapsed_s=1.0)
    await world.take("storage:registry", digest, "other")
    assert world.tally.counts["degraded plan"] == 1
    assert world.tally.counts["degraded transfer"] == 3


async def test_b154_a_source_that_stops_announcing_is_left_out_with_the_reason(
    world: World,
) -> None:
    digest = await world.publish()
    await world.announce(digest, "w1")
    world.clock.now += 15.5
    plan = await world.registry.plan_fetch(digest, worker_id="me", incarnation="me", node="")
    assert plan.excluded == ("w1: its announcement expired 0.5 s ago",)
    world.clock.now += 100
    plan = await world.registry.plan_fetch(digest, worker_id="me", incarnation="me", node="")
    assert plan.excluded == (), "and forgotten in the end"
    with pytest.raises(NotFound):
        await world.take("w1", digest)


async def test_a_reader_that_finds_all_the_world_corrupt_is_not_believed(world: World) -> None:
    digest = await world.publish()
    told = []
    for name in ("w1", "w2", "w3", "w4"):
        await world.announce(digest, name)
        place = await world.take(name, digest)
        told.append(
            await world.registry.release_transfer(
                place.transfer_id, transferred_bytes=1, elapsed_s=1.0, failure="corrupt"
            )
        )
    assert told == [True, True, False, False]
    plan = await world.registry.plan_fetch(digest, worker_id="other", incarnation="o", node="")
    assert [r.source.source_id for r in plan.sources] == ["w3", "w4", "storage:registry"]
    assert world.tally.counts["quarantines L1"] == 2
    assert world.tally.counts["transfers L1 disbelieved"] == 2
    world.clock.now += 121
    for name in ("w1", "w2"):
        await world.announce(digest, name)
    plan = await world.registry.plan_fetch(digest, worker_id="other", incarnation="o", node="")
    assert plan.excluded == (), "quarantine ends by itself"
    assert {"w1", "w2"} <= {r.source.source_id for r in plan.sources}


async def test_what_happens_is_counted(world: World) -> None:
    digest = await world.publish()
    with pytest.raises(Refused):
        await world.registry.publish_manifest(document(salt="no bytes", data=b"other"))
    await world.registry.publish_manifest(document(salt="x"))
    await world.registry.resolve("demo")
    with pytest.raises(NotFound):
        await world.registry.resolve("nobody")
    place = await world.take("storage:registry", digest)
    world.clock.now += 16
    await world.registry.release_transfer(place.transfer_id, transferred_bytes=7, elapsed_s=1.0)
    await world.registry.release_transfer(place.transfer_id, transferred_bytes=7, elapsed_s=1.0)
    await world.registry.release_transfer("t999", transferred_bytes=7, elapsed_s=1.0)
    await world.registry.verify(digest)
    assert world.tally.counts == {
        "publishes created": 1,
        "publishes refused": 1,
        "publishes known": 1,
        "resolves found": 1,
        "resolves unknown": 1,
        "transfers L4 late_ok": 1,
        "transfers unknown unknown": 1,
        "transferred_bytes L4": 7,
        "verifications ok": 1,
    }


async def test_a_report_against_the_store_makes_it_read_its_bytes_again(world: World) -> None:
    digest = await world.publish()
    for _ in range(3):
        place = await world.take("storage:registry", digest)
        await world.registry.release_transfer(
            place.transfer_id, transferred_bytes=1, elapsed_s=1.0, failure="corrupt: chunk 1"
        )
        await asyncio.sleep(0)
        world.clock.now += 25
    assert world.tally.counts["verifications ok"] == 1, "not oftener than once a minute"


async def test_a_store_whose_bytes_rotted_is_no_source_until_they_are_published_again(
    world: World, tmp_path: Path
) -> None:
    """B115: the wrong bytes are neither served nor taken for present, and a good copy heals it."""
    files = FileBlobs(tmp_path)
    world.registry._blobs = world.registry._fetching._storage_asked._blobs = files
    data = bytes(range(200))

    async def upload() -> None:
        async def once() -> AsyncIterator[bytes]:
            yield data

        await files.put_stream(sha256(data), once())

    async def offered() -> int:
        plan = await world.registry.plan_fetch(digest, worker_id="me", incarnation="me", node="")
        return len(plan.sources)

    await upload()
    digest, _ = await world.registry.publish_manifest(document(data=data))
    assert await offered() == 1
    (path,) = (p for p in (tmp_path / "sha256").rglob("*") if p.is_file())
    path.chmod(0o644)
    path.write_bytes(data[:-1] + b"x")
    assert await offered() == 1, "the length is right"
    place = await world.take("storage:registry", digest)
    await world.registry.release_transfer(
        place.transfer_id, transferred_bytes=1, elapsed_s=1.0, failure="corrupt: chunk 0"
    )
    await asyncio.gather(*world.registry._verifying)
    assert await offered() == 0
    assert world.tally.counts["verifications corrupt"] == 1
    await upload()
    assert await offered() == 1
    assert (await world.registry.verify(digest)).ok


async def test_bytes_are_compared_also_when_the_manifest_came_before_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published as being elsewhere, nobody has compared them yet."""
    digest, _ = await world.registry.publish_manifest(document(), bytes_elsewhere=True)
    world.blobs.put((await world.registry.get_manifest(digest)).files)
    looked: list[str] = []

    async def inspect(manifest: Manifest, *, content: bool) -> tuple[FileCheck, ...]:
        looked.append(manifest.digest)
        return (FileCheck("weights.raw", 100, "chunk 0 is other"),)

    monkeypatch.setattr(world.blobs, "inspect", inspect)
    with pytest.raises(IdentityMismatch, match="chunk 0 is other"):
        await world.registry.publish_manifest(document())
    monkeypatch.undo()
    for _ in range(2):
        assert await world.registry.publish_manifest(document()) == (digest, False)


async def test_manifests_are_cached_within_a_bound(world: World) -> None:
    digests = [await world.publish(str(i)) for i in range(70)]
    for digest in digests:
        await world.registry.get_manifest(digest)
    assert len(world.registry._cache) == 64
    assert (await world.registry.get_manifest(digests[0])).digest == digests[0]


async def test_pages_of_a_list(world: World) -> None:
    digests = [await world.publish(str(i)) for i in range(5)]
    first, mark = await world.registry.list_page(limit=3)
    rest, end = await world.registry.list_page(limit=3, before=mark)
    assert [line.digest for line in first + rest] == digests[::-1] and end == ""


def test_every_counter_has_its_metric() -> None:
    from readyplane.kit.telemetry import Metrics

    metrics = Metrics()
    tally = PrometheusTally(metrics)
    for name, (_text, labels) in COUNTERS.items():
        tally.count(name, 2.0, **dict.fromkeys(labels, "x"))
        sample = metrics.get_sample_value(
            f"readyplane_registry_{name}_total", dict.fromkeys(labels, "x")
        )
        assert sample == 2.0, name
    tally.live(3, 4)
    assert metrics.get_sample_value("readyplane_registry_sources") == 3
    assert metrics.get_sample_value("readyplane_registry_source_readers") == 4
