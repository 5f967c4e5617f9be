"""A worker that serves and gets its graphs meanwhile (R14): asked of the engine, told to the router.

Owns the order: promise less KV, capture, check, use, promise the profile's times; and the way back from
wherever it fails. What the router believes is never more than the engine has: KV is promised away
before it is taken, and promised again only after it was given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from readyplane.core.errors import ReadyplaneError, Refused, Unavailable, Unsupported
from readyplane.core.stage import CapacityStage, UpgradeState
from readyplane.core.startup import SegmentName
from readyplane.core.worker import CheckResult, Lease
from readyplane.kit.clock import Clock
from readyplane.ports import Router
from readyplane_agent import probes
from readyplane_agent.engines.offers import CaptureState, Graphs, StagesGraphs, offered
from readyplane_agent.engines.port import EnginePort
from readyplane_agent.patience import Patience
from readyplane_agent.settings import AgentSettings
from readyplane_agent.trace import StartTrace
from readyplane_agent.upgrade import Step, Terms, judged, questions, step, why_not

if TYPE_CHECKING:
    from readyplane_agent.starting import Started

log = logging.getLogger("agent.upgrade")

CAPTURE_POLL_S = 0.1
UNDER_WAY = (UpgradeState.CAPTURING, UpgradeState.CHECKING)
CAPTURE_LIMIT_S = 3600.0
CHECK_LIMIT_S = 300.0
"""A question waits behind requests like any other; a busy engine has not failed."""


async def first_stage(
    settings: AgentSettings, engine: EnginePort, *, profile: str
) -> CapacityStage | None:
    """The stage of a worker whose engine has just come up; None where it was ordered whole.

    Raises:
        Unavailable: the engine does not answer.
    """
    if not settings.graph_stages:
        return None
    serving = engine.serving()
    terms = Terms(profile, serving.block_size)
    try:
        found = offered(engine, StagesGraphs, settings.engine, "graph stages")  # type: ignore[type-abstract]
    except Unsupported as error:
        log.warning("started whole: %s", error)
        return terms.unsupported(str(error), kv_total_blocks=serving.kv_total_blocks)
    return terms.first(await found.graphs())


class Upgrading:
    """The upgrade of one worker; at most one at a time, and none again after one that failed.

    Args:
        started: has stage, serving facts and checks; the stage is changed here. trace: of the start.
        lease: as it stands now. told: called after each change, so that it is told and shown.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        router: Router,
        engine: EnginePort,
        started: Started,
        clock: Clock,
        trace: StartTrace,
        lease: Callable[[], Lease],
        told: Callable[[], None],
    ) -> None:
        self._s, self._router, self._engine, self._started = settings, router, engine, started
        self._clock, self._trace, self._lease, self._told = clock, trace, lease, told
        self._patient = Patience(clock, lease)
        self._task: asyncio.Task[None] | None = None
        self._began_s = 0.0
        self.counts = dict.fromkeys(("complete", "rolled_back", "interrupted"), 0)

    def begin(self) -> None:
        """It serves: upgrade it, if there is anything to upgrade and nothing has failed."""
        stage = self._started.stage
        if stage is None or stage.state not in (UpgradeState.FIRST, *UNDER_WAY):
            return
        if self._task is None or self._task.done():
            self._began_s = self._clock.monotonic_s()
            self._task = asyncio.create_task(self._run())

    async def interrupt(self, why: str) -> None:
        """Something else comes first; memory goes back to KV unless everything was done."""
        task, self._task = self._task, None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait({task})
        stage = self._started.stage
        if stage is None or stage.state not in UNDER_WAY:
            return
        log.info("the upgrade is interrupted: %s", why)
        self.counts["interrupted"] += 1
        try:
            await self._from_the_start()
        except ReadyplaneError as error:  # less is promised than it has: asked again when it begins
            log.warning("the captured graphs are not given back: %s", error)

    async def _from_the_start(self) -> None:
        """Nothing is captured any more; what is promised follows with the next proof or stage."""
        stage = self._started.stage
        assert stage is not None
        step(stage.state, Step.INTERRUPTED)
        self._take(self._terms().first(await self._staged().drop_captured()))

    def stop(self) -> None:
        """The worker ends."""
        if self._task is not None:
            self._task.cancel()

    # ----------------------------------------------------------------------- the way there

    async def _run(self) -> None:
        span = self._trace.add(SegmentName.GRAPH_STAGE, self._clock.monotonic_s())
        try:
            await self._upgrade()
        except ReadyplaneError as error:
            await self._back(str(error))
        finally:
            stage = self._started.stage
            span.end_s = self._clock.monotonic_s()
            span.detail = "" if stage is None else said(stage)
            self._told()

    async def _upgrade(self) -> None:
        engine, terms, stage = self._staged(), self._terms(), self._started.stage
        if stage is not None and stage.state in UNDER_WAY:
            await self._from_the_start()
        serving = self._started.serving
        assert serving is not None
        plan = await engine.graphs()
        why = why_not(plan, max_model_len=serving.max_model_len, block_size=serving.block_size)
        if why:
            raise Refused("upgrade", [why], "give the worker more memory, or start it whole")
        await self._publish(terms.reserved(plan, UpgradeState.CAPTURING), Step.RESERVED)
        asked = questions(
            probes.Question.of(self._started.manifest).prompt, max_model_len=serving.max_model_len
        )
        before = await self._answers(asked, captured=False)
        await engine.capture()
        graphs = await self._captured(engine)
        await self._publish(terms.reserved(graphs, UpgradeState.CHECKING), Step.CAPTURED)
        check = judged(before, await self._answers(asked, captured=True), graphs, plan)
        if not check.passed:
            raise Refused("upgrade", [check.reason], "see the engine's log")
        graphs = await engine.use_captured()
        await self._publish(terms.complete(graphs), Step.CHECKED, check)
        self.counts["complete"] += 1
        reuse, manifest = self._started.reuse, self._started.manifest
        if reuse is not None and manifest is not None:
            self._started.tasks.append(asyncio.create_task(reuse.keep_compiled(manifest)))

    async def _answers(
        self, asked: tuple[tuple[int, ...], ...], *, captured: bool
    ) -> list[tuple[int, ...]]:
        """To each question alone and then to the others at once; greedy, so that they can be equal."""
        tokens = probes.Question.of(self._started.manifest).max_tokens

        async def answer(prompt: tuple[int, ...]) -> tuple[int, ...]:
            if captured:
                found = await self._staged().answer_captured(prompt, max_tokens=tokens)
            else:
                found = await self._engine.generate(
                    prompt, max_tokens=tokens, timeout_s=CHECK_LIMIT_S
                )
            return found.token_ids

        alone = await answer(asked[0])
        return [alone, *await asyncio.gather(*map(answer, asked[1:]))]

    async def _captured(self, engine: StagesGraphs) -> Graphs:
        """Wait for the capture. Raises Unavailable: it failed, or takes too long."""
        until_s = self._clock.monotonic_s() + CAPTURE_LIMIT_S
        while (graphs := await engine.graphs()).state is CaptureState.RUNNING:
            if self._clock.monotonic_s() > until_s:
                raise Unavailable(
                    f"{len(graphs.captured)} of {len(graphs.wanted)} shapes were captured within "
                    f"{CAPTURE_LIMIT_S:g} s",
                    "see the engine's log",
                )
            await self._clock.sleep(CAPTURE_POLL_S)
        if graphs.state is not CaptureState.DONE:
            raise Unavailable(f"the capture failed: {graphs.failure}", "see the engine's log")
        return graphs

    # ----------------------------------------------------------------------- the way back

    async def _back(self, why: str) -> None:
        """As the start left it: the engine first, then what is promised. Never raises."""
        stage = self._started.stage
        assert stage is not None
        log.warning("the upgrade is rolled back: %s", why)
        self.counts["rolled_back"] += 1
        try:
            graphs = await self._staged().drop_captured()
            await self._publish(self._terms().rolled_back(graphs, why), Step.FAILED)
        except ReadyplaneError as error:  # the promise of before is no more than what it has
            log.warning("the way back is not told: %s", error)
            state = step(stage.state, Step.FAILED)
            self._take(replace(stage, state=state, failure=why))

    async def _publish(self, stage: CapacityStage, event: Step, *checks: CheckResult) -> None:
        """Tell the router, then it is so. Raises Refused: it does not believe it."""
        before, serving = self._started.stage, self._started.serving
        assert before is not None
        assert serving is not None
        step(before.state, event)
        stage = stage.at(self._clock.monotonic_s() - self._began_s)
        serves = replace(
            serving, stage=stage, kv_total_blocks=stage.kv_tokens // serving.block_size
        )

        async def tell() -> None:
            lease = self._lease()
            verdict = await self._router.admit(
                lease.worker_id, lease.incarnation, lease.epoch, serving=serves, checks=checks
            )
            if not verdict.admitted:
                raise Refused("another stage", verdict.reasons, "see the worker's checks")

        await self._patient(tell)
        self._started.serving = serves
        self._take(stage)

    def _take(self, stage: CapacityStage) -> None:
        self._started.stage = stage
        log.info("%s", said(stage))
        self._told()

    def _terms(self) -> Terms:
        stage = self._started.stage
        assert stage is not None
        return Terms(stage.profile, self._engine.serving().block_size)

    def _staged(self) -> StagesGraphs:
        return offered(self._engine, StagesGraphs, self._s.engine, "graph stages")  # type: ignore[type-abstract]

    def metrics(self, who: str) -> list[str]:
        """Prometheus text; `who` are the labels of this worker. Empty without stages."""
        stage = self._started.stage
        if stage is None:
            return []
        lines = ["# TYPE readyplane_agent_graph_stage gauge"]
        lines.append(f'readyplane_agent_graph_stage{{{who},state="{stage.state}"}} {stage.number}')
        lines.append("# TYPE readyplane_agent_graph_shapes gauge")
        lines.append(f"readyplane_agent_graph_shapes{{{who}}} {len(stage.shapes)}")
        lines.append("# TYPE readyplane_agent_graph_kv_tokens gauge")
        lines.append(f"readyplane_agent_graph_kv_tokens{{{who}}} {stage.kv_tokens}")
        if stage.graph_bytes is not None:
            lines.append("# TYPE readyplane_agent_graph_bytes gauge")
            lines.append(f"readyplane_agent_graph_bytes{{{who}}} {stage.graph_bytes}")
        lines.append("# TYPE readyplane_agent_upgrades_total counter")
        lines += [
            f'readyplane_agent_upgrades_total{{{who},outcome="{outcome}"}} {count}'
            for outcome, count in self.counts.items()
        ]
        return lines


def said(stage: CapacityStage) -> str:
    """A stage in a few words."""
    text = f"stage {stage.number}, {stage.state}: {len(stage.shapes)} shapes, "
    text += f"{stage.kv_tokens} KV tokens, {stage.digest}"
    return f"{text}; {stage.failure}" if stage.failure else text
