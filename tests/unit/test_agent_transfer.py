"""The agent as a source of weights: what it gives, to whom, and what it refuses (R9)."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from readyplane.core.errors import InvalidField
from readyplane.kit.clock import SystemClock
from readyplane_agent import transfer
from readyplane_agent.arena import Arena
from readyplane_agent.engines.exchange import exchange
from readyplane_agent.loader import Loader
from readyplane_agent.ranges import HttpReader
from readyplane_agent.reading import Reader
from readyplane_agent.trace import StartTrace
from readyplane_agent.transfer import REQUESTS_PER_READER, TransferServer
from tests.unit.agent_twins import Artifact, TwinRegistry, artifact, source

INCARNATION = "w1-abc"


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


@asynccontextmanager
async def giving(art: Artifact, **more: Any) -> AsyncIterator[TransferServer]:
    arena = loaded(art)
    server = TransferServer(incarnation=INCARNATION, clock=SystemClock(), **more)
    await server.start()
    server.offer(arena)
    try:
        yield server
    finally:
        await server.stop()
        arena.close()


async def raw(server: TransferServer, target: str, *headers: str) -> tuple[str, bytes]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [f"GET {target} HTTP/1.1", "Host: x", "Connection: close", *headers, "", ""]
    writer.write("\r\n".join(lines).encode())
    data = await reader.read(-1)
    writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return head.decode(), body


def target(art: Artifact, path: str, incarnation: str = INCARNATION) -> str:
    return f"/v1/chunks/{art.manifest.digest}/{path}?incarnation={incarnation}"


async def test_ranges_come_back_as_published() -> None:
    art = artifact()
    async with giving(art) as server:
        for path, data in art.files.items():
            head, body = await raw(server, target(art, path))
            assert head.startswith("HTTP/1.1 200 OK") and body == data
        path, data = "model-0.safetensors", art.files["model-0.safetensors"]
        head, body = await raw(server, target(art, path), "Range: bytes=100-299")
        assert head.startswith("HTTP/1.1 206") and body == data[100:300]
        assert f"Content-Range: bytes 100-299/{len(data)}" in head
        head, body = await raw(server, target(art, path), f"Range: bytes={len(data) - 3}-")
        assert body == data[-3:]
        assert server.bytes_served == sum(map(len, art.files.values())) + 203


@pytest.mark.parametrize(
    "make_target, headers, status",
    [
        (lambda a: target(a, "model-0.safetensors", "w1-old"), (), "409"),  # B144
        (lambda a: target(a, "model-0.safetensors", ""), (), "409"),
        (lambda a: target(a, "nothing.bin"), (), "404"),
        (lambda a: target(a, "../../etc/passwd"), (), "404"),
        (lambda a: target(a, "%2e%2e/config.json"), (), "404"),
        (
            lambda a: f"/v1/chunks/sha256:{'0' * 64}/config.json?incarnation={INCARNATION}",
            (),
            "404",
        ),
        (lambda a: "/v1/other", (), "404"),
        (lambda a: target(a, "config.json"), ("Range: bytes=5-9",), "416"),
        (lambda a: target(a, "config.json"), ("Range: bytes=1-0",), "416"),
        (lambda a: target(a, "config.json"), ("Range: bytes=0-1,3-4",), "416"),
        (lambda a: target(a, "config.json"), ("Range: chapters=1-2",), "416"),
    ],
)
async def test_refusals(make_target: Any, headers: tuple[str, ...], status: str) -> None:
    art = artifact()
    async with giving(art) as server:
        head, body = await raw(server, make_target(art), *headers)
        assert head.split(" ")[1] == status
        assert body not in art.files.values()
        assert server.refused == {status: 1}


async def test_what_is_not_verified_yet_is_never_given() -> None:
    """B115: the bytes lie in the arena already, and go out only once they are verified."""
    art = artifact()
    server = TransferServer(incarnation=INCARNATION, clock=SystemClock())
    await server.start()
    head, _ = await raw(server, target(art, "config.json"))
    assert head.split(" ")[1] == "404"
    arena = Arena(art.manifest)
    server.offer(arena)
    path, data = "model-0.safetensors", art.files["model-0.safetensors"]
    chunk = art.manifest.chunk_bytes
    with arena.window(path, 1) as window:
        window[:] = data[chunk : 2 * chunk]
    one = f"Range: bytes={chunk}-{2 * chunk - 1}"
    head, body = await raw(server, target(art, path), one)
    assert head.split(" ")[1] == "425" and data[chunk : chunk + 16] not in body
    arena.mark(path, 1)
    head, body = await raw(server, target(art, path), one)
    assert head.split(" ")[1] == "206" and body == data[chunk : 2 * chunk]
    for wider in (f"Range: bytes={chunk - 1}-{chunk}", f"Range: bytes={chunk}-{2 * chunk}"):
        head, _ = await raw(server, target(art, path), wider)
        assert head.split(" ")[1] == "425"
    with pytest.raises(InvalidField):
        arena.window(path, 1)  # a verified chunk may be on its way: nobody writes it again
    await server.stop()
    arena.close()


async def test_a_token_is_asked_for_weights_not_for_health() -> None:
    art = artifact()
    async with giving(art, token="secret") as server:
        head, _ = await raw(server, target(art, "config.json"))
        assert head.split(" ")[1] == "401"
        head, body = await raw(server, target(art, "config.json"), "Authorization: Bearer secret")
        assert body == art.files["config.json"]
        assert (await raw(server, "/healthz"))[0].split(" ")[1] == "200"


async def test_health_says_why_not() -> None:
    art = artifact()
    async with giving(art, health=lambda: (False, "draining")) as server:
        answer = await exchange(server.url, "/healthz")
        assert (answer.status, answer.body) == (503, b"draining\n")


async def test_readers_are_bounded() -> None:
    """R8.4, R9.1: beyond the bound a typed refusal, not a slow answer for everybody."""
    art = artifact(floats=200_000)
    async with giving(art, readers_max=1, bytes_per_s=100_000.0) as server:
        reading = []
        async with asyncio.timeout(10):
            while server.active < REQUESTS_PER_READER:
                asking = raw(server, target(art, "model-0.safetensors"))
                reading.append(asyncio.create_task(asking))
                await asyncio.sleep(0.05)
        head, _ = await raw(server, target(art, "model-0.safetensors"))
        assert head.split(" ")[1] == "503" and "Retry-After" in head
        for task in reading:
            task.cancel()


async def test_the_rate_bound_holds_for_all_together() -> None:
    art = artifact(floats=500_000, shards=1)
    data = art.files["model-0.safetensors"]
    async with giving(art, bytes_per_s=10e6) as server:
        begin_s = time.monotonic()
        answers = await asyncio.gather(
            *(raw(server, target(art, "model-0.safetensors")) for _ in range(3))
        )
        took_s = time.monotonic() - begin_s
    assert all(body == data for _, body in answers)
    # The last piece of each is paid for before it goes, so one piece is free.
    assert took_s >= (3 * len(data) - 3 * 2**20) / 10e6


async def test_draining_refuses_newcomers_and_lets_readers_finish() -> None:
    """R22.3: a source in use does not vanish under its readers."""
    art = artifact(floats=300_000)
    async with giving(art) as server:
        reader, writer = await asyncio.open_connection(*server.url[7:].split(":"))
        ask = f"GET {target(art, 'config.json')} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        writer.write(ask)
        assert b"200 OK" in await reader.readuntil(b"{}")
        server.drain()
        head, _ = await raw(server, target(art, "config.json"))
        assert head.split(" ")[1] == "503"
        writer.write(ask)
        assert b"200 OK" in await reader.readuntil(b"{}")
        writer.close()


async def test_a_loader_reads_from_a_peer_and_survives_its_end() -> None:
    """R9.2: the peer leaves midway; the rest comes from the next, only the rest."""
    art = artifact(floats=400_000)
    clock = SystemClock()
    async with giving(art, bytes_per_s=8e6) as leaving, giving(art) as staying:
        registry = TwinRegistry()
        arena = Arena(art.manifest)
        load = Loader(
            arena,
            registry=registry,  # type: ignore[arg-type]
            clock=clock,
            reader=Reader("w2", "w2-x", "local"),
            trace=StartTrace(clock, process_start_s=clock.monotonic_s()),
        )
        peers = [
            source(
                f"{server.url}/v1/chunks/{art.manifest.digest}",
                f"peer:{n}",
                worker_id=f"p{n}",
                incarnation=INCARNATION,
            )
            for n, server in enumerate([leaving, staying])
        ]
        from readyplane.ports import RankedSource

        running = asyncio.create_task(load.run([RankedSource(p, 1.0, "") for p in peers]))
        while leaving.bytes_served < 400_000:
            await asyncio.sleep(0.01)
        await leaving.stop()
        fetched = await running
        assert all(bytes(arena.view(p)) == d for p, d in art.files.items())
        first, second = fetched.uses
        assert first.fault is not None and first.fault.kind == "dead"
        assert 0 < second.bytes_read < art.manifest.size_bytes
        arena.close()


async def test_b144_an_old_record_leads_to_a_refusal_not_to_bytes() -> None:
    """B144: another process at the same address."""
    art = artifact()
    async with giving(art) as server:
        reader = HttpReader(
            f"{server.url}/v1/chunks/{art.manifest.digest}",
            clock=SystemClock(),
            incarnation="w1-before",
        )
        entry = next(e for e in art.manifest.files if e.path == "config.json")
        into = bytearray(2)
        fault = await asyncio.to_thread(reader.read_into, entry, 0, memoryview(into))
        assert fault is not None and fault.kind == "dead" and "409" in fault.detail
        assert into == bytearray(2)
        reader.close()


@pytest.mark.parametrize(
    "garbage", [b"\r\n\r\n", b"GET /\r\n\r\n", b"\xff\xfe\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n"]
)
async def test_garbage_is_answered_or_closed(garbage: bytes) -> None:
    art = artifact()
    async with giving(art) as server:
        reader, writer = await asyncio.open_connection(*server.url[7:].split(":"))
        writer.write(garbage)
        writer.write_eof()
        answer = await reader.read(-1)
        assert not answer or answer.startswith(b"HTTP/1.1 4")
        writer.close()
        assert (await raw(server, "/healthz"))[0].startswith("HTTP/1.1 200")


async def test_an_endless_head_is_cut() -> None:
    art = artifact()
    async with giving(art) as server:
        reader, writer = await asyncio.open_connection(*server.url[7:].split(":"))
        writer.write(b"GET / HTTP/1.1\r\nX: " + b"a" * 60_000)
        assert (await reader.read(-1)).startswith(b"HTTP/1.1 431")
        writer.close()


@pytest.mark.parametrize("asked", ["//[", "http://[", "http://[::1", "//]"])
async def test_a_target_that_is_no_url_is_a_bad_request(
    asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    art = artifact()
    async with giving(art) as server:
        head, _ = await raw(server, asked)
        assert head.split(" ")[1] in {"400", "404"}
        assert asked == "//]" or head.startswith("HTTP/1.1 400 ")
        assert (await raw(server, "/healthz"))[0].startswith("HTTP/1.1 200")
    assert not [r for r in caplog.records if r.exc_info]


async def test_idle_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there are places for, none with a right: peers and health are answered."""
    monkeypatch.setattr(transfer, "REQUEST_LIMIT_S", 30.0)
    art = artifact()
    right = "Authorization: Bearer secret"
    async with giving(art, token="secret", readers_max=1) as server:
        host, port = server.url[7:].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        ask = f"GET {target(art, 'config.json')} HTTP/1.1\r\n{right}\r\n\r\n".encode()
        writer.write(ask)
        assert b"200 OK" in await reader.readuntil(b"{}")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(70)]
        for _, out in idle[::2]:
            out.write(b"GET /healthz HTT")  # half a request is none
        async with asyncio.timeout(5.0):
            assert (await raw(server, "/healthz"))[0].startswith("HTTP/1.1 200")
            assert (await raw(server, target(art, "config.json"), right))[1] == b"{}"
            writer.write(ask)
            assert b"200 OK" in await reader.readuntil(b"{}"), "who may read is not the one to go"
            assert await idle[0][0].read(-1) == b"", "the one that idled longest went"
        for _, out in [*idle, (None, writer)]:
            out.close()


async def test_a_connection_without_a_right_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "REQUEST_LIMIT_S", 0.1)
    art = artifact()
    async with giving(art, token="secret") as server:
        host, port = server.url[7:].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(3.0):
            assert await reader.read(-1) == b""
        writer.close()


async def test_a_reader_finishes_over_a_new_connection_when_its_source_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its name: who has read here may go on, who has a place may begin, others may not."""
    art = artifact()
    named = "X-Readyplane-Reader: w2-abc"
    async with giving(art) as server:
        await raw(server, target(art, "config.json"), named)
        server.drain()
        early, _ = await raw(server, target(art, "config.json"), "X-Readyplane-Reader: w3-abc")
        assert early.split(" ")[1] == "200", "its place was granted before the drain"
        monkeypatch.setattr(transfer, "PLACE_USED_S", -1.0)
        for who, status in (
            (named, "200"),
            ("X-Readyplane-Reader: w4-abc", "503"),
            ("X: y", "503"),
        ):
            head, _ = await raw(server, target(art, "config.json"), who)
            assert head.split(" ")[1] == status
