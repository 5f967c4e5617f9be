"""A worker that is told to end while it decodes: its streams go on at another one, token for token."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.work import pack_tokens
from readyplane.kit.clock import SystemClock
from readyplane.kit.telemetry import Metrics
from readyplane_agent.engines.modelled import answer
from readyplane_agent.engines.modelled.answer_state import Draws
from readyplane_agent.lifecycle import ExitCode
from readyplane_gateway.api import Api
from readyplane_gateway.bounds import Bounds
from readyplane_gateway.service import Gateway
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from tests.integration.agent_cluster import MODEL, Cluster, cluster

TOKENS = 1800  # twelve seconds of decode and more
PROMPT = "tell me a long story"
SEED = 12


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    folder = tmp_path_factory.mktemp("demo")
    return make_demo_model(folder, size_bytes=12 * 2**20, shards=2, max_model_len=4096)


@asynccontextmanager
async def serving(c: Cluster) -> AsyncIterator[tuple[Api, Metrics]]:
    """A gateway with the router in its process."""
    metrics = Metrics()
    gateway = Gateway(
        router=c.router,
        registry=None,
        clock=SystemClock(),
        bounds=Bounds(move_after_s=0.2),
        metrics=metrics,
        route_ahead=c.router.route,
        mover=c.router,
    )
    numbers = itertools.count()

    async def nothing(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError(scope)

    api = Api(gateway, inner=nothing, new_id=lambda: f"r{next(numbers)}")
    tasks = [asyncio.ensure_future(w()) for w in (gateway.watch_fleet, gateway.tell_router)]
    await gateway.fleet_known()
    try:
        yield api, metrics
    finally:
        await gateway.stop()
        for task in tasks:
            task.cancel()


class Client:
    """One request and what has come of it so far."""

    def __init__(self, api: Api, **fields: Any) -> None:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
        self._raw: bytes | None = json.dumps(body | fields).encode()
        self.headers: dict[str, str] = {}
        self.body = b""
        self.begun = asyncio.Event()
        scope = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
        self.task = asyncio.ensure_future(api(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        raw, self._raw = self._raw, None
        if raw is not None:
            return {"type": "http.request", "body": raw, "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            self.body += message.get("body", b"")
            self.begun.set()

    @property
    def events(self) -> list[Any]:
        found = [e.removeprefix("data: ") for e in self.body.decode().split("\n\n") if e]
        return [e if e == "[DONE]" else json.loads(e) for e in found]

    @property
    def text(self) -> str:
        return "".join(c["text"] for e in self.events if e != "[DONE]" for c in e["choices"])


async def test_sigterm_moves_what_decodes_and_cuts_nothing(tmp_path: Path, demo: DemoModel) -> None:
    """B61, B65, R22.2: 12 s of work are left, the worker is gone before, and nobody notices."""
    prompt = pack_tokens(answer.encode(PROMPT))
    greedy = answer.decode(answer.Answer(demo.fingerprint, prompt).take(TOKENS))
    draws = Draws(SEED)
    sampled = answer.decode(answer.Answer(demo.fingerprint, prompt, draws=draws).take(TOKENS))
    async with cluster(tmp_path, demo) as c:
        for name, role in (("p1", "prefill"), ("d1", "decode"), ("d2", "decode")):
            await c.agent(name, role)
        await asyncio.gather(*(c.ready(name) for name in ("p1", "d1", "d2")))
        async with serving(c) as (api, metrics):
            streams = [
                Client(api, stream=True),
                Client(api, stream=True, seed=SEED, temperature=0.9),
            ]
            whole = Client(api)
            await asyncio.gather(*(s.begun.wait() for s in streams))
            leaves = streams[0].headers["x-readyplane-decode"]
            c.agents[leaves].terminate()
            assert await c.ended(leaves) == ExitCode.LEFT
            assert not any(s.task.done() for s in streams)
            await asyncio.gather(*(s.task for s in streams), whole.task)
            assert streams[0].text == greedy
            assert streams[1].text == sampled
            assert all(s.events[-1] == "[DONE]" for s in streams)
            assert len({e["id"] for e in streams[0].events[:-1]}) == 1
            document = json.loads(whole.body)
            assert document["choices"][0]["text"] == greedy
            assert document["usage"]["completion_tokens"] == TOKENS
            name = "readyplane_gateway_moves_total"
            assert (metrics.get_sample_value(name, {"outcome": "moved"}) or 0) >= 1
            assert not metrics.get_sample_value(name, {"outcome": "repaired"})
        signals = (await c.router.signals()).models[MODEL]
        assert (signals.arrivals_total, signals.finished_total) == (3, 3)
        assert signals.aborted_total == 0
