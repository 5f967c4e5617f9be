"""The cheapest of all pairs, exactly, without looking at each.

For one D the best P is the best of its KV format that sends as much as it does, or the best of those
on D's own node; so P + D ends are looked at, not P x D. How much a P sends matters because its link
is shared, too; few figures occur. A D that some P cannot reach is looked at with every P.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import itemgetter

from readyplane.core.identity import NO_CONNECTOR
from readyplane.core.profile import LinkClass
from readyplane.core.worker import Role
from readyplane_router.pair.cost import urgency_of
from readyplane_router.pair.ends import DecodeEnd, PrefillEnd
from readyplane_router.pair.seat import Seat
from readyplane_router.pair.values import Ask, PairPolicy

_COST = itemgetter(0)
TIE_S = 2e-5  # costs are compared to 10 µs: what is dearer by more than this cannot win

Pair = tuple[float, int, int, Seat, Seat]
"""(cost, last used of P, last used of D, P, D)."""


def cheapest(  # noqa: C901, PLR0912 - one pass over a stage, with nothing called that need not be
    ask: Ask,
    prefills: Sequence[PrefillEnd],
    decodes: Sequence[DecodeEnd],
    policy: PairPolicy,
    *,
    alone: Mapping[str, PrefillEnd],
    below: float = math.inf,
) -> Pair | None:
    """Exact argmin over all compatible pairs, ties to the least recently used.

    Args:
        alone: by seat key, decode workers that may serve it without another.
        below: only pairs that cost less need to be found.
    """
    overall, itself = _grouped(prefills)
    if alone:
        itself = {**alone, **itself}
    least = min(map(_COST, (*prefills, *itself.values())), default=math.inf)
    nodes = {end[2].node for end in prefills}
    near: dict[tuple[str, str], Sequence[PrefillEnd]] = {}
    urgency, cut = urgency_of(ask, policy), ask.cut
    local, network = policy.local_link, policy.network_link
    best: Pair | None = None
    bound = below + TIE_S
    if len(overall) == 1 and not cut and not itself:
        ((group, ends),) = overall.items()
        if len(ends) == 1:  # one prefill end is the best for most: those need no more looks
            best, decodes = _with_one(ends[0], group, decodes, nodes, urgency, network, bound)
            bound = bound if best is None else min(bound, best[0] + TIE_S)
    # Seats of an even fleet follow each other with the same way: it is reckoned once.
    way, way_s = (False, -1.0, 0), 0.0
    for cost, used, seat, moved in decodes:
        if least + cost > bound:
            continue
        group = seat.kv_key
        if cut and seat.key in cut:
            ends = _unless_cut(prefills, group, cut[seat.key])
        else:
            ends = overall.get(group, ())
            if seat.node in nodes and seat.kv.connector not in NO_CONNECTOR:
                place = (seat.node, group)
                if place not in near:
                    near[place] = _best_at(prefills, *place)
                ends = (*near[place], *ends)
        for end in ends:
            prefill = end[2]
            if end[0] + cost > bound or prefill is seat:
                continue
            sending, coming = prefill.sending, seat.transfers
            sharers = (sending if sending > coming else coming) + 1
            this = (prefill.node == seat.node, moved, sharers)
            if this != way:
                link = local if this[0] else network
                way, way_s = this, urgency * link.transfer_s(moved, sharers=sharers)
            whole = end[0] + way_s + cost
            if whole > bound:
                continue
            whole = round(whole, 5)
            if (
                best is None
                or whole < best[0]
                or (whole == best[0] and (end[1], used) < (best[1], best[2]))
            ):
                best = (whole, end[1], used, prefill, seat)
                bound = min(bound, whole + TIE_S)
        if itself and seat.key in itself:
            end = itself[seat.key]
            whole = end[0] + cost
            if whole <= bound:
                pair = (round(whole, 5), end[1], used, end[2], seat)
                if best is None or pair[:3] < best[:3]:
                    best = pair
                    bound = min(bound, pair[0] + TIE_S)
    return best


def _with_one(
    end: PrefillEnd,
    group: str,
    decodes: Sequence[DecodeEnd],
    nodes: set[str],
    urgency: float,
    network: LinkClass,
    bound: float,
) -> tuple[Pair | None, list[DecodeEnd]]:
    """The cheapest of the pairs of one prefill end over the network, and who has other ways, too."""
    rest: list[DecodeEnd] = []
    start, prefill, sending = end[0], end[2], end[2].sending
    best: DecodeEnd | None = None
    least = math.inf
    last_moved, last_coming, way_s = -1.0, -1, 0.0
    for decode in decodes:
        cost, used, seat, moved = decode
        if start + cost > bound:
            continue
        if seat.kv_key != group or seat.node in nodes:
            rest.append(decode)
            continue
        coming = seat.transfers
        if coming != last_coming or moved != last_moved:
            last_coming, last_moved = coming, moved
            sharers = (sending if sending > coming else coming) + 1
            way_s = urgency * network.transfer_s(moved, sharers=sharers)
        whole = start + way_s + cost
        if whole > bound:
            continue
        whole = round(whole, 5)
        if whole < least or (whole == least and (best is None or used < best[1])):
            best, least = decode, whole
            bound = min(bound, whole + TIE_S)
    return (None if best is None else (least, end[1], best[1], prefill, best[2])), rest


def _unless_cut(
    prefills: Sequence[PrefillEnd], group: str, cut: frozenset[str]
) -> Sequence[PrefillEnd]:
    return [
        end
        for end in prefills
        if end[2].kv_key == group
        and end[2].kv.connector not in NO_CONNECTOR
        and end[2].key not in cut
    ]


def _grouped(
    prefills: Sequence[PrefillEnd],
) -> tuple[dict[str, Sequence[PrefillEnd]], dict[str, PrefillEnd]]:
    """The best prefill ends of each KV format with a connector, and those that may be local."""
    formats: dict[str, dict[int, PrefillEnd]] = {}
    itself: dict[str, PrefillEnd] = {}
    group, linked = "", False
    bests: dict[int, PrefillEnd] = {}
    for end in prefills:
        seat = end[2]
        if seat.role is Role.BOTH:
            itself[seat.key] = end
        if seat.kv_key != group:
            group = seat.kv_key
            linked = seat.kv.connector not in NO_CONNECTOR
            if linked:
                bests = formats.setdefault(group, {})
        if linked:
            best = bests.get(seat.sending)
            if best is None or (end[0] <= best[0] + TIE_S and _before(end, best)):
                bests[seat.sending] = end
    return {name: _useful(found) for name, found in formats.items()}, itself


def _best_at(prefills: Sequence[PrefillEnd], node: str, group: str) -> Sequence[PrefillEnd]:
    """The best prefill ends of a KV format on a node."""
    bests: dict[int, PrefillEnd] = {}
    for end in prefills:
        seat = end[2]
        if seat.node == node and seat.kv_key == group:
            best = bests.get(seat.sending)
            if best is None or _before(end, best):
                bests[seat.sending] = end
    return _useful(bests)


def _useful(bests: Mapping[int, PrefillEnd]) -> Sequence[PrefillEnd]:
    """Those that send more are of use only where they are cheaper."""
    out: list[PrefillEnd] = []
    least = math.inf
    for sending in sorted(bests):
        if bests[sending][0] < least + TIE_S:
            out.append(bests[sending])
            least = min(least, bests[sending][0])
    return out


def _before(one: PrefillEnd, other: PrefillEnd) -> bool:
    """Cheaper, or as cheap (to 10 µs) and used less recently."""
    if abs(one[0] - other[0]) <= 1e-5:
        return one[1] < other[1]
    return one[0] < other[0]
