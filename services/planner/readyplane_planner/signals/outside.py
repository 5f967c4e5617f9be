"""What sources beyond the router told, as values: readings of queries, loads of engines, silence.

A reading has its unit in its type and says why it is not known; an engine's load carries the life
that it belongs to. Handed to `observe`, which joins them with the living fleet.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from readyplane.core.worker import Worker

RATES = {
    "arrivals": "requests/s",
    "prompt_work": "tokens/s",
    "prefill_work": "tokens/s",
    "finished": "requests/s",
    "generated": "tokens/s",
}
GAUGES = {
    "queue": "tokens",
    "waiting": "requests",
    "in_flight": "requests",
    "decoding": "sequences",
    "remaining": "tokens",
    "kv": "tokens",
}
LATENCIES = ("ttft", "tpot", "wait")
QUANTILES = ("p50", "p90", "p99")
SIGNAL_UNITS = {
    **RATES,
    **GAUGES,
    **{f"{stem}_{q}": "s" for stem in LATENCIES for q in QUANTILES},
    **{f"{stem}_count": "requests" for stem in LATENCIES},
}
"""Every signal that a query may give, and the unit in which the brains count it."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One signal of a query: a value in `unit`, or None and why.

    Attributes:
        asked_s: planner's clock when it was asked for. bad: what was refused of it, empty if
            nothing (B01). window_s: of a latency, the window that it covers.
        empty: a quantile over no samples, which is no fault (B04).
    """

    signal: str
    unit: str
    value: float | None
    asked_s: float
    why: str = ""
    bad: str = ""
    window_s: float = 0.0
    empty: bool = False


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one engine itself tells; None is not known, never zero.

    Attributes:
        running, waiting: sequences. waiting_prefill_tokens: prompt tokens not yet computed.
        kv_usage: share of the KV pool in use. kv_tokens: held; kv_capacity_tokens: of the pool.
        prefill_tokens_total: prompt tokens computed, hits left out; decode_tokens_total,
            iterations_total: counters of this life.
    """

    running: int | None = None
    waiting: int | None = None
    waiting_prefill_tokens: int | None = None
    kv_usage: float | None = None
    kv_tokens: float | None = None
    kv_capacity_tokens: float | None = None
    prefill_tokens_total: float | None = None
    decode_tokens_total: float | None = None
    iterations_total: float | None = None


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One engine read once.

    Attributes:
        worker_id, incarnation: whose it is, as the fleet knew it when it was asked (B08).
        life: tells one process of the engine from the next; empty when it does not say.
        read_s: planner's clock. bad: what was refused.
    """

    worker_id: str
    incarnation: str
    life: str
    read_s: float
    load: EngineLoad
    bad: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """What it is joined by."""
        return self.worker_id, self.incarnation


@dataclass(frozen=True, slots=True)
class Silent:
    """A source that did not answer within its bound, and why (B06)."""

    source: str
    why: str


@dataclass(frozen=True, slots=True)
class Outside:
    """All that one look beyond the router gave."""

    readings: tuple[Reading, ...] = ()
    silent: tuple[Silent, ...] = ()


@dataclass(frozen=True, slots=True)
class Beyond:
    """One look beyond the router, by kind; `fleet` where the engines that are read are all of it."""

    engines: tuple[EngineSample, ...] = ()
    outside: Outside = field(default_factory=Outside)
    fleet: tuple[Worker, ...] | None = None
