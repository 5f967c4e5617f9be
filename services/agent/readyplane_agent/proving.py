"""The proof of a start: every check of the gate that the agent can make (R18.1).

Owns the order of the probes and what each is given; hands serving facts and checks to `starting`, which
adds lease and group and hands them in. `probes` and `basics` make the measurements.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from readyplane.core import gate_checks as gc
from readyplane.core.identity import NO_CONNECTOR
from readyplane.core.profile import ClassProfile
from readyplane.core.startup import WeightTier
from readyplane.core.worker import CheckResult, Role, Serving
from readyplane.kit.clock import Clock
from readyplane.ports import Router
from readyplane_agent import basics, meeting, probes
from readyplane_agent.engines.choice import TellsFormats, client_of, ordered_kv_tokens
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.engines.port import EnginePort
from readyplane_agent.engines.sglang_client import Partner
from readyplane_agent.patience import Patient
from readyplane_agent.settings import AgentSettings

if TYPE_CHECKING:
    from readyplane_agent.starting import Started


class Proving:
    """Probes of one worker's engine.

    Args:
        settings: who this is. started: what was loaded. patient: how services are asked.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        router: Router,
        engine: EnginePort,
        profile: ClassProfile,
        clock: Clock,
        started: Started,
        patient: Patient,
    ) -> None:
        self._s, self._router, self._engine, self._profile = settings, router, engine, profile
        self._clock, self._started, self._patient = clock, started, patient

    def serving(self) -> Serving:
        """What the engine says, with what only the agent knows."""
        fetched, arena = self._started.fetched, self._started.arena
        stage, told = self._started.stage, self._engine.serving()
        blocks = told.kv_total_blocks if stage is None else stage.kv_tokens // told.block_size
        return replace(
            told,
            stage=stage,
            kv_total_blocks=blocks,
            profile=self._profile.name,
            tier=WeightTier.UNKNOWN if fetched is None else fetched.tier,
            mode=self._s.mode,
            tokenizer_digest="" if arena is None else probes.tokenizer_digest(arena),
        )

    async def prove(self) -> tuple[Serving, tuple[int, ...], list[CheckResult]]:
        """What it serves, what it answered to the canary, and every check but lease and group.

        Raises:
            Unavailable: the engine does not answer.
        """
        question = probes.Question.of(self._started.manifest)
        serving = self.serving()
        await self._find_partner(serving)
        first = await probes.ask(self._engine, question)
        asked, connector = await asyncio.gather(
            probes.canary(self._engine, question, first),
            self._connector(serving, question, first.token_ids),
        )
        checks = [*asked, connector, probes.profile_check(self._profile)]
        checks += [*self._loaded(serving), await self._kv_hashes(serving, question)]
        checks.append(await probes.kv_pool(self._engine, serving, self._clock))
        return serving, first.token_ids, await self._amended(checks, serving, question)

    async def _find_partner(self, serving: Serving) -> None:
        """An engine that answers with another one only is proved with one."""
        if not isinstance(self._engine, meeting.Meets) or not self._engine.meets:
            return
        self._engine.meet(await self._partner(serving))

    async def _partner(self, serving: Serving) -> Partner:
        return await meeting.partner_for(
            lambda: self._patient(lambda: self._router.list_workers(self._s.model)),
            worker_id=self._s.worker_id,
            role=self._started.role,
            serving=serving,
            clock=self._clock,
            limit_s=self._s.start_limit_s,
            token=self._s.token,
        )

    async def _amended(
        self, checks: list[CheckResult], serving: Serving, question: probes.Question
    ) -> list[CheckResult]:
        size = ordered_kv_tokens(self._s, self._profile, self._engine)
        return await basics.amended(
            checks,
            client_of(self._engine, serving, model=self._s.model),
            prompt=question.prompt,
            arena=self._started.arena,
            serving=serving,
            wanted_tokens=size,
            told=self._engine.formats() if isinstance(self._engine, TellsFormats) else {},
        )

    async def _kv_hashes(self, serving: Serving, question: probes.Question) -> CheckResult:
        if self._started.arena is None:
            return probes.no_kv_hashes(serving, "an attached engine's KV events are not followed")
        return await probes.kv_hashes(self._engine, question, serving)

    def _loaded(self, serving: Serving) -> list[CheckResult]:
        arena = self._started.arena
        if arena is not None:
            return probes.loaded_checks(
                arena, tokenizer_digest=serving.tokenizer_digest, ranks=self._s.tp
            )
        names = set(gc.ATTACHED_MAY_SKIP) - {gc.KV_CONNECTOR}
        return probes.not_applicable(names, "the engine was running before anybody could look")

    async def _connector(
        self, serving: Serving, question: probes.Question, expected: tuple[int, ...]
    ) -> CheckResult:
        if self._s.engine == "attached" and self._s.role is Role.BOTH:
            why = "it serves both stages: nothing is handed over"
            return probes.not_applicable([gc.KV_CONNECTOR], why)[0]
        if meeting.needs_partner(self._engine):
            return await meeting.connector_check(self._engine, question, expected)
        if serving.kv.connector in NO_CONNECTOR:
            evidence = {"outbound": False, "inbound": False, "detail": "it has no KV connector"}
            return CheckResult(gc.KV_CONNECTOR, True, evidence, "it serves both stages alone")
        if not meeting.reads_itself(self._engine):
            partner = await self._partner(serving)
            peer = OpenAiEngine(partner.url, model=self._s.model)
            peers = [(partner.name, peer)]
            return await probes.kv_connector(self._engine, question, expected, peers, itself=False)
        fleet = await self._patient(lambda: self._router.list_workers(self._s.model))
        peers = [
            (w.worker_id, OpenAiEngine(w.serving.engine_url, model=self._s.model))
            for w in probes.peers_for(
                fleet, worker_id=self._s.worker_id, role=self._started.role, serving=serving
            )
            if w.serving is not None
        ]
        return await probes.kv_connector(self._engine, question, expected, peers)
