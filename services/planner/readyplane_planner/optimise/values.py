"""What the optimiser is asked and what it answers: problem, need, proposal. Tokens, tokens/s, seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from readyplane_planner.capacity import DecodeModel, PrefillModel, Supply


@dataclass(frozen=True, slots=True)
class Demand:
    """What a pool has to serve: tokens/s expected, its bound, and what waits already.

    Attributes:
        upper: largest rate of a short window. sustained: the part of it that lasts, None for all:
            the rest is noise of single arrivals, which the queue of the model already holds.
        backlog: prompt tokens waiting (P). sequences: running now (D).
        spread: (tokens/s, probability) of what has to be served all the time over the horizon;
            empty where `lasting` is all that is known.
    """

    level: float
    upper: float
    sustained: float | None = None
    backlog: float = 0.0
    sequences: float = 0.0
    spread: tuple[tuple[float, float], ...] = ()

    @property
    def lasting(self) -> float:
        """Tokens/s that have to be served all the time."""
        return self.upper if self.sustained is None else self.sustained


@dataclass(frozen=True, slots=True)
class Bounds:
    """Hard limits of one pool, and what one worker of it costs in GPUs.

    `spare`: workers kept beyond the need, for those that may be lost (N+k).
    """

    low: int
    high: int
    gpus: int = 1
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """Both pools at one instant.

    Attributes:
        t_ready_s: per pool, until a worker ordered now serves. catch_up_s: a backlog is cleared
            within that time once the capacity is there. headroom: demand is raised by that share.
        band: further share that must fit before anything shrinks (hysteresis).
        quantile: of TTFT. risk: share of requests that may be late. budget_gpus: of both pools.
    """

    prefill: PrefillModel
    decode: DecodeModel
    demand_p: Demand
    demand_d: Demand
    supply_p: Supply
    supply_d: Supply
    bounds_p: Bounds
    bounds_d: Bounds
    t_ready_p_s: float
    t_ready_d_s: float
    ttft_target_s: float
    tpot_target_s: float
    catch_up_s: float = 10.0
    headroom: float = 0.1
    band: float = 0.2
    quantile: float = 0.9
    risk: float = 0.01
    budget_gpus: int | None = None


@dataclass(frozen=True, slots=True)
class Need:
    """Workers that one pool needs, not rounded, and what decides it.

    Attributes:
        workers: enough, and a little fewer are not. keep: likewise with the band, for shrinking;
            bare: likewise without the headroom.
        why: `demand`, `backlog`, `sequences` or `idle`. risk: share of requests planned to be late.
        tokens_per_s: planned for, headroom included. rate: tokens/s of one worker.
    """

    workers: float
    keep: float
    bare: float
    why: str
    tokens_per_s: float
    rate: float
    risk: float = 0.0


@dataclass(frozen=True, slots=True)
class Parts:
    """What a pair of targets costs over the horizon, in GPU-seconds from allocation to release.

    Attributes:
        capacity: workers while they can serve. start_drain: while they come up or serve out.
        slo: work served too late, at the price of `candidates.MISS_PRICE`.
    """

    capacity: float
    start_drain: float
    slo: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """One pair of targets that was weighed: its cost in GPU-seconds, and why it cannot be."""

    p: int
    d: int
    cost: float
    parts: Parts
    feasible: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Wanted workers: `p`, `d` to grow to, `p_keep`, `d_keep` (never smaller) to shrink to.

    Attributes:
        p_now, d_now: of `p` and `d`, what is needed even without headroom; None for all.
        reasons: (code, text, pool). infeasible: targets that no number of workers reaches.
        stranded_p: P workers whose hand-over D could not absorb.
        need_p, need_d: what `p` and `d` were rounded up from; None where nothing was computed.
        candidates: this pair and its neighbours with their costs; the brain fills them in.
    """

    p: int
    d: int
    p_keep: int
    d_keep: int
    reasons: tuple[tuple[str, str, str], ...] = ()
    infeasible: tuple[str, ...] = ()
    stranded_p: int = 0
    p_now: int | None = None
    d_now: int | None = None
    need_p: Need | None = None
    need_d: Need | None = None
    candidates: tuple[Candidate, ...] = ()


Optimiser = Callable[[Problem], Proposal]
