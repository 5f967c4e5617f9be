"""The same judgement as `decide`, spelt out pair by pair for a person (R19.1).

Looks at every pair, so it is for questions and dry runs, not for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from readyplane.core.identity import NO_CONNECTOR, compatible
from readyplane_router.pair.cost import pair_terms
from readyplane_router.pair.ends import ahead_max_s, holding_ends, prefill_ends, takes
from readyplane_router.pair.seat import Seat
from readyplane_router.pair.values import Ask, PairPolicy, Terms


def explain(
    ask: Ask,
    prefills: Sequence[Seat],
    decodes: Sequence[Seat],
    policy: PairPolicy,
    *,
    now_s: float,
    top: int = 5,
) -> dict[str, Any]:
    """The same judgement spelt out: best pairs with their terms, and who is out and why."""
    pairs: list[tuple[float, Seat, Seat]] = []
    excluded: dict[str, str] = {}
    p_fit = _explain_stage(ask, prefills, policy, excluded, stage="prefill", now_s=now_s)
    d_fit = _explain_stage(ask, decodes, policy, excluded, stage="decode", now_s=now_s)
    alone = holding_ends(ask, d_fit, policy, now_s)
    pairs += [
        (pair_terms(ask, d, d, policy, now_s=now_s).cost_s, d, d) for d in d_fit if d.key in alone
    ]
    for p in p_fit:
        for d in d_fit:
            differing = [] if p is d else compatible(p.kv, d.kv)
            if differing:
                words = "; ".join(map(str, differing))
                excluded[f"{p.worker_id}+{d.worker_id}"] = f"KV formats differ: {words}"
            elif p is not d and p.key in ask.cut.get(d.key, ()):
                excluded[f"{p.worker_id}+{d.worker_id}"] = "circuit of their link open"
            elif p is not d and p.kv.connector in NO_CONNECTOR:
                excluded[f"{p.worker_id}+{d.worker_id}"] = "no KV connector"
            else:
                pairs.append((pair_terms(ask, p, d, policy, now_s=now_s).cost_s, p, d))
    pairs.sort(key=lambda pair: (round(pair[0], 5), pair[1].last_used, pair[2].last_used))
    return {
        "isl": ask.isl,
        "output_expected_tokens": round(ask.output_tokens, 1),
        "output_reserved_tokens": ask.output_reserved,
        "waited_s": round(ask.waited_s, 6),
        "slo": {"ttft_s": ask.slo.ttft_s, "tpot_s": ask.slo.tpot_s},
        "pairs": [
            {
                "prefill": p.worker_id,
                "decode": d.worker_id,
                "local": p is d,
                "skips_prefill": d.key in alone and p is d,
                "prefill_cached_tokens": ask.cached_tokens.get(p.key, 0),
                "decode_cached_tokens": ask.cached_tokens.get(d.key, 0),
                "terms": {f.name: round(getattr(terms, f.name), 6) for f in fields(Terms)},
            }
            for _cost, p, d in pairs[:top]
            for terms in (pair_terms(ask, p, d, policy, now_s=now_s),)
        ],
        "candidates": len(pairs),
        "excluded": excluded,
    }


def _explain_stage(
    ask: Ask,
    seats: Sequence[Seat],
    policy: PairPolicy,
    excluded: dict[str, str],
    *,
    stage: str,
    now_s: float,
) -> list[Seat]:
    fit = []
    ready, _ = prefill_ends(ask, seats, policy, now_s) if stage == "prefill" else ([], [])
    open_now = {end[2].key for end in ready}
    for seat in seats:
        why = ""
        wanted = ask.isl + (ask.output_reserved if stage == "decode" else 0)
        if seat.worker_id in ask.avoid:
            why = "to be avoided"
        elif seat.shut:
            why = seat.shut
        elif ask.isl + (ask.max_tokens or 1) > seat.max_model_len:
            why = f"takes {seat.max_model_len} tokens at most"
        elif seat.occupied() >= seat.sequences_cap:
            why = f"{seat.occupied()} of {seat.sequences_cap} sequences"
        elif wanted > seat.free_blocks() * seat.block_size:
            why = f"{seat.free_blocks()} KV blocks free"
        elif stage == "prefill" and seat.key not in open_now:
            most_s = ahead_max_s(ask, seat, policy) if open_now else policy.prefill_ahead_s
            why = f"{seat.remaining_s(now_s):.3f} s of prefill work promised, {most_s:g} s at most"
        elif stage == "decode" and not takes(ask, seat, policy):
            why = f"TPOT would pass {ask.slo.tpot_s * policy.tpot_admit:.4f} s"
        if why:
            excluded[f"{stage}:{seat.worker_id}"] = why
        else:
            fit.append(seat)
    return fit
