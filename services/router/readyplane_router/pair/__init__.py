"""The pairing brain: (request, view, policy) -> Chosen | Wait | Shed, with the cost explained.

Owns one joint cost over prefill x decode workers, in predicted seconds (R19.1):

    urgency * ttft + decode time of the request + slow-down of everybody else

    ttft = work promised to P and not yet done + own uncached prefill on P
         + KV of the tokens D does not hold, over the link P-D, shared with D's other transfers
         + one iteration of D

Hard constraints come first: shut seats, model length, KV format, free blocks, sequences. Then P is
kept short of work (`prefill_ahead_s`): a request waits in the router, where it can still go to
capacity that arrives, rather than inside an engine, where it cannot.

The argmin is exact. For one D the best P is the best of its KV format, or the best on D's own node;
so P + D terms are evaluated, not P x D. A worker that serves both stages is a candidate with
itself, without transfer. `Seat` is a mutable value that the service owns; nothing is written here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from readyplane.core.work import Slo
from readyplane.core.worker import Role
from readyplane_router.pair.cost import pair_terms, urgency_of
from readyplane_router.pair.seat import Seat, Times, kv_key, seat_key, times_of
from readyplane_router.pair.values import (
    LOCAL_LINK,
    NETWORK_LINK,
    NO_CONNECTOR,
    SLO_DEFAULT,
    Ask,
    Chosen,
    PairPolicy,
    Shed,
    Terms,
    Wait,
)
from readyplane_router.pair.why import why_not

__all__ = [
    "LOCAL_LINK",
    "NETWORK_LINK",
    "SLO_DEFAULT",
    "Ask",
    "Chosen",
    "PairPolicy",
    "Seat",
    "Shed",
    "Terms",
    "Times",
    "Wait",
    "decide",
    "kv_key",
    "made_up_s",
    "pair_terms",
    "seat_key",
    "times_of",
]


def decide(
    ask: Ask,
    prefills: Sequence[Seat],
    decodes: Sequence[Seat],
    policy: PairPolicy,
    *,
    now_s: float,
) -> Chosen | Wait | Shed:
    """The cheapest pair now, or why not.

    Args:
        prefills, decodes: seats by stage; one that serves both stands in both.
    """
    ready, busy = _prefill_terms(ask, prefills, policy, now_s)
    # Where no P may take it now, it is only asked whether some D would.
    ends = _decode_terms(ask, decodes, policy, any_one=not ready) if ready or busy else []
    best = _cheapest(ask, ready, ends, policy) if ready and ends else None
    if busy and best is not None:
        held = _hold(ask, best, busy, ends, policy)
        if held is not None:
            return held
    if best is not None:
        return _chosen(ask, best, policy, now_s)
    return why_not(ask, prefills, decodes, policy, now_s, busy=bool(busy and ends))


LEND_SHARE, LEND_LEAST = 0.5, 0.05
"""Share of what the TPOT target leaves that prompts may take on a lent decode worker, and the least
that is reckoned with."""
LEND_AT_ONCE = 0.5
LENT_AWAY_S = 1.0
TIE_S = 2e-5  # costs are compared to 10 µs: what is dearer by more than this cannot win

# A prefill end: (cost, least recently used, seat, ttft part, work ahead beyond the bound)
_P = tuple[float, int, Seat, float]
# A decode end: (cost without transfer, least recently used, seat, KV bytes, ttft part)
_D = tuple[float, int, Seat, float]
# A pair: (cost, last used of P, last used of D, P, D)
_Pair = tuple[float, int, int, Seat, Seat]


def _prefill_terms(
    ask: Ask, seats: Sequence[Seat], policy: PairPolicy, now_s: float
) -> tuple[list[_P], list[_P]]:
    """Prefill ends that may take it now, and those that already have enough work."""
    ready: list[_P] = []
    busy: list[_P] = []
    isl, cached_of, avoid = ask.isl, ask.cached_tokens, ask.avoid
    urgency, ahead, slow = urgency_of(ask, policy), policy.prefill_ahead_s, policy.slowdown_weight
    longest = isl + (ask.max_tokens or 1)
    known: dict[tuple[int, int], float] = {}
    times, uncached_s = None, 0.0  # of the last seat that holds nothing of the prompt
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
        if not cached:
            if times is not seat.times:
                times = seat.times
                uncached_s = times.prefill_s(isl, 0)
            own_s = uncached_s
        else:
            cached = min(cached, isl - 1)
            which = (id(seat.times), cached)
            found = known.get(which)
            if found is None:
                found = known[which] = seat.times.prefill_s(isl - cached, cached)
            own_s = found
        own_s *= seat.prefill_factor
        queue_s = (
            seat.remaining_s(now_s) if seat.works or seat.foreign_tokens else seat.other_work_s
        )
        cost = urgency * (queue_s + own_s)
        if seat.decoding:
            cost += slow * own_s * seat.decoding
            if seat.lent and served:
                queue_s = max(queue_s, lent_s(ask, seat, own_s, now_s=now_s))
        (ready if queue_s <= ahead else busy).append((cost, seat.last_used, seat, queue_s))
    return ready, busy


def lent_s(ask: Ask, seat: Seat, own_s: float, *, now_s: float) -> float:
    """Seconds until a decode worker that is lent to prefill may take the prompt.

    Every sequence that decodes there waits for its chunks, and what they may lose is what the TPOT
    target leaves over the iterations as they are. One prompt must not take all of that of an answer
    of the usual length, and after a prompt they are made up for.
    """
    spare_s = ask.slo.tpot_s - _iteration_s(seat)
    if spare_s <= 0 or own_s > LEND_AT_ONCE * spare_s * ask.output_tokens:
        return LENT_AWAY_S
    return max(0.0, seat.lent_until_s - now_s)


def made_up_s(seat: Seat, own_s: float, slo: Slo) -> float:
    """How long a lent worker makes up for a prompt of that time."""
    share = LEND_SHARE * (1.0 - _iteration_s(seat) / slo.tpot_s)
    return own_s / max(share, LEND_LEAST)


def _iteration_s(seat: Seat) -> float:
    """Of the sequences that it has, without a prompt."""
    times = seat.times
    return times.a + times.b * seat.occupied() + times.c * seat.kv_tokens


def _decode_terms(
    ask: Ask, seats: Sequence[Seat], policy: PairPolicy, *, any_one: bool = False
) -> list[_D]:
    """Decode ends that may take it now; or the first of them."""
    out: list[_D] = []
    isl, expected = ask.isl, ask.output_tokens
    wanted_tokens = isl + ask.output_reserved
    longest = isl + (ask.max_tokens or 1)
    context = isl + expected / 2.0
    bound_s = ask.slo.tpot_s * policy.tpot_admit
    urgency, avoid, cached_of = urgency_of(ask, policy), ask.avoid, ask.cached_tokens
    own, slow = policy.decode_weight * expected, policy.slowdown_weight
    times = None  # of the last seat: those of one class follow each other
    a = b = c = alone_s = each_s = unmoved = 0.0
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
        held = seat.kv_tokens + foreign * size
        base_s = a + b * (others + 1)
        tpot_s = base_s + c * (held + context)
        if others and tpot_s > bound_s and tpot_s > alone_s:
            continue
        first_s = base_s + c * (held + isl)
        if seat.works:  # its next prefill chunk comes first
            first_s += min(seat.work_s, times.prefill_s(times.max_batch_tokens))
        cost = urgency * first_s + own * tpot_s + each_s * others * expected
        cached = cached_of.get(seat.key, 0) if cached_of else 0
        moved = float(max(0, isl - cached) * times.kv_bytes_per_token) if cached else unmoved
        out.append((cost, seat.last_used, seat, moved))
        if any_one:
            break
    return out


def _cheapest(
    ask: Ask,
    prefills: Sequence[_P],
    decodes: Sequence[_D],
    policy: PairPolicy,
    below: float = math.inf,
) -> _Pair | None:
    """Exact argmin over all compatible pairs, ties to the least recently used.

    Only pairs that cost less than `below` need to be found.
    """
    overall, itself = _grouped(prefills)
    nodes = {end[2].node for end in prefills}
    near: dict[tuple[str, str], _P | None] = {}
    urgency = urgency_of(ask, policy)
    local, network = policy.local_link, policy.network_link
    best: _Pair | None = None
    bound = below + TIE_S
    group, far, linked = "", None, False  # of the last seat: mostly all are alike
    for cost, used, seat, moved in decodes:
        if seat.kv_key != group:
            group, far = seat.kv_key, overall.get(seat.kv_key)
            linked = seat.kv.connector not in NO_CONNECTOR
        ways = []
        if itself and seat.key in itself:
            ways.append((itself[seat.key], 0.0))
        if linked and seat.node in nodes:
            place = (seat.node, group)
            if place not in near:
                near[place] = _best_at(prefills, *place)
            end = near[place]
            if end is not None and end[2] is not seat:
                way_s = local.transfer_s(moved, sharers=seat.transfers + 1)
                ways.append((end, urgency * way_s))
        if far is not None and far[0] + cost <= bound and far[2].node != seat.node:
            way_s = network.transfer_s(moved, sharers=seat.transfers + 1)
            ways.append((far, urgency * way_s))
        for end, way_s in ways:
            whole = end[0] + way_s + cost
            if whole > bound:
                continue
            pair = (round(whole, 5), end[1], used, end[2], seat)
            if best is None or pair[:3] < best[:3]:
                best = pair
                bound = min(bound, best[0] + TIE_S)
    return best


def _grouped(prefills: Sequence[_P]) -> tuple[dict[str, _P], dict[str, _P]]:
    """The best prefill end of each KV format with a connector, and those that may be local."""
    overall: dict[str, _P] = {}
    itself: dict[str, _P] = {}
    group, best, linked = "", None, False
    for end in prefills:
        seat = end[2]
        if seat.role is Role.BOTH:
            itself[seat.key] = end
        if seat.kv_key != group:
            group, best = seat.kv_key, overall.get(seat.kv_key)
            linked = seat.kv.connector not in NO_CONNECTOR
        if linked and (best is None or (end[0] <= best[0] + TIE_S and _before(end, best))):
            best = overall[group] = end
    return overall, itself


def _best_at(prefills: Sequence[_P], node: str, group: str) -> _P | None:
    """The best prefill end of a KV format on a node."""
    best: _P | None = None
    for end in prefills:
        seat = end[2]
        if seat.node == node and seat.kv_key == group and (best is None or _before(end, best)):
            best = end
    return best


def takes(ask: Ask, seat: Seat, policy: PairPolicy) -> bool:
    """Whether a decode worker takes it within every hard constraint and the TPOT bound."""
    return bool(_decode_terms(ask, [seat], policy))


def _before(one: _P, other: _P) -> bool:
    """Cheaper, or as cheap (to 10 µs) and used less recently."""
    if abs(one[0] - other[0]) <= 1e-5:
        return one[1] < other[1]
    return one[0] < other[0]


def _hold(
    ask: Ask,
    best: _Pair,
    busy: Sequence[_P],
    ends: Sequence[_D],
    policy: PairPolicy,
) -> Wait | None:
    """Wait for a busy prefill worker, if it is worth it and patience lasts."""
    if ask.waited_s >= policy.locality_patience_s:
        return None
    below = best[0] - policy.locality_margin_s
    if min(b[0] for b in busy) + min(e[0] for e in ends) > below + TIE_S:
        return None
    wished = _cheapest(ask, busy, ends, policy, below)
    if wished is None or wished[0] + policy.locality_margin_s >= best[0]:
        return None
    queue_s = next(b[3] for b in busy if b[2] is wished[3])
    again_in_s = min(queue_s - policy.prefill_ahead_s, policy.locality_patience_s - ask.waited_s)
    return Wait(f"{wished[3].worker_id} is busy and still better", "locality", again_in_s)


def _chosen(ask: Ask, best: _Pair, policy: PairPolicy, now_s: float) -> Chosen:
    prefill, decode = best[3], best[4]
    return Chosen(
        prefill=prefill,
        decode=decode,
        terms=pair_terms(ask, prefill, decode, policy, now_s=now_s),
        prefill_cached=min(ask.cached_tokens.get(prefill.key, 0), ask.isl - 1),
        decode_cached=min(ask.cached_tokens.get(decode.key, 0), ask.isl),
        prefill_blocks=0 if prefill is decode else -(-ask.isl // prefill.block_size),
        decode_blocks=-(-(ask.isl + ask.output_reserved) // decode.block_size),
    )
