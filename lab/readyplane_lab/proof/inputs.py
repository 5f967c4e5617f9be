"""A scenario made concrete: at a peak, a T_ready and a seed, with all that contenders are told.

Owns how a workload is brought to a wanted peak, the bounds and the first fleet that all contenders
share, and the policy document that they play under. Hands a `Case` to the runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from readyplane import profiles
from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile
from readyplane.core.startup import SegmentName, StartQuantiles
from readyplane_lab.proof.measure import Times
from readyplane_lab.proof.oracle.demand import (
    Work,
    hindsight,
    ideal_cached,
    peak_workers,
    request_work,
)
from readyplane_lab.proof.port import Disturbances, Hindsight, Scenario, Setting
from readyplane_lab.simulator.fluid import Arrivals, arrivals_of, binned
from readyplane_lab.simulator.outcome import Floats
from readyplane_lab.simulator.startup import Draws, StartUpModel
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_planner.policy import overlay

MODEL = "proof"
BLOCK_SIZE = 64
STEP_S = 10.0
STEPS_MAX = 8640
"""Longer workloads get a coarser grid, so that bounds stay quick to work out."""
FIRST_S = 60.0
SPARE = 1.6
"""Most workers of a pool over its peak need: room for a rule to be wrong, the same for all."""
STARTS_DRAWN = 256
SCALINGS = 3
PEAK_TOLERANCE = 0.1
PEAK_OFF_MAX = 0.4
"""Workers are whole and bursts chance: a small peak cannot be hit; how far off is told."""
LARGE_REQUESTS = 150_000
BIN_S, BIN_ROWS = 2.0, 16


@dataclass(frozen=True)
class Case:
    """One input at one point. Built by `make_case`; everything about it follows from the seed.

    Attributes:
        key: scenario, T_ready, peak and seed, readable. peak: as it came out.
        scale: how much of the load as published. cached: prompt tokens of each request that an
            endless prefix cache would hold.
        startup: how starts take time here. policy: planner policy document without a tick.
    """

    key: str
    scenario: Scenario
    t_ready_s: float
    peak: float
    seed: int
    scale: float
    requests: Sequence[WorkloadRequest]
    cached: Floats
    setting: Setting
    startup: StartUpModel
    disturbances: Disturbances
    policy: Mapping[str, Any]
    _columns: dict[int, Arrivals] = field(default_factory=dict, repr=False)

    def arrivals(self, prefill_workers: int) -> Arrivals:
        """The workload in columns, with the prefix cache of a first fleet; made once.

        A row of a large one stands for several requests, without a prefix cache.
        """
        if prefill_workers not in self._columns:
            tokens = float(prefill_workers * self.setting.prefill.kv_capacity_tokens)
            made = arrivals_of(self.requests, block_size=BLOCK_SIZE, cache_tokens=tokens)
            large = len(made) > LARGE_REQUESTS
            self._columns[prefill_workers] = (
                binned(made, bin_s=BIN_S, rows=BIN_ROWS) if large else made
            )
        return self._columns[prefill_workers]

    @property
    def span_s(self) -> float:
        """First to last arrival."""
        return self.requests[-1].at_s

    @cached_property
    def times(self) -> Times:
        """For reversals and waste."""
        return Times(self.t_ready_s, self.setting.drain_s)

    @property
    def hindsight(self) -> Hindsight:
        """What was needed when."""
        return self.setting.hindsight


def make_case(
    scenario: Scenario, *, t_ready_s: float = 60.0, peak: float | None = 8.0, seed: int = 1
) -> Case:
    """The scenario with about `peak` workers (P and D together) at its busiest.

    Args:
        peak: None for the load as it is published.

    Raises:
        InvalidField: a trace that is not there; a load that cannot be brought to that peak.
    """
    both = _profiles(scenario)
    scale, requests, cached, work, found = _scaled(scenario, both, peak, seed)
    span_s = requests[-1].at_s
    startup = replace(StartUpModel(), **scenario.startup).scaled_to(t_ready_s)
    policy = _policy(scenario, _high(found), both)
    low, high = _bounds(policy, "min"), _bounds(policy, "max")
    first = scenario.initial or _first(found, t_ready_s)
    setting = Setting(
        prefill=both[0],
        decode=both[1],
        slo=scenario.slo,
        t_ready=start_quantiles(startup, seed),
        drain_s=(scenario.slo.ttft_s, float(np.median(work.residence_s))),
        low=low,
        high=high,
        initial=(min(first[0], high[0]), min(first[1], high[1])),
        hindsight=found,
    )
    return Case(
        key=f"{scenario.name} t_ready={t_ready_s:g} peak={peak or 0:g} seed={seed}",
        scenario=scenario,
        t_ready_s=t_ready_s,
        peak=peak_workers(found),
        seed=seed,
        scale=scale,
        requests=requests,
        cached=cached,
        setting=setting,
        startup=startup,
        disturbances=scenario.disturb(span_s, seed),
        policy=policy,
    )


def start_quantiles(startup: StartUpModel, seed: int) -> StartQuantiles:
    """Quantiles of a lone cold start, from seeded draws of every segment."""
    draws = Draws(seed)
    transfer_s = startup.weight_bytes / startup.store_bytes_per_s
    names = (SegmentName.SCHEDULE, *startup.segments)
    totals = [
        transfer_s + sum(startup.seconds(name, draws, "quantiles", k) for name in names)
        for k in range(STARTS_DRAWN)
    ]
    p50, p90, p99 = np.quantile(totals, (0.5, 0.9, 0.99))
    return StartQuantiles(float(p50), float(p90), float(p99), STARTS_DRAWN, 0.0)


def _profiles(scenario: Scenario) -> tuple[ClassProfile, ClassProfile]:
    prefill = profiles.load(scenario.worker_class)
    return prefill, profiles.load(scenario.decode_class or scenario.worker_class)


def _scaled(
    scenario: Scenario, both: tuple[ClassProfile, ClassProfile], peak: float | None, seed: int
) -> tuple[float, Sequence[WorkloadRequest], Floats, Work, Hindsight]:
    """Bring the load to the peak: measured at one scale, corrected once (rounding is not linear)."""
    if peak is not None and not (math.isfinite(peak) and peak >= 2):
        raise InvalidField("--peak", peak, "give at least 2 workers: one of each stage")
    scale = 1.0
    for attempt in range(SCALINGS):
        requests = scenario.requests(scale, seed)
        if not requests:
            raise InvalidField(f"scenario {scenario.name}", "no requests", "raise --peak")
        cached = ideal_cached(requests, BLOCK_SIZE)
        work, found = _demand(scenario, requests, cached, both)
        exact = peak_workers(found)
        if peak is None or abs(exact / peak - 1) <= PEAK_TOLERANCE:
            return scale, requests, cached, work, found
        if attempt == SCALINGS - 1:
            if abs(exact / peak - 1) > PEAK_OFF_MAX:
                remedy = f"{scenario.name} comes to {exact:g} workers at best; ask for that"
                raise InvalidField("--peak", peak, remedy)
            return scale, requests, cached, work, found
        scale *= peak / exact
    raise AssertionError("the last attempt returns")


def _demand(
    scenario: Scenario,
    requests: Sequence[WorkloadRequest],
    cached: Floats,
    both: tuple[ClassProfile, ClassProfile],
) -> tuple[Work, Hindsight]:
    try:
        work = request_work(
            requests, prefill=both[0], decode=both[1], slo=scenario.slo, cached=cached
        )
    except InvalidField as error:
        remedy = f"give it an slo that {both[1].name} can keep ({error})"
        raise InvalidField(f"scenario {scenario.name}.slo", scenario.slo, remedy) from error
    span_s = requests[-1].at_s
    step_s = max(STEP_S, math.ceil(span_s / STEPS_MAX))
    return work, hindsight(work, slo=scenario.slo, step_s=step_s, span_s=span_s)


def _high(found: Hindsight) -> tuple[int, int]:
    return (
        math.ceil(SPARE * float(found.need_p.max())) + 1,
        math.ceil(SPARE * float(found.need_d.max())) + 1,
    )


def _first(found: Hindsight, t_ready_s: float) -> tuple[int, int]:
    """What the first T_ready needs: nobody is judged by a fleet that could not be there yet."""
    steps = max(1, round(max(FIRST_S, t_ready_s) / found.step_s))
    return (
        max(1, int(found.need_p[:steps].max())),
        max(1, int(found.need_d[:steps].max())),
    )


def _bounds(policy: Mapping[str, Any], name: str) -> tuple[int, int]:
    """Least or most workers of both pools, as everybody is bound by them."""
    return int(policy["prefill"][name]), int(policy["decode"][name])


def _policy(
    scenario: Scenario, most: tuple[int, int], both: tuple[ClassProfile, ClassProfile]
) -> dict[str, Any]:
    pools = {
        name: {
            "min": 1,
            "max": high,
            "worker_class": profile.worker_class,
            "profile": profile.name,
        }
        for name, high, profile in zip(("prefill", "decode"), most, both, strict=True)
    }
    slo = {"ttft_s": scenario.slo.ttft_s, "tpot_s": scenario.slo.tpot_s}
    return overlay({"model": MODEL, "slo": slo, **pools}, scenario.policy)
