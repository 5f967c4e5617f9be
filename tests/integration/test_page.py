"""The page in a real Chromium: live without reload, unknown is a dash, a stalled start shows why."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from playwright.async_api import Page, async_playwright

PAGE = resources.files("readyplane_planner") / "page"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def pool(**over: Any) -> dict[str, Any]:
    facts = dict.fromkeys(
        [
            "desired",
            "provisioned",
            "ready",
            "draining",
            "desired_rate",
            "provisioned_rate",
            "ready_rate",
            "gap_rate",
            "load",
            "load_low",
            "load_high",
            "queue_tokens",
            "actual_s",
            "predicted_s",
            "target_s",
            "next_arrival_s",
            "t_ready_p50_s",
            "t_ready_p90_s",
            "kv_usage",
            "active",
        ]
    )
    return {**facts, **over}


def worker(worker_id: str, **over: Any) -> dict[str, Any]:
    segments = [
        {"name": "schedule", "start_s": 0.0, "end_s": 0.2, "modelled": False, "detail": ""},
        {"name": "compile", "start_s": 0.2, "end_s": None, "modelled": True, "detail": ""},
    ]
    start = {
        "wall_s": 9.0,
        "segments": segments,
        "exclusive_s": {"schedule": 0.2, "compile": 8.8},
        "unexplained_s": 0.0,
        "blocking_segment": "compile",
        "log_tail": "Compiling graph 3 of 35",
        "failure": "",
    }
    facts = {
        "worker_id": worker_id,
        "role": "prefill",
        "state": "provisioned",
        "active": 0,
        "kv_usage": None,
        "start": start,
        "checks": [],
        "drain_reason": "",
        "scale_decision_id": "d-7",
    }
    return {**facts, **over}


def state(now_s: float, *, ready: int, **over: Any) -> dict[str, Any]:
    empty = {"actual": {"count": 0}, "predicted": {"count": 0}}
    document = {
        "now_s": now_s,
        "model": "demo",
        "paused": False,
        "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
        "degraded": "",
        "lateness_p99_s": None,
        "pools": {
            "prefill": pool(desired=3, provisioned=2, ready=ready, load=1.4, ready_rate=2970),
            "decode": pool(desired=1, provisioned=1, ready=1),
        },
        "latency": {"ttft": empty, "tpot": empty},
        "counters": dict.fromkeys(
            ("arrivals", "finished", "attained", "refused", "aborted", "handovers"), 0
        ),
        "workers": [worker("p-1"), worker("<b>evil</b>", state="ready")],
        "decisions": [
            {
                "decision_id": "d-7",
                "at_s": now_s,
                "summary": "prefill 1 → 3",
                "changes": [{"pool": "prefill", "from": 1, "to": 3}],
                "reasons": [{"code": "load", "text": "Load_P 1.40 above 1.00"}],
            }
        ],
    }
    return {**document, **over}


HISTORY = {
    "t_s": [1.0, 2.0],
    "prefill": {"desired": [1, 1], "provisioned": [1, 1], "ready": [1, 1], "load": [None, 0.5]},
    "decode": {"desired": [1, 1], "provisioned": [1, 1], "ready": [1, 1], "load": [None, 0.5]},
    "ttft_actual_p90_s": [None, 1.0],
    "ttft_predicted_s": [None, 1.1],
    "tpot_actual_p90_s": [None, 0.08],
    "tpot_predicted_s": [None, 0.07],
}


@pytest.fixture
async def planner() -> AsyncIterator[tuple[str, asyncio.Queue[dict[str, Any]]]]:
    """A double of the planner's two endpoints, which asks for the token as the real one does."""
    queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def authorised(request: web.Request) -> bool:
        return request.headers.get("authorization") == "Bearer secret"

    async def get_state(request: web.Request) -> web.StreamResponse:
        if not authorised(request):
            return web.Response(status=401)
        return web.json_response({**state(3.0, ready=1), "history": HISTORY})

    async def stream(request: web.Request) -> web.StreamResponse:
        if not authorised(request):
            return web.Response(status=401)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(f"data: {json.dumps(await queue.get())}\n\n".encode())

    async def file(request: web.Request) -> web.StreamResponse:
        return web.FileResponse(Path(str(PAGE / (request.match_info["name"] or "index.html"))))

    app = web.Application()
    app.router.add_get("/v1/state", get_state)
    app.router.add_get("/v1/stream", stream)
    app.router.add_get("/{name:[a-z.]*}", file)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", queue
    await runner.cleanup()


@pytest.fixture
async def page(chromium: str) -> AsyncIterator[Page]:
    async with async_playwright() as play:
        browser = await play.chromium.launch(executable_path=chromium, args=FLAGS)
        yield await browser.new_page(viewport={"width": 1280, "height": 1100})
        await browser.close()


async def test_the_page_is_live_and_honest(
    planner: tuple[str, asyncio.Queue[dict[str, Any]]], page: Page, tmp_path: Path
) -> None:
    url, queue = planner
    problems: list[str] = []
    foreign: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda r: None if r.url.startswith((url, "data:")) else foreign.append(r.url)
    )
    await page.goto(f"{url}/#token=secret")
    ready = page.locator('[data-value="prefill-ready"]')
    await page.wait_for_selector('#live[data-live="yes"]')
    assert await ready.inner_text() == "1"
    assert await page.locator('[data-value="prefill-desired"]').inner_text() == "3"
    assert await page.locator('#chart-load path[data-series="Load_P"]').count() == 1

    unknown = page.locator("#pool-decode .load")
    assert "–" in await unknown.inner_text()

    stalled = page.locator('tr[data-worker="p-1"]')
    assert "in compile for 8.8 s" in await stalled.inner_text()
    assert "Compiling graph 3 of 35" in await stalled.inner_text()
    assert await stalled.locator(".phases span.modelled").count() == 1
    assert await page.locator("tbody b").count() == 0  # a name is text, never markup
    assert "Load_P 1.40 above 1.00" in await page.locator("#decisions").inner_text()

    await queue.put(state(4.0, ready=2, degraded="lease store away", lateness_p99_s=0.05))
    await page.wait_for_function(
        "document.querySelector('[data-value=\"prefill-ready\"]').textContent === '2'"
    )
    notices = await page.locator("#notices").inner_text()
    assert "lease store away" in notices
    assert "attainment is void" in notices
    await page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert problems == []
    assert foreign == []


async def test_a_missing_token_says_what_is_missing(
    planner: tuple[str, asyncio.Queue[dict[str, Any]]], page: Page
) -> None:
    url, _ = planner
    await page.goto(url)
    await page.wait_for_function("document.getElementById('live').textContent.includes('token')")
    assert await page.locator('#live[data-live="no"]').count() == 1
