"""On and off: how long load stays and stays away, and how high it is while there.

Owns telling near zero from load, with hysteresis, by the largest rate of the last half-hour.
"""

from __future__ import annotations

import math
from dataclasses import replace

from readyplane_planner.forecast import sketch
from readyplane_planner.forecast.values import Bursts, Series, Spells

ON_SHARE, OFF_SHARE = 0.2, 0.1
"""Of the fading peak: above the first load is on, below the second it is off."""
TAU_S = 7200.0
SAMPLE_S = 5.0


def seen(spells: Spells, rate: float, peak: float, *, now_s: float) -> Spells:
    """With one more rate of the window; counted every few seconds, and at each change."""
    on = peak > 0 and rate > (OFF_SHARE if spells.on else ON_SHARE) * peak
    if spells.at_s is None:
        return replace(spells, on=on, at_s=now_s)
    lasted_s = now_s - spells.at_s
    ended = on != spells.on
    if not ended and lasted_s < SAMPLE_S - 1e-9:
        return spells
    fade = math.exp(-lasted_s / TAU_S)
    rates = spells.rates
    if on:
        rates = sketch.add(rates, rate, now_s=now_s, tau_s=TAU_S)
    return Spells(
        on,
        now_s,
        spells.on_s * fade + (lasted_s if spells.on else 0.0),
        spells.off_s * fade + (0.0 if spells.on else lasted_s),
        spells.on_count * fade + (1.0 if ended and spells.on else 0.0),
        spells.off_count * fade + (1.0 if ended and not spells.on else 0.0),
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
    if not whole_s:
        return Bursts(1.0 if spells.on else 0.0, spells.rates.quantile(quantile), None, None)
    return Bursts(
        on_share=spells.on_s / whole_s,
        on_rate=spells.rates.quantile(quantile),
        on_s=spells.on_s / spells.on_count if spells.on_count > 0.2 else None,
        off_s=spells.off_s / spells.off_count if spells.off_count > 0.2 else None,
    )
