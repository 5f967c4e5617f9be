"""The decode side: batches that share their processor exactly, and who of them takes a sequence.

Every sequence of a batch gets the same tokens a second, so a virtual clock that counts tokens tells
when each leaves: who joins at `v` with `osl` tokens to emit leaves at `v + osl`. Between two joins
or leaves the iteration time grows with the KV alone, and the clock follows in closed form.

A batch stands for one worker, or (where rows stand for many requests) for several that hold equal
shares. Owns joining, leaving and the bounds under which the router sends a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import ceil, inf, sqrt

from readyplane.core.profile import ClassProfile
from readyplane_lab.simulator.fluid.fleet import FluidWorker
from readyplane_router.policy import RouterPolicy

EQUAL_SHARE = 0.95


@dataclass(slots=True)
class Ends:
    """What happened, in order of each batch: (second, row, weight), and where it ended."""

    first: list[tuple[float, int, float]] = field(default_factory=list)
    last: list[tuple[float, int, float, Batch]] = field(default_factory=list)


class Batch:
    """Sequences of `size` equal workers.

    Attributes:
        n, kv: sequences and KV tokens of all of them; kv is `base + n * v`. v: tokens emitted by a sequence that has
            been there for ever. promised_n, promised_kv: sequences that are here or on their way,
            and their prompt tokens. into: the batch that has taken this one in.
        used: grows with every pick. ramp_until_s: a new worker takes few until then.
    """

    __slots__ = (
        "_times",
        "base",
        "idle_s",
        "into",
        "joining",
        "leaving",
        "n",
        "profile",
        "promised_kv",
        "promised_n",
        "ramp_until_s",
        "stall_s",
        "t",
        "tokens",
        "used",
        "v",
        "workers",
    )

    def __init__(self, profile: ClassProfile, workers: list[FluidWorker], now_s: float) -> None:
        self.profile = profile
        self._times = profile.decode_coefficients_s()
        self.workers = workers
        self.t, self.v, self.n, self.base = now_s, 0.0, 0.0, 0.0
        self.leaving: list[tuple[float, int, float, float]] = []
        self.joining: list[tuple[float, int, float]] = []
        self.promised_n = self.promised_kv = 0.0
        self.tokens = self.stall_s = 0.0
        self.idle_s = now_s
        self.into: Batch | None = None
        self.used, self.ramp_until_s = 0, now_s

    @property
    def kv(self) -> float:
        """KV tokens resident."""
        return max(0.0, self.base + self.n * self.v)

    def iteration_s(self) -> float:
        """Of one iteration now."""
        a, b, c = self._times
        return a + (b * self.n + c * self.kv) / len(self.workers)

    def advance(self, until_s: float, isl: list[float], osl: list[float], ends: Ends) -> None:
        """Let time pass; `isl`, `osl` by row."""
        a, b, c = self._times
        b, c = b / len(self.workers), c / len(self.workers)
        joining, leaving = self.joining, self.leaving
        t, v, n, base, tokens = self.t, self.v, self.n, self.base, self.tokens
        while True:
            to_s = until_s
            if joining and joining[0][0] < until_s:
                to_s = joining[0][0]
            if self.stall_s > 0 and to_s > t:
                stalled = min(self.stall_s, to_s - t)
                self.stall_s -= stalled
                t += stalled
            while n > 0:
                head = leaving[0]
                need = head[0] - v
                now_it = a + b * n + c * (base + n * v)
                grows = c * n
                if t + need * (now_it + grows * need / 2) > to_s:
                    left = to_s - t
                    if left > 0:
                        dv = left / now_it
                        if grows * dv > 1e-6 * now_it:
                            dv = (sqrt(now_it * now_it + 2 * grows * left) - now_it) / grows
                        v += dv
                        tokens += n * dv
                    break
                t += need * (now_it + grows * need / 2)
                v = head[0]
                tokens += n * need
                heappop(leaving)
                n -= head[2]
                base -= head[3]
                if not leaving:
                    n = base = 0.0
                ends.last.append((t, head[1], head[2], self))
            t = max(t, to_s)
            if to_s >= until_s:
                break
            _, row, weight = heappop(joining)
            part = weight * (isl[row] - v)
            n += weight
            base += part
            heappush(leaving, (v + osl[row], row, weight, part))
            first_s = t + self.stall_s + a + b * n + c * (base + n * v)
            ends.first.append((first_s, row, weight))
        self.t, self.v, self.n, self.base, self.tokens = t, v, n, base, tokens

    def rows(self) -> list[int]:
        """Of all resident sequences."""
        return sorted(row for _, row, _, _ in self.leaving)

    def drop(self, row: int) -> float:
        """A client has left; returns the weight that went, 0 where the row is not here."""
        found = [entry for entry in self.leaving if entry[1] == row]
        for entry in found:
            self.n = max(0.0, self.n - entry[2])
            self.base -= entry[3]
        if found:
            self.leaving = [entry for entry in self.leaving if entry[1] != row]
            heapify(self.leaving)
            if not self.leaving:
                self.n = self.base = 0.0
        waiting = [entry for entry in self.joining if entry[1] == row]
        if waiting:
            self.joining = [entry for entry in self.joining if entry[1] != row]
            heapify(self.joining)
        return sum(e[2] for e in found) + sum(e[2] for e in waiting)

    def split(self, worker: FluidWorker, isl: list[float]) -> Batch:
        """Take one of several equal workers out, with its share of everything that is here."""
        share = 1.0 / len(self.workers)
        out = Batch(self.profile, [worker], self.t)
        out.v, out.n, out.base = self.v, self.n * share, self.base * share
        out.tokens, out.stall_s = self.tokens * share, self.stall_s
        for _, row, weight, _ in self.leaving:
            out.promised_n += share * weight
            out.promised_kv += share * weight * isl[row]
        for _, row, weight in self.joining:
            out.promised_n += share * weight
            out.promised_kv += share * weight * isl[row]
        out.leaving = [(v, row, w * share, part * share) for v, row, w, part in self.leaving]
        out.joining = [(t, row, w * share) for t, row, w in self.joining]
        left = 1.0 - share
        self.n, self.base, self.tokens = self.n * left, self.base * left, self.tokens * left
        self.leaving = [(v, row, w * left, part * left) for v, row, w, part in self.leaving]
        self.joining = [(t, row, w * left) for t, row, w in self.joining]
        self.promised_n -= out.promised_n
        self.promised_kv -= out.promised_kv
        self.workers = [w for w in self.workers if w is not worker]
        return out

    def merge(self, other: Batch) -> None:
        """Take in another whose workers hold as much each, and whose clock stands at the same time."""
        shift = self.v - other.v
        self.leaving += [(v + shift, row, w, part - w * shift) for v, row, w, part in other.leaving]
        heapify(self.leaving)
        self.joining += other.joining
        heapify(self.joining)
        self.n += other.n
        self.base += other.base - other.n * shift
        self.promised_n += other.promised_n
        self.promised_kv += other.promised_kv
        self.tokens += other.tokens
        self.workers += other.workers
        other.into = self


class DecodePool:
    """All batches, and the router's choice among them.

    Args:
        isl: prompt tokens by row. apart: every worker is a batch of its own.
    """

    def __init__(
        self, profile: ClassProfile, policy: RouterPolicy, isl: list[float], *, apart: bool
    ) -> None:
        self._isl = isl
        self.batches: list[Batch] = []
        self.closed: list[Batch] = []
        self._profile = profile
        self._times = profile.decode_coefficients_s()
        self._apart = apart
        self._policy = policy
        self._bound_s = policy.pair.slo.tpot_s * policy.pair.tpot_admit
        self._used = 0

    def everyone(self) -> Iterable[Batch]:
        """Batches that take sequences and those that drain."""
        return (*self.batches, *self.closed)

    def join(self, worker: FluidWorker, now_s: float) -> None:
        """A worker is ready."""
        batch = Batch(self._profile, [worker], now_s)
        batch.ramp_until_s = now_s + self._policy.ramp_s
        self.batches.append(batch)

    def close(self, worker: FluidWorker) -> None:
        """Nothing new goes there."""
        batch = next((b for b in self.batches if worker in b.workers), None)
        if batch is None:
            return
        if len(batch.workers) > 1:
            self.closed.append(batch.split(worker, self._isl))
            return
        self.batches.remove(batch)
        self.closed.append(batch)

    def reopen(self, worker: FluidWorker, now_s: float) -> None:
        """It takes sequences again."""
        batch = next((b for b in self.closed if worker in b.workers), None)
        if batch is not None:
            self.closed.remove(batch)
            self.batches.append(batch)
        elif self.batch_of(worker) is None:
            self.join(worker, now_s)

    def remove(self, worker: FluidWorker) -> Batch | None:
        """It is gone; returns what it held."""
        self.close(worker)
        batch = next((b for b in self.closed if worker in b.workers), None)
        if batch is not None:
            self.closed.remove(batch)
        return batch

    def batch_of(self, worker: FluidWorker) -> Batch | None:
        """That holds it."""
        return next((b for b in self.everyone() if worker in b.workers), None)

    def book(
        self, isl: float, weight: float, *, expected: float, reserved: float, now_s: float
    ) -> list[tuple[Batch, float]]:
        """Promise a sequence its place; (batch, weight) pairs, none where nobody takes it."""
        fits = self._one if self._apart else self._some
        parts = fits(isl, weight, expected, reserved, now_s)
        for batch, part in parts:
            batch.promised_n += part
            batch.promised_kv += part * isl
        return parts

    def _one(
        self, isl: float, weight: float, expected: float, reserved: float, now_s: float
    ) -> list[tuple[Batch, float]]:
        """The worker that costs the least, by the router's terms."""
        a, b, c = self._times
        context = isl + expected / 2.0
        left_s = max(self._bound_s, 1.5 * (a + b + c * context)) - a - b - c * context
        room = self._profile.kv_capacity_tokens - isl - reserved
        most = self._profile.max_num_seqs
        for_kv = c * (expected + 1.0)
        for_each = b * (expected + 1.0) + (b + c * context) * expected
        best: Batch | None = None
        best_cost = inf
        for batch in self.batches:
            others, held = batch.promised_n, batch.promised_kv
            if now_s < batch.ramp_until_s and others >= self._policy.ramp_sequences:
                continue
            if others >= most or held + others * reserved > room:
                continue
            if others and b * others + c * held > left_s:
                continue
            cost = for_kv * held + for_each * others
            if cost < best_cost or (cost == best_cost and best and batch.used < best.used):
                best, best_cost = batch, cost
        if best is None:
            return []
        self._used += 1
        best.used = self._used
        return [(best, weight)]

    def _some(
        self, isl: float, weight: float, expected: float, reserved: float, now_s: float
    ) -> list[tuple[Batch, float]]:
        """All that have room, up to one level."""
        a, b, c = self._times
        context = isl + expected / 2.0
        left_s = max(self._bound_s, 1.5 * (a + b + c * context)) - a - b - c * context
        room = self._profile.kv_capacity_tokens - isl - reserved
        found: list[Batch] = []
        for batch in self.batches:
            size = len(batch.workers)
            others, held = batch.promised_n / size, batch.promised_kv / size
            if size > 1:
                # Some of the workers hold less than the mean: that is where it goes.
                below = max(0.0, ceil(others) - 1.0)
                held *= below / others if others else 1.0
                others = below
            ramping = now_s < batch.ramp_until_s
            most = self._policy.ramp_sequences if ramping else self._profile.max_num_seqs
            if others >= most or held + others * reserved > room:
                continue
            if not others or b * others + c * held <= left_s:
                found.append(batch)
        return _levelled(found, weight) if len(found) > 1 else [(f, weight) for f in found]

    def release(self, batch: Batch, row: int, weight: float) -> None:
        """A sequence has ended."""
        batch.promised_n -= weight
        batch.promised_kv -= weight * self._isl[row]
        if batch.promised_n < 1e-9:
            batch.promised_n = batch.promised_kv = 0.0

    def take_back(self, row: int, parts: list[tuple[Batch, float]]) -> None:
        """A sequence that has just been booked does not come.

        Not `drop`: that gives back what it finds in a batch, and this one is in none yet.
        """
        for batch, part in parts:
            self.release(batch, row, part)

    def drop(self, row: int, parts: list[tuple[Batch, float]]) -> None:
        """A client has left; `parts`: as booked."""
        if self._apart:
            for batch, part in parts:
                batch.drop(row)
                self.release(batch, row, part)
            return
        for batch in self.everyone():
            if (part := batch.drop(row)) > 0:
                self.release(batch, row, part)

    def merge(self) -> None:
        """Put batches together whose workers hold about as much each."""
        if self._apart or len(self.batches) < 2:
            return
        largest = max(self.batches, key=lambda batch: len(batch.workers))
        share = largest.promised_n / len(largest.workers)
        for batch in [b for b in self.batches if b is not largest]:
            if batch.promised_n / len(batch.workers) >= EQUAL_SHARE * share:
                largest.merge(batch)
                self.batches.remove(batch)


def _levelled(batches: list[Batch], weight: float) -> list[tuple[Batch, float]]:
    """Pour `weight` sequences so that the emptiest fill up to one level of sequences a worker."""
    ranked = sorted(batches, key=lambda batch: batch.promised_n / len(batch.workers))
    sizes = held = 0.0
    level = 0.0
    taking = 0
    for batch in ranked:
        if taking and batch.promised_n / len(batch.workers) >= level:
            break
        sizes += len(batch.workers)
        held += batch.promised_n
        taking += 1
        level = (held + weight) / sizes
    return [
        (batch, level * len(batch.workers) - batch.promised_n)
        for batch in ranked[:taking]
        if level * len(batch.workers) > batch.promised_n
    ]
