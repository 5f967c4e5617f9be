"""Our planner in Dynamo's simulator: what its ticks become, and a short run where it is installed.

The run needs `.venv-dynosim` (made by `make bench-dynosim`) and the public trace; without them it is
skipped. The whole trace stands in docs/simulator-validity.md.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench import dynosim
from bench.dynosim_planner import DIGEST, Planner, Translator, default_policy, play
from readyplane.core.worker import Role, WorkerState
from readyplane_lab.workload.trace import read_trace
from readyplane_planner.decide import Decision
from readyplane_planner.policy import Policy, make_plan
from readyplane_planner.signals import Kind

SHARED = Path(os.environ.get("READYPLANE_DATA", Path(__file__).parents[3] / "shared" / "data"))
CONVERSATION = SHARED / "traces" / "mooncake_conversation.jsonl.zst"
POLICY = default_policy()
NOTHING = (
    "num_prefill_requests",
    "sum_prefill_tokens",
    "sum_prefill_kv_tokens",
    "num_decode_requests",
    "sum_decode_kv_tokens",
    "num_queued_prefill",
    "sum_queued_prefill_tokens",
    "num_queued_decode",
    "sum_queued_decode_kv_tokens",
)


def a_pass(number: int, **told: float) -> dict[str, Any]:
    """One pass as their hook tells of it."""
    return {"worker_id": number, "wall_time": 0.02, **dict.fromkeys(NOTHING, 0), **told}


def a_tick(now_s: float, *, p: Any = ((0,), (), ()), d: Any = ((0,), (), ()), **told: Any) -> Any:
    """One tick of theirs. `p`, `d`: ids that are active, starting and draining."""
    states = ("active", "starting", "draining")
    ids: dict[str, Any] = {}
    for pool, of in (("prefill", p), ("decode", d)):
        for state, numbers in zip(states, of, strict=True):
            ids[f"{state}_{pool}_ids"] = list(numbers)
            ids[f"{state}_{pool}_count"] = len(numbers)
    seen = {"arrived": 0, "generated": 0.0, "ended": [], "passes": [], **told.pop("seen", {})}
    passes = {"prefill_fpm_snapshots": [], "decode_fpm_snapshots": [], **told}
    return {"now_ms": 1e3 * now_s, **ids, **passes, "seen": seen}


def translator() -> Translator:
    return Translator(make_plan(POLICY, version=1, manifest_digest=DIGEST))


def decision(**told: tuple[tuple[str, str], ...]) -> Decision:
    """Only what the translation reads of one: (worker, pool) of each order, drain, release."""
    parts = {
        name: tuple(SimpleNamespace(worker_id=w, pool=pool) for w, pool in told.get(name, ()))
        for name in ("orders", "drains", "releases")
    }
    return cast("Decision", SimpleNamespace(decision_id="d1", **parts))


def test_the_policy_is_the_default_one_but_for_what_the_benchmark_says() -> None:
    said = {"model", "slo", "t_ready_prior"}
    mine, usual = POLICY.document(), Policy(model="dynosim").document()
    assert {k for k in usual if mine[k] != usual[k]} <= said
    assert (POLICY.slo.ttft_s, POLICY.slo.tpot_s) == (2.0, 0.05)
    assert mine["slo"] | {"tpot_s": 0.1} == usual["slo"]


def test_a_tick_becomes_an_observation() -> None:
    planner = Planner(POLICY)
    for second in range(2, 12, 2):
        planner.observe(a_tick(float(second)))
    filling = a_pass(
        0,
        num_prefill_requests=1,
        sum_prefill_tokens=3000,
        num_queued_prefill=2,
        sum_queued_prefill_tokens=9000,
    )
    decoding = a_pass(0, num_decode_requests=3, sum_decode_kv_tokens=12_060)
    seen = {
        "arrived": 8,
        "generated": 460.0,
        # two at once, of which one may have been late: three seconds together
        "ended": [[1, 1000.0, 100.0, 400.0, 20.0], [1, 5000.0, 300.0, 2500.0, 20.0]],
        "passes": [["prefill", 0, 8192, 0.17], ["prefill", 0, 5308, 0.12], ["decode", 0, 0, 0.02]],
    }
    told = a_tick(
        12.0,
        p=((0,), (1,), ()),
        prefill_fpm_snapshots=[filling],
        decode_fpm_snapshots=[decoding],
        seen=seen,
    )
    found = planner.observe(told)
    assert found.arrivals.value == 4.0
    assert found.finished.value == 1.0
    assert found.missed.value == 0.5
    assert found.in_flight.value == 6.0
    assert found.decoding.value == 3.0
    assert found.kv.value == 12_060.0
    assert found.queue.value == 12_000.0  # what waits, and the pass that is still computed
    # 6,000 ended, 12,060 less 60 of their answers decode, 12,000 are at prefill
    assert found.prompt_work.value == 15_000.0
    # 13,500 of the 18,000 that are past prefill were computed
    assert found.prefill_work.value == pytest.approx(15_000.0 * 0.75)
    assert found.remaining.kind is Kind.MISSING
    assert "ttft_actual" not in found.latency
    ready = {(w.role, w.state) for w in found.workers}
    assert ready == {(Role.PREFILL, WorkerState.READY), (Role.DECODE, WorkerState.READY)}
    assert found.t_ready["prefill"].p90_s == 30.0


def test_a_last_pass_of_an_idle_worker_is_no_queue() -> None:
    it = translator()
    it.sample(a_tick(2.0))
    old = a_pass(0, num_prefill_requests=1, sum_prefill_tokens=8192)
    sample = it.sample(a_tick(4.0, prefill_fpm_snapshots=[old]))
    assert sample.gauges["prefilling_tokens"] == 0.0


def test_starts_are_allocations_with_their_age_and_then_ready() -> None:
    it = translator()
    first = a_tick(2.0)
    it.sample(first)
    wanted = it.targets(decision(orders=(("w-1", "prefill"), ("w-2", "prefill"))), first)
    assert wanted == {"target_prefill": 3, "target_decode": 1}
    it.sample(a_tick(12.0, p=((0,), (1, 2), ())))
    ages = {a.worker_id: a.allocated_ago_s for a in it.allocations(12.0)}
    assert (ages["w-1"], ages["w-2"]) == (10.0, 10.0)
    sample = it.sample(a_tick(32.0, p=((0, 1, 2), (), ())))
    assert {w.worker_id for w in sample.workers if w.role is Role.PREFILL} >= {"w-1", "w-2"}
    assert {seat.name for _, seat in it.started} == {"w-1", "w-2"}


def test_whoever_goes_there_is_who_was_to_go_here() -> None:
    it = translator()
    at = a_tick(2.0, p=((0, 1, 2), (), ()))
    it.sample(at)
    wanted = it.targets(decision(drains=(("first-prefill-0", "prefill"),)), at)
    assert wanted["target_prefill"] == 2
    sample = it.sample(a_tick(4.0, p=((0, 1), (), (2,))))  # they take the newest
    states = {w.worker_id: w.state for w in sample.workers if w.role is Role.PREFILL}
    assert states == {
        "first-prefill-0": WorkerState.DRAINING,
        "first-prefill-1": WorkerState.READY,
        "first-prefill-2": WorkerState.READY,
    }
    passes = [a_pass(n, num_prefill_requests=1) for n in (0, 1)]
    last = it.sample(a_tick(6.0, p=((0, 1), (), ()), prefill_fpm_snapshots=passes))
    # The name that stayed counts another engine now: its counters may not be subtracted.
    assert {e.worker_id: e.life for e in last.engines}["first-prefill-2"] == "0"
    left = {a.worker_id for a in it.allocations(6.0) if a.role is Role.PREFILL}
    assert left == {"first-prefill-1", "first-prefill-2"}


@pytest.mark.skipif(
    not (dynosim.PYTHON.exists() and CONVERSATION.exists()),
    reason="needs .venv-dynosim (make .venv-dynosim/stamp) and the public Mooncake trace",
)
def test_our_planner_grows_a_fleet_in_dynamos_simulator(tmp_path: Path) -> None:
    requests = read_trace(CONVERSATION, seed=0, limit=400).requests
    dynosim.write_trace(requests, tmp_path / "trace.jsonl")
    ran = play(tmp_path / "trace.jsonl", "short", policy=POLICY)
    assert len(ran.ttft_s) == len(requests)
    assert max(m.ready[0] for m in ran.moments) >= 2
    assert ran.slo > 0.8
    assert ran.gpu_hours == pytest.approx(_billed_hours(ran.moments), rel=0.05)


def _billed_hours(moments: Any) -> float:
    """Ready and starting workers at each tick, two seconds apart."""
    workers = sum(sum(m.ready) + sum(m.starting) for m in moments)
    return 2.0 * float(workers) / 3600.0
