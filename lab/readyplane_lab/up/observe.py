"""Watches a running stack from outside, as a person would: through the planner's state document.

Owns what was seen: every start with its segments, every drain, decisions, capacities. The summary
and the verdict of `--quick` are made from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp

from readyplane.kit.clock import Clock
from readyplane.ports import Instance
from readyplane_lab.up.actuator import LocalActuator

POLL_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class SeenStart:
    """One worker that became routable; seconds by segment (exclusive), as the planner reports."""

    worker_id: str
    role: str
    tier: str
    wall_s: float
    unexplained_s: float
    exclusive_s: Mapping[str, float]
    modelled: frozenset[str]
    checks_failed: tuple[str, ...]


@dataclass(slots=True)
class Seen:
    """Everything that was observed."""

    state: dict[str, Any] = field(default_factory=dict)
    starts: dict[str, SeenStart] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    lateness_p99_s: float | None = None
    capacity_order_broken: str = ""
    polls_failed: int = 0

    def pool(self, name: str) -> dict[str, Any]:
        """State of one pool; empty before the first state."""
        found = self.state.get("pools", {}).get(name, {})
        return found if isinstance(found, dict) else {}

    def starts_of(self, role: str) -> list[SeenStart]:
        """Starts of one role, in the order they became routable."""
        return [s for s in self.starts.values() if s.role == role]

    def drained(self) -> list[str]:
        """Workers that drained and whose process then ended cleanly."""
        return sorted(
            worker_id
            for worker_id in self.draining
            if (i := self.instances.get(worker_id)) is not None
            and i.state == "exited"
            and i.exit_code == 0
            and worker_id not in self.lost
        )

    def start_failures(self) -> dict[str, str]:
        """Instances that ended by themselves before they were routable, with the reason."""
        return {
            worker_id: i.reason or i.log_tail[-300:]
            for worker_id, i in self.instances.items()
            if i.state == "failed" and worker_id not in self.starts
        }


class Observer:
    """Polls the planner once a second."""

    def __init__(
        self, url: str, token: str, model: str, actuator: LocalActuator, *, clock: Clock
    ) -> None:
        self.seen = Seen()
        self._url = f"{url}/v1/state"
        self._headers = {"authorization": f"Bearer {token}"}
        self._model = model
        self._actuator = actuator
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5.0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.look()
            await self._clock.sleep(POLL_EVERY_S)

    async def look(self) -> Seen:
        """One look; a planner that does not answer is counted and asked again later."""
        assert self._session is not None, "enter the observer first"
        for instance in await self._actuator.list_instances():
            self.seen.instances[instance.order.worker_id] = instance
        try:
            async with self._session.get(
                self._url, headers=self._headers, params={"model": self._model}
            ) as response:
                response.raise_for_status()
                state = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError):
            self.seen.polls_failed += 1
            return self.seen
        self._take(state)
        return self.seen

    def _take(self, state: dict[str, Any]) -> None:
        seen = self.seen
        seen.state = state
        lateness_s = state.get("lateness_p99_s")
        if lateness_s is not None:
            seen.lateness_p99_s = max(seen.lateness_p99_s or 0.0, float(lateness_s))
        for worker in state.get("workers", ()):
            worker_id = worker["worker_id"]
            if worker["state"] == "draining":
                seen.draining.add(worker_id)
            elif worker["state"] in ("gone", "stalled") and worker_id not in seen.draining:
                seen.lost.add(worker_id)  # it did not go in order, whatever it does later
            if worker["state"] in ("ready", "draining") and worker_id not in seen.starts:
                seen.starts[worker_id] = _start(worker)
        for decision in state.get("decisions", ()):
            if decision.get("changes"):
                seen.decisions[decision["decision_id"]] = decision


async def until_ready(observer: Observer, *, within_s: float, clock: Clock) -> bool:
    """Wait until each pool has a routable worker."""
    deadline_s = clock.monotonic_s() + within_s
    while clock.monotonic_s() < deadline_s:
        if all(observer.seen.pool(p).get("ready", 0) >= 1 for p in ("prefill", "decode")):
            return True
        await asyncio.sleep(0.2)
    return False


def _start(worker: Mapping[str, Any]) -> SeenStart:
    start = worker.get("start") or {}
    return SeenStart(
        worker_id=worker["worker_id"],
        role=worker["role"],
        tier=worker.get("tier") or "unknown",
        wall_s=float(start.get("wall_s") or 0.0),
        unexplained_s=float(start.get("unexplained_s") or 0.0),
        exclusive_s={k: float(v) for k, v in (start.get("exclusive_s") or {}).items()},
        modelled=frozenset(s["name"] for s in start.get("segments", ()) if s.get("modelled")),
        checks_failed=tuple(c["name"] for c in worker.get("checks", ()) if not c["passed"]),
    )
