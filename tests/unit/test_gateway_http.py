"""The gateway's side of HTTP/1.1, over real sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from readyplane_gateway import http_server
from readyplane_gateway.http_server import GONE, WHOLE, HttpConnection

App = Callable[[Any, Any, Any], Awaitable[None]]


@asynccontextmanager
async def serving(
    app: App, *, keep_s: int = 5
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_keep_alive=keep_s)
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: HttpConnection(config, state, {}), "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        await asyncio.sleep(0.01)
        assert not state.connections


async def whole_body(receive: Any) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message["body"])
        if not message["more_body"]:
            return b"".join(parts)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Says the path and the body back, with a length."""
    said = scope["path"].encode() + b" " + await whole_body(receive)
    headers = [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


async def chunks(scope: Any, receive: Any, send: Any) -> None:
    del scope
    await whole_body(receive)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"one", b"two"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def post(path: str, body: bytes, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    lower = head.lower()
    if b"transfer-encoding: chunked" in lower:
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return head, body
    length = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
    return head, await reader.readexactly(length)


async def test_one_connection_serves_one_request_after_the_other() -> None:
    async with serving(echo) as (reader, writer):
        for number in range(3):
            writer.write(post(f"/p{number}?q=1", b"x" * number))
            head, body = await answer(reader)
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert body == f"/p{number} ".encode() + b"x" * number


async def test_requests_sent_together_are_answered_in_their_order() -> None:
    async with serving(echo) as (reader, writer):
        writer.write(b"".join(post(f"/{n}", b"b") for n in range(20)))
        assert [(await answer(reader))[1] for _ in range(20)] == [
            f"/{n} b".encode() for n in range(20)
        ]


async def test_a_stream_is_chunked_and_a_head_has_no_body() -> None:
    async with serving(chunks) as (reader, writer):
        writer.write(post("/", b""))
        head, body = await answer(reader)
        assert b"transfer-encoding: chunked" in head
        assert body == b"onetwo"
        writer.write(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 0" in head
        writer.write(post("/", b""))
        assert (await answer(reader))[1] == b"onetwo"


@pytest.mark.parametrize("size", [10, 3 * 2**20], ids=["short", "long"])
async def test_a_body_may_come_in_pieces(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "WHOLE_BODY_S_MAX", 0.05)
    async with serving(echo) as (reader, writer):
        request = post("/", b"y" * size, "expect: 100-continue")
        cut = len(request) - size // 2
        writer.write(request[:cut])
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await asyncio.sleep(0.1)
        writer.write(request[cut:])
        assert (await answer(reader))[1] == b"/ " + b"y" * size


async def test_who_wants_to_hears_at_once_that_the_client_has_gone() -> None:
    heard = asyncio.Event()

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        await whole_body(receive)
        assert scope[GONE](heard.set)
        await heard.wait()
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert not scope[GONE](None)

    async with serving(waiting) as (_, writer):
        writer.write(post("/", b"x"))
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.wait_for(heard.wait(), 2)
        await asyncio.sleep(0.01)


async def test_a_client_that_does_not_read_holds_the_application_up() -> None:
    sent = 0

    async def much(scope: Any, receive: Any, send: Any) -> None:
        nonlocal sent
        await whole_body(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(200):
            await send({"type": "http.response.body", "body": b"z" * 65536, "more_body": True})
            sent += 1
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})

    async with serving(much) as (reader, writer):
        transport: Any = writer.transport
        transport.pause_reading()
        writer.write(post("/", b""))
        await asyncio.sleep(0.3)
        assert sent < 200
        transport.resume_reading()
        assert len((await answer(reader))[1]) == 200 * 65536


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"what is this\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 300_000 + b"\r\n\r\n", b"431"),
    ],
)
async def test_what_is_not_for_the_application_is_said_and_closed(
    sent: bytes, status: bytes
) -> None:
    async with serving(echo) as (reader, writer):
        writer.write(sent)
        data = await asyncio.wait_for(reader.read(), 2)
        assert data.startswith(b"HTTP/1.1 " + status)
        assert b"connection: close" in data
        head, _, body = data.partition(b"\r\n\r\n")
        assert b"content-type: application/json" in head
        assert f"content-length: {len(body)}".encode() in head
        error = json.loads(body)["error"]  # as every error of the API
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == ("headers_too_large" if status == b"431" else "invalid_http")


async def test_headers_that_do_not_come_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S_MAX", 0.1)
    async with serving(echo) as (reader, writer):
        writer.write(post("/", b"first") + b"POST / HTTP/1.1\r\nhost:")
        assert (await answer(reader))[1] == b"/ first"
        data = await asyncio.wait_for(reader.read(), 2)
        assert data.startswith(b"HTTP/1.1 408")
        assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["code"] == "headers_timeout"


async def test_an_application_that_breaks_ends_its_connection() -> None:
    async def half(scope: Any, receive: Any, send: Any) -> None:
        del scope
        await whole_body(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})

    async with serving(half) as (reader, writer):
        writer.write(post("/", b""))
        data = await asyncio.wait_for(reader.read(), 2)
        assert data.endswith(b"some\r\n")  # and no last chunk: it does not look complete


async def test_no_header_is_smuggled_in() -> None:
    async def bad(scope: Any, receive: Any, send: Any) -> None:
        del scope
        await whole_body(receive)
        with pytest.raises(ValueError, match="line break"):
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b\r\nc: d")]}
            )
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with serving(bad) as (reader, writer):
        writer.write(post("/", b"", "connection: close"))
        data = await asyncio.wait_for(reader.read(), 2)
        assert data.startswith(b"HTTP/1.1 204 No Content\r\n")
        assert b"content-length" not in data


async def test_a_body_that_is_there_may_be_taken_whole_and_once() -> None:
    taken: list[bytes | None] = []

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        taken.extend((scope[WHOLE](), scope[WHOLE]()))
        if taken[0] is None:
            taken[0] = await whole_body(receive)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * len(taken[0] or b"")})

    async with serving(whole) as (reader, writer):
        for size in (5, 3 * 2**20):  # the long one is begun before it is there
            taken.clear()
            writer.write(post("/", b"y" * size))
            head, body = await answer(reader)
            assert len(body) == size
            assert f"content-length: {size}".encode() in head
            assert taken == [b"y" * size, None]


async def test_who_is_idle_is_closed_and_who_asks_now_and_then_is_not() -> None:
    async with serving(echo, keep_s=1) as (reader, writer):
        for _ in range(4):
            writer.write(post("/", b"z"))
            assert (await answer(reader))[1] == b"/ z"
            await asyncio.sleep(0.4)
        assert await asyncio.wait_for(reader.read(), 3) == b""
