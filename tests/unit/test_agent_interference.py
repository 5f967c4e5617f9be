"""The watch over those who are served while weights go out (R9.1)."""

import asyncio

import pytest

from readyplane.core.errors import Unavailable
from readyplane.kit.clock import SystemClock
from readyplane_agent import interference
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.interference import Watch
from readyplane_agent.pacing import ServingTimes
from readyplane_agent.transfer import TransferServer

PAGE = b"""
vllm:time_to_first_token_seconds_sum{engine="0"} 3.0
vllm:time_to_first_token_seconds_count{engine="0"} 10
vllm:%s_sum{engine="0"} 2.0
vllm:%s_count{engine="0"} 100
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.5
vllm:nixl_bytes_transferred_sum{engine="0"} 1e9
"""


class Told(OpenAiEngine):
    """An engine whose metrics page is given."""

    page: bytes | None = b""

    async def get(self, path: str, *, timeout_s: float = 10.0) -> bytes:
        if self.page is None:
            raise Unavailable("no answer", "wait")
        return self.page


@pytest.mark.parametrize("name", [b"inter_token_latency_seconds", b"time_per_output_token_seconds"])
async def test_times_are_read_by_the_names_of_newer_and_older_engines(name: bytes) -> None:
    engine = Told("http://127.0.0.1:1", model="m")
    engine.page = PAGE % (name, name)
    assert await engine.serving_times() == ServingTimes(3.0, 10, 2.0, 100, 0.5, 1e9)
    engine.page = b"other 1\n"
    assert await engine.serving_times() == ServingTimes()
    engine.page = None
    assert await engine.serving_times() == ServingTimes()


async def test_what_requests_feel_sets_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A push near the target pauses; an engine that serves nobody lets it go as fast as it may."""
    monkeypatch.setattr(interference, "WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(interference, "IDLE_EVERY_S", 0.01)
    monkeypatch.setattr(interference, "LOOK_EVERY_S", 0.005)
    clock = SystemClock()
    server = TransferServer(incarnation="w1-x", clock=clock, tpot_target_s=0.05, bytes_per_s=500e6)
    tokens, token_s = 0.0, 0.049

    async def asked() -> ServingTimes:
        nonlocal tokens
        tokens += 100 if token_s else 0
        server.bytes_served += 10_000_000
        return ServingTimes(1.0, 1, tokens * token_s, tokens, 0.0, 0.0)

    watching = asyncio.create_task(Watch(asked, server, clock).keep())
    async with asyncio.timeout(5.0):
        while server.pace.paused_s is None:
            await asyncio.sleep(0.01)
        assert server.slo_share == pytest.approx(0.98)
        token_s = 0.0  # nobody is served any more
        while server.pace.bytes_per_s < 500e6:
            await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.wait({watching})
