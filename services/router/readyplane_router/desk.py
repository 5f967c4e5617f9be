"""One model's desk: its seats, its queue, what it has promised, and what it has seen.

Owns the synchronous half of routing: the queue, and what events mean. It asks the pairing brain
and books what was chosen at once, so that the next request sees it. It does no I/O: the service
makes a booking binding in the store, or has it undone.
"""

from __future__ import annotations

import asyncio
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable

from readyplane.core.breakdown import GenerationSignals
from readyplane.core.errors import NoCompatiblePair, NoPair, Overloaded, PromptTooLong
from readyplane.core.work import EventKind, RequestEvent, RequestShape, sequence_hashes
from readyplane_router import measured
from readyplane_router.bookings import PREFILL_SIDE, Bookings, Held, Owed, busy
from readyplane_router.clients import Clients
from readyplane_router.ends import Ends
from readyplane_router.pair import Ask, Chosen, PairPolicy, Shed, Wait, decide
from readyplane_router.policy import RouterPolicy
from readyplane_router.rationing import Rationing
from readyplane_router.seats import ALL_SIDES
from readyplane_router.signals import (
    Counters,
    Generations,
    Lengths,
    Outcomes,
    Window,
)
from readyplane_router.triage import Job, Shares, too_late
from readyplane_router.waiting import Waiting, to_make_room

RETRY_AFTER_MAX_S = 30.0
TRIAGE_EVERY_S = 0.05
TRIAGE_TOKENS = 1024.0
TRIAGE_MARGIN = 0.05
"""Share of the TTFT target that hand-over and the first iteration of D may take."""


class Desk(Bookings):
    """Everything about one model that one router keeps in memory."""

    def __init__(self, model: str, policy: RouterPolicy) -> None:
        """Empty."""
        super().__init__(model, policy)
        self.queue: list[Waiting] = []
        self.waiting: dict[str, Waiting] = {}  # not yet answered: queued, or being booked
        self.queued_tokens = 0
        self.counters = Counters()
        self.lengths = Lengths(half_life=policy.lengths_half_life, quantile=policy.output_quantile)
        self.windows = {
            name: Window(policy.window_s, policy.window_samples_max)
            for name in ("ttft_actual", "ttft_predicted", "tpot_actual", "tpot_predicted")
        }
        self.refusals: dict[str, int] = {}
        self.ends = Ends()
        self.clients = Clients()
        self.rationing = Rationing()
        self.generations = Generations()
        self.take_conflicts = 0
        self.expired = 0
        self.stepped_back = 0
        self._triage_s = -math.inf
        self._arrivals = 0
        self._shares, self._in_turns = Shares(), False
        self._wished: dict[str, float] = {}  # by seat key: work of those held for that worker
        self._looked_at: tuple[tuple[str, str], ...] = ()  # the fleet that left somebody waiting

    # ------------------------------------------------------------------------ queue

    def entry(
        self,
        reservation_id: str,
        shape: RequestShape,
        *,
        now_s: float,
        granted: asyncio.Future[Held],
        avoid: frozenset[str],
    ) -> Waiting:
        """A request that has just arrived."""
        self._arrivals += 1
        slo = shape.slo or self.policy.pair.slo
        rank = (-shape.priority, False, 0.0, now_s + slo.ttft_s, self._arrivals)
        return Waiting(reservation_id, shape, slo, rank, now_s, now_s, granted, avoid=avoid)

    def enqueue(self, entry: Waiting) -> None:
        """Put a request into the queue.

        Raises:
            Overloaded: the queue is full, nobody in it is less important and no tenant floods it.
        """
        policy = self.policy
        while self.queue and (
            len(self.queue) >= policy.queue_requests_max
            or self.queued_tokens + entry.shape.isl > policy.queue_tokens_max
        ):
            least = to_make_room(self.queue, entry)
            if least is None:
                self.refused("queue_full", entry)
                raise Overloaded(
                    f"the queue of {self.model} holds {len(self.queue)} requests with "
                    f"{self.queued_tokens} tokens",
                    self.retry_after_s(),
                )
            self.withdraw(least)
            flooding = least.shape.priority == entry.shape.priority
            self.refused("flooding" if flooding else "outranked", least)
            whose = (
                "of other tenants need room in" if flooding else "that are more important filled"
            )
            self._fail(least, Overloaded(f"requests {whose} the queue", self.retry_after_s()))
        insort(self.queue, entry)
        self._triage_s = -math.inf
        entry.queued = True
        self.queued_tokens += entry.shape.isl

    def withdraw(self, entry: Waiting) -> None:
        """Take a request out of the queue (placed, refused, or its client left)."""
        if entry.queued:
            self.queue.remove(entry)
            entry.queued = False
            self.queued_tokens -= entry.shape.isl
            if not self.queue:
                self._shares.clear()

    def pump(self, *, now_s: float) -> float | None:
        """Place whoever can be placed, in order; returns when mere time changes something.

        Those behind one that cannot go are looked at too (it may need more than they do), but only
        a few, and only until it has waited for half its bound: nobody starves.
        """
        again_s: float | None = None
        stuck: list[Waiting] = []
        self._wished.clear()
        alone = len(self.queue) == 1
        if not alone:  # most are placed as they come: whoever is alone steps back if it stays
            self._triage(now_s)
        full_s = self._full_for_s(now_s)
        while len(stuck) <= self.policy.look_past_max and len(self.queue) > len(stuck):
            entry = self.queue[len(stuck)]  # those before it are stuck
            wait_s = None if full_s is None else self._still_waits_s(entry, full_s, now_s)
            regime = entry.regime
            if wait_s is None:
                verdict = self.judge(entry, now_s=now_s)
                if not isinstance(verdict, Wait):
                    full_s = self._full_for_s(now_s)
                    continue
                wait_s, regime = verdict.again_in_s, verdict.regime
                if verdict.wished:
                    before_s = self._wished.get(verdict.wished, 0.0)
                    self._wished[verdict.wished] = before_s + verdict.work_s
            stuck.append(entry)
            if wait_s is not None:
                again_s = wait_s if again_s is None else min(again_s, wait_s)
            long = now_s - entry.arrived_s > self.policy.pair.wait_max_s / 2
            if long or regime == "empty":
                break
        self._looked_at = self._fleet() if stuck else ()
        if alone and stuck:
            self._triage(now_s)
        return again_s

    def _triage(self, now_s: float) -> None:
        """Who cannot be in time, or keeps more of the others from it, steps back (see `triage`)."""
        queue = self.queue
        if now_s - self._triage_s < TRIAGE_EVERY_S or not queue:
            return
        self._triage_s = now_s
        speeds, busy_s = [], 0.0
        for seat in self.prefills:
            if not (seat.shut or seat.lent):
                speeds.append(seat.prefill_s(TRIAGE_TOKENS))
                busy_s += seat.remaining_s(now_s)
        if not speeds:
            return  # nobody is late for a pool that is empty: it waits for a worker
        quickest = min(speeds)
        hopeful = [entry for entry in queue if not entry.late]
        jobs = [
            Job(
                entry.shape.priority,
                self._work_s(entry, now_s),
                entry.deadline_s - now_s - TRIAGE_MARGIN * entry.slo.ttft_s,
                entry.shape.tenant,
            )
            for entry in hopeful
        ]
        workers = sum(quickest / speed for speed in speeds)
        for place in too_late(jobs, workers=workers, busy_s=busy_s / len(speeds)):
            entry = hopeful[place]
            shape, work_s = entry.shape, jobs[place].work_s
            entry.turn = self._shares.turn(shape.priority, shape.tenant, work_s)
            queue.remove(entry)
            entry.step_back(in_turns=self._in_turns)
            insort(queue, entry)
            self.stepped_back += 1
        late = [entry for entry in queue if entry.late]
        in_turns = len({entry.shape.tenant for entry in late}) > 1
        if in_turns is not self._in_turns:
            self._in_turns = in_turns
            for entry in late:
                entry.step_back(in_turns=in_turns)
            queue.sort()

    def _work_s(self, entry: Waiting, now_s: float) -> float:
        """Its prefill on the quickest open worker, where most of it is cached."""
        if entry.work_s is None:
            cached = self.cached(entry, now_s=now_s)
            isl = entry.shape.isl
            entry.work_s = min(
                seat.prefill_s(isl, held)
                for seat in self.prefills
                if not seat.shut
                for held in (min(cached.get(seat.key, 0), isl - 1),)
            )
        return entry.work_s

    def _fleet(self) -> tuple[tuple[str, str], ...]:
        """What decides, besides load, whether a request waits or is refused: seats, open or shut."""
        return tuple([(key, seat.shut) for key, seat in self.seats.items()])

    def _full_for_s(self, now_s: float) -> float | None:
        """For how long no prefill worker takes anything; None when one does or the fleet changed.

        Most events of a full fleet change nothing for those who wait: they are not judged by them.
        """
        if not self._looked_at or self._looked_at != self._fleet():
            return None
        policy = self.policy.pair
        soon_s = policy.wait_max_s
        for seat in self.prefills:
            if seat.shut:
                continue
            left_s = seat.remaining_s(now_s) - policy.prefill_ahead_s
            if left_s > 0.0:
                soon_s = min(soon_s, left_s)
            elif seat.occupied() < seat.sequences_cap:
                return None
        return soon_s

    def _still_waits_s(self, entry: Waiting, full_s: float, now_s: float) -> float | None:
        """When to look at it again in a full fleet; None for the new and those at their bound."""
        left_s = self.policy.pair.wait_max_s - (now_s - entry.regime_since_s)
        return min(full_s, left_s) if entry.regime == "busy" and left_s > 0.0 else None

    def judge(self, entry: Waiting, *, now_s: float) -> Chosen | Wait | Shed:
        """Decide about one request, and act on it: grant, refuse, or leave it waiting."""
        verdict = self.verdict(entry, now_s=now_s)
        if isinstance(verdict, Chosen):
            if entry.late:
                self._shares.served(entry.shape.priority, entry.turn)
            self.withdraw(entry)
            held = self.book(
                entry.reservation_id,
                entry.shape,
                verdict,
                hashes=self.hashes(entry, verdict.prefill.block_size),
                waited_s=now_s - entry.arrived_s,
                now_s=now_s,
            )
            if entry.granted.done():  # its client has left just now
                self.drop(held.reservation_id, now_s=now_s)
            else:
                entry.granted.set_result(held)
        elif isinstance(verdict, Shed):
            self.withdraw(entry)
            self.refused(verdict.kind, entry)
            self._fail(entry, self.error(verdict, entry.shape))
        elif verdict.regime == "locality" and entry.held_since_s is None:
            entry.held_since_s = now_s
        if isinstance(verdict, Wait) and _kind(verdict.regime) != entry.regime:
            # An empty pool and a saturated one have budgets of their own (field report B90). Who
            # is looked at for the first time has waited since it came, behind others.
            since_s = now_s if entry.regime else entry.regime_since_s
            entry.regime, entry.regime_since_s = _kind(verdict.regime), since_s
        return verdict

    def verdict(self, entry: Waiting, *, now_s: float) -> Chosen | Wait | Shed:
        """What the pairing brain says now, without acting on it."""
        return decide(
            self.ask(entry, now_s=now_s),
            self.prefills,
            self.decodes,
            self.pairing,
            now_s=now_s,
        )

    @property
    def pairing(self) -> PairPolicy:
        """What pairs are chosen by: the policy, with the links as they are."""
        return self.rates.corrected(self.policy.pair)

    def ask(self, entry: Waiting, *, now_s: float) -> Ask:
        """The request as the pairing brain wants it."""
        shape = entry.shape
        mean, high = self.lengths.remaining(shape.isl, 0, shape.max_tokens)
        return Ask(
            isl=shape.isl,
            slo=entry.slo,
            output_tokens=mean,
            output_reserved=int(high),
            max_tokens=shape.max_tokens,
            cached_tokens=self.cached(entry, now_s=now_s),
            waited_s=now_s - entry.arrived_s,
            regime_s=now_s - entry.regime_since_s,
            held_s=0.0 if entry.held_since_s is None else now_s - entry.held_since_s,
            wished=self._wished,
            behind=self._behind(entry),
            cut=self.cuts.now(now_s=now_s),
            avoid=entry.avoid,
        )

    def _behind(self, entry: Waiting) -> float:
        """Others that wait, by prefill worker that serves them."""
        others = len(self.queue) - entry.queued
        if not others:
            return 0.0
        return others / max(1, sum([not (s.shut or s.lent) for s in self.prefills]))

    def cached(self, entry: Waiting, *, now_s: float) -> dict[str, int]:
        """Prompt tokens that each seat holds, by seat key; looked up once at one time."""
        if entry.looked_up is not None and entry.looked_up[0] == now_s:
            return entry.looked_up[1]
        sizes = {seat.block_size for seat in self.seats.values()}
        found: dict[str, int] = {}
        for size in sizes:
            matched = self.index.matched(self.hashes(entry, size), now_s=now_s)
            for key, blocks in matched.items():
                seat = self.seats.get(key)
                if seat is not None and seat.block_size == size:
                    found[key] = blocks * size
            for key, tokens in self.below_gpu(self.hashes(entry, size), size).items():
                found[key] = max(tokens, found.get(key, 0))
        for key, trust in self.hits.doubted.items():
            if key in found:
                found[key] = int(found[key] * trust)
        entry.looked_up = now_s, found
        return found

    def hashes(self, entry: Waiting, block_size: int) -> tuple[int, ...]:
        """Sequence hashes of the prompt, computed once a block size."""
        known = entry.hashes.get(block_size)
        if known is None:
            shape = entry.shape
            if shape.token_ids:
                known = sequence_hashes(
                    shape.token_ids, block_size, lora=shape.lora, cache_salt=shape.cache_salt
                )
            else:
                known = shape.block_hashes[: shape.isl // block_size]
            entry.hashes[block_size] = known
        return known

    def retry_after_s(self) -> float:
        """When the queue may have been worked off: its tokens at the prefill workers' rate."""
        rate = 0.0
        for seat in self.prefills:
            if not seat.shut:
                rate += 1024.0 / seat.times.prefill_s(1024.0)
        if rate <= 0:
            return 5.0
        return min(RETRY_AFTER_MAX_S, max(1.0, self.queued_tokens / rate))

    def error(self, shed: Shed, shape: RequestShape) -> Exception:
        """A verdict as the error the caller gets."""
        if shed.kind in ("too_long", "too_large"):
            asked = shape.isl + (shape.max_tokens or 1)
            return PromptTooLong(
                "prompt", asked, f"shorten the prompt or max_tokens: {shed.reason}"
            )
        if shed.kind == "incompatible":
            return NoCompatiblePair(shed.reason, 5.0)
        if shed.kind == "overloaded":
            return Overloaded(shed.reason, self.retry_after_s())
        return NoPair(shed.reason, self.policy.circuit_open_s if shed.kind == "broken" else 5.0)

    def _fail(self, entry: Waiting, error: Exception) -> None:
        if not entry.granted.done():
            entry.granted.set_exception(error)

    def refused(self, kind: str, entry: Waiting) -> None:
        """Count a refusal; once, whatever its request does then."""
        if entry.refused:
            return
        entry.refused = True
        self.counters.refused += 1
        self.refusals[kind] = self.refusals.get(kind, 0) + 1

    # ------------------------------------------------------------------------ ends

    @property
    def open_requests(self) -> int:
        """Requests that have arrived and have not ended: waiting, promised, or without a pair."""
        promised = sum(rid not in self.waiting for rid in self.held)
        return len(self.waiting) + promised + len(self.ends.lost)

    def abort(self, reason: str) -> None:
        """Count a request that ends without an answer."""
        self.counters.aborted += 1
        self.ends.abort(reason)

    def lose(self, reservation_id: str, reason: str, isl: int, *, now_s: float) -> None:
        """A request has lost its pair; it is aborted unless its gateway speaks of it."""
        if reservation_id not in self.waiting:  # else it is still being placed
            self.counters.aborted += self.ends.lose(reservation_id, reason, isl, now_s=now_s)

    def settle_ends(self, *, now_s: float) -> None:
        """Abort what has been without a pair for too long."""
        self.counters.aborted += self.ends.settle(now_s=now_s)

    def end_of_lost(self, event: RequestEvent, *, now_s: float) -> bool:
        """One fact about a request without a pair; False when it is none of those."""
        lost = self.ends.found(event.reservation_id)
        if lost is None:
            return False
        if event.kind is EventKind.FINISHED:
            self._count_finished(lost.isl, event)
        elif event.kind is EventKind.ABORTED:
            self.abort(lost.reason)
        else:
            if event.kind is EventKind.LEG_FAILED:
                self.leg_failed(event, now_s=now_s)
            self.lose(event.reservation_id, lost.reason, lost.isl, now_s=now_s)
        return True

    def ran_out(self, reservation_id: str, *, now_s: float) -> bool:
        """Nobody spoke of a reservation; False when it is not held here."""
        held = self.drop(reservation_id, now_s=now_s)
        if held is None:
            return False
        self.expired += 1
        self.lose(reservation_id, "expired", held.isl, now_s=now_s)
        return True

    def unseat_worker(self, key: str, *, now_s: float) -> list[str]:
        """A worker is gone; returns the reservations that it takes with it."""
        return self._losing(
            "worker_gone", now_s, lambda: super(Desk, self).unseat_worker(key, now_s=now_s)
        )

    def abort_on(self, key: str, *, now_s: float) -> list[str]:
        """Give up what a worker still has (its drain deadline has passed)."""
        return self._losing(
            "drain_deadline", now_s, lambda: super(Desk, self).abort_on(key, now_s=now_s)
        )

    def _losing(self, reason: str, now_s: float, work: Callable[[], list[str]]) -> list[str]:
        before = dict(self.held)
        lost = work()
        for reservation_id in lost:
            held = before[reservation_id]
            if reason == "worker_gone":
                self.generations.of(held.decode.kv.model_digest).failed += 1
            self.lose(reservation_id, reason, held.isl, now_s=now_s)
        return lost

    # ------------------------------------------------------------------------ events

    def ends_by_generation(self, *, now_s: float) -> tuple[GenerationSignals, ...]:
        """How requests of each generation ended, and how many under way are late already."""
        late = Counter(h.decode.kv.model_digest for h in self.held.values() if h.late(now_s))
        told = dict(self.generations.snapshot())
        return tuple(
            GenerationSignals(digest, found.finished, found.attained, found.failed, late[digest])
            for digest in sorted({*told, *late})
            for found in (told.get(digest) or Outcomes(),)
        )

    def event(self, event: RequestEvent, owed: Owed, *, now_s: float) -> bool:
        """One fact about a reserved request; False when the reservation is not known here."""
        held = self.held.get(event.reservation_id)
        if held is None:
            return False
        self.touched.add(event.reservation_id)
        held.heard_s = now_s
        self._latencies(event, held, now_s)
        kind = event.kind
        if kind is EventKind.PREFILL_DONE:
            self._prefill_done(held, owed, now_s)
        elif kind is EventKind.FIRST_TOKEN:
            self._first_token(held, owed, now_s)
            self._emitted(held, max(1, event.output_tokens), owed)
        elif kind is EventKind.PROGRESS:
            if event.output_tokens > 0:
                self._first_token(held, owed, now_s)
            self._emitted(held, event.output_tokens, owed)
        elif kind is EventKind.FINISHED:
            self._first_token(held, owed, now_s)
            self._finish(held, event, now_s)
            owed.releases.append((event.reservation_id, ALL_SIDES))
        else:
            # Whoever leaves after waiting too long has been failed by whom it waited for.
            if kind is EventKind.ABORTED and held.late(now_s):
                self.generations.of(held.decode.kv.model_digest).failed += 1
            moving = not (held.local or held.prefilling or held.first_token_seen)
            self.drop(event.reservation_id, now_s=now_s)
            if kind is EventKind.LEG_FAILED and moving and not busy(event):
                self.cuts.failed(held.prefill.key, held.decode.key, now_s=now_s)
            if kind is EventKind.LEG_FAILED:
                self.leg_failed(event, now_s=now_s)
                if not busy(event):
                    self.generations.of(held.decode.kv.model_digest).failed += 1
                self.lose(event.reservation_id, "leg_failed", held.isl, now_s=now_s)
            elif event.reservation_id not in self.waiting:  # else counted when its call ends
                self.abort("client")
            owed.releases.append((event.reservation_id, ALL_SIDES))
        return True

    def _prefill_done(self, held: Held, owed: Owed, now_s: float) -> None:
        if not held.prefilling:
            return
        held.prefill_done_s = now_s
        if self.policy.correct_prefill:
            measured.prefilled(self.rates, held, now_s=now_s)
        self._prefill_over(held, now_s)
        self._succeeded(held.prefill)
        if not held.local:
            owed.releases.append((held.reservation_id, PREFILL_SIDE))

    def _first_token(self, held: Held, owed: Owed, now_s: float) -> None:
        self._prefill_done(held, owed, now_s)
        if held.first_token_seen:
            return
        held.first_token_seen, held.first_token_s = True, now_s
        if not held.local:
            self.cuts.succeeded(held.prefill.key, held.decode.key)
        measured.moved(self.rates, self.policy.pair, held, now_s=now_s)
        self._read_over(held)
        self._succeeded(held.decode)
        if not held.local:
            self.counters.handovers += 1

    def _finish(self, held: Held, event: RequestEvent, now_s: float) -> None:
        self._count_finished(held.isl, event)
        ends = self.generations.of(held.decode.kv.model_digest)
        ends.finished += 1
        ends.attained += bool(event.attained)
        measured.decoded(self.rates, held, event, now_s=now_s)
        self.drop(held.reservation_id, now_s=now_s)

    def _count_finished(self, isl: int, event: RequestEvent) -> None:
        self.counters.finished += 1
        self.counters.finished_prompt_tokens += isl
        self.counters.output_tokens += event.output_tokens
        self.counters.attained += bool(event.attained)
        self.lengths.add(isl, event.output_tokens)

    def _latencies(self, event: RequestEvent, held: Held, now_s: float) -> None:
        if event.ttft_s is not None and not held.first_token_seen:
            self.windows["ttft_actual"].add(event.ttft_s, now_s=now_s)
        if event.tpot_s is not None:
            self.windows["tpot_actual"].add(event.tpot_s, now_s=now_s)


def _kind(regime: str) -> str:
    return "empty" if regime == "empty" else "busy"
