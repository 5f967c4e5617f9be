"""ForwardPassMetrics documents (version 1): what a Dynamo-style worker tells after each pass.

Owns their fields and what they mean as a load. The queue in them is the engine's own: what waits
before it is not in it (B07). One worker has a document for each data-parallel rank, added up here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from readyplane_planner.signals import samples
from readyplane_planner.signals.outside import EngineLoad

VERSION = 1


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One document of one rank; requests and tokens, None where it is not known."""

    worker_id: str
    dp_rank: int
    counter_id: float | None
    prefill_running: float | None
    decode_running: float | None
    prefill_waiting: float | None
    decode_waiting: float | None
    waiting_tokens: float | None
    kv_tokens: float | None
    bad: tuple[str, ...] = ()

    @property
    def idle(self) -> bool:
        """The all-zero document that is sent on going idle: silence after it is no staleness."""
        told = (
            self.prefill_running,
            self.decode_running,
            self.prefill_waiting,
            self.decode_waiting,
        )
        return all(number == 0 for number in told)


def read(document: object) -> tuple[ForwardPass | None, str]:
    """(the document as values, or None and why it is not one)."""
    if not isinstance(document, Mapping):
        return None, f"{type(document).__name__} is no ForwardPassMetrics map"
    version = document.get("version")
    if version != VERSION:
        return None, f"version {version!r} of ForwardPassMetrics is not {VERSION}"
    worker_id, rank = document.get("worker_id"), document.get("dp_rank", 0)
    if not isinstance(worker_id, str) or not worker_id:
        # Workers restored from a snapshot were seen to publish an empty name.
        return None, "worker_id is empty: nobody can be said to have sent it"
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0:
        return None, f"dp_rank {rank!r} is no rank"
    now, queued = document.get("scheduled_requests"), document.get("queued_requests")
    if not isinstance(now, Mapping) or not isinstance(queued, Mapping):
        return None, "scheduled_requests or queued_requests is missing"
    bad: list[str] = []

    def number(part: Mapping[object, object], name: str) -> float | None:
        return samples.check(f"{worker_id}.{name}", part.get(name), bad)

    held = number(now, "sum_decode_kv_tokens")
    prefilled = number(now, "sum_prefill_kv_tokens")
    return (
        ForwardPass(
            worker_id=worker_id,
            dp_rank=rank,
            counter_id=samples.check(f"{worker_id}.counter_id", document.get("counter_id"), bad),
            prefill_running=number(now, "num_prefill_requests"),
            decode_running=number(now, "num_decode_requests"),
            prefill_waiting=number(queued, "num_prefill_requests"),
            decode_waiting=number(queued, "num_decode_requests"),
            waiting_tokens=number(queued, "sum_prefill_tokens"),
            kv_tokens=None if held is None else held + (prefilled or 0.0),
            bad=tuple(bad),
        ),
        "",
    )


def load(ranks: Sequence[ForwardPass]) -> EngineLoad:
    """The newest documents of one worker's ranks as its load."""

    def total(*names: str) -> float | None:
        told = [getattr(rank, name) for rank in ranks for name in names]
        return sum(told) if told and None not in told else None

    running, waiting = (
        total("prefill_running", "decode_running"),
        total("prefill_waiting", "decode_waiting"),
    )
    queue, passes = total("waiting_tokens"), total("counter_id")
    return EngineLoad(
        running=None if running is None else round(running),
        waiting=None if waiting is None else round(waiting),
        waiting_prefill_tokens=None if queue is None else round(queue),
        kv_tokens=total("kv_tokens"),
        # Ranks step side by side: a pass of all is a pass of each.
        iterations_total=None if passes is None else passes / len(ranks),
    )
