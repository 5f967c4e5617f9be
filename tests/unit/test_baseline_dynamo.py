"""Dynamo's planner against numbers worked out by hand from the profile.

Prefill of h100-tp4-llama70b: 1024 tokens 106.314 ms, 2048 200.929, 4096 466.397, 8192 943.277.
Decode: 28.7217 ms + 0.27472 a sequence + 1.10682e-4 a KV token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from readyplane_lab.proof.baselines.dynamo_correction import Correction, CorrectionState
from readyplane_lab.proof.baselines.parts.dynamo import (
    Dynamo,
    DynamoState,
    Predictor,
    Traffic,
    chunked_s,
    decode_change,
    decode_rps,
    prefill_change,
    prefill_rps,
)
from readyplane_lab.proof.baselines.parts.facts import Engine
from readyplane_lab.proof.baselines.parts.kalman import Kalman
from tests.unit.baseline_world import PROFILE, engines, facts, setting

STEADY: dict[str, Any] = {
    "arrivals": 30.0,
    "prompt": 30.0 * 1024,
    "uncached": 30.0 * 1024,
    "finished": 30.0,
    "generated": 30.0 * 128,
    "new": 1024.0,
}


def kv(*tokens: float) -> tuple[Engine, ...]:
    return tuple(Engine(f"d-{i}", kv_tokens=t) for i, t in enumerate(tokens))


def test_prefill_rate_is_that_of_the_best_batch_within_the_sla() -> None:
    # 1: 9.406/s, 2: 2 / 0.200929 = 9.954, 3: 3 / 0.333663 = 8.991, 4: 8.576.
    assert prefill_rps(PROFILE, isl=1024.0, ttft_s=2.0) == pytest.approx(9.954, abs=1e-3)
    assert prefill_rps(PROFILE, isl=1024.0, ttft_s=0.15) == pytest.approx(9.406, abs=1e-3)
    # Alone it misses an SLA of 50 ms: it is only warned about and counted at its own pace.
    assert prefill_rps(PROFILE, isl=1024.0, ttft_s=0.05) == pytest.approx(9.406, abs=1e-3)
    assert prefill_rps(PROFILE, isl=0.0, ttft_s=2.0) == 0.0


def test_long_prompts_are_chunked() -> None:
    # 18432 = 2 x 8192 + 2048.
    assert chunked_s(PROFILE, 18432.0) == pytest.approx(2 * 0.943277 + 0.200929)
    assert chunked_s(PROFILE, 8192.0) == pytest.approx(0.943277)


def test_decode_rate_is_that_of_the_largest_batch_within_the_sla() -> None:
    # Context 1024 + 64; (50 - 28.7217) / (0.27472 + 0.120422) = 53.85, so 53 at 49.664 ms.
    rate = decode_rps(PROFILE, isl=1024.0, osl=128.0, tpot_s=0.05)
    assert rate == pytest.approx(53 / (128 * 0.049664), rel=1e-3)
    assert decode_rps(PROFILE, isl=1024.0, osl=0.0, tpot_s=0.05) == 0.0


def run(rule: Dynamo, seconds: float, **changes: Any) -> list[tuple[float, int, int]]:
    """Ticks of 5 s with instant starts: what is wanted is ready at the next tick."""
    state, seen = DynamoState(), []
    p, d = 2, 2
    for i in range(int(seconds / 5.0) + 1):
        now_s = 5.0 * i
        at = facts(now_s=now_s, p=(p, 0), d=(d, 0), **{**STEADY, **changes})
        at = replace(at, prefill_engines=engines(*[0.0] * p), decode_engines=kv(*[1e4] * d))
        targets, state = rule.step(at, state)
        p, d = targets.prefill or 0, targets.decode or 0
        seen.append((now_s, p, d))
    return seen


def test_throughput_decides_every_180_s_by_the_interval_before() -> None:
    seen = run(Dynamo(setting(), throughput=True, load=False), 400.0)
    assert {(p, d) for at, p, d in seen if at < 180.0} == {(2, 2)}
    # P: 30 / 9.954 = 3.01 -> 4. D: 30 / 8.337 = 3.6 -> 4.
    assert {(p, d) for at, p, d in seen if at >= 180.0} == {(4, 4)}


def test_cache_hits_shorten_the_prompts_and_are_believed_up_to_95_percent() -> None:
    rule = Dynamo(setting(), throughput=True, load=False)
    # Half is held: 512 tokens; the best batch is 4 of them (2048 in 200.929 ms): 19.91/s, so 2.
    assert run(rule, 180.0, uncached=15.0 * 1024)[-1][1:] == (2, 4)
    # All is held: counted as 51.2 tokens: 40 of them are 2048, 199.1/s.
    assert run(rule, 180.0, uncached=0.0)[-1][1:] == (1, 4)


def test_more_demand_moves_eight_at_most() -> None:
    rule = Dynamo(setting(), throughput=True, load=False, demand=10.0)
    seen = {at: (p, d) for at, p, d in run(rule, 560.0)}
    assert seen[175.0] == (2, 2)
    assert seen[180.0] == (10, 10)
    assert seen[360.0] == (18, 18)
    assert seen[540.0] == (26, 26)


@pytest.mark.parametrize("silent", [{"arrivals": 0.0, "prompt": 0.0}, {"finished": 0.0}])
def test_an_interval_without_lengths_holds_both(silent: dict[str, float]) -> None:
    rule = Dynamo(setting(), throughput=True, load=False)
    assert run(rule, 400.0, **silent)[-1][1:] == (2, 2)


def test_kalman_extrapolates_what_constant_repeats() -> None:
    rising = Kalman()
    for value in (100.0, 200.0, 300.0, 400.0):
        rising = rising.add(value)
    assert 450.0 < rising.next < 520.0
    assert Kalman().add(0.0).add(0.0) == Kalman()
    steady = Dynamo(setting(), throughput=True, load=False, predictor=Predictor.KALMAN)
    assert run(steady, 400.0)[-1][1:] == (4, 4)
    # 30 requests/s after 10 and 20: constant says 30 (P 3.01, D 3.6), the trend nearly 40.
    past = DynamoState(
        targets=(2, 2),
        requests=Kalman().add(1800.0).add(3600.0),
        isl=Kalman().add(1024.0).add(1024.0),
        osl=Kalman().add(128.0).add(128.0),
    )
    at = facts(now_s=0.0, p=(2, 0), d=(2, 0), **STEADY)
    targets, _ = steady.step(at, past)
    assert (targets.prefill, targets.decode) == (4, 5)  # 39 / 9.954 = 3.9, 39 / 8.337 = 4.7


@pytest.mark.parametrize(
    "queues, change",
    [
        ((17408.0, 17408.0), 1),  # 18432 tokens: 2.087 s, both above 2 s
        ((17408.0, 16384.0), 0),  # 17408 tokens: 1.993 s: not all are above
        # Shared by two: 6144 + 1024 tokens in 0.824 s, less own 0.106: below 0.8 x 1.894.
        ((4096.0, 4096.0, 4096.0), -1),
        # 13500 + 1024 tokens: 1.670 - 0.106 = 1.564, above 1.515.
        ((9000.0, 9000.0, 9000.0), 0),
        ((9000.0, 0.0, 0.0), 0),  # every engine must allow it
        ((0.0,), 0),  # the last one stays
        ((), 0),
    ],
)
def test_load_mode_on_prefill(queues: tuple[float, ...], change: int) -> None:
    assert prefill_change(engines(*queues), PROFILE, new=1024.0, ttft_s=2.0) == change


@pytest.mark.parametrize(
    "resident, change",
    [
        ((60_000.0, 60_000.0), 1),  # 60 sequences of 1000: 51.8 ms
        ((60_000.0, 50_000.0), 0),  # 48.0 ms: not all
        ((30_000.0, 30_000.0), 0),  # on one: 51.8 ms
        ((10_000.0, 10_000.0), -1),  # on one: 36.4 ms, below 0.8 x 50
        ((10_000.0,), 0),
    ],
)
def test_load_mode_on_decode(resident: tuple[float, ...], change: int) -> None:
    assert decode_change(kv(*resident), PROFILE, context=1000.0, tpot_s=0.05) == change


def test_kv_must_fit_after_a_worker_less() -> None:
    roomy = replace(PROFILE, decode_points=((1.0, 1.0, 1.0), (2.0, 400_000.0, 2.0)))
    assert decode_change(kv(2e5, 2e5), roomy, context=1e5, tpot_s=0.05) == -1
    assert decode_change(kv(2.4e5, 2.4e5), roomy, context=1e5, tpot_s=0.05) == 0  # 480,000


def busy(now_s: float, p: tuple[int, int], d: tuple[int, int]) -> Any:
    """All P engines above the SLA, D engines at ease."""
    at = facts(now_s=now_s, p=p, d=d, **STEADY)
    return replace(at, prefill_engines=engines(*[2e4] * p[0]), decode_engines=kv(*[4.5e4] * d[0]))


def test_load_mode_waits_for_five_reports_and_for_what_is_moving() -> None:
    rule = Dynamo(setting(), throughput=False, load=True)
    state = DynamoState()
    wanted = []
    for i in range(3):  # two reports a tick: six at the third
        targets, state = rule.step(busy(5.0 * i, (2, 0), (3, 0)), state)
        wanted.append(targets.prefill)
    assert wanted == [2, 2, 3]
    targets, state = rule.step(busy(15.0, (2, 1), (3, 0)), state)
    assert (targets.prefill, targets.why) == (3, "scaling_in_progress")
    # D is moving: P holds as well.
    targets, state = rule.step(busy(20.0, (3, 0), (2, 0)), state)
    assert (targets.prefill, targets.why) == (3, "scaling_in_progress")
    targets, state = rule.step(busy(25.0, (3, 0), (3, 0)), state)
    assert targets.prefill == 4
    blind = replace(busy(30.0, (4, 0), (3, 0)), prefill_engines=engines(2e4))
    targets, state = rule.step(blind, state)
    assert (targets.prefill, targets.why) == (4, "worker_count_mismatch")


def test_both_modes_the_floor_holds_what_load_would_give_up() -> None:
    load_only = run(Dynamo(setting(), throughput=False, load=True), 400.0)
    assert load_only[-1][1:] == (1, 1)  # no queue, little KV: one worker less at a time
    both = run(Dynamo(setting(), throughput=True, load=True), 400.0)
    assert both[-1][1:] == (4, 4)
    assert {(p, d) for at, p, d in both if at <= 180.0} == {(2, 2)}  # the fleet that it found
    # The floor of 180 s is taken up by the load decision of the next tick.
    assert next(at for at, p, _ in both if p == 4) == 185.0


def corrected(ttft_s: float, tpot_s: float, ready: int) -> tuple[int, int] | None:
    traffic = Traffic(180.0, 5400.0, 5400.0 * 1024, 5400.0 * 1024, 5400.0, 5400.0 * 128)
    state = CorrectionState(traffic, ttft_s=ttft_s, tpot_s=tpot_s, ticks=1)
    return Correction(setting()).replicas(state, decode_ready=ready)


def test_correction_never_grows_prefill_for_a_queue() -> None:
    # 30,720 tokens/s over 9631.8: 3.19.
    assert (corrected(0.106314, 0.04, 4) or (0, 0))[0] == 4
    assert (corrected(0.212628, 0.04, 4) or (0, 0))[0] == 4  # min(1, 2)
    assert (corrected(0.053157, 0.04, 4) or (0, 0))[0] == 2  # half of it: 1.59


def test_correction_of_decode() -> None:
    # 30/s x 5.3326 s / 4 = 40 each: 44.53 ms profiled, d = 0.898, ITL 55.66 ms: 1224.8 tokens/s.
    assert (corrected(0.212628, 0.04, 4) or (0, 0))[1] == 4  # 3840 / 1224.8 = 3.14
    # 88 each: 63.5 ms profiled, 90 measured: d = 1.417, ITL 35.3 ms: 470 tokens/s.
    assert (corrected(0.212628, 0.09, 4) or (0, 0))[1] == 9  # 8.2
    # 11.7 each: 33.4 ms profiled: d = 2.7, no batch keeps 18.5 ms: the minimum, as published.
    assert (corrected(0.212628, 0.09, 30) or (0, 0))[1] == 1


def test_correction_skips_an_interval_with_something_missing() -> None:
    rule, state = Correction(setting()), CorrectionState()
    for i in range(80):
        at = facts(now_s=5.0 * i, p=(2, 0), d=(2, 0), **{**STEADY, "ttft_s": None})
        targets, state = rule.step(at, state)
        assert (targets.prefill, targets.decode) == (2, 2)
    at = facts(now_s=400.0, p=(2, 0), d=(2, 0), **STEADY)
    grown = None
    for i in range(1, 40):
        targets, state = rule.step(replace(at, now_s=400.0 + 5.0 * i), state)
        grown = targets.prefill
    assert grown == 4
