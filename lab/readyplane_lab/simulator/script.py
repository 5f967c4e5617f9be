"""What happens to a world at given times: faults and directives, carried out.

Owns who is hit by what and when; what it does to a worker, a source or a signal is theirs.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from readyplane.core.errors import ReadyplaneError
from readyplane.core.worker import Role
from readyplane.kit.clock import Clock
from readyplane.ports import Order
from readyplane_lab.simulator import directives as do
from readyplane_lab.simulator import faults
from readyplane_lab.simulator.actuator import SimActuator
from readyplane_lab.simulator.artifact import Artifacts
from readyplane_lab.simulator.router import SimRouter
from readyplane_lab.simulator.site import Mishap
from readyplane_lab.simulator.sources import WeightSources
from readyplane_lab.simulator.telemetry import SteppedClock, Telemetry
from readyplane_lab.simulator.worker import SimWorker

NO_LEADER = 0
OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class Mishaps:
    """What becomes of the next starts of a role."""

    def __init__(self) -> None:
        self._due: dict[Role, list[Mishap]] = {}

    def add(self, role: Role, mishap: Mishap, count: int) -> None:
        """The next `count` starts."""
        self._due.setdefault(role, []).extend([mishap] * count)

    def take(self, role: Role) -> Mishap | None:
        """What becomes of this one."""
        due = self._due.get(role)
        return due.pop(0) if due else None


@dataclass(frozen=True, slots=True)
class Stage:
    """What a script acts on.

    Attributes:
        wall: the planner's clock. restart: ends the planner and begins another after some seconds.
        order: an order of a worker of that role, by its name.
    """

    clock: Clock
    wall: SteppedClock
    actuator: SimActuator
    router: SimRouter
    sources: WeightSources
    telemetry: Telemetry
    mishaps: Mishaps
    artifacts: Artifacts
    restart: Callable[[float], Awaitable[None]]
    order: Callable[[str, Role], Order]


class Script:
    """One run's events."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._numbers = itertools.count(1)

    async def play(self, event: faults.Fault | do.Directive, *, began_s: float) -> None:
        """Wait for its time, then let it happen, to its end."""
        await self._sleep_until(began_s + event.at_s)
        match event:
            case do.StandBy() | do.Activate() | do.Flip():
                await self._direct(event)
            case faults.SignalsStale() | faults.SignalsMissing() | faults.SignalOutlier():
                self._blur(event)
            case faults.SignalsDistorted(for_s=for_s, how=how):
                until_s = self._stage.clock.monotonic_s() + for_s
                self._stage.telemetry.distort(how, until_s=until_s)
            case faults.ClockStep(by_s=by_s):
                self._stage.wall.offset_s += by_s
            case faults.PlannerRestart(for_s=for_s):
                await self._stage.restart(for_s)
            case faults.NewArtifact(slowness=slowness):
                self._stage.artifacts.publish(slowness)
            case faults.SourceDies():
                self._stage.sources.next_dies()
            case faults.SourceLies():
                self._stage.sources.next_lies()
            case faults.QuotaDenied() | faults.StartsHang() | faults.StartsFail():
                self._spoil(event)
            case _:
                await self._hit(event)

    async def _hit(
        self, event: faults.Crash | faults.Stall | faults.Partition | faults.SpotReclaim
    ) -> None:
        """Something happens to workers that serve."""
        clock, serving = self._stage.clock, self._serving(event.role)
        match event:
            case faults.Crash(count=count):
                for worker in serving[:count]:
                    worker.crash("crashed")
            case faults.Stall(for_s=for_s):
                for worker in serving[:1]:
                    worker.engine.stall()
                    await clock.sleep(for_s)
                    worker.engine.resume()
            case faults.Partition(for_s=for_s, count=count):
                for worker in serving[:count]:
                    worker.unreachable_until_s = clock.monotonic_s() + for_s
            case faults.SpotReclaim(notice_s=notice_s, count=count):
                await self._reclaim(serving[:count], notice_s)

    def _spoil(self, event: faults.QuotaDenied | faults.StartsHang | faults.StartsFail) -> None:
        """Something becomes of starts to come."""
        stage = self._stage
        match event:
            case faults.QuotaDenied(for_s=for_s, granted=granted, role=role):
                until_s = stage.clock.monotonic_s() + for_s
                stage.actuator.deny(until_s=until_s, granted=granted, role=role)
            case faults.StartsHang(role=role, count=count):
                stage.mishaps.add(role, Mishap.HANGS, count)
            case faults.StartsFail(role=role, count=count):
                stage.mishaps.add(role, Mishap.FAILS, count)

    def _blur(
        self, event: faults.SignalsStale | faults.SignalsMissing | faults.SignalOutlier
    ) -> None:
        telemetry, now_s = self._stage.telemetry, self._stage.clock.monotonic_s()
        match event:
            case faults.SignalsStale(for_s=for_s):
                telemetry.stale_until_s = now_s + for_s
            case faults.SignalsMissing(for_s=for_s):
                telemetry.missing_until_s = now_s + for_s
            case faults.SignalOutlier(factor=factor):
                telemetry.outlier(factor)

    async def _direct(self, event: do.Directive) -> None:
        actuator = self._stage.actuator
        match event:
            case do.StandBy(role=role, count=count):
                for _ in range(count):
                    number = next(self._numbers)
                    order = self._stage.order(f"{role.value[0]}-standby-{number}", role)
                    with contextlib.suppress(ReadyplaneError):
                        await actuator.provision(
                            replace(order, standby=True), leader_epoch=NO_LEADER
                        )
            case do.Activate(role=role, count=count):
                waiting = [w for w in actuator.living.values() if w.waits and w.order.role is role]
                for worker in waiting[:count]:
                    with contextlib.suppress(ReadyplaneError):
                        await self._stage.router.activate(worker.order.worker_id)
            case do.Flip(role=role, count=count):
                for worker in self._serving(role)[:count]:
                    with contextlib.suppress(ReadyplaneError):
                        await self._stage.router.flip(worker.order.worker_id, role=OTHER[role])

    async def _reclaim(self, workers: list[SimWorker], notice_s: float) -> None:
        for worker in workers:
            with contextlib.suppress(ReadyplaneError):
                await self._stage.router.drain(
                    worker.order.worker_id, reason="spot reclaim", deadline_s=notice_s
                )
        await self._stage.clock.sleep(notice_s)
        for worker in workers:
            if worker.released_s is None:
                worker.crash("reclaimed")

    def _serving(self, role: Role) -> list[SimWorker]:
        """Whoever serves that role and is not to go, longest first."""
        serving = [
            (w.ready_s, w.order.worker_id, w)
            for w in self._stage.actuator.living.values()
            if w.pool == role and w.ready_s is not None and w.drain_s is None
        ]
        return [w for _, _, w in sorted(serving, key=lambda item: item[:2])]

    async def _sleep_until(self, at_s: float) -> None:
        await self._stage.clock.sleep(at_s - self._stage.clock.monotonic_s())
