"""Queues whose answer is known by formula or by recursion, played in the event simulator.

Owns the theory (Pollaczek-Khinchine, Crommelin, Erlang, processor sharing and its insensitivity,
the recursions of Lindley and of Kiefer and Wolfowitz) and the small worlds in which the simulator
must agree with it. `tests/simulation/test_validity_queues.py` asserts, `bench.validity` prints.

Each world is one worker class whose times make one stage a textbook queue and the other one free:
a service station for prefill, processor sharing for decode.
"""

from __future__ import annotations

import heapq
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from readyplane.core.profile import LinkClass
from readyplane_lab.simulator.gateway import Record
from readyplane_lab.simulator.startup import StartUpModel
from readyplane_lab.simulator.world import WorldOptions, run_world
from readyplane_lab.workload.request import WorkloadRequest

Floats = NDArray[np.float64]
FREE_MS = 1e-3  # an iteration or a prompt that costs next to nothing
FREE_LINK = LinkClass("free", 1e15, 0.0)
QUIET_S = 120.0  # before the first request: nobody is new any more
BATCHES = 20
STUDENT_19 = 3.883  # two-sided 99.9 % of Student's t with BATCHES - 1 degrees of freedom
WARM_SHARE = 0.1  # of the requests at the beginning, which see an emptier system


# ------------------------------------------------------------------------- theory


def md1_wait_s(rate_rps: float, service_s: float) -> float:
    """Mean wait of M/D/1 (Pollaczek-Khinchine)."""
    load = rate_rps * service_s
    return load * service_s / (2.0 * (1.0 - load))


def md1_wait_tail(rate_rps: float, service_s: float, wait_s: float) -> float:
    """P(wait > `wait_s`) of M/D/1 (Erlang's and Crommelin's series; good up to some ten services)."""
    load, total = rate_rps * service_s, 0.0
    for k in range(int(wait_s / service_s) + 1):
        x = rate_rps * (wait_s - k * service_s)
        total += (-x) ** k / math.factorial(k) * math.exp(x)
    return 1.0 - (1.0 - load) * total


def mmc_wait_s(rate_rps: float, service_s: float, workers: int) -> float:
    """Mean wait of M/M/c (Erlang's C)."""
    offered = rate_rps * service_s
    blocked = 1.0  # Erlang's B by its recursion
    for n in range(1, workers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    busy = blocked / (1.0 - offered / workers * (1.0 - blocked))
    return busy * service_s / (workers - offered)


def shared_residence_s(rate_rps: float, tokens: float, base_s: float, each_s: float) -> float:
    """Mean residence where `n` sequences share a worker whose iteration takes base + each * n.

    A symmetric queue: P(n) is the product of `rate * tokens * (base + each * i) / i`, whatever the
    distribution of the tokens (Kelly's insensitivity); Little's law gives the residence. With
    `base_s` 0 that is M/G/1 processor sharing, with `each_s` 0 it is M/G/infinity.
    """
    weight, total, mean = 1.0, 1.0, 0.0
    for n in range(1, 100_000):
        weight *= rate_rps * tokens * (base_s + each_s * n) / n
        total += weight
        mean += n * weight
        if weight < total * 1e-15 and n > 10:
            break
    return mean / total / rate_rps


def first_come_waits_s(at_s: Floats, service_s: Floats, workers: int) -> Floats:
    """Waits of these very arrivals, first come first served (Lindley; Kiefer and Wolfowitz)."""
    free = [0.0] * workers
    waits = np.empty(len(at_s))
    for i, (at, need) in enumerate(zip(at_s.tolist(), service_s.tolist(), strict=True)):
        begin = max(at, free[0])
        heapq.heapreplace(free, begin + need)
        waits[i] = begin - at
    return waits


def fair_shares_s(at_s: Sequence[float], sizes: Sequence[float], bandwidth: float) -> list[float]:
    """How long each transfer over one link takes when those under way share it equally."""
    left = dict(enumerate(sizes))
    took = [0.0] * len(sizes)
    now, order = 0.0, sorted(range(len(sizes)), key=lambda i: at_s[i])
    under_way: dict[int, float] = {}
    while order or under_way:
        comes = at_s[order[0]] if order else math.inf
        least = min(under_way.values(), default=math.inf)
        ends = now + least * len(under_way) / bandwidth if under_way else math.inf
        step = (min(comes, ends) - now) * bandwidth / max(1, len(under_way))
        under_way = {i: b - step for i, b in under_way.items()}
        now = min(comes, ends)
        if comes <= ends:
            i = order.pop(0)
            under_way[i] = left[i]
        for i in [i for i, b in under_way.items() if b <= 1e-9 * sizes[i]]:
            took[i] = now - at_s[i]
            del under_way[i]
    return took


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of a simulated series. `half_s`: half of its 99.9 % confidence interval."""

    mean_s: float
    half_s: float

    def holds(self, value_s: float, slack_s: float = 0.0) -> bool:
        """Whether the theory's value lies within the interval, or within `slack_s` of it."""
        return abs(self.mean_s - value_s) <= self.half_s + slack_s


def batch_means(values: Floats) -> Estimate:
    """Mean and interval of a correlated series: the first tenth is left out, 20 batches."""
    kept = values[int(len(values) * WARM_SHARE) :]
    means = np.array([part.mean() for part in np.array_split(kept, BATCHES)])
    half = STUDENT_19 * means.std(ddof=1) / math.sqrt(BATCHES)
    return Estimate(float(kept.mean()), float(half))


# ------------------------------------------------------------------------- worlds


@dataclass(frozen=True, slots=True)
class Play:
    """Requests and what became of them, in order of arrival."""

    at_s: Floats
    records: tuple[Record, ...]

    @property
    def ttft_s(self) -> Floats:
        """Arrival to first token."""
        return np.array([_known(r.ttft_s) for r in self.records])

    @property
    def residence_s(self) -> Floats:
        """Arrival to last token."""
        return np.array([_known(r.ttft_s) + _known(r.tpot_s) * (r.osl - 1) for r in self.records])


def play(
    at_s: Floats,
    lengths: Sequence[tuple[int, int]],
    profile: Mapping[str, Any],
    *,
    fleet: tuple[int, int] = (1, 1),
    link: LinkClass = FREE_LINK,
) -> Play:
    """Play requests of given (prompt, output) tokens on a fixed fleet of one class."""
    requests = [
        WorkloadRequest(i, float(at) + QUIET_S, isl, osl, (((1 << 40) + i, isl),))
        for i, (at, (isl, osl)) in enumerate(zip(at_s, lengths, strict=True))
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "textbook.json"
        path.write_text(json.dumps({**profile, "name": str(path)}))  # found by its file name
        pools = {
            name: {"min": n, "max": n, "worker_class": "textbook", "profile": str(path)}
            for name, n in zip(("prefill", "decode"), fleet, strict=True)
        }
        policy = {
            "model": "textbook",
            "slo": {"ttft_s": 60.0, "tpot_s": 60.0},
            "tick_s": 5.0,
            **pools,
        }
        policy["decode"] = {**pools["decode"], "convertible": False}  # each stage by itself
        options = WorldOptions(
            policy,
            startup=StartUpModel().scaled_to(1.0),
            link=link,
            initial=fleet,
            record=False,
        )
        result = run_world(options, requests)
    bad = [r for r in result.records if r.outcome != "finished"]
    if bad or len(result.records) != len(requests):
        raise RuntimeError(f"{len(bad)} requests did not finish: {bad[:1]}")
    return Play(at_s, result.records)


def textbook(**fields: object) -> dict[str, object]:
    """A class in which everything is free but what `fields` say."""
    return {
        "name": "textbook",
        "source": "made for a closed form",
        "worker_class": "textbook",
        "gpus": 1,
        "price_per_gpu_hour": 1.0,
        "prefill_points": [[1, FREE_MS], [2, FREE_MS]],
        "decode_points": [[1, 1, FREE_MS], [2, 2, FREE_MS]],
        "kv_capacity_tokens": 40_000_000,
        "kv_bytes_per_token": 1,
        "max_batch_tokens": 1_000_000,
        "max_num_seqs": 4096,
        **fields,
    }


def iteration_points(base_s: float, each_s: float) -> list[list[float]]:
    """Decode points of which base + each * sequences is the exact fit."""
    places = ((1, 100), (40, 50), (100, 900), (20, 700))
    return [[n, kv, 1e3 * (base_s + each_s * n)] for n, kv in places]


def poisson(generator: np.random.Generator, rate_rps: float, count: int) -> Floats:
    """Arrival times."""
    return np.cumsum(generator.exponential(1.0 / rate_rps, count))


def stream(*key: int) -> np.random.Generator:
    """A seeded stream of random numbers."""
    return np.random.Generator(np.random.Philox(key=list(key)))


def _known(value: float | None) -> float:
    assert value is not None
    return value
