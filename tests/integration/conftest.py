"""One full system for every integration test that looks at a whole one.

Owns `full_stack`: `readyplane up` without its terminal, in a loop of its own, with a bit of traffic
behind it and at least one scale-up. Tests that use it run one after another in one process
(tests/sharing_out.py), and change nothing in it that another one could miss.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from tests.integration.collector import Collector

if TYPE_CHECKING:
    from readyplane_lab.up.address_book import AddressBook
    from readyplane_lab.up.stack import Stack
    from readyplane_lab.up.traffic import Tally

T = TypeVar("T")
READY_S_MAX = 120.0
SCALE_UP_S_MAX = 150.0
STEP_S_MAX = 180.0
RATE_RPS = 5.0
SLO_TTFT_S, SLO_TPOT_S = 2.0, 0.1


class FullStack:
    """A running system: addresses, state, and more traffic when a test needs some."""

    def __init__(self, loop: asyncio.AbstractEventLoop, log: Callable[[str], None]) -> None:
        self._loop = loop
        self._rooms = AsyncExitStack()
        self._say = log
        self.collector = Collector()
        self.stack: Stack

    @property
    def book(self) -> AddressBook:
        """Addresses and token, as in `up.json`."""
        return self.stack.book

    def call(self, work: Coroutine[Any, Any, T], *, limit_s: float = STEP_S_MAX) -> T:
        """Run something in the stack's loop and wait for it."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit_s)
        except TimeoutError:
            future.cancel()
            raise

    def state(self) -> dict[str, Any]:
        """The planner's state document, with history."""
        return self.call(self._state())

    def drive(self, duration_s: float, *, rate_rps: float = RATE_RPS, seed: int = 2) -> Tally:
        """Send conversation requests with short answers for so long, and wait for all their ends."""
        return self.call(self._drive(duration_s, rate_rps, seed, osl_factor=0.2))

    async def start(self) -> None:
        """Start everything, wait for a first pair, then drive it into one scale-up."""
        from readyplane.kit.clock import SystemClock
        from readyplane_lab.up.options import UpOptions
        from readyplane_lab.up.stack import running_stack

        options = UpOptions(
            quick=True,
            load=False,
            model_bytes=100_000_000,
            otlp_endpoint=self.collector.address,
        )
        running = running_stack(options, clock=SystemClock(), say=self._say)
        self.stack = await self._rooms.enter_async_context(running)
        await self._until(_ready(1, 1), READY_S_MAX, "a first pair")
        driving = asyncio.create_task(self._drive(SCALE_UP_S_MAX, RATE_RPS, 1, osl_factor=1.0))
        scaled = asyncio.create_task(self._until(_scaled, SCALE_UP_S_MAX, "a scale-up"))
        try:
            await scaled
        finally:
            driving.cancel()
            await asyncio.gather(driving, return_exceptions=True)

    async def stop(self) -> None:
        """Stop everything."""
        await self._rooms.aclose()
        self.collector.stop()

    async def _until(
        self, holds: Callable[[dict[str, Any]], bool], limit_s: float, what: str
    ) -> None:
        state: dict[str, Any] = {}
        try:
            async with asyncio.timeout(limit_s):
                while not (state and holds(state)):
                    if self.stack.failed.done():
                        pytest.fail(self.stack.failed.result())
                    state = await self._state()
                    await asyncio.sleep(0.5)
        except TimeoutError:
            pools = {name: _short(pool) for name, pool in state.get("pools", {}).items()}
            pytest.fail(f"{what} did not come within {limit_s:g} s: {json.dumps(pools)}")

    async def _state(self) -> dict[str, Any]:
        import aiohttp

        headers = {"authorization": f"Bearer {self.book.token}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{self.book.planner_http}/v1/state") as answer,
        ):
            found: dict[str, Any] = await answer.json()
            return found if answer.status == 200 else {}

    async def _drive(
        self, duration_s: float, rate_rps: float, seed: int, *, osl_factor: float
    ) -> Tally:
        from readyplane.core.work import Slo
        from readyplane.kit.clock import SystemClock
        from readyplane_lab.up.traffic import Traffic
        from readyplane_lab.workload.conversation import Wave, conversation

        traffic = Traffic(
            self.book.gateway_http,
            self.book.model,
            slo=Slo(SLO_TTFT_S, SLO_TPOT_S),
            clock=SystemClock(),
        )
        wave = Wave(rate_rps, swing=0.0)
        requests = conversation(wave, seed=seed, duration_s=duration_s, osl_factor=osl_factor)
        return await traffic.run(requests)


def _ready(prefill: int, decode: int) -> Callable[[dict[str, Any]], bool]:
    def holds(state: dict[str, Any]) -> bool:
        pools = state["pools"]
        return bool(pools["prefill"]["ready"] >= prefill and pools["decode"]["ready"] >= decode)

    return holds


def _scaled(state: dict[str, Any]) -> bool:
    pools = state["pools"]
    return bool(pools["prefill"]["ready"] + pools["decode"]["ready"] >= 3)


def _short(pool: dict[str, Any]) -> dict[str, Any]:
    return {name: pool.get(name) for name in ("desired", "provisioned", "ready", "load")}


_ending: list[Callable[[], None]] = []  # of the full system, while it runs


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The full system ends with the last test that looks at it: others have the machine's cores."""
    if "full_stack" not in getattr(nextitem, "fixturenames", ()):
        while _ending:
            _ending.pop()()


@pytest.fixture(scope="session")
def full_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FullStack]:
    """The one full system of this test run. Its address book is found by `readyplane` commands."""
    said: list[str] = []
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    full = FullStack(loop, said.append)
    home: Path = tmp_path_factory.mktemp("state")
    patch = pytest.MonkeyPatch()

    def end() -> None:
        patch.undo()
        full.call(full.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()

    patch.setenv("XDG_STATE_HOME", str(home))
    _ending.append(end)
    full.call(full.start(), limit_s=READY_S_MAX + SCALE_UP_S_MAX + 120.0)
    yield full
    while _ending:
        _ending.pop()()
