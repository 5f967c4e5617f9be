"""Back-test of forecasting top clients apart, on labelled traffic, beside the forecast of the whole.

`python -m bench.forecast --apart` prints one row a labelled input, kind of work and horizon: figures
of the whole and of what would be gone by, as `bench.forecast` has them; the share of time for which
the bound of the sum was gone by; and pinball losses of that bound with each correlation, over the
whole's. Clients are chosen by the router's own sketch, one look a tick.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.forecast import TICK_S, Floats, Score, recent_mean, score, truth
from readyplane_lab.workload.servegen import Columns, Window, servegen
from readyplane_planner import forecast
from readyplane_planner.forecast import Apart, Forecast, Knobs, Series
from readyplane_router.clients import Clients

HORIZONS_S = (60.0, 180.0)
INPUTS: tuple[tuple[str, str, int, float, float, float], ...] = (
    # name, class, day, first hour, hours, share of the published rates
    ("large-day-10", "m-large", 9, 17.0, 3.0, 0.03),
    ("large-day-5", "m-large", 4, 8.0, 3.0, 0.03),
    ("small-day-12", "m-small", 11, 17.0, 3.0, 0.026),
)
OUTPUT_TOKENS = 256.0
Told = Sequence[dict[str, tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Labelled:
    """Rates a tick: of all, and (P, D) of each client that a look at the router tells of."""

    p: Floats
    d: Floats
    told: Told


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work at one horizon.

    Attributes:
        used: share of ticks for which the sum was gone by. by_correlation: pinball of its bound over
            that of the whole, both as they were kept for judging.
    """

    whole: Score
    apart: Score
    used: float
    by_correlation: tuple[float, ...]
    tick_ms: float


def labelled(drawn: Columns) -> Labelled:
    """What the planner would see of it every tick; prompts share nothing, so all are uncached."""
    place = (drawn.at_s // TICK_S).astype(int)
    ticks = int(place[-1]) + 1
    arrived = np.bincount(place, minlength=ticks).astype(float)
    made = np.bincount(place, weights=drawn.osl, minlength=ticks).astype(float)
    osl = recent_mean(made, arrived)
    clients, before, told = Clients(), dict[tuple[str, int], tuple[int, int]](), []
    rows = zip(
        drawn.client.tolist(), drawn.isl.tolist(), drawn.at_s.tolist(), place.tolist(), strict=True
    )
    row = next(rows, None)
    for tick in range(ticks):
        while row is not None and row[3] == tick:
            clients.add(
                f"{row[0]}", uncached_tokens=row[1], output_tokens=OUTPUT_TOKENS, now_s=row[2]
            )
            row = next(rows, None)
        found = {
            (c.client, c.life): (c.arrival_uncached_tokens_total, c.arrivals_total)
            for c in clients.top()
        }
        told.append(
            {
                key[0]: (
                    (now[0] - before[key][0]) / TICK_S,
                    (now[1] - before[key][1]) / TICK_S * float(osl[tick]),
                )
                for key, now in found.items()
                if key in before
            }
        )
        before = found
    p = np.bincount(place, weights=drawn.isl, minlength=ticks) / TICK_S
    return Labelled(p, arrived / TICK_S * osl, told)


def play(rate: Floats, told: Told, kind: int, horizon_s: float, knobs: Knobs) -> Row:
    """One series as the planner keeps it, and beside it the parts."""
    series, apart = Series(), Apart()
    whole: list[Forecast] = []
    made: list[Forecast] = []
    used = 0
    kept: list[tuple[int, tuple[float, ...]]] = []
    apart_s = 0.0
    for i, value in enumerate(rate.tolist()):
        now_s = (i + 1) * TICK_S
        series = forecast.update(series, value, dt_s=TICK_S, now_s=now_s, knobs=knobs)
        whole.append(forecast.predict(series, horizon_s=horizon_s, knobs=knobs))
        began_s = time.process_time()
        rates = {name: pair[kind] for name, pair in told[i].items()}
        apart = forecast.seen(apart, rates, series, value, dt_s=TICK_S, now_s=now_s, knobs=knobs)
        made.append(forecast.chosen(apart, series, whole[-1], knobs=knobs))
        apart = forecast.remembered(apart, series, horizon_s=horizon_s, now_s=now_s, knobs=knobs)
        apart_s += time.process_time() - began_s
        used += apart.used
        if apart.awaited and apart.awaited[-1].made_s == now_s and apart.awaited[-1].uppers:
            kept.append((i, apart.awaited[-1].uppers))
        series = forecast.remember(series, whole[-1], now_s=now_s, knobs=knobs)
    peaks = truth(rate, apart.horizon_s, knobs.window_s)[1]
    lost = np.array(
        [
            [_pinball(peaks[i] - u, knobs.quantile) for u in uppers]
            for i, uppers in kept
            if not np.isnan(peaks[i])
        ]
    ).mean(axis=0)
    return Row(
        score(whole, rate, horizon_s, knobs),
        score(made, rate, horizon_s, knobs),
        used / len(rate),
        tuple((lost[1:-1] / lost[0]).tolist()),
        apart_s / len(rate) * 1e3,
    )


def _pinball(over: float, quantile: float) -> float:
    return quantile * over if over > 0 else (quantile - 1.0) * over


def report(knobs: Knobs, *, seed: int = 1) -> None:
    """Measure and print."""
    rows: list[Row] = []
    print(f"{'input':14} work  H  cover        pinball        cost       used  rho 0 .3 1")
    for name, model, day, from_h, hours, scale in INPUTS:
        window = Window.of_day(day, from_h=from_h, hours=hours)
        seen = labelled(servegen(model).draw(window, scale=scale, seed=seed))
        for kind, rate in enumerate((seen.p, seen.d)):
            for horizon_s in HORIZONS_S:
                row = play(rate, seen.told, kind, horizon_s, knobs)
                rows.append(row)
                a, b = row.whole, row.apart
                print(
                    f"{name:14} {'PD'[kind]} {horizon_s:5.0f}"
                    f"  {a.cover:.3f} {b.cover:.3f}  {a.pinball:.4f} {b.pinball:.4f}"
                    f"  {a.cost:.2f} {b.cost:.2f}  {row.used:.2f}  "
                    + " ".join(f"{r:.2f}" for r in row.by_correlation),
                    flush=True,
                )
    means = {
        f"{k}_ratio": _mean([getattr(r.apart, k) / getattr(r.whole, k) for r in rows])
        for k in ("pinball", "cost")
    }
    means["cover"] = float(np.mean([r.apart.cover for r in rows]))
    means["cover_whole"] = float(np.mean([r.whole.cover for r in rows]))
    means["pinball_worst"] = max(r.apart.pinball / r.whole.pinball for r in rows)
    means["tick_ms"] = float(np.mean([r.tick_ms for r in rows]))
    print("bench-forecast-apart " + " ".join(f"{k}={v:.4g}" for k, v in means.items()))


def _mean(ratios: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios))))
