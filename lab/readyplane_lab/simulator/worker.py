"""A worker's life on virtual time, as its agent lives it: lease, start, gate, serving, drain.

Every step goes through the production router's port and the production lifecycle table; only what
takes time on a machine (segments, weights, engine) is modelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from readyplane.core import gate_checks as gc
from readyplane.core.errors import LostLease, ReadyplaneError, Refused, StaleEpoch
from readyplane.core.identity import KvFormat, Manifest
from readyplane.core.profile import ClassProfile
from readyplane.core.startup import Segment, SegmentName, WeightTier
from readyplane.core.worker import CheckResult, Lease, Role, Serving, StartProgress, WorkerOffer
from readyplane.kit.clock import Clock
from readyplane.ports import KvEventBatch, Order, RankReport, Renewal, Router
from readyplane_agent.lifecycle import Event, State, step
from readyplane_lab.simulator.engine import SimEngine
from readyplane_lab.simulator.startup import Draws, StartUpModel, WeightSources

BLOCK_SIZE = 16
RANK_STEPS = ("scheduled", "verified", "connected", "placed", "canary_passed")


@dataclass(frozen=True, slots=True)
class Site:
    """What all workers of a world share.

    Attributes:
        block_size: tokens of a KV block. tasks: whatever runs a coroutine beside the others.
    """

    router: Router
    manifest: Manifest
    startup: StartUpModel
    sources: WeightSources
    draws: Draws
    clock: Clock
    block_size: int = BLOCK_SIZE


class SimWorker:
    """One allocation, from order to release.

    Args:
        profile: of its engine. told: the one the router is told, where that differs.
        role: that it registers with. ordinal: of this start among those of its pool, for the draws.

    Attributes:
        allocated_s, ready_s, drain_s, released_s: virtual seconds, None while it has not happened.
        state: where its agent is. tier: where its weights came from.
    """

    def __init__(
        self,
        order: Order,
        *,
        site: Site,
        profile: ClassProfile,
        told: ClassProfile | None = None,
        role: Role,
        ordinal: int,
        on_released: Callable[[SimWorker], None],
    ) -> None:
        self.order = order
        self.role = role
        self.profile = profile
        self._told = told or profile
        self.engine = SimEngine(profile, block_size=site.block_size, clock=site.clock)
        self.state = State.NEW
        self.tier = WeightTier.UNKNOWN
        self.allocated_s = site.clock.monotonic_s()
        self.ready_s: float | None = None
        self.drain_s: float | None = None
        self.released_s: float | None = None
        self.failure = ""
        self._site = site
        self._ordinal = ordinal
        self._on_released = on_released
        self._segments: list[Segment] = []
        self._lease: Lease | None = None
        self._kv_sequence = 0
        self._task = asyncio.get_running_loop().create_task(self._live())

    @property
    def pool(self) -> str:
        """Name of the pool that it was ordered for."""
        return str(self.order.role)

    @property
    def incarnation(self) -> str:
        """One life only: the order's id says it."""
        return f"{self.order.worker_id}-i"

    @property
    def engine_url(self) -> str:
        """What the gateway dials."""
        return f"http://{self.order.worker_id}:8000"

    def crash(self, why: str) -> None:
        """The process and its engine are gone without a word."""
        self.failure = why
        self._task.cancel()

    async def release(self) -> None:
        """End it, however far it is."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # ------------------------------------------------------------------ life

    async def _live(self) -> None:
        try:
            await self._start()
            await self._serve()
        except (LostLease, StaleEpoch) as error:
            self._tell(Event.FENCED_OFF)
            self.failure = str(error)
        except ReadyplaneError as error:
            self.failure = self.failure or str(error)
        finally:
            self._site.sources.remove_peer(self.order.worker_id)
            self.engine.kill(self.failure or "the worker has left")
            self.released_s = self._site.clock.monotonic_s()
            self._on_released(self)

    async def _start(self) -> None:
        await self._run(SegmentName.SCHEDULE, self._seconds(SegmentName.SCHEDULE))
        self._lease = await self._site.router.register(self._offer())
        self._tell(Event.LEASE_GRANTED)
        await self._rank("scheduled")
        renewing = asyncio.get_running_loop().create_task(self._renewing())
        try:
            for name in (SegmentName.RUNTIME_IMPORT, SegmentName.ARTIFACT_DISCOVERY):
                await self._drawn(name)
            self._tell(Event.SOURCES_PLANNED)
            began_s = self._site.clock.monotonic_s()
            self._segments.append(Segment(SegmentName.WEIGHT_TRANSFER, began_s, None))
            self.tier = await self._site.sources.fetch()
            self._end_segment()
            self._tell(Event.WEIGHTS_VERIFIED)
            await self._rank("verified")
            for name in list(self._site.startup.segments)[2:-1]:
                await self._drawn(name)
            self._tell(Event.ENGINE_UP)
            await self._rank("connected")
            await self._rank("placed")
            await self._drawn(SegmentName.CANARY)
            self._tell(Event.CANARY_PASSED)
            group_epoch = await self._rank("canary_passed")
        finally:
            renewing.cancel()
        verdict = await self._site.router.admit(
            self.order.worker_id,
            self.incarnation,
            self._epoch,
            serving=self._serving(),
            checks=self._checks(group_epoch),
        )
        if not verdict.admitted:
            self._tell(Event.REFUSED)
            self.failure = "; ".join(verdict.reasons)
            raise Refused("admission", verdict.reasons)
        self._tell(Event.ADMITTED)
        self.ready_s = self._site.clock.monotonic_s()
        self._site.sources.add_peer(self.order.worker_id)

    async def _serve(self) -> None:
        drained: asyncio.Task[None] | None = None
        while True:
            done = drained is not None and drained.done()
            answer = await self._renew(drained=done)
            kinds = {d.kind for d in answer}
            if kinds & {"leave", "stop"}:
                self._tell(Event.LEAVE_ASKED)
                await self._site.router.leave(
                    self.order.worker_id, self.incarnation, self._epoch, reason="drained"
                )
                return
            if "drain" in kinds and drained is None:
                self._tell(Event.DRAIN_ASKED)
                drained = asyncio.get_running_loop().create_task(self.engine.idle())
            assert self._lease is not None
            await self._site.clock.sleep(self._lease.ttl_s / 3)

    async def _renewing(self) -> None:
        while True:
            assert self._lease is not None
            await self._site.clock.sleep(self._lease.ttl_s / 3)
            await self._renew()

    async def _renew(self, *, drained: bool = False) -> tuple[Any, ...]:
        events = self.engine.take_kv_events()
        batches: tuple[KvEventBatch, ...] = ()
        if events:
            batches = (KvEventBatch(self._kv_sequence, events),)
            self._kv_sequence += 1
        ready = self.ready_s is not None
        answer = await self._site.router.renew(
            Renewal(
                self.order.worker_id,
                self.incarnation,
                self._epoch,
                progress=self._progress(),
                load=self.engine.load() if ready else None,
                kv_events=batches,
                drained=drained,
            )
        )
        self._lease = answer.lease
        return answer.directives

    # ------------------------------------------------------------------ parts

    @property
    def _epoch(self) -> int:
        assert self._lease is not None
        return self._lease.epoch

    def _tell(self, event: Event) -> None:
        self.state = step(self.state, event)

    async def _drawn(self, name: SegmentName) -> None:
        await self._run(name, self._seconds(name))

    def _seconds(self, name: SegmentName) -> float:
        return self._site.startup.seconds(name, self._site.draws, self.pool, self._ordinal)

    async def _run(self, name: SegmentName, seconds: float) -> None:
        self._segments.append(Segment(name, self._site.clock.monotonic_s(), None, modelled=True))
        await self._site.clock.sleep(seconds)
        self._end_segment()

    def _end_segment(self) -> None:
        self._segments[-1] = replace(self._segments[-1], end_s=self._site.clock.monotonic_s())

    async def _rank(self, name: str) -> int:
        status = await self._site.router.report_rank(
            RankReport(
                self.order.worker_id,
                self.incarnation,
                self._epoch,
                rank=0,
                step=name,
                manifest_digest=self._site.manifest.digest,
            )
        )
        return status.group_epoch

    def _offer(self) -> WorkerOffer:
        order = self.order
        return WorkerOffer(
            worker_id=order.worker_id,
            incarnation=self.incarnation,
            role=self.role,
            model=order.model,
            worker_class=order.worker_class,
            generation=order.generation,
            manifest_digest=self._site.manifest.digest,
            node=order.worker_id,
            scale_decision_id=order.scale_decision_id,
            ordered_ago_s=self._site.clock.monotonic_s() - self.allocated_s,
            mode=order.mode,
        )

    def _progress(self) -> StartProgress:
        return StartProgress(
            self.allocated_s, self._site.clock.monotonic_s(), tuple(self._segments)
        )

    def _serving(self) -> Serving:
        config = self._site.manifest.config
        return Serving(
            engine_url=self.engine_url,
            kv=KvFormat(self._site.manifest.digest, block_size=self._site.block_size),
            kv_total_blocks=self.engine.model.pool.total,
            block_size=self._site.block_size,
            max_model_len=int(config["max_model_len"]),
            profile=self._told.name,
            max_num_seqs=self.engine.model.max_num_seqs,
            tokenizer_digest=self._site.manifest.tokenizer_digest,
            tier=self.tier,
            mode=self.order.mode,
        )

    def _checks(self, group_epoch: int) -> tuple[CheckResult, ...]:
        manifest = self._site.manifest
        golden = manifest.canary.golden_token_ids if manifest.canary else ()
        chunks = sum(len(f.chunks) for f in manifest.files)
        blocks = self.engine.model.pool.total
        evidence: dict[str, dict[str, Any]] = {
            gc.MODEL_REVISION: {"manifest_digest": manifest.digest},
            gc.TOKENIZER_REVISION: {"tokenizer_digest": manifest.tokenizer_digest},
            gc.TENSOR_CHECKSUMS: {"chunks_verified": chunks, "chunks_total": chunks, "failed": []},
            gc.SHARD_COVERAGE: {
                "tensors": len(manifest.tensors),
                "tensors_expected": len(manifest.tensors),
                "missing": [],
                "ranks": self._site.manifest.tp,
            },
            gc.KV_CONNECTOR: {"outbound": True, "inbound": True, "detail": "modelled"},
            gc.CANARY: {"token_ids": list(golden), "eos_ok": True, "sampling_ok": True},
            gc.BASICS: {"eos": True, "max_tokens": True, "structured": gc.NOT_OFFERED},
            gc.KV_POOL: {"kv_total_blocks": blocks, "free_blocks": blocks},
            gc.PROFILE: {"name": self._told.name, "digest": self._told.digest},
            gc.LEASE: {"epoch": self._epoch},
            gc.GROUP: {"group_epoch": group_epoch},
        }
        return tuple(CheckResult(name, passed=True, evidence=e) for name, e in evidence.items())
