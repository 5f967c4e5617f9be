"""Every contender plays five virtual minutes with a burst, in the fluid and with events."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from readyplane_lab.proof.baselines import contenders
from readyplane_lab.proof.inputs import Case, make_case
from readyplane_lab.proof.play import play
from readyplane_lab.proof.port import Scenario
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.workload.request import WorkloadRequest

ALL = contenders()
WITH_EVENTS = ("static-peak", "hpa", "kpa", "dynamo", "tokenscale", "lcp")
"""Each in its own way; what the others do differs in arithmetic alone."""


def burst(scale: float, seed: int) -> list[WorkloadRequest]:
    """1 request/s, 20 in half of the second minute, and 1 again."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    at_s, requests = 0.0, list[WorkloadRequest]()
    while at_s < 300.0:
        i = len(requests)
        requests.append(WorkloadRequest(i, at_s, 1024, 96, ((i, 1024),)))
        rate = scale * (20.0 if 60.0 <= at_s < 90.0 else 1.0)
        at_s += float(rng.exponential(1.0 / rate))
    return requests


BURST = Scenario(
    name="burst",
    title="Half a minute of twenty times the load.",
    requests=burst,
    expected="both pools grow, and shrink afterwards",
)


@lru_cache(maxsize=1)
def case() -> Case:
    return make_case(BURST, t_ready_s=10.0, peak=None)


def check(result: RunResult, name: str) -> None:
    played = case()
    assert sum(result.outcomes.values()) == len(played.requests)
    high = played.setting.high
    for _at, prefill, decode in result.targets:
        assert 1 <= prefill <= high[0], name
        assert 1 <= decode <= high[1], name
    ttft_s = result.served.ttft_s
    assert float(np.mean(np.isfinite(ttft_s))) > 0.5, name
    assert result.counts.get("fallbacks", 0.0) == 0.0


@pytest.mark.parametrize("name", ALL)
def test_in_the_fluid(name: str) -> None:
    check(play(case(), ALL[name], ALL[name].default, mode="fluid"), name)


@pytest.mark.parametrize("name", WITH_EVENTS)
def test_with_events(name: str) -> None:
    check(play(case(), ALL[name], ALL[name].default, mode="event"), name)
