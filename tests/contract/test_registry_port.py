"""`ports.Registry` as its users see it: in process over memory, and over gRPC over real stores."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from readyplane.client import RegistryClient
from readyplane.core.errors import (
    Conflict,
    IdentityMismatch,
    InvalidField,
    NotFound,
    Overloaded,
    Refused,
    StaleEpoch,
    UnknownField,
)
from readyplane.core.identity import FileEntry, Manifest
from readyplane.core.resolution import withdrawn_tag
from readyplane.core.startup import WeightTier
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.database import async_engine, migrate
from readyplane.kit.redis import connect
from readyplane.kit.rpc import Guard
from readyplane.kit.signing import SigningKey
from readyplane.ports import Registry, Source, StartNode
from readyplane_registry import rpc
from readyplane_registry.blob_files import FileBlobs
from readyplane_registry.blobs import MemoryBlobs
from readyplane_registry.fetching import RegistryPolicy
from readyplane_registry.live import MemoryLive
from readyplane_registry.postgres import PostgresCatalog
from readyplane_registry.redis import RedisLive
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from tests.registry_data import CONFIG, document, file_entry, sha256

POLICY = RegistryPolicy(storage_readers_max=2)
SALTS = itertools.count()
STORAGE = "storage:registry"
UNKNOWN = "sha256:" + "0" * 64


@dataclass
class World:
    """A registry and the way to bring bytes into its store."""

    registry: Registry
    memory: MemoryBlobs | None
    files: FileBlobs | None

    async def put(self, *contents: bytes) -> None:
        for data in contents:
            if self.memory is not None:
                self.memory.put([FileEntry("x", len(data), sha256(data), ())])
            if self.files is not None:
                await self.files.put_stream(sha256(data), _once(data))

    async def publish(self, model: str, **fields: Any) -> str:
        """Publish one more weights artifact of a model; returns its digest."""
        data = f"bytes {next(SALTS)}".encode()
        await self.put(data)
        digest, created = await self.registry.publish_manifest(document(model, data=data, **fields))
        assert created
        return digest


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


@pytest.fixture(params=["memory", "grpc"])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    ids = itertools.count()
    shared: dict[str, Any] = {
        "clock": SystemClock(),
        "make_id": lambda: f"transfer-{next(ids)}",
        "storage_url": lambda: "http://127.0.0.1:1/v1/blobs",
        "policy": POLICY,
    }
    if request.param == "memory":
        memory = MemoryBlobs()
        live = MemoryLive(SystemClock(), weight=0.3)
        service = RegistryService(store=MemoryCatalog(), live=live, blobs=memory, **shared)
        yield World(service, memory, None)
        return
    url = request.getfixturevalue("database_url")
    await migrate(url, "readyplane_registry")
    engine, client = async_engine(url), connect(request.getfixturevalue("redis_url"))
    await client.flushall()
    files = FileBlobs(tmp_path)
    service = RegistryService(
        store=PostgresCatalog(engine), live=RedisLive(client, weight=0.3), blobs=files, **shared
    )
    server = grpc.aio.server(interceptors=(Guard(TokenCheck("")),))
    rpc.register(server, service)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    caller = RegistryClient(f"127.0.0.1:{port}")
    try:
        yield World(caller, None, files)
    finally:
        await caller.aclose()
        await server.stop(None)
        await client.aclose()
        await engine.dispose()


# ------------------------------------------------------------------------------------- publishing


async def test_what_is_published_is_found_again(world: World) -> None:
    await world.put(b"0123")
    doc = document("found", data=b"0123")
    digest, created = await world.registry.publish_manifest(doc)
    again, created_again = await world.registry.publish_manifest(dict(reversed(doc.items())))
    assert (created, created_again, again) == (True, False, digest)
    assert (await world.registry.get_manifest(digest)).document() == (
        Manifest.from_document(doc).document()
    )
    (line,) = await world.registry.list_manifests(model="found")
    assert (line.digest, line.size_bytes, line.file_count, line.tags) == (digest, 4, 1, ())
    assert await world.registry.list_manifests(model="found", kind="compile") == []


async def test_a_manifest_without_its_bytes_is_refused_unless_they_are_elsewhere(
    world: World,
) -> None:
    doc = document("elsewhere", data=b"nowhere yet")
    with pytest.raises(Refused) as caught:
        await world.registry.publish_manifest(doc)
    assert "weights.raw: no bytes of" in caught.value.reasons[0]
    assert await world.registry.list_manifests(model="elsewhere") == []
    digest, _ = await world.registry.publish_manifest(doc, bytes_elsewhere=True)
    plan = await world.registry.plan_fetch(digest, worker_id="w", incarnation="i", node="n")
    assert plan.sources == () and "its bytes are not whole" in plan.excluded[0]


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"surprise": 1}, InvalidField, "manifest.surprise"),
        ({"model": ""}, InvalidField, "manifest.model"),
        ({"chunk_bytes": -1}, InvalidField, "manifest.chunk_bytes"),
        ({"chunk_bytes": 10**30}, InvalidField, "manifest.chunk_bytes"),
        (
            {"files": [{**file_entry("a", b"x"), "path": "a/../../b"}]},
            InvalidField,
            "files[0].path",
        ),
        ({"config": {**CONFIG, "vocab_size": -5}}, Refused, "config.vocab_size"),
    ],
)
async def test_a_bad_manifest_is_refused_naming_the_field(
    world: World, change: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error) as caught:
        await world.registry.publish_manifest({**document("bad"), **change})
    assert told in str(caught.value)
    assert await world.registry.list_manifests(model="bad") == []


@pytest.mark.parametrize("digest", ["", "sha256:12", "latest", UNKNOWN.upper()])
async def test_a_malformed_digest_is_no_unknown_one(world: World, digest: str) -> None:
    with pytest.raises(InvalidField) as caught:
        await world.registry.get_manifest(digest)
    assert caught.value.field == "digest"
    with pytest.raises(NotFound):
        await world.registry.get_manifest(UNKNOWN)


# ------------------------------------------------------------------------------ tags and resolving


async def test_tags_move_by_compare_and_set(world: World) -> None:
    a, b = await world.publish("tags"), await world.publish("tags")
    first = await world.registry.set_tag("tags/prod", a)
    assert (first.version, first.digest) == (1, a)
    with pytest.raises(Conflict) as caught:
        await world.registry.set_tag("tags/prod", b)
    assert caught.value.found == a
    second = await world.registry.set_tag("tags/prod", b, expected_digest=a)
    assert second.version == 2
    assert [t.digest for t in await world.registry.list_tags("tags/prod")] == [b, a]
    assert (await world.registry.list_tags())[0] == second
    lines = await world.registry.list_manifests(model="tags")
    assert [line.tags for line in lines] == [("tags/prod",), ()]
    for name, digest, error in [
        ("bad name", a, InvalidField),
        ("tags/x", "sha256:1", InvalidField),
        ("tags/x", UNKNOWN, NotFound),
    ]:
        with pytest.raises(error):
            await world.registry.set_tag(name, digest)
    with pytest.raises(NotFound):
        await world.registry.list_tags("tags/none")


async def test_a_tag_is_taken_away_and_nobody_resolves_by_it(world: World) -> None:
    a, b = await world.publish("untag"), await world.publish("untag")
    await world.registry.set_tag("untag/prod", a)
    with pytest.raises(Conflict) as caught:
        await world.registry.remove_tag("untag/prod", expected_digest=b)
    assert caught.value.found == a
    gone = await world.registry.remove_tag("untag/prod", expected_digest=a)
    assert (gone.name, gone.digest, gone.version) == ("untag/prod", "", 2)
    with pytest.raises(NotFound):
        await world.registry.resolve("untag/prod")
    assert [t.digest for t in await world.registry.list_tags("untag/prod")] == ["", a]
    assert "untag/prod" not in [t.name for t in await world.registry.list_tags()]
    back = await world.registry.set_tag("untag/prod", b)
    assert (back.digest, back.version) == (b, 3)
    for name, error in (("untag/none", NotFound), ("bad name", InvalidField)):
        with pytest.raises(error):
            await world.registry.remove_tag(name, force=True)


async def test_a_reference_is_a_digest_a_tag_or_a_model(world: World) -> None:
    old = await world.publish("resolve")
    new = await world.publish("resolve")
    await world.registry.set_tag("resolve/stable", old)
    resolve = world.registry.resolve
    assert (await resolve(old)).digest == old
    assert (await resolve("resolve/stable")).digest == old
    assert (await resolve("resolve")).digest == new, "of a model, the newest"
    with pytest.raises(NotFound):
        await resolve("resolve/none")
    with pytest.raises(NotFound):
        await resolve(UNKNOWN)
    with pytest.raises(InvalidField):
        await resolve("sha256:12")
    with pytest.raises(InvalidField):
        await resolve("resolve", kind="weight")
    with pytest.raises(NotFound, match="it has weights, but no compile"):
        await resolve("resolve", kind="compile")
    with pytest.raises(IdentityMismatch, match="kind: needed compile, has weights"):
        await resolve(old, kind="compile")


async def test_a_need_finds_the_artifact_that_meets_it_or_names_what_differs(world: World) -> None:
    plain = await world.publish("need")
    engine = await world.publish("need", layout="engine/7", quantisation="fp8")
    resolve = world.registry.resolve
    assert (await resolve("need", need={"quantisation": "none"})).digest == plain
    assert (await resolve("need", need={"layout": "engine/7"})).digest == engine
    with pytest.raises(IdentityMismatch) as caught:
        await resolve("need", need={"layout": "engine/7", "quantisation": "none", "tp": "1"})
    told = str(caught.value)
    assert "quantisation: needed none, has fp8" in told
    assert "layout: needed engine/7, has safetensors/1" in told
    assert "tp" not in told.replace("http", "")
    with pytest.raises(UnknownField, match=r"need\.colour"):
        await resolve("need", need={"colour": "red"})


async def test_a_need_that_nothing_meets_is_answered_with_candidates(world: World) -> None:
    plain = await world.publish("candidates")
    other = await world.publish("candidates", capability="sm90")
    need = {"capability": "sm80", "quantisation": "none"}
    missed = await world.registry.resolve_need("candidates", kind="weights", need=need)
    assert missed.manifest is None
    assert {c.digest for c in missed.candidates} == {plain, other}
    told = {str(f) for c in missed.candidates for f in c.differing}
    assert told == {"capability: sm80 != sm90", "capability: sm80 != "}
    one = await world.registry.resolve_need(
        "candidates", kind="weights", need=need, candidates_max=1
    )
    assert (len(one.candidates), one.left_off) == (1, 1)
    found = await world.registry.resolve_need(
        "candidates", kind="weights", need={"capability": "sm90"}
    )
    assert found.manifest is not None
    assert found.manifest.digest == other
    with pytest.raises(NotFound):
        await world.registry.resolve_need("none of it", kind="weights", need={})
    with pytest.raises(InvalidField, match="candidates_max"):
        await world.registry.resolve_need("candidates", kind="weights", need={}, candidates_max=999)


async def test_what_is_withdrawn_is_found_by_its_digest_only(world: World) -> None:
    kept = await world.publish("withdrawn")
    bad = await world.publish("withdrawn")
    await world.registry.set_tag("withdrawn-one", bad)
    await world.registry.set_tag(withdrawn_tag(bad), bad)
    assert (await world.registry.resolve("withdrawn")).digest == kept
    assert (await world.registry.resolve(bad)).digest == bad
    with pytest.raises(NotFound, match="withdrawn"):
        await world.registry.resolve("withdrawn-one")


# --------------------------------------------------------------------------- sources and transfers


def source(digest: str, name: str = "w1", **fields: object) -> Source:
    values: dict[str, object] = {
        "source_id": name,
        "digest": digest,
        "tier": WeightTier.L1_HOST,
        "url": f"http://127.0.0.1:9/{name}",
        "worker_id": name,
        "incarnation": f"{name}-1",
        "node": "n1",
    }
    return Source(**(values | fields))  # type: ignore[arg-type]


async def plan(world: World, digest: str, worker: str = "me") -> tuple[list[str], str]:
    found = await world.registry.plan_fetch(
        digest, worker_id=worker, incarnation=f"{worker}-9", node="n1"
    )
    return [r.source.source_id for r in found.sources], "\n".join(found.excluded)


async def test_storage_serves_what_no_peer_holds_and_comes_last_when_one_does(
    world: World,
) -> None:
    digest = await world.publish("plan")
    found = await world.registry.plan_fetch(digest, worker_id="me", incarnation="i", node="n1")
    (only,) = found.sources
    assert only.source.source_id == STORAGE and only.source.tier is WeightTier.L4_OBJECT
    assert only.source.url == f"http://127.0.0.1:1/v1/blobs/{digest}"
    assert only.why and only.predicted_s > 0
    assert await world.registry.announce_source(source(digest)) == POLICY.source_ttl_s
    assert await plan(world, digest) == (["w1", STORAGE], "")
    assert (await plan(world, digest, "w1"))[0] == [STORAGE]
    assert (
        "w1: it is the target itself, an earlier life of it" in (await plan(world, digest, "w1"))[1]
    )
    await world.registry.withdraw_source("w1", reason="leaving")
    assert (await plan(world, digest))[0] == [STORAGE]


async def test_b154_a_source_that_lied_is_quarantined_and_one_that_died_is_hidden(
    world: World,
) -> None:
    """B115, B154: the next in the plan is tried, and the plan says why."""
    digest = await world.publish("lied")
    for name in ("w1", "w2"):
        await world.registry.announce_source(source(digest, name))
    for name, failure, quarantined in (("w1", "corrupt: chunk 3", True), ("w2", "dead", False)):
        place = await world.registry.acquire_transfer(
            name, digest, worker_id="me", incarnation="me-9", request_id=name
        )
        told = [
            await world.registry.release_transfer(
                place.transfer_id, transferred_bytes=5, elapsed_s=0.1, failure=failure
            )
            for _ in range(2)
        ]
        assert told == [quarantined, quarantined], "the same answer when it is asked again"
    placed, out = await plan(world, digest)
    assert placed == [STORAGE]
    assert "w1: quarantined for wrong bytes (chunk 3)" in out
    assert "w2: it did not answer" in out
    with pytest.raises(Overloaded) as caught:
        await world.registry.acquire_transfer(
            "w1", digest, worker_id="x", incarnation="x", request_id="x"
        )
    assert (caught.value.retry_after_s or 0) > 100


async def test_the_storage_itself_is_bounded_and_never_barred(world: World) -> None:
    digest = await world.publish("bounded")

    async def take(reader: str) -> str:
        place = await world.registry.acquire_transfer(
            STORAGE, digest, worker_id=reader, incarnation=reader, request_id="q"
        )
        return place.transfer_id

    first = await take("a")
    assert await take("a") == first, "the same request renews its place"
    await take("b")
    with pytest.raises(Overloaded):
        await take("c")
    lied = await world.registry.release_transfer(
        first, transferred_bytes=0, elapsed_s=0.0, failure="corrupt"
    )
    assert lied is False
    await take("c")
    assert (await plan(world, digest))[0] == [STORAGE]


async def test_a_measured_bandwidth_shows_in_the_next_plan(world: World) -> None:
    digest = await world.publish("measured")
    await world.registry.announce_source(source(digest))
    place = await world.registry.acquire_transfer(
        "w1", digest, worker_id="me", incarnation="me-9", request_id="q"
    )
    await world.registry.release_transfer(
        place.transfer_id, transferred_bytes=500_000_000, elapsed_s=0.25
    )
    found = await world.registry.plan_fetch(digest, worker_id="me", incarnation="i", node="n1")
    assert found.sources[0].source.bandwidth_bytes_per_s == pytest.approx(2e9)
    assert "2000 MB/s measured here (1 transfers)" in found.sources[0].why
    assert "at the best measured 2000 MB/s" in found.sources[0].why


async def test_bad_sources_and_transfers_are_refused_naming_the_field(world: World) -> None:
    digest = await world.publish("refused")
    good = source(digest)
    bad: dict[str, Any] = {
        "source_id": "storage:x",
        "digest": "sha256:1",
        "tier": WeightTier.UNKNOWN,
        "url": "http://user:secret@127.0.0.1/x",
        "node": "a|b",
        "readers_max": 0,
        "bandwidth_bytes_per_s": float("inf"),
    }
    for field, value in bad.items():
        with pytest.raises(InvalidField) as caught:
            await world.registry.announce_source(replace(good, **{field: value}))
        assert caught.value.field == f"source.{field}"
        assert "secret" not in str(caught.value), "B175"
    for url in ("", "ftp://x/y", "http://", "file:cache", "http://h/x?token=secret"):
        with pytest.raises(InvalidField):
            await world.registry.announce_source(source(digest, url=url))
    with pytest.raises(NotFound):
        await world.registry.announce_source(source(UNKNOWN))
    await world.registry.announce_source(good)
    acquire = world.registry.acquire_transfer
    with pytest.raises(NotFound):
        await acquire("nobody", digest, worker_id="x", incarnation="x", request_id="x")
    with pytest.raises(NotFound):
        await acquire("storage:other", digest, worker_id="x", incarnation="x", request_id="x")
    with pytest.raises(InvalidField):
        await acquire("w1", digest, worker_id="", incarnation="x", request_id="x")
    release = world.registry.release_transfer
    with pytest.raises(InvalidField):
        await release("t", transferred_bytes=-1, elapsed_s=0.0)
    with pytest.raises(InvalidField):
        await release("t", transferred_bytes=0, elapsed_s=-1.0)
    assert await release("unknown", transferred_bytes=0, elapsed_s=0.0) is False
    await world.registry.withdraw_source("unknown")


# ------------------------------------------------------------ who still loads, and where to start


async def test_a_starter_reads_behind_another_and_says_what_it_misses(world: World) -> None:
    digest = await world.publish("chain")
    planned = world.registry.plan_fetch

    async def starts(name: str) -> Source:
        own = Source(
            name, digest, WeightTier.L1_HOST, f"http://10.0.0.1/{name}", name, f"{name}-1",
            partial=True,
        )  # fmt: skip
        await world.registry.announce_source(own)
        return own

    first, second = await starts("s1"), await starts("s2")
    plan = await planned(digest, worker_id="s1", incarnation="s1-1", node="")
    assert [r.source.source_id for r in plan.sources] == [STORAGE]
    assert any("from whom is not known" in told for told in plan.excluded)
    at_storage = await world.registry.acquire_transfer(
        STORAGE, digest, worker_id="s1", incarnation="s1-1", request_id="1", readers_seen=0
    )
    assert (at_storage.readers, at_storage.source_incarnation) == (1, "")
    with pytest.raises(Overloaded, match="plan anew"):
        await world.registry.acquire_transfer(
            STORAGE, digest, worker_id="s2", incarnation="s2-1", request_id="2", readers_seen=0
        )
    plan = await planned(digest, worker_id="s2", incarnation="s2-1", node="")
    assert [r.source.source_id for r in plan.sources] == ["s1", STORAGE]
    behind = plan.sources[0]
    assert behind.source.partial and behind.gives == () and behind.complete_in_s is not None
    assert plan.sources[1].gives == ((0, 1),) and plan.sources[1].complete_in_s is None
    taken = await world.registry.acquire_transfer(
        "s1", digest, worker_id="s2", incarnation="s2-1", request_id="3",
        source_incarnation=first.incarnation, readers_seen=behind.source.readers,
    )  # fmt: skip
    assert taken.source_incarnation == "s1-1" and taken.layout_digest == ""
    plan = await planned(digest, worker_id="s1", incarnation="s1-1", node="")
    assert any("it reads from the target itself" in told for told in plan.excluded)
    await world.registry.announce_source(replace(first, held=((0, 1),)))
    plan = await planned(digest, worker_id="s3", incarnation="s3-1", node="", missing=((0, 5),))
    assert {r.source.source_id: r.gives for r in plan.sources}["s1"] == ((0, 1),)
    with pytest.raises(InvalidField, match="missing"):
        await planned(digest, worker_id="s3", incarnation="s3-1", node="", missing=((7, 9),))
    with pytest.raises(StaleEpoch):
        await world.registry.acquire_transfer(
            "s1", digest, worker_id="s4", incarnation="s4-1", request_id="4",
            source_incarnation="s1-0",
        )  # fmt: skip
    with pytest.raises(IdentityMismatch, match="layout_digest"):
        await world.registry.acquire_transfer(
            "s1", digest, worker_id="s4", incarnation="s4-1", request_id="4", layout_digest="p/1"
        )
    await world.registry.announce_source(replace(second, draining=True))
    plan = await planned(digest, worker_id="s3", incarnation="s3-1", node="")
    assert any("s2: it leaves" in told for told in plan.excluded)


async def test_starts_are_placed_over_nodes_and_sources(world: World) -> None:
    digest = await world.publish("placed")
    await world.registry.announce_source(
        Source("w1", digest, WeightTier.L1_HOST, "http://10.0.0.1/w1", "w1", "w1-1", "n1")
    )
    nodes = [StartNode("n1", queue_s=1.0, runtime_init_s=5.0), StartNode("n2", "r", 0.0, None, 1e3)]
    found = await world.registry.place_start(digest, nodes=nodes, starts=3)
    assert [choice.node for choice in found.choices] == ["n2", "n1"]
    first = found.choices[0]
    assert first.total_s == pytest.approx(first.queue_s + first.artifact_s + 5.0)
    assert "runtime init 5.00 (as elsewhere)" in first.why and first.source.source_id == "w1"
    assert [choice.node for choice in found.alternatives] == ["n1"]
    assert any("start 3 of 3: no node has a place" in told for told in found.excluded)
    for wrong in ([], [StartNode("n1"), StartNode("n1")], [StartNode("n1", queue_s=-1.0)]):
        with pytest.raises(InvalidField, match="nodes"):
            await world.registry.place_start(digest, nodes=wrong)
    with pytest.raises(InvalidField, match="starts"):
        await world.registry.place_start(digest, nodes=nodes, starts=-1)


# ----------------------------------------------------------- what is said of a manifest afterwards


async def test_signatures_and_origins_are_told_with_the_manifest(
    world: World, tmp_path: Path
) -> None:
    digest, other = await world.publish("signed"), await world.publish("signed")
    key = SigningKey.new(tmp_path / "k.pem")
    envelope = key.envelope(digest)
    sign = world.registry.sign_manifest
    assert await sign(digest, public_key=key.public_key, envelope=envelope)
    assert not await sign(digest, public_key=key.public_key, envelope=envelope)
    for wrong in ("{}", key.envelope(other), envelope.replace('"sig":"', '"sig":"AAAA')):
        with pytest.raises(InvalidField):
            await sign(digest, public_key=key.public_key, envelope=wrong)
    with pytest.raises(InvalidField):
        await sign(digest, public_key=b"short", envelope=envelope)
    with pytest.raises(NotFound):
        await sign(UNKNOWN, public_key=key.public_key, envelope=key.envelope(UNKNOWN))
    await world.registry.record_origin(digest, {"ref": "main", "commit": "1" * 40})
    for bad in (
        {"": "x"},
        {"x": ""},
        {"x": "a\nb"},
        {"x": "y" * 501},
        {str(n): "x" for n in range(17)},
    ):
        with pytest.raises(InvalidField):
            await world.registry.record_origin(digest, bad)
    trail = await world.registry.trail(digest)
    (held,) = trail.signatures
    assert (held.key_id, held.public_key, held.envelope) == (key.key_id, key.public_key, envelope)
    assert trail.origin == {"ref": "main", "commit": "1" * 40} and not trail.retired
    assert (await world.registry.trail(other)).signatures == ()
    with pytest.raises(NotFound):
        await world.registry.trail(UNKNOWN)


async def test_uploads_are_held_where_bytes_are_collected(world: World) -> None:
    assert await world.registry.hold_upload("up", [sha256(b"x")]) == 0.0, "nothing collects here"
    assert await world.registry.hold_upload("up", (), release=True) == 0.0


async def test_of_two_publishers_of_one_tag_exactly_one_wins(world: World) -> None:
    """Each publishes and points the same tag, from where both have seen it."""
    held = ""
    for round_ in range(6):
        mine, other = await world.publish("two"), await world.publish("two")
        answers = await asyncio.gather(
            *(world.registry.set_tag("two/prod", d, expected_digest=held) for d in (mine, other)),
            return_exceptions=True,
        )
        assert sum(isinstance(a, Conflict) for a in answers) == 1, answers
        history = await world.registry.list_tags("two/prod")
        assert len(history) == round_ + 1
        held = history[0].digest


async def test_eight_that_start_at_once_form_one_chain(world: World) -> None:
    """R8.4: nobody reserves by planning, and still no source gets two readers."""
    data = bytes(range(256)) * 16 * 100  # a hundred chunks: a chain of eight costs eight of them
    await world.put(data)
    digest, _created = await world.registry.publish_manifest(document("herd", data=data))

    async def starts(name: str) -> tuple[str, int]:
        own = Source(
            name, digest, WeightTier.L1_HOST, f"http://10.0.0.1/{name}", name, f"{name}-1",
            bandwidth_bytes_per_s=0.3e9, partial=True, readers_max=4,
        )  # fmt: skip
        await world.registry.announce_source(own)
        for turn in range(1, 30):
            plan = await world.registry.plan_fetch(
                digest, worker_id=name, incarnation=f"{name}-1", node=""
            )
            first = plan.sources[0].source
            try:
                await world.registry.acquire_transfer(
                    first.source_id, digest, worker_id=name, incarnation=f"{name}-1",
                    request_id="1", source_incarnation=first.incarnation,
                    readers_seen=first.readers,
                )  # fmt: skip
            except Overloaded:
                await asyncio.sleep(0.002)
                continue
            return first.source_id, turn
        raise AssertionError(f"{name} found no place")

    found = await asyncio.gather(*(starts(f"s{n}") for n in range(8)))
    parents = [parent for parent, _turns in found]
    assert sorted(parents).count(STORAGE) == 1 and len(set(parents)) == 8, parents
    assert max(turns for _parent, turns in found) <= 20
