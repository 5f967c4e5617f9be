"""The figures of a run, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from readyplane.core.work import Slo
from readyplane_lab.proof.measure import Times, ready_series, reversals, score, wasted
from readyplane_lab.proof.port import Hindsight
from readyplane_lab.simulator.outcome import Life, RunResult, Served

SLO = Slo(2.0, 0.05)
TIMES = Times(60.0, (2.0, 10.0))
INF = math.inf


def life(
    pool: str = "prefill",
    allocated_s: float = 0.0,
    ready_s: float | None = 60.0,
    released_s: float = 1000.0,
    drain_s: float | None = None,
    gpus: int = 4,
) -> Life:
    return Life("w", pool, "c", gpus, 2.0, allocated_s, ready_s, drain_s, released_s, "", "", "d1")


def served(*rows: tuple[float, float]) -> Served:
    """Requests of 100 prompt and 10 output tokens, one a second: (ttft, tpot)."""
    ttft, tpot = np.array(rows, dtype=float).reshape(-1, 2).T
    ones = np.ones(len(ttft))
    return Served(np.arange(len(ttft), dtype=float), 100 * ones, 10 * ones, ttft, tpot, ones)


def run(
    *lives: Life, rows: tuple[tuple[float, float], ...] = ((1.0, 0.04),), span_s: float = 3600.0
) -> RunResult:
    return RunResult(span_s, lives, served(*rows), {"finished": len(rows)}, ((0.0, 1, 1),))


def need(p: tuple[int, ...] = (1,), step_s: float = 3600.0) -> Hindsight:
    column = np.array(p, dtype=float)
    return Hindsight(step_s, column, column, column, np.zeros_like(column))


def scored(result: RunResult, hindsight: Hindsight | None = None):  # type: ignore[no-untyped-def]  # noqa: ANN201 - Scores
    return score(result, slo=SLO, times=TIMES, hindsight=hindsight or need())


def test_attained_means_both_targets_and_a_refusal_is_a_miss() -> None:
    rows = ((2.0, 0.05), (2.1, 0.01), (1.0, 0.06), (INF, INF))
    found = scored(run(life(), rows=rows))
    assert found.attainment == 0.25
    assert found.arrivals == 4
    assert found.ttft_p50_s == 2.0 and found.tpot_p99_s == 0.06


def test_violation_counts_token_work_and_caps_a_refusal() -> None:
    # 4 s to the first token: once over the target, times 100 prompt tokens; 0.1 s a token: once
    # over, times 10; a refusal: the cap of 10 for all its 110 tokens.
    found = scored(run(life(), rows=((4.0, 0.1), (INF, INF))))
    assert found.violation == pytest.approx(100 + 10 + 10 * 110)
    assert found.excess_s == pytest.approx(2.0)


def test_a_weight_stands_for_that_many_requests() -> None:
    base = served((1.0, 0.01), (9.0, 0.01))
    heavy = Served(base.at_s, base.isl, base.osl, base.ttft_s, base.tpot_s, np.array([3.0, 1.0]))
    found = scored(RunResult(10.0, (), heavy, {}, ()))
    assert found.attainment == 0.75 and found.arrivals == 4


def test_the_bill_is_cut_to_the_window_and_adds_up() -> None:
    early = life(allocated_s=-60.0, ready_s=0.0, released_s=1800.0, drain_s=1700.0)
    failed = life(allocated_s=3000.0, ready_s=None, released_s=4000.0)
    found = scored(run(early, failed))
    assert found.boot_gpu_hours == 0.0
    assert found.ready_gpu_hours == pytest.approx(4 * 1700 / 3600)
    assert found.drain_gpu_hours == pytest.approx(4 * 100 / 3600)
    assert found.never_gpu_hours == pytest.approx(4 * 600 / 3600)
    assert found.gpu_hours == pytest.approx(4 * (1800 + 600) / 3600)
    assert found.cost == pytest.approx(2 * found.gpu_hours)
    assert found.peak_cost_per_h == 8.0


def test_a_standbys_wait_is_no_boot() -> None:
    """Loaded in 60 s, waits, is told at 900 s and serves at 905 s; another is never told."""
    told = replace(life(ready_s=905.0, released_s=1000.0), waits=((60.0, 900.0),))
    spare = replace(life(ready_s=None, released_s=5000.0), waits=((60.0, 5000.0),))
    late = replace(life(ready_s=910.0), waits=((60.0, 500.0), (505.0, 900.0)))  # told twice
    for one, boot_s, standby_s, ready_s in (
        (told, 65.0, 840.0, 95.0),
        (spare, 60.0, 3540.0, 0.0),
        (late, 75.0, 835.0, 90.0),
    ):
        found = scored(run(one))
        assert found.boot_gpu_hours == pytest.approx(4 * boot_s / 3600)
        assert found.standby_gpu_hours == pytest.approx(4 * standby_s / 3600)
        assert found.ready_gpu_hours == pytest.approx(4 * ready_s / 3600)
        assert found.never_gpu_hours == 0.0
        assert found.gpu_hours == pytest.approx(4 * (boot_s + standby_s + ready_s) / 3600)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ({"ready_s": None, "released_s": 100.0}, True),
        ({"ready_s": 60.0, "released_s": 119.0}, True),
        ({"ready_s": 60.0, "released_s": 120.0}, False),
        ({"ready_s": 60.0, "drain_s": 100.0, "released_s": 300.0}, True),
        ({"ready_s": 3590.0, "released_s": 3600.0}, False),  # the end of the run cut it off
    ],
)
def test_wasted(end: dict[str, float], expected: bool) -> None:
    assert wasted(life(**end), 60.0, 3600.0) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([(0, 1), (100, 2), (200, 3)], 0),  # one direction
        ([(0, 1), (100, 2), (150, 1), (250, 2)], 1),  # up, down and up again, each within 124 s
        ([(0, 1), (100, 2), (150, 1), (400, 2)], 0),  # the way back rested long enough
        ([(0, 1), (100, 2), (120, 3), (150, 2), (200, 3), (230, 2)], 2),  # the last rests
    ],
)
def test_reversals(targets: list[tuple[float, int]], expected: int) -> None:
    assert reversals(targets, 124.0) == expected


def test_what_a_crash_took_is_nobodys_waste() -> None:
    lost = replace(life(ready_s=60.0, released_s=70.0), failure="crashed")
    assert not wasted(lost, 60.0, 3600.0)


def test_short_supply_is_timed_from_excess_demand_to_capacity() -> None:
    lives = (life(allocated_s=-1.0, ready_s=0.0), life(allocated_s=100.0, ready_s=160.0))
    wanted = need((1, 1, 1, 1, 1, 1, 1, 1, 1, 1, *(2,) * 20), step_s=10.0)
    found = scored(run(*lives, span_s=300.0), wanted)
    assert found.short_s == 60.0 and found.effect_s == 60.0  # 100 s to 160 s
    assert found.ready_after_s == 60.0


def test_ready_series_ends_with_the_drain() -> None:
    lives = [life(ready_s=10.0, drain_s=50.0, released_s=90.0), life(ready_s=None)]
    at = np.array([5.0, 10.0, 49.0, 50.0, 80.0])
    assert ready_series(lives, "prefill", at).tolist() == [0, 1, 1, 0, 0]


def test_an_empty_run_has_no_quantiles() -> None:
    empty = np.zeros(0)
    nothing = Served(empty, empty, empty, empty, empty, empty)
    found = scored(RunResult(10.0, (), nothing, {}, ()))
    assert found.ttft_p50_s is None and found.ready_after_s is None
    assert found.attainment == 1.0 and found.gpu_hours == 0.0
