"""Field reports of the area planner-signal, B01 to B19: each row a test, on the brain itself.

What a row says of shells is tried over ports in tests/unit/test_planner_scenarios.py and over
sockets in tests/integration/test_planner_signals.py; the names of the tests there carry the number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from readyplane.core.errors import InvalidField
from readyplane.core.worker import Fleet, LoadReport, Role
from readyplane.ports import ModelSignals, RouterSignals
from readyplane_planner import forecast
from readyplane_planner.forecast import Knobs, Series, experts
from readyplane_planner.policy import make_plan, policy_warnings, pool_profiles, read_policy
from readyplane_planner.signals import Kind, Latency, Observation
from readyplane_planner.signals.outside import EngineLoad, EngineSample
from readyplane_planner.signals.queries import answer, query, unselected
from readyplane_planner.signals.units import factor
from readyplane_planner.sources import router_sample
from tests.unit.planner_world import DIGEST, MODEL, policy
from tests.unit.signal_bench import Bench, codes, targets, worker

SELECTOR = {"namespace": "prod", "model_name": MODEL}
BUSY = 6.0


def seen(bench: Bench) -> Observation:
    assert bench.seen is not None
    return bench.seen


def busy(ticks: int = 60, rps: float = BUSY) -> Bench:
    """A fleet that has grown to its load."""
    bench = Bench()
    bench.run(ticks, rps)
    assert bench.targets >= (3, 2)
    return bench


def asked(signal: str, text: str = "x{$selector}", unit: str = "tokens", **fields: Any) -> Any:
    return query(signal, text, unit, selector=SELECTOR, **fields)


def told(value: object) -> dict[str, Any]:
    result = [] if value is None else [{"metric": {}, "value": [1.7e9, value]}]
    return {"status": "success", "data": {"resultType": "vector", "result": result}}


# --------------------------------------------------------------------------- B01


BAD = [math.nan, math.inf, -math.inf, "NaN", 1e308, -1.0]
GAUGES = ("queued_tokens", "prefilling_tokens", "decoding_requests", "queued_requests")
COUNTERS = ("arrivals_total", "arrival_uncached_tokens_total", "finished_total")


@pytest.mark.parametrize("name", [*GAUGES, *COUNTERS])
def test_b01_a_value_that_is_no_number_moves_nothing(name: str) -> None:
    bench = busy()
    before, count = bench.targets, bench.memory.bad_samples
    kind = "counters" if name in COUNTERS else "gauges"
    for value in BAD:
        broken: dict[str, Any] = {kind: {name: value}}
        decision = bench.tick(BUSY, **broken)
        assert targets(decision) == before
        assert any(r.code == "bad_value" and name in r.text for r in decision.why)
        assert not decision.orders and not decision.drains
    assert bench.memory.bad_samples >= count + len(BAD)
    broken = {kind: {name: None}}
    decision = bench.tick(BUSY, **broken)
    assert targets(decision) == before, "null is missing, and not a fault of a number"


@pytest.mark.parametrize("shown", ["NaN", "+Inf", "-Inf", None, "1e308", "much"])
def test_b01_a_bad_answer_of_a_query_moves_nothing(shown: object) -> None:
    bench = busy()
    before = bench.targets
    found = answer(
        asked("queue"),
        {
            **told("0"),
            "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1.7e9, shown]}]},
        },
        asked_s=bench.now_s + 1.0,
    )
    assert found.value is None and found.bad.startswith("queue=")
    decision = bench.tick(0.0, readings=(found,))
    assert targets(decision) == before
    assert {"bad_value", "hold"} <= codes(decision)


# --------------------------------------------------------------------------- B02, B04, B05


def test_b02_an_empty_answer_at_the_peak_is_no_zero() -> None:
    """200 with an empty vector for three ticks, 40 requests in flight: the size stays."""
    bench = busy()
    before = bench.targets
    empty = answer(asked("prefill_work", unit="tokens/s"), told(None), asked_s=0.0)
    assert empty.why.startswith("no data")
    for _ in range(3):
        now = replace(empty, asked_s=bench.now_s + 1.0)
        decision = bench.tick(0.0, decoding=40.0, readings=(now,))
        assert targets(decision) == before and not decision.drains
        assert "no data" in decision.degraded
        assert any("no data" in r.text for r in decision.why if r.code == "hold")
    gone = bench.run(3, known=False)
    assert targets(gone) == before and "without this model" in gone.degraded
    bench.run(120, 0.3)
    assert bench.targets == (1, 1), "fresh samples are back: now it may shrink"


@pytest.mark.parametrize(
    "text",
    ["sum(x{$selector}) or vector(0)", "(x{$selector} OR on() vector(0)) / 2"],
)
def test_b02_a_query_that_fills_in_for_lost_data_is_refused(text: str) -> None:
    with pytest.raises(InvalidField, match="no load"):
        asked("queue", text)


def test_b04_idle_walks_down_and_no_data_holds() -> None:
    """Flat, fresh counters, undefined latencies, nothing in flight: idle, down to the minimum."""
    nothing = {"ttft_actual": Latency(20.0), "tpot_actual": Latency(20.0)}
    bench = busy()
    idle = bench.run(100, 0.0, latency=nothing)
    assert "idle" in codes(idle) and targets(idle) == (1, 1)
    steps = [targets(d)[0] for d in bench.decisions[-100:]]
    assert all(a - 1 <= b <= a for a, b in pairwise(steps)), "one at a time"

    blind = busy()
    before = blind.targets
    blind.run(100, 0.0, latency=nothing, counters={"arrivals_total": None})
    assert blind.targets == before
    assert seen(blind).arrivals.kind is Kind.MISSING


def test_b04_a_quantile_over_no_samples_is_idle_and_over_some_is_broken() -> None:
    bench = busy()
    for count, kind in ((0.0, Kind.IDLE), (7.0, Kind.MISSING)):
        nan = answer(
            asked("ttft_p90", unit="s", window_s=20.0), told("NaN"), asked_s=bench.now_s + 1.0
        )
        readings = (nan, bench.read("ttft_count", count, unit="requests", window_s=20.0))
        bench.tick(BUSY, readings=readings)
        assert seen(bench).extra["ttft_p90"].kind is kind
        assert bool(seen(bench).bad) is (kind is Kind.MISSING)


def test_b05_a_source_that_is_down_may_hide_the_reverse() -> None:
    """TTFT is down: KV and everything else say shrink, nobody goes; what says grow, grows."""
    bench = busy()
    before = bench.targets
    for _ in range(100):
        down = bench.read("ttft_p90", None, why="Prometheus is not reached")
        decision = bench.tick(0.2, readings=(down,))
        assert not decision.drains
    assert bench.targets == before
    assert {"partial_data"} & codes(bench.decisions[-1])
    assert "ttft" in next(r.text for r in bench.decisions[-1].why if r.code == "partial_data")

    small = Bench()
    small.run(20, 1.0)
    before = small.targets
    for _ in range(20):
        down = small.read("ttft_p90", None, why="Prometheus is not reached")
        small.tick(BUSY, readings=(down,))
    assert small.targets > before


# --------------------------------------------------------------------------- B06, B07, B08


def test_b06_one_of_eight_that_hangs_holds_nobody_up() -> None:
    """Seven are read; the eighth is named, keeps its place, and the pool still moves."""
    bench = Bench(p=8, d=2)
    bench.run(30, 1.0)
    load = EngineLoad(running=1, waiting=0)
    read = tuple(EngineSample(f"p-{n}", f"p-{n}/1", "", bench.now_s + 1.0, load) for n in range(7))
    before = bench.targets
    bench.run(60, 1.0, engines=read)
    assert bench.targets < before, "it shrinks on what the seven and the router tell"
    assert seen(bench).workers, "and the eighth is still a worker"


def waits(bench: Bench, wait_s: float, median_s: float | None = None) -> tuple[Any, ...]:
    """P50, P90 and P99 of the wait before prefill, as queries give them."""
    half_s = wait_s if median_s is None else median_s
    quantiles = {"p50": half_s, "p90": wait_s, "p99": wait_s}
    return (
        *(bench.read(f"wait_{q}", value, window_s=10.0) for q, value in quantiles.items()),
        bench.read("wait_count", 50.0, unit="requests", window_s=10.0),
    )


def test_b07_a_wait_tells_how_much_waits() -> None:
    """Nobody shows the queue: arrivals times their wait are in it, and P grows while it lasts."""
    bench = Bench(p=2, d=2)
    bench.run(40, 3.0)
    decision = bench.tick(3.0, readings=waits(bench, 6.0), ttft_s=0.4)
    assert decision.signals["queue"].get() == pytest.approx(3.0 * 1155.0 * 6.0)
    grown = [bench.tick(3.0, readings=waits(bench, 6.0), ttft_s=0.4) for _ in range(30)]
    assert any(d.prefill.target > d.prefill.before for d in grown)


def test_b07_waiting_before_prefill_is_part_of_ttft() -> None:
    """Engines are within the SLO, no queue tells of it, and a tenth waits three targets before them:
    P grows, and says so."""
    calm = Bench(p=2, d=2)
    calm.run(40, 3.0)
    bench = Bench(p=2, d=2)
    bench.run(40, 3.0)
    assert bench.targets == calm.targets
    before, told = bench.targets, len(bench.decisions)
    for _ in range(30):
        bench.tick(3.0, readings=waits(bench, 6.0, 0.1), ttft_s=0.4)
        assert "queue_wait" in codes(bench.decisions[-1])
    assert bench.targets[0] > before[0]
    after = bench.decisions[told:]
    grew = next(n for n, d in enumerate(after) if d.prefill.target > d.prefill.before)
    assert 20 <= grew <= 22, "two windows of ten seconds, and not for one"
    assert (after[grew].why[0].code, after[grew].why[0].pool) == ("queue_wait", "prefill")
    assert sum(len(d.orders) for d in after) == 1, "one, and then it is waited for"
    calm.run(30, 3.0)
    assert calm.targets == before


def test_b07_the_routers_own_queue_counts_with_the_engines() -> None:
    bench = Bench(p=2, d=2)
    bench.run(40, 3.0)
    before = bench.targets
    bench.run(10, 3.0, gauges={"queued_tokens": 40_000.0, "queued_requests": 35.0})
    assert bench.targets[0] > before[0]


def test_b08_series_of_the_dead_are_ignored_and_counted() -> None:
    """Gone for ten seconds, still exporting a queue for five minutes: no scale-up."""
    bench = Bench()
    bench.run(30, 1.0)
    before = bench.targets
    dead = EngineLoad(running=50, waiting=50, waiting_prefill_tokens=500_000)
    for _ in range(60):
        lingering = (
            EngineSample("p-7", "p-7/1", "", bench.now_s + 1.0, dead),
            EngineSample("p-0", "p-0/of-before", "", bench.now_s + 1.0, dead),
        )
        bench.tick(1.0, engines=lingering)
        assert seen(bench).dead_series == 2
        assert seen(bench).queue.value == 0.0
    assert bench.targets == before
    living = EngineSample("p-0", "p-0/1", "", bench.now_s + 1.0, dead)
    bench.tick(1.0, engines=(living,))
    assert seen(bench).queue.value == 500_000.0, "the living one counts"


# --------------------------------------------------------------------------- B10, B11


def test_b10_a_burst_on_another_model_changes_nothing_here() -> None:
    def signals(other: int) -> RouterSignals:
        mine = ModelSignals("a", arrivals_total=100, queued_tokens=5)
        theirs = ModelSignals("b", arrivals_total=other, queued_tokens=other * 1000)
        fleet = Fleet(1, {w.offer.worker_id: w for w in (worker("w", Role.PREFILL, now_s=1.0),)})
        return RouterSignals("r", 50.0, {"a": mine, "b": theirs}, fleet)

    calm, burst = (router_sample(signals(n), "a", taken_s=1.0) for n in (10, 10_000))
    assert calm == burst
    assert not calm.workers, "the other model's workers are not ours"


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("sum(rate(vllm:prompt_tokens_total{$selector}[1m]))", ""),
        ('sum by (pod) (x{$selector,le="1"}) / on(pod) group_left(a, b) y{$selector}', ""),
        ("histogram_quantile(0.9, sum by (le) (rate(x_bucket{ $selector }[1m])))", ""),
        ("(x{$selector} or y{$selector}) * 60", ""),
        ('max(x{$selector}) by (model_name) + scalar(y{job=~"a.*",$selector} offset 5m)', ""),
        ("{__name__='x',$selector}", ""),
        ("sum(rate(x[1m]))", "x"),
        ("sum(x{$selector}) / sum(y)", "y"),
        ("sum(x{$selector}) - on(pod) y{pod='1'}", "y{pod='1'}"),
        ("sum by (pod) (x)", "x"),
        ("up and x{$selector}", "up"),
        ("x", "x"),
    ],
)
def test_b10_every_metric_of_a_query_names_the_deployment(text: str, bare: str) -> None:
    assert unselected(text) == bare
    if bare:
        with pytest.raises(InvalidField) as refused:
            asked("queue", text)
        assert refused.value.field == "prometheus.queries.queue.query"
        assert bare in refused.value.remedy
    else:
        assert 'namespace="prod",model_name="demo"' in asked("queue", text).text


def test_b10_no_selector_no_start() -> None:
    with pytest.raises(InvalidField) as refused:
        query("queue", "x{$selector}", "tokens", selector={})
    assert refused.value.field == "prometheus.selector"


def test_b11_seconds_and_milliseconds_come_to_the_same() -> None:
    in_s = answer(asked("ttft_p90", unit="seconds", window_s=20.0), told("1.5"), asked_s=1.0)
    in_ms = answer(asked("ttft_p90", unit="ms", window_s=20.0), told("1500"), asked_s=1.0)
    assert in_s.value == in_ms.value == 1.5 and in_s.unit == in_ms.unit == "s"
    per_minute = answer(asked("arrivals", unit="requests/min"), told("330"), asked_s=1.0)
    assert per_minute.value == pytest.approx(5.5)


@pytest.mark.parametrize("unit", [None, "", "sec", "tokens", 1])
def test_b11_no_declared_unit_is_never_a_guess(unit: object) -> None:
    with pytest.raises(InvalidField) as refused:
        query("ttft_p90", "x{$selector}", unit, selector=SELECTOR, window_s=20.0)
    assert refused.value.field == "prometheus.queries.ttft_p90.unit"
    with pytest.raises(InvalidField):
        factor(unit, "s", field="x")


def test_b11_the_decision_prints_units() -> None:
    decision = busy(30).decisions[-1]
    assert {n: s.unit for n, s in decision.signals.items()} == {
        "arrivals": "requests/s",
        "prompt_work": "tokens/s",
        "prefill_work": "tokens/s",
        "finished": "requests/s",
        "generated": "tokens/s",
        "queue": "tokens",
        "in_flight": "requests",
        "decoding": "sequences",
        "remaining": "tokens",
        "kv": "tokens",
    }


# --------------------------------------------------------------------------- B12, B13


def test_b12_the_floor_is_kept_through_an_outage() -> None:
    """Metrics gone, one of two crashed: still lifted to the minimum, within the GPU budget."""
    floor = make_plan(policy(prefill={"min": 2}), version=1, manifest_digest=DIGEST)
    bench = Bench(p=2, plan=floor)
    bench.run(5)
    bench.crash("p-0")
    decision = bench.run(3, known=False)
    assert targets(decision)[0] == 2
    assert [o.pool for d in bench.decisions for o in d.orders] == ["prefill"]
    codes_then = set().union(*(codes(d) for d in bench.decisions[-3:]))
    assert {"floor", "hold"} <= codes_then

    poor = Bench(p=2, plan=replace(floor, budget_gpus=2))
    poor.run(5)
    poor.crash("p-0")
    poor.run(3, known=False)
    assert not any(d.orders for d in poor.decisions), "one P and one D are all that may be held"
    assert "budget" in codes(poor.decisions[-1])


@pytest.mark.parametrize("known", [True, False])
def test_b13_zero_workers_and_a_lookup_of_nothing_raise_nothing(known: bool) -> None:
    """The bootstrap: nothing is ready, what divides is zero; the minimum is ordered, once."""
    plan = make_plan(policy(), version=1, manifest_digest=DIGEST)
    points = ((1.0, 1000.0, 1.0), (2.0, 4000.0, 4.0), (4.0, 2000.0, 2.0))
    hollow = replace(plan.decode.profile, decode_points=points)
    assert hollow.decode_coefficients_s()[:2] == (0.0, 0.0)
    assert hollow.iteration_s(0.0, 0.0) > 0.0, "a fit in its corner is no zero"
    bench = Bench(p=0, d=0, plan=replace(plan, decode=replace(plan.decode, profile=hollow)))
    decision = bench.tick(0.0, known=known)
    assert targets(decision) == (1, 1) and len(decision.orders) == 2
    bench.run(5, 1.0, known=known, decoding=3.0, gauges={"decoding_kv_tokens": 0.0})
    assert targets(bench.decisions[-1]) >= (1, 1)
    assert all(len(d.orders) <= 2 for d in bench.decisions)
    assert all(math.isfinite(d.decode.worker_rate) for d in bench.decisions)


# --------------------------------------------------------------------------- B15, B16, B17


def test_b15_a_dip_is_no_restart_and_a_restart_counts_from_zero() -> None:
    bench = Bench()
    bench.run(12, 10.0)
    base = bench.totals["arrivals_total"]
    rates = []
    for value in (1000, 1010, 1009, 1019, 1029):
        bench.tick(counters={"arrivals_total": base + value})
        rates.append(seen(bench).arrivals.value)
    assert rates[1:] == [10.0, None, 10.0, 10.0], "never 1000, and never a standstill either"
    bench.restart()
    bench.born_s -= 60.0
    bench.tick(counters={"arrivals_total": 3})
    assert seen(bench).arrivals.value is None, "another life: its first rate warms up"
    bench.tick(counters={"arrivals_total": 6})
    assert seen(bench).arrivals.value == 3.0


def test_b15_two_restarts_between_samples_make_no_negative_rate() -> None:
    bench = busy(30)
    for _ in range(3):
        bench.restart()
        bench.restart()
        bench.tick(BUSY)
        rate = seen(bench).arrivals.value
        assert rate is None or rate >= 0.0
        assert all(v is None or v >= 0 for v in (s.value for s in seen(bench).signals().values()))


def test_b15_counters_of_an_engine_end_with_its_process() -> None:
    """The same worker, another process of its engine: no rate across, no rate from a dip."""
    bench = Bench()
    bench.report = LoadReport()

    def read(life: str, total: float) -> float | None:
        load = EngineLoad(running=1, decode_tokens_total=total)
        sample = EngineSample("d-0", "d-0/1", life, bench.now_s + 1.0, load)
        bench.tick(1.0, engines=(sample,))
        return next(w for w in seen(bench).workers if w.worker_id == "d-0").decode_rate

    totals = [("a", 1000.0), ("a", 1500.0), ("a", 1499.0), ("a", 2000.0), ("b", 300.0)]
    assert [read(*t) for t in totals] == [None, 500.0, None, 501.0, None]
    assert read("b", 900.0) == 600.0


def test_b16_a_restart_at_the_peak_is_unknown_and_not_quiet() -> None:
    """For one window the rate warms up: nobody is let go, and the reason says why."""
    bench = busy()
    before = bench.targets
    bench.restart()
    for _ in range(9):
        decision = bench.tick(BUSY)
        assert seen(bench).arrivals.kind is Kind.WARMING
        assert targets(decision) == before and not decision.drains
        assert any("counts only since" in r.text for r in decision.why if r.code == "hold")
        assert decision.degraded == "", "warming up is no fault"
    bench.run(3, BUSY)
    assert seen(bench).arrivals.kind is Kind.FRESH


DECLINE = (100.0, 80.0, 60.0, 40.0, 20.0, 10.0, 0.0, 0.0)


@pytest.mark.parametrize("horizon_s", [2.0, 10.0, 30.0, 60.0, 300.0])
@pytest.mark.parametrize("step_s", [1.0, 10.0, 60.0])
def test_b17_no_forecaster_goes_below_zero(horizon_s: float, step_s: float) -> None:
    """Of each expert and not of the mix; what an expert would have said below zero is counted."""
    knobs, series, below = Knobs(warmup_s=0.0), Series(), 0
    for place, rate in enumerate((*DECLINE[:1] * 20, *DECLINE)):
        now_s = step_s * (place + 1)
        series = forecast.update(series, rate, dt_s=step_s, now_s=now_s, knobs=knobs)
        made = forecast.predict(series, horizon_s=horizon_s, knobs=knobs)
        assert 0.0 <= made.lower <= made.level <= made.upper < 1e6
        each = (*experts.expected(series, knobs), experts.holt_at(series, horizon_s))
        assert all(expert >= 0.0 for expert in each)
        below += experts.damped(series, horizon_s) < 0.0
        series = forecast.remember(series, made, now_s=now_s, knobs=knobs)
    assert series.clamps or not below, "a clamp is counted"


def test_b17_lengths_stay_positive_when_traffic_ends() -> None:
    bench = busy(30)
    for rps in DECLINE:
        bench.run(3, rps / 16.0, isl=1.0 if rps < 20 else 1155.0)
        assert seen(bench).lengths.isl >= 1.0 and seen(bench).lengths.osl >= 1.0
        decision = bench.decisions[-1]
        for pool in (decision.prefill, decision.decode):
            assert pool.forecast.level >= 0.0 and pool.worker_rate > 0.0


# --------------------------------------------------------------------------- B18, B19


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"slo": {"tpot_s": 0.001}}, "policy.slo.tpot_s"),
        ({"slo": {"ttft_s": 0.01}}, "policy.slo.ttft_s"),
        ({"slo": {"ttft_s": 0.5}, "prior_lengths": {"isl": 16_000.0}}, "policy.slo.ttft_s"),
        ({"handover_s": 3.0}, "policy.slo.ttft_s"),
        ({"prefill": {"min": 0, "max": 0}}, "policy.prefill.max"),
    ],
)
def test_b18_a_target_out_of_reach_is_flagged_when_it_is_saved(
    changes: dict[str, Any], field: str
) -> None:
    wanted = policy(**changes)
    found = policy_warnings(wanted, pool_profiles(wanted))
    assert [(w["field"], w["code"]) for w in found] == [(field, "target_unreachable")]
    assert found[0]["best"] > found[0]["value"]
    good = policy()
    assert policy_warnings(good, pool_profiles(good)) == []


def test_b18_a_class_that_cannot_hold_one_request_is_refused() -> None:
    document = policy().document()
    document["prior_lengths"] = {"isl": 2e6, "osl": 1.0}
    with pytest.raises(InvalidField) as refused:
        read_policy(document)
    assert refused.value.field == "policy.prefill.profile"
    assert "KV tokens" in refused.value.remedy


def test_b19_what_a_worker_does_not_tell_is_shown_and_drops_no_pool() -> None:
    """Engines that count no queued tokens: named in the pool's status, and P is planned all the same."""
    bench = Bench(p=1, d=1)
    bench.report = LoadReport(running=1)
    bench.run(5, 1.0)
    missing = {w.role: w.missing for w in seen(bench).workers}
    assert missing[Role.PREFILL] == ("waiting_prefill_tokens", "prefill_tokens_total")
    assert missing[Role.DECODE] == ("iterations_total", "kv_usage")
    bench.run(30, BUSY)
    assert bench.targets[0] >= 3, "the router's promises stand in for the engines' queues"
    bench.report = LoadReport(
        running=1,
        waiting_prefill_tokens=0,
        prefill_tokens_total=1,
        iterations_total=1,
        kv_used_blocks=1,
        kv_total_blocks=10,
    )
    bench.tick(1.0)
    assert not any(w.missing for w in seen(bench).workers)
