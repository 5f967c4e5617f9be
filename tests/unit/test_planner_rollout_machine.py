"""Whatever happens during a roll-out: never half a pair, never less than there was, always an end.

The checks of every step are in `rollout_world`; here is what may happen, in any order.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from readyplane_planner.rollout import RESTING, Asked, Rules
from readyplane_planner.rollout.values import HELD, Phase
from tests.unit.rollout_world import NEW, OLD, THIRD, Fleet

REVISIONS = st.sampled_from((OLD, NEW, THIRD))
WORKERS = st.integers(1, 5)


class AnyRollout(RuleBasedStateMachine):
    """A fleet to which things happen."""

    fleet: Fleet

    @initialize(
        p=WORKERS,
        d=WORKERS,
        surge=st.integers(1, 3),
        pause_on=st.sets(st.sampled_from(("attainment", "starts", "unknown"))),
        drain=st.integers(1, 12),
        spare=st.none() | st.integers(0, 4),
    )
    def begin(
        self, p: int, d: int, surge: int, pause_on: set[str], drain: int, spare: int | None
    ) -> None:
        rules = Rules(surge=surge, pause_on=tuple(sorted(pause_on)), verify_s=5.0, patience_s=60.0)
        budget = None if spare is None else p + d + spare
        self.fleet = Fleet.of(p, d, rules=rules, drain=drain, budget=budget)
        self.asks = 0

    @rule(ticks=st.integers(1, 12))
    def time_passes(self, ticks: int) -> None:
        self.fleet.run(ticks)

    @rule(wanted=REVISIONS)
    def a_tag_moves(self, wanted: str) -> None:
        self.fleet.wanted = wanted
        self.fleet.run(4)

    @rule(place=st.integers(0, 1), digest=REVISIONS)
    def one_crashes(self, place: int, digest: str) -> None:
        self.fleet.crash(place, digest)

    @rule(place=st.integers(0, 1), count=WORKERS)
    def the_target_moves(self, place: int, count: int) -> None:
        if self.fleet.budget is None:
            self.fleet.targets[place] = count

    @rule(digest=REVISIONS)
    def its_starts_fail_from_now_on(self, digest: str) -> None:
        self.fleet.fails = {digest}

    @rule(digest=REVISIONS, share=st.sampled_from((0.3, 0.8, 1.0)))
    def it_attains(self, digest: str, share: float) -> None:
        self.fleet.share = {digest: share}

    @rule(known=st.booleans(), told=st.booleans(), idle=st.booleans(), hold=st.booleans())
    def signals_change(self, known: bool, told: bool, idle: bool, hold: bool) -> None:
        fleet = self.fleet
        fleet.known, fleet.told, fleet.idle, fleet.hold = known, told, idle, hold
        fleet.run(3)

    @rule(action=st.sampled_from(("go", "pause", "resume", "undo")))
    def a_person_asks(self, action: str) -> None:
        self.asks += 1
        asked = Asked(f"a{self.asks}", action, "ann")
        self.fleet.rules = replace(self.fleet.rules, asked=asked)
        self.fleet.run(2)

    @invariant()
    def it_remembers_no_more_than_it_may(self) -> None:
        if hasattr(self, "fleet"):
            state = self.fleet.state
            assert state.evidence.new_now.ended <= 100 * 70
            assert all(0 <= count <= 1000 for count in state.failures)

    def teardown(self) -> None:
        """Left alone it comes to rest, or waits for a person and says why."""
        if not hasattr(self, "fleet"):
            return
        fleet = self.fleet
        fleet.known, fleet.hold, fleet.told, fleet.idle = True, False, True, False
        fleet.run(600)
        phase = fleet.state.phase
        assert phase in RESTING | HELD, (phase, fleet.state)
        if phase in HELD:
            assert fleet.state.reason
        else:
            there = {b.digest for pool in fleet.pools for b in pool}
            assert len(there - fleet.fails) <= 1, (phase, there)
            if phase is Phase.ROLLED_BACK:
                assert fleet.state.rejected


AnyRollout.TestCase.settings = settings(
    max_examples=30,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyRollout = AnyRollout.TestCase
