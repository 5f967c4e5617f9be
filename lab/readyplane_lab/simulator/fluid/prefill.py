"""The prefill side: one queue in front of all workers, first come first served.

The router binds late and then to whoever has the least work, which is one queue in front of many
servers. Where each row is a request that is played exactly: every row starts on the server that is
free first. Where rows stand for many requests the pool is one stream: a row waits for the work
ahead of it at the pool's capacity, and besides, as long as nothing is backed up, for a server to
become free, by Sakasegawa's approximation of M/G/c, spread exponentially over the rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heapify, heappush, heapreplace
from itertools import pairwise
from math import exp, inf, log, sqrt

import numpy as np

from readyplane.core.profile import ClassProfile
from readyplane_lab.simulator.fluid.arrivals import Arrivals, Chains
from readyplane_lab.simulator.fluid.fleet import FluidWorker
from readyplane_lab.simulator.outcome import Floats
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy
from readyplane_router.triage import Job, too_late

SPREAD_TAU_S = 30.0
BUSY_MAX = 0.98
TRIAGE_AFTER_S = 0.25
GOLDEN = 0.6180339887498949
_PAIR = PairPolicy()
PATIENCE_S, AHEAD_S = _PAIR.locality_patience_s, _PAIR.prefill_ahead_s
"""How long a request waits for a prefill worker before a decode worker lends its time, and how much
work a prefill worker may still have when it is given more."""
LOOK_PAST_S, LOOK_PAST_MAX = _PAIR.wait_max_s / 2, RouterPolicy().look_past_max

Book = Callable[[int, float], bool]
"""(row, second) -> whether a decode worker promised it a place."""
Lend = Callable[[int, float], bool]
"""(row, second) -> whether a decode worker takes its prompt."""
Done = Callable[[int, FluidWorker | None, float], None]
"""(row, worker, end of its prefill)."""


def prefill_seconds(profile: ClassProfile, arrivals: Arrivals) -> Floats:
    """Worker-seconds of each prompt, as `ClassProfile.prefill_s`, for all rows at once."""
    x = np.array([p[0] for p in profile.prefill_points])
    y = np.array([profile.prefill_s(tokens) for tokens in x])
    tail = profile.prefill_s(float(x[-1]) + 1.0) - y[-1]

    def at(tokens: Floats) -> Floats:
        found: Floats = np.interp(tokens, x, y) + tail * np.maximum(0.0, tokens - x[-1])
        return found

    cached = np.minimum(arrivals.cached, arrivals.isl - 1.0)
    alone = at(arrivals.isl - cached)
    return np.where(cached > 0, np.maximum(alone, at(arrivals.isl) - at(cached)), alone)


class Queue:
    """Rows that wait in the router, oldest first. Tokens count with their weights.

    Attributes:
        late: those that stepped back, behind all others: they cannot be in time any more, or kept
            more of the others from it (`readyplane_router.triage`).
        blocked_s: until when the oldest last found no decode worker that takes it.
    """

    def __init__(self) -> None:
        self.rows: deque[int] = deque()
        self.late: deque[int] = deque()
        self.requests = self.tokens = 0.0
        self.blocked_s = -inf

    def push(self, row: int, tokens: float, weight: float) -> None:
        """At the end."""
        self.rows.append(row)
        self.requests += weight
        self.tokens += tokens * weight

    def put_back(self, row: int, tokens: float, weight: float) -> None:
        """At the front: its worker has been lost."""
        self.rows.appendleft(row)
        self.requests += weight
        self.tokens += tokens * weight

    def pop(self, tokens: float, weight: float) -> int:
        """The oldest; it starts or is refused."""
        self.requests -= weight
        self.tokens -= tokens * weight
        row = self.rows.popleft() if self.rows else self.late.popleft()
        if not self.rows and not self.late:
            self.requests = self.tokens = 0.0
        return row

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self.rows or self.late)

    def step_back(self, places: set[int]) -> None:
        """Those go behind all others."""
        kept: deque[int] = deque()
        for place, row in enumerate(self.rows):
            (self.late if place in places else kept).append(row)
        self.rows.clear()
        self.rows.extend(kept)

    def pop_late(self, tokens: float) -> None:
        """The oldest of those that stepped back, which counts as one request."""
        self.late.popleft()
        self.requests -= 1.0
        self.tokens -= tokens

    def take(self, place: int, tokens: float) -> int:
        """One from the middle, which counts as one request."""
        row = self.rows[place]
        del self.rows[place]
        self.requests -= 1.0
        self.tokens -= tokens
        return row


class Servers:
    """Every row is one request: each is bound to the server that is free first, as soon as that has
    little enough work left.

    Attributes:
        limit_s: until when after its arrival a prompt has to be computed to be in time.
        chains, cached: shared prefixes of each row, and tokens of them that are not yet evicted;
            without chains, `service_s` says it all.
    """

    def __init__(
        self,
        isl: list[float],
        weight: list[float],
        service_s: list[float],
        since_s: list[float],
    ) -> None:
        del weight  # every row is one request
        self.queue = Queue()
        self.lend: Lend | None = None
        self.limit_s = inf
        self.chains: Chains = ()
        self.cached: list[float] = []
        self._isl = isl
        self._service_s = service_s
        self._since_s = since_s
        self._free: list[tuple[float, int, FluidWorker]] = []
        self._ties = 0

    def join(self, worker: FluidWorker, now_s: float) -> None:
        """A worker is ready."""
        worker.free_s = max(worker.free_s, now_s)
        self._ties += 1
        heappush(self._free, (worker.free_s, self._ties, worker))

    def reopen(self, worker: FluidWorker, now_s: float) -> None:
        """It takes new work again."""
        self.close(worker)
        self.join(worker, now_s)

    def close(self, worker: FluidWorker) -> None:
        """It takes nothing new."""
        self._free = [entry for entry in self._free if entry[2] is not worker]
        heapify(self._free)

    def serve(self, from_s: float, until_s: float, book: Book, done: Done) -> None:
        """Bind whoever can be bound before `until_s`."""
        queue, free = self.queue, self._free
        rows, isl, since_s = queue.rows, self._isl, self._since_s
        earliest_s = from_s if queue.blocked_s >= from_s else -inf
        while queue:
            free_s = free[0][0] if free else inf
            if queue.late and not self._first(from_s, free_s):
                if not self._serve_late(max(from_s, free_s - AHEAD_S), until_s, book, done):
                    return
                continue
            row = rows[0]
            asked_s = max(since_s[row], earliest_s)
            bound_s = max(asked_s, free_s - AHEAD_S)
            if bound_s - since_s[row] > TRIAGE_AFTER_S and self._stepped_back(bound_s):
                continue
            if self.lend is not None and bound_s > asked_s + PATIENCE_S:
                lent_s = max(asked_s + PATIENCE_S, from_s)
                if lent_s < until_s and bound_s > lent_s and self.lend(row, lent_s):
                    queue.pop(isl[row], 1.0)
                    continue
            if bound_s >= until_s:
                return
            if book(row, bound_s):
                queue.pop(isl[row], 1.0)
            else:
                found = self._past(row, bound_s, until_s, book)
                queue.blocked_s = until_s
                if found is None:
                    return
                row = found
            self._begin(row, bound_s, done)

    def _begin(self, row: int, bound_s: float, done: Done) -> None:
        """Bind a row to its worker."""
        free = self._free
        place, own_s = (0, self._service_s[row])
        if self.chains:
            place, own_s = self._placed(row, bound_s)
        free_s, _, worker = free[place]
        worker.free_s = end_s = max(bound_s, free_s) + own_s
        self._ties += 1
        if place == 0:
            heapreplace(free, (end_s, self._ties, worker))
        else:
            free[place] = (end_s, self._ties, worker)
            heapify(free)
        done(row, worker, end_s)

    def _first(self, from_s: float, free_s: float) -> bool:
        """Whether somebody who can be in time waits when the next worker takes a prompt."""
        rows = self.queue.rows
        return bool(rows) and self._since_s[rows[0]] <= max(from_s, free_s - AHEAD_S)

    def _serve_late(self, at_s: float, until_s: float, book: Book, done: Done) -> bool:
        """Serve one that stepped back, while nobody else is there; False when it cannot be now."""
        row = self.queue.late[0]
        if at_s >= until_s or not book(row, at_s):
            return False
        self.queue.pop_late(self._isl[row])
        self._begin(row, at_s, done)
        return True

    def _stepped_back(self, at_s: float) -> bool:
        """Whether some of those who wait step back, so that most of the others are in time."""
        since_s, service_s = self._since_s, self._service_s
        jobs = []
        for row in self.queue.rows:
            if since_s[row] > at_s:
                break
            jobs.append(Job(0, service_s[row], since_s[row] + self.limit_s - at_s))
        busy_s = sum(max(0.0, entry[0] - at_s) for entry in self._free) / max(1, len(self._free))
        late = too_late(jobs, workers=float(len(self._free)), busy_s=busy_s)
        if late and self._free:
            self.queue.step_back(late)
        return bool(late and self._free)

    def _placed(self, row: int, at_s: float) -> tuple[int, float]:
        """Who may have it and is through with it first, by what each one's cache holds."""
        chain, isl = self.chains[row], self._isl[row]
        most = min(self.cached[row], isl - 1.0)
        place, best_s, own_s = 0, inf, 0.0
        for k, (free_s, _, worker) in enumerate(self._free):
            if free_s > at_s + AHEAD_S:
                continue
            cached = next((tokens for name, tokens in chain if name in worker.prefixes), 0.0)
            cached = min(cached, most)
            service_s = worker.profile.prefill_s(isl - cached, cached)
            end_s = max(at_s, free_s) + service_s
            if end_s < best_s - 1e-9:
                place, best_s, own_s = k, end_s, service_s
        self._free[place][2].prefixes.update(name for name, _ in chain)
        return place, own_s

    def _past(self, head: int, at_s: float, until_s: float, book: Book) -> int | None:
        """Somebody behind the head of the queue who needs less, while the head has patience."""
        since_s, rows = self._since_s, self.queue.rows
        if at_s - since_s[head] > LOOK_PAST_S:
            return None
        for place in range(1, min(len(rows), LOOK_PAST_MAX + 1)):
            row = rows[place]
            if since_s[row] < until_s and book(row, max(at_s, since_s[row])):
                return self.queue.take(place, self._isl[row])
        return None

    def delay(self, worker: FluidWorker, now_s: float, for_s: float) -> None:
        """It stands still for a while."""
        worker.free_s = max(worker.free_s, now_s) + for_s
        if any(entry[2] is worker for entry in self._free):
            self.close(worker)
            self.join(worker, worker.free_s)


class Stream:
    """Rows stand for many requests: the pool is one server as fast as all workers together."""

    def __init__(
        self,
        isl: list[float],
        weight: list[float],
        service_s: list[float],
        since_s: list[float],
    ) -> None:
        self.queue = Queue()
        self.lend: Lend | None = None
        self._isl = isl
        self._weight = weight
        self._gap_s = [*(b - a for a, b in pairwise(since_s)), 0.0]
        self._service_s = service_s
        self._since_s = since_s
        self._workers: list[FluidWorker] = []
        self._settled_s = -inf  # from then on all of them serve
        self._clock_s = 0.0
        self._left = 0.0
        self._begun_s = 0.0
        self._open = False
        self._work = self._mean = self._square = 0.0
        self._seen_s = 0.0

    def join(self, worker: FluidWorker, now_s: float) -> None:
        """A worker is ready."""
        worker.free_s = now_s
        self._settled_s = max(self._settled_s, now_s)
        self._workers.append(worker)

    def reopen(self, worker: FluidWorker, now_s: float) -> None:
        """It takes new work again."""
        self.close(worker)
        self.join(worker, now_s)

    def close(self, worker: FluidWorker) -> None:
        """It takes nothing new."""
        self._workers = [w for w in self._workers if w is not worker]

    def serve(self, from_s: float, until_s: float, book: Book, done: Done) -> None:
        """Serve as much of the queue as the pool can until then."""
        queue, since_s = self.queue, self._since_s
        rate = float(len(self._workers))
        if from_s < self._settled_s:
            span_s = until_s - from_s
            rate = sum(min(span_s, max(0.0, until_s - w.free_s)) for w in self._workers) / span_s
        clock_s = max(self._clock_s, from_s)
        while queue.rows and rate > 0:
            row = queue.rows[0]
            weight, own_s = self._weight[row], self._service_s[row]
            if not self._open:
                start_s = max(clock_s, since_s[row])
                if self.lend is not None and start_s > since_s[row] + PATIENCE_S + AHEAD_S:
                    lent_s = max(since_s[row] + PATIENCE_S, from_s)
                    if lent_s < until_s and self.lend(row, lent_s):
                        queue.pop(self._isl[row], weight)
                        continue
                if start_s >= until_s:
                    break
                if not book(row, start_s):
                    queue.blocked_s = until_s
                    break
                self._open, self._begun_s, self._left = True, start_s, weight * own_s
                clock_s = start_s
                self._learn(row, start_s)
            if self._left > (until_s - clock_s) * rate:
                self._left -= (until_s - clock_s) * rate
                clock_s = until_s
                break
            clock_s += self._left / rate
            self._open = False
            queue.pop(self._isl[row], weight)
            middle_s = since_s[row] + self._gap_s[row] / 2
            fluid_s = max(0.0, (self._begun_s + clock_s) / 2 - middle_s)
            wait_s = max(fluid_s, self._noise_s(row, rate))
            done(row, None, since_s[row] + wait_s + own_s)
        self._clock_s = clock_s

    def delay(self, worker: FluidWorker, now_s: float, for_s: float) -> None:
        """It stands still for a while."""
        worker.free_s = max(worker.free_s, now_s) + for_s
        self._settled_s = max(self._settled_s, worker.free_s)

    def _learn(self, row: int, now_s: float) -> None:
        """Arriving work and its spread, over the last half minute."""
        weight, own_s = self._weight[row], self._service_s[row]
        fade = exp(-(now_s - self._seen_s) / SPREAD_TAU_S)
        self._seen_s = now_s
        self._work = self._work * fade + weight
        self._mean = self._mean * fade + weight * own_s
        self._square = self._square * fade + weight * own_s * own_s

    def _noise_s(self, row: int, rate: float) -> float:
        """Wait for a server to become free while nothing is backed up."""
        mean_s = self._mean / self._work
        cv2 = max(0.0, self._square / self._work / (mean_s * mean_s) - 1.0)
        covered_s = SPREAD_TAU_S * (1.0 - exp(-max(1.0, self._seen_s) / SPREAD_TAU_S))
        busy = min(BUSY_MAX, self._mean / covered_s / rate)
        waits = busy ** (sqrt(2.0 * (rate + 1.0)) - 1.0)
        place = (row * GOLDEN) % 1.0
        if place < 1.0 - waits:
            return 0.0
        each_s = mean_s * (1.0 + cv2) / 2.0 / (rate * (1.0 - busy))
        return -each_s * log(max(1e-6, (1.0 - place) / waits))
