"""`make bench-pairing`: which way of choosing a pair answers sooner, on one fixed fleet.

The router's own choice against random, round-robin, least-loaded, power-of-two, session affinity
(with the sessions as a client would name them) and the sequential KV-aware cost that Dynamo
publishes, in the simulator: the same workers, links, engines and requests for all, five inputs, five
seeds each. Every rival is played in the way it has of its own, at once into the engines' queues, and
once more behind the router's admission. Prints

    bench-pairing worst_p99_ttft_ratio= worst_tpot_ratio= inputs= seeds= requests=

P99 of TTFT is over the requests of all seeds, and one without a first token counts as infinite.
TPOT is the mean over requests. Each ratio is ours over the lowest of any rival, on the worst input;
below 1 means ahead of all of them. The two lowest need not be of one rival. What a play comes to is
printed for each input, with the lowest and highest P99 of a seed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

from readyplane_lab.pairing.field import play
from readyplane_lab.pairing.inputs import Input, inputs, sessions_of
from readyplane_lab.pairing.rivals import Rule, rules

OURS = "readyplane"
PROCESSES = 2


@dataclass(frozen=True)
class Played:
    """One rule on one input with one seed: of each request, infinite or nan without an answer."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    cached: float
    attained: float


def measure(name: str, seed: int, requests_max: int, only: Sequence[str]) -> dict[str, Played]:
    """All rules on one input with one seed."""
    given = next(i for i in inputs(requests_max) if i.name == name)
    requests = given.requests(seed)
    sessions = sessions_of(requests)
    found = {OURS: _play(given, seed, None)}
    for held in (False, True):
        for rule in rules(held=held, sessions=sessions, seed=seed):
            called = f"{rule.name} (held)" if held else rule.name
            if not only or called in only:
                found[called] = _play(given, seed, rule)
    return found


def _play(given: Input, seed: int, rule: Rule | None) -> Played:
    records = play(given.fleet, given.requests(seed), rule)
    return Played(
        tuple(math.inf if r.ttft_s is None else r.ttft_s for r in records),
        tuple(math.nan if r.tpot_s is None or r.osl < 2 else r.tpot_s for r in records),
        sum(r.cached_tokens for r in records) / sum(r.isl for r in records),
        sum(r.attained for r in records) / len(records),
    )


def p99(values: Sequence[float]) -> float:
    """The 99th percentile as one of the values, so that infinity is told as it is."""
    return float(np.quantile(np.array(values), 0.99, method="lower"))


def report(name: str, played: Sequence[dict[str, Played]]) -> tuple[float, float]:
    """Print an input's table; ours over the lowest of the others in P99 TTFT and in mean TPOT."""
    lowest_ttft, lowest_tpot = math.inf, math.inf
    ours = (math.nan, math.nan)
    print(f"\n{name}: P99 TTFT (of a seed: least, most), P50, TPOT, cached, attained", flush=True)
    for rule in played[0]:
        runs = [p[rule] for p in played]
        ttft_s = [v for run in runs for v in run.ttft_s]
        tpot_s = float(np.nanmean([v for run in runs for v in run.tpot_s]))
        tail_s, tails_s = p99(ttft_s), [p99(run.ttft_s) for run in runs]
        print(
            f"  {rule:24s} {tail_s:8.3f} ({min(tails_s):.3f}, {max(tails_s):.3f})"
            f" {float(np.median(ttft_s)):7.3f} {tpot_s:8.5f}"
            f" {np.mean([r.cached for r in runs]):6.3f} {np.mean([r.attained for r in runs]):6.3f}",
            flush=True,
        )
        if rule == OURS:
            ours = (tail_s, tpot_s)
        else:
            lowest_ttft, lowest_tpot = min(lowest_ttft, tail_s), min(lowest_tpot, tpot_s)
    return ours[0] / lowest_ttft, ours[1] / lowest_tpot


def main() -> int:
    """Play and print."""
    parser = argparse.ArgumentParser(description="ways of choosing a pair on one fixed fleet")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1200, help="of each play, at most")
    parser.add_argument("--input", action="append", choices=[i.name for i in inputs(1)])
    parser.add_argument("--rule", action="append", help="only these rivals")
    asked = parser.parse_args()
    names = asked.input or [i.name for i in inputs(1)]
    ratios = []
    with ProcessPoolExecutor(min(PROCESSES, os.cpu_count() or 1)) as pool:
        jobs = {
            name: [
                pool.submit(measure, name, seed, asked.requests, asked.rule or ())
                for seed in range(1, asked.seeds + 1)
            ]
            for name in names
        }
        for name, seeds in jobs.items():
            ratios.append(report(name, [job.result() for job in seeds]))
            print(f"  ratios: P99 TTFT {ratios[-1][0]:.3f}, TPOT {ratios[-1][1]:.3f}", flush=True)
    print(
        f"\nbench-pairing worst_p99_ttft_ratio={max(r[0] for r in ratios):.3f} "
        f"worst_tpot_ratio={max(r[1] for r in ratios):.3f} "
        f"inputs={len(names)} seeds={asked.seeds} requests={asked.requests}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
