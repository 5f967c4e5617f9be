"""Signals: what a number is worth before anything is decided on it."""

import math

import pytest

from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import LoadReport, Role, Worker, WorkerOffer, WorkerState
from readyplane_planner.signals import (
    SHRINK_NEEDS,
    Kind,
    Latency,
    Observation,
    Priors,
    RouterSample,
    check,
    observe,
)

T_READY = {name: StartQuantiles(6, 10, 15, 0, 0.0) for name in ("prefill", "decode")}
GAUGES = (
    "queued_requests",
    "queued_tokens",
    "prefilling_requests",
    "prefilling_tokens",
    "decoding_requests",
    "decoding_remaining_tokens",
    "decoding_kv_tokens",
)


def sample(taken_s: float, **changes: object) -> RouterSample:
    counters = {
        "arrivals_total": 100.0,
        "arrival_tokens_total": 100_000.0,
        "arrival_uncached_tokens_total": 80_000.0,
        "finished_total": 90.0,
    }
    counters.update(changes.pop("counters", {}))  # type: ignore[call-overload]
    gauges: dict[str, object] = dict.fromkeys(GAUGES, 0.0)
    gauges.update(changes.pop("gauges", {}))  # type: ignore[call-overload]
    values: dict[str, object] = {
        "incarnation": "r1",
        "uptime_s": 500.0,
        "counters": counters,
        "gauges": gauges,
    }
    values.update(changes)
    return RouterSample(taken_s, **values)  # type: ignore[arg-type]


def look(
    previous: RouterSample | None, current: RouterSample | None, *, now_s: float = 102.0
) -> Observation:
    return observe(
        model="m",
        previous=previous,
        current=current,
        allocations=(),
        t_ready=T_READY,
        priors=Priors(),
        now_s=now_s,
    )


def more(**grown: float) -> dict[str, float]:
    base = {
        "arrivals_total": 100.0,
        "arrival_tokens_total": 100_000.0,
        "arrival_uncached_tokens_total": 80_000.0,
        "finished_total": 90.0,
    }
    return {name: base[name] + value for name, value in grown.items()}


def test_rates_are_tokens_a_second() -> None:
    seen = look(
        sample(100.0),
        sample(
            102.0,
            counters=more(
                arrivals_total=10,
                arrival_tokens_total=10_000,
                arrival_uncached_tokens_total=6_000,
                finished_total=8,
            ),
        ),
    )
    assert seen.arrivals.value == 5.0
    assert seen.prompt_work.value == 5_000.0
    assert seen.prefill_work.value == 3_000.0
    assert seen.finished.value == 4.0
    assert {s.unit for s in (seen.prefill_work, seen.prompt_work)} == {"tokens/s"}
    assert not seen.unknown()


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, "NaN", None, 1e308, -1.0, True, [1]]
)
def test_a_bad_number_is_missing_and_named(value: object) -> None:
    """B01: whatever is not a sound number is no sample, never zero and never huge."""
    seen = look(sample(100.0), sample(102.0, gauges={"queued_tokens": value}))
    assert seen.queue.kind is Kind.MISSING and seen.queue.value is None
    assert "queue" in seen.unknown()
    if value is not None:
        assert any(name.startswith("queued_tokens=") for name in seen.bad)


@pytest.mark.parametrize("value", [math.nan, "12", 1e300, -5.0])
def test_a_bad_counter_makes_no_rate(value: object) -> None:
    """B01 for counters: the difference of a broken value would be gigantic."""
    seen = look(sample(100.0), sample(102.0, counters={"arrivals_total": value}))
    assert not seen.arrivals.known and seen.bad


def test_check_gives_the_number_back() -> None:
    bad: list[str] = []
    assert check("x", 3, bad) == 3.0 and check("x", 0.5, bad) == 0.5 and not bad


def test_an_answer_without_the_model_is_no_zero() -> None:
    """B02: an answer that holds nothing of the model says nothing of its load."""
    empty = sample(102.0, model_known=False, counters={}, gauges={})
    seen = look(sample(100.0), empty)
    assert seen.arrivals.kind is Kind.MISSING
    assert not seen.idle
    assert set(seen.unknown()) == set(SHRINK_NEEDS)


def test_idle_is_known_and_no_data_is_not() -> None:
    """B04: a flat, fresh counter with nothing in flight is idle although latencies are empty."""
    seen = look(sample(100.0), sample(102.0, latency={"ttft_actual": Latency(30.0, 0)}))
    assert seen.arrivals.kind is Kind.IDLE
    assert seen.idle and not seen.unknown()
    assert seen.latency["ttft_actual"].count == 0
    busy = look(sample(100.0), sample(102.0, gauges={"decoding_requests": 3}))
    assert busy.arrivals.kind is Kind.IDLE and not busy.idle


def test_latency_of_nan_is_an_empty_window() -> None:
    seen = look(
        sample(100.0),
        sample(102.0, latency={"ttft_actual": Latency(30.0, 5, math.nan, 1.0, 2.0)}),
    )
    assert seen.latency["ttft_actual"].count == 0
    assert seen.bad


@pytest.mark.parametrize(
    ("values", "rates"),
    [
        ((1000, 1010, 1009, 1019), (10, None, 10)),
        ((1000, 1010, 1020), (10, 10)),
    ],
)
def test_a_dip_of_one_life_is_no_restart(
    values: tuple[int, ...], rates: tuple[int | None, ...]
) -> None:
    """B15: a counter that dips is not counted again as a whole, and has not stood still either."""
    for (i, before), now, rate in zip(enumerate(values), values[1:], rates, strict=False):
        seen = look(
            sample(100.0 + i, counters={"arrivals_total": before}),
            sample(101.0 + i, counters={"arrivals_total": now}),
            now_s=101.0 + i,
        )
        assert seen.arrivals.value == rate


def test_a_new_life_counts_from_zero_and_warms_up() -> None:
    """B15, B16: after a restart +3 is +3, and a rate is unknown until its window has passed."""
    before = sample(100.0, counters={"arrivals_total": 1000})
    young = sample(102.0, incarnation="r2", uptime_s=1.5, counters={"arrivals_total": 3})
    seen = look(before, young)
    assert seen.arrivals.kind is Kind.WARMING and seen.arrivals.value is None
    later = sample(104.0, incarnation="r2", uptime_s=3.5, counters={"arrivals_total": 5})
    assert look(young, later, now_s=104.0).arrivals.kind is Kind.WARMING
    warm = sample(114.0, incarnation="r2", uptime_s=13.5, counters={"arrivals_total": 25})
    assert look(later, warm, now_s=114.0).arrivals.value == 2.0


def test_two_resets_never_make_a_negative_rate() -> None:
    first = sample(100.0, counters={"arrivals_total": 500})
    third = sample(140.0, incarnation="r3", uptime_s=30.0, counters={"arrivals_total": 2})
    seen = look(first, third, now_s=140.0)
    assert seen.arrivals.value is None or seen.arrivals.value >= 0


def test_one_answer_is_never_counted_twice() -> None:
    same = sample(102.0)
    seen = look(same, same)
    assert seen.arrivals.kind is Kind.STALE and seen.dt_s == 0.0
    old = look(sample(90.0), sample(92.0), now_s=102.0)
    assert old.arrivals.kind is Kind.STALE and old.arrivals.age_s == 10.0
    assert not old.fleet_known


def worker(name: str, life: str, *, queue: int, renewed_s: float = 50.0) -> Worker:
    offer = WorkerOffer(name, life, Role.PREFILL, "m", "h200")
    return Worker(
        offer,
        1,
        WorkerState.READY,
        load=LoadReport(
            running=1,
            waiting_prefill_tokens=queue,
            prefill_tokens_total=round(1000 * renewed_s),
            iterations_total=round(10 * renewed_s),
        ),
        ready_s=1.0,
        renewed_s=renewed_s,
    )


def test_series_of_the_dead_are_left_out() -> None:
    """B08: a worker that is gone has no say, whatever its last sample was."""
    before = sample(100.0, workers=(worker("a", "1", queue=50), worker("b", "1", queue=9_000)))
    now = sample(102.0, workers=(worker("a", "1", queue=50, renewed_s=52.0),))
    seen = look(before, now)
    assert [w.worker_id for w in seen.workers] == ["a"]
    assert seen.queue.value == 50.0
    assert seen.dead_series == 1


def test_samples_join_by_incarnation() -> None:
    """B08: the same name with another life shares no counters with its predecessor."""
    before = sample(100.0, workers=(worker("a", "1", queue=5, renewed_s=50.0),))
    same = look(before, sample(102.0, workers=(worker("a", "1", queue=5, renewed_s=52.0),)))
    assert same.workers[0].prefill_rate == pytest.approx(1000.0)
    assert same.workers[0].iteration_s == pytest.approx(0.1)
    other = look(before, sample(102.0, workers=(worker("a", "2", queue=5, renewed_s=52.0),)))
    assert other.workers[0].prefill_rate is None and other.workers[0].iteration_s is None


def test_b155_ages_come_from_one_clock() -> None:
    """B152, B155: ages are differences on the router's clock; the planner's plays no part."""
    seen = look(
        sample(100.0), sample(102.0, workers=(worker("a", "1", queue=0, renewed_s=9_000.0),))
    )
    assert seen.workers[0].ready_age_s == pytest.approx(8_999.0)
