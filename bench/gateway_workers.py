"""Workers that answer at once, for `bench.gateway`: what is left is the cost of the way to them.

A process of its own: 8 prefill and 8 decode workers over HTTP, in vLLM's words, which also join a
router as every worker does. Prints one JSON line with their URLs when the router has admitted all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import Any

import httptools
import msgspec
import uvloop

from bench.gateway_tokenizer.tokenizers import token_ids
from readyplane import profiles
from readyplane.client import RouterClient
from readyplane.core.startup import SegmentName
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane.ports import Order
from readyplane_lab.demo import MODEL, WORKER_CLASS
from readyplane_lab.simulator.artifact import Artifacts
from readyplane_lab.simulator.ledger import Ledger
from readyplane_lab.simulator.nodes import Nodes
from readyplane_lab.simulator.site import Site
from readyplane_lab.simulator.sources import WeightSources
from readyplane_lab.simulator.startup import Draws, StartUpModel
from readyplane_lab.simulator.worker import SimWorker

WORKERS_A_ROLE = 8
JOIN_S_MAX = 60.0
_PREFILL = re.compile(rb'"do_remote_decode"\s*:\s*true')
_STREAM = re.compile(rb'"stream"\s*:\s*true')
_CHOICE = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}
_USAGE = {"prompt_tokens": 1000, "total_tokens": 1016, "completion_tokens": 16}
_HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL}


def _answer(body: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\ncontent-length: "
    return head + str(len(body)).encode() + b"\r\n\r\n" + body


def _prefilled(port: int) -> bytes:
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(16))],
        "remote_engine_id": f"engine-{port}",
        "remote_request_id": "cmpl-1",
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "tp_size": 1,
        "remote_num_tokens": 1000,
    }
    document = {**_HEAD, "choices": [_CHOICE], "usage": _USAGE, "kv_transfer_params": params}
    return _answer(json.dumps(document).encode())


_WHOLE = _answer(json.dumps({**_HEAD, "choices": [_CHOICE], "usage": _USAGE}).encode())
_EVENT = {**_HEAD, "choices": [{**_CHOICE, "finish_reason": None}]}
_STREAMED = _answer(
    b"".join(b"data: " + json.dumps(_EVENT).encode() + b"\n\n" for _ in range(16))
    + b"data: [DONE]\n\n",
    b"text/event-stream; charset=utf-8",
)
_OK = _answer(b"{}")
_MODELS = _answer(json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode())


class _Connection(asyncio.Protocol):
    """Answers each request as soon as it is there."""

    def __init__(self, prefilled: bytes) -> None:
        self._prefilled = prefilled
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport
        self._url = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # somebody asks what else is spoken here
            self._transport.close()

    def on_message_begin(self) -> None:
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        if self._url.endswith(b"/tokenize"):
            answer = _tokenised(body)
        elif self._url.endswith(b"completions"):
            if _PREFILL.search(body):
                answer = self._prefilled
            else:
                answer = _STREAMED if _STREAM.search(body) else _WHOLE
        else:
            answer = _MODELS if self._url.endswith(b"/models") else _OK
        self._transport.write(answer)


def _tokenised(body: bytes) -> bytes:
    tokens = token_ids(msgspec.json.decode(body)["prompt"])
    return _answer(msgspec.json.encode({"count": len(tokens), "tokens": tokens}))


class _Joined(SimWorker):
    """A worker as the router sees it; what serves is at `url`."""

    url = ""

    @property
    def engine_url(self) -> str:
        return self.url


async def _join(router: str, digest: str, urls: dict[Role, list[str]]) -> list[_Joined]:
    clock = SystemClock()
    startup = StartUpModel(
        provision_s=0.0, segments=dict.fromkeys(SegmentName, 0.0), weight_bytes=1.0
    )
    profile = profiles.load(WORKER_CLASS)
    nodes = Nodes({}, startup, gpus_of=lambda _: profile.gpus)
    sources = WeightSources(startup, clock=clock)
    site = Site(RouterClient(router), Artifacts(MODEL), startup, sources, nodes, Draws(1), clock)
    ledger = Ledger(clock)
    workers = []
    for role, at in urls.items():
        for i, url in enumerate(at):
            worker = _Joined(
                Order(f"{role[0]}-{i}", role, MODEL, WORKER_CLASS, digest),
                site=site,
                profile=profile,
                role=role,
                start=(role, i),
                account=ledger.open(role, profile.gpus),
                reopen=lambda pool: ledger.open(pool, profile.gpus),
                on_released=lambda _: None,
            )
            worker.url = url
            workers.append(worker)
    deadline_s = clock.monotonic_s() + JOIN_S_MAX
    while not all(w.ready_s is not None for w in workers):
        if clock.monotonic_s() > deadline_s:
            raise SystemExit(f"workers were not admitted: { ({w.failure for w in workers}) }")
        await asyncio.sleep(0.1)
    return workers


async def _serve(router: str, digest: str) -> None:
    loop = asyncio.get_running_loop()
    urls: dict[Role, list[str]] = {Role.PREFILL: [], Role.DECODE: []}
    for at in urls.values():
        for _ in range(WORKERS_A_ROLE):
            server = await loop.create_server(lambda: _Connection(_prefilled(1)), "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            at.append(f"http://127.0.0.1:{port}")
    await _join(router, digest, urls)
    print(json.dumps({str(role): at for role, at in urls.items()}), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description="workers that answer at once")
    parser.add_argument("--router", required=True)
    parser.add_argument("--digest", required=True)
    arguments = parser.parse_args()
    uvloop.run(_serve(arguments.router, arguments.digest))


if __name__ == "__main__":
    main()
