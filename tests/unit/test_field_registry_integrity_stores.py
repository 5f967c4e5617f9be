"""Field reports on the integrity of bytes: who is offered as a source, and object stores that fail.

The promises that every byte store keeps are in tests/contract/test_byte_stores.py.
"""

import asyncio
import itertools
import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from obstore.store import S3Store

from readyplane.core.errors import InvalidField, Overloaded, Refused, Unavailable
from readyplane.core.identity import Manifest
from readyplane.core.startup import WeightTier
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.http import make_app
from readyplane.ports import Source
from readyplane_agent import ranges
from readyplane_registry import blob_objects, ingest, storage_asked
from readyplane_registry.blob_http import BlobRoutes
from readyplane_registry.blob_objects import ObjectBlobs
from readyplane_registry.blobs import MemoryBlobs
from readyplane_registry.fetching import NoTally, RegistryPolicy
from readyplane_registry.live import MemoryLive
from readyplane_registry.retrying import RetryPolicy
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from tests.registry_data import document, sha256

MEBI = 1024 * 1024
DATA = bytes(range(256)) * 20
DIGEST = sha256(DATA)
ME: dict[str, Any] = {"worker_id": "me", "incarnation": "me-1"}
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Counted(NoTally):
    """What was counted, by name and labels."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = {}

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        key = " ".join([name, *(f"{k}={v}" for k, v in sorted(labels.items()))])
        self.counts[key] = self.counts.get(key, 0.0) + amount


def registry(
    tally: Counted | None = None, policy: RegistryPolicy | None = None
) -> tuple[RegistryService, MemoryBlobs]:
    ids = itertools.count()
    blobs = MemoryBlobs()
    service = RegistryService(
        store=MemoryCatalog(),
        live=MemoryLive(SystemClock(), weight=0.3),
        blobs=blobs,
        clock=SystemClock(),
        make_id=lambda: f"t{next(ids)}",
        storage_url=lambda: "http://127.0.0.1:1/v1/blobs",
        tally=tally,
        policy=policy,
    )
    return service, blobs


async def sent(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def publish(service: RegistryService, blobs: MemoryBlobs, data: bytes = DATA) -> Manifest:
    await blobs.put_stream(sha256(data), sent(data))
    digest, _created = await service.publish_manifest(document("m", data=data))
    return await service.get_manifest(digest)


def peer(digest: str, name: str = "w1") -> Source:
    return Source(name, digest, WeightTier.L1_HOST, f"http://10.0.0.1/{name}", name, f"{name}-1")


async def test_b115_a_peer_that_gives_wrong_bytes_is_not_offered_and_the_next_one_is() -> None:
    """B115: the digest is not poisoned: the next source gives, and the right bytes count."""
    tally = Counted()
    service, blobs = registry(tally)
    digest = (await publish(service, blobs)).digest
    await service.announce_source(peer(digest))
    taken = await service.acquire_transfer("w1", digest, request_id="1", **ME)
    assert await service.release_transfer(
        taken.transfer_id, transferred_bytes=64, elapsed_s=0.1,
        failure="corrupt: chunk 3 of weights.raw",
    )  # fmt: skip
    plan = await service.plan_fetch(digest, node="", **ME)
    assert [r.source.source_id for r in plan.sources] == ["storage:registry"]
    assert "w1: quarantined for wrong bytes (chunk 3 of weights.raw)" in plan.excluded[0]
    with pytest.raises(Overloaded, match="wrong bytes"):
        await service.acquire_transfer("w1", digest, request_id="2", **ME)
    (why,) = await service.bars()
    assert (why.source_id, why.reader, why.digest) == ("w1", "me", digest)
    assert tally.counts["quarantines tier=L1"] == 1.0
    assert tally.counts["bars outcome=corrupt tier=L1"] == 1.0
    with pytest.raises(InvalidField):
        await blobs.put_stream(sha256(b"other"), sent(DATA))
    assert await blobs.put_stream(sha256(b"other"), sent(b"other"))


async def test_b124_what_was_collected_is_demanded_again() -> None:
    """B124: after a collection the same content is published: its upload is asked for."""
    service, blobs = registry()
    manifest = await publish(service, blobs)
    await blobs.remove(DIGEST)
    assert await blobs.missing(manifest.files) != ()
    plan = await service.plan_fetch(manifest.digest, node="", **ME)
    assert plan.sources == () and "not whole" in plan.excluded[0]
    await publish(service, blobs)
    plan = await service.plan_fetch(manifest.digest, node="", **ME)
    assert [r.source.source_id for r in plan.sources] == ["storage:registry"]


async def test_b125_a_ready_peer_comes_before_storage_and_bytes_are_counted_by_tier() -> None:
    """B125, the registry's half: what a plan says is what is counted, tier by tier."""
    tally = Counted()
    service, blobs = registry(tally)
    digest = (await publish(service, blobs)).digest
    await service.announce_source(peer(digest))
    plan = await service.plan_fetch(digest, node="", **ME)
    assert [r.source.source_id for r in plan.sources] == ["w1", "storage:registry"]
    first = plan.sources[0].source
    taken = await service.acquire_transfer(first.source_id, digest, request_id="1", **ME)
    await service.release_transfer(taken.transfer_id, transferred_bytes=len(DATA), elapsed_s=0.1)
    assert tally.counts["transferred_bytes tier=L1"] == len(DATA)
    assert not any("tier=L4" in key for key in tally.counts), "nothing came from the origin"


# ------------------------------------------------------------- an object store that answers wrongly


@asynccontextmanager
async def answering(
    talk: Talk, requests: list[bytes] | None = None
) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that reads a request and then does what `talk` says; with the requests it got."""
    asked: list[bytes] = [] if requests is None else requests

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked.append(await reader.readuntil(b"\r\n\r\n"))
            await talk(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}", asked
    finally:
        server.close()


def objects(endpoint: str, tally: Counted | None = None, **policy: float) -> ObjectBlobs:
    store = S3Store(
        "blobs",
        config={
            "endpoint": endpoint,
            "region": "us-east-1",
            "access_key_id": "key",
            "secret_access_key": "hunter2-abc",
        },
        client_options={"allow_http": True},
        retry_config={"max_retries": 0},
    )
    retry = RetryPolicy(first_wait_s=0.001, wait_max_s=0.002, per_second=0.0, **policy)  # type: ignore[arg-type]
    return ObjectBlobs(
        store, name="s3://blobs", clock=SystemClock(), random=lambda: 1.0, retry=retry, tally=tally
    )


def says(status: str, body: bytes, length: int | None = None, *headers: str) -> Talk:
    async def talk(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = [
            f"HTTP/1.1 {status}",
            f"Content-Length: {len(body) if length is None else length}",
            "Last-Modified: Tue, 01 Dec 2026 08:00:00 GMT",
            'ETag: "x"',
            "Connection: close",
            *headers,
        ]
        writer.write(("\r\n".join(lines) + "\r\n\r\n").encode() + body)
        await writer.drain()

    return talk


RANGE = f"Content-Range: bytes 0-{len(DATA) - 1}/{len(DATA)}"


@pytest.mark.parametrize(
    "talk",
    [
        says("200 OK", b""),
        says("200 OK", b"<!doctype html><title>Sign in</title>"),
        says("206 Partial Content", DATA[:100], len(DATA), RANGE),
        says("206 Partial Content", b"", 0, "Content-Range: bytes 0-0/0"),
        says("416 Range Not Satisfiable", b""),
        says("503 Slow Down", b"<?xml version='1.0'?><Error/>"),
        says("403 Forbidden", b""),
    ],
    ids=["empty", "HTML", "early end", "empty part", "shorter", "503", "403"],
)
async def test_b122_an_object_store_that_gives_no_bytes_ends_in_an_error_that_names_it(
    talk: Talk,
) -> None:
    """B122: 200 with nothing, an early end, a page: typed, named, and not tried for ever."""
    got = b""

    async def reads(blobs: ObjectBlobs) -> None:
        nonlocal got
        async for piece in blobs.stream(DIGEST, begin=0, end=len(DATA)):
            got += piece

    async with answering(talk) as (endpoint, asked):
        with pytest.raises(Unavailable) as caught:
            await reads(objects(endpoint))
        assert DATA.startswith(got), "never a byte that is not the blob's"
        told = str(caught.value)
        assert "s3://blobs" in told and "; " in told, "the store, and what to do"
        assert "hunter2" not in told
        assert 1 <= len(asked) <= 20


async def test_b122_what_a_read_that_broke_off_had_is_not_read_again() -> None:
    """An early end is taken up where it was: the second request asks for the rest only."""
    data = os.urandom(3 * MEBI)
    requests: list[bytes] = []
    begins: list[int] = []

    async def breaks_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        found = re.search(rb"range: bytes=(\d+)-", requests[-1].lower())
        assert found is not None
        at = int(found[1])
        begins.append(at)
        until = 2 * MEBI if len(begins) == 1 else len(data)
        told = f"Content-Range: bytes {at}-{len(data) - 1}/{len(data)}"
        await says("206 Partial Content", data[at:until], len(data) - at, told)(reader, writer)

    async with answering(breaks_once, requests) as (endpoint, _asked):
        pieces = objects(endpoint).stream(DIGEST, begin=0, end=len(data))
        got = b"".join([piece async for piece in pieces])
    assert got == data
    assert begins[0] == 0 and len(begins) == 2 and MEBI <= begins[1] <= 2 * MEBI


async def test_an_outage_is_not_multiplied_by_those_who_try_again() -> None:
    """With 200 calls at a store that is down, retries stay within the budget that all share."""
    tally = Counted()
    async with answering(says("503 Slow Down", b"")) as (endpoint, asked):
        blobs = objects(endpoint, tally, budget_retries_max=10.0, per_call=0.0)
        found = await asyncio.gather(
            *(blobs.length(sha256(str(n).encode())) for n in range(200)), return_exceptions=True
        )
    assert all(isinstance(answer, Unavailable) for answer in found)
    assert 200 <= len(asked) <= 210
    assert tally.counts["store_calls outcome=retried what=asked"] == 10.0
    assert tally.counts["store_calls outcome=failed what=asked"] == 200.0


async def test_b124_that_bytes_are_there_is_believed_for_a_moment_by_plans_only() -> None:
    """A store that is far is not asked by every plan; who doubts it makes the next plan ask."""
    policy = RegistryPolicy(storage_asked_every_s=60.0)
    service, blobs = registry(policy=policy)
    manifest = await publish(service, blobs)
    asked = 0
    ask = blobs.missing

    async def counted(files: Any) -> tuple[str, ...]:
        nonlocal asked
        asked += 1
        return await ask(files)

    blobs.missing = counted  # type: ignore[method-assign]
    plans = [await service.plan_fetch(manifest.digest, node="", **ME) for _ in range(5)]
    assert all(len(plan.sources) == 1 for plan in plans)
    assert asked == 1
    await blobs.remove(DIGEST)
    with pytest.raises(Refused):
        await service.publish_manifest(document("m", data=DATA))
    name = plans[0].sources[0].source.source_id
    taken = await service.acquire_transfer(name, manifest.digest, request_id="1", **ME)
    await service.release_transfer(
        taken.transfer_id, transferred_bytes=0, elapsed_s=0.1, failure="corrupt: an empty body"
    )
    plan = await service.plan_fetch(manifest.digest, node="", **ME)
    assert plan.sources == () and "not whole" in plan.excluded[0]


async def test_a_store_that_hangs_keeps_no_plan_from_a_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer is offered and the store named; the late answer is there for the next plan."""
    monkeypatch.setattr(storage_asked, "PLAN_WAITS_S_MAX", 0.05)
    service, blobs = registry()
    manifest = await publish(service, blobs)
    await service.announce_source(peer(manifest.digest))
    asked, goes, ask = 0, asyncio.Event(), blobs.missing

    async def hanging(files: Any) -> tuple[str, ...]:
        nonlocal asked
        asked += 1
        await goes.wait()
        return await ask(files)

    monkeypatch.setattr(blobs, "missing", hanging)
    plans = await asyncio.gather(
        *(service.plan_fetch(manifest.digest, node="", **ME) for _ in range(20))
    )
    for plan in plans:
        assert [ranked.source.source_id for ranked in plan.sources] == ["w1"]
        assert "the byte store has not said for" in plan.excluded[0]
    assert asked == 1, "who hangs is asked once for all"
    goes.set()
    await asyncio.sleep(0.1)
    late = await service.plan_fetch(manifest.digest, node="", **ME)
    assert len(late.sources) == 2 and asked == 1


async def test_who_reads_bytes_learns_which_store_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    service, blobs = registry()
    manifest = await publish(service, blobs)

    async def away(_sha256: str) -> int | None:
        raise Unavailable("s3://blobs cannot be asked (no answer", "look at\nthe store)")

    monkeypatch.setattr(blobs, "length", away)
    app = make_app("registry", TokenCheck(""), set(), lambda: (True, ""))
    app.include_router(BlobRoutes(service, blobs, NoTally()).router)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://registry") as client:
        path = f"/v1/blobs/{DIGEST.replace(':', '/')}"
        answer = await client.get(path, headers={"Range": "bytes=0-9"})
        whole = await client.head(path)
    assert whole.status_code == answer.status_code == 503
    head = {"": f"HTTP/1.1 {answer.status_code}"} | dict(answer.headers)
    fault = ranges.refused(head, manifest.files[0])
    assert fault is not None and fault.kind == "busy"
    assert fault.detail.startswith(
        "answered 503: s3://blobs cannot be asked (no answer; look at the"
    )


async def test_a_store_is_not_asked_about_ever_more_artifacts_while_it_hangs() -> None:
    service, blobs = registry()
    manifest = await publish(service, blobs)

    async def hanging(_files: Any) -> tuple[str, ...]:
        await asyncio.sleep(60)
        return ()

    blobs.missing = hanging  # type: ignore[method-assign,assignment]
    store = storage_asked.StorageAsked(blobs, SystemClock(), believed_s=0.0)
    asks = [
        asyncio.create_task(store.missing(replace(manifest, model=f"m{n}")))
        for n in range(storage_asked.ASKED_AT_ONCE_MAX)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="owes 64 answers"):
        await store.missing(manifest)
    for ask in asks:
        ask.cancel()


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("CALL_TIMEOUT_S", 0.2),
        ("STORE_SILENT_S_MAX", 0.3),
        ("PART_SILENT_S_MAX", 0.5),
        ("LOOK_EVERY_S", 0.05),
    ):
        monkeypatch.setattr(blob_objects, name, seconds)


async def hangs(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """It takes the connection and says nothing, as a stopped process does."""
    while await reader.read(65_536):
        continue
    await asyncio.sleep(1)


@pytest.mark.usefixtures("brisk")
async def test_a_store_that_hangs_is_named_before_whoever_asked_gives_the_registry_up() -> None:
    async with asyncio.timeout(20), answering(hangs) as (endpoint, asked):
        tally = Counted()
        blobs = objects(endpoint, tally, tries_max=100, budget_retries_max=100.0)
        with pytest.raises(Unavailable, match="s3://blobs cannot be asked"):
            await blobs.length(DIGEST)
        assert len(asked) <= 4, "no try begins when the store has been silent for long"
        with pytest.raises(Unavailable, match="s3://blobs cannot be read"):
            async for _ in blobs.stream(DIGEST, begin=0, end=10):
                pass
        assert len(asked) <= 9


@pytest.mark.usefixtures("brisk")
async def test_an_upload_that_the_store_does_not_take_ends_and_a_slow_sender_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(blob_objects, "PART_BYTES", 5 * MEBI)
    big = bytes(17 * MEBI)

    async def absent(self: ObjectBlobs, sha256: str) -> int | None:
        return None

    monkeypatch.setattr(ObjectBlobs, "length", absent)
    slept: list[float] = []

    async def pieces(pause_s: float) -> AsyncIterator[bytes]:
        for at in range(0, len(big), MEBI):
            yield big[at : at + MEBI]
            if at == 2 * MEBI:  # the sender may take longer than the store may
                await asyncio.sleep(pause_s)
                slept.append(pause_s)

    async with asyncio.timeout(20), answering(hangs) as (endpoint, _):
        with pytest.raises(Unavailable, match=r"s3://blobs cannot be written: .*taken nothing"):
            await objects(endpoint).put_stream(sha256(big), pieces(0.8))
    assert slept == [0.8], "it is the store that is waited for in vain, not the sender"


def test_the_registry_speaks_of_its_store_before_its_client_is_tired() -> None:
    last_s = blob_objects.STORE_SILENT_S_MAX + blob_objects.CALL_TIMEOUT_S
    assert max(last_s, blob_objects.PART_SILENT_S_MAX) < ingest.SILENT_S_MAX
