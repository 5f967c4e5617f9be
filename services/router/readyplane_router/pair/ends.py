"""What each worker adds to the cost as one end of a pair, within the hard constraints.

Owns the terms that depend on one worker only; `argmin` puts two ends together.
"""

from __future__ import annotations

from collections.abc import Sequence

from readyplane.core.worker import Role
from readyplane_router.pair.cost import urgency_of
from readyplane_router.pair.lend import lent_s
from readyplane_router.pair.seat import Seat, Times
from readyplane_router.pair.values import Ask, PairPolicy

PrefillEnd = tuple[float, int, Seat, float]
"""(cost, least recently used, seat, work ahead in seconds)."""
DecodeEnd = tuple[float, int, Seat, float]
"""(cost without transfer, least recently used, seat, KV bytes to be moved there)."""


def prefill_ends(
    ask: Ask, seats: Sequence[Seat], policy: PairPolicy, now_s: float
) -> tuple[list[PrefillEnd], list[PrefillEnd]]:
    """Prefill ends that may take it now, and those that already have enough work.

    A worker that holds a part of the prompt may have as much more work as that saves, where another
    is free and the prompt would go there, cold. Where nobody is free it waits in the router, which
    can still put others before it.
    """
    ready: list[PrefillEnd] = []
    busy: list[PrefillEnd] = []
    warm: list[PrefillEnd] = []
    isl, cached_of, avoid = ask.isl, ask.cached_tokens, ask.avoid
    urgency, slow = urgency_of(ask, policy), policy.slowdown_weight
    wished = ask.wished
    weight = urgency + slow * ask.behind
    longest = isl + (ask.max_tokens or 1)
    known: dict[tuple[int, int], float] = {}
    times, uncached_s = None, 0.0  # of the last seat's class
    # Without a prefill worker the lent ones are all there is.
    served = any(not (seat.lent or seat.shut) for seat in seats)
    for seat in seats:
        if seat.shut or longest > seat.max_model_len or (avoid and seat.worker_id in avoid):
            continue
        if seat.sequences + seat.other_sequences + seat.foreign_sequences >= seat.sequences_cap:
            continue
        free = seat.kv_total_blocks - seat.kv_blocks - seat.other_blocks - seat.foreign_blocks
        if isl > free * seat.block_size:
            continue
        cached = cached_of.get(seat.key, 0) if cached_of else 0
        if times is not seat.times:
            times = seat.times
            uncached_s = times.prefill_s(isl, 0)
        own_s, saved_s = uncached_s, 0.0
        if cached:
            own_s = _cached_s(seat.times, isl, min(cached, isl - 1), known)
            saved_s = uncached_s - own_s
        own_s *= seat.prefill_factor  # as `Seat.prefill_s`, looked up once for seats of a class
        queue_s = (
            seat.remaining_s(now_s) if seat.works or seat.foreign_tokens else seat.other_work_s
        )
        if wished:
            queue_s += wished.get(seat.key, 0.0)
        # Who waits for a prefill worker loses nothing by what a lent one does.
        cost = urgency * queue_s + (urgency if seat.lent else weight) * own_s
        if seat.decoding:
            cost += slow * own_s * seat.decoding
            if seat.lent and served:
                queue_s = max(queue_s, lent_s(ask, seat, own_s, now_s=now_s))
        end = (cost, seat.last_used, seat, queue_s)
        over_s = queue_s - policy.prefill_ahead_s
        waits = over_s <= saved_s * seat.prefill_factor and not seat.lent  # as `ahead_max_s`
        (ready if over_s <= 0.0 else warm if waits else busy).append(end)
    if ready:
        return ready + warm, busy
    return ready, busy + warm


def _cached_s(times: Times, isl: int, cached: int, known: dict[tuple[int, int], float]) -> float:
    """Prefill seconds of what is not cached; `known`: those found for this prompt already."""
    which = (id(times), cached)
    found = known.get(which)
    if found is None:
        found = known[which] = times.prefill_s(isl - cached, cached)
    return found


def ahead_max_s(ask: Ask, seat: Seat, policy: PairPolicy) -> float:
    """Work that a prefill worker may have and still be given the prompt, where another is free.

    What its cache saves of the prompt may be waited for there: it would not be done sooner elsewhere.
    """
    if seat.lent:
        return policy.prefill_ahead_s
    cached = min(ask.cached_tokens.get(seat.key, 0), ask.isl - 1)
    # Rounded as in `prefill_ends`, which decides by it: hence not by `Seat.prefill_s`.
    whole_s, own_s = seat.times.prefill_s(ask.isl), seat.times.prefill_s(ask.isl - cached, cached)
    return policy.prefill_ahead_s + (whole_s - own_s) * seat.prefill_factor


def holding_ends(
    ask: Ask, seats: Sequence[Seat], policy: PairPolicy, now_s: float
) -> dict[str, PrefillEnd]:
    """Decode workers that hold every full block of the prompt, as prefill ends of themselves.

    What is left of it is less than a block, or the last one: no prefill worker is needed, nothing
    is moved, and what their prefill stalls is charged as anywhere else.
    """
    cached_of, isl = ask.cached_tokens, ask.isl
    out: dict[str, PrefillEnd] = {}
    if not cached_of or not policy.skip_prefill:
        return out
    urgency, slow = urgency_of(ask, policy), policy.slowdown_weight
    for seat in seats:
        cached = cached_of.get(seat.key, 0)
        if not cached:
            continue
        decodes = seat.role is Role.DECODE or seat.lent
        if not (ask.brings_kv or (decodes and holds_all(isl, cached, seat))):
            continue
        cached = min(cached, isl - 1)
        own_s = seat.prefill_s(isl, cached)
        queue_s = seat.remaining_s(now_s)
        cost = urgency * (queue_s + own_s) + slow * own_s * seat.decoding
        out[seat.key] = (cost, seat.last_used, seat, queue_s)
    return out


def holds_all(isl: int, cached: int, seat: Seat) -> bool:
    """Whether so many cached tokens are every full block that a prompt can find."""
    needed = (isl - 1) // seat.block_size * seat.block_size
    return 0 < needed <= cached


def decode_ends(
    ask: Ask, seats: Sequence[Seat], policy: PairPolicy, *, any_one: bool = False
) -> list[DecodeEnd]:
    """Decode ends that may take it now; or the first of them."""
    out: list[DecodeEnd] = []
    isl, expected = ask.isl, ask.output_tokens
    wanted_tokens = isl + ask.output_reserved
    longest = isl + (ask.max_tokens or 1)
    context = isl + expected / 2.0
    bound_s = ask.slo.tpot_s * policy.tpot_admit
    urgency, avoid, cached_of = urgency_of(ask, policy), ask.avoid, ask.cached_tokens
    own, slow = policy.decode_weight * expected, policy.slowdown_weight
    times = None  # of the last seat: those of one class follow each other
    a = b = c = alone_s = each_s = unmoved = cost = 0.0
    alike: tuple[int, float, float] | None = None  # of the last seat, if such seats cost as much
    for seat in seats:
        if seat.shut or longest > seat.max_model_len or (avoid and seat.worker_id in avoid):
            continue
        others = seat.sequences + seat.other_sequences + seat.foreign_sequences
        foreign = seat.other_blocks + seat.foreign_blocks
        size = seat.block_size
        if others >= seat.sequences_cap:
            continue
        if wanted_tokens > (seat.kv_total_blocks - seat.kv_blocks - foreign) * size:
            continue
        if times is not seat.times:
            times = seat.times
            a, b, c = times.a, times.b, times.c
            alone_s = 1.5 * (a + b + c * context)
            each_s = slow * (b + c * context)
            unmoved = float(isl * times.kv_bytes_per_token)
            alike = None
        held = seat.kv_tokens + foreign * size
        slower = seat.decode_factor
        state = (others, held, slower)
        if state != alike or seat.works:
            alike = None if seat.works else state
            base_s = a + b * (others + 1)
            tpot_s = base_s + c * (held + context)
            first_s = base_s + c * (held + isl)
            slowed_s = each_s * others * expected
            if slower != 1.0:
                tpot_s, first_s, slowed_s = tpot_s * slower, first_s * slower, slowed_s * slower
            if others and tpot_s > bound_s and tpot_s > alone_s * slower:
                cost = -1.0
                continue
            if seat.works:  # its next prefill chunk comes first
                first_s += min(seat.work_s, times.prefill_s(times.max_batch_tokens))
            cost = urgency * first_s + own * tpot_s + slowed_s
        elif cost < 0.0:  # too slow, as the seat before it
            continue
        cached = cached_of.get(seat.key, 0) if cached_of else 0
        moved = float(max(0, isl - cached) * times.kv_bytes_per_token) if cached else unmoved
        out.append((cost, seat.last_used, seat, moved))
        if any_one:
            break
    return out


def takes(ask: Ask, seat: Seat, policy: PairPolicy) -> bool:
    """Whether a decode worker takes it within every hard constraint and the TPOT bound."""
    return bool(decode_ends(ask, [seat], policy))
