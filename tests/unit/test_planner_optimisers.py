"""Foreign optimisers: found by name, asked within a time, and never believed (R23.2).

The adversary proposes whatever it likes; what reaches the actuator stays inside bounds, steps, trust,
budget and pairs, and the planner stays live.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField, Refused
from readyplane.core.worker import Role, WorkerState
from readyplane_planner import optimisers
from readyplane_planner.decide import decide
from readyplane_planner.journal import decode_inputs, encode_inputs, replay
from readyplane_planner.optimise import Bounds, Demand, Problem, Proposal, size
from readyplane_planner.optimise.answer import Answer, Asked, NoAnswer, answered
from readyplane_planner.optimise.check import checked
from readyplane_planner.optimise.tuned import RANGES, Parameters, read_parameters, tuned
from tests.unit.planner_world import HandClock, Run, World, planner, policy
from tests.unit.test_planner_optimise import problem

WRONG: tuple[Any, ...] = (
    None,
    True,
    "3",
    3.0,
    math.nan,
    math.inf,
    -1,
    10**12,
    [],
    {"p": 1},
    object(),
)


# --------------------------------------------------------------------------- names


def test_the_planners_own_are_there() -> None:
    assert optimisers.load_optimiser("size") is size
    assert optimisers.load_optimiser("tuned")(problem(3000.0, 300.0)).p >= 1
    assert optimisers.thinker("size", budget_s=1.0) is None
    read_parameters(optimisers.tuned_document()["parameters"])
    assert optimisers.tuned_document()["provenance"]


def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, points: str) -> None:
    """A package that offers optimisers, as if it were installed."""
    (tmp_path / "foreign_optimisers.py").write_text(body)
    info = tmp_path / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{optimisers.GROUP}]\n{points}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "foreign_optimisers", raising=False)


def test_another_comes_by_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "from readyplane_planner.optimise import Proposal\nNUMBER = 3\n"
    body += "def more(problem):\n    return Proposal(7, 7, 7, 7)\n"
    points = "more = foreign_optimisers:more\nnumber = foreign_optimisers:NUMBER\n"
    points += "gone = foreign_optimisers:gone\nbroken = no_such_module:x"
    offered(tmp_path, monkeypatch, body, points)
    assert optimisers.load_optimiser("more")(problem()).p == 7
    assert policy(optimiser="more").optimiser == "more"
    for name, word in (
        ("number", "it is a int"),
        ("gone", "foreign_optimisers:gone"),
        ("broken", "ModuleNotFoundError"),
        ("nobody", "known are broken, gone, more, number, size, tuned"),
    ):
        with pytest.raises(InvalidField, match=word) as caught:
            policy(optimiser=name)
        assert caught.value.field == "policy.optimiser"


# --------------------------------------------------------------------------- the learned one


@pytest.mark.parametrize(
    ("document", "word"),
    [
        ({"headrom_p": 1.0}, "known are"),
        ({"band": 100.0}, "use 0.25 to 4"),
        ({"late": True}, "use 0.2 to 3"),
        ({"spread_p": math.nan}, "use 0.0 to 1.5"),
        ({"spread_p": "1"}, "use"),
    ],
)
def test_parameters_are_checked(document: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidField, match=word):
        read_parameters(document)
    assert {f.name for f in fields(Parameters)} == set(RANGES)


def test_parameters_of_one_change_nothing_and_others_do() -> None:
    plain = tuned(Parameters())
    load = problem(9000.0, 900.0, headroom=0.1, band=0.2)
    load = replace(
        load, demand_p=Demand(9000.0, 14_000.0, 12_000.0), demand_d=Demand(900.0, 1400.0, 1200.0)
    )
    own = size(load)
    assert (plain(load).p, plain(load).d, plain(load).p_keep) == (own.p, own.d, own.p_keep)
    bold = tuned(Parameters(spread_p=0.0, spread_d=0.0, headroom_p=0.25, headroom_d=0.25))(load)
    shy = tuned(Parameters(headroom_p=4.0, headroom_d=4.0))(load)
    assert bold.p < own.p <= shy.p and bold.d < own.d <= shy.d


async def test_the_tuned_one_plans_and_its_decisions_replay_without_it() -> None:
    w = World(HandClock(), rps=lambda t: 1.0 + t / 30.0)
    run = await planner(w, policy(optimiser="tuned"))
    await run.step(90)
    assert run.service._thinker is not None
    assert run.desired[-1][1] >= 2 and run.service._memory.fallbacks == 0
    for record in await run.journal.newest("demo", limit=100, changes_only=True):
        whole = (await run.journal.get(record.decision_id))[0]
        inputs = decode_inputs(whole.inputs)
        assert encode_inputs(inputs)[0] == whole.inputs
        if inputs.observation.arrivals.known:
            assert inputs.answer is not None and inputs.answer.proposal is not None
        again = next(d for d in run.decisions if d.decision_id == record.decision_id)
        assert replay(whole) == again


# --------------------------------------------------------------------------- what is believed


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("name", ["p", "d", "p_keep", "d_keep", "p_now"])
def test_what_is_no_number_of_workers_is_refused_by_name(name: str, value: Any) -> None:
    if name == "p_now" and value is None:
        return
    good = Proposal(2, 2, 2, 2)
    with pytest.raises(Refused, match=f"{name}="):
        checked(replace(good, **{name: value}), problem(3000.0, 300.0))


@pytest.mark.parametrize("value", WRONG)
def test_what_is_no_proposal_is_refused(value: Any) -> None:
    with pytest.raises(Refused, match="Proposal"):
        checked(value, problem())


class Liar(Proposal):
    """Looks like a proposal, and says something else each time it is asked."""

    __slots__ = ()


def test_a_subclass_is_no_proposal() -> None:
    with pytest.raises(Refused, match="Liar"):
        checked(Liar(1, 1, 1, 1), problem())


@pytest.mark.parametrize(
    ("proposal", "code"),
    [
        (Proposal(99, 5, 99, 5), "proposal_bounds"),
        (Proposal(5, 0, 5, 0), "proposal_bounds"),
        (Proposal(5, 1, 5, 1), "proposal_pair"),
        (Proposal(0, 4, 0, 4), "proposal_pair"),
        (Proposal(1, 4, 1, 1), "proposal_shrink"),
        (Proposal(12, 12, 12, 12), "budget"),
    ],
)
def test_each_cut_names_its_rule(proposal: Proposal, code: str) -> None:
    busy = problem(9000.0, 300.0, budget_gpus=20, bounds_p=Bounds(0, 40), bounds_d=Bounds(1, 40))
    busy = replace(busy, demand_d=Demand(300.0, 300.0, sequences=150.0))
    kv = replace(busy.decode, kv_tokens=busy.decode.context * 60.0)
    found = checked(proposal, replace(busy, decode=kv))
    assert code in {said[0] for said in found.reasons}


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(*[st.integers(0, 10**6)] * 4),
    st.floats(0, 40_000),
    st.floats(0, 4_000),
    st.integers(0, 500),
    st.one_of(st.none(), st.integers(4, 60)),
)
def test_whatever_is_proposed_is_cut_to_what_may_be(
    numbers: tuple[int, int, int, int],
    work_p: float,
    work_d: float,
    running: int,
    budget: int | None,
) -> None:
    asked = problem(work_p, work_d, budget_gpus=budget)
    asked = replace(asked, demand_d=Demand(work_d, work_d, sequences=float(running)))
    found = checked(Proposal(*numbers), asked)
    own = size(asked)
    assert 1 <= found.p <= 40 and 1 <= found.d <= 40
    assert budget is None or found.p + found.d <= max(budget, 2)
    assert found.p <= found.p_keep <= 40 and found.d <= found.d_keep <= 40
    assert own.p_now is not None and found.p_keep >= min(own.p_now, found.p_keep)
    assert checked(found, asked) == replace(found), "what was cut stays as it is"


# --------------------------------------------------------------------------- the adversary


class Adversary:
    """Tries everything, a different thing each time."""

    def __init__(self, seed: int) -> None:
        self._tick = seed

    def __call__(self, _problem: Problem) -> Any:
        self._tick += 1
        tricks: tuple[Callable[[], Any], ...] = (
            lambda: Proposal(10_000, 10_000, 10_000, 10_000),
            lambda: Proposal(0, 0, 0, 0),
            lambda: Proposal(math.nan, -1, True, "x"),  # type: ignore[arg-type]
            lambda: 1 / 0,
            lambda: Proposal(9, 0, 9, 0),
            lambda: Proposal(0, 9, 0, 9),
            lambda: None,
            lambda: Proposal(*((9, 9, 9, 9) if self._tick % 2 else (1, 1, 1, 1))),
            lambda: replace(Proposal(1, 1, 1, 1), reasons=(("floor", "x" * 10**5, "y"),) * 1000),
            lambda: replace(Proposal(1, 1, 1, 1), reasons=3),  # type: ignore[arg-type]
            lambda: replace(Proposal(2, 2, 2, 2), p_now=-5, d_now=10**9),
            lambda: sys.exit(3),
            lambda: Proposal(3, 3, 1, 1),
        )
        return tricks[self._tick % len(tricks)]()


LIMIT_P, LIMIT_D = 6, 4


def kept_within(run: Run, budget: int) -> None:
    """Nothing got past: bounds, budget, steps, pairs."""
    for decision in run.decisions:
        assert 1 <= decision.prefill.target <= LIMIT_P and 1 <= decision.decode.target <= LIMIT_D
        for name, most in (("prefill", 2), ("decode", 2)):
            assert sum(o.pool == name for o in decision.orders) <= most
            assert sum(d.pool == name for d in decision.drains) <= 1
        held = sum(pool.counts.held for pool in (decision.prefill, decision.decode))
        assert held + len(decision.orders) <= budget
    assert run.world.members(Role.PREFILL, WorkerState.READY)
    assert run.world.members(Role.DECODE, WorkerState.READY)


@pytest.mark.parametrize("seed", range(6))
async def test_an_adversary_gets_past_nothing(seed: int) -> None:
    w = World(HandClock(), rps=lambda t: 4.0 if (t // 30) % 2 else 0.5)
    run = await planner(w, policy(budget_gpus=9))
    run.service._brain = partial(decide, optimiser=Adversary(seed))
    await run.step(120)
    kept_within(run, 9)
    assert {"optimiser_failed", "proposal_bounds"} <= run.codes(120)
    memory = run.service._memory
    assert memory.guard_p.reversals + memory.guard_d.reversals <= 4


async def test_an_adversary_cannot_shrink_on_old_data() -> None:
    w = World(HandClock(), rps=lambda _t: 5.0)
    run = await planner(w)
    await run.step(80)
    before = run.desired[-1][1:]
    run.service._brain = partial(decide, optimiser=lambda _p: Proposal(1, 1, 1, 1))
    w.frozen = True
    await run.step(60)
    assert run.desired[-1][1:] == before and not w.releases
    w.frozen, w.overrides = False, {"decoding_requests": None}
    await run.step(60)
    assert run.desired[-1][1] >= before[0] and run.desired[-1][2] >= before[1]


async def test_an_adversary_cannot_give_up_who_is_needed() -> None:
    """Fresh data, and it wants everybody gone: what is in use stays."""
    w = World(HandClock(), rps=lambda _t: 5.0)
    run = await planner(w)
    await run.step(80)
    run.service._brain = partial(decide, optimiser=lambda _p: Proposal(1, 1, 1, 1))
    await run.step(120)
    assert "proposal_shrink" in run.codes(60)
    assert w.ttft_s < 2.0 and w.tpot_s < 0.1


async def test_one_that_always_fails_is_replaced_until_it_answers() -> None:
    w = World(HandClock(), rps=lambda t: 5.0 if t < 60 else 0.5)
    run = await planner(w)
    broken = [True]

    def learned(asked: Problem) -> Proposal:
        if broken[0]:
            raise ZeroDivisionError("nonsense")
        return size(asked)

    run.service._brain = partial(decide, optimiser=learned)
    await run.step(160)
    assert {"optimiser_failed", "optimiser_replaced"} <= run.codes()
    assert run.desired[-1][1:] == (1, 1), "the planner's own stands in, and shrinks again"
    broken[0] = False
    await run.step(2)
    assert run.service._memory.failing == 0 and "optimiser_failed" not in run.codes()


# --------------------------------------------------------------------------- time


async def test_one_that_sleeps_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured outside the brain: the tick goes on without it, and it is not asked twice at once."""
    awake, asked = threading.Event(), []

    def sleeps(found: Problem) -> Proposal:
        asked.append(found)
        awake.wait(20.0)
        return size(found)

    monkeypatch.setitem(optimisers.BUILT_IN, "sleepy", sleeps)
    w = World(HandClock(), rps=lambda _t: 4.0)
    run = await planner(w, policy(optimiser="sleepy"), optimiser_s=0.05, sample_every_s=0.0)
    began_s = time.monotonic()
    await run.step(20)
    assert time.monotonic() - began_s < 5.0
    assert len(asked) == 1
    assert any("no answer within" in r.text for r in run.decisions[-1].why)
    assert run.world.members(Role.PREFILL, WorkerState.READY), "the floor came up"
    whole = (await run.journal.get(run.decisions[-1].decision_id))[0]
    assert replay(whole) == run.decisions[-1]
    awake.set()
    for _ in range(100):
        await run.step(1)
        if run.service._memory.failing == 0:
            break
    assert run.service._memory.failing == 0 and len(asked) > 1, "asked again once it is awake"


def test_an_answer_is_kept_as_it_was_checked() -> None:
    asked = Asked(lambda _p: Proposal(99, 99, 99, 99))
    busy = problem(3000.0, 300.0)
    made = asked(busy)
    assert asked.answer == Answer(made) and made.p == 40
    assert answered(asked.answer)(busy) == made
    failing = Asked(lambda _p: Proposal(-1, 1, 1, 1))
    with pytest.raises(NoAnswer, match="p=-1"):
        failing(busy)
    assert failing.answer is not None and failing.answer.proposal is None
    with pytest.raises(NoAnswer, match="p=-1"):
        answered(failing.answer)(busy)
