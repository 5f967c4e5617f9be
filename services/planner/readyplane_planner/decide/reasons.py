"""Why a target is what it is, in sentences with their numbers, the weightiest first.

Every change of a target carries a reason of its own pool: what the pool needs, of what, and what it
has. `steady` is said only when nothing changes. Owns the wording and the order; the rules that spoke
are handed in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from readyplane_planner.decide.fast import TURNED
from readyplane_planner.decide.values import POOLS, Plan, PoolDecision, Reason
from readyplane_planner.guard import Limits, PoolMemory, hold_down_s
from readyplane_planner.optimise import Need, Proposal
from readyplane_planner.signals import Observation

CODES = {
    "demand": "demand",
    "backlog": "queue",
    "sequences": "sequences",
    "idle": "demand",
}
# What weighs more comes first; what is not listed stands between the rules and the facts.
WEIGHTY = (
    "dead_end",
    "paused",
    "floor",
    "ceiling",
    "budget",
    "optimiser_failed",
    "queue_wait",
    "hold",
    "partial_data",
)
RULES = (
    "slo_infeasible",
    "prefill_at_max",
    "decode_at_max",
    "prefill_capped_by_decode",
    "max_step",
    "gap_limit",
    "backoff",
    "hold_turn",
    "hold_headroom",
    "cooldown_up",
    "backlog",
    "hold_idle",
    "cooldown_down",
)
FACTS = (
    "unpairable",
    "start_failed",
    "refused",
    "overdue",
    "drift",
    "idle",
    "bad_value",
    "source_silent",
    "actual_unknown",
    "profile_unmeasured",
)
PLENTY = 1000.0


def explained(
    said: Sequence[Reason],
    pools: Sequence[PoolDecision],
    plan: Plan,
    proposal: Proposal | None,
    observation: Observation,
    guards: Sequence[PoolMemory],
    limits: Sequence[Limits],
    ordered: Sequence[int],
    *,
    now_s: float,
) -> tuple[Reason, ...]:
    """All reasons of a decision in order; never empty.

    Args:
        said: what the rules said. guards: before this decision. limits: with measured times.
        ordered: workers. All three by pool.
    """
    first: list[Reason] = []
    for place, name in enumerate(POOLS):
        pool = pools[place]
        need = None
        if proposal is not None:
            need = proposal.need_p if name == "prefill" else proposal.need_d
        teller = _Teller(name, pool, plan, observation, need)
        mine = [r for r in said if r.pool == name]
        if pool.target > pool.before:
            first.extend(teller.grows(mine))
        elif pool.target < pool.before:
            first.extend(teller.shrinks(mine, plan, guards[place], limits[place], now_s))
        elif ordered[place] and not any(r.code == "rollout" for r in mine):
            first.append(teller.replaces(ordered[place], mine))
    ranked = sorted(said, key=lambda r: _rank(r.code))
    every = tuple(dict.fromkeys((*first, *ranked)))
    return every or (Reason("steady", "targets fit the demand"),)


def _rank(code: str) -> int:
    for rank, codes in ((0, WEIGHTY), (1, RULES), (3, FACTS)):
        if code in codes:
            return rank
    return 2


class _Teller:
    """Sentences about one pool."""

    def __init__(
        self,
        name: str,
        pool: PoolDecision,
        plan: Plan,
        observation: Observation,
        need: Need | None,
    ) -> None:
        self._name, self._pool, self._plan = name, pool, plan
        self._observation, self._need = observation, need
        self._short = "P" if name == "prefill" else "D"
        # Of several classes: what is needed is told in workers of one of them.
        several = plan.pool(name).classes
        self._unit = f" of {plan.pool(name).worker_class}" if several else ""

    def grows(self, mine: Sequence[Reason]) -> list[Reason]:
        """Why the target rises: what is needed, else the floor or whatever rule lifted it."""
        need, pool = self._need, self._pool
        grows = need is not None and need.workers > pool.before
        if self._unit and pool.wanted is not None:
            grows = pool.wanted > pool.before
        if need is not None and grows:
            return [self._reason(CODES[need.why], self._needs(need))]
        lifted = [r for r in mine if r.code in WEIGHTY]
        if lifted:
            return sorted(lifted, key=lambda r: r.code != "floor")
        text = f"{self._short} needs {pool.wanted} workers; {self._has()}"
        return [self._reason("demand", text)]

    def shrinks(
        self,
        mine: Sequence[Reason],
        plan: Plan,
        guard: PoolMemory,
        limits: Limits,
        now_s: float,
    ) -> list[Reason]:
        """Why the target falls: surplus that lasted, a lower ceiling, or workers that were lost."""
        pool, need = self._pool, self._need
        ceiling = [r for r in mine if r.code == "ceiling"]
        if ceiling:
            return ceiling
        if pool.counts.live <= pool.target:
            return self._fewer(mine)
        since_s = guard.surplus_since_s
        lasted = "" if since_s is None else f" for {now_s - since_s:.1f} s"
        asked = f" ({hold_down_s(guard, limits, now_s):.1f} s are asked for)"
        if need is None:
            return [self._reason("surplus", f"{self._short} needs {pool.keep} workers{lasted}")]
        of = f"workers{self._unit}, {pool.before} are there," if self._unit else ""
        text = (
            f"{self._short} needs {_number(need.workers)} {of or f'of {pool.before} workers,'} "
            f"{_number(need.keep)} with the band of {plan.band:.0%},{lasted}{asked}: {self._work(need)}"
        )
        return [self._reason("surplus", text)]

    def _fewer(self, mine: Sequence[Reason]) -> list[Reason]:
        """Fewer are there, and they are enough: who was turned by hand is not lost."""
        pool, turned = self._pool, [r for r in mine if r.code == TURNED]
        gone = pool.before - pool.counts.live
        lost = max(0, gone - len(turned))
        found = []
        if turned:
            text = f"{'; '.join(r.text for r in turned)}; {self._enough()}"
            found.append(self._reason(TURNED, text))
        if lost or not turned:
            text = f"{self._short} lost {lost} of {pool.before} workers; {self._enough()}"
            found.append(self._reason("lost", text))
        return found

    def replaces(self, count: int, mine: Sequence[Reason]) -> Reason:
        """Why workers are ordered though the target stays."""
        turned = "; ".join(r.text for r in mine if r.code == TURNED)
        live, target = self._pool.counts.live, self._pool.target
        what = f"{live} of {target} {self._short} workers are ready or on their way"
        why = f"in its place ({turned})" if turned else "for what was lost"
        return self._reason("replace", f"{what}: {count} ordered {why}")

    def _enough(self) -> str:
        if self._need is None:
            return f"{self._pool.counts.live} are left"
        return f"the other {self._pool.counts.live} are enough: {self._needs(self._need)}"

    def _needs(self, need: Need) -> str:
        lead = f"{self._short} needs {_number(need.workers)} workers{self._unit}"
        return f"{lead}: {self._work(need)}; {self._has()}"

    def _work(self, need: Need) -> str:
        """Demand, queue and what one worker does."""
        plan, made = self._plan, self._pool.forecast
        quantile = f"P{plan.knobs.quantile * 100:.0f} of the next {made.horizon_s:.1f} s"
        parts = [f"{need.tokens_per_s:,.0f} tokens/s expected ({quantile} + {plan.headroom:.0%})"]
        parts[0] += f", {need.risk:.1%} may be late"
        if self._name == "prefill":
            queue = self._observation.queue.get()
            return f"{parts[0]} + {queue:,.0f} queued, {need.rate:,.0f} tokens/s a worker"
        parts.append(f"{need.rate:,.0f} tokens/s a worker at TPOT {plan.tpot_s:g} s")
        return ", ".join(parts)

    def _has(self) -> str:
        """What is there, what comes when, and the load."""
        pool = self._pool
        parts = [f"{pool.counts.ready} ready"]
        if pool.etas_s:
            first = "" if len(pool.etas_s) == 1 else ", the first"
            parts.append(f"{len(pool.etas_s)} arriving{first} in {pool.etas_s[0]:.1f} s")
        text = ", ".join(parts)
        if pool.load.value is not None:
            text += f"; Load_{self._short} {pool.load.value:.1f}"
        return text

    def _reason(self, code: str, text: str) -> Reason:
        return Reason(code, text, self._name)


def _number(workers: float) -> str:
    # Rounded up, as the target is: "needs 3.0" must not explain a fourth.
    return (
        f"{math.ceil(workers * 10.0 - 0.2) / 10.0:.1f}"
        if workers < PLENTY
        else "more than any number of"
    )


def unknown_text(observation: Observation, *, seen_before: bool) -> str:
    """Which signals are not known and why, those of one cause in one clause; empty for none.

    Args:
        seen_before: whether there ever was a request of this model.
    """
    by_cause: dict[str, list[str]] = {}
    signals = observation.signals()
    for name in observation.unknown():
        by_cause.setdefault(signals[name].why or str(signals[name].kind), []).append(name)
    clauses = []
    for cause, names in by_cause.items():
        why = cause
        if "without this model" in cause and not seen_before:
            why = "no request has been seen yet"
        said = ", ".join(name.replace("_", " ") for name in names)
        clauses.append(f"{why}: {said} unknown")
    return "; ".join(clauses)
