"""One run of the fluid mode: arrivals in, a `RunResult` out.

Owns the loop: steps of the floor, ticks of the planner, faults between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.work import Slo
from readyplane_lab.simulator.fluid.arrivals import Arrivals, arrivals_of
from readyplane_lab.simulator.fluid.control import Control
from readyplane_lab.simulator.fluid.floor import Floor
from readyplane_lab.simulator.fluid.mishaps import Mishaps
from readyplane_lab.simulator.fluid.options import FluidOptions
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.simulator.unmodelled import refuse_unmodelled
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_planner.decide import Decision
from readyplane_planner.policy import Policy, make_plan, pool_profiles, read_policy
from readyplane_planner.signals import Refusal

DIGEST = "sha256:" + "0" * 64


def run_fluid(options: FluidOptions, requests: Sequence[WorkloadRequest] | Arrivals) -> RunResult:
    """Simulate one workload from beginning to end.

    Its pools are of one class, and its starts of one mode: a policy that offers more plays with the
    reference class, compiling.

    Raises:
        InvalidField: a policy or columns that make no sense.
    """
    policy = _of_one_class(read_policy(options.policy))
    _check(policy)
    initial = options.initial or (max(1, policy.prefill.min), max(1, policy.decode.min))
    profiles = pool_profiles(policy)
    if not isinstance(requests, Arrivals):
        cache_tokens = options.cache_tokens
        if cache_tokens is None:
            cache_tokens = float(initial[0] * profiles[0].kv_capacity_tokens)
        requests = arrivals_of(requests, block_size=options.block_size, cache_tokens=cache_tokens)
    plan = make_plan(policy, version=1, manifest_digest=DIGEST, profiles=profiles)
    control = Control(options, policy, plan)
    slo = Slo(policy.slo.ttft_s, policy.slo.tpot_s)
    lends = policy.decode.convertible
    floor = Floor(options, requests, profiles, slo=slo, lends=lends, on_ready=control.started)
    floor.first_fleet(initial)
    control.begin(floor.starts.took_s)
    mishaps = Mishaps(options.faults, floor, control)
    end_s = _play(options, policy, floor, control, mishaps)
    return RunResult(
        span_s=float(requests.at_s[-1]),
        lives=tuple(worker.life(end_s) for worker in floor.everyone),
        served=floor.rows.served(),
        outcomes={name: round(count) for name, count in sorted(floor.rows.outcomes.items())},
        targets=tuple(control.targets),
        series=control.series(),
        decisions=tuple(control.documents),
        counts={
            **control.counts(),
            "orders_refused": float(mishaps.refused),
            "repairs": float(floor.repairs),
        },
        planner_s=tuple(control.planner_s),
    )


def _of_one_class(policy: Policy) -> Policy:
    none: dict[str, Any] = {"classes": []}
    pools = {name: getattr(policy, name).model_copy(update=none) for name in ("prefill", "decode")}
    mode = "jit" if policy.start_mode == "auto" else policy.start_mode
    return policy.model_copy(update={**pools, "start_mode": mode})


def _check(policy: Policy) -> None:
    """Refuse what a fluid has not: workers that change their stage."""
    refuse_unmodelled(policy, fluid=True)
    if policy.flip:
        remedy = "play it by events, or leave it out"
        raise InvalidField("policy.flip", policy.flip, remedy)


def _play(
    options: FluidOptions, policy: Policy, floor: Floor, control: Control, mishaps: Mishaps
) -> float:
    """From the first arrival to the last end, at the second that is returned."""
    now_s, next_tick_s = 0.0, 0.0
    while not floor.over:
        mishaps.befall(now_s)
        if now_s >= next_tick_s:
            if not mishaps.planner_away(now_s):
                _act(control.tick(now_s, floor), floor, control, mishaps, now_s)
            next_tick_s += policy.tick_s
        until_s = min(now_s + options.step_s, next_tick_s, mishaps.next_s)
        floor.step(now_s, until_s)
        now_s = until_s
    floor.starts.close()
    return now_s


def _act(
    decision: Decision, floor: Floor, control: Control, mishaps: Mishaps, now_s: float
) -> None:
    for order in decision.orders:
        if why := mishaps.denied(order.pool, now_s):
            control.refused.append(Refusal(order.worker_id, order.pool, why))
        else:
            floor.order(
                order.worker_id,
                order.pool,
                decision.decision_id,
                now_s,
                standby=order.standby,
            )
    for activation in decision.activations:
        if activation.worker_id in floor.fleet:
            floor.activate(floor.fleet[activation.worker_id], now_s)
    for drain in decision.drains:
        if drain.worker_id in floor.fleet:
            floor.drain(floor.fleet[drain.worker_id], now_s)
    for release in decision.releases:
        if release.worker_id in floor.fleet:
            floor.remove(floor.fleet[release.worker_id], now_s)
