"""The engine port over a modelled group: rank 0's engine, and a process for each other rank.

Owns the processes of the other ranks and what they say in their start-up files. The group is one
engine life: a rank that ends takes the others with it, and `returncode` says so as of one engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from readyplane.core.errors import Unavailable
from readyplane.core.worker import Serving
from readyplane.kit.clock import Clock
from readyplane_agent.engines.child import log_end
from readyplane_agent.engines.exit_status import status_text
from readyplane_agent.engines.modelled.adapter import (
    CPU_TICKS_STEP,
    KILL_LIMIT_S,
    ModelledEngine,
    cpu_ticks,
)
from readyplane_agent.engines.offers import Imported, NotOffered, SleepDepth, Sleeps, StandsBy
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.engines.ranks import LOST_STATUS, STEPS, RankSpec, RankStep, first_gone

RENDEZVOUS = "rendezvous.json"
SEVERAL = "in several ranks"
LOST_GRACE_S = 1.0


class ModelledGroup(ModelledEngine):
    """`EnginePort` and `HasRanks` over several processes.

    Args:
        clock: time. python: interpreter of all ranks.
    """

    def __init__(self, clock: Clock | None = None, *, python: str = sys.executable) -> None:
        super().__init__(clock, python=python)
        self._others: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = False
        self._lost_s: float | None = None

    # ------------------------------------------------------------------ the group as one engine

    @property
    def returncode(self) -> int | None:
        """Exit status of the rank that ended first, or of rank 0; None while all run.

        A rank that only lost another is not it: for `LOST_GRACE_S` the other one is awaited.
        """
        codes = [super().returncode, *(p.returncode for p in self._others.values())]
        ended = [code for code in codes if code is not None]
        if self._stopping or not ended:
            return codes[0]
        by_itself = next((code for code in ended if code != LOST_STATUS), None)
        if by_itself is not None:
            return by_itself
        now_s = self._clock.monotonic_s()
        self._lost_s = now_s if self._lost_s is None else self._lost_s
        return LOST_STATUS if now_s - self._lost_s > LOST_GRACE_S else None

    async def start(self, spec: EngineSpec) -> None:
        """Start every rank. Raises Unavailable when one cannot be started; none is left then."""
        await super().start(spec)
        try:
            for rank in spec.ranks:
                self._others[rank.rank] = await self._start_rank(spec, rank)
        except OSError as error:
            await self.stop(grace_s=0.0)
            raise Unavailable(
                f"cannot start rank {len(self._others) + 1} ({error})", "look at the machine"
            ) from error

    def withheld(self, what: type[object]) -> str:
        """What one engine does alone and its ranks do not together: stand by, and sleep."""
        return SEVERAL if what in {StandsBy, Sleeps} else ""

    async def stand_by(
        self,
        spec: EngineSpec,
        *,
        stall_s: float = 60.0,  # noqa: ARG002 - as of the port
        limit_s: float = 600.0,  # noqa: ARG002
    ) -> Imported:
        """A group does not stand by: its ranks come up together."""
        raise NotOffered(f"a standby of {spec.model} {SEVERAL}", "start it without")

    async def sleep(self, depth: SleepDepth) -> None:
        """A group does not sleep: its ranks would have to give their memory back together."""
        raise NotOffered(f"sleep ({depth}) of an engine {SEVERAL}", "leave it awake")

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Rank 0 as of one engine; the others at once, since they hold nothing for anybody."""
        self._stopping = True
        await super().stop(grace_s=grace_s)
        for process in self._others.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        async with asyncio.timeout(KILL_LIMIT_S):
            await asyncio.gather(*(process.wait() for process in self._others.values()))

    def serving(self) -> Serving:
        """As of one engine; its KV is that of so many ranks."""
        found = super().serving()
        return replace(found, kv=replace(found.kv, tp=1 + len(self._others)))

    # ------------------------------------------------------------------ the ranks

    def ranks(self) -> tuple[RankStep, ...]:
        """Every rank by its number, as its start-up file says."""
        if self._spec is None or self._process is None:
            return ()
        processes = {0: self._process, **self._others}
        return tuple(self._step(rank, process) for rank, process in sorted(processes.items()))

    def _step(self, rank: int, process: asyncio.subprocess.Process) -> RankStep:
        facts = self._facts_of(rank)
        step = str(facts.get("step", STEPS[0]))
        why = str(facts.get("failure", ""))
        if process.returncode is not None and not why:
            why = f"ended with {status_text(process.returncode)}"
        return RankStep(
            rank=rank,
            step=step if step in STEPS else STEPS[0],
            progress=cpu_ticks(process.pid) // CPU_TICKS_STEP,
            pid=process.pid,
            returncode=process.returncode,
            detail=why,
            lost=facts["lost"] if isinstance(facts.get("lost"), int) else None,
        )

    def _facts_of(self, rank: int) -> Mapping[str, Any]:
        try:
            found = json.loads(self._facts_path(rank).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _facts_path(self, rank: int) -> Path:
        assert self._spec is not None
        return self._startup_path if rank == 0 else self._spec.work_dir / f"rank-{rank}.json"

    async def _start_rank(self, spec: EngineSpec, rank: RankSpec) -> asyncio.subprocess.Process:
        own = replace(
            spec, arena_path=rank.arena_path, tensor_table_path=rank.tensor_table_path, ranks=()
        )
        path = self._facts_path(rank.rank)
        path.unlink(missing_ok=True)
        with spec.log_path.with_name(f"rank-{rank.rank}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *super().command(own),
                *self._group_flags(spec, rank.rank),
                *("--startup-file", str(path)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **spec.environment},
                process_group=0,
            )

    def command(self, spec: EngineSpec) -> list[str]:
        """The command line of rank 0."""
        return [*super().command(spec), *self._group_flags(spec, 0)]

    @staticmethod
    def _group_flags(spec: EngineSpec, rank: int) -> list[str]:
        world = 1 + max((each.rank for each in spec.ranks), default=0)
        told = {"--rank": rank, "--world": world, "--rendezvous": spec.work_dir / RENDEZVOUS}
        return [word for flag, value in told.items() for word in (flag, str(value))]

    # ------------------------------------------------------------------ what a start looks at

    def _progress(self) -> object:
        """Whatever changes when the start of any rank gets on."""
        return super()._progress(), tuple((each.step, each.progress) for each in self.ranks()[1:])

    def _died(self) -> Unavailable:
        """Which rank ended, and why: the one that ended by itself, not those it took with it."""
        gone = first_gone(self.ranks())
        if gone is None or (gone.rank == 0 and gone.returncode is not None):
            return super()._died()
        return Unavailable(self.log_tail(5), "see the rank's log")

    def log_tail(self, lines: int = 20) -> str:
        """End of rank 0's log; of another rank's, with what became of it, once that is gone."""
        gone = first_gone(self.ranks())
        if gone is None or self._stopping or (gone.rank == 0 and gone.returncode is not None):
            return super().log_tail(lines)
        told = gone.detail or "it hangs, the others had no answer of it any more"
        return f"rank {gone.rank}: {told}; {log_end(self._rank_log(gone.rank, lines))}"

    def _rank_log(self, rank: int, lines: int) -> str:
        """End of another rank's log."""
        assert self._spec is not None
        if rank == 0:
            return super().log_tail(lines)
        try:
            text = self._spec.log_path.with_name(f"rank-{rank}.log").read_text("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])
