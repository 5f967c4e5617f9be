"""From runs of a load generator to readings: one run is one prompt length at one concurrency (pure).

A run with one request at a time tells of prefill: its TTFT is one prompt, alone. A run of any
concurrency tells of decode: so many sequences were decoding on average (Little's law: requests a
second times the seconds between first and last token), over so many KV tokens, at that ITL.

An engine that also prefills lets its sequences wait meanwhile: between two tokens of one sequence
lies its share of the prompts of the others, f(isl) (n - 1) / osl with n requests in the system.
Where runs told what a prompt takes alone, that share is taken out, as in `bench/measured.py`; else
it stays in, and a note says so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from readyplane_lab.profiling.readings import (
    DecodeReading,
    PrefillReading,
    Readings,
    prefill_points,
)

ALONE = 1.2
"""Mean requests in the system up to which prompts did not wait for each other."""
KEPT_MIN = 0.3
"""Share of an ITL that is left at least: prefill and decode partly overlap in a chunked batch."""
BUSY_NOTE = (
    "iterations also hold the prefill of others, since no run with one request at a time tells it: "
    "of a worker that only decodes they would be shorter"
)
LESS_NOTE = "iterations are less the prefill of others, f(isl) (n - 1) / osl"


@dataclass(frozen=True, slots=True)
class Run:
    """Means of one run; tokens, milliseconds, requests a second.

    `concurrency`: requests in the system, as said, or as throughput and latency tell.
    """

    isl: float
    osl: float
    ttft_ms: float
    itl_ms: float | None
    concurrency: float
    requests_per_s: float | None = None


def readings_of(runs: Sequence[Run]) -> Readings:
    """What these runs tell of the two stages."""
    found = Readings()
    found.prefill += [
        PrefillReading(round(r.isl), r.ttft_ms) for r in runs if r.concurrency <= ALONE
    ]
    alone = prefill_points(found.prefill)
    for run in runs:
        if run.itl_ms is None or run.osl < 2:
            continue
        sequences = run.concurrency
        if run.requests_per_s is not None:
            sequences = run.requests_per_s * run.itl_ms / 1e3 * (run.osl - 1.0)
        sequences = max(1.0, round(min(sequences, run.concurrency), 1))
        held = sequences * (run.isl + run.osl / 2.0)
        own_ms = _prefill_ms(alone, run.isl) * max(0.0, run.concurrency - 1.0) / run.osl
        iteration_ms = max(KEPT_MIN * run.itl_ms, run.itl_ms - own_ms)
        found.decode.append(DecodeReading(sequences, held, iteration_ms))
        note = LESS_NOTE if alone else BUSY_NOTE
        if sequences > 1 and note not in found.notes:
            found.notes.append(note)
    return found


def _prefill_ms(points: Sequence[tuple[float, float]], isl: float) -> float:
    """Between and beyond the lengths that were alone; in proportion to the only one; 0 of none."""
    if len(points) < 2:
        return points[0][1] * isl / points[0][0] if points else 0.0
    right = min(len(points) - 1, max(1, bisect_right([n for n, _ in points], isl)))
    (low, low_ms), (high, high_ms) = points[right - 1], points[right]
    return max(0.0, low_ms + (high_ms - low_ms) / (high - low) * (isl - low))
