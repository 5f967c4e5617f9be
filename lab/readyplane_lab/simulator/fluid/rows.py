"""The rows of a workload as plain lists, and what has become of each: what the loop touches most."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from readyplane.core.profile import ClassProfile, LinkClass
from readyplane_lab.simulator.fluid.arrivals import Arrivals
from readyplane_lab.simulator.fluid.prefill import prefill_seconds
from readyplane_lab.simulator.fluid.recent import RecentLatency, RecentLengths
from readyplane_lab.simulator.fluid.view import Totals
from readyplane_lab.simulator.outcome import Served
from readyplane_router.policy import RouterPolicy

NEVER = math.inf
NOTHING = 1e-6
"""Of a row's weight: less than that is a rounding error."""


class Rows:
    """Columns by name, one value a row.

    Attributes:
        since: when it entered the queue (again). service_s: worker-seconds of its prompt.
        moved_s: its KV on the link. outcomes: requests by how they ended.
    """

    def __init__(
        self, arrivals: Arrivals, prefill: ClassProfile, link: LinkClass, router: RouterPolicy
    ) -> None:
        self.arrivals = arrivals
        self._slo = router.pair.slo
        self.at: list[float] = arrivals.at_s.tolist()
        self.isl: list[float] = arrivals.isl.tolist()
        self.osl: list[float] = arrivals.osl.tolist()
        self.weight: list[float] = arrivals.weight.tolist()
        cached = np.minimum(arrivals.cached, arrivals.isl - 1)
        self.uncached: list[float] = (arrivals.isl - cached).tolist()
        moved = arrivals.isl * prefill.kv_bytes_per_token
        moved_s = link.setup_s + moved / link.bandwidth_bytes_per_s
        self.moved_s: list[float] = moved_s.tolist()
        self.service_s: list[float] = prefill_seconds(prefill, arrivals).tolist()
        self.chains = arrivals.chains
        self.since = list(self.at)
        self.outcomes: dict[str, float] = defaultdict(float)
        self.totals = Totals()
        self.lengths = RecentLengths(router.lengths_half_life, router.output_quantile)
        window = (router.window_s, router.window_samples_max)
        self.windows = {name: RecentLatency(*window) for name in ("ttft_actual", "tpot_actual")}
        self._ttft = [NEVER] * len(self.at)
        self._tpot = [NEVER] * len(self.at)
        self._first_s = [0.0] * len(self.at)
        self._begun = [0.0] * len(self.at)
        self._left = list(self.weight)
        self._last_s = [0.0] * len(self.at)

    def first_token(self, row: int, at_s: float, part: float) -> None:
        """A part of a row, by weight, has its first token; the row's is the parts' mean."""
        before = self._begun[row]
        total = before + part
        self._begun[row] = total
        first_s = at_s if not before else (self._first_s[row] * before + at_s * part) / total
        self._first_s[row] = first_s
        self._ttft[row] = first_s - self.at[row]
        self.windows["ttft_actual"].add(at_s, at_s - self.at[row], part)

    def last_token(self, row: int, at_s: float, part: float) -> bool:
        """A part of a row has all its tokens; True when that was the last of it."""
        weight, osl = self.weight[row], self.osl[row]
        if self._left[row] <= NOTHING * weight:
            return False
        self._last_s[row] += at_s * part
        self._left[row] -= part
        if self._left[row] > NOTHING * weight:
            return False
        later = osl - 1.0
        taken_s = self._last_s[row] / weight - self._first_s[row]
        tpot_s = max(0.0, taken_s / later) if later > 0 else 0.0
        self._tpot[row] = tpot_s
        self.outcomes["finished"] += weight
        self.totals.finished += weight
        if tpot_s > self._slo.tpot_s or self._ttft[row] > self._slo.ttft_s:
            self.totals.missed += weight
        self.lengths.add(self.isl[row], osl, weight)
        self.windows["tpot_actual"].add(at_s, tpot_s, weight)
        return True

    def miss(self, row: int, outcome: str) -> None:
        """It ends without what it asked for."""
        self._ttft[row] = self._tpot[row] = NEVER
        self.outcomes[outcome] += self.weight[row]
        self.totals.missed += self.weight[row]

    def again(self, row: int, now_s: float) -> None:
        """It begins anew."""
        self.since[row] = now_s
        self._begun[row], self._left[row], self._last_s[row] = 0.0, self.weight[row], 0.0

    def served(self) -> Served:
        """For the result."""
        arrivals = self.arrivals
        return Served(
            at_s=arrivals.at_s,
            isl=arrivals.isl,
            osl=arrivals.osl,
            ttft_s=np.array(self._ttft),
            tpot_s=np.array(self._tpot),
            weight=arrivals.weight,
        )
