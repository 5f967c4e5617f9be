"""Plans in hindsight and those who play them: the clairvoyant and the short-sighted one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import Role
from readyplane_lab.proof.baselines import clairvoyant, lookahead
from readyplane_lab.proof.oracle import FleetPlan, Scripted, lower_bound, plan_of
from readyplane_lab.proof.oracle.demand import Foresight
from readyplane_lab.proof.oracle.layers import layered
from readyplane_lab.proof.oracle.lookahead import look
from readyplane_lab.proof.port import Hindsight, Setting
from readyplane_planner.decide.follow import Brain
from readyplane_planner.decide.values import Memory
from readyplane_planner.signals.values import Allocation, WorkerView
from tests.unit.baseline_world import T_READY, observation, plan, setting, worker

TICK_S = 5.0


@dataclass
class Fleet:
    """Workers that are ready `t_ready_s` after their order and gone the moment they drain."""

    t_ready_s: float = T_READY.p90_s
    members: dict[str, tuple[Role, float]] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    ready: list[tuple[float, int, int]] = field(default_factory=list)

    def play(self, brain: Brain, span_s: float, *, initial: tuple[int, int]) -> None:
        for role, count in ((Role.PREFILL, initial[0]), (Role.DECODE, initial[1])):
            for i in range(count):
                self.members[f"first-{role}-{i}"] = (role, -1e6)
        tick = plan(tick_s=TICK_S)
        known: dict[str, WorkerView] = {}
        for k in range(int(span_s / TICK_S) + 1):
            now_s = k * TICK_S
            serving = {n for n, (_r, at) in self.members.items() if now_s >= at + self.t_ready_s}
            for name in serving - known.keys():
                known[name] = worker(self.members[name][0], 0)
            views = tuple(replace(known[n], worker_id=n, incarnation=n) for n in sorted(serving))
            seen = replace(
                observation(views, now_s=1000.0 + now_s, arrivals=1.0),
                allocations=tuple(
                    Allocation(n, role, "running", allocated_ago_s=now_s - at)
                    for n, (role, at) in sorted(self.members.items())
                ),
            )
            roles = [v.role for v in views]
            self.ready.append((now_s, roles.count(Role.PREFILL), roles.count(Role.DECODE)))
            decision, self.memory = brain(
                seen, tick, self.memory, now_s=1000.0 + now_s, decision_id=f"d{k}"
            )
            for order in decision.orders:
                role = Role.PREFILL if order.pool == "prefill" else Role.DECODE
                self.members[order.worker_id] = (role, now_s)
            for gone in [d.worker_id for d in decision.drains]:
                del self.members[gone]
            for gone in [r.worker_id for r in decision.releases]:
                del self.members[gone]

    def at(self, at_s: float) -> tuple[int, int]:
        return next((p, d) for t, p, d in self.ready if t == at_s)


def foresight(load_p: list[float], load_d: list[float], step_s: float = 60.0) -> Foresight:
    p, d = np.array(load_p, float), np.array(load_d, float)
    return Foresight(step_s, p * step_s, d * step_s, np.ceil(p), np.ceil(d), p, d)


def known(load_p: list[float], load_d: list[float]) -> Setting:
    return replace(setting(), hindsight=foresight(load_p, load_d))


def test_the_bound_by_hand() -> None:
    """Starts cost 30 + 5 s in prefill and 30 + 30 s in decode, so that one gap of 60 s is kept."""
    given_ = replace(known([1, 2, 1, 2], [4, 5, 4, 5]), initial=(1, 4))
    found = lower_bound(given_)
    assert found.prefill.workers.tolist() == [1, 2, 1, 2] and found.prefill.starts == 2
    assert found.decode.workers.tolist() == [4, 5, 5, 5] and found.decode.starts == 1
    seconds = 6 * 60 + 2 * 35 + 19 * 60 + 60
    assert found.gpu_hours == pytest.approx(seconds * 4 / 3600)
    assert found.cost == pytest.approx(found.gpu_hours)


def test_a_margin_multiplies_before_rounding_up() -> None:
    given_ = known([1.0, 1.6, 1.0, 0.2], [2.0, 2.0, 2.0, 2.0])
    assert plan_of(given_, margin=1.2).prefill.tolist() == [2, 2, 2, 1]
    assert plan_of(given_).prefill.tolist() == [1, 2, 1, 1]
    two = np.array([1.0, 2.0])
    rounded = replace(setting(), hindsight=Hindsight(60.0, two, two, two, two), initial=(2, 2))
    assert plan_of(rounded, margin=1.2).decode.tolist() == [2, 3]


def test_a_plan_keeps_to_the_bounds_of_all() -> None:
    found = plan_of(replace(known([0.0, 9.0], [0.0, 9.0]), high=(4, 5)), margin=2.0)
    assert found.prefill.tolist() == [1, 4] and found.decode.max() == 5


def test_what_is_wanted_within_a_time() -> None:
    found = FleetPlan(10.0, np.array([1, 4, 2]), np.array([3, 3, 5]))
    assert found.wanted(0.0, 10.0) == (1, 3)
    assert found.wanted(0.0, 10.1) == (4, 3)
    assert found.wanted(20.0, 999.0) == (2, 5)
    assert found.wanted(555.0, 999.0) == (2, 5)


def test_a_script_is_there_in_time_and_gives_back() -> None:
    steps = FleetPlan(60.0, np.array([1, 1, 3, 1, 1, 1]), np.array([2, 2, 2, 5, 5, 1]))
    fleet = Fleet()
    fleet.play(Scripted(steps, lead_s=T_READY.p90_s), 360.0, initial=(1, 2))
    for at_s, p, d in fleet.ready:
        want_p, want_d = steps.wanted(at_s, at_s + 1e-6)
        assert p >= want_p and d >= want_d, at_s
    assert fleet.at(115.0) == (1, 2) or fleet.at(115.0) == (3, 2)
    assert fleet.at(65.0) == (1, 2)  # nobody before 120 s less T_ready and a tick
    assert fleet.at(185.0) == (1, 5)
    assert fleet.at(310.0) == (1, 1)


def test_contenders_are_what_they_say() -> None:
    for contender in (clairvoyant.CONTENDER, lookahead.CONTENDER):
        assert contender.hindsight and contender.aware and len(contender.values) == 8
        assert contender.default in contender.values
        fielded = contender.make(1.0, known([1.0, 2.0], [2.0, 1.0]))
        assert fielded.policy["tick_s"] == TICK_S and fielded.initial is None


@pytest.mark.parametrize(
    ("window", "live", "target"),
    [
        ([1, 1, 1, 1], 1, 1),
        ([1, 1, 1, 4], 1, 1),  # not yet: the order is due later
        ([1, 3, 1, 4], 1, 3),  # within the lead
        ([1, 1, 1, 3], 5, 3),  # two are worth keeping, two are not
        ([0, 0, 0, 0], 2, 0),
        ([2, 1, 1, 1], 0, 2),
    ],
)
def test_short_sight_by_hand(window: list[int], live: int, target: int) -> None:
    """Steps of 10 s, a lead of two of them, a start that costs the window's length."""
    assert look(np.array(window, float), step_s=10.0, beta_s=40.0, live=live, lead_s=20.0) == target


@given(
    window=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    live=st.integers(0, 8),
    lead_steps=st.integers(1, 8),
)
@settings(max_examples=150, deadline=None)
def test_short_sight_grows_late_and_keeps_what_comes_back(
    window: list[int], live: int, lead_steps: int
) -> None:
    """With a window no longer than the cost of a start, planning anew is a clip of what is live."""
    found = look(
        np.array(window, float),
        step_s=10.0,
        beta_s=10.0 * len(window),
        live=live,
        lead_s=10.0 * lead_steps,
    )
    assert found == min(max(live, *window[:lead_steps]), max(window))


def test_short_sight_lets_go_what_is_wanted_again_too_late() -> None:
    """A start costs 60 s in decode, and steps are 60 s: a gap of two steps is not worth keeping."""
    load = [3.0, 1.0, 1.0, 3.0, 3.0]
    given_ = replace(
        known([1.0] * 5, load), initial=(1, 3), t_ready=StartQuantiles(30, 45, 60, 0, 0)
    )
    fleet = Fleet()
    fleet.play(lookahead.make(1.0, given_).brain, 240.0, initial=(1, 3))
    assert fleet.at(65.0) == (1, 1)
    assert fleet.at(180.0) == (1, 3)
    assert lower_bound(given_).decode.workers.tolist() == load


@given(
    load=st.lists(st.floats(0.0, 5.0), min_size=3, max_size=20),
    t_ready_s=st.sampled_from([20.0, 65.0, 150.0]),
)
@settings(max_examples=40, deadline=None)
def test_short_sight_is_enough_for_pools_that_are_alone(
    load: list[float], t_ready_s: float
) -> None:
    """Planned anew at every step from what is there, it comes to the plan of the clairvoyant."""
    need, step_s, beta_s = np.ceil(np.array(load)), 10.0, t_ready_s + 10.0
    live, seen = int(need[0]), []
    for k in range(len(need)):
        window = need[k : k + int(np.ceil(beta_s / step_s)) + 1]
        live = look(window, step_s=step_s, beta_s=beta_s, live=live, lead_s=step_s)
        seen.append(live)
    assert seen == layered(need, step_s=step_s, beta_s=beta_s).workers.tolist()


def test_without_a_clock_of_its_own_a_brain_plays_the_same() -> None:
    runs = []
    for _ in range(2):
        fleet = Fleet()
        fleet.play(clairvoyant.make(1.1, known([1, 3, 2], [2, 2, 4])).brain, 180.0, initial=(2, 4))
        runs.append(fleet.ready)
    assert runs[0] == runs[1]
