"""Why there is no pair: what is missing decides whether waiting makes sense.

Called only when the argmin found nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from readyplane.core.identity import NO_CONNECTOR, compatible
from readyplane_router.pair.seat import Seat
from readyplane_router.pair.values import Ask, PairPolicy, Shed, Wait


def why_not(
    ask: Ask,
    prefills: Sequence[Seat],
    decodes: Sequence[Seat],
    policy: PairPolicy,
    now_s: float,
    *,
    busy: bool,
) -> Wait | Shed:
    """The verdict on a request that no pair can take now: wait for something, or not at all."""
    for stage, seats in (("prefill", prefills), ("decode", decodes)):
        usable = [s for s in seats if s.worker_id not in ask.avoid]
        if not usable:
            more = " (all others are avoided)" if seats else ""
            return _wait_or_shed(ask, policy, f"no ready {stage} worker{more}", "empty")
        shut = [s for s in usable if s.shut]
        if len(shut) == len(usable):
            why = f"every {stage} worker is shut: {shut[0].worker_id} {shut[0].shut}"
            if all(s.shut.startswith("circuit") for s in shut):
                return Shed(why, "broken")
            return _wait_or_shed(ask, policy, why, "empty")
        longest = max(s.max_model_len for s in usable)
        if ask.isl + (ask.max_tokens or 1) > longest:
            return Shed(f"the {stage} workers take {longest} tokens at most", "too_long")
        room = max(s.kv_total_blocks * s.block_size for s in usable)
        wanted = ask.isl + (ask.output_reserved if stage == "decode" else 0)
        if wanted > room:
            return Shed(f"{wanted} KV tokens wanted, a {stage} worker holds {room}", "too_large")
    different = incompatibility(prefills, decodes, ask.avoid)
    if different:
        return Shed(different, "incompatible")
    if ask.cut and _all_cut(ask, prefills, decodes):
        return Shed("no link between open workers works: circuit open", "broken")
    again = [s.remaining_s(now_s) - policy.prefill_ahead_s for s in prefills if not s.shut]
    soon = [seconds for seconds in again if seconds > 0]
    if busy:
        why = "every prefill worker has enough work"
    else:
        why = "no worker has a free sequence and KV blocks within the TPOT target"
    return _wait_or_shed(ask, policy, why, "busy", again_in_s=min(soon) if busy and soon else None)


def _all_cut(ask: Ask, prefills: Sequence[Seat], decodes: Sequence[Seat]) -> bool:
    ps = {s.key for s in prefills if not s.shut and s.worker_id not in ask.avoid}
    ds = [s for s in decodes if not s.shut and s.worker_id not in ask.avoid]
    return all(d.key not in ps and ps <= ask.cut.get(d.key, frozenset()) for d in ds)


def wait_left_s(policy: PairPolicy, *, empty: bool, regime_s: float, waited_s: float) -> float:
    """Seconds that a request may still wait: what is left of its regime's bound, or of both.

    A fleet that empties and fills in turns begins the one bound or the other anew each time; both
    together are never passed.
    """
    bound_s = policy.empty_wait_max_s if empty else policy.wait_max_s
    in_all_s = policy.empty_wait_max_s + policy.wait_max_s
    return min(bound_s - regime_s, in_all_s - waited_s)


def _wait_or_shed(
    ask: Ask, policy: PairPolicy, why: str, regime: str, again_in_s: float | None = None
) -> Wait | Shed:
    left_s = wait_left_s(
        policy, empty=regime == "empty", regime_s=ask.regime_s, waited_s=ask.waited_s
    )
    if left_s <= 0.0:
        return Shed(
            f"{why}, for {ask.regime_s:.1f} s", "empty" if regime == "empty" else "overloaded"
        )
    return Wait(why, regime, left_s if again_in_s is None else min(left_s, again_in_s))


def incompatibility(
    prefills: Sequence[Seat], decodes: Sequence[Seat], avoid: frozenset[str] = frozenset()
) -> str:
    """Empty when some open pair fits; else the differing fields of a pair that comes closest."""
    closest: tuple[int, str] | None = None
    ps = {s.kv_key: s for s in prefills if not s.shut and s.worker_id not in avoid}
    ds = {s.kv_key: s for s in decodes if not s.shut and s.worker_id not in avoid}
    both = {s.key for s in prefills if not s.shut} & {s.key for s in decodes if not s.shut}
    if both or not ps or not ds:
        return ""
    for p in ps.values():
        for d in ds.values():
            differing = compatible(p.kv, d.kv)
            if not differing and p.kv.connector not in NO_CONNECTOR:
                return ""
            words = "; ".join(map(str, differing)) or "neither has a KV connector"
            if closest is None or len(differing) < closest[0]:
                closest = (len(differing), f"{p.worker_id} and {d.worker_id} differ: {words}")
    return closest[1] if closest else ""
