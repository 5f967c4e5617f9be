"""One run of the fluid mode: arrivals in, a `RunResult` out.

Owns the loop over steps and ticks, and what happens to a row between its arrival and its end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from readyplane_lab.simulator.fluid.arrivals import Arrivals, arrivals_of
from readyplane_lab.simulator.fluid.control import Control
from readyplane_lab.simulator.fluid.decode import Batch, DecodePool, Ends
from readyplane_lab.simulator.fluid.fleet import FluidWorker
from readyplane_lab.simulator.fluid.options import FluidOptions
from readyplane_lab.simulator.fluid.prefill import Servers, Stream, prefill_seconds
from readyplane_lab.simulator.fluid.recent import RecentLatency, RecentLengths
from readyplane_lab.simulator.fluid.starts import Starts
from readyplane_lab.simulator.fluid.view import Now, Totals
from readyplane_lab.simulator.outcome import RunResult, Served
from readyplane_lab.simulator.startup import Draws
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_planner.decide import POOLS
from readyplane_planner.policy import make_plan, pool_profiles, read_policy
from readyplane_router.policy import RouterPolicy

REQUEST_TIMEOUT_S = 120.0
REPAIRS_MAX = 1
DIGEST = "sha256:" + "0" * 64
NEVER = math.inf


def run_fluid(options: FluidOptions, requests: Sequence[WorkloadRequest] | Arrivals) -> RunResult:
    """Simulate one workload from beginning to end."""
    if isinstance(requests, Arrivals):
        return FluidRun(options, requests).run()
    cache_tokens = options.cache_tokens
    if cache_tokens is None:
        policy = read_policy(options.policy)
        workers = options.initial[0] if options.initial else max(1, policy.prefill.min)
        cache_tokens = float(workers * pool_profiles(policy)[0].kv_capacity_tokens)
    arrivals = arrivals_of(requests, block_size=options.block_size, cache_tokens=cache_tokens)
    return FluidRun(options, arrivals).run()


class FluidRun:
    """The state of one run. Use `run_fluid`."""

    def __init__(self, options: FluidOptions, arrivals: Arrivals) -> None:
        self.options = options
        self.arrivals = arrivals
        self.policy = read_policy(options.policy)
        profiles = pool_profiles(self.policy)
        self.profiles = dict(zip(POOLS, profiles, strict=True))
        self.plan = make_plan(self.policy, version=1, manifest_digest=DIGEST, profiles=profiles)
        self.router = RouterPolicy()
        apart = arrivals.single
        service_s = prefill_seconds(profiles[0], arrivals).tolist()
        self._at = arrivals.at_s.tolist()
        self._isl = arrivals.isl.tolist()
        self._osl = arrivals.osl.tolist()
        self._uncached = (arrivals.isl - np.minimum(arrivals.cached, arrivals.isl - 1)).tolist()
        self._weight = arrivals.weight.tolist()
        self._moved_s = (
            options.link.setup_s
            + arrivals.isl * profiles[0].kv_bytes_per_token / options.link.bandwidth_bytes_per_s
        ).tolist()
        self._since = list(self._at)
        rows = len(arrivals)
        self._ttft = [NEVER] * rows
        self._tpot = [NEVER] * rows
        self._first_s = [0.0] * rows
        self._first_w = [0.0] * rows
        self._left = list(self._weight)
        self._last_sum = [0.0] * rows
        self._place: dict[int, list[tuple[Batch, float]]] = {}
        self._repairs: dict[int, int] = {}
        self._open: deque[int] = deque()
        self._prefilling: list[tuple[float, int]] = []
        self._prefilling_w = self._prefilling_tokens = 0.0
        self._next_row = 0
        self.outcomes = {"finished": 0.0, "refused": 0.0, "timed_out": 0.0, "failed": 0.0}
        self.totals = Totals()
        self.lengths = RecentLengths(self.router.lengths_half_life, self.router.output_quantile)
        window = (self.router.window_s, self.router.window_samples_max)
        self.windows = {n: RecentLatency(*window) for n in ("ttft_actual", "tpot_actual")}
        self.prefill: Servers | Stream = (Servers if apart else Stream)(
            arrivals, service_s, self._since
        )
        self.decode = DecodePool(profiles[1], self.router, apart=apart)
        self.fleet: dict[str, FluidWorker] = {}
        self.ended: list[FluidWorker] = []
        self._all: list[FluidWorker] = []
        self._ordinals = dict.fromkeys(POOLS, 0)
        self._starts = Starts(options.startup, Draws(options.seed), on_ready=self._ready)
        self._control = Control(options, self.policy, self.plan)

    # ------------------------------------------------------------------ the loop

    def run(self) -> RunResult:
        """From the first arrival to the last end."""
        self._first_fleet()
        now_s, tick_s = 0.0, self.plan.tick_s
        next_tick_s = 0.0
        while True:
            if now_s >= next_tick_s:
                self._tick(now_s)
                next_tick_s += tick_s
            if self._next_row >= len(self._at) and not self._place and not self.prefill.queue.rows:
                break
            until_s = min(now_s + self.options.step_s, next_tick_s)
            self._step(now_s, until_s)
            now_s = until_s
        self._starts.close()
        return self._result(now_s)

    def _first_fleet(self) -> None:
        least = (max(1, self.policy.prefill.min), max(1, self.policy.decode.min))
        for pool, count in zip(POOLS, self.options.initial or least, strict=True):
            for _ in range(count):
                worker = self._spawn(f"{pool[0]}-first-{self._ordinals[pool]}", pool, "", 0.0)
                worker.allocated_s = -self._starts.alone_s(pool, worker.ordinal)
                worker.provisioned_s = worker.allocated_s
                self._ready(worker, 0.0)

    def _step(self, from_s: float, until_s: float) -> None:
        self._starts.advance(until_s)
        self._arrive(until_s)
        self.prefill.serve(from_s, until_s, self._booked, self._prefilled)
        self._refuse(until_s)
        ends = Ends()
        for batch in self.decode.everyone():
            batch.advance(until_s, self._isl, self._osl, ends)
        self._first(ends)
        self._last(ends)
        self._time_out(until_s)
        self._drained(until_s)
        self.decode.merge()

    # ------------------------------------------------------------------ a row's way

    def _arrive(self, until_s: float) -> None:
        at, row, rows = self._at, self._next_row, len(self._at)
        queue, totals, router = self.prefill.queue, self.totals, self.router
        while row < rows and at[row] < until_s:
            weight, isl = self._weight[row], self._isl[row]
            totals.arrivals += weight
            totals.tokens += weight * isl
            totals.uncached += weight * self._uncached[row]
            full = queue.tokens + isl > router.queue_tokens_max
            if queue.rows and (full or queue.requests >= router.queue_requests_max):
                self.outcomes["refused"] += weight
            else:
                queue.push(row, isl, weight)
            row += 1
        self._next_row = row

    def _booked(self, row: int, at_s: float) -> bool:
        expected, reserved = self.lengths.forecast(self._isl[row])
        parts = self.decode.book(
            self._isl[row],
            self._weight[row],
            expected=expected,
            reserved=reserved,
            now_s=at_s,
        )
        if parts:
            self._place[row] = parts
            self._open.append(row)
        return bool(parts)

    def _prefilled(self, row: int, worker: FluidWorker | None, end_s: float) -> None:
        """A prompt is computed at `end_s`: its KV goes to the decode worker that was promised."""
        weight, tokens = self._weight[row], self._uncached[row]
        heappush(self._prefilling, (end_s, row))
        self._prefilling_w += weight
        self._prefilling_tokens += weight * tokens
        if worker is not None:
            worker.jobs.append((end_s, row, tokens, weight))
            worker.promised += tokens * weight
        moved_s = self._moved_s[row]
        for batch, part in self._place.get(row, ()):
            join_s = end_s + moved_s
            if batch.n > 0:
                # It is admitted, and joins, only between two iterations.
                each_s = batch.iteration_s()
                join_s = end_s + each_s * (0.5 + math.ceil(moved_s / each_s))
            heappush(batch.joining, (max(join_s, batch.t), row, part))

    def _refuse(self, now_s: float) -> None:
        queue = self.prefill.queue
        bound_s = now_s - self.router.pair.wait_max_s
        while queue.rows and self._since[queue.rows[0]] <= bound_s:
            if isinstance(self.prefill, Stream) and queue.rows[0] in self._place:
                break
            row = queue.rows[0]
            queue.pop(self._isl[row], self._weight[row])
            self.outcomes["refused"] += self._weight[row]

    def _first(self, ends: Ends) -> None:
        window = self.windows["ttft_actual"]
        for at_s, row, part in ends.first:
            before = self._first_w[row]
            total = before + part
            self._first_w[row] = total
            first_s = at_s if not before else (self._first_s[row] * before + at_s * part) / total
            self._first_s[row] = first_s
            self._ttft[row] = first_s - self._at[row]
            window.add(at_s, at_s - self._at[row], part)

    def _last(self, ends: Ends) -> None:
        window = self.windows["tpot_actual"]
        for at_s, row, part in ends.last:
            isl, osl, weight = self._isl[row], self._osl[row], self._weight[row]
            self._last_sum[row] += at_s * part
            self._left[row] -= part
            if self._left[row] > 1e-6 * weight:
                continue
            for batch, share in self._place.pop(row):
                self.decode.release(batch, isl, share)
                if batch.promised_n <= 0:
                    batch.idle_s = at_s
            later = osl - 1.0
            tpot_s = (self._last_sum[row] / weight - self._first_s[row]) / later if later else 0.0
            self._tpot[row] = max(0.0, tpot_s)
            self.outcomes["finished"] += weight
            self.totals.finished += weight
            self.lengths.add(isl, osl, weight)
            window.add(at_s, self._tpot[row], weight)

    def _time_out(self, now_s: float) -> None:
        """The gateway gives up on what has not ended in time."""
        rows, place = self._open, self._place
        while rows and (rows[0] not in place or self._at[rows[0]] + REQUEST_TIMEOUT_S <= now_s):
            row = rows.popleft()
            if row in place:
                self._give_up(row, "timed_out")

    def _give_up(self, row: int, outcome: str) -> None:
        for batch, part in self._place.pop(row):
            batch.drop(row)
            self.decode.release(batch, self._isl[row], part)
        self._ttft[row] = self._tpot[row] = NEVER
        self.outcomes[outcome] += self._weight[row]

    # ------------------------------------------------------------------ workers

    def _spawn(self, worker_id: str, pool: str, decision_id: str, now_s: float) -> FluidWorker:
        self._ordinals[pool] += 1
        worker = FluidWorker(
            worker_id, pool, self._ordinals[pool], self.profiles[pool], decision_id, now_s
        )
        self.fleet[worker_id] = worker
        self._all.append(worker)
        return worker

    def _ready(self, worker: FluidWorker, at_s: float) -> None:
        worker.ready_s = at_s
        self._starts.sources.add_peer(worker.worker_id)
        self._control.started(worker)
        (self.prefill if worker.pool == "prefill" else self.decode).join(worker, at_s)

    def _drain(self, worker: FluidWorker, now_s: float) -> None:
        worker.drain_s = now_s
        (self.prefill if worker.pool == "prefill" else self.decode).close(worker)

    def _drained(self, now_s: float) -> None:
        """Let go who drains and has nothing left."""
        for worker in [w for w in self.fleet.values() if w.drain_s is not None]:
            if worker.leaves_s is None:
                if worker.pool == "prefill":
                    worker.leaves_s = worker.leave_s(worker.free_s)
                else:
                    batch = self.decode.batch_of(worker)
                    if batch is None or batch.promised_n <= 0:
                        idle_s = now_s if batch is None else batch.idle_s
                        worker.leaves_s = worker.leave_s(idle_s)
            if worker.leaves_s is not None and worker.leaves_s <= now_s:
                self._remove(worker, worker.leaves_s)

    def _remove(self, worker: FluidWorker, at_s: float, failure: str = "") -> None:
        """Its allocation ends; what it still holds is lost, or goes back into the queue."""
        worker.released_s, worker.failure = at_s, failure
        del self.fleet[worker.worker_id]
        self.ended.append(worker)
        self._starts.cancel(worker)
        self._starts.sources.remove_peer(worker.worker_id)
        if worker.ready_s is None:
            return
        if worker.pool == "prefill":
            self.prefill.close(worker)
            for end_s, row, _, _ in worker.jobs:
                if end_s > at_s:
                    self._repair(row, at_s)
            worker.jobs.clear()
            return
        batch = self.decode.remove(worker)
        if batch is not None:
            for _, row, _ in batch.joining:
                self._repair(row, at_s)
            for row, _ in batch.rows():
                if row in self._place:
                    self._give_up(row, "failed")

    def _repair(self, row: int, now_s: float) -> None:
        """Once more from the start, where it has had no token yet."""
        if row not in self._place:
            return
        if self._repairs.get(row, 0) >= REPAIRS_MAX:
            self._give_up(row, "failed")
            return
        self._repairs[row] = self._repairs.get(row, 0) + 1
        for batch, part in self._place.pop(row):
            batch.drop(row)
            self.decode.release(batch, self._isl[row], part)
        self._since[row] = now_s
        self.prefill.queue.put_back(row, self._isl[row], self._weight[row])

    # ------------------------------------------------------------------ the planner

    def _tick(self, now_s: float) -> None:
        decision = self._control.tick(
            now_s,
            self._now(now_s),
            self.totals,
            fleet=self.fleet.values(),
            ended=self.ended,
            batches=self._batches(),
            lengths=self.lengths,
            windows=self.windows,
        )
        for order in decision.orders:
            worker = self._spawn(order.worker_id, order.pool, decision.decision_id, now_s)
            self._starts.begin(worker, now_s)
        for drain in decision.drains:
            leaving = self.fleet.get(drain.worker_id)
            if leaving is not None and leaving.ready_s is not None and leaving.drain_s is None:
                self._drain(leaving, now_s)
        for release in decision.releases:
            if release.worker_id in self.fleet:
                self._remove(self.fleet[release.worker_id], now_s)

    def _now(self, now_s: float) -> Now:
        while self._prefilling and self._prefilling[0][0] <= now_s:
            row = heappop(self._prefilling)[1]
            self._prefilling_w -= self._weight[row]
            self._prefilling_tokens -= self._weight[row] * self._uncached[row]
        if not self._prefilling:
            self._prefilling_w = self._prefilling_tokens = 0.0
        queue, batches = self.prefill.queue, self.decode.everyone()
        promised = sum(batch.promised_n for batch in batches)
        decoding = max(0.0, promised - self._prefilling_w)
        kv = sum(batch.promised_kv for batch in batches) * (decoding / promised if promised else 0)
        return Now(
            queued=queue.requests,
            queued_tokens=queue.tokens,
            prefilling=self._prefilling_w,
            prefilling_tokens=self._prefilling_tokens,
            decoding=decoding,
            kv=kv + decoding,
            remaining=decoding * self.lengths.forecast(1000.0)[0],
        )

    def _batches(self) -> dict[str, Batch]:
        return {w.worker_id: batch for batch in self.decode.everyone() for w in batch.workers}

    def _result(self, end_s: float) -> RunResult:
        arrivals, control = self.arrivals, self._control
        return RunResult(
            span_s=float(arrivals.at_s[-1]),
            lives=tuple(worker.life(end_s) for worker in self._all),
            served=Served(
                at_s=arrivals.at_s,
                isl=arrivals.isl,
                osl=arrivals.osl,
                ttft_s=np.array(self._ttft),
                tpot_s=np.array(self._tpot),
                weight=arrivals.weight,
            ),
            outcomes={name: round(n) for name, n in self.outcomes.items() if n > 0},
            targets=tuple(control.targets),
            series=control.series(),
            decisions=tuple(control.documents),
            counts={**control.counts(), "repairs": float(sum(self._repairs.values()))},
            planner_s=tuple(control.planner_s),
        )
