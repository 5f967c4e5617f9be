"""Traffic gives every request exactly one outcome, and counts misses as misses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from readyplane.core.work import Slo
from readyplane.kit.clock import SystemClock
from readyplane_lab.up.traffic import Outcome, Traffic
from readyplane_lab.workload.request import WorkloadRequest

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[str]]]:
    runners = []

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def requests(n: int, osl: int = 3) -> list[WorkloadRequest]:
    return [WorkloadRequest(i, 0.0, 8, osl, ((i, 8),)) for i in range(n)]


async def answer(request: web.Request, *, tokens: int, delay_s: float = 0.0) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await asyncio.sleep(delay_s)
    for _ in range(tokens):
        await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": tokens}})
    await response.write(f"data: {usage}\n\ndata: [DONE]\n\n".encode())
    return response


def traffic(url: str, ttft_s: float = 5.0) -> Traffic:
    return Traffic(url, "demo", slo=Slo(ttft_s, 5.0), clock=SystemClock())


async def test_finished_and_attained(serve: Callable[[Handler], Awaitable[str]]) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert len(body["prompt"]) == 8
        assert body["max_tokens"] == 2048  # the true length is not given away
        return await answer(request, tokens=3)

    tally = await traffic(await serve(handler)).run(requests(5))
    assert tally.outcomes == {Outcome.FINISHED: 5}
    assert (tally.sent, tally.attained, tally.attainment, tally.open) == (5, 5, 1.0, 0)
    assert tally.output_tokens == 15


async def test_a_slow_first_token_is_a_miss(serve: Callable[[Handler], Awaitable[str]]) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await answer(request, tokens=3, delay_s=0.2)

    tally = await traffic(await serve(handler), ttft_s=0.05).run(requests(2))
    assert (tally.outcomes[Outcome.FINISHED], tally.attained) == (2, 0)


@pytest.mark.parametrize(
    "status, outcome",
    [(429, Outcome.REFUSED), (503, Outcome.REFUSED), (500, Outcome.FAILED), (400, Outcome.FAILED)],
)
async def test_refusals_and_failures_are_misses(
    serve: Callable[[Handler], Awaitable[str]], status: int, outcome: Outcome
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.json_response({"error": {"message": "no"}}, status=status)

    tally = await traffic(await serve(handler)).run(requests(3))
    assert tally.outcomes == {outcome: 3}
    assert tally.attainment == 0.0
    assert tally.complaints.total() == 3


async def test_a_cut_or_short_stream_is_a_failure(
    serve: Callable[[Handler], Awaitable[str]],
) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await answer(request, tokens=2)

    tally = await traffic(await serve(handler)).run(requests(2, osl=3))
    assert tally.outcomes == {Outcome.FAILED: 2}
    assert "2 tokens came, 3 were due" in next(iter(tally.complaints))


async def test_nobody_there_is_a_failure_not_a_crash() -> None:
    tally = await traffic("http://127.0.0.1:9").run(requests(2))
    assert tally.outcomes == {Outcome.FAILED: 2}


async def test_stop_sends_nothing_more(serve: Callable[[Handler], Awaitable[str]]) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await answer(request, tokens=3)

    driver = traffic(await serve(handler))
    late = [WorkloadRequest(i, 0.0 if i == 0 else 60.0, 8, 3, ((i, 8),)) for i in range(3)]
    running = asyncio.create_task(driver.run(late))
    await asyncio.sleep(0.3)
    driver.stop()
    tally = await asyncio.wait_for(running, 5.0)
    assert (tally.sent, tally.ended) == (1, 1)
