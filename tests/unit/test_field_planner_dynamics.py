"""Field reports of planner dynamics (B20 to B34), each as the row says; rows are cited by number.

The planner runs over the tiny fluid fleet of `planner_world`; where a row is about one rule, the rule
is asked directly. B22 (roll-outs) is in test_planner_rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from readyplane.core.errors import InvalidField
from readyplane.core.worker import Role, Worker
from readyplane_planner import guard
from readyplane_planner.decide import decide
from readyplane_planner.guard import Counts, Limits, PoolMemory, Trust
from readyplane_planner.optimise import Problem, Proposal
from tests.unit.planner_world import PROFILE, HandClock, Run, World, planner, policy

ISL, OVERHEAD_S = 1155.0, 0.05


def world(**changes: Any) -> World:
    return World(HandClock(), **changes)


def wants(run: Run, wanted: Callable[[Problem], Proposal]) -> None:
    """Let a fixed wish stand in for the optimiser."""
    run.service._brain = partial(decide, optimiser=wanted)


def fixed(p: int, d: int) -> Proposal:
    return Proposal(p, d, p, d)


def judged(
    wants_by_tick: list[tuple[int, int]],
    limits: Limits,
    *,
    live: int,
    every_s: float = 1.0,
) -> list[int]:
    """Targets of the guard for (wanted, keep) of each tick; what it grants is there at once."""
    memory, out = PoolMemory(desired=live), []
    for tick, (wanted, keep) in enumerate(wants_by_tick):
        now_s = 1000.0 + tick * every_s
        verdict, memory = guard.judge(
            wanted=wanted,
            keep=keep,
            counts=Counts(live, 0),
            memory=memory,
            limits=limits,
            trust=Trust(),
            paused=False,
            now_s=now_s,
        )
        memory = guard.took(memory, verdict, turn_s=0.0, now_s=now_s)
        live += verdict.grow - verdict.shrink
        out.append(live)
    return out


async def test_b20_one_order_while_its_workers_start() -> None:
    """T_ready 180 s, tick 10 s, need +2: exactly one order of 2; they count as arriving."""
    prior = {"p50_s": 180.0, "p90_s": 180.0, "p99_s": 180.0}
    w = world(t_ready_s=lambda _n: 180.0)
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    run = await planner(w, policy(tick_s=10.0, t_ready_prior=prior, min_ready_s=0.0))
    wants(run, lambda _p: fixed(3, 1))
    await run.step(170, tick_s=10.0)
    assert [len(d.orders) for d in run.decisions if d.orders] == [2]
    assert len(w.provisions) == 2
    last = run.decisions[-1].prefill
    assert (last.counts.pending, last.target, len(last.etas_s)) == (2, 3, 2)


async def test_b20_pending_expires_with_a_warning_and_need_is_looked_at_anew() -> None:
    """Beyond T_ready x k they count no more; ordered again only what is still wanted."""
    prior = {"p50_s": 60.0, "p90_s": 60.0, "p99_s": 60.0}
    w = world(hang=lambda _o: True)
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    run = await planner(w, policy(tick_s=10.0, t_ready_prior=prior, eta_bound_factor=1.5))
    wanted = [3]
    wants(run, lambda _p: fixed(wanted[0], 1))
    await run.step(80, tick_s=10.0)
    assert len(w.provisions) == 2
    await run.step(30, tick_s=10.0)  # the bound is 90 s
    assert "overdue" in run.codes(4)
    assert {o.worker_id for o in w.provisions[:2]} <= set(w.releases)
    again = len(w.provisions)
    wanted[0] = 1
    await run.step(200, tick_s=10.0)
    assert len(w.provisions) == again, "nobody is wanted any more"
    assert run.desired[-1][1] == 1


async def test_b23_no_shrink_before_the_old_backlog_is_gone() -> None:
    """100 requests wait at one of five workers: the average says idle, the backlog does not."""
    w = world()
    w.add(Role.PREFILL, 5)
    w.add(Role.DECODE, 1)
    run = await planner(w, policy(down={"hold_s": 0.0, "cooldown_s": 2.0, "window_s": 2.0}))
    holder, original = next(iter(w.boxes)), w.worker

    def loaded(box: Any) -> Worker:
        worker = original(box)
        held = 100 if w.overrides and worker.worker_id == holder else 0
        return replace(worker, active=held, promised_prefill_tokens=held * int(ISL))

    w.worker = loaded  # type: ignore[method-assign]
    w.overrides = {"prefilling_requests": 100, "prefilling_tokens": 100 * int(ISL)}
    await run.step(60)
    assert w.drains == [] and "backlog" in run.codes(30)
    w.overrides = {"prefilling_requests": 3, "prefilling_tokens": 3 * int(ISL)}
    await run.step(60)
    assert w.drains and holder not in w.drains


def _ramp(t: float) -> float:
    return 1.5 * math.pow(1.1, t / 60.0)


async def _ramped(t_ready_s: float, brain: Any = decide) -> tuple[Run, float]:
    """A ramp of 10 % a minute, and the seconds for which TTFT was beyond its target."""
    w = world(rps=_ramp, t_ready_s=lambda _n: t_ready_s)
    w.add(Role.PREFILL, 2)
    w.add(Role.DECODE, 2)
    prior = {"p50_s": t_ready_s, "p90_s": t_ready_s, "p99_s": t_ready_s}
    wide = policy(
        tick_s=5.0, t_ready_prior=prior, prefill={"max": 40}, decode={"max": 40}, headroom=0.0
    )
    run = await planner(w, wide, brain=brain)
    late_s = 0.0
    for _ in range(240):
        await run.step(5, tick_s=5.0)
        late_s += 5.0 * (w.ttft_s > 2.0)
    return run, late_s


def _leads_s(run: Run) -> list[float]:
    """For each further worker: how long before it was needed it was ordered."""
    rate = PROFILE.prefill_tokens_per_s(ISL)
    out = []
    for workers in range(3, 6):
        ordered_s = next((t for t, p, _d in run.desired if p >= workers), 1200.0)
        needed_s = next(t for t in range(6000) if _ramp(t) * ISL > (workers - 1) * rate)
        out.append(needed_s - ordered_s)
    return out


def _reacts(problem: Problem) -> Proposal:
    p = math.ceil(problem.demand_p.level / problem.prefill.rate)
    d = math.ceil(problem.demand_d.level / problem.decode.rate_at(problem.tpot_target_s))
    return fixed(p, d)


async def test_b24_capacity_is_ordered_a_start_ahead() -> None:
    """A longer T_ready, a longer lead; and less lateness than one that reacts."""
    short, late_s = await _ramped(150.0)
    long, _late = await _ramped(300.0)
    reacting, reacting_late_s = await _ramped(150.0, partial(decide, optimiser=_reacts))
    leads = [sum(_leads_s(run)) / 3 for run in (short, long, reacting)]
    assert leads[0] >= 0.6 * 150.0 and leads[1] >= 0.6 * 300.0
    assert leads[1] - leads[0] >= 0.4 * 150.0, "the lead follows the measured start"
    assert leads[2] < 0.2 * 150.0 and late_s < 0.2 * reacting_late_s


async def test_b26_slow_first_batches_teach_nothing() -> None:
    """New workers report a fifth of their speed for 60 s: the estimate moves less than 5 %."""
    w = world(rps=lambda t: 4.0 if t < 100 else 4.4)
    run = await planner(w, policy(prefill={"max": 20}, decode={"max": 20}))
    original = w.worker

    def slow(box: Any) -> Worker:
        worker = original(box)
        young = w.clock.now_s - (worker.ready_s or 0.0) < 60
        total = round(3000 * (0.2 if young else 1.0) * w.clock.now_s)
        load = replace(worker.load, waiting_prefill_tokens=9_000, prefill_tokens_total=total)
        return replace(worker, load=load)

    w.worker = slow  # type: ignore[method-assign]
    await run.step(100)
    assert abs(run.decisions[-1].prefill.correction - 1.0) < 0.05
    before = run.desired[-1][1:]
    await run.step(100)
    most = [max(pool) for pool in zip(*run.between(100, 200), strict=True)]
    for was, peak in zip(before, most, strict=True):
        assert peak <= math.ceil(was * 1.2) + 1, "arrivals rose by a tenth"


@pytest.mark.parametrize(
    ("wishes", "want"),
    [
        # fifty times too much for one tick: one step up, and not more than that
        ([(2, 2)] * 3 + [(100, 100)] + [(4, 4)] * 3, [2, 2, 2, 4, 4, 4, 4]),
        # the remainder is taken while it is wanted
        ([(100, 100)] * 3, [4, 6, 8]),
        # down likewise, one at a time
        ([(1, 1)] * 4, [1, 1, 1, 1]),
    ],
)
def test_b28_one_step_whatever_is_wanted(wishes: list[tuple[int, int]], want: list[int]) -> None:
    limits = Limits(
        1,
        200,
        step_up=2,
        step_down=1,
        up_cooldown_s=0.0,
        down_cooldown_s=0.0,
        window_s=1.0,
        hold_s=0.0,
        pending_max=200,
    )
    assert judged(wishes, limits, live=2) == want
    down = judged([(1, 1)] * 8, limits, live=6)
    assert all(a - b <= 1 for a, b in pairwise([6, *down])), "max_step downwards"


async def test_b29_a_burst_ends_whatever_small_comes_after() -> None:
    """No mode that renews itself: at the minimum within hold + window + a step each cooldown."""
    w = world(rps=lambda t: 7.0 if 20 <= t < 60 else (0.05 if t % 10 < 1 else 0.0))
    run = await planner(w, policy(decode={"max": 3}, prefill={"max": 5}))
    await run.step(62)
    top = run.desired[-1][1]
    assert top >= 3
    pool = run.decisions[-1].prefill
    cleared_s = next(
        t
        for t, decision in zip((t for t, _p, _d in run.desired), run.decisions, strict=True)
        if t > 60 and not decision.prefill.counts.backlog
    )
    # A burst that may come again is kept in mind for some minutes, once.
    bound_s = (pool.t_ready.p50_s + 2.0) + 15.0 + 15.0 * top + 60.0 + 240.0
    await run.step(bound_s)
    assert run.desired[-1][1:] == (1, 1), (cleared_s, bound_s)
    downs = [p for p, _ in run.between(75, 62 + bound_s)]
    assert all(b <= a for a, b in pairwise(downs)), "nothing small extends it"


async def test_b30_an_slo_out_of_reach_holds_no_replica() -> None:
    """One idle request takes 1.05 of the target at any size: said, and no reason for workers."""
    best_s = PROFILE.prefill_s(ISL) + OVERHEAD_S
    w = world(rps=lambda t: 0.5 if t < 40 else 0.0)
    slo = {"ttft_s": round(best_s / 1.05, 4), "tpot_s": 0.1}
    run = await planner(w, policy(slo=slo, prefill={"max": 6}))
    w.add(Role.PREFILL, 2)
    await run.step(40)
    assert "slo_infeasible" in run.codes(20)
    assert run.decisions[-1].infeasible == ("ttft",)
    assert len([o for o in w.provisions if o.role is Role.PREFILL]) <= 1, "the minimum"
    await run.step(120)
    assert run.desired[-1][1:] == (1, 1)


def test_b31_noise_at_a_rounding_edge_is_one_size() -> None:
    """5.97 to 6.06 of 2 a worker, 100 ticks."""
    band, each = 0.1, 2.0
    loads = [5.97 if tick % 2 else 6.06 for tick in range(100)]
    wishes = [
        (math.ceil(load / each - 0.02), math.ceil(load * (1 + band) / each - 0.02))
        for load in loads
    ]
    limits = Limits(1, 10, up_cooldown_s=0.0, down_cooldown_s=0.0, hold_s=0.0, window_s=1.0)
    sizes = judged(wishes, limits, live=3)
    assert sum(a != b for a, b in pairwise([3, *sizes])) <= 1


async def test_b32_a_look_back_longer_than_a_cooldown_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"policy\.down\.cooldown_s.*look-back"):
        policy(forecast={"window_s": 60.0}, down={"cooldown_s": 20.0})
    w = world(rps=lambda t: 1.0 if t < 60 else 5.0)
    run = await planner(w)
    await run.step(240)
    sizes = [p for _t, p, _d in run.desired]
    signs = [1 if b > a else -1 for a, b in pairwise(sizes) if a != b]
    turns = sum(a != b for a, b in pairwise(signs))
    assert signs and turns <= 1, "one step of load, one change of direction at most"


@pytest.mark.parametrize(("live", "want"), [(20, 15), (15, 15), (12, 12), (16, 15)])
def test_b33_the_window_decides_and_not_its_last_sample(live: int, want: int) -> None:
    """Wanted 10, 10, 15, 10, 10, 5 in the window: 15, or what there is if that is fewer."""
    limits = Limits(
        1, 30, step_down=30, up_cooldown_s=99.0, down_cooldown_s=0.0, window_s=6.0, hold_s=5.0
    )
    memory = PoolMemory(desired=live, up_s=1000.0)
    verdict = None
    for tick, keep in enumerate((10, 10, 15, 10, 10, 5)):
        verdict, memory = guard.judge(
            wanted=keep,
            keep=keep,
            counts=Counts(live, 0),
            memory=memory,
            limits=limits,
            trust=Trust(),
            paused=False,
            now_s=1000.0 + tick,
        )
    assert verdict is not None and verdict.target == want


async def test_b34_fresh_zeros_add_nobody() -> None:
    """All-zero fresh signals, 200 rounds: constant at the minimum."""
    w = world()
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    run = await planner(w)
    await run.step(200)
    assert set(run.between(0, 200)) == {(1, 1)}
    assert w.provisions == [] and w.drains == [] and w.releases == []
