"""The cost of one given pair, term by term, in predicted seconds.

The argmin in `readyplane_router.pair` evaluates the same terms without building them.
"""

from __future__ import annotations

from readyplane.core.worker import Role
from readyplane_router.pair.seat import Seat
from readyplane_router.pair.values import Ask, PairPolicy, Terms


def urgency_of(ask: Ask, policy: PairPolicy) -> float:
    """Weight of a second of TTFT: it grows while the request waits."""
    target = ask.slo.ttft_s
    return 1.0 + policy.urgency * (min(1.0, ask.waited_s / target) if target > 0 else 1.0)


def pair_terms(ask: Ask, prefill: Seat, decode: Seat, policy: PairPolicy, *, now_s: float) -> Terms:
    """The cost of one given pair, term by term; constraints are not looked at."""
    cached = min(ask.cached_tokens.get(prefill.key, 0), ask.isl - 1)
    own_s = prefill.prefill_s(ask.isl, cached)
    queue_s = prefill.remaining_s(now_s) + ask.wished.get(prefill.key, 0.0)
    transfer_s = 0.0
    times = decode.times
    if prefill is not decode:
        link = policy.local_link if prefill.node == decode.node else policy.network_link
        moved = max(0, ask.isl - ask.cached_tokens.get(decode.key, 0)) * times.kv_bytes_per_token
        sharers = max(prefill.sending, decode.transfers) + 1
        transfer_s = link.transfer_s(moved, sharers=sharers)
    others, expected = decode.occupied(), ask.output_tokens
    context = ask.isl + expected / 2.0
    held = decode.kv_tokens + (decode.other_blocks + decode.foreign_blocks) * decode.block_size
    slower = decode.decode_factor
    base_s = times.a + times.b * (others + 1)
    first_s = (base_s + times.c * (held + ask.isl)) * slower
    if decode.works:
        first_s += min(decode.work_s, times.prefill_s(times.max_batch_tokens))
    tpot_s = (base_s + times.c * (held + context)) * slower
    slowdown_s = (times.b + times.c * context) * slower * others * expected
    stall_s = own_s * prefill.decoding
    # Who serves it alone without being there for prompts, or is lent, is in nobody's way.
    crowds = prefill.role.serves(Role.PREFILL) and not prefill.lent
    crowding_s = own_s * ask.behind if crowds else 0.0
    ttft_s = queue_s + own_s + transfer_s + first_s
    cost_s = (
        urgency_of(ask, policy) * ttft_s
        + policy.decode_weight * expected * tpot_s
        + policy.slowdown_weight * (slowdown_s + stall_s + crowding_s)
    )
    return Terms(
        queue_s,
        own_s,
        transfer_s,
        first_s,
        tpot_s,
        expected * tpot_s,
        slowdown_s,
        stall_s,
        crowding_s,
        ttft_s,
        cost_s,
    )
