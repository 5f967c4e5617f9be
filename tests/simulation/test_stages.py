"""Starts in stages and bare standbys on virtual time: sooner ready, and what is told of them is so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from readyplane import profiles
from readyplane.core.startup import SegmentName
from readyplane.core.worker import Role
from readyplane_lab.demo import DEMO_POLICY
from readyplane_lab.simulator import replay
from readyplane_lab.simulator.directives import Activate
from readyplane_lab.simulator.outcome import Life
from readyplane_lab.simulator.site import BLOCK_SIZE
from readyplane_lab.simulator.startup import StartUpModel
from readyplane_lab.simulator.world_result import WorldResult
from readyplane_planner.decide import decide
from readyplane_planner.policy import overlay, read_policy
from readyplane_planner.signals import WorkerView
from tests.simulation.sim_world import Fixed, Recorder, same, steady, world

GRAPH_TOKENS = 16_000
EXACT = StartUpModel(sigma=0.0, graph_kv_tokens=GRAPH_TOKENS)
"""No luck, so that a start takes what the model says."""
LATER_S = EXACT.segments[SegmentName.COMPILE] + EXACT.segments[SegmentName.CUDA_GRAPH]
IMPORT_S = EXACT.segments[SegmentName.RUNTIME_IMPORT]
COLD_S = (
    EXACT.provision_s + sum(EXACT.segments.values()) + EXACT.weight_bytes / EXACT.store_bytes_per_s
)
GROWS = (0.0, 2, 2), (8.0, 2, 3)


def took_s(life: Life) -> float:
    assert life.took_s is not None
    return life.took_s


def grown(result: WorldResult) -> Life:
    """The decode worker that was ordered while requests came."""
    (life,) = [x for x in result.lives if x.pool == "decode" and x.decision_id]
    return life


@cache
def staged() -> tuple[WorldResult, tuple[tuple[float, WorkerView], ...]]:
    return run_staged()


def run_staged() -> tuple[WorldResult, tuple[tuple[float, WorkerView], ...]]:
    brain = Recorder(Fixed(*GROWS))
    policy = overlay(DEMO_POLICY, {"graph_stages": True})
    result = world(brain, policy=policy, startup=EXACT)
    name = grown(result).worker_id
    seen = [(at_s, w) for at_s, o in brain.seen for w in o.workers if w.worker_id == name]
    return result, tuple(seen)


def test_a_start_in_stages_is_ready_as_much_sooner_as_the_model_says() -> None:
    whole = world(Fixed(*GROWS), startup=replace(EXACT, peer_readers_max=0))
    result, _ = staged()
    assert took_s(grown(result)) <= COLD_S - LATER_S + 0.01
    assert took_s(grown(whole)) <= COLD_S + 0.01
    # Both took their weights on the same way, so that nothing else differs.
    same_way = replace(EXACT, cached_share=1.0)
    policy = overlay(DEMO_POLICY, {"graph_stages": True})
    one = took_s(grown(world(Fixed(*GROWS), startup=same_way)))
    other = took_s(grown(world(Fixed(*GROWS), policy=policy, startup=same_way)))
    assert one - other == pytest.approx(LATER_S)


def test_the_planner_sees_it_slower_with_more_kv_then_whole_with_what_is_left() -> None:
    result, seen = staged()
    served = [w for _, w in seen if w.ready_age_s is not None]
    modes = [w.mode for w in served]
    assert modes[0] == "eager" and modes[-1] == "jit"
    assert modes == sorted(modes), "it never goes back"
    profile = profiles.load(read_policy(DEMO_POLICY).decode.worker_class)
    whole = profile.kv_capacity_tokens // BLOCK_SIZE * BLOCK_SIZE
    assert served[-1].kv_published == served[-1].kv_capacity == whole, "as a whole start has it"
    more = whole + GRAPH_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert all(whole <= (w.kv_published or 0) <= more for w in served)
    assert max(w.kv_capacity or 0.0 for w in served) <= more
    whole_s = next(w.ready_age_s for w in served if w.mode == "jit")
    assert whole_s is not None and whole_s >= LATER_S, "no graph is there before it was captured"
    assert {r.outcome for r in result.records} == {"finished"}


def test_stages_conserve_every_token_and_are_repeatable() -> None:
    result, _ = staged()  # the invariants were checked in the run, too
    assert [r.osl for r in result.records] == list(result.asked)
    assert len(result.records) == len(steady())
    assert same(result.run(), run_staged()[0].run())


def test_a_drain_comes_before_graphs() -> None:
    """Interrupted, it gives back what it had captured, drains and leaves."""
    policy = overlay(DEMO_POLICY, {"graph_stages": True, "min_ready_s": 0.0})
    slow = replace(EXACT, segments={**EXACT.segments, SegmentName.CUDA_GRAPH: 60.0})
    result = world(Fixed((0.0, 2, 3), (10.0, 2, 2)), initial=(2, 3), policy=policy, startup=slow)
    (left,) = [x for x in result.lives if x.pool == "decode" and x.drain_s is not None]
    assert not left.failure and {r.outcome for r in result.records} == {"finished"}


def test_the_planner_s_own_orders_are_made_in_stages_and_learnt_from() -> None:
    policy = overlay(DEMO_POLICY, {"graph_stages": True})
    busy = steady(rate_rps=6.0)
    brain = Recorder(decide)
    result = world(brain, busy, initial=(1, 1), policy=policy, startup=EXACT)
    ordered = [x for x in result.lives if x.decision_id and x.ready_s is not None]
    assert ordered and all(took_s(x) <= COLD_S - LATER_S + 0.01 for x in ordered)
    learnt = [o.t_ready[x.pool] for _, o in brain.seen[-1:] for x in ordered]
    assert all(q.count > 0 and q.p50_s <= COLD_S - LATER_S + 0.01 for q in learnt)


def bare(**options: object) -> WorldResult:
    policy = overlay(DEMO_POLICY, {"decode": {"standby_holds": "process"}})
    given = {"standbys": (0, 1), "startup": EXACT, "policy": policy, **options}
    return world(Fixed((0.0, None, None)), **given)  # type: ignore[arg-type]


def test_a_bare_standby_starts_with_the_word_and_has_imported_before() -> None:
    result = bare(directives=(Activate(10.0, Role.DECODE),))
    (waited,) = [x for x in result.lives if "standby" in x.worker_id]
    assert waited.ready_s is not None and waited.allocated_s < 0.0
    weights_s = EXACT.weight_bytes / EXACT.store_bytes_per_s
    peer_s = EXACT.weight_bytes / EXACT.peer_bytes_per_s
    cold_s = COLD_S - EXACT.provision_s - IMPORT_S
    assert cold_s - weights_s + peer_s - 0.01 <= waited.ready_s - 10.0 <= cold_s + 0.01
    assert waited.start_s == pytest.approx(10.0, abs=0.5), "with the word, not with the order"
    assert took_s(waited) <= cold_s + 0.01
    told = replay._report(replay.Replay("w", steady()), DEMO_POLICY, result)["t_ready_s"]
    longest_s = max(x.took_s for x in result.lives if x.took_s is not None)
    assert told["p99"] <= longest_s < waited.ready_s - waited.allocated_s, "it had only waited"
    assert result.counts["gpu_s.decode.standby"] == pytest.approx(10.0, abs=0.1)
    assert {r.outcome for r in result.records} == {"finished"}


def test_a_bare_standby_that_nobody_wants_waits_and_is_drained_without_a_word() -> None:
    policy = overlay(DEMO_POLICY, {"decode": {"standby_holds": "process"}})
    result = bare(policy=policy)
    (waited,) = [x for x in result.lives if "standby" in x.worker_id]
    assert waited.ready_s is None and not waited.failure
    assert result.counts["leases_expired"] == 0


def test_a_pool_grows_by_its_bare_standby_and_has_another_one_waiting() -> None:
    policy = overlay(DEMO_POLICY, {"decode": {"standby": 1, "standby_holds": "process"}})
    result = world(Fixed((0.0, 2, 3), (20.0, 2, 4)), initial=(2, 3), policy=policy, startup=EXACT)
    decode = [x for x in result.lives if x.pool == "decode" and x.allocated_s > -1.0]
    first, second = sorted(decode, key=lambda x: x.allocated_s)
    assert first.ready_s is not None and second.ready_s is None, "one stands by again"
    assert first.ready_s - second.allocated_s <= COLD_S - EXACT.provision_s - IMPORT_S + 0.1
    assert took_s(first) <= COLD_S - EXACT.provision_s - IMPORT_S + 0.1
    assert second.took_s is None
    assert result.counts["gpu_s.decode.standby"] > 20.0
