"""How much work the coming T_ready will bring, and how sure that is (R5.1).

Pure: a `Series` a pool remembers what it needs, `update` takes in a rate, `predict` hands a
`Forecast` to capacity, `remember` keeps it until its truth is known. Beside it: quantiles of several
horizons, growth within a horizon, bursts, and the day's profile for hours ahead. `Apart` does the same
for the largest clients and the rest, and its sum is gone by while it forecasts better.
"""

from readyplane_planner.forecast.apart import Apart, chosen, interrupted, remembered, seen
from readyplane_planner.forecast.apart import scaled as scaled_apart
from readyplane_planner.forecast.bounds import predict, quantiles
from readyplane_planner.forecast.experts import trailing
from readyplane_planner.forecast.rise import growth
from readyplane_planner.forecast.scaling import scaled
from readyplane_planner.forecast.seasons import ahead, coming
from readyplane_planner.forecast.seasons import moved as days_moved
from readyplane_planner.forecast.series import broken, remember, update
from readyplane_planner.forecast.spells import bursts
from readyplane_planner.forecast.values import (
    DAY_BINS,
    EXPERTS,
    HORIZONS_S,
    PENDING_MAX,
    SCORES_MAX,
    Bursts,
    Forecast,
    Knobs,
    Pending,
    Season,
    Series,
    Track,
)

__all__ = [
    "DAY_BINS",
    "EXPERTS",
    "HORIZONS_S",
    "PENDING_MAX",
    "SCORES_MAX",
    "Apart",
    "Bursts",
    "Forecast",
    "Knobs",
    "Pending",
    "Season",
    "Series",
    "Track",
    "ahead",
    "broken",
    "bursts",
    "chosen",
    "coming",
    "days_moved",
    "growth",
    "interrupted",
    "predict",
    "quantiles",
    "remember",
    "remembered",
    "scaled",
    "scaled_apart",
    "seen",
    "trailing",
    "update",
]
