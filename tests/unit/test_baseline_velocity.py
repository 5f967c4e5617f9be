"""Fixed groups and token velocity against numbers worked out by hand from the profile."""

from __future__ import annotations

import pytest

from readyplane_lab.proof.baselines import groups
from readyplane_lab.proof.baselines.groups import GroupState
from readyplane_lab.proof.baselines.tokenscale import CONTENDER, Velocity, VelocityState
from tests.unit.baseline_world import PROFILE, facts, setting


def rule(target: float = 0.7) -> groups.Groups:
    return groups.Groups(target, 0.5, PROFILE, 0.05, (1, 1), (32, 32))


def test_the_ratio_is_that_of_the_traces_work() -> None:
    assert groups.frozen_ratio(setting().hindsight) == pytest.approx(10 / 20)
    assert groups.frozen_ratio(setting((0, 0), (2, 3)).hindsight) == 1.0


@pytest.mark.parametrize(
    "tokens, now, decoders",
    [
        (5000.0, 4, 7),  # 5000 / 730 = 6.85
        (3100.0, 4, 4),  # 4.25 is within 10 % of 4
        (3300.0, 4, 5),  # 4.52
        (1400.0, 4, 2),
        (0.0, 4, 0),
    ],
)
def test_decoders_follow_their_tokens(tokens: float, now: int, decoders: int) -> None:
    assert groups.wanted(tokens, now, target=730.0) == decoders


def test_both_pools_move_together_and_only_by_the_decode_signal() -> None:
    # A decoder's full rate at context 1200 is 52.21 sequences / 50 ms = 1044 tokens/s.
    state, seen = GroupState(), []
    for i in range(4):
        at = facts(now_s=5.0 * i, generated=5000.0, context=1200.0, prefill_load=30.0)
        targets, state = rule().step(at, state)
        seen.append((targets.prefill, targets.decode))
    assert seen == [(2, 4), (2, 4), (2, 4), (4, 7)]  # 5000 / 731 = 6.84; 7 x 0.5 = 3.5


def test_groups_shrink_after_300_s_and_hold_without_a_signal() -> None:
    state = GroupState()
    history = []
    for i in range(70):
        at = facts(now_s=5.0 * i, d=(8, 0), p=(4, 0), generated=1400.0, context=1200.0)
        targets, state = rule().step(at, state)
        history.append((at.now_s, targets.decode, targets.prefill))
    assert {(d, p) for now_s, d, p in history if now_s < 300.0} == {(8, 4)}
    assert history[-1][1:] == (2, 1)
    for i in range(70, 160):
        targets, state = rule().step(facts(now_s=5.0 * i, generated=None), state)
        assert (targets.prefill, targets.decode) == (1, 2)


def test_velocities_of_prefill_and_network() -> None:
    velocity = Velocity(setting())
    # V_P = 1024 / 0.106314 = 9632; the network's 50e9 / 327,680 = 152,588 is no bound.
    assert velocity.prefillers(28_000.0, new=1024.0, isl=1024.0) == 3  # 2.91
    assert velocity.prefillers(30_000.0, new=1024.0, isl=1024.0) == 4  # 3.11
    # A long cached prompt: 10 new tokens of 100,000 cost 49 ms, but all their KV is sent: V_N is
    # 152,588 x 10 / 100,000 = 15.3 new tokens/s.
    assert velocity.prefillers(100.0, new=10.0, isl=100_000.0) == 7  # 6.55


def test_velocity_of_decode_is_what_a_full_batch_releases() -> None:
    velocity = Velocity(setting())
    # 53.85 sequences of 1152 tokens, each done after 128 x 50 ms.
    found = velocity.decode_velocity(isl=1024.0, osl=128.0)
    assert found == pytest.approx(53.85 * 1152 / 6.4, rel=1e-3)
    # Which is requests/s x output over the decode rate: 30 x 1152 / 9693 = 3.57.
    assert velocity.decoders(30.0, isl=1024.0, osl=128.0) == 4
    assert Velocity(setting(), 2.0).decoders(30.0, isl=1024.0, osl=128.0) == 8


def test_growth_is_prompt_a_lull_shrinks_nothing_and_missing_rates_hold() -> None:
    velocity, state = Velocity(setting()), VelocityState()

    def tick(now_s: float, tokens: float | None) -> int | None:
        nonlocal state
        at = facts(now_s=now_s, uncached=tokens, new=1024.0, isl=1024.0)
        targets, state = velocity.step(at, state)
        return targets.prefill

    for i in range(30):
        assert tick(2.0 * i, 28_000.0) == 3
    assert tick(60.0, 280_000.0) == 9  # ten seconds' mean: (4 x 28 + 280) / 5 = 78.4 k, 8.14
    for i in range(31, 64):
        # The last ten seconds that hold the 280 k end at 68 s, and are remembered for a minute.
        wanted = tick(2.0 * i, 28_000.0)
        assert wanted == (9 if 2.0 * i < 128.0 else 3), i
    for i in range(64, 70):
        tick(2.0 * i, 28_000.0)
    for i in range(70, 90):
        assert tick(2.0 * i, None) == 3


def test_decoders_are_convertible() -> None:
    assert CONTENDER.make(1.0, setting()).convertible
