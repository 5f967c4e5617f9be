"""What one router has promised of one model's workers, seat by seat.

Owns seats, circuits and bookings, and sees to it that everything booked is booked back exactly
once. `Desk` adds the queue and the events; the service makes a booking binding in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from readyplane.core.work import RequestEvent, RequestShape, Slo
from readyplane.core.worker import Role
from readyplane.ports import Pair
from readyplane_router import circuit
from readyplane_router.cuts import Cuts
from readyplane_router.pair import Chosen, Seat, Terms, made_up_s
from readyplane_router.policy import RouterPolicy
from readyplane_router.prefix import PrefixIndex
from readyplane_router.prefix.hits import HitGap
from readyplane_router.prefix.tiers import worth
from readyplane_router.rates import Rates

FREEZE_AFTER_CHANGE_S = 5.0
PREFILL_SIDE, DECODE_SIDE = 0, 1
LATE_S, LATE_FACTOR = 1.0, 1.25
"""Tokens are told of in batches: so much later than the target a request is called late."""


@dataclass(slots=True)
class Held:
    """A booked pair until both ends are free again."""

    reservation_id: str
    isl: int
    uncached_tokens: int
    max_tokens: int | None
    prefill: Seat
    decode: Seat
    terms: Terms
    prefill_cached: int
    decode_cached: int
    prefill_blocks: int
    decode_blocks: int
    waited_s: float
    sent_s: float
    heard_s: float
    slo: Slo
    emitted: int = 0
    prefilling: bool = True
    reading: bool = True  # the prefill end's KV is still needed
    in_store: bool = False
    first_token_seen: bool = False
    pair: Pair | None = None
    first_token_s: float | None = None
    prefill_done_s: float | None = None
    iteration_s: float = 0.0  # of the decode end as it was booked, by its profile alone

    def late(self, now_s: float) -> bool:
        """Whether it can hardly meet its targets any more: no first token in time, or tokens that
        come too slowly, as far as was told of it.
        """
        if self.first_token_s is None:
            return now_s - (self.sent_s - self.waited_s) > self.slo.ttft_s
        told_s = self.heard_s - self.first_token_s
        return told_s > LATE_S + LATE_FACTOR * self.slo.tpot_s * self.emitted

    @property
    def local(self) -> bool:
        """Both ends are one worker."""
        return self.prefill is self.decode


@dataclass(slots=True)
class Owed:
    """What the store must be told after some events."""

    releases: list[tuple[str, int]] = field(default_factory=list)
    grows: list[tuple[str, int, int]] = field(default_factory=list)


class Bookings:
    """Seats of one model and what is booked on them."""

    def __init__(self, model: str, policy: RouterPolicy) -> None:
        """Empty."""
        self.model = model
        self.policy = policy
        self.index = PrefixIndex(policy.prefix)
        self.hits = HitGap()
        self.seats: dict[str, Seat] = {}
        self.prefills: list[Seat] = []
        self.decodes: list[Seat] = []
        self.circuits: dict[str, circuit.Circuit] = {}
        self.held: dict[str, Held] = {}
        self.touched: set[str] = set()
        self.rates = Rates()
        self.cuts = Cuts(
            failures_max=policy.circuit_failures_max,
            window_s=policy.circuit_window_s,
            open_s=policy.circuit_open_s,
        )
        self.grown = self.overflowed = 0
        self._picks = 0

    # ------------------------------------------------------------------------ seats

    def seat_worker(self, seat: Seat, *, now_s: float) -> None:
        """A worker passed the gate."""
        self.seats[seat.key] = seat
        if seat.role.serves(Role.PREFILL):
            self.prefills.append(seat)
        if seat.role.serves(Role.DECODE):
            self.decodes.append(seat)
        self.index.add(seat.key, blocks_max=seat.kv_total_blocks)
        self.circuits.setdefault(seat.key, circuit.Circuit())
        self._capacity_changed(now_s)

    def unseat_worker(self, key: str, *, now_s: float) -> list[str]:
        """A worker is gone; returns the reservations that it takes with it."""
        seat = self.seats.pop(key, None)
        self.index.drop(key)
        self.circuits.pop(key, None)
        self.hits.forget(key)
        self.rates.forget(key)
        self.cuts.forget(key)
        if seat is None:
            return []
        self.prefills = [s for s in self.prefills if s is not seat]
        self.decodes = [s for s in self.decodes if s is not seat]
        lost = [rid for rid, h in self.held.items() if self._needs(h, seat)]
        for reservation_id in lost:
            self.drop(reservation_id, now_s=now_s)
        self._capacity_changed(now_s)
        return lost

    def abort_on(self, key: str, *, now_s: float) -> list[str]:
        """Give up what a worker still has (its drain deadline has passed)."""
        seat = self.seats.get(key)
        lost = [] if seat is None else [r for r, h in self.held.items() if self._needs(h, seat)]
        for reservation_id in lost:
            self.drop(reservation_id, now_s=now_s)
        return lost

    def look_at_circuits(self, *, now_s: float) -> None:
        """Shut or open seats by their circuit; other reasons for being shut are left alone."""
        for key, seat in self.seats.items():
            state = circuit.looked_at(
                self.circuits[key], now_s=now_s, open_s=self.policy.circuit_open_s
            )
            self.circuits[key] = state
            if circuit.passes(state):
                if seat.shut.startswith("circuit"):
                    seat.shut = ""
            elif not seat.shut:
                seat.shut = f"circuit {state.state}"

    def below_gpu(self, hashes: Sequence[int], block_size: int) -> dict[str, int]:
        """What prefixes are worth in cached tokens that lie partly below their worker's GPU."""
        found: dict[str, int] = {}
        loads = self.policy.prefix.loads()
        for key, pieces in self.index.tiered(hashes).items():
            seat = self.seats.get(key)
            if seat is not None and seat.block_size == block_size:
                found[key] = worth(
                    [(tier, blocks * block_size) for tier, blocks in pieces],
                    loads,
                    kv_bytes_per_token=seat.times.kv_bytes_per_token,
                    prefill_s=seat.times.prefill_s,
                )
        return found

    @staticmethod
    def _needs(held: Held, seat: Seat) -> bool:
        return held.decode is seat or (held.prefill is seat and held.reading)

    def _capacity_changed(self, now_s: float) -> None:
        self.rates.freeze(now_s + FREEZE_AFTER_CHANGE_S)

    # ------------------------------------------------------------------------ bookings

    def book(
        self,
        reservation_id: str,
        shape: RequestShape,
        chosen: Chosen,
        *,
        hashes: Sequence[int],
        waited_s: float,
        now_s: float,
    ) -> Held:
        """Book a pair on its seats; `hashes` are the prompt's at the prefill end's block size."""
        p, d, terms = chosen.prefill, chosen.decode, chosen.terms
        uncached = shape.isl - chosen.prefill_cached
        held = Held(
            reservation_id,
            shape.isl,
            uncached,
            shape.max_tokens,
            p,
            d,
            terms,
            chosen.prefill_cached,
            chosen.decode_cached,
            chosen.prefill_blocks,
            chosen.decode_blocks,
            waited_s,
            now_s,
            now_s,
            shape.slo or self.policy.pair.slo,
        )
        held.iteration_s = terms.tpot_s / d.decode_factor
        self.held[reservation_id] = held
        self.cuts.taken(p.key, d.key)
        self._picks += 1
        p.last_used = d.last_used = self._picks
        if not p.works:
            p.head_since_s = now_s
        if p.lent and p.decoding:
            p.lent_until_s = now_s + made_up_s(p, terms.prefill_s, held.slo)
        p.works[reservation_id] = terms.prefill_s
        p.work_s += terms.prefill_s
        p.prefill_tokens += uncached
        p.prefill_tokens_most = max(p.prefill_tokens_most, p.prefill_tokens)
        d.sequences += 1
        d.decoding += 1
        d.assigned += 1
        d.kv_tokens += shape.isl
        d.kv_blocks += chosen.decode_blocks
        if p is not d:
            p.sequences += 1
            p.assigned += 1
            p.kv_blocks += chosen.prefill_blocks
        self.index.guess(p.key, hashes, now_s=now_s)
        self.hits.count_on(p.key, chosen.prefill_cached)
        for seat in (p, d):
            state = self.circuits.get(seat.key)
            if state is not None and state.state == circuit.HALF_OPEN:
                self.circuits[seat.key] = replace(state, probing=True)
                seat.shut = "circuit half_open, probe under way"
        return held

    def decodes_already(self, held: Held, emitted: int, *, now_s: float) -> None:
        """What was booked came from another worker with so many output tokens: nothing of it is
        prefilled, and its prompt is what it was.
        """
        self._prefill_over(held, now_s)
        self._read_over(held)
        held.first_token_seen, held.first_token_s = True, now_s
        held.isl, held.emitted = held.isl - emitted, emitted
        if held.max_tokens is not None:
            held.max_tokens += emitted

    def drop(self, reservation_id: str, *, now_s: float) -> Held | None:
        """Book everything back that is still booked; None when nothing is."""
        held = self.held.pop(reservation_id, None)
        if held is None:
            return None
        self.touched.discard(reservation_id)
        self._prefill_over(held, now_s)
        self._read_over(held)
        self.cuts.given_back(held.prefill.key, held.decode.key)
        d = held.decode
        d.sequences -= 1
        d.decoding -= 1
        d.assigned -= 1
        d.kv_blocks -= held.decode_blocks
        d.kv_tokens = d.kv_tokens - held.isl - held.emitted if d.decoding else 0.0
        for seat in (held.prefill, d):
            state = self.circuits.get(seat.key)
            if state is not None and state.probing:  # the probe ended without a verdict
                self.circuits[seat.key] = replace(state, probing=False)
        return held

    def _prefill_over(self, held: Held, now_s: float) -> None:
        if not held.prefilling:
            return
        held.prefilling = False
        p = held.prefill
        head = next(iter(p.works), None)
        p.work_s -= p.works.pop(held.reservation_id, 0.0)
        if head == held.reservation_id:
            p.head_since_s = now_s
        if not p.works:
            p.work_s = 0.0
        p.prefill_tokens -= held.uncached_tokens
        if not held.local:
            p.sequences -= 1
            held.decode.transfers += held.reading
            p.sending += held.reading

    def _read_over(self, held: Held) -> None:
        if not held.reading:
            return
        held.reading = False
        if not held.local:
            held.prefill.kv_blocks -= held.prefill_blocks
            held.prefill.assigned -= 1
            held.prefill.sending -= 1
            held.decode.transfers -= 1

    def _emitted(self, held: Held, tokens: int, owed: Owed) -> None:
        more = tokens - held.emitted
        if more <= 0:
            return
        held.emitted = tokens
        held.decode.kv_tokens += more
        d = held.decode
        blocks = growth_blocks(
            held.isl + tokens,
            reserved_blocks=held.decode_blocks,
            block_size=d.block_size,
            grow_tokens=self.policy.grow_tokens,
            most_tokens=None if held.max_tokens is None else held.isl + held.max_tokens,
        )
        if blocks:
            held.decode_blocks += blocks
            d.kv_blocks += blocks
            self.grown += 1
            # Never refused, since the KV is there: it counts, and nothing more is taken there.
            self.overflowed += d.kv_blocks + d.other_blocks > d.kv_total_blocks
            side = PREFILL_SIDE if held.local else DECODE_SIDE
            owed.grows.append((held.reservation_id, side, blocks))

    def leg_failed(self, event: RequestEvent, *, now_s: float) -> None:
        """Hold a failed leg against the worker, unless it was only busy (field report B70)."""
        if busy(event):
            return
        for key, seat in self.seats.items():
            if seat.worker_id == event.failed_worker_id:
                self.circuits[key] = circuit.failed(
                    self.circuits[key],
                    now_s=now_s,
                    failures_max=self.policy.circuit_failures_max,
                    window_s=self.policy.circuit_window_s,
                )
                self.look_at_circuits(now_s=now_s)
                return

    def _succeeded(self, seat: Seat) -> None:
        state = self.circuits.get(seat.key)
        if state is not None and (state.failures or state.state != circuit.CLOSED):
            self.circuits[seat.key] = circuit.succeeded(state)
            if seat.shut.startswith("circuit") and circuit.passes(self.circuits[seat.key]):
                seat.shut = ""


def growth_blocks(
    tokens: int,
    *,
    reserved_blocks: int,
    block_size: int,
    grow_tokens: int,
    most_tokens: int | None,
) -> int:
    """Blocks to add once a reservation is full: whole chunks of `grow_tokens`, 0 while it is not.

    Never more than prompt and `max_tokens` can need, unless the engine has gone beyond them itself.

    Args:
        tokens: prompt and output so far. most_tokens: prompt and `max_tokens`, if one was given.
    """
    beyond = tokens - reserved_blocks * block_size
    if beyond < 0:
        return 0
    chunks = beyond // grow_tokens + 1
    blocks = -(-chunks * grow_tokens // block_size)
    if most_tokens is None:
        return blocks
    return min(blocks, max(0, -(-max(most_tokens, tokens) // block_size) - reserved_blocks))


def busy(event: RequestEvent) -> bool:
    """Whether a failed leg only says that its worker had no room."""
    return event.detail.startswith("busy")
