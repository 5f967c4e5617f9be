"""What a soak does to a running stack: processes killed at once, or stopped for longer than a lease.

Owns the seeded order of faults and their bounds; hands what it did to the soak's summary. Only
processes of the stack's own table are touched, found by what they are called there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from readyplane.kit.clock import Clock
from readyplane_lab.up.stack import Stack

EVERY_S = (5.0, 11.0)
"""Between two faults, drawn anew each time."""
SPACING_S = {"router": 80.0, "redis": 75.0, "router pause": 60.0}
"""Least time between two faults of a kind that the stack brings back a bounded number of times."""
WORKERS_LEFT_MIN = 3


@dataclass(slots=True)
class Faults:
    """Faults on a stack until told otherwise.

    Attributes:
        pause_s: of a pause: longer than a lease. done: how often each kind was done.
    """

    stack: Stack
    clock: Clock
    say: Callable[[str], None]
    seed: int
    pause_s: float
    done: Counter[str] = field(default_factory=Counter)
    _last_s: dict[str, float] = field(default_factory=dict)
    _paused: set[int] = field(default_factory=set)

    async def run(self) -> None:
        """One after the other, for ever; whoever is stopped is woken at the end."""
        draws = random.Random(self.seed)
        kinds = {
            "engine": self._engine,
            "agent": self._agent,
            "router": self._router,
            "redis": self._redis,
            "agent pause": self._pause_agent,
            "engine pause": self._pause_engine,
            "router pause": self._pause_router,
        }
        pauses: set[asyncio.Task[None]] = set()
        try:
            while True:
                await self.clock.sleep(draws.uniform(*EVERY_S))
                kind = draws.choice(sorted(kinds))
                now_s, spacing_s = self.clock.monotonic_s(), SPACING_S.get(kind, 0.0)
                if now_s - self._last_s.get(kind, -1e9) < spacing_s:
                    continue
                pid = kinds[kind](draws)
                if pid is None or pid in self._paused:
                    continue
                self._last_s[kind] = now_s
                self.done[kind] += 1
                self.say(f"{kind}: process {pid}")
                if kind.endswith("pause"):
                    pauses.add(asyncio.create_task(self._pause(pid)))
                else:
                    _send(pid, signal.SIGKILL)
        finally:
            for task in pauses:
                task.cancel()
            await asyncio.gather(*pauses, return_exceptions=True)

    async def _pause(self, pid: int) -> None:
        self._paused.add(pid)
        _send(pid, signal.SIGSTOP)
        try:
            await self.clock.sleep(self.pause_s)
        finally:
            _send(pid, signal.SIGCONT)
            self._paused.discard(pid)

    # ------------------------------------------------------------------------ whom

    def _named(self, start: str) -> list[int]:
        found = [r.pid for r in self.stack.table.running() if r.name.startswith(start)]
        return [pid for pid in found if pid not in self._paused]

    def _agent(self, draws: random.Random) -> int | None:
        found = self._named("worker-")
        return draws.choice(found) if len(found) > WORKERS_LEFT_MIN else None

    def _engine(self, draws: random.Random) -> int | None:
        agent = self._agent(draws)
        return None if agent is None else _engine_of(agent)

    def _pause_agent(self, draws: random.Random) -> int | None:
        return self._agent(draws)

    def _pause_engine(self, draws: random.Random) -> int | None:
        return self._engine(draws)

    def _router(self, draws: random.Random) -> int | None:
        found = self._named("router")
        return draws.choice(found) if len(found) > 1 else None  # one always answers

    def _pause_router(self, draws: random.Random) -> int | None:
        return self._router(draws)

    def _redis(self, draws: random.Random) -> int | None:  # noqa: ARG002 - there is one
        server = self.stack.stores.redis
        return None if server is None else server.pid


def _engine_of(agent: int) -> int | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(agent).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("engines.modelled" in part for part in child.cmdline()):
                    return child.pid
    return None


def _send(pid: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)
