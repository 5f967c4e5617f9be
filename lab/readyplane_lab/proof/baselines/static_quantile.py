"""B1, static quantile: as many workers as all but a few moments need, known in hindsight.

Each pool is sized by its own quantile over time. At the highest value this is the static peak.
"""

from __future__ import annotations

import numpy as np

from readyplane_lab.proof.baselines.parts import constant
from readyplane_lab.proof.port import Contender, Fielded, Setting
from readyplane_lab.simulator.outcome import Floats


def make(quantile: float, setting: Setting) -> Fielded:
    """The need that is not exceeded in that share of the steps."""
    future = setting.hindsight
    return constant.fielded(
        _quantile(future.need_p, quantile), _quantile(future.need_d, quantile), setting
    )


def _quantile(need: Floats, quantile: float) -> float:
    """One of the needs themselves, never a number between two."""
    return float(np.quantile(need, quantile, method="higher")) if len(need) else 0.0


CONTENDER = Contender(
    name="static-quantile",
    title="A fleet of fixed size that suffices all but a share of the time, by hindsight.",
    source="provisioning for a percentile (P95, P99) of the load",
    knob="quantile of the need over time",
    values=(0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.999, 1.0),
    default=0.99,
    make=make,
    hindsight=True,
)
