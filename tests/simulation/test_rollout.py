"""Roll-outs in the simulated world: under load, of bad revisions, and when the leader is killed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from readyplane.core.worker import Role
from readyplane_lab.simulator.faults import Fault, NewArtifact, PlannerRestart, StartsFail
from readyplane_lab.simulator.outcome import Life
from readyplane_lab.simulator.world_result import WorldResult
from tests.simulation.sim_world import Fixed, steady, world

PUBLISHED_S = 5.0
FOUR_FIFTHS_RPS = 6.0
"""Of what three P and two D serve in time."""
POLICY = {
    "up": {"cooldown_s": 1.0},
    "min_ready_s": 1.0,
    "drain_deadline_s": 60.0,
    "rollout": {"verify_s": 10.0, "samples_min": 20},
}


def rolled(*faults: Fault, rate_rps: float = 4.0, seconds: float = 120.0) -> WorldResult:
    """Three P and two D, and a revision that is published in the sixth second."""
    return world(
        Fixed((0.0, 3, 2)),
        steady(rate_rps, seconds),
        policy=POLICY,
        faults=faults or (NewArtifact(PUBLISHED_S),),
        initial=(3, 2),
        record=True,
    )


def phases(result: WorldResult) -> list[str]:
    """As decisions told of them, first to last."""
    told = [d["rollout"]["phase"] for d in reversed(result.decisions)]
    return list(dict.fromkeys(told))


def attained(result: WorldResult, since_s: float = 0.0) -> float:
    found = [r.attained for r in result.records if r.at_s >= since_s]
    return sum(found) / len(found)


def old_ones(result: WorldResult) -> dict[str, list[Life]]:
    """The workers of the beginning by pool."""
    old = [w for w in result.lives if not w.decision_id]
    return {pool: [w for w in old if w.pool == pool] for pool in ("prefill", "decode")}


def new_ones(result: WorldResult) -> list[Life]:
    return [w for w in result.lives if w.decision_id]


def ended_whole(result: WorldResult) -> bool:
    """Whether all requests finished."""
    return Counter(r.outcome for r in result.records) == {"finished": len(result.records)}


def last_drain_s(lives: list[Life]) -> float:
    assert all(w.drain_s is not None for w in lives), "somebody of the old ones is still there"
    return max(w.drain_s or 0.0 for w in lives)


def test_at_four_fifths_of_the_load_nobody_notices_and_nobody_old_is_left() -> None:
    result = rolled(rate_rps=FOUR_FIFTHS_RPS)
    assert ended_whole(result)
    assert attained(result) >= 0.97
    assert phases(result) == ["surging", "moving", "verifying", "done"]
    old = old_ones(result)
    # The last pair goes together: no old D without an old P, nor the other way round.
    assert last_drain_s(old["prefill"]) == pytest.approx(last_drain_s(old["decode"]), abs=1.0)
    ready_s = [w.ready_s for w in new_ones(result) if w.ready_s is not None]
    first_s = max(sorted(ready_s)[:2])
    assert min(w.drain_s or 0.0 for pool in old.values() for w in pool) > first_s
    assert Counter(w.pool for w in new_ones(result)) == {"prefill": 3, "decode": 2}


def test_a_revision_whose_starts_fail_is_rolled_back() -> None:
    result = rolled(NewArtifact(PUBLISHED_S), StartsFail(PUBLISHED_S, Role.PREFILL, 100))
    assert phases(result) == ["surging", "rolling_back", "rolled_back"]
    assert ended_whole(result)
    assert attained(result) == 1.0
    assert all(w.drain_s is None for pool in old_ones(result).values() for w in pool)
    tried = [w for w in new_ones(result) if w.pool == "prefill"]
    assert len(tried) == 3, "three in a row, and no more"
    assert all(w.released_s < 60.0 for w in new_ones(result))


def test_a_revision_that_is_too_slow_is_rolled_back_by_what_it_attains() -> None:
    result = rolled(NewArtifact(PUBLISHED_S, slowness=3.0))
    assert phases(result) == ["surging", "rolling_back", "rolled_back"]
    reason = next(
        r["text"]
        for d in reversed(result.decisions)
        if d["rollout"]["phase"] == "rolling_back"
        for r in d["reasons"]
        if r["code"] == "rollout"
    )
    assert "attained by the old one" in reason
    assert all(w.drain_s is None for pool in old_ones(result).values() for w in pool)
    back_s = max(w.drain_s or 0.0 for w in new_ones(result))
    assert len(new_ones(result)) == 2, "no more than the first pair"
    assert back_s < 75.0, "late streams are misses before they end"
    assert attained(result, back_s + 10.0) >= 0.98


@pytest.mark.parametrize("killed_s", [17.0, 50.0])
def test_a_killed_leader_is_followed_in_the_middle(killed_s: float) -> None:
    result = rolled(NewArtifact(PUBLISHED_S), PlannerRestart(killed_s, 2.0))
    assert ended_whole(result)
    assert attained(result) >= 0.97
    assert phases(result) == ["surging", "moving", "verifying", "done"]
    assert Counter(w.pool for w in new_ones(result)) == {"prefill": 3, "decode": 2}
    last_drain_s([w for pool in old_ones(result).values() for w in pool])
    begun: set[Any] = {d["rollout"]["to"]["number"] for d in result.decisions}
    assert begun == {2}, "one roll-out, whoever leads"


def test_what_was_rolled_back_is_not_tried_again_by_the_next_leader() -> None:
    result = rolled(
        NewArtifact(PUBLISHED_S),
        StartsFail(PUBLISHED_S, Role.PREFILL, 3),
        PlannerRestart(60.0, 2.0),
    )
    assert phases(result)[-1] == "rolled_back"
    assert all(w.allocated_s < 60.0 for w in new_ones(result))
    assert all(w.drain_s is None for pool in old_ones(result).values() for w in pool)
