"""How sure the planner is to be: what was missed, how unevenly work comes, and what it remembers."""

import random
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane_planner import forecast
from readyplane_planner.decide import risk, young
from readyplane_planner.decide.values import Budget, Memory, Unevenness
from readyplane_planner.forecast import Knobs, Series
from readyplane_planner.journal import decode_inputs, encode_inputs, replay
from readyplane_planner.optimise import Proposal
from readyplane_planner.policy import make_plan
from readyplane_planner.signals import Kind, Lengths, Observation, Signal
from tests.unit.planner_world import DIGEST, HandClock, World, planner, policy

MISSING = Signal(Kind.MISSING, None, "", why="nobody counts them")
ALLOWED = 0.01


def known(value: float) -> Signal:
    return Signal(Kind.FRESH, value, "")


def seen(**signals: Signal) -> Observation:
    names = [f.name for f in fields(Observation) if f.type in ("Signal", Signal)]
    every: dict[str, Any] = dict.fromkeys(names, MISSING)
    return Observation(
        model="demo",
        taken_s=0.0,
        dt_s=1.0,
        lengths=Lengths(1000.0, 1000.0, 200.0, 1.0, known=True),
        **{**every, **signals},
    )


# --------------------------------------------------------------------------- the budget


def after(missed_share: float, hours: float, *, arrivals: float = 20.0) -> float:
    """The risk after so long in which that share was missed."""
    budget = Budget()
    for _ in range(round(hours * 360)):
        now = replace(
            seen(arrivals=known(arrivals), missed=known(arrivals * missed_share)), dt_s=10
        )
        budget = risk.spent(now, budget)
    return risk.of(budget, ALLOWED, arrivals=arrivals)


def test_risk_falls_while_more_is_missed_and_rises_while_less_is() -> None:
    assert risk.of(Budget(), ALLOWED, arrivals=20.0) == pytest.approx(ALLOWED), "nothing seen yet"
    assert after(ALLOWED, 1.0) == pytest.approx(ALLOWED)
    assert after(3 * ALLOWED, 0.02) < after(1.5 * ALLOWED, 0.02) < ALLOWED
    assert after(0.0, 0.02) > after(0.5 * ALLOWED, 0.02) > ALLOWED
    assert after(0.0, 0.01) < after(0.0, 0.05) < after(0.0, 1.0), "the longer, the surer"


def test_what_was_missed_is_forgotten_in_time() -> None:
    """The promise is kept over hours: a bad minute is made up for, and not for ever."""
    budget = risk.spent(
        replace(seen(arrivals=known(20.0), missed=known(20.0)), dt_s=60.0), Budget()
    )
    calm = replace(seen(arrivals=known(20.0), missed=known(0.0)), dt_s=60.0)
    found = []
    for _ in range(10 * 60):
        budget = risk.spent(calm, budget)
        found.append(risk.of(budget, ALLOWED, arrivals=20.0))
    assert found[0] < 0.8 * ALLOWED
    assert found == sorted(found) and found[-1] > ALLOWED


@given(
    arrived=st.floats(0.0, 1e9),
    share=st.floats(0.0, 1.0),
    allowed=st.floats(1e-4, 0.5),
    arrivals=st.floats(0.0, 1e5),
)
def test_risk_is_bounded_whatever_was_missed(
    arrived: float, share: float, allowed: float, arrivals: float
) -> None:
    found = risk.of(Budget(arrived, arrived * share), allowed, arrivals=arrivals)
    low, high = risk.RISK_RANGE
    assert low * allowed - 1e-12 <= found <= high * allowed + 1e-12


@pytest.mark.parametrize(
    "signals",
    [
        {"arrivals": known(9.0), "missed": MISSING},
        {"arrivals": MISSING, "missed": known(3.0)},
        {"arrivals": MISSING, "missed": MISSING},
    ],
)
def test_what_is_not_known_changes_no_budget(signals: dict[str, Signal]) -> None:
    """Unknown is neither a miss nor a success."""
    before = Budget(100.0, 7.0)
    assert risk.spent(seen(**signals), before) is before
    whole = seen(arrivals=known(9.0), missed=known(3.0))
    assert risk.spent(replace(whole, dt_s=0.0), before) is before
    assert risk.spent(whole, before) != before


# --------------------------------------------------------------------------- bursts


def measured(rates: list[float], each: float) -> float:
    """Dispersion after a tick of a second for each rate of work."""
    series, found, knobs = Series(), Unevenness(), Knobs()
    for at, rate in enumerate(rates):
        series = forecast.update(series, rate, dt_s=1.0, now_s=float(at + 1), knobs=knobs)
        found = risk.uneven(found, seen(prefill_work=known(rate)), series, each)
    return risk.dispersion(found)


def poisson(rng: random.Random, mean: float) -> int:
    at, count = rng.expovariate(mean), 0
    while at < 1.0:
        at, count = at + rng.expovariate(mean), count + 1
    return count


def test_arrivals_one_by_one_are_even_and_bursts_are_not() -> None:
    """Prompts of 1000 tokens, 10 a second: by chance, five at a time, and like clockwork."""
    rng = random.Random(7)
    chance = [1000.0 * poisson(rng, 10.0) for _ in range(2000)]
    bursts = [5000.0 * poisson(rng, 2.0) for _ in range(2000)]
    assert measured(chance, 1000.0) == pytest.approx(1.0, abs=0.2)
    assert measured(bursts, 1000.0) == pytest.approx(5.0, abs=1.0)
    assert measured([10_000.0] * 2000, 1000.0) == 1.0, "never below what chance makes"
    assert measured([0.0, 0.0, 0.0, 90_000.0] * 200, 1000.0) == risk.UNEVEN_MAX


def test_without_work_or_knowledge_nothing_is_uneven() -> None:
    before = Unevenness(3.0, 2.0)
    assert risk.dispersion(Unevenness()) == 1.0
    assert risk.uneven(before, seen(prefill_work=MISSING), Series(), 1000.0) is before
    assert risk.uneven(before, seen(prefill_work=known(9.0)), Series(), 1000.0) is before
    assert measured([0.0] * 50, 1000.0) == 1.0


# --------------------------------------------------------------------------- first minutes


def test_the_first_minutes_neither_grow_on_a_second_nor_shrink_on_a_calm_one() -> None:
    plan = make_plan(policy(), version=1, manifest_digest=DIGEST)
    wish = Proposal(9, 8, 9, 8)
    fewer = Proposal(1, 1, 1, 1)

    def held(
        proposal: Proposal,
        age_s: float,
        live: tuple[int, int] = (3, 3),
        late: tuple[bool, bool] = (False, False),
    ) -> Proposal:
        series = replace(Series(), begun_s=100.0, updated_s=100.0 + age_s)
        return young.held(proposal, plan, Memory(work_p=series), live, late)

    assert (held(wish, 1.0).p, held(wish, 1.0).d) == (3, 3)
    soon_s = plan.knobs.window_s + 1.0
    assert soon_s < young.HELD_S
    assert (held(wish, soon_s).p, held(wish, soon_s).d) == (3, 3)
    behind = held(wish, soon_s, late=(False, True))
    assert (behind.p, behind.d) == (3, 8), "who is late already is not held"
    assert held(wish, young.HELD_S).p == 9
    late_s = max(plan.knobs.warmup_s, young.HELD_S) + 1.0
    assert held(wish, late_s) == wish and held(fewer, late_s) == fewer
    assert (held(fewer, 1.0).p_keep, held(fewer, 1.0).d_keep) == (3, 3)
    assert held(wish, 1.0, live=(0, 3)) == wish, "a pool that is empty is not held"


# --------------------------------------------------------------------------- memory


async def test_what_was_missed_and_how_unevenly_survives_the_journal() -> None:
    """A decision of then is taken again with the budget and the bursts of then."""
    w = World(HandClock(), rps=lambda t: 2.0 if int(t / 5) % 2 else 6.0)
    run = await planner(w)
    await run.step(60)
    memories = []
    for record in await run.journal.newest("demo", limit=100, changes_only=True):
        whole = (await run.journal.get(record.decision_id))[0]
        inputs = decode_inputs(whole.inputs)
        assert encode_inputs(inputs)[0] == whole.inputs
        memories.append(inputs.memory)
        made = next(d for d in run.decisions if d.decision_id == record.decision_id)
        assert replay(whole) == made
    last = memories[0]
    assert last.budget.arrived > 0 and last.uneven.chance > 0 and last.uneven.seen > 0
