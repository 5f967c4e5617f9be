"""What the pairing brain is asked and what it answers.

Values only; `readyplane_router.pair` turns the ones into the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from readyplane.core.profile import LinkClass
from readyplane.core.work import Slo
from readyplane_router.pair.seat import Seat

SLO_DEFAULT = Slo(2.0, 0.1)
LOCAL_LINK = LinkClass("same-node", 100e9, 0.001)
NETWORK_LINK = LinkClass("rdma-400g", 40e9, 0.003)


@dataclass(frozen=True, slots=True)
class PairPolicy:
    """What the pairing brain goes by; times in seconds.

    Attributes:
        slo: targets of a request that brings none.
        prefill_ahead_s: promised prefill work a P may still have when it is given more.
        locality_patience_s: longest wait for a busy worker that would be better.
        locality_margin_s: how much better it must be.
        wait_max_s: longest wait while workers are there but busy.
        empty_wait_max_s: longest wait while no worker of a stage is there.
        tpot_admit: a D takes no more sequences than keep its TPOT below this share of the target.
        decode_weight, slowdown_weight: seconds of decode, and of slow-down of others, against
            seconds of TTFT. urgency: how much a request that has waited its whole TTFT target
            weighs its TTFT more.
        skip_prefill: a decode worker that holds every full block of a prompt may serve it alone.
        local_link, network_link: links within a node and between nodes.
    """

    slo: Slo = SLO_DEFAULT
    prefill_ahead_s: float = 0.5
    locality_patience_s: float = 0.5
    locality_margin_s: float = 0.05
    wait_max_s: float = 20.0
    empty_wait_max_s: float = 20.0
    tpot_admit: float = 0.95
    decode_weight: float = 1.0
    slowdown_weight: float = 1.0
    urgency: float = 1.0
    skip_prefill: bool = True
    local_link: LinkClass = LOCAL_LINK
    network_link: LinkClass = NETWORK_LINK


@dataclass(frozen=True, slots=True)
class Ask:
    """What one request asks for.

    Attributes:
        isl: prompt tokens. max_tokens: output bound or None.
        slo: its targets. output_tokens: expected output. output_reserved: the quantile of it whose
            KV is reserved.
        cached_tokens: by seat key, prompt tokens held there (absent: none).
        waited_s: in the router so far. regime_s: in the present regime (empty or busy). held_s: since
            it could first have gone, and waited for a better worker instead.
        wished: by seat key, seconds of prefill of those before it that wait for that very worker.
        behind: requests that wait as well, by prefill worker: each is held up by its prefill.
        brings_kv: it goes on, with its KV: any decode worker serves it alone.
        avoid: worker ids not to be used. cut: by seat key of a decode worker, those of prefill
            workers from which KV does not reach it now.
    """

    isl: int
    slo: Slo
    output_tokens: float
    output_reserved: int
    max_tokens: int | None = None
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
    regime_s: float = 0.0
    held_s: float = 0.0
    wished: Mapping[str, float] = field(default_factory=dict)
    behind: float = 0.0
    brings_kv: bool = False
    avoid: frozenset[str] = frozenset()
    cut: Mapping[str, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one pair's cost, in seconds.

    Attributes:
        slowdown_s: of those that decode on D. stall_s: of those that decode on P, by the prefill.
        crowding_s: of those that wait for a prefill worker, by the prefill.
    """

    queue_s: float
    prefill_s: float
    transfer_s: float
    first_iteration_s: float
    tpot_s: float
    decode_s: float
    slowdown_s: float
    stall_s: float
    crowding_s: float
    ttft_s: float
    cost_s: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """The best pair. `prefill_blocks` is 0 for a local pair: the decode end's blocks hold it all."""

    prefill: Seat
    decode: Seat
    terms: Terms
    prefill_cached: int
    decode_cached: int
    prefill_blocks: int
    decode_blocks: int

    @property
    def local(self) -> bool:
        """Both ends are one worker."""
        return self.prefill is self.decode


@dataclass(frozen=True, slots=True)
class Wait:
    """Not now.

    Attributes:
        regime: `empty` (a stage has no worker), `busy`, or `locality` (a better one is busy).
        again_in_s: when mere time changes something; None when only an event can.
        wished, work_s: the better worker's seat key, and the prefill that would be done there.
    """

    reason: str
    regime: str
    again_in_s: float | None = None
    wished: str = ""
    work_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Shed:
    """Not at all. `kind`: too_long, too_large, incompatible, broken, empty or overloaded."""

    reason: str
    kind: str
