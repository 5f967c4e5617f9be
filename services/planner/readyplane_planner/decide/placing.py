"""Where the next workers should start, and what should lie there before they do (R8.2, R8.3).

Owns the step from nodes of the policy, what runs on them and what the registry says of the way to each,
to preferences for orders and placements for the record. Without nodes there are none of either.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from readyplane_planner.decide.mixing import Pick, classes_of
from readyplane_planner.decide.values import Placement, Plan
from readyplane_planner.optimise.nodes import NodeChoice, NodeOffer, prefer, to_place
from readyplane_planner.signals import Observation

ENDED = frozenset({"exited", "failed"})


def placed(
    picks: tuple[Pick, ...], observation: Observation, plan: Plan, pool: str
) -> tuple[Pick, ...]:
    """The picks with the nodes on which they would serve soonest, each taking its place there."""
    if not plan.nodes or not picks:
        return picks
    ways: dict[str, Iterator[NodeChoice]] = {}
    for name, count in Counter(pick.worker_class for pick in picks).items():
        offers = _offers(observation, plan, name)
        ways[name] = iter(prefer(offers, count, init_s=init_s(observation, pool, offers)))
    found = ((pick, next(ways[pick.worker_class], NodeChoice((), ""))) for pick in picks)
    return tuple(replace(pick, nodes=way.nodes, way=way.why) for pick, way in found)


def placements(
    observation: Observation, plan: Plan, expected: Sequence[tuple[str, str, int]]
) -> tuple[Placement, ...]:
    """What has to be fetched to the nodes of the starts that are ordered or expected next.

    Args:
        expected: (pool, class, starts).
    """
    found: dict[str, Placement] = {}
    if not plan.nodes or not plan.manifest_digest:
        return ()
    for pool, worker_class, count in expected:
        offers = _offers(observation, plan, worker_class)
        seconds = init_s(observation, pool, offers)
        for offer in to_place(offers, count, init_s=seconds):
            took = "" if offer.fetch_s is None else f", {offer.fetch_s:.1f} s from {offer.tier}"
            why = f"the next {worker_class} of {pool} is expected there{took}"
            found.setdefault(offer.node, Placement(plan.manifest_digest, offer.node, why))
    return tuple(found.values())


def init_s(observation: Observation, pool: str, offers: Sequence[NodeOffer]) -> float:
    """What a start takes besides fetching, taken as what T_ready leaves of the fastest way."""
    ways = [o.fetch_s for o in offers if o.fetch_s is not None]
    return max(0.0, observation.t_ready[pool].p50_s - min(ways, default=0.0))


def _offers(observation: Observation, plan: Plan, worker_class: str) -> list[NodeOffer]:
    gpus = {
        c.worker_class: c.profile.gpus
        for name in ("prefill", "decode")
        for c in classes_of(plan.pool(name))
    }
    each = gpus.get(worker_class, 1)
    held: Counter[str] = Counter()
    living = [a for a in observation.allocations if a.state not in ENDED]
    for allocation in living:
        held[allocation.node] += gpus.get(allocation.worker_class, 1)
    leaving = {w.worker_id for w in observation.workers if w.drain_age_s is not None}
    freed = {a.node for a in living if a.worker_id in leaving}
    views = {v.node: v for v in observation.nodes}
    found = []
    for node in plan.nodes:
        if node.classes and worker_class not in node.classes:
            continue
        view = views.get(node.name)
        found.append(
            NodeOffer(
                node.name,
                places=max(0, node.gpus - held[node.name]) // each,
                free_s=_drain_s(observation, plan) if node.name in freed else math.inf,
                fetch_s=None if view is None else view.fetch_s,
                tier="unknown" if view is None else view.tier,
                source_node="" if view is None else view.source_node,
            )
        )
    return found


def _drain_s(observation: Observation, plan: Plan) -> float:
    """Until a draining worker is gone: what it holds is half made, on average."""
    return 0.5 * observation.lengths.osl * plan.tpot_s
