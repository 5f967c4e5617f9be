"""The roll-out brain by tables: phases, pairs, evidence, and what a person may ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from readyplane_planner import rollout
from readyplane_planner.rollout import RESTING, Asked, Rules, Tally, health
from readyplane_planner.rollout.table import TABLE, Event, follow
from readyplane_planner.rollout.values import ACTIVE, HELD, Evidence, Phase
from tests.unit.rollout_world import FAULT, NEW, OLD, THIRD, Fleet

QUICK = Rules(samples_min=20, verify_s=5.0, patience_s=60.0)


def rolling(p: int = 2, d: int = 2, **options: object) -> Fleet:
    """An old fleet, and another artifact that is wanted from the third tick on."""
    made = Fleet.of(p, d, **{"rules": QUICK, **options})
    made.run(3).wanted = NEW
    return made


def asked(fleet: Fleet, action: str, number: int = 1) -> None:
    """A person asks once."""
    fleet.rules = replace(fleet.rules, asked=Asked(f"{action}-{number}", action, "ann"))


# ------------------------------------------------------------------ the table


def test_every_phase_has_a_way_out() -> None:
    """By itself while it is active, by a person while it is held, by another artifact at rest."""
    for phase in Phase:
        ways = {event for (left, event) in TABLE if left is phase}
        if phase in ACTIVE:
            assert {Event.BAD, Event.HALT, Event.PAUSE} <= ways, phase
        elif phase in HELD:
            assert {Event.UNDO, Event.BEGIN} <= ways, phase
        else:
            assert Event.BEGIN in ways, phase
    assert {*ACTIVE, *HELD, *RESTING} == set(Phase)
    assert follow(Phase.PAUSED, Event.RESUME, Phase.MOVING) is Phase.MOVING
    assert follow(Phase.IDLE, Event.UNDO, Phase.IDLE) is None


@pytest.mark.parametrize(
    ("p", "d", "surge"), [(1, 1, 1), (2, 2, 1), (4, 2, 1), (3, 7, 1), (12, 5, 2), (2, 3, 4)]
)
def test_a_good_generation_takes_over_whole(p: int, d: int, surge: int) -> None:
    fleet = rolling(p, d, rules=replace(QUICK, surge=surge)).until(Phase.DONE)
    assert fleet.there(OLD) == 0
    assert fleet.count(NEW) == (p, d)
    assert fleet.generation == rollout.Generation(NEW, 2)
    seen = list(dict.fromkeys(fleet.phases))
    assert seen == [Phase.IDLE, Phase.SURGING, Phase.MOVING, Phase.VERIFYING, Phase.DONE]


def test_nobody_goes_before_a_pair_of_the_new_one_has_proved_itself() -> None:
    fleet = rolling()
    while fleet.state.phase in {Phase.IDLE, Phase.SURGING}:
        fleet.tick()
        if fleet.state.phase is Phase.SURGING:
            assert fleet.count(OLD) == (2, 2)
            assert sum(fleet.count(NEW)) <= 2  # the surge, and no more
    assert min(fleet.count(NEW)) >= 1


def test_with_nothing_of_the_old_one_there_it_is_done_at_once() -> None:
    fleet = Fleet.of(0, 0, rules=QUICK)
    fleet.targets = [0, 0]
    fleet.run(2).wanted = NEW
    fleet.tick()
    assert fleet.state.phase is Phase.DONE
    assert fleet.generation.digest == NEW


def test_what_the_demand_adds_while_the_new_one_is_unproved_is_of_the_old_one() -> None:
    fleet = rolling()
    fleet.run(2)
    assert fleet.state.phase is Phase.SURGING
    fleet.targets = [3, 2]
    fleet.tick()
    assert fleet.step is not None
    assert fleet.step.grow.digest == OLD
    fleet.until(Phase.MOVING).targets = [4, 2]
    fleet.tick()
    assert fleet.step.grow.digest == NEW
    assert fleet.until(Phase.DONE).count(NEW) == (4, 2)


def test_a_smaller_target_is_followed_by_whole_pairs() -> None:
    fleet = rolling(4, 4).until(Phase.MOVING)
    fleet.targets = [2, 2]
    assert fleet.until(Phase.DONE).count(NEW) == (2, 2)


def test_a_worker_without_partner_is_retired_at_once() -> None:
    """The last old P is gone: the old D have nobody to serve with (the stall of before)."""
    fleet = rolling(1, 3).until(Phase.MOVING)
    fleet.crash(0, OLD)
    fleet.run(1)
    assert fleet.count(OLD) == (0, 0)
    assert fleet.until(Phase.DONE).count(NEW) == (1, 3)


def test_a_budget_without_room_pauses_and_says_so() -> None:
    fleet = rolling(2, 2, budget=4).until(Phase.PAUSED)
    assert fleet.count(OLD) == (2, 2)
    assert "no progress" in fleet.state.reason
    fleet.budget = 6
    asked(fleet, "resume")
    assert fleet.until(Phase.DONE).there(OLD) == 0


# ------------------------------------------------------------------ evidence


def test_one_that_attains_less_is_rolled_back_with_the_figures() -> None:
    fleet = rolling(2, 2, share={NEW: 0.6}).until(Phase.ROLLED_BACK)
    assert fleet.there(NEW) == 0
    assert fleet.count(OLD) == (2, 2)
    assert fleet.state.rejected == NEW
    fleet.run(100)
    assert fleet.state.phase is Phase.ROLLED_BACK, "what was rolled back is not tried again"
    assert fleet.there(NEW) == 0
    assert fleet.generation == rollout.Generation(OLD, 1)


def test_one_that_turns_bad_only_when_it_serves_alone_is_rolled_back_too() -> None:
    fleet = rolling().until(Phase.VERIFYING)
    fleet.share = {NEW: 0.5}
    fleet.until(Phase.ROLLED_BACK)
    assert fleet.count(OLD) == (2, 2)
    assert fleet.there(NEW) == 0


def test_starts_that_fail_roll_back_or_pause_as_the_policy_says() -> None:
    fleet = rolling(fails={NEW}).until(Phase.ROLLED_BACK)
    assert fleet.count(OLD) == (2, 2)
    paused = rolling(rules=replace(QUICK, pause_on=("starts",)), fails={NEW}).until(Phase.PAUSED)
    assert "starts of generation 2" in paused.state.reason
    assert paused.count(OLD) == (2, 2)
    paused.fails = set()
    asked(paused, "resume")
    assert paused.until(Phase.DONE).count(NEW) == (2, 2)


def test_why_it_was_rolled_back_is_told_for_as_long_as_it_is() -> None:
    fleet = rolling(fails={NEW}).until(Phase.ROLLED_BACK)
    told = fleet.state.reason
    assert "starts of generation 2" in told and f"the last by: {FAULT}" in told
    assert "; nobody but generation 1" in told, "and how it ended"
    fleet.run(50)
    assert fleet.state.reason == told
    asked(fleet, "go")
    fleet.fails = set()
    fleet.until(Phase.DONE)
    assert not fleet.state.cause and FAULT not in fleet.state.reason, (
        "another roll-out, another why"
    )


def test_a_roll_back_that_was_held_and_let_go_on_keeps_its_reason() -> None:
    fleet = rolling(2, 2, share={NEW: 0.6}).until(Phase.ROLLING_BACK)
    cause = fleet.state.reason
    asked(fleet, "pause")
    fleet.until(Phase.PAUSED)
    asked(fleet, "resume", 2)
    fleet.until(Phase.ROLLED_BACK)
    assert fleet.state.reason.startswith(f"{cause}; "), fleet.state.reason


def test_unknown_is_neither_good_nor_bad_and_pauses_after_its_bound() -> None:
    fleet = rolling(told=False)
    fleet.run(50)
    assert fleet.state.phase is Phase.SURGING
    assert fleet.count(OLD) == (2, 2)
    fleet.until(Phase.PAUSED, within=60)
    assert "0 of 20 requests" in fleet.state.reason
    asked(fleet, "resume")  # a person answers for it
    assert fleet.until(Phase.DONE).count(NEW) == (2, 2)


def test_where_nobody_asks_for_anything_no_evidence_is_awaited() -> None:
    fleet = rolling(idle=True).until(Phase.DONE)
    assert fleet.count(NEW) == (2, 2)


def test_unknown_rolls_back_where_no_person_is_to_decide() -> None:
    fleet = rolling(told=False, rules=replace(QUICK, pause_on=())).until(Phase.ROLLED_BACK)
    assert fleet.count(OLD) == (2, 2)


@pytest.mark.parametrize(
    ("new", "old", "verdict"),
    [
        (Tally(19, 0, 0), Tally(100, 100, 0), "unknown"),
        (Tally(20, 20, 0), Tally(100, 100, 0), "healthy"),
        (Tally(20, 16, 0), Tally(100, 100, 0), "healthy"),  # four of twenty may be bad luck
        (Tally(200, 150, 0), Tally(100, 100, 0), "unhealthy"),
        (Tally(200, 150, 0), Tally(100, 70, 0), "healthy"),  # the old one does no better
        (Tally(20, 20, 20), Tally(100, 100, 0), "unhealthy"),  # half of its legs failed
        (Tally(100, 50, 0), Tally(0, 0, 0), "unhealthy"),  # against what the policy promises
        (Tally(100, 85, 0), Tally(0, 0, 0), "healthy"),
    ],
)
def test_verdicts_of_attainment(new: Tally, old: Tally, verdict: str) -> None:
    evidence = Evidence()
    tallies = {NEW: new, OLD: old}
    evidence = health.gather(evidence, tallies, NEW, QUICK, now_s=0.0)
    assert health.judge(evidence, QUICK, promised=0.9).health == verdict


def test_the_next_one_is_compared_with_whoever_serves_and_not_with_what_was_rolled_back() -> None:
    fleet = rolling(2, 2, share={NEW: 0.3, THIRD: 0.6}).until(Phase.ROLLED_BACK)
    baseline = fleet.state.evidence.baseline
    assert baseline is None or baseline > 0.95
    fleet.wanted = THIRD
    fleet.until(Phase.ROLLING_BACK)
    assert "100.0% attained by the old one" in fleet.state.reason


def test_old_evidence_goes_and_slow_traffic_keeps_its_own() -> None:
    evidence = Evidence()
    for second in range(60):  # two a second: ten ticks fill a half
        evidence = health.gather(evidence, {NEW: Tally(2, 0, 0)}, NEW, QUICK, now_s=float(second))
    for second in range(60, 120):
        evidence = health.gather(evidence, {NEW: Tally(2, 2, 0)}, NEW, QUICK, now_s=float(second))
    kept = evidence.new_now + evidence.new_past
    assert kept.finished == kept.attained <= 60
    evidence = Evidence()
    for second in range(50):  # few among many old ones: the old ones do not push them out
        tallies = {NEW: Tally(1, 1, 0) if second % 4 == 0 else Tally(), OLD: Tally(9, 9, 0)}
        evidence = health.gather(evidence, tallies, NEW, QUICK, now_s=float(second))
    assert (evidence.new_now + evidence.new_past).finished == 13
    evidence = Evidence()
    for second in range(0, 50, 5):  # one in five seconds is still collected
        evidence = health.gather(evidence, {NEW: Tally(1, 1, 0)}, NEW, QUICK, now_s=float(second))
    assert (evidence.new_now + evidence.new_past).finished == 10


# ------------------------------------------------------------------ people and tags


def test_pause_holds_and_resume_goes_on_where_it_was() -> None:
    fleet = rolling(4, 4).until(Phase.MOVING)
    asked(fleet, "pause")
    fleet.tick()
    assert fleet.state.phase is Phase.PAUSED
    assert fleet.state.reason == "ann asked to pause"
    fleet.run(fleet.start + fleet.min_ready)
    held = fleet.count(OLD), fleet.count(NEW)
    fleet.run(200)
    assert (fleet.count(OLD), fleet.count(NEW)) == held, "a pause has no end of its own"
    asked(fleet, "resume")
    fleet.tick()
    assert fleet.phases[-1] == "moving"
    assert fleet.until(Phase.DONE).count(NEW) == (4, 4)


def test_a_paused_fleet_still_follows_the_demand_in_whole_pairs() -> None:
    fleet = rolling(4, 4).until(Phase.MOVING)
    fleet.run(3)
    asked(fleet, "pause")
    fleet.run(20)
    fleet.targets = [6, 6]
    fleet.run(20)
    p, d = (sum(x) for x in zip(fleet.count(OLD), fleet.count(NEW), strict=True))
    assert p >= 6
    assert d >= 6
    fleet.targets = [2, 2]
    fleet.run(40)
    pairs = [min(fleet.count(g)) for g in (OLD, NEW)]
    assert sum(pairs) >= 2
    assert sum(fleet.count(OLD)) + sum(fleet.count(NEW)) <= 8


def test_undo_goes_back_while_it_moves_and_after_it_is_done() -> None:
    fleet = rolling(3, 3).until(Phase.MOVING)
    asked(fleet, "undo")
    fleet.until(Phase.ROLLED_BACK)
    assert fleet.count(OLD) == (3, 3)
    assert fleet.there(NEW) == 0
    done = rolling(2, 2).until(Phase.DONE)
    asked(done, "undo")
    done.until(Phase.ROLLED_BACK)
    assert done.count(OLD) == (2, 2)
    assert done.there(NEW) == 0
    asked(done, "go")  # and a person may have it again
    assert done.until(Phase.DONE).count(NEW) == (2, 2)


def test_undo_where_there_is_nothing_to_undo_does_nothing() -> None:
    fleet = Fleet.of(2, 2, rules=QUICK).run(3)
    asked(fleet, "undo")
    fleet.run(5)
    assert fleet.state.phase is Phase.IDLE
    assert fleet.count(OLD) == (2, 2)


def test_a_wish_is_followed_once() -> None:
    fleet = rolling(4, 4).until(Phase.MOVING)
    asked(fleet, "pause")
    fleet.run(2)
    asked(fleet, "resume")
    fleet.run(30)
    assert fleet.phases[-1] is not Phase.PAUSED


def test_a_third_artifact_takes_the_place_of_an_unfinished_one() -> None:
    fleet = rolling(4, 4).until(Phase.MOVING)
    fleet.run(6)
    fleet.wanted = THIRD
    fleet.tick()
    assert fleet.turned, "another goal is on record, whatever the phase"
    fleet.until(Phase.DONE)
    assert fleet.count(THIRD) == (4, 4)
    assert fleet.there(OLD) == fleet.there(NEW) == 0
    assert fleet.generation.number == 3


def test_a_tag_that_moves_back_brings_the_old_one_back() -> None:
    fleet = rolling(3, 3).until(Phase.MOVING)
    fleet.wanted = OLD
    fleet.until(Phase.DONE)
    assert fleet.count(OLD) == (3, 3)
    assert fleet.there(NEW) == 0


def test_a_way_back_that_fails_too_says_so_and_waits_for_a_person() -> None:
    fleet = rolling(2, 2).until(Phase.VERIFYING)
    fleet.share, fleet.fails = {NEW: 0.2}, {OLD}
    fleet.until(Phase.FAILED)
    assert fleet.count(NEW) == (2, 2), "who serves badly serves on where nobody serves better"
    fleet.fails = set()
    asked(fleet, "resume")
    assert fleet.until(Phase.ROLLED_BACK).count(OLD) == (2, 2)


# ------------------------------------------------------------------ what is not known


def test_a_planner_that_begins_in_the_middle_goes_on() -> None:
    fleet = rolling(4, 4).until(Phase.MOVING)
    fleet.run(8)
    fleet.state, fleet.generation = rollout.Rollout(), rollout.Generation()
    fleet.until(Phase.DONE)
    assert fleet.count(NEW) == (4, 4)
    assert fleet.there(OLD) == 0


def test_on_another_clock_the_state_is_as_old_as_it_was() -> None:
    fleet = rolling(4, 4).until(Phase.MOVING)
    fleet.run(3)
    fleet.state = rollout.moved(fleet.state, 5000.0)
    fleet.now_s += 5000.0
    assert fleet.until(Phase.DONE).count(NEW) == (4, 4)


def test_what_is_not_known_moves_nobody_and_costs_no_patience() -> None:
    fleet = rolling(4, 4).until(Phase.MOVING)
    fleet.known = False
    fleet.tick()
    before = fleet.count(OLD)
    for _ in range(200):
        fleet.tick()
        assert fleet.step is not None
        assert fleet.step.retire == ((), ())
        assert fleet.step.surge == (0, 0)
    assert fleet.count(OLD) == before
    fleet.known = True
    fleet.tick()
    assert fleet.state.phase is Phase.MOVING
    assert fleet.until(Phase.DONE).count(NEW) == (4, 4)


def test_a_planner_that_is_held_changes_nothing() -> None:
    fleet = rolling(hold=True)
    fleet.run(50)
    assert fleet.state == rollout.Rollout() or fleet.state.phase is Phase.IDLE
    assert fleet.count(OLD) == (2, 2)
    assert fleet.there(NEW) == 0
