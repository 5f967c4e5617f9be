"""Admission and shedding as an order of the planner, while what is there does not reach (R21.1).

Owns when an order of admission is given, kept, changed and ended: while the demand of the coming
seconds exceeds what serves and arrives meanwhile, as the sizing's own forms of lateness have it. It
is the one action without a lead time, and the only one that costs the users something: it comes
first and ends first. With requests of one priority it never speaks. Handed to brain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from readyplane_planner import forecast
from readyplane_planner.capacity import Supply
from readyplane_planner.decide import demand, rations
from readyplane_planner.decide.outlook import Forecasts
from readyplane_planner.decide.rations import Cut, Rationed, RationMemory
from readyplane_planner.decide.values import Memory, Plan, Reason
from readyplane_planner.optimise import Problem
from readyplane_planner.optimise.needs import late_answers, late_prompts, slack_s
from readyplane_planner.signals import Observation

CALM_TICKS = 2.0
LOOSER_TICKS = 3.0
"""An order is loosened when it has stood for so many ticks, and ended when it has not been needed
for so many; it is tightened at once."""


@dataclass(frozen=True, slots=True)
class _Outlook:
    """Lateness over the coming seconds: by the share of the demand that is admitted, of each pool.

    Attributes:
        tokens: prompt tokens/s that are expected. short: pools that do not reach.
        wait_s: until the first worker that is on its way to one of those; None when none is.
    """

    late_p: Callable[[float], float]
    late_d: Callable[[float], float]
    tokens: float
    short: tuple[str, ...]
    wait_s: float | None

    def late(self, tokens: float, requests: float) -> float:
        """When these shares of the tokens and of the requests are admitted."""
        return max(self.late_p(tokens), self.late_d(requests))


def ordered(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    problem: Problem,
    model: demand.Needs,
    seen: Forecasts,
    said: list[Reason],
    *,
    now_s: float,
) -> tuple[Rationed | None, Memory]:
    """The order of admission of this tick, None for none, and the memory after it."""
    rules, mine = plan.degradation, memory.ration
    weights = mine.seen
    if observation.priorities or weights:
        grown = [(w.priority, w.requests, w.tokens) for w in observation.priorities]
        weights = rations.faded(weights, grown, observation.dt_s)
    if not weights and mine.priority is None:
        return None, replace(memory, ration=RationMemory()) if mine.seen else memory
    mine = replace(mine, seen=weights)
    if not (rules.shed and _known(observation)) or plan.paused or seen.supply_p.ready <= 0:
        # Not given again: what stands at the router runs out there.
        over = mine.renewed_s is None or now_s - mine.renewed_s > rules.ttl_s
        mine = RationMemory(seen=weights) if over else mine
        return None, replace(memory, ration=mine)
    looks = _outlook(observation, plan, memory, problem, model, seen)
    made, mine = _turn(looks, plan, mine, said, now_s=now_s)
    return made, replace(memory, ration=mine)


def _known(observation: Observation) -> bool:
    needed = (observation.arrivals, observation.prefill_work, observation.queue)
    return observation.fleet_known and all(s.known for s in needed) and (observation.decoding.known)


def _turn(
    looks: _Outlook, plan: Plan, mine: RationMemory, said: list[Reason], *, now_s: float
) -> tuple[Rationed | None, RationMemory]:
    rules = plan.degradation
    without = looks.late(1.0, 1.0)
    stands = mine.priority is not None
    if not stands and without <= rules.late_max:
        return None, mine
    goal = rules.late_max / 2.0
    if stands and without <= goal:
        calm_s = now_s if mine.calm_since_s is None else mine.calm_since_s
        mine = replace(mine, calm_since_s=calm_s)
        if now_s - calm_s >= CALM_TICKS * plan.tick_s:
            return _ended(mine, said, without, now_s=now_s)
    else:
        mine = replace(mine, calm_since_s=None)
    wanted = rations.cut(
        mine.seen,
        tokens=rations.excess(looks.late_p, goal=goal),
        requests=rations.excess(looks.late_d, goal=goal),
        protect_from=rules.protect_from,
    )
    if not stands and wanted is None:
        return None, mine
    stood_s = now_s - (mine.turned_s if mine.turned_s is not None else now_s)
    keeps = stands and (
        wanted is None
        or rations.alike(wanted, mine)
        or (not rations.harder(wanted, mine) and stood_s < LOOSER_TICKS * plan.tick_s)
    )
    turned = not keeps
    if turned and wanted is not None:
        begun_s = mine.begun_s if stands and mine.begun_s is not None else now_s
        mine = replace(
            mine,
            priority=wanted.priority,
            admit_share=wanted.admit_share,
            begun_s=begun_s,
            turned_s=now_s,
        )
    mine = replace(mine, renewed_s=now_s)
    return _said(looks, plan, mine, without, said, now_s=now_s, turned=turned), mine


def _said(
    looks: _Outlook,
    plan: Plan,
    mine: RationMemory,
    without: float,
    said: list[Reason],
    *,
    now_s: float,
    turned: bool,
) -> Rationed:
    gone = _of(mine)
    then = looks.late(1.0 - gone.tokens, 1.0 - gone.requests)
    wait_s = looks.wait_s
    if wait_s is None:
        until = "nothing is on its way"
    else:
        until = f"the next worker is expected in {wait_s:.0f} s"
    short = " and ".join(looks.short) or "both pools"
    why = (
        f"{without:.0%} of the requests would be late with {short} as it is and arrives; {until}; "
        f"admitted so, {then:.0%} are"
    )
    whom = f"requests below priority {gone.priority} are refused"
    if gone.admit_share > 0:
        whom += f", of that priority {gone.admit_share:.0%} of the work is admitted"
    else:
        whom = f"requests up to priority {gone.priority} are refused"
    said.append(Reason("shedding", f"{whom}: {why}"))
    return Rationed(
        priority=gone.priority,
        admit_share=gone.admit_share,
        ttl_s=plan.degradation.ttl_s,
        retry_after_s=plan.degradation.ttl_s if wait_s is None else max(1.0, wait_s),
        why=why,
        late_without=without,
        late_with=then,
        shed_tokens=gone.tokens * looks.tokens,
        begun_ago_s=now_s - (mine.begun_s if mine.begun_s is not None else now_s),
        turned=turned,
    )


def _ended(
    mine: RationMemory, said: list[Reason], without: float, *, now_s: float
) -> tuple[Rationed, RationMemory]:
    gone, lasted_s = _of(mine), now_s - (mine.begun_s if mine.begun_s is not None else now_s)
    why = f"everybody is admitted again after {lasted_s:.0f} s: {without:.0%} would be late"
    said.append(Reason("shedding_ended", why))
    made = Rationed(
        gone.priority, 1.0, 0.0, 0.0, why, without, without, 0.0, begun_ago_s=lasted_s, turned=True
    )
    return made, RationMemory(seen=mine.seen)


def _of(mine: RationMemory) -> Cut:
    """The order that stands, with the shares of today's arrivals that it refuses."""
    priority = mine.priority if mine.priority is not None else 0
    all_tokens = max(1e-9, sum(w.tokens for w in mine.seen))
    all_requests = max(1e-9, sum(w.requests for w in mine.seen))
    tokens = requests = 0.0
    for weight in mine.seen[:-1]:
        if weight.priority <= priority:
            part = 1.0 if weight.priority < priority else 1.0 - mine.admit_share
            tokens += part * weight.tokens / all_tokens
            requests += part * weight.requests / all_requests
    return Cut(priority, mine.admit_share, tokens, requests)


def _outlook(
    observation: Observation,
    plan: Plan,
    memory: Memory,
    problem: Problem,
    model: demand.Needs,
    seen: Forecasts,
) -> _Outlook:
    within_s = plan.degradation.ttl_s
    cv2 = observation.lengths.isl_cv2
    spans_s = demand.SURGE_SPANS_S
    near_p = demand.surged(
        forecast.predict(memory.work_p, horizon_s=within_s, knobs=plan.knobs),
        memory.work_p,
        tokens=model.uncached,
        cv2=cv2,
        spans_s=spans_s,
    ).level
    near_d = demand.surged(
        forecast.predict(memory.work_d, horizon_s=within_s, knobs=plan.knobs),
        memory.work_d,
        tokens=model.osl,
        cv2=0.0,
        spans_s=spans_s[1:],
    ).level
    workers_p, workers_d = _mean(seen.supply_p, within_s), _mean(seen.supply_d, within_s)
    of_p, of_d = late_prompts(problem), late_answers(problem)
    # What waits beyond what can wait in time comes on top of what arrives.
    room = workers_p * (problem.prefill.tokens + problem.prefill.rate * slack_s(problem))
    waiting = max(0.0, observation.queue.get() - room) / within_s

    def late_p(admitted: float) -> float:
        return of_p(workers_p, ((near_p * admitted + waiting, 1.0),))

    def late_d(admitted: float) -> float:
        return of_d(workers_d, ((near_d * admitted, 1.0),)) if workers_d > 0 else 0.0

    goal = plan.degradation.late_max / 2.0
    short = tuple(
        name for name, late in (("prefill", late_p), ("decode", late_d)) if late(1.0) > goal
    )
    waits = [
        eta
        for name, supply in (("prefill", seen.supply_p), ("decode", seen.supply_d))
        if name in short
        for eta in supply.arrivals_s
    ]
    return _Outlook(late_p, late_d, near_p, short, min(waits) if waits else None)


def _mean(supply: Supply, within_s: float) -> float:
    """Workers that serve over that time, on average."""
    return sum(count * lasts_s for count, lasts_s in supply.steps(within_s)) / within_s
