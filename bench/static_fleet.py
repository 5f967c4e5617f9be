"""A given fleet in the event simulator: what the validity benches compare others with.

Owns one run with both pools pinned by the policy (`min` = `max`), or moved by a script of targets,
and the figures drawn from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from readyplane import profiles
from readyplane.core.profile import LinkClass
from readyplane.core.work import Slo
from readyplane_lab.simulator.startup import StartUpModel
from readyplane_lab.simulator.world import WorldOptions, run_world
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_planner.decide.follow import Targets, follow
from readyplane_planner.decide.values import Decision, Memory, Plan
from readyplane_planner.signals import Observation

Floats = NDArray[np.float64]
SLO = Slo(2.0, 0.05)


@dataclass(frozen=True, slots=True)
class Columns:
    """Requests that finished, and how many did not.

    Attributes:
        ttft_s, tpot_s: of each finished request in order of arrival; tpot_s is nan for one token.
        lost: refused, failed or timed out. worker_s: worker-seconds from first arrival to last end.
        cached: share of prompt tokens found in a prefill worker's cache.
    """

    ttft_s: Floats
    tpot_s: Floats
    lost: int
    worker_s: float
    cached: float

    def attainment(self, slo: Slo = SLO) -> float:
        """Share of all arrivals within both bounds."""
        good = (self.ttft_s <= slo.ttft_s) & (np.nan_to_num(self.tpot_s) <= slo.tpot_s)
        return float(good.sum() / (len(good) + self.lost))

    def figures(self) -> dict[str, float]:
        """Means and quantiles in seconds, worker-seconds, attainment, cache share."""
        ttft, tpot = self.ttft_s, self.tpot_s[~np.isnan(self.tpot_s)]
        return {
            "mean_ttft": float(ttft.mean()),
            "p50_ttft": float(np.quantile(ttft, 0.5)),
            "p90_ttft": float(np.quantile(ttft, 0.9)),
            "p99_ttft": float(np.quantile(ttft, 0.99)),
            "mean_itl": float(tpot.mean()),
            "p50_itl": float(np.quantile(tpot, 0.5)),
            "p90_itl": float(np.quantile(tpot, 0.9)),
            "p99_itl": float(np.quantile(tpot, 0.99)),
            "worker_s": self.worker_s,
            "attainment": self.attainment(),
            "cached": self.cached,
            "lost": float(self.lost),
        }


class Script:
    """A planner's brain that sets given (seconds, prefill, decode) targets and nothing else."""

    def __init__(self, targets: Sequence[tuple[float, int, int]]) -> None:
        self._targets = targets
        self._began_s: float | None = None

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        """The last target whose time has come; the first tick is where time begins."""
        self._began_s = now_s if self._began_s is None else self._began_s
        due = [t for t in self._targets if t[0] <= now_s - self._began_s]
        wanted = Targets(due[-1][1], due[-1][2]) if due else Targets(None, None)
        return follow(wanted, observation, plan, memory, now_s=now_s, decision_id=decision_id)


def simulate(
    requests: Sequence[WorkloadRequest],
    fleet: tuple[int, int],
    profile: str,
    *,
    link: LinkClass,
    block_size: int = 16,
    tick_s: float = 5.0,
    targets: Sequence[tuple[float, int, int]] = (),
    startup_s: float = 5.0,
    slo: Slo = SLO,
) -> Columns:
    """Play requests on workers of one profile (a name or a file).

    Args:
        fleet: (prefill, decode) workers from the beginning, for good unless there are `targets`.
        targets: (seconds, prefill, decode), ascending. startup_s: of a worker, always the same.
        slo: what the router keeps decode workers within.
    """
    worker_class = profiles.load(profile).worker_class
    pools = {
        name: {
            "min": 1 if targets else n,
            "max": 16 if targets else n,
            "worker_class": worker_class,
            "profile": profile,
        }
        for name, n in zip(("prefill", "decode"), fleet, strict=True)
    }
    policy = {
        "model": "static",
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
        "tick_s": tick_s,
        **pools,
    }
    policy["decode"] = {**pools["decode"], "convertible": False}
    options = WorldOptions(
        policy,
        # All of a start is one duration: nothing is drawn, and weights take no time.
        startup=StartUpModel(sigma=0.0, weight_bytes=1.0).scaled_to(startup_s),
        brain=Script(targets) if targets else None,
        link=link,
        initial=fleet,
        block_size=block_size,
        record=False,
    )
    result = run_world(options, requests)
    done = [r for r in result.records if r.outcome == "finished"]
    return Columns(
        ttft_s=np.array([r.ttft_s for r in done], dtype=np.float64),
        tpot_s=np.array([r.tpot_s if r.osl > 1 else np.nan for r in done], dtype=np.float64),
        lost=len(result.records) - len(done),
        worker_s=sum(w.released_s - max(0.0, w.allocated_s) for w in result.lives),
        cached=sum(r.cached_tokens for r in done) / sum(r.isl for r in done),
    )
