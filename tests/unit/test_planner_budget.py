"""The budget is a limit of both targets together, in every decision and whatever is proposed."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.worker import Role
from readyplane_planner.guard import Counts, Limits, Verdict, budgeted, within
from tests.unit.planner_world import HandClock, World, planner, policy

ONE = Limits(1, 9, gpus=1)
WIDE = Limits(1, 9, gpus=4)


@pytest.mark.parametrize(
    ("targets", "live", "before", "limits", "budget", "expected"),
    [
        # The other pool may not shrink yet: nothing is promised of what it has.
        ((3, 4), (3, 2), (3, 2), (ONE, ONE), 5, (3, 2)),
        # It shrinks: both targets move in the same decision.
        ((2, 4), (3, 2), (3, 2), (ONE, ONE), 5, (2, 3)),
        ((1, 4), (3, 2), (3, 2), (ONE, ONE), 5, (1, 4)),
        # Both want the last one: the emptier pool, and then P; what was promised comes first.
        ((4, 4), (2, 2), (2, 2), (ONE, ONE), 5, (3, 2)),
        ((4, 4), (3, 1), (3, 1), (ONE, ONE), 5, (3, 2)),
        ((4, 4), (2, 2), (2, 3), (ONE, ONE), 5, (2, 3)),
        # More is there than the budget: it is kept, and so is a minimum.
        ((6, 3), (6, 0), (6, 0), (ONE, ONE), 5, (6, 1)),
        ((4, 4), (4, 4), (4, 4), (ONE, ONE), 5, (4, 4)),
        # Workers of several GPUs, and where there is room.
        ((3, 4), (1, 1), (1, 1), (WIDE, ONE), 11, (2, 3)),
        ((3, 4), (3, 2), (None, None), (ONE, ONE), 7, (3, 4)),
    ],
)
def test_targets_are_within_the_budget_together(
    targets: tuple[int, int],
    live: tuple[int, int],
    before: tuple[int | None, int | None],
    limits: tuple[Limits, Limits],
    budget: int,
    expected: tuple[int, int],
) -> None:
    verdicts = [
        Verdict(t, grow=max(0, t - n), shrink=max(0, n - t))
        for t, n in zip(targets, live, strict=True)
    ]
    counts = (Counts(live[0], 0), Counts(live[1], 0))
    pair = budgeted((verdicts[0], verdicts[1]), counts, limits, budget, before)
    assert (pair[0].target, pair[1].target) == expected
    for asked, found in zip(verdicts, pair, strict=True):
        told = [text for code, text in found.reasons if code == "budget"]
        assert bool(told) is ((found.target, found.grow) != (asked.target, asked.grow))


def test_a_draining_worker_is_counted_on_but_not_spent_twice() -> None:
    verdicts = (Verdict(2), Verdict(4, grow=2))
    counts = (Counts(2, 0, draining=1), Counts(2, 0))
    p, d = budgeted(verdicts, counts, (ONE, ONE), 5, (2, 3))
    assert (p.target, d.target, d.grow) == (2, 3, 0)


def test_who_could_not_be_given_up_takes_its_gpu_back() -> None:
    counts = (Counts(3, 0), Counts(2, 0))
    p, d = within((Verdict(3), Verdict(3)), counts, (ONE, ONE), 5, (3, 2))
    assert (p.target, d.target) == (3, 2)


NUMBERS = st.integers(0, 9)


@given(
    targets=st.tuples(NUMBERS, NUMBERS),
    live=st.tuples(NUMBERS, NUMBERS),
    draining=st.tuples(NUMBERS, NUMBERS),
    standby=st.tuples(NUMBERS, NUMBERS),
    before=st.tuples(st.none() | NUMBERS, st.none() | NUMBERS),
    gpus=st.tuples(st.integers(1, 16), st.integers(1, 16)),
    low=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    budget=st.integers(1, 120),
)
def test_no_target_gets_past_the_budget(
    targets: tuple[int, int],
    live: tuple[int, int],
    draining: tuple[int, int],
    standby: tuple[int, int],
    before: tuple[int | None, int | None],
    gpus: tuple[int, int],
    low: tuple[int, int],
    budget: int,
) -> None:
    """Never above it, unless what is live and not given up, or the minima, already are."""
    limits = (Limits(low[0], 9, gpus=gpus[0]), Limits(low[1], 9, gpus=gpus[1]))
    counts = (
        Counts(live[0], 0, draining[0], standby=standby[0]),
        Counts(live[1], 0, draining[1], standby=standby[1]),
    )
    asked = [
        Verdict(t, grow=max(0, t - n), shrink=max(0, n - t))
        for t, n in zip((max(targets[0], low[0]), max(targets[1], low[1])), live, strict=True)
    ]
    pair = budgeted((asked[0], asked[1]), counts, limits, budget, before)
    rows = zip(asked, live, low, gpus, strict=True)
    must = sum(min(v.target, max(n, lo)) * g for v, n, lo, g in rows)
    total = sum(v.target * g for v, g in zip(pair, gpus, strict=True))
    assert total <= max(budget, must)
    held = sum(c.held * g for c, g in zip(counts, gpus, strict=True))
    ordered = sum(v.grow * g for v, g in zip(pair, gpus, strict=True))
    assert not ordered or held + ordered <= budget
    for verdict, wish, count, lo in zip(pair, asked, live, low, strict=True):
        assert min(wish.target, max(count, lo)) <= verdict.target <= wish.target
        assert count + verdict.grow <= max(count, verdict.target)
        assert verdict.shrink == wish.shrink


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(("rps", "osl"), [(3.0, 800.0), (6.0, 600.0)])
async def test_a_budget_that_is_used_up_does_not_make_targets_flap(
    rps: float, osl: float, quick: bool
) -> None:
    """Three P and two D on five GPUs, and D is overloaded: D rises only as P makes room."""
    changes: dict[str, Any] = {}
    if quick:
        changes["down"] = {"hold_s": 20.0, "cooldown_s": 5.0, "window_s": 5.0}
    world = World(
        HandClock(),
        rps=lambda t: rps if t > 30 else 2.0,
        osl=lambda t: osl if t > 30 else 211.0,
    )
    world.add(Role.PREFILL, 3)
    world.add(Role.DECODE, 2)
    run = await planner(world, policy(budget_gpus=5, decode={"max": 6}, **changes))
    await run.step(120)
    assert all(p + d <= 5 for _t, p, d in run.desired), run.desired
    assert run.desired[-1][2] > 2, "what P gave up serves D"
    for pool in (1, 2):
        series = [entry[pool] for entry in run.desired]
        ways = [1 if now > was else -1 for was, now in pairwise(series) if now != was]
        assert sum(a != b for a, b in pairwise(ways)) <= 1, series


async def test_what_if_stays_within_the_budget() -> None:
    world = World(HandClock(), rps=lambda _t: 5.0)
    world.add(Role.PREFILL, 3)
    world.add(Role.DECODE, 2)
    run = await planner(world, policy(decode={"max": 6}))
    await run.step(30)
    p = run.decisions[-1].prefill.counts.live
    changes = {"osl": "4x", "workers.decode": "1", "policy.budget_gpus": str(p + 2)}
    found = (await run.service.what_if(changes))["what_if"]
    assert found["decode"]["wanted"] > 2
    assert found["prefill"]["target"] + found["decode"]["target"] <= p + 2
