"""A standby while it waits: with an engine process only, or with an engine that sleeps.

Owns what is asked of the engine for it, and the word that ends the wait of a bare process. `starting`
goes on from there; `life` tells the router with what the standby waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from readyplane.core.errors import Refused, Unavailable
from readyplane.core.worker import Holds
from readyplane.kit.clock import Clock
from readyplane_agent.engines.child import is_stopped
from readyplane_agent.engines.offers import SleepDepth, Sleeps, StandsBy, offered
from readyplane_agent.engines.port import EnginePort, EngineSpec
from readyplane_agent.settings import AgentSettings

log = logging.getLogger("agent.standby")

STOPPED_S_MAX = 10.0
"""A process that stands by may be held still so long, by a debugger or by hand."""


class Waiting:
    """With what one worker waits until it is told to serve.

    Attributes:
        told: set when a bare process is to load. asleep: the engine sleeps.
    """

    def __init__(self, settings: AgentSettings, engine: EnginePort, clock: Clock) -> None:
        self._s, self._engine, self._clock = settings, engine, clock
        self.told = asyncio.Event()
        self.asleep = False
        self._stopped_s: float | None = None
        self._word_until_s, self._word = 0.0, ""
        self._turning = asyncio.Lock()  # the word to serve may come while it falls asleep

    @property
    def bare(self) -> bool:
        """Whether it is to wait with a process only, before it loads anything."""
        return self._s.standby and self._s.holds is Holds.PROCESS and not self.told.is_set()

    @property
    def sleeps(self) -> bool:
        """Whether it is to wait asleep."""
        return self._s.standby and self._s.holds is Holds.ASLEEP

    def hear(self, left_s: float | None, why: str) -> None:
        """It is told to serve within `left_s`; told again, the newest counts."""
        self._word_until_s, self._word = self._clock.monotonic_s() + (left_s or 0.0), why

    def word(self) -> tuple[float | None, str]:
        """Seconds that are left of the word to serve and why it was given; None: it is not told.

        A lease may be lost meanwhile: the word goes on holding (`WorkerOffer.told_left_s`).
        """
        left_s = self._word_until_s - self._clock.monotonic_s()
        return (left_s, self._word) if left_s > 0 else (None, "")

    def check(self) -> None:
        """Raises NotOffered: the engine cannot wait as it was ordered to. Asked before it loads."""
        if self._s.standby and self._s.holds is Holds.PROCESS:
            offered(self._engine, StandsBy, self._s.engine, "a standby without weights")  # type: ignore[type-abstract]
        elif self.sleeps:
            offered(self._engine, Sleeps, self._s.engine, "a standby that sleeps")  # type: ignore[type-abstract]

    async def stand_by(self, *, engine_id: str) -> None:
        """Start the process; returns when it has imported everything. Raises as the port."""
        engine = offered(self._engine, StandsBy, self._s.engine, "a standby without weights")  # type: ignore[type-abstract]
        spec = bare_engine(self._s, engine_id=engine_id)
        found = await engine.stand_by(spec, stall_s=self._s.stall_s, limit_s=self._s.start_limit_s)
        took_s = found.ready_s - found.start_s
        held = "unknown" if found.device_bytes is None else f"{found.device_bytes} B"
        log.info("process %d imported in %.2f s, device %s", found.pid, took_s, held)

    async def fall_asleep(self, still: Callable[[], bool]) -> None:
        """Give the device back, if it `still` waits when its turn comes.

        An engine that is busy keeps its device, and the standby its weights.
        """
        engine = offered(self._engine, Sleeps, self._s.engine, "a standby that sleeps")  # type: ignore[type-abstract]
        async with self._turning:
            if self.asleep or not still():
                return
            try:
                await engine.sleep(SleepDepth.WEIGHTS_IN_HOST)
            except (Refused, Unavailable) as error:
                log.warning("it stands by awake: %s", error)
            else:
                self.asleep = True

    async def wake(self) -> bool:
        """Whether it slept. Raises Unavailable, IdentityMismatch: it is not what it was.

        Whoever stops waiting for it does not stop it: an engine half awake is none.
        """
        return await asyncio.shield(self._wake())

    async def _wake(self) -> bool:
        async with self._turning:
            if not self.asleep:
                return False
            began_s = self._clock.monotonic_s()
            engine = offered(self._engine, Sleeps, self._s.engine, "a standby that sleeps")  # type: ignore[type-abstract]
            await engine.wake()
            self.asleep = False
            log.info("awake after %.2f s", self._clock.monotonic_s() - began_s)
            return True

    def frozen(self, *, waits: bool) -> str:
        """Why a standby is none: its process has been held still for too long; empty while all is well.

        Nobody sends requests to a standby, so that nobody else would notice. Asked again and again;
        one that goes on in time is forgiven.
        """
        now_s = self._clock.monotonic_s()
        if not (waits and is_stopped(self._engine.pid)):
            self._stopped_s = None
            return ""
        if self._stopped_s is None:
            self._stopped_s = now_s
        still_s = now_s - self._stopped_s
        if still_s < STOPPED_S_MAX:
            return ""
        return (
            f"the engine's process {self._engine.pid} was stopped by a signal while it stood by, "
            f"and has not gone on for {still_s:.0f} s"
        )

    def holds(self, *, stands_by: bool, bare: bool) -> Holds | None:
        """With what it waits now; None while it does not."""
        if bare:
            return Holds.PROCESS
        if not stands_by:
            return None
        return Holds.ASLEEP if self.asleep else Holds.WEIGHTS


def bare_engine(s: AgentSettings, *, engine_id: str) -> EngineSpec:
    """What is settled of an engine before anything of its model is there."""
    nowhere = Path(os.devnull)
    return EngineSpec(
        engine_id=engine_id,
        role=s.serves,
        model=s.model,
        manifest_digest=s.manifest,
        arena_path=nowhere,
        tensor_table_path=nowhere,
        config_path=nowhere,
        tokenizer_path=None,
        profile=s.profile or s.worker_class,
        work_dir=s.work_dir,
        log_path=s.work_dir / "engine.log",
        host=s.host,
        extra_args=s.engine_args,
    )
