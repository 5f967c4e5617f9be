"""The floor: workers of both pools, and the way of each row from its arrival to its end.

Owns one step of time, who serves what, and what happens when a worker comes, drains or is lost.
Handed to the run, which asks the planner, and to the faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from readyplane.core import convertible
from readyplane.core.profile import ClassProfile
from readyplane.core.work import Slo
from readyplane_lab.simulator.fluid.arrivals import Arrivals
from readyplane_lab.simulator.fluid.decode import Batch, DecodePool, Ends
from readyplane_lab.simulator.fluid.fleet import FluidWorker
from readyplane_lab.simulator.fluid.options import FluidOptions
from readyplane_lab.simulator.fluid.prefill import Servers, Stream
from readyplane_lab.simulator.fluid.rows import Rows
from readyplane_lab.simulator.fluid.starts import Starts
from readyplane_lab.simulator.fluid.view import Now
from readyplane_lab.simulator.startup import Draws
from readyplane_planner.decide import POOLS
from readyplane_router.desk import TRIAGE_MARGIN
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy

REQUEST_TIMEOUT_S = 120.0
STREAM_SLACK = 4.0
"""A client waits for two minutes, and for a long answer several times what it should take."""
REPAIRS_MAX = 1
BLOCKED_STEP_S, BLOCKED_FOR_S = 0.1, 1.0
TYPICAL_ISL = 1000.0


class Floor:
    """Args:
    profiles: of prefill and decode. slo: that the router pairs by. on_ready: told each worker that has become ready.

    Attributes:
        fleet: allocations that live. ended: those that do not, newest last; everyone: all.
    """

    def __init__(
        self,
        options: FluidOptions,
        arrivals: Arrivals,
        profiles: tuple[ClassProfile, ClassProfile],
        *,
        slo: Slo,
        lends: bool,
        on_ready: Callable[[FluidWorker], None],
    ) -> None:
        self.router = RouterPolicy(pair=PairPolicy(slo=slo))
        self.rows = Rows(arrivals, profiles[0], options.link, self.router)
        self.profiles = dict(zip(POOLS, profiles, strict=True))
        self.fleet: dict[str, FluidWorker] = {}
        self.ended: list[FluidWorker] = []
        self.everyone: list[FluidWorker] = []
        self.starts = Starts(
            options.startup, Draws(options.seed), on_ready=self._ready, on_failed=self._failed
        )
        self.repairs = 0
        self._on_ready = on_ready
        pool = Servers if arrivals.single else Stream
        self.prefill: Servers | Stream = pool(
            self.rows.isl, self.rows.weight, self.rows.service_s, self.rows.since
        )
        if isinstance(self.prefill, Servers):
            self.prefill.limit_s = (1.0 - TRIAGE_MARGIN) * slo.ttft_s
            self.prefill.chains = self.rows.chains
            self.prefill.cached = arrivals.cached.tolist()
        if lends:
            self.prefill.lend = self._lent
        self.decode = DecodePool(profiles[1], self.router, self.rows.isl, apart=arrivals.single)
        self._place: dict[int, list[tuple[Batch, float]]] = {}
        self._repaired: dict[int, int] = {}
        self._limits: list[tuple[float, int]] = []
        self._slack_s = STREAM_SLACK * slo.tpot_s
        self._prefilling: list[tuple[float, int]] = []
        self._prefilling_w = self._prefilling_tokens = 0.0
        self._next_row = 0
        self._ordinals = dict.fromkeys(POOLS, 0)
        self._standbys = dict.fromkeys(POOLS, 0)

    @property
    def over(self) -> bool:
        """Everybody has come and gone."""
        gone = not self._place and not self.prefill.queue
        return gone and self._next_row >= len(self.rows.at)

    def step(self, from_s: float, until_s: float) -> None:
        """Let time pass; in short pieces while the queue waits for sequences to end."""
        queue = self.prefill.queue
        while from_s - queue.blocked_s < BLOCKED_FOR_S and until_s - from_s > BLOCKED_STEP_S:
            self._piece(from_s, from_s + BLOCKED_STEP_S)
            from_s += BLOCKED_STEP_S
        self._piece(from_s, until_s)
        self._drained(until_s)
        self.decode.merge()

    def _piece(self, from_s: float, until_s: float) -> None:
        self.starts.advance(until_s)
        self._arrive(until_s)
        self.prefill.serve(from_s, until_s, self._booked, self._prefilled)
        self._refuse(until_s)
        ends = Ends()
        for batch in self.decode.everyone():
            batch.advance(until_s, self.rows.isl, self.rows.osl, ends)
        for at_s, row, part in ends.first:
            self.rows.first_token(row, at_s, part)
        for at_s, row, part, batch in ends.last:
            self.decode.release(batch, row, part)
            if batch.promised_n <= 0:
                batch.idle_s = at_s
            if self.rows.last_token(row, at_s, part):
                self._place.pop(row, None)
        self._time_out(until_s)

    def now(self, now_s: float) -> Now:
        """What the router could tell."""
        rows = self.rows
        while self._prefilling and self._prefilling[0][0] <= now_s:
            row = heappop(self._prefilling)[1]
            self._prefilling_w -= rows.weight[row]
            self._prefilling_tokens -= rows.weight[row] * rows.uncached[row]
        if not self._prefilling:
            self._prefilling_w = self._prefilling_tokens = 0.0
        queue = self.prefill.queue
        promised = kv = 0.0
        for batch in self.decode.everyone():
            promised += batch.promised_n
            kv += batch.promised_kv
        decoding = max(0.0, promised - self._prefilling_w)
        return Now(
            queued=queue.requests,
            queued_tokens=queue.tokens,
            prefilling=self._prefilling_w,
            prefilling_tokens=self._prefilling_tokens,
            decoding=decoding,
            kv=decoding + (kv * decoding / promised if promised else 0.0),
            remaining=decoding * rows.lengths.forecast(TYPICAL_ISL)[0],
        )

    def batches(self) -> dict[str, Batch]:
        """By worker."""
        return {w.worker_id: batch for batch in self.decode.everyone() for w in batch.workers}

    # ------------------------------------------------------------------ a row's way

    def _arrive(self, until_s: float) -> None:
        rows, row, count = self.rows, self._next_row, len(self.rows.at)
        queue, totals, router = self.prefill.queue, rows.totals, self.router
        while row < count and rows.at[row] < until_s:
            weight, isl = rows.weight[row], rows.isl[row]
            totals.arrivals += weight
            totals.tokens += weight * isl
            totals.uncached += weight * rows.uncached[row]
            full = queue.tokens + isl > router.queue_tokens_max
            if queue.rows and (full or queue.requests >= router.queue_requests_max):
                rows.miss(row, "refused")
            else:
                queue.push(row, isl, weight)
            row += 1
        self._next_row = row

    def _booked(self, row: int, at_s: float) -> bool:
        isl, weight = self.rows.isl[row], self.rows.weight[row]
        expected, reserved = self.rows.lengths.forecast(isl)
        parts = self.decode.book(isl, weight, expected=expected, reserved=reserved, now_s=at_s)
        if parts:
            self._place[row] = parts
            limit_s = max(REQUEST_TIMEOUT_S, self._slack_s * self.rows.osl[row])
            heappush(self._limits, (self.rows.at[row] + limit_s, row))
        return bool(parts)

    def _prefilled(self, row: int, worker: FluidWorker | None, end_s: float) -> None:
        """A prompt is computed at `end_s`: its KV goes to the decode worker that was promised."""
        tokens = self.rows.uncached[row]
        self._computes(row, end_s)
        if worker is not None:
            worker.jobs.append((end_s, row, tokens))
            worker.promised += tokens
        moved_s = self.rows.moved_s[row]
        for booked, part in self._place.get(row, ()):
            batch = booked
            while batch.into is not None:
                batch = batch.into
            join_s = end_s + moved_s
            if batch.n > 0:
                # It is admitted, and joins, only between two iterations.
                each_s = batch.iteration_s()
                join_s = end_s + each_s * (0.5 + math.ceil(moved_s / each_s))
            heappush(batch.joining, (max(join_s, batch.t), row, part))

    def _computes(self, row: int, end_s: float) -> None:
        heappush(self._prefilling, (end_s, row))
        self._prefilling_w += self.rows.weight[row]
        self._prefilling_tokens += self.rows.weight[row] * self.rows.uncached[row]

    def _lent(self, row: int, at_s: float) -> bool:
        """A decode worker computes the prompt itself, in chunks between its iterations.

        Never one that has more than `prefill_ahead_s` of such work already.
        """
        if not self._booked(row, at_s):
            return False
        parts = self._place[row]
        if any(batch.stall_s > self.router.pair.prefill_ahead_s for batch, _ in parts):
            self.decode.take_back(row, self._place.pop(row))
            return False
        end_s = at_s
        for batch, part in parts:
            chunks, service_s = self._chunked_s(row, batch)
            end_s = at_s + batch.stall_s + service_s + chunks * batch.iteration_s()
            batch.stall_s += part * service_s / len(batch.workers)
            heappush(batch.joining, (max(end_s, batch.t), row, part))
        self._computes(row, end_s)
        return True

    def _chunked_s(self, row: int, batch: Batch) -> tuple[int, float]:
        """(chunks, seconds) of a prompt that is computed beside what the batch decodes."""
        profile, isl = batch.profile, self.rows.isl[row]
        most = max(1.0, convertible.chunk_tokens(profile) - batch.n / len(batch.workers))
        done, chunks, seconds = isl - self.rows.uncached[row], 0, 0.0
        while done < isl:
            tokens = min(most, isl - done)
            seconds += profile.prefill_s(tokens, done)
            done += tokens
            chunks += 1
        return chunks, seconds

    def _refuse(self, now_s: float) -> None:
        """The router keeps nobody waiting for longer than its bound."""
        queue, rows = self.prefill.queue, self.rows
        bound_s = now_s - self.router.pair.wait_max_s
        while queue.rows and rows.since[queue.rows[0]] <= bound_s:
            if queue.rows[0] in self._place:  # a part of it is being served
                return
            row = queue.rows[0]
            queue.pop(rows.isl[row], rows.weight[row])
            rows.miss(row, "refused")
        while queue.late and rows.since[queue.late[0]] <= bound_s:
            row = queue.late[0]
            queue.pop_late(rows.isl[row])
            rows.miss(row, "refused")

    def _time_out(self, now_s: float) -> None:
        """The gateway gives up on what has not ended in time."""
        waiting = self._limits
        while waiting and waiting[0][0] <= now_s:
            row = heappop(waiting)[1]
            if row in self._place:
                self._give_up(row, "timed_out")

    def _give_up(self, row: int, outcome: str) -> None:
        self._unbook(row)
        self.rows.miss(row, outcome)

    def _unbook(self, row: int) -> None:
        self.decode.drop(row, self._place.pop(row))

    def _repair(self, row: int, now_s: float) -> None:
        """Once more from the start, where it has had no token yet."""
        if row not in self._place:
            return
        if self._repaired.get(row, 0) >= REPAIRS_MAX:
            self._give_up(row, "failed")
            return
        self._repaired[row] = self._repaired.get(row, 0) + 1
        self.repairs += 1
        self._unbook(row)
        self.rows.again(row, now_s)
        self.prefill.queue.put_back(row, self.rows.isl[row], self.rows.weight[row])

    # ------------------------------------------------------------------ workers

    def first_fleet(self, counts: tuple[int, int]) -> None:
        """Workers that start together and are all ready when the first request arrives."""
        first = [
            self._spawn(f"{pool[0]}-first-{chr(97 + k % 26)}{k}", pool, "", 0.0)
            for pool, count in zip(POOLS, counts, strict=True)
            for k in range(count)
        ]
        for worker, (ready_s, tier) in zip(first, self.starts.beforehand(first), strict=True):
            worker.tier = tier
            worker.allocated_s = worker.provisioned_s = -self.starts.took_s
            self._ready(worker, ready_s)

    def order(
        self, worker_id: str, pool: str, decision_id: str, now_s: float, *, standby: bool = False
    ) -> None:
        """Start one, to serve or to stand by."""
        worker = self._spawn(worker_id, pool, decision_id, now_s, standby=standby)
        self.starts.begin(worker, now_s)

    def activate(self, worker: FluidWorker, now_s: float) -> None:
        """A standby is to serve, as soon as it is loaded."""
        if worker.standby and not worker.asked:
            worker.asked = True
            if worker.stood_s is not None:
                worker.start_s = now_s
                self.starts.activate(worker, now_s)

    def drain(self, worker: FluidWorker, now_s: float) -> None:
        """Nothing new goes there; it leaves when it has nothing left."""
        if worker.stood_s is not None and worker.ready_s is None:
            self.remove(worker, now_s)
        elif worker.ready_s is not None and worker.drain_s is None:
            worker.drain_s = now_s
            self.close(worker)

    def close(self, worker: FluidWorker) -> None:
        """Nothing new goes there."""
        (self.prefill if worker.pool == "prefill" else self.decode).close(worker)

    def reopen(self, worker: FluidWorker, now_s: float) -> None:
        """It takes new work again."""
        if worker.serving and worker.drain_s is None:
            (self.prefill if worker.pool == "prefill" else self.decode).reopen(worker, now_s)

    def remove(self, worker: FluidWorker, at_s: float, failure: str = "") -> None:
        """Its allocation ends; what it still holds is lost, or goes back into the queue."""
        worker.released_s, worker.failure = at_s, failure
        del self.fleet[worker.worker_id]
        self.ended.append(worker)
        self.starts.cancel(worker)
        self.starts.sources.remove_peer(worker.worker_id)
        if worker.ready_s is None:
            return
        if worker.pool == "prefill":
            self.prefill.close(worker)
            for end_s, row, _ in reversed(worker.jobs):
                if end_s > at_s:
                    self._repair(row, at_s)
            worker.jobs.clear()
            return
        batch = self.decode.remove(worker)
        if batch is not None:
            for _, row, _ in sorted(batch.joining, reverse=True):
                self._repair(row, at_s)
            for row in batch.rows():
                if row in self._place:
                    self._give_up(row, "failed")

    def stall(self, worker: FluidWorker, for_s: float, now_s: float) -> None:
        """It makes no progress for a while."""
        if worker.pool == "prefill":
            self.prefill.delay(worker, now_s, for_s)
        elif (batch := self.decode.batch_of(worker)) is not None:
            batch.stall_s += for_s / len(batch.workers)

    def _spawn(
        self, worker_id: str, pool: str, decision_id: str, now_s: float, *, standby: bool = False
    ) -> FluidWorker:
        ordinals = self._standbys if standby else self._ordinals
        ordinals[pool] += 1
        ordinal = ordinals[pool]
        worker = FluidWorker(worker_id, pool, ordinal, self.profiles[pool], decision_id, now_s)
        worker.standby = standby
        self.fleet[worker_id] = worker
        self.everyone.append(worker)
        return worker

    def _ready(self, worker: FluidWorker, at_s: float) -> None:
        if worker.standby and not worker.asked:
            worker.stood_s = at_s
            self.starts.sources.add_peer(worker.worker_id)
            self._on_ready(worker)
            return
        worker.ready_s = at_s
        self.starts.sources.add_peer(worker.worker_id)
        (self.prefill if worker.pool == "prefill" else self.decode).join(worker, at_s)
        if worker.stood_s is None:  # else its start was over when it stood by
            self._on_ready(worker)

    def _failed(self, worker: FluidWorker, at_s: float) -> None:
        self.remove(worker, at_s, "its start failed")

    def _drained(self, now_s: float) -> None:
        """Let go who drains and has nothing left."""
        for worker in [w for w in self.fleet.values() if w.drain_s is not None]:
            if worker.leaves_s is None:
                if worker.pool == "prefill":
                    worker.leaves_s = worker.leave_s(worker.free_s)
                else:
                    batch = self.decode.batch_of(worker)
                    if batch is None or batch.promised_n <= 0:
                        worker.leaves_s = worker.leave_s(now_s if batch is None else batch.idle_s)
            if worker.leaves_s is not None and worker.leaves_s <= now_s:
                self.remove(worker, worker.leaves_s)
