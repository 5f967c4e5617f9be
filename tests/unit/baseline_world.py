"""Facts, observations and settings by hand, for the tests of the baselines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from readyplane import profiles
from readyplane.core.startup import StartQuantiles
from readyplane.core.work import Slo
from readyplane.core.worker import Role, WorkerState
from readyplane_lab.proof.baselines.parts.facts import Engine, Facts
from readyplane_lab.proof.port import CLASS_DEFAULT, SLO_DEFAULT, Hindsight, Setting
from readyplane_planner.decide.follow import PoolCount
from readyplane_planner.decide.values import Plan
from readyplane_planner.policy import make_plan, read_policy
from readyplane_planner.signals import Kind, Observation, Signal, WorkerView
from readyplane_planner.signals.values import Allocation, Latency, Lengths

PROFILE = profiles.load(CLASS_DEFAULT)
T_READY = StartQuantiles(30.0, 45.0, 60.0, 0, 0.0)
DIGEST = "sha256:" + "a" * 64
FACTS = Facts(
    now_s=0.0,
    dt_s=5.0,
    prefill=PoolCount(2, 0, 0),
    decode=PoolCount(4, 0, 0),
    prefill_engines=(),
    decode_engines=(),
    arrivals=10.0,
    prompt=12_000.0,
    uncached=10_000.0,
    finished=10.0,
    generated=2_000.0,
    backlog=0.0,
    sequences=100.0,
    isl=1200.0,
    new=1000.0,
    osl=200.0,
    context=1300.0,
    prefill_load=1.0,
    decode_load=2.0,
    ttft_s=0.3,
    tpot_s=0.04,
)


def facts(**changes: Any) -> Facts:
    """FACTS with changes; `p` and `d` are (ready, pending)."""
    for short, name in (("p", "prefill"), ("d", "decode")):
        if short in changes:
            ready, pending = changes.pop(short)
            changes[name] = PoolCount(ready, pending, 0)
    return replace(FACTS, **changes)


def engines(*tokens: float) -> tuple[Engine, ...]:
    """P engines by their queued tokens."""
    return tuple(Engine(f"p-{i}", queue_tokens=t) for i, t in enumerate(tokens))


def setting(
    need_p: tuple[float, ...] = (1, 2, 4, 3),
    need_d: tuple[float, ...] = (2, 6, 8, 4),
    *,
    high: tuple[int, int] = (32, 32),
    slo: Slo = SLO_DEFAULT,
) -> Setting:
    """The default class, T_ready 30 s, a hindsight of a few steps."""
    p, d = np.array(need_p, dtype=float), np.array(need_d, dtype=float)
    return Setting(
        prefill=PROFILE,
        decode=PROFILE,
        slo=slo,
        t_ready=T_READY,
        drain_s=(5.0, 30.0),
        low=(1, 1),
        high=high,
        initial=(2, 4),
        hindsight=Hindsight(60.0, p * 50.0, d * 50.0, p, d),
    )


def plan(**fields: Any) -> Plan:
    """The proof's policy as a plan."""
    pool = {"min": 1, "max": 32, "worker_class": PROFILE.worker_class, "profile": CLASS_DEFAULT}
    document = {"model": "m", "prefill": pool, "decode": pool, "slo": {"tpot_s": 0.05}, **fields}
    return make_plan(read_policy(document), version=1, manifest_digest=DIGEST)


def worker(role: Role, number: int, **changes: Any) -> WorkerView:
    """A ready worker of its own, without load."""
    return WorkerView(
        worker_id=f"{role}-{number}",
        incarnation=f"{role}-{number}-i",
        role=role,
        state=WorkerState.READY,
        worker_class=PROFILE.worker_class,
        manifest_digest=DIGEST,
        ready_age_s=1000.0,
        **changes,
    )


def fleet(prefill: int, decode: int, **changes: Any) -> tuple[WorkerView, ...]:
    """Ready workers of both pools; `changes` go to the decode workers."""
    on_p = tuple(worker(Role.PREFILL, i) for i in range(prefill))
    return on_p + tuple(worker(Role.DECODE, i, **changes) for i in range(decode))


def observation(
    workers: tuple[WorkerView, ...] = (), *, now_s: float = 0.0, dt_s: float = 5.0, **values: Any
) -> Observation:
    """An Observation of numbers; None or an absent name is a missing signal."""
    units = {
        "arrivals": "requests/s",
        "prompt_work": "tokens/s",
        "prefill_work": "tokens/s",
        "finished": "requests/s",
        "generated": "tokens/s",
        "queue": "tokens",
        "in_flight": "requests",
        "decoding": "sequences",
        "remaining": "tokens",
        "kv": "tokens",
    }
    signals: dict[str, Any] = {n: _signal(values.get(n), unit) for n, unit in units.items()}
    return Observation(
        model="m",
        taken_s=now_s,
        **signals,
        lengths=Lengths(1000.0, 1000.0, 200.0, 1.0, known=True),
        latency=values.get("latency", {}),
        workers=workers,
        allocations=tuple(
            Allocation(w.worker_id, w.role, "running", allocated_ago_s=1000.0) for w in workers
        ),
        t_ready={"prefill": T_READY, "decode": T_READY},
        dt_s=dt_s if values.get("arrivals") is not None else 0.0,
    )


def latency(value_s: float, count: int = 50) -> Latency:
    """A window whose quantiles are all the same."""
    return Latency(60.0, count, value_s, value_s, value_s)


def _signal(value: float | None, unit: str) -> Signal:
    if value is None:
        return Signal(Kind.MISSING, None, unit)
    return Signal(Kind.FRESH if value else Kind.IDLE, value, unit)
