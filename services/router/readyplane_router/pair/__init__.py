"""The pairing brain: (request, view, policy) -> Chosen | Wait | Shed, with the cost explained.

Owns one joint cost over prefill x decode workers, in predicted seconds (R19.1):

    urgency * ttft + decode time of the request + slow-down of everybody else

    ttft = work promised to P and not yet done + own uncached prefill on P
         + KV of the tokens D does not hold, over the link P-D, shared with the other transfers there
         + one iteration of D

Everybody else is who decodes on D, who decodes on P, and who waits for a P: while some wait, each
second of prefill that a warm worker saves is saved for all of them.

Hard constraints come first: shut seats, model length, KV format, free blocks, sequences. Then P is
kept short of work (`prefill_ahead_s`): a request waits in the router, where it can still go to
capacity that arrives, rather than inside an engine, where it cannot.

The argmin is exact (`argmin`). A worker that serves both stages is a candidate with itself, without
transfer, and so is a D that holds every full block of the prompt: no P is needed then. `Seat` is a
mutable value that the service owns; nothing is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from readyplane_router.pair.argmin import TIE_S, Pair, cheapest
from readyplane_router.pair.cost import pair_terms
from readyplane_router.pair.ends import (
    DecodeEnd,
    PrefillEnd,
    decode_ends,
    holding_ends,
    prefill_ends,
    takes,
)
from readyplane_router.pair.lend import made_up_s
from readyplane_router.pair.seat import Seat, Times, kv_key, seat_key, times_of
from readyplane_router.pair.values import (
    LOCAL_LINK,
    NETWORK_LINK,
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
    "takes",
    "times_of",
]


_COST = itemgetter(0)


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
    ready, busy = prefill_ends(ask, prefills, policy, now_s)
    alone = holding_ends(ask, decodes, policy, now_s)
    # Where nobody may take the prompt now, it is only asked whether some D would.
    any_one = not (ready or alone)
    ends = decode_ends(ask, decodes, policy, any_one=any_one) if ready or busy or alone else []
    best = None
    if ends and not any_one:
        best = cheapest(ask, ready, ends, policy, alone=alone)
    if busy and best is not None:
        held = _hold(ask, best, busy, ends, policy)
        if held is not None:
            return held
    if best is not None:
        return _chosen(ask, best, policy, now_s)
    return why_not(ask, prefills, decodes, policy, now_s, busy=bool(busy and ends))


def _hold(
    ask: Ask,
    best: Pair,
    busy: Sequence[PrefillEnd],
    ends: Sequence[DecodeEnd],
    policy: PairPolicy,
) -> Wait | None:
    """Wait for a busy prefill worker, if it is worth it and patience lasts.

    Not for one that is lent and holds nothing of the prompt. It is cheap because those who wait for
    the prefill workers lose nothing by it; while one of these is free, nobody does, and a queue that
    waits for a decode worker beside idle prefill workers is late for ever.
    """
    held = ask.cached_tokens
    busy = [end for end in busy if not end[2].lent or held.get(end[2].key)]
    if not busy or ask.held_s >= policy.locality_patience_s or ask.regime_s >= policy.wait_max_s:
        return None
    below = best[0] - policy.locality_margin_s
    if min(map(_COST, busy)) + min(map(_COST, ends)) > below + TIE_S:
        return None
    wished = cheapest(ask, busy, ends, policy, alone={}, below=below)
    if wished is None or wished[0] + policy.locality_margin_s >= best[0]:
        return None
    queue_s = next(b[3] for b in busy if b[2] is wished[3])
    again_in_s = min(queue_s - policy.prefill_ahead_s, policy.locality_patience_s - ask.held_s)
    seat = wished[3]
    cached = min(ask.cached_tokens.get(seat.key, 0), ask.isl - 1)
    own_s = seat.prefill_s(ask.isl, cached)
    why = f"{seat.worker_id} is busy and still better"
    return Wait(why, "locality", max(0.0, again_in_s), wished=seat.key, work_s=own_s)


def _chosen(ask: Ask, best: Pair, policy: PairPolicy, now_s: float) -> Chosen:
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
