"""On and off: how long load stays and stays away, and how high it is while there.

Owns telling near zero from load, with hysteresis, by the largest rate of the last half-hour.
"""

from __future__ import annotations

import math

from readyplane_planner.forecast import sketch
from readyplane_planner.forecast.values import Bursts, Series, Spells

ON_SHARE, OFF_SHARE = 0.2, 0.1
"""Of the fading peak: above the first load is on, below the second it is off."""
TAU_S = 7200.0
SAMPLE_S = 5.0


def seen(spells: Spells, rate: float, peak: float, *, dt_s: float, now_s: float) -> Spells:
    """With one more rate of the window."""
    fade = math.exp(-dt_s / TAU_S)
    on = peak > 0 and rate > (OFF_SHARE if spells.on else ON_SHARE) * peak
    on_count, off_count = spells.on_count * fade, spells.off_count * fade
    since_s = spells.since_s
    if since_s is None:
        since_s = now_s
    elif on != spells.on:
        on_count += spells.on
        off_count += not spells.on
        since_s = now_s
    rates = spells.rates
    if on and (not rates.weight or now_s - rates.at_s >= SAMPLE_S - 1e-9):
        rates = sketch.add(rates, rate, now_s=now_s, tau_s=TAU_S)
    return Spells(
        on,
        since_s,
        spells.on_s * fade + (dt_s if on else 0.0),
        spells.off_s * fade + (0.0 if on else dt_s),
        on_count,
        off_count,
        rates,
    )


def bursts(series: Series, *, quantile: float = 0.95) -> Bursts:
    """How on/off the series has been over the last hours.

    Near zero is below a tenth of the largest rate of about the last half-hour; it is on again above
    a fifth. A series that never falls so low has an `on_share` of 1 and no `off_s`. Without any
    sample `on_share` is 0 and `on_rate` 0, which says that nothing is known of bursts.
    """
    spells = series.spells
    whole_s = spells.on_s + spells.off_s
    return Bursts(
        on_share=spells.on_s / whole_s if whole_s > 0 else 0.0,
        on_rate=spells.rates.quantile(quantile),
        on_s=spells.on_s / spells.on_count if spells.on_count > 0.2 else None,
        off_s=spells.off_s / spells.off_count if spells.off_count > 0.2 else None,
    )
