"""Policy, windows, forecasts, corrections, and the metrics that are read off a router."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest

from readyplane.core.errors import InvalidField, NotFound, UnknownField
from readyplane.core.startup import LATER, Segment, SegmentName
from readyplane.core.work import EventKind
from readyplane.core.worker import LoadReport, Role, StartProgress
from readyplane_router.metrics import SEGMENT_METRICS, RouterCollector, StartMetrics
from readyplane_router.policy import RouterPolicy
from readyplane_router.rates import Correction
from readyplane_router.signals import Lengths, Window
from tests.router_world import (
    MODEL,
    SERVED,
    World,
    events,
    offer,
    on_virtual_time,
    shape,
)

# --------------------------------------------------------------------------- policy


def test_a_policy_document_changes_what_it_names_and_nothing_else() -> None:
    policy = RouterPolicy.from_document(
        {
            "lease_ttl_s": 9,
            "pair": {"slo": {"ttft_s": 0.5}, "network_link": {"bandwidth_bytes_per_s": 1e9}},
            "prefix": {"replay_wait_s": 3.0},
        }
    )
    assert policy.lease_ttl_s == 9.0
    assert (policy.pair.slo.ttft_s, policy.pair.slo.tpot_s) == (0.5, 0.1)
    assert policy.pair.network_link.bandwidth_bytes_per_s == 1e9
    assert policy.pair.network_link.name == RouterPolicy().pair.network_link.name
    assert policy.prefix.replay_wait_s == 3.0
    assert RouterPolicy.from_document({}) == RouterPolicy()


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"lease_tl_s": 1}, "router_policy.lease_tl_s"),
        ({"pair": {"ttft": 1}}, "router_policy.pair.ttft"),
        ({"pair": 3}, "router_policy.pair"),
        ({"lease_ttl_s": "6"}, "router_policy.lease_ttl_s"),
        ({"lease_ttl_s": float("nan")}, "router_policy.lease_ttl_s"),
        ({"lease_ttl_s": True}, "router_policy.lease_ttl_s"),
        ({"queue_tokens_max": 1.5}, "router_policy.queue_tokens_max"),
        ({"queue_tokens_max": -1}, "router_policy.queue_tokens_max"),
        ({"allow_attached": 1}, "router_policy.allow_attached"),
        ({"output_quantile": 1.0}, "router_policy.output_quantile"),
        ({"pair": {"wait_max_s": 30}}, "router_policy.pair.wait_max_s"),
        ({"pair": {"locality_patience_s": 25}}, "router_policy.pair.locality_patience_s"),
        ({"pair": {"local_link": {"setup_s": 1}}}, "router_policy.pair.local_link"),
        ({"lease_ttl_s": 2, "tick_s": 1}, "router_policy.lease_ttl_s"),
        ({"reservation_ttl_s": 0}, "router_policy.reservation_ttl_s"),
    ],
)
def test_a_wrong_policy_names_its_field(document: dict[str, Any], field: str) -> None:
    """B167, B158: nothing unknown is ignored, and times must fit together."""
    with pytest.raises(InvalidField) as caught:
        RouterPolicy.from_document(document)
    assert caught.value.field == field
    assert isinstance(caught.value, UnknownField) is field.endswith(("lease_tl_s", "pair.ttft"))


# --------------------------------------------------------------------------- windows


def test_a_window_forgets_and_unknown_is_not_zero() -> None:
    window = Window(window_s=10.0, samples_max=100)
    assert window.quantiles(now_s=0.0) == (0, 0.0, 0.0, 0.0, 0.0)
    for second in range(20):
        window.add(float(second), now_s=float(second))
    count, p50, _p90, p99, mean = window.quantiles(now_s=20.0)
    assert (count, p50, mean) == (10, 14.5, 14.5)
    assert p99 <= 19.0
    assert window.quantiles(now_s=100.0)[0] == 0


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_a_value_that_is_no_latency_is_left_out(value: float) -> None:
    window = Window(10.0, 10)
    window.add(value, now_s=0.0)
    count, *rest = window.quantiles(now_s=0.0)
    assert count == (0.0 <= value < 1e9)
    assert all(0.0 <= v < 1e9 for v in rest)


def test_a_window_is_bounded() -> None:
    window = Window(1e9, samples_max=50)
    for number in range(1_000):
        window.add(1.0, now_s=float(number))
    assert window.quantiles(now_s=1_000.0)[0] == 50


# --------------------------------------------------------------------------- forecasts


def test_the_remaining_output_is_conditional_and_capped() -> None:
    lengths = Lengths(half_life=5_000, quantile=0.9)
    mean, high = lengths.remaining(500, 0, 10)
    assert (mean, high) == (10.0, 10.0)
    for number in range(320):
        lengths.add(500, 40 if number % 2 else 600)
    mean, high = lengths.remaining(500, 0, None)
    assert 250 < mean < 400 and 500 < high < 700
    later, _ = lengths.remaining(500, 128, None)  # the short ones are out of the question now
    assert later > mean
    assert lengths.remaining(500, 5_000, None)[0] >= 1.0
    assert lengths.remaining(500, 63, 64) == (1.0, 1.0)


@given(
    st.lists(st.tuples(st.integers(1, 40_000), st.integers(0, 5_000)), max_size=60),
    st.integers(1, 10**6),
    st.integers(0, 10_000),
    st.one_of(st.none(), st.integers(1, 10_000)),
)
def test_a_forecast_is_always_a_number_of_tokens(
    seen: list[tuple[int, int]], isl: int, emitted: int, cap: int | None
) -> None:
    lengths = Lengths(half_life=10, quantile=0.9)
    for one, other in seen:
        lengths.add(one, other)
    for value in lengths.remaining(isl, emitted, cap):
        assert 1.0 <= value < 1e5
        assert cap is None or value <= max(1, cap - emitted)


# --------------------------------------------------------------------------- corrections


def test_a_correction_is_smoothed_clamped_and_needs_samples() -> None:
    correction = Correction()
    for _ in range(9):
        correction.add(predicted_s=1.0, measured_s=1.5, now_s=0.0)
    assert correction.factor == 1.0
    for _ in range(200):
        correction.add(predicted_s=1.0, measured_s=1.5, now_s=0.0)
    assert correction.factor == pytest.approx(1.5, abs=0.01)
    for _ in range(500):
        correction.add(predicted_s=1.0, measured_s=1e9, now_s=0.0)
    assert correction.factor == pytest.approx(2.0, abs=0.01)


def test_a_correction_is_frozen_while_capacity_moves() -> None:
    """B26: warm-up samples do not enter."""
    correction = Correction()
    correction.freeze(10.0)
    for _ in range(100):
        correction.add(predicted_s=1.0, measured_s=2.0, now_s=9.9)
    assert correction.count == 0
    correction.add(predicted_s=1.0, measured_s=2.0, now_s=10.0)
    correction.add(predicted_s=0.0, measured_s=2.0, now_s=11.0)
    assert correction.count == 1


def test_prefill_that_is_slower_than_its_profile_is_noticed() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", Role.PREFILL)
        await world.worker(router, "d0", Role.DECODE)
        await asyncio.sleep(6.0)
        first = await router.route(shape("r"), dry_run=True)
        for number in range(80):
            pair = await router.route(shape(f"r{number}", first=number * 999))
            await asyncio.sleep(0.24)  # 0.16 by the profile
            await router.complete(events(pair, *SERVED))
        await asyncio.sleep(3.0)
        last = await router.route(shape("s", first=10**6), dry_run=True)
        assert last.predicted_ttft_s - first.predicted_ttft_s == pytest.approx(0.08, abs=0.01)

    on_virtual_time(main)


# --------------------------------------------------------------------------- metrics


def scrape(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_series_follow_what_is_alive_and_junk_makes_none() -> None:
    """B159, B160."""

    async def main(world: World) -> None:
        router = await world.router()
        registry = CollectorRegistry()
        registry.register(RouterCollector(router))
        await world.worker(router, "p0", Role.PREFILL)
        d0 = await world.worker(router, "d0", Role.DECODE, renewing=False)
        await d0.renew(load=LoadReport(kv_used_blocks=2_500))
        pair = await router.route(shape("r1"))
        for number in range(50):
            with pytest.raises(NotFound):
                await router.route(shape("x", model=f"junk{number}"))
        seen = scrape(registry)
        of = 'model="demo",pool="{}",worker_class="toy"'
        prefill, decode = of.format("prefill"), of.format("decode")
        assert seen[f"readyplane_prefill_queue_tokens{{{prefill}}}"] == 160
        assert seen[f"readyplane_decode_active_sequences{{{decode}}}"] == 1
        assert seen[f"readyplane_kv_usage_ratio{{{decode}}}"] == 0.25
        assert seen['readyplane_router_arrivals_total{model="demo"}'] == 1
        assert seen['readyplane_router_refused_total{model="other",reason="unknown_model"}'] == 50
        assert seen['readyplane_ttft_predicted_seconds{model="demo",quantile="0.5"}'] > 0.1
        assert 'readyplane_ttft_actual_seconds{model="demo",quantile="0.5"}' not in seen
        assert seen['readyplane_router_leases_total{event="admitted"}'] == 2
        assert not [name for name in seen if "junk" in name]
        await router.complete(events(pair, EventKind.FIRST_TOKEN, ttft_s=0.3))
        assert scrape(registry)['readyplane_ttft_actual_seconds{model="demo",quantile="0.5"}'] == (
            0.3
        )
        await d0.leave()
        assert not [name for name in scrape(registry) if 'pool="decode"' in name]

    on_virtual_time(main)


def test_every_segment_has_a_histogram() -> None:
    """R6.2. The order to the agent's start is counted apart, since attached engines have it too."""
    told = [segment for segments in SEGMENT_METRICS.values() for segment in segments]
    assert len(told) == len(set(told))
    assert {*told, SegmentName.SCHEDULE} == set(SegmentName) - LATER


def test_a_start_is_observed_once_segment_by_segment() -> None:
    registry = CollectorRegistry()
    starts = StartMetrics(registry)

    async def main(world: World) -> None:
        router = world.service()
        await router.start()
        segments = (
            Segment(SegmentName.SCHEDULE, 0.0, 0.5),
            Segment(SegmentName.WEIGHT_TRANSFER, 1.0, 3.0),
            Segment(SegmentName.WEIGHT_TRANSFER, 2.0, 4.0),
            Segment(SegmentName.COMPILE, 4.0, 5.0, True, "cache=miss:dtype differs=1"),
            Segment(SegmentName.CANARY, 5.0, None),
        )
        from readyplane.core.worker import Worker, WorkerState

        worker = Worker(offer("p0", Role.PREFILL), 1, WorkerState.READY)
        starts.admitted(worker)  # nothing is known of its start: nothing is observed
        starts.admitted(replace(worker, progress=StartProgress(0.0, 5.5, segments)))
        hit = replace(segments[3], detail="cache=hit")
        starts.admitted(replace(worker, progress=StartProgress(0.0, 5.5, (hit,))))

    on_virtual_time(main)
    seen = scrape(registry)
    labels = f'{{model="{MODEL}",pool="prefill",worker_class="toy"}}'
    assert seen[f"readyplane_schedule_to_gpu_seconds_sum{labels}"] == 0.5
    assert seen[f"readyplane_weight_transfer_seconds_sum{labels}"] == 4.0
    assert seen[f"readyplane_compile_seconds_count{labels}"] == 2.0
    assert seen[f"readyplane_canary_seconds_sum{labels}"] == 0.5
    assert seen[f"readyplane_compile_cache_hit_total{labels}"] == 1.0
    missed = labels.replace(",worker_class", ',reason="dtype",worker_class')
    assert seen[f"readyplane_compile_cache_miss_total{missed}"] == 1.0
