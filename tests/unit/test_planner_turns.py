"""Changes of direction: a load that comes and goes does not drag the fleet up and down with it."""

from itertools import pairwise
from typing import Any

import pytest

from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import Role, WorkerState
from readyplane_planner.decide.pools import arrives_soon
from tests.unit.planner_world import HandClock, Run, World, planner, policy

T_READY_S = 6.0
DRAIN_S = {"prefill": 2.0, "decode": 21.0}
QUICK = {
    "min_ready_s": 4.0,
    "up": {"cooldown_s": 2.0},
    "down": {"cooldown_s": 3.0, "window_s": 3.0, "hold_s": 6.0},
}


def world(**changes: Any) -> World:
    return World(HandClock(), **changes)


def turns(run: Run, pool: str, *, within_s: float) -> int:
    """There and back again, both legs shorter than the bound: counted from the targets alone."""
    moves: list[tuple[float, int]] = []
    series = [(t, p if pool == "prefill" else d) for t, p, d in run.desired]
    for (_t, before), (t, now) in pairwise(series):
        if now != before:
            moves.append((t, 1 if now > before else -1))
    legs, last, count = [], None, 0
    for t, way in moves:
        if last is not None and way != last[1]:
            legs.append(t - last[0])
            if len(legs) > 1 and legs[-1] < within_s and legs[-2] < within_s:
                count += 1
        last = (t, way)
    return count


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("periods", [0.5, 1.0, 2.0, 4.0])
async def test_square_waves_turn_the_fleet_a_few_times_an_hour(periods: float, quick: bool) -> None:
    """S9, R25.1: reversals with both legs below 2 (T_ready + T_drain), whatever the period."""
    period_s, span_s = periods * T_READY_S, 400.0
    run = await planner(
        world(rps=lambda t: 6.5 if t % period_s < period_s / 2 else 1.0),
        policy(**(QUICK if quick else {})),
    )
    await run.step(span_s)
    for pool, drain_s in DRAIN_S.items():
        bound_s = 2.0 * (T_READY_S + drain_s)
        # One of TURNS_REMEMBERED bounds each, and one more while nothing was remembered.
        most = 1 + span_s / (8 * bound_s)
        assert turns(run, pool, within_s=bound_s) <= most, pool


@pytest.mark.parametrize("quick", [False, True])
async def test_a_burst_is_followed_up_once_and_down_once(quick: bool) -> None:
    """4 to 3 by a drain and 3 to 4 by an order four seconds later must not come again."""
    run = await planner(
        world(rps=lambda t: 0.0 if t < 12 else 8.0 if 60 <= t < 120 else 1.5),
        policy(**(QUICK if quick else {})),
    )
    # A burst that may come again is kept in mind for a while, in the end it is forgotten.
    await run.step(600)
    assert max(p for p, _d in run.between(60, 130)) >= 4
    assert run.desired[-1][1] <= 2 and run.desired[-1][2] <= 2
    for pool, drain_s in DRAIN_S.items():
        assert turns(run, pool, within_s=2.0 * (T_READY_S + drain_s)) == 0, pool


async def test_a_load_at_the_edge_does_not_flap() -> None:
    """The run that was seen: D 3, 4, 3, 4, 3, 2 within 21 s, with starts cancelled and reordered."""
    steps = (4.0, 8.5, 8.5, 5.0, 7.5, 3.0, 6.0, 2.0)
    run = await planner(world(rps=lambda t: steps[int(t // 7) % len(steps)]), policy(**QUICK))
    await run.step(224)
    d = [d for _t, _p, d in run.desired]
    within = [sum(a != b for a, b in pairwise(d[i : i + 21])) for i in range(30, len(d) - 21)]
    assert max(within) <= 3
    assert len(run.world.releases) <= 1, "no start is ordered only to be cancelled"
    assert not {"drift"} & {r.code for made in run.decisions for r in made.why}


async def test_our_own_release_is_no_drift() -> None:
    """An order that was cancelled before the actuator listed it shows up late: it stays ours."""
    w = world(rps=lambda t: 7.0 if t < 20 else 0.0, t_ready_s=lambda n: 6.0 if n < 3 else 60.0)
    w.grace_s = 8.0
    prior = {"p50_s": 60.0, "p90_s": 75.0, "p99_s": 90.0}
    run = await planner(w, policy(t_ready_prior=prior, **QUICK))
    await run.step(120)
    assert w.releases
    assert not [r for made in run.decisions for r in made.why if r.code == "drift"]


async def test_a_start_about_to_serve_is_not_cancelled() -> None:
    w = world()
    run = await planner(w, policy(down={"hold_s": 0.0, "cooldown_s": 2.0, "window_s": 2.0}))
    await run.step(30)
    w.rps = lambda _t: 7.0
    while not w.members(Role.PREFILL, WorkerState.PROVISIONED):
        await run.step(1)
    await run.step(4)
    coming = {b.order.worker_id for b in w.members(Role.PREFILL, WorkerState.PROVISIONED)}
    w.rps, w.queue = (lambda _t: 0.0), 0.0
    await run.step(12)
    assert coming and not coming & set(w.releases)


@pytest.mark.parametrize(
    ("age_s", "left_s"),
    [(0.0, None), (2.9, None), (4.0, 2.0), (5.9, 0.1), (7.0, 3.0), (6.5, None), (10.1, None)],
)
def test_soon_is_near_the_median_and_not_after_the_p90(age_s: float, left_s: float | None) -> None:
    found = arrives_soon(age_s, StartQuantiles(6.0, 10.0, 15.0, 9, 0.0))
    assert found == (None if left_s is None else pytest.approx(left_s))
