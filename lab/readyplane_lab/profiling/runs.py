"""From runs of a load generator to readings: one run is one prompt length at one concurrency (pure).

A run with one request at a time tells of prefill: its TTFT is one prompt, alone. A run of any
concurrency tells of decode: so many sequences were decoding on average (Little's law: requests a
second times the seconds between first and last token), over so many KV tokens, at that ITL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from readyplane_lab.profiling.readings import DecodeReading, PrefillReading, Readings

ALONE = 1.2
"""Mean requests in the system up to which prompts did not wait for each other."""
BUSY_NOTE = (
    "iterations of a load generator also hold the prefill of others: of a worker that only decodes "
    "they would be shorter"
)


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


def readings_of(runs: Iterable[Run]) -> Readings:
    """What these runs tell of the two stages."""
    found = Readings()
    for run in runs:
        if run.concurrency <= ALONE:
            found.prefill.append(PrefillReading(round(run.isl), run.ttft_ms))
        if run.itl_ms is None or run.osl < 2:
            continue
        sequences = run.concurrency
        if run.requests_per_s is not None:
            sequences = run.requests_per_s * run.itl_ms / 1e3 * (run.osl - 1.0)
        sequences = max(1.0, round(min(sequences, run.concurrency), 1))
        held = sequences * (run.isl + run.osl / 2.0)
        found.decode.append(DecodeReading(sequences, held, run.itl_ms))
        if sequences > 1 and BUSY_NOTE not in found.notes:
            found.notes.append(BUSY_NOTE)
    return found
