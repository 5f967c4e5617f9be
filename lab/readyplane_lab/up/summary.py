"""What a run came to: the printed summary, the JSON report, and the verdict of `--quick`.

The verdict is a list of named conditions, each with what was found, so that a failing self-check
says why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from readyplane_lab.up.observe import Seen, SeenStart
from readyplane_lab.up.traffic import Outcome, Tally

LATENESS_VOID_S = 0.020
UNEXPLAINED_MAX = 0.05


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that must hold for the self-check to pass."""

    name: str
    holds: bool
    found: str


@dataclass(frozen=True, slots=True)
class Ended:
    """What is known once everything has been stopped.

    `first_answer_s`: from the beginning of the run to the first answered request.
    """

    left_running: tuple[str, ...]
    worker_seconds: Mapping[str, float]
    service_restarts: Mapping[str, int]
    seconds: float
    first_answer_s: float | None = None


def verdict(seen: Seen, tally: Tally, ended: Ended) -> list[Condition]:
    """The conditions of `--quick` (the main job, end to end)."""
    handovers = int(seen.state.get("counters", {}).get("handovers", 0))
    finished = tally.outcomes[Outcome.FINISHED]
    worst = max(
        (s.unexplained_s / s.wall_s for s in seen.starts.values() if s.wall_s > 0), default=1.0
    )
    failures = seen.start_failures()
    unchecked = [s.worker_id for s in seen.starts.values() if s.checks_failed]
    lost = {o: tally.outcomes[o] for o in (Outcome.FAILED, Outcome.TIMED_OUT, Outcome.CANCELLED)}
    conditions = [
        Condition(
            "requests were served with hand-over",
            finished > 0 and handovers > 0,
            f"{finished} finished, {handovers} hand-overs",
        )
    ]
    for role in ("prefill", "decode"):
        started = len(seen.starts_of(role))
        conditions.append(
            Condition(
                f"a {role} scale-up became routable",
                started >= 2,  # the first worker of a pool is no scale-up
                f"{started} became routable",
            )
        )
    drained = seen.drained()
    conditions += [
        Condition("a drain finished", bool(drained), ", ".join(drained) or "none"),
        Condition(
            "every start passed the gate",
            not failures and not unchecked,
            "; ".join(f"{w}: {why}" for w, why in failures.items()) or f"{len(seen.starts)} starts",
        ),
        Condition(
            "no request was lost or hung",
            tally.open == 0 and not any(lost.values()),
            ", ".join(f"{n} {o}" for o, n in lost.items() if n) or f"{tally.sent} sent",
        ),
        Condition(
            f"unexplained T_ready below {UNEXPLAINED_MAX:.0%}",
            worst < UNEXPLAINED_MAX,
            f"worst {worst:.1%}",
        ),
        Condition(
            "nothing was left running",
            not ended.left_running,
            ", ".join(ended.left_running) or "nothing",
        ),
    ]
    return conditions


def report(
    seen: Seen, tally: Tally, ended: Ended, conditions: list[Condition], *, workload: str
) -> dict[str, Any]:
    """The run as a JSON document (numbers in seconds and fractions)."""
    return {
        "workload": workload,
        "seconds": ended.seconds,
        "first_answer_s": ended.first_answer_s,
        "requests": {
            "sent": tally.sent,
            **{str(o): tally.outcomes[o] for o in Outcome},
            "attained": tally.attained,
            "attainment": tally.attainment,
            "attainment_void": attainment_void(seen),
            "output_tokens": tally.output_tokens,
        },
        "latency": {
            name: {f"p{int(q * 100)}_s": tally.quantile_s(name, q) for q in (0.5, 0.9, 0.99)}
            for name in ("ttft_s", "tpot_s")
        },
        "complaints": dict(tally.complaints.most_common(10)),
        "worker_hours": {role: s / 3600.0 for role, s in ended.worker_seconds.items()},
        "starts": [{**asdict(s), "modelled": sorted(s.modelled)} for s in seen.starts.values()],
        "start_failures": seen.start_failures(),
        "drained": seen.drained(),
        "decisions": list(seen.decisions.values()),
        "lateness_p99_s": seen.lateness_p99_s,
        "service_restarts": dict(ended.service_restarts),
        "left_running": list(ended.left_running),
        "verdict": [asdict(c) for c in conditions],
    }


def attainment_void(seen: Seen) -> bool:
    """Whether the modelled engines ran too late for attainment to mean anything."""
    return seen.lateness_p99_s is not None and seen.lateness_p99_s > LATENESS_VOID_S


def print_summary(
    console: Console, seen: Seen, tally: Tally, ended: Ended, *, workload: str
) -> None:
    """Requests, latencies, starts by segment, decisions."""
    console.print()
    console.rule("summary")
    console.print(f"workload: {workload}, {ended.seconds:.0f} s")
    if tally.sent:
        _print_requests(console, seen, tally)
    hours = ", ".join(f"{r} {s / 3600:.3f}" for r, s in sorted(ended.worker_seconds.items()))
    console.print(f"worker-hours from allocation to release: {hours or 'none'}")
    if seen.starts:
        console.print(_starts_table(list(seen.starts.values())))
    if seen.drained():
        console.print(f"drained without cutting a stream: {', '.join(seen.drained())}")
    for worker_id, why in seen.start_failures().items():
        console.print(f"[red]start failed[/red] {worker_id}: {why}", highlight=False)
    if seen.decisions:
        console.print(f"decisions that changed a target: {len(seen.decisions)}")
        for decision in list(seen.decisions.values())[-8:]:
            console.print(f"  {decision['decision_id']}: {decision['summary']}", highlight=False)
    if ended.service_restarts:
        console.print(f"services started again: {dict(ended.service_restarts)}")


def _print_requests(console: Console, seen: Seen, tally: Tally) -> None:
    counts = ", ".join(f"{tally.outcomes[o]} {o}" for o in Outcome if tally.outcomes[o])
    console.print(f"requests: {tally.sent} sent, {counts}")
    share = "unknown" if tally.attainment is None else f"{tally.attainment:.1%}"
    void = " [yellow](void: the engines ran late)[/yellow]" if attainment_void(seen) else ""
    console.print(f"attainment (both SLOs met / all arrivals): {share}{void}")
    if seen.lateness_p99_s is not None:
        console.print(
            f"modelled engines ran at most {1000 * seen.lateness_p99_s:.1f} ms late (P99); "
            f"attainment is void above {1000 * LATENESS_VOID_S:.0f} ms"
        )
    for name, label in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        values = [tally.quantile_s(name, q) for q in (0.5, 0.9, 0.99)]
        if None not in values:
            shown = " / ".join(f"{v:.3f}" for v in values if v is not None)
            console.print(f"{label} P50/P90/P99: {shown} s")
    for text, count in tally.complaints.most_common(5):
        console.print(f"  {count} × {text}", highlight=False, markup=False)


def _starts_table(starts: list[SeenStart]) -> Table:
    table = Table(title="T_ready by segment: exclusive seconds on the critical path, median")
    table.add_column("segment")
    roles = sorted({s.role for s in starts})
    for role in roles:
        count = sum(s.role == role for s in starts)
        table.add_column(f"{role} ({count})", justify="right")
    names = list(dict.fromkeys(name for s in starts for name in s.exclusive_s))
    modelled = frozenset().union(*(s.modelled for s in starts))
    for name in names:
        row = [
            f"{np.median([s.exclusive_s.get(name, 0.0) for s in starts if s.role == role]):.2f}"
            for role in roles
        ]
        table.add_row(f"{name}{' (modelled)' if name in modelled else ''}", *row)
    for label, key in (("unexplained", "unexplained_s"), ("wall", "wall_s")):
        row = [
            f"{np.median([getattr(s, key) for s in starts if s.role == role]):.2f}"
            for role in roles
        ]
        table.add_row(f"[bold]{label}[/bold]", *row)
    return table
