"""The time-expanded programme: layers where pools are alone, and each rule where it binds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.profiles import load
from readyplane_lab.proof.oracle.coupled import kind_of, needs_of_workload
from readyplane_lab.proof.oracle.demand import request_work
from readyplane_lab.proof.oracle.layers import layered
from readyplane_lab.proof.oracle.milp import Kind, Needs, Rules, Solved, solve
from readyplane_lab.proof.port import SLO_DEFAULT
from readyplane_lab.simulator.outcome import Floats
from readyplane_lab.simulator.world import LINK
from readyplane_lab.workload.request import WorkloadRequest

# A worker at a price of one a second; a step of a second, a start of 3 s and a drain of 1 s.
PLAIN = Kind(
    "plain", gpus=1, price_per_gpu_hour=3600.0, prefill=1.0, decode=1.0, lead_s=3.0, drain_s=1.0
)
FREE = Rules()


def needs(prefill: list[float], decode: list[float], **more: Floats) -> Needs:
    return Needs(1.0, np.array(prefill, float), np.array(decode, float), **more)


def held(found: Solved, kind: str, pool: str) -> list[float]:
    return [float(n) for n in found.workers[kind, pool]]


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12),
    initial=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    lead_s=st.sampled_from([0.0, 1.0, 3.0]),
)
@settings(max_examples=40, deadline=None)
def test_uncoupled_pools_of_one_class_are_layers(
    rows: list[tuple[int, int]], initial: tuple[int, int], lead_s: float
) -> None:
    kind = replace(PLAIN, lead_s=lead_s, initial=initial)
    series = [[float(row[pool]) for row in rows] for pool in (0, 1)]
    found = solve([kind], needs(*series), FREE)
    best = [
        layered(np.array(values), step_s=1.0, beta_s=lead_s + 1.0, initial=first)
        for values, first in zip(series, initial, strict=True)
    ]
    assert found.cost == pytest.approx(sum(b.cost_s for b in best), abs=1e-4)
    assert found.relaxed <= found.bound + 1e-6 <= found.cost + 2e-6 and found.gap <= 1e-3


def test_the_cheaper_class_is_chosen_for_what_it_does_well() -> None:
    """`big` computes three prompts' worth for twice the price, and is poor at decoding."""
    big = replace(PLAIN, name="big", gpus=2, prefill=3.0, decode=1.0)
    found = solve([PLAIN, big], needs([3.0] * 4, [2.0] * 4), FREE)
    assert held(found, "big", "prefill") == [1.0] * 4
    assert held(found, "plain", "decode") == [2.0] * 4
    assert sum(held(found, "plain", "prefill")) == sum(held(found, "big", "decode")) == 0


def test_a_quota_makes_the_dearer_class_help() -> None:
    cheap = replace(PLAIN, name="cheap", price_per_gpu_hour=1800.0, quota=1)
    found = solve([PLAIN, cheap], needs([2.0] * 3, [0.0] * 3), FREE)
    assert held(found, "cheap", "prefill") == [1.0] * 3
    assert held(found, "plain", "prefill") == [1.0] * 3


def test_who_is_unfit_for_a_pool_is_not_in_it() -> None:
    p_only = replace(PLAIN, name="p-only", decode=0.0)
    found = solve([p_only, PLAIN], needs([1.0], [1.0]), FREE)
    assert ("p-only", "decode") not in found.workers
    with pytest.raises(ArithmeticError, match="decode"):
        solve([p_only], needs([1.0], [1.0]), FREE)


def test_a_budget_binds_and_counts_who_starts() -> None:
    kind = replace(PLAIN, initial=(1, 1))
    wanted = needs([1, 1, 1, 2], [1, 1, 1, 1])
    assert solve([kind], wanted, Rules(budget_gpus=3)).cost == pytest.approx(9 + 4)
    with pytest.raises(ArithmeticError):
        solve([kind], wanted, Rules(budget_gpus=2))
    # One of the three must leave decode before the other can start in prefill: no step to spare.
    busy = needs([1, 1, 1, 2], [2, 2, 1, 1])
    with pytest.raises(ArithmeticError):
        solve([replace(PLAIN, initial=(1, 2))], busy, Rules(budget_gpus=3))
    assert solve([replace(PLAIN, initial=(1, 2))], busy, Rules(budget_gpus=4)).starts == 1


def test_out_of_phase_pools_exchange_workers_if_they_may() -> None:
    wanted = needs([2, 2, 1, 1, 2, 2], [1, 1, 2, 2, 1, 1])
    kind = replace(PLAIN, initial=(2, 1))
    apart = solve([kind], wanted, FREE)
    found = solve([kind], wanted, Rules(flip_s=0.5))
    assert held(found, "plain", "prefill") == [2, 2, 1, 1, 2, 2]
    assert held(found, "plain", "decode") == [1, 1, 2, 2, 1, 1]
    assert found.flips == 2 and found.starts == 0
    assert found.cost == pytest.approx(18 + 2 * 0.5)
    assert apart.flips == 0 and apart.cost == pytest.approx(18 + 2 + 4)


def test_a_start_from_now_on_is_not_ready_before_its_lead() -> None:
    with pytest.raises(ArithmeticError):
        solve([PLAIN], needs([0, 0, 1, 1], [0] * 4), Rules(ahead=False))
    found = solve([PLAIN], needs([0, 0, 0, 1], [0] * 4), Rules(ahead=False))
    assert held(found, "plain", "prefill") == [0, 0, 0, 1]


def test_steps_have_a_most_and_workers_stay_a_least() -> None:
    wanted = needs([0, 0, 3, 0, 0, 0], [0] * 6)
    assert held(solve([PLAIN], wanted, Rules(step_most=1)), "plain", "prefill") == [
        1,
        2,
        3,
        2,
        1,
        0,
    ]
    found = solve([PLAIN], wanted, Rules(dwell_steps=3))
    assert sum(held(found, "plain", "prefill")) == 9.0


def test_kv_must_find_memory_and_links() -> None:
    kind = replace(PLAIN, kv_tokens=100.0, link_bytes_per_s=10.0)
    memory = solve([kind], needs([1], [1], kv_tokens=np.array([250.0])), FREE)
    assert (held(memory, "plain", "prefill"), held(memory, "plain", "decode")) == ([1.0], [3.0])
    links = solve([kind], needs([1], [1], kv_bytes_per_s=np.array([15.0])), FREE)
    assert (held(links, "plain", "prefill"), held(links, "plain", "decode")) == ([2.0], [2.0])
    endless = solve([PLAIN], needs([1], [0], kv_tokens=np.array([250.0])), FREE)
    assert held(endless, "plain", "decode") == [1.0]


def test_hours_of_minutes_are_solved_with_their_gap() -> None:
    """Two classes with flips and a budget; a day of it takes 20 s to a gap of 5 %."""
    minutes = np.arange(120.0)
    day = 8 + 6 * np.sin(2 * np.pi * minutes / 120) + np.sin(minutes / 9)
    kinds = [
        replace(PLAIN, name="a", lead_s=120.0, initial=(8, 8)),
        replace(PLAIN, name="b", gpus=2, prefill=2.2, decode=1.5, lead_s=120.0),
    ]
    found = solve(
        kinds,
        Needs(60.0, day, day[::-1].copy()),
        Rules(budget_gpus=40, flip_s=5.0, step_most=4),
        time_limit_s=20.0,
        rel_gap=0.05,
    )
    assert 0 < found.relaxed <= found.cost and found.gap <= 0.06


def some_requests() -> list[WorkloadRequest]:
    return [WorkloadRequest(i, 3.0 * i, 1000, 200, ((50 + i, 1000),)) for i in range(80)]


def test_a_workload_becomes_needs_and_classes() -> None:
    requests = some_requests()
    profile = load("h100-tp4-llama70b")
    work = request_work(requests, prefill=profile, decode=profile, slo=SLO_DEFAULT)
    span_s = requests[-1].at_s
    wanted = needs_of_workload(
        requests,
        work,
        slo=SLO_DEFAULT,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        span_s=span_s,
    )
    assert len(wanted.prefill) == 4 and wanted.kv_tokens is not None
    assert wanted.prefill[0] == pytest.approx(profile.prefill_s(1000) / 1.95)  # one at a time
    assert wanted.kv_tokens[1] == pytest.approx(1099.5 * work.residence_s[0] / 3.0, rel=0.01)
    assert wanted.kv_bytes_per_s is not None
    assert wanted.kv_bytes_per_s[1] == pytest.approx(1000 * 327_680 / 3.0, rel=0.01)
    same = kind_of(profile, requests, work, slo=SLO_DEFAULT, lead_s=60.0, link=LINK)
    assert (same.prefill, same.decode) == pytest.approx((1.0, 1.0))
    assert same.kv_tokens == 474_000 and same.link_bytes_per_s == LINK.bandwidth_bytes_per_s
    slow = replace(profile, name="slow", slow_factor=1.5, price_per_gpu_hour=0.4)
    kind = kind_of(slow, requests, work, slo=SLO_DEFAULT, lead_s=60.0)
    assert kind.prefill == pytest.approx(1 / 1.5) and 0 < kind.decode < 1 / 1.5
    never = kind_of(replace(profile, slow_factor=2.0), requests, work, slo=SLO_DEFAULT, lead_s=60.0)
    assert never.decode == 0.0 and never.prefill == pytest.approx(0.5)
    found = solve([same, kind], wanted, FREE)
    assert held(found, "slow", "prefill") == [1.0] * 4  # slower, but cheaper for so little work


def test_one_class_and_wide_links_come_to_the_bound_by_layers() -> None:
    requests = some_requests()
    profile = load("h100-tp4-llama70b")
    work = request_work(requests, prefill=profile, decode=profile, slo=SLO_DEFAULT)
    span_s = requests[-1].at_s
    wanted = needs_of_workload(requests, work, slo=SLO_DEFAULT, kv_bytes_per_token=1, span_s=span_s)
    kind = kind_of(profile, requests, work, slo=SLO_DEFAULT, lead_s=60.0, initial=(1, 1))
    found = solve([kind], wanted, FREE)
    best = [
        layered(n, step_s=60.0, beta_s=60.0, initial=1) for n in (wanted.prefill, wanted.decode)
    ]
    assert found.cost == pytest.approx(sum(b.cost_s for b in best) * 4 / 3600, rel=1e-3)
