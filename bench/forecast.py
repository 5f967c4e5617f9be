"""Back-test of the planner's forecast: how near, how sure and how dear, on traces and drawn loads.

`python -m bench.forecast` prints one row an input, kind of work and horizon:

wape      |level - mean rate of the horizon|, summed, over the sum of the mean rates.
cover     share of horizons whose largest rate stayed below the upper bound.
pinball   of the bound against the largest rate, over the mean of the largest rates.
cost      upper bound over the mean rate, both summed: what the head-room costs.

The rates are those that the planner would see every tick: uncached prompt tokens for prefill, and
arrivals times the recent mean output for decode. What is judged begins after ten minutes.
`--apart` tells instead how top clients apart compare with the whole (see `bench.forecast_clients`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

from readyplane_lab.proof.oracle.demand import ideal_cached
from readyplane_lab.proof.scenarios import scenarios
from readyplane_planner import forecast
from readyplane_planner.forecast import Forecast, Knobs, Series

Floats = NDArray[np.float64]
TICK_S = 2.0
HORIZONS_S = (30.0, 60.0, 180.0, 300.0)
SKIP_S = 600.0
OUTPUT_TAU_S = 180.0
BLOCK = 64
INPUTS: tuple[tuple[str, float, float, float], ...] = (
    # scenario, scale, seconds left out at the beginning, seconds taken
    ("az-conv", 2.286, 0.0, 3600.0),
    ("az-code", 0.646, 0.0, 3600.0),
    ("mc-conv", 2.667, 0.0, 3600.0),
    ("servegen-large-day", 1.0, 61_200.0, 18_000.0),
    ("servegen-small-day", 1.0, 0.0, 14_400.0),
    ("calm", 1.0, 0.0, 1500.0),
    ("flash-crowd", 1.0, 0.0, 1500.0),
    ("isl-burst", 1.0, 0.0, 1500.0),
    ("oscillation-120s", 1.0, 0.0, 1800.0),
    ("poisoned-forecast", 1.0, 0.0, 1950.0),
)


@dataclass(frozen=True, slots=True)
class Score:
    """The figures of one series at one horizon."""

    wape: float
    cover: float
    pinball: float
    cost: float


def rates(name: str, scale: float, from_s: float, span_s: float) -> tuple[Floats, Floats]:
    """(P-work, D-work) in tokens/s for every tick."""
    requests = scenarios()[name].requests(scale, 1)
    rows = [r for r in requests if from_s <= r.at_s < from_s + span_s]
    at = np.array([r.at_s for r in rows]) - from_s
    uncached = np.array([r.isl for r in rows]) - ideal_cached(rows, BLOCK)
    output = np.array([float(r.osl) for r in rows])
    ticks = int(at[-1] // TICK_S) + 1
    place = (at // TICK_S).astype(int)
    arrived = _a_tick(place, np.ones(len(rows)), ticks) / TICK_S
    p = _a_tick(place, uncached, ticks) / TICK_S
    made = _a_tick(place, output, ticks)
    return p, arrived * recent_mean(made, arrived * TICK_S)


def _a_tick(place: NDArray[np.int64], values: Floats, ticks: int) -> Floats:
    return np.asarray(np.bincount(place, weights=values, minlength=ticks), dtype=np.float64)


def recent_mean(tokens: Floats, requests: Floats) -> Floats:
    """Mean output before each tick, fading, as the planner follows it."""
    fade = float(np.exp(-TICK_S / OUTPUT_TAU_S))
    out = np.empty(len(tokens))
    top, bottom = 10 * 256.0, 10.0
    for i, (a, b) in enumerate(zip(tokens.tolist(), requests.tolist(), strict=True)):
        out[i] = top / bottom
        top, bottom = fade * top + a, fade * bottom + b
    return out


def truth(rate: Floats, horizon_s: float, window_s: float) -> tuple[Floats, Floats]:
    """(mean, largest trailing window) of the horizon after each tick; NaN where it is not over."""
    h, w = round(horizon_s / TICK_S), round(window_s / TICK_S)
    total = np.concatenate([[0.0], np.cumsum(rate)])
    mean = np.full(len(rate), np.nan)
    peak = np.full(len(rate), np.nan)
    last = len(rate) - h
    if last <= 0:
        return mean, peak
    mean[:last] = (total[h + 1 :] - total[1 : last + 1]) / h
    trailing = (total[w:] - total[:-w]) / w  # at i: of the ticks i .. i + w - 1
    spans = np.lib.stride_tricks.sliding_window_view(trailing, h - w + 1)
    peak[:last] = spans[1 : last + 1].max(axis=1)
    return mean, peak


def play(rate: Floats, horizons: Sequence[float], knobs: Knobs) -> list[list[Forecast]]:
    """Forecasts of each tick by horizon; the longest is the one that the planner would ask for."""
    made: list[list[Forecast]] = [[] for _ in horizons]
    series = Series()
    for i, value in enumerate(rate.tolist()):
        now_s = (i + 1) * TICK_S
        series = forecast.update(series, value, dt_s=TICK_S, now_s=now_s, knobs=knobs)
        for row, horizon_s in zip(made, horizons, strict=True):
            row.append(forecast.predict(series, horizon_s=horizon_s, knobs=knobs))
        series = forecast.remember(series, made[-1][-1], now_s=now_s, knobs=knobs)
    return made


def score(made: Sequence[Forecast], rate: Floats, horizon_s: float, knobs: Knobs) -> Score:
    """The figures, from ten minutes on (from a third of shorter series)."""
    mean, peak = truth(rate, horizon_s, knobs.window_s)
    level = np.array([f.level for f in made])
    upper = np.array([f.upper for f in made])
    known = ~np.isnan(mean)
    known[: min(round(SKIP_S / TICK_S), len(rate) // 3)] = False
    mean, peak, level, upper = (x[known] for x in (mean, peak, level, upper))
    over = peak - upper
    q = knobs.quantile
    return Score(
        wape=float(np.abs(level - mean).sum() / mean.sum()),
        cover=float((over <= 1e-9 * np.maximum(1.0, upper)).mean()),
        pinball=float(np.where(over > 0, q * over, (q - 1) * over).mean() / peak.mean()),
        cost=float(upper.sum() / mean.sum()),
    )


def measure(knobs: Knobs, inputs: Sequence[str] = ()) -> dict[tuple[str, str, float], Score]:
    """All figures by (input, work, horizon)."""
    out: dict[tuple[str, str, float], Score] = {}
    for name, scale, from_s, span_s in INPUTS:
        if inputs and name not in inputs:
            continue
        for work, rate in zip("PD", rates(name, scale, from_s, span_s), strict=True):
            for horizon_s, made in zip(HORIZONS_S, play(rate, HORIZONS_S, knobs), strict=True):
                out[name, work, horizon_s] = score(made, rate, horizon_s, knobs)
    return out


def measure_forecast() -> dict[str, float]:
    """Means over all inputs, for `bench.main`."""
    found = measure(Knobs())
    return {k: float(np.mean([getattr(s, k) for s in found.values()])) for k in Score.__slots__}


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="back-test of the forecast")
    parser.add_argument("--input", action="append", choices=[row[0] for row in INPUTS])
    parser.add_argument("--quantile", type=float, default=0.9)
    parser.add_argument(
        "--apart", action="store_true", help="top clients apart, on labelled traffic, instead"
    )
    given = parser.parse_args()
    if given.apart:
        forecast_clients = import_module("bench.forecast_clients")  # which takes its measures here
        forecast_clients.report(Knobs(quantile=given.quantile))
        return 0
    began_s = time.process_time()
    found = measure(Knobs(quantile=given.quantile), given.input or ())
    print(f"{'input':20} work  H    wape  cover pinball  cost")
    for (name, work, horizon_s), s in found.items():
        print(
            f"{name:20} {work} {horizon_s:5.0f}  {s.wape:.3f}  {s.cover:.3f}  {s.pinball:.4f}"
            f"  {s.cost:.2f}"
        )
    mean = [float(np.mean([getattr(s, k) for s in found.values()])) for k in Score.__slots__]
    print(
        "bench-forecast "
        + " ".join(f"{k}={v:.4g}" for k, v in zip(Score.__slots__, mean, strict=True))
        + f" cpu_s={time.process_time() - began_s:.3g}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
