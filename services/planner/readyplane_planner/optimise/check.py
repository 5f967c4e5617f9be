"""What an optimiser answered, before anybody believes it: whole, in bounds, within the budget, a pair.

Owns the outer constraints that a foreign (learned) optimiser cannot get past (R23.2). An answer that
is no answer is refused with the field named, and the caller falls back. An answer that is one is cut
to what may be, each cut with its rule: nothing here trusts what was computed elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from readyplane.core.errors import Refused
from readyplane_planner.capacity import KV_FILL_MAX
from readyplane_planner.optimise.needs import decode_need, prefill_need
from readyplane_planner.optimise.size import absorbed, reachable, within_budget
from readyplane_planner.optimise.values import Bounds, Problem, Proposal

REASONS_MAX = 16
TEXT_MAX = 400
WORKERS_MAX = 10**6
Said = list[tuple[str, str, str]]


def checked(answer: object, problem: Problem) -> Proposal:
    """A foreign optimiser's answer as far as it may be followed.

    `p_keep` and `d_keep` are never below what the demand needs without headroom by the measured
    profiles: a foreign optimiser may keep more, and cannot give up what is in use.

    Raises:
        Refused: it is no proposal, or its numbers are none; names each field.
    """
    proposal = _whole(answer)
    said: Said = list(proposal.reasons)
    problem, infeasible = reachable(problem, said)
    p = _cut("prefill", proposal.p, problem.bounds_p, said)
    d = _cut("decode", proposal.d, problem.bounds_d, said)
    p, d = _paired(problem, p, d, said)
    need_p, need_d = prefill_need(problem), decode_need(problem)
    p, stranded = absorbed(problem, p, d, said)
    p, d = within_budget(problem, p, d, said)
    floor_p, floor_d = (
        _in_use(need_p.bare, problem.bounds_p),
        _in_use(need_d.bare, problem.bounds_d),
    )
    p_keep = _kept("prefill", proposal.p_keep, max(p, floor_p), problem.bounds_p, said)
    d_keep = _kept("decode", proposal.d_keep, max(d, floor_d), problem.bounds_d, said)
    return replace(
        proposal,
        p=p,
        d=d,
        p_keep=p_keep,
        d_keep=d_keep,
        reasons=tuple(said),
        infeasible=infeasible,
        stranded_p=stranded,
        p_now=None if proposal.p_now is None else max(0, min(p, proposal.p_now)),
        d_now=None if proposal.d_now is None else max(0, min(d, proposal.d_now)),
        need_p=need_p,
        need_d=need_d,
        candidates=(),
    )


def _whole(answer: object) -> Proposal:
    """The answer's numbers, each a count; and texts of a bounded length."""
    if type(answer) is not Proposal:
        raise Refused("proposal", [f"it is a {type(answer).__name__}"], "return a Proposal")
    wrong = [
        f"{name}={_shown(getattr(answer, name))}"
        for name in ("p", "d", "p_keep", "d_keep", "p_now", "d_now")
        if not _is_count(getattr(answer, name), may_miss=name.endswith("_now"))
    ]
    if wrong:
        raise Refused("proposal", wrong, "every number of workers is an int from 0 on")
    # Annotations bind nobody at run time: whatever stands there is looked at.
    given: Any = answer.reasons
    reasons: tuple[Any, ...] = given if isinstance(given, tuple) else ()
    plain = tuple(
        (r[0][:TEXT_MAX], r[1][:TEXT_MAX], r[2] if r[2] in {"prefill", "decode"} else "")
        for r in reasons[:REASONS_MAX]
        if isinstance(r, tuple) and len(r) == 3 and all(isinstance(part, str) for part in r)
    )
    return Proposal(
        answer.p,
        answer.d,
        answer.p_keep,
        answer.d_keep,
        plain,
        p_now=answer.p_now,
        d_now=answer.d_now,
    )


def _is_count(value: object, *, may_miss: bool) -> bool:
    """A bool is an int to Python, and no number of workers."""
    if value is None:
        return may_miss
    return type(value) is int and 0 <= value <= WORKERS_MAX


def _shown(value: object) -> str:
    try:
        return repr(value)[:60]
    except Exception:  # noqa: BLE001 - whatever it is, it has a type
        return type(value).__name__


def _cut(pool: str, wanted: int, bounds: Bounds, said: Said) -> int:
    held = max(bounds.low, min(bounds.high, wanted))
    if held != wanted:
        text = f"proposed {wanted}, the policy allows {bounds.low} to {bounds.high}"
        said.append(("proposal_bounds", text, pool))
    return held


def _paired(problem: Problem, p: int, d: int, said: Said) -> tuple[int, int]:
    """Half a pair serves nobody; and what runs in D has to be held (R21.2)."""
    held = problem.demand_d.sequences * problem.decode.context
    room = KV_FILL_MAX * problem.decode.kv_tokens
    least = math.ceil(held / room - 1e-9) if room > 0 and held > 0 else 0
    if p > 0 or problem.demand_p.level > 0:
        least = max(1, least)
    least = min(least, problem.bounds_d.high)
    if d < least:
        said.append(
            ("proposal_pair", f"proposed {d} D, what runs and comes needs {least}", "decode")
        )
        d = least
    if p == 0 and d > 0 and problem.demand_p.level > 0 and problem.bounds_p.high > 0:
        said.append(("proposal_pair", "proposed no P while prompts come", "prefill"))
        p = 1
    return p, d


def _in_use(workers: float, bounds: Bounds) -> int:
    return max(bounds.low, min(bounds.high, math.ceil(workers - 0.02)))


def _kept(pool: str, keep: int, floor: int, bounds: Bounds, said: Said) -> int:
    if keep < floor:
        text = f"proposed to keep {keep}, {floor} are in use or wanted"
        said.append(("proposal_shrink", text, pool))
    return min(max(keep, floor), max(bounds.high, floor))
