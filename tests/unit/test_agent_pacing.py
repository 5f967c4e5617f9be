"""The pace of weights that leave a serving worker: bounds, cuts, pauses and recovery (R9.1)."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane_agent.pacing import (
    Foreground,
    Pace,
    PacingPolicy,
    ServingTimes,
    begin,
    between,
    burst,
    elsewhere,
    observe,
    slo_share,
    spend,
)

MB = 1e6
POLICY = PacingPolicy(
    ceiling_bytes_per_s=100 * MB,
    first_bytes_per_s=math.inf,
    tpot_target_s=0.050,
    ttft_target_s=2.0,
)
CALM, NEAR, BETWEEN = Foreground(tpot_s=0.02), Foreground(tpot_s=0.049), Foreground(tpot_s=0.0445)


def after(
    pace: Pace, seen: Foreground, *, policy: PacingPolicy = POLICY, turns: int = 1, begun_s: float
) -> Pace:
    """The pace after some windows of 0.5 s in which all that may goes out."""
    for turn in range(turns):
        out = min(pace.bytes_per_s, 200 * MB)
        now_s = begun_s + 0.5 * (turn + 1)
        pace = observe(pace, seen, policy, given_bytes_per_s=out, now_s=now_s)
    return pace


def test_near_a_target_the_rate_is_halved_and_at_the_floor_it_is_paused() -> None:
    pace = begin(POLICY, now_s=0.0)
    rates = []
    for turn in range(6):
        pace = after(pace, NEAR, begun_s=0.5 * turn)
        rates.append(pace.bytes_per_s / MB)
    assert rates == [50.0, 25.0, 12.5, 6.25, 0.0, 0.0]
    assert "time per output token 49.0 ms of 50.0 ms promised" in pace.why


def test_between_calm_and_near_it_stays() -> None:
    pace = after(begin(POLICY, now_s=0.0), NEAR, begun_s=0.0)
    assert after(pace, BETWEEN, begun_s=0.5, turns=20).bytes_per_s == pace.bytes_per_s


def test_growth_waits_for_calm_windows_in_a_row() -> None:
    pace = after(begin(POLICY, now_s=0.0), NEAR, begun_s=0.0)
    assert after(pace, CALM, begun_s=0.5).bytes_per_s == 50 * MB
    mixed = after(after(pace, CALM, begun_s=0.5), BETWEEN, begun_s=1.0)
    assert after(mixed, CALM, begun_s=1.5).bytes_per_s == 50 * MB
    assert after(pace, CALM, begun_s=0.5, turns=2).bytes_per_s == 70 * MB


def test_a_pause_is_bounded_below_and_doubles_when_it_comes_again_soon() -> None:
    pace = after(begin(POLICY, now_s=0.0), NEAR, begun_s=0.0, turns=5)
    assert pace.paused_s == 2.5
    assert after(pace, CALM, begun_s=2.5).bytes_per_s == 0.0
    resumed = after(pace, CALM, begun_s=2.5, turns=2)
    assert resumed.bytes_per_s == POLICY.floor
    again = after(resumed, NEAR, begun_s=3.5)
    assert (again.paused_s, again.pause_for_s) == (4.0, 2 * POLICY.pause_s)


def test_paused_for_long_the_reader_is_told_to_go_elsewhere() -> None:
    pace = after(begin(POLICY, now_s=0.0), NEAR, begun_s=0.0, turns=5)
    assert not elsewhere(pace, POLICY, now_s=2.5 + POLICY.elsewhere_s)
    assert elsewhere(pace, POLICY, now_s=2.6 + POLICY.elsewhere_s)


def test_without_a_target_a_time_is_held_against_itself_without_a_push() -> None:
    policy = replace(POLICY, tpot_target_s=0.0)
    pace = begin(policy, now_s=0.0)
    for turn in range(4):  # nothing goes out: these are the baseline
        seen = Foreground(tpot_s=0.020, kv_s_per_byte=1e-9)
        pace = observe(pace, seen, policy, given_bytes_per_s=0.0, now_s=0.5 * turn)
    once = after(pace, Foreground(tpot_s=0.022), policy=policy, begun_s=2.0)
    assert once.bytes_per_s == 100 * MB  # one window may be chance
    slower = after(once, Foreground(tpot_s=0.022), policy=policy, begun_s=2.5)
    assert slower.bytes_per_s == 50 * MB
    assert "1.10 of what it is without" in slower.why
    kv = after(pace, Foreground(kv_s_per_byte=1.2e-9), policy=policy, turns=2, begun_s=2.0)
    assert kv.bytes_per_s == 50 * MB
    assert "KV transfer time" in kv.why
    assert (
        after(pace, Foreground(tpot_s=0.0203), policy=policy, begun_s=2.0).bytes_per_s == 100 * MB
    )


def test_a_push_is_no_excuse_for_itself_and_a_busier_worker_resumes() -> None:
    """The baseline moves only while nothing goes out, as it does in a pause."""
    policy = replace(POLICY, tpot_target_s=0.0)
    pace = observe(
        begin(policy, now_s=0.0),
        Foreground(tpot_s=0.020),
        policy,
        given_bytes_per_s=0.0,
        now_s=0.0,
    )
    busier = Foreground(tpot_s=0.030)
    pushed = after(pace, busier, policy=policy, begun_s=0.0, turns=10)
    assert (pushed.paused_s, pushed.tpot_s) == (5.0, 0.020)
    for turn in range(40):
        pushed = observe(pushed, busier, policy, given_bytes_per_s=0.0, now_s=3.0 + 0.5 * turn)
    assert pushed.paused_s is None
    assert pushed.tpot_s == pytest.approx(0.030, rel=0.01)


def test_what_is_not_known_is_no_pressure_and_no_baseline() -> None:
    pace = observe(begin(POLICY, now_s=0.0), Foreground(), POLICY, given_bytes_per_s=0.0, now_s=1.0)
    assert (pace.tpot_s, pace.kv_s_per_byte, pace.bytes_per_s) == (None, None, 100 * MB)
    assert slo_share(Foreground(), POLICY) is None
    assert slo_share(Foreground(ttft_s=1.0, tpot_s=0.04), POLICY) == pytest.approx(0.8)
    assert between(ServingTimes(), ServingTimes(1, 2, 3, 4, 5, 6)) == Foreground()
    began_anew = between(ServingTimes(9.0, 9, 9.0, 9, 9.0, 9), ServingTimes(1.0, 1, 1.0, 1, 1.0, 1))
    assert began_anew == Foreground()
    seen = between(
        ServingTimes(1.0, 10, 2.0, 100, 1.0, 1e9), ServingTimes(3.0, 12, 4.0, 200, 2.0, 3e9)
    )
    assert seen == Foreground(1.0, 0.02, 0.5e-9)


def test_it_suffers_without_us() -> None:
    """Nothing goes out and it suffers all the same: no rate of ours would help."""
    pace = observe(begin(POLICY, now_s=0.0), NEAR, POLICY, given_bytes_per_s=0.0, now_s=1.0)
    assert pace.bytes_per_s == 100 * MB


def test_unbounded_until_something_suffers() -> None:
    policy = PacingPolicy(tpot_target_s=0.05, first_bytes_per_s=math.inf)
    pace = begin(policy, now_s=0.0)
    assert spend(pace, 10**12, policy, now_s=0.0) == (pace, 0.0)
    cut = observe(pace, NEAR, policy, given_bytes_per_s=800 * MB, now_s=0.5)
    assert cut.bytes_per_s == 400 * MB
    # 200 MB/s go out in these windows, so no more than twice as much has been shown to harm nobody.
    assert 200 * MB < after(cut, CALM, policy=policy, begun_s=0.5, turns=160).bytes_per_s < 600 * MB


def test_a_push_begins_slowly_where_somebody_is_served() -> None:
    policy = PacingPolicy(tpot_target_s=0.05)
    pace = observe(begin(policy, now_s=0.0), CALM, policy, given_bytes_per_s=0.0, now_s=2.0)
    assert pace.bytes_per_s == policy.first_bytes_per_s
    idle = Foreground(idle=True)
    for turn in range(60):
        pace = observe(pace, idle, policy, given_bytes_per_s=0.0, now_s=3.0 + turn)
    assert math.isinf(pace.bytes_per_s)
    pace = observe(pace, CALM, policy, given_bytes_per_s=900 * MB, now_s=70.0)
    assert pace.bytes_per_s == policy.first_bytes_per_s


def test_what_is_no_longer_told_is_not_taken_for_calm() -> None:
    pace = observe(
        begin(PacingPolicy(), now_s=0.0), CALM, PacingPolicy(), given_bytes_per_s=0.0, now_s=1.0
    )
    silent = after(pace, Foreground(), policy=PacingPolicy(), begun_s=1.0, turns=50)
    assert silent.bytes_per_s == pace.bytes_per_s


def test_the_rate_that_hurt_is_approached_slowly_and_forgotten_in_the_end() -> None:
    pace = after(begin(POLICY, now_s=0.0), NEAR, begun_s=0.0)
    assert pace.hurt_bytes_per_s == 100 * MB
    pace = after(pace, CALM, begun_s=0.5, turns=10)
    assert 70 * MB < pace.bytes_per_s < 85 * MB
    assert after(pace, CALM, begun_s=60.0, turns=2).bytes_per_s == 100 * MB


def test_what_scatters_by_itself_is_no_sign() -> None:
    policy = replace(POLICY, tpot_target_s=0.0)
    calm = noisy = begin(policy, now_s=0.0)
    for turn in range(20):
        at_s = 0.5 * turn
        wave = 0.02 * (1.1 if turn % 2 else 0.9)
        noisy = observe(noisy, Foreground(tpot_s=wave), policy, given_bytes_per_s=0.0, now_s=at_s)
        calm = observe(calm, CALM, policy, given_bytes_per_s=0.0, now_s=at_s)
    slower = Foreground(tpot_s=0.022)
    much = Foreground(tpot_s=0.03)
    assert after(calm, slower, policy=policy, turns=2, begun_s=10.0).bytes_per_s == 50 * MB
    assert after(noisy, slower, policy=policy, turns=2, begun_s=10.0).bytes_per_s == 100 * MB
    assert after(noisy, much, policy=policy, turns=2, begun_s=10.0).bytes_per_s == 50 * MB


times = st.sampled_from([None, 0.01, 0.0424, 0.0426, 0.0474, 0.0476, 0.2])
seen = st.builds(Foreground, ttft_s=times, tpot_s=times, kv_s_per_byte=times, idle=st.booleans())
policies = st.builds(
    PacingPolicy,
    ceiling_bytes_per_s=st.sampled_from([1e5, 8e6, 1e9, math.inf]),
    ttft_target_s=st.sampled_from([0.0, 0.05]),
    tpot_target_s=st.sampled_from([0.0, 0.05]),
)


@given(policy=policies, samples=st.lists(st.tuples(seen, st.floats(0.0, 1e9)), max_size=60))
def test_the_rate_is_zero_or_within_its_bounds(
    policy: PacingPolicy, samples: list[tuple[Foreground, float]]
) -> None:
    pace = begin(policy, now_s=0.0)
    for turn, (what, out) in enumerate(samples):
        pace = observe(pace, what, policy, given_bytes_per_s=out, now_s=0.5 * turn)
        assert pace.bytes_per_s == 0 or (
            policy.floor <= pace.bytes_per_s <= policy.ceiling_bytes_per_s
        )
        assert (pace.bytes_per_s == 0) == (pace.paused_s is not None)
        assert pace.pause_for_s <= policy.pause_max_s


@given(policy=policies, before=st.lists(st.tuples(seen, st.floats(0.0, 1e9)), max_size=30))
def test_pressure_ends_in_a_pause_and_calm_in_the_ceiling(
    policy: PacingPolicy, before: list[tuple[Foreground, float]]
) -> None:
    """From wherever it stands, in a bounded number of windows."""
    if policy.tpot_target_s == 0:
        policy = replace(policy, tpot_target_s=0.05)
    pace = begin(policy, now_s=0.0)
    for turn, (what, out) in enumerate(before):
        pace = observe(pace, what, policy, given_bytes_per_s=out, now_s=0.5 * turn)
    now_s = 0.5 * len(before)
    pressed = pace
    for turn in range(12):
        out = min(pressed.bytes_per_s, 1e9)
        pressed = observe(
            pressed, Foreground(tpot_s=0.06), policy, given_bytes_per_s=out, now_s=now_s + turn / 2
        )
    assert pressed.paused_s is not None
    calm = pressed
    for turn in range(300):
        out = min(calm.bytes_per_s, 1e9)
        calm = observe(
            calm, Foreground(tpot_s=0.01), policy, given_bytes_per_s=out, now_s=now_s + 6 + turn / 2
        )
    assert calm.bytes_per_s >= min(policy.ceiling_bytes_per_s, 1e9)


@given(
    policy=policies.filter(lambda p: math.isfinite(p.ceiling_bytes_per_s)),
    asked=st.lists(
        st.tuples(st.integers(1, 2**20), st.floats(0.0, 0.3), st.booleans()),
        min_size=1,
        max_size=80,
    ),
)
def test_no_window_lets_more_out_than_rate_burst_and_one_piece(
    policy: PacingPolicy, asked: list[tuple[int, float, bool]]
) -> None:
    """Whatever the rate does meanwhile: the bound is that of the ceiling."""
    pace, now_s = begin(policy, now_s=0.0), 0.0
    sent: list[tuple[float, int]] = []
    for size, pause_s, presses in asked:
        now_s += pause_s
        if presses:
            what = Foreground(tpot_s=0.06)
            pace = observe(pace, what, policy, given_bytes_per_s=pace.bytes_per_s, now_s=now_s)
        pace, wait_s = spend(pace, size, policy, now_s=now_s)
        if math.isfinite(wait_s):
            now_s += wait_s  # one connection: it waits, then sends
            sent.append((now_s, size))
    most = max((size for _, size in sent), default=0)
    full = burst(replace(pace, bytes_per_s=policy.ceiling_bytes_per_s), policy)
    for first in range(len(sent)):
        total = 0
        for at_s, size in sent[first:]:
            total += size
            room = policy.ceiling_bytes_per_s * (at_s - sent[first][0]) + full + most
            assert total <= room * (1 + 1e-9) + 1
