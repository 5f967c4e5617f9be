"""The gateway on virtual time: route, P leg, hand-over, D leg, one re-pair, one outcome each.

The same steps as `readyplane_gateway`, with engines called directly and the KV moved over modelled
links that share their bandwidth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from readyplane.core.errors import NoPair, ReadyplaneError
from readyplane.core.profile import LinkClass
from readyplane.core.work import EventKind, RequestEvent, RequestShape, Slo
from readyplane.kit.clock import Clock
from readyplane.ports import Mover, Pair, Router
from readyplane_agent.engines.modelled.core_events import EngineRequest, Finished, RequestMode
from readyplane_lab.simulator.engine import Leg, LegFailed, SimEngine
from readyplane_lab.simulator.links import SharedLinks
from readyplane_lab.simulator.site import BLOCK_SIZE
from readyplane_lab.simulator.worker import SimWorker
from readyplane_lab.workload.request import WorkloadRequest, prompt_hashes

REPAIRS_MAX = 1
MAX_TOKENS_BOUND = 2048
REQUEST_TIMEOUT_S = 120.0
STREAM_SLACK = 4.0
# A gateway tells of progress every 256 tokens; here it is told only of streams that last.
PROGRESS_TOKENS = 512
PROGRESS_EVERY_S = 10.0
PACE_EVERY_S = 2.5
MOVE_AFTER_S, MOVE_AGAIN_S = 2.0, 2.0


@dataclass(frozen=True, slots=True)
class Record:
    """One request's end. Latencies in seconds, None where there were none."""

    index: int
    at_s: float
    isl: int
    osl: int
    outcome: str
    ttft_s: float | None
    tpot_s: float | None
    attained: bool
    cached_tokens: int
    repaired: bool
    detail: str = ""


class SimGateway:
    """Serves one model.

    Args:
        tells_pace: how fast each stream really goes is told, as a gateway does; costs events, and
            matters only where some engines are slower than their class.
        links: where they are not all of the class `link`.
        mover: finds another worker for requests on one that drains; None lets them end there.
    """

    def __init__(
        self,
        router: Router,
        workers: Mapping[str, SimWorker],
        *,
        model: str,
        slo: Slo,
        link: LinkClass,
        kv_bytes_per_token: int,
        clock: Clock,
        block_size: int = BLOCK_SIZE,
        tells_pace: bool = False,
        links: SharedLinks | None = None,
        mover: Mover | None = None,
    ) -> None:
        self.records: list[Record] = []
        self.moved = 0
        self._mover = mover
        self.open = 0
        self._router = router
        self._workers = workers
        self._model = model
        self._slo = slo
        self._kv_bytes_per_token = kv_bytes_per_token
        self._clock = clock
        self._block_size = block_size
        self._tells_pace = tells_pace
        self._links = links or SharedLinks(link, clock)

    async def serve(self, request: WorkloadRequest) -> None:
        """Serve one request; it ends in exactly one record, whatever happens."""
        self.open += 1
        began_s = self._clock.monotonic_s()
        shape = RequestShape(
            request_id=f"r{request.index}",
            model=self._model,
            isl=request.isl,
            block_hashes=prompt_hashes(request, self._block_size),
            max_tokens=max(MAX_TOKENS_BOUND, request.osl),
            priority=request.priority,
            tenant=request.tenant,
        )
        task = asyncio.current_task()
        assert task is not None
        limit = _Limit(task)
        timer = asyncio.get_running_loop().call_later(self._limit_s(request), limit.reached)
        try:
            record = await self._attempts(request, shape, began_s)
        except asyncio.CancelledError:
            if not limit.over or task.uncancel():
                raise
            record = self._miss(request, "timed_out", "no end in time")
        finally:
            timer.cancel()
            self.open -= 1
        self.records.append(record)

    def _limit_s(self, request: WorkloadRequest) -> float:
        """How long a client waits; for a long answer, several times what it should take."""
        return max(REQUEST_TIMEOUT_S, STREAM_SLACK * self._slo.tpot_s * request.osl)

    async def _attempts(
        self, request: WorkloadRequest, shape: RequestShape, began_s: float
    ) -> Record:
        replaces = ""
        avoid: tuple[str, ...] = ()
        for attempt in range(REPAIRS_MAX + 1):
            try:
                pair = await self._router.route(shape, replaces=replaces, avoid=avoid)
            except NoPair as error:
                return self._miss(request, "refused", str(error))
            except ReadyplaneError as error:
                return self._miss(request, "failed", str(error))
            failed = _Failed()
            try:
                return await self._legs(request, shape, pair, began_s, failed, bool(attempt))
            except LegFailed as error:
                self._drop(pair, shape.request_id)
                await self._tell(
                    RequestEvent(
                        pair.reservation_id,
                        EventKind.LEG_FAILED,
                        failed_worker_id=failed.worker_id,
                        detail=error.why,
                    )
                )
                if failed.too_late:
                    return self._miss(request, "failed", error.why)
                replaces, avoid = pair.reservation_id, (failed.worker_id,)
            except BaseException:
                await self._tell(
                    RequestEvent(pair.reservation_id, EventKind.ABORTED, detail="client left")
                )
                self._drop(pair, shape.request_id)
                raise
        return self._miss(request, "failed", "both attempts failed")

    async def _legs(
        self,
        request: WorkloadRequest,
        shape: RequestShape,
        pair: Pair,
        began_s: float,
        failed: _Failed,
        repaired: bool,
    ) -> Record:
        hashes = shape.block_hashes
        failed.worker_id = pair.prefill.worker_id
        if pair.local:
            mode = RequestMode.LOCAL
            leg = self._engine(pair.prefill.worker_id).submit(
                _engine_request(request, shape.request_id, hashes, mode)
            )
        else:
            p_engine = self._engine(pair.prefill.worker_id)
            p_leg = p_engine.submit(
                _engine_request(request, shape.request_id, hashes, RequestMode.REMOTE_DECODE)
            )
            await p_leg.finished
            await self._tell(
                RequestEvent(
                    pair.reservation_id,
                    EventKind.PREFILL_DONE,
                    cached_tokens=p_leg.cached_tokens,
                )
            )
            failed.worker_id = pair.decode.worker_id
            d_engine = self._engine(pair.decode.worker_id)
            name = f"{shape.request_id}-d"
            leg = d_engine.submit(
                _engine_request(request, name, hashes, RequestMode.REMOTE_PREFILL)
            )
            wanted = await leg.kv_wanted
            failed.worker_id = pair.prefill.worker_id
            await self._transfer(pair, wanted.tokens)
            if not p_engine.kv_pulled(shape.request_id):
                d_engine.abort(name)
                raise LegFailed("the KV was no longer held by the prefill worker")
            failed.worker_id = pair.decode.worker_id
            d_engine.kv_arrived(name)
            leg.cached_tokens = p_leg.cached_tokens
        first_s = await leg.first_token
        failed.too_late = True
        await self._tell(
            RequestEvent(
                pair.reservation_id,
                EventKind.FIRST_TOKEN,
                ttft_s=first_s - began_s,
                output_tokens=1,
            )
        )
        if self._mover is None:
            finished = await self._streamed(pair, leg, first_s)
        else:
            pair, finished = await self._followed(self._mover, shape, pair, leg, failed)
        return await self._finished(
            request, pair, leg.cached_tokens or 0, began_s, first_s, finished, repaired
        )

    async def _streamed(self, pair: Pair, leg: Leg, first_s: float) -> Finished:
        """The end of a stream; a long one tells the router that it goes on, or it is given up."""
        last = leg.request.output_tokens - 1
        every_s = PACE_EVERY_S if self._tells_pace else PROGRESS_EVERY_S
        while last >= PROGRESS_TOKENS or self._tells_pace:
            done, _ = await asyncio.wait((leg.finished,), timeout=every_s)
            if done:
                break
            elapsed_s = self._clock.monotonic_s() - first_s
            pace_s = self._pace_s(pair) if self._tells_pace else pair.predicted_tpot_s
            emitted = min(last, 1 + int(elapsed_s / max(pace_s, 1e-3)))
            await self._tell(
                RequestEvent(pair.reservation_id, EventKind.PROGRESS, output_tokens=emitted)
            )
        return await leg.finished

    async def _followed(
        self, mover: Mover, shape: RequestShape, pair: Pair, leg: Leg, failed: _Failed
    ) -> tuple[Pair, Finished]:
        """The end of a stream, wherever it goes on; the pair it ended with, and all its tokens."""
        given = 0
        while await self._drains(pair, leg, given):
            emitted = self._emitted(pair, leg, given)
            try:
                moved = await mover.move(
                    shape,
                    reservation_id=pair.reservation_id,
                    worker_id=pair.decode.worker_id,
                    emitted=emitted,
                )
            except ReadyplaneError:
                continue  # nobody has room: it is asked again
            source = self._engine(pair.decode.worker_id)
            ends = (pair.decode.worker_id, moved.decode.worker_id)
            left = source.move_out(leg.request.request_id)
            pair, failed.worker_id = moved, moved.decode.worker_id
            if left is None:
                break  # it has just ended
            given += left
            leg = await self._goes_on(source, ends, leg, left)
        finished = await leg.finished
        return pair, replace(finished, output_tokens=given + finished.output_tokens)

    async def _drains(self, pair: Pair, leg: Leg, given: int) -> bool:
        """True when the worker of a leg is to leave, False when the leg has ended. Tells the router
        meanwhile that it goes on.
        """
        while True:
            done, _ = await asyncio.wait((leg.finished,), timeout=MOVE_AFTER_S)
            if done:
                return False
            worker = self._workers.get(pair.decode.worker_id)
            if worker is not None and worker.drain_s is not None:
                return True
            told = self._emitted(pair, leg, given)
            await self._tell(
                RequestEvent(pair.reservation_id, EventKind.PROGRESS, output_tokens=told)
            )

    def _emitted(self, pair: Pair, leg: Leg, given: int) -> int:
        """Output tokens by now, as a leg's first token and the predicted pace have it."""
        elapsed_s = self._clock.monotonic_s() - leg.first_token.result()
        now = 1 + int(elapsed_s / max(pair.predicted_tpot_s, 1e-3))
        return given + max(1, min(leg.request.output_tokens - 1, now))

    async def _goes_on(
        self, source: SimEngine, ends: tuple[str, str], leg: Leg, emitted: int
    ) -> Leg:
        """The rest of a sequence on another engine, its KV read from where it was."""
        self.moved += 1
        had = leg.request
        name = f"{had.request_id}+"
        target = self._engine(ends[1])
        # Blocks of the answer are not known by their hashes: what was written is no prefix here.
        rest = EngineRequest(
            request_id=name,
            prompt_tokens=had.prompt_tokens + emitted,
            output_tokens=had.output_tokens - emitted,
            mode=RequestMode.REMOTE_PREFILL,
            finish_reason="stop",
        )
        after = target.submit(rest)
        wanted = await after.kv_wanted
        await self._links.move(ends, float(wanted.tokens * self._kv_bytes_per_token))
        if not source.kv_pulled(had.request_id):
            target.abort(name)
            raise LegFailed("the KV was no longer held by the worker it came from")
        target.kv_arrived(name)
        after.cached_tokens = leg.cached_tokens
        await after.first_token
        return after

    def _pace_s(self, pair: Pair) -> float:
        """Seconds for a token on the decode worker, as it runs now."""
        worker = self._workers.get(pair.decode.worker_id)
        if worker is None:
            return pair.predicted_tpot_s
        stats = worker.engine.model.stats()
        kv_tokens = float(stats.kv_used_blocks * self._block_size)
        return worker.engine.profile.iteration_s(float(max(1, stats.running)), kv_tokens)

    async def _finished(
        self,
        request: WorkloadRequest,
        pair: Pair,
        cached_tokens: int,
        began_s: float,
        first_s: float,
        finished: Finished,
        repaired: bool,
    ) -> Record:
        ttft_s = first_s - began_s
        later = finished.output_tokens - 1
        tpot_s = (finished.at_s - first_s) / later if later > 0 else 0.0
        attained = ttft_s <= self._slo.ttft_s and tpot_s <= self._slo.tpot_s
        await self._tell(
            RequestEvent(
                pair.reservation_id,
                EventKind.FINISHED,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                output_tokens=finished.output_tokens,
                attained=attained,
            )
        )
        return Record(
            index=request.index,
            at_s=request.at_s,
            isl=request.isl,
            osl=finished.output_tokens,
            outcome="finished",
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            attained=attained,
            cached_tokens=cached_tokens,
            repaired=repaired,
        )

    async def _transfer(self, pair: Pair, tokens: int) -> None:
        ends = (pair.prefill.worker_id, pair.decode.worker_id)
        await self._links.move(ends, float(tokens * self._kv_bytes_per_token))

    def _engine(self, worker_id: str) -> SimEngine:
        worker = self._workers.get(worker_id)
        if worker is None:
            raise LegFailed(f"{worker_id} is gone")
        return worker.engine

    def _drop(self, pair: Pair, request_id: str) -> None:
        for worker_id, name in (
            (pair.prefill.worker_id, request_id),
            (pair.decode.worker_id, f"{request_id}-d"),
        ):
            if (worker := self._workers.get(worker_id)) is not None:
                worker.engine.abort(name)

    async def _tell(self, event: RequestEvent) -> None:
        await self._router.complete((event,))

    def _miss(self, request: WorkloadRequest, outcome: str, why: str) -> Record:
        return Record(
            index=request.index,
            at_s=request.at_s,
            isl=request.isl,
            osl=0,
            outcome=outcome,
            ttft_s=None,
            tpot_s=None,
            attained=False,
            cached_tokens=0,
            repaired=False,
            detail=why,
        )


@dataclass(slots=True)
class _Limit:
    """The time a request may take: `asyncio.timeout` at a fraction of its price."""

    task: asyncio.Task[Any]
    over: bool = False

    def reached(self) -> None:
        """End it."""
        self.over = True
        self.task.cancel()


@dataclass(slots=True)
class _Failed:
    """Which end would be to blame now, and whether the client has seen a token."""

    worker_id: str = ""
    too_late: bool = False


def _engine_request(
    request: WorkloadRequest, request_id: str, hashes: tuple[int, ...], mode: RequestMode
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_tokens=request.isl,
        output_tokens=request.osl,
        block_hashes=hashes,
        mode=mode,
        finish_reason="stop",
    )
