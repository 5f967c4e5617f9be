"""Field reports of planner actuation (B35 to B45), each as the row says; rows are cited by number."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from readyplane.core.errors import Conflict, StaleEpoch
from readyplane.core.worker import Role, WorkerState
from readyplane.kit.telemetry import Metrics
from readyplane.ports import Instance, Order
from readyplane_planner import guard
from readyplane_planner.decide import Memory, Reason, blindly, dead_ends, decide
from readyplane_planner.decide.values import DeadEnd
from readyplane_planner.guard import Counts, Limits, Verdict
from readyplane_planner.metrics import PlannerMetrics
from readyplane_planner.optimise import Problem, Proposal
from readyplane_planner.policy import merged
from readyplane_planner.signals import Kind, Signal
from tests.unit.planner_world import DIGEST, MODEL, Box, HandClock, Run, World, planner, policy
from tests.unit.test_planner_optimise import D_MODEL, problem


def world(**changes: Any) -> World:
    return World(HandClock(), **changes)


def wants(run: Run, wanted: dict[str, int]) -> None:
    def answer(_problem: Problem) -> Proposal:
        return Proposal(wanted["p"], wanted["d"], wanted["p"], wanted["d"])

    run.service._brain = partial(decide, optimiser=answer)


def by_hand(w: World, role: Role, count: int = 1) -> list[str]:
    """Workers that somebody starts; nobody's decision is on them."""
    names = []
    for _ in range(count):
        name = f"hand-{role[0]}-{len(w.boxes)}"
        order = Order(name, role, MODEL, "h200-slow10", DIGEST)
        now_s = w.clock.now_s
        w.boxes[name] = Box(order, now_s, now_s, WorkerState.READY)
        names.append(name)
    return names


def ended_by_hand(w: World, name: str) -> None:
    box = w.boxes[name]
    box.exited_s, box.state = w.clock.now_s, WorkerState.GONE


def live(w: World, role: Role = Role.PREFILL) -> int:
    return len(w.members(role, WorkerState.READY, WorkerState.PROVISIONED))


async def test_b35_a_refused_order_is_told_and_believed_by_nobody() -> None:
    """Status, reason, when again; belief unchanged; retried; counted; success when read back."""
    w = world(rps=lambda _t: 4.0)
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 2)
    shut = [True]
    w.refuse = lambda _o: "the deployment is not ready" if shut[0] else ""
    run = await planner(w)
    metrics = Metrics()
    run.service._metrics = PlannerMetrics(metrics)
    await run.step(20)
    first = next(d for d in run.decisions if d.orders)
    outcomes = (await run.journal.get(first.decision_id))[1]
    assert {o.kind for o in outcomes} == {"refused"}
    assert all("not ready" in o.document["note"] for o in outcomes)
    again = [r for d in run.decisions for r in d.why if r.code == "denied"]
    assert again and all("again in" in r.text for r in again)
    pool = (await run.service.state())["pools"]["prefill"]
    assert (pool["provisioned"], pool["ready"]) == (1, 1), "what is, not what was asked for"
    labels = {"model": MODEL, "outcome": "refused"}
    assert (metrics.get_sample_value("readyplane_actuations_total", labels) or 0) >= 2
    assert w.provisions == []
    asked = [d for d in run.decisions if d.orders]
    assert len(asked) < 12, "asked for again, less and less often"
    shut[0] = False
    await run.step(80)
    taken = next(d for d in run.decisions if any(o.worker_id in w.boxes for o in d.orders))
    told = [o.kind for o in (await run.journal.get(taken.decision_id))[1]]
    assert "ordered" in told and told.index("ordered") < told.index("provisioned")
    assert live(w) >= 2


class NoPlace(World):
    """The third prefill worker is taken and never placed."""

    def instance(self, box: Box) -> Instance:
        found = super().instance(box)
        if box.alive and box.ready_s > self.clock.now_s + 1e6:
            return Instance(
                found.order,
                "pending",
                allocated_ago_s=found.allocated_ago_s,
                reason="no node has a free GPU",
            )
        return found


async def test_b36_an_order_that_never_begins_blocks_nobody() -> None:
    """Grow 1 to 3, the third waits for ever, the load stops: cancelled; the other pool goes on."""
    w = NoPlace(HandClock())
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    w.hang = lambda o: (
        o.role is Role.PREFILL and len([p for p in w.provisions if p.role is o.role]) >= 2
    )
    run = await planner(w, policy(eta_bound_factor=3.0))
    wanted = {"p": 3, "d": 1}
    wants(run, wanted)
    await run.step(24)
    assert live(w) == 3
    assert any(r.code == "pending" and "no node" in r.text for r in run.decisions[-1].why)
    assert any("no node" in h["text"] for h in (await run.service.state())["held"])
    wanted["d"] = 3
    await run.step(15)
    assert len(w.members(Role.DECODE, WorkerState.READY)) == 3, "the other pool scales meanwhile"
    wanted.update(p=1, d=3)  # the load of P stops
    await run.step(60)
    assert [n for n in w.releases if n.startswith("p-")], "the order that waits is cancelled"
    assert run.desired[-1][1:] == (1, 3)
    assert live(w) == 1


async def test_b36_repeated_orders_back_off() -> None:
    w = NoPlace(HandClock())
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    w.hang = lambda o: o.role is Role.PREFILL
    run = await planner(w, policy(eta_bound_factor=1.0))
    wants(run, {"p": 2, "d": 1})
    await run.step(240)
    times = [b.allocated_s for b in w.boxes.values() if b.order.worker_id.startswith("p-")]
    gaps = [b - a for a, b in pairwise(times)]
    assert 3 <= len(times) <= 9
    assert all(b > a for a, b in pairwise(gaps)), gaps
    assert {"overdue", "backoff"} <= run.codes(200)
    assert run.service._memory.drift.prefill.actuation.active
    assert "drift_actuation" in run.codes()


async def test_b37_two_owners_of_one_pool() -> None:
    """Somebody sets the size back every 20 s: said, waited out longer each time, flaps bounded."""
    w = world()
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    run = await planner(w)
    wants(run, {"p": 3, "d": 1})
    ordered = []
    for _ in range(30):  # ten minutes
        await run.step(20)
        ordered.append(len(w.provisions))
        for box in w.members(Role.PREFILL, WorkerState.READY, WorkerState.PROVISIONED)[1:]:
            ended_by_hand(w, box.order.worker_id)
    assert "ownership_conflict" in run.codes(400)
    state = await run.service.state()
    assert any(h["code"] == "ownership_conflict" and " s;" in h["text"] for h in state["held"])
    assert len(w.provisions) <= 16, "without a pause it would be sixty"
    later = ordered[-1] - ordered[len(ordered) // 2]
    assert later <= 4, "the pauses grow"
    quiet = len(w.provisions)
    await run.service.set_paused(True)
    await run.step(60)
    assert len(w.provisions) == quiet, "pausing the planner is one call"


async def test_b37_when_the_other_owner_is_gone_so_is_the_conflict() -> None:
    w = world()
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    run = await planner(w)
    wants(run, {"p": 2, "d": 1})
    for _ in range(8):
        await run.step(15)
        for box in w.members(Role.PREFILL, WorkerState.READY, WorkerState.PROVISIONED)[1:]:
            ended_by_hand(w, box.order.worker_id)
    assert run.service._memory.owned_p.pauses > 0
    await run.step(700)
    assert live(w) == 2 and run.service._memory.owned_p.pauses == 0


async def test_b37_writing_compares_first() -> None:
    """The policy by version, a drain by the worker's epoch, everything by the leader's number."""
    w = world()
    run = await planner(w)
    await run.step(10)
    with pytest.raises(Conflict):
        await run.service.set_policy({"headroom": 0.3}, merge=True, expected_version=99)
    w.fences_router.take(MODEL, 7)
    with pytest.raises(StaleEpoch):
        await w.drain(next(iter(w.boxes)), leader_epoch=6)


@pytest.mark.parametrize(
    ("current", "fallback", "in_flight", "least"),
    [(8, 4, 9, 9), (8, 4, 2, 8), (2, 4, 2, 4), (2, 4, 6, 6)],
)
async def test_b40_a_fallback_is_a_floor_and_no_target(
    current: int, fallback: int, in_flight: int, least: int
) -> None:
    """Rates unknown: at least what is there, the fallback, and what the signals left ask for.

    `in_flight`: as many D workers as the sequences that run need.
    """
    w = world()
    run = await planner(w, policy(decode={"max": 20, "fallback": fallback}))
    await run.step(2)
    seen = run.service._inputs
    assert seen is not None
    missing = Signal(Kind.MISSING, None, "requests/s", 0.0, "the metrics store is away")
    sequences = (in_flight - 0.5) * D_MODEL.sequences_at(0.1)
    blind = replace(
        seen.observation,
        arrivals=missing,
        prefill_work=missing,
        decoding=Signal(Kind.FRESH, sequences, "sequences"),
    )
    said: list[Reason] = []
    proposal, memory = blindly.stand_in(
        blind,
        seen.plan,
        replace(seen.memory, blind=20),
        problem(t_ready_d_s=0.0),
        (1, current),
        said,
    )
    assert memory.blind == 21
    if least == current:
        assert proposal is None, "it stays as it is"
    else:
        assert proposal is not None and (proposal.d, proposal.d_keep) == (least, least)
    assert [r.code for r in said] == (["fallback"] if least == fallback else [])


async def test_b41_a_hand_edit_is_put_right() -> None:
    """Desired is compared with what is there: 1 to 2 by hand is reported and reconciled."""
    w = world()
    run = await planner(w)
    await run.step(30)
    by_hand(w, Role.PREFILL)
    await run.step(2)
    assert {"drift", "hand_edit"} <= run.codes(2)
    await run.step(90)
    assert live(w) == 1


async def test_b41_a_hand_edit_is_held_until_it_expires() -> None:
    """Where the policy honours it, it stands, and the state says for how long."""
    w = world()
    run = await planner(w, policy(hand_hold_s=60.0))
    await run.step(30)
    by_hand(w, Role.PREFILL)
    await run.step(50)
    assert live(w) == 2
    held = (await run.service.state())["held"]
    assert [h["code"] for h in held] == ["manual_hold"] and "s more" in held[0]["text"]
    await run.step(90)
    assert live(w) == 1 and (await run.service.state())["held"] == []


@pytest.mark.parametrize("failures", [9, 10])
async def test_b42_the_fallback_waits_for_its_threshold(failures: int) -> None:
    """Failures 1 to 9 hold, the 10th applies it, and one success counts anew."""
    w = world()
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    run = await planner(w, policy(prefill={"fallback": 4}, fallback_after=10))
    await run.step(3)
    for _ in range(3):
        w.empty = True
        await run.step(failures)
        w.empty = False
        assert (run.desired[-1][1] > 1) is (failures >= 10)
        if failures >= 10:
            assert "fallback" in run.codes()
            return
        await run.step(1)
        assert run.service._memory.blind == 0


async def test_b43_a_pool_of_zero_gets_its_fallback() -> None:
    """Pool 0, metrics unreachable, fallback 1: the pool goes to 1."""
    w = world()
    bare = policy(prefill={"min": 0, "fallback": 1}, decode={"min": 0, "fallback": 1})
    run = await planner(w, bare)
    await run.step(5)
    assert run.desired[-1][1:] == (0, 0)
    w.away = True
    await run.step(30)
    assert sorted(o.role for o in w.provisions) == [Role.DECODE, Role.PREFILL]
    assert run.desired[-1][1:] == (1, 1)


async def test_b44_a_changed_policy_is_in_force_and_old_windows_are_not() -> None:
    w = world(rps=lambda _t: 3.0)
    run = await planner(w)
    await run.step(60)
    before = run.service._memory
    assert before.work_p.begun_s is not None
    _doc, version = await run.service.set_policy({"headroom": 0.5}, merge=True)
    await run.step(1)
    assert run.decisions[-1].policy_version == version == 2
    assert run.service._memory.work_p.begun_s == before.work_p.begun_s, "not what it rests on"
    await run.service.set_policy({"forecast": {"window_s": 5.0}}, merge=True)
    await run.step(1)
    assert run.decisions[-1].policy_version == 3
    assert run.service._memory.work_p.begun_s != before.work_p.begun_s, "another look-back"


async def test_b132_identical_replacements_are_ordered_no_more() -> None:
    """B132: two ends for good and no more orders, said at every tick; each way out is one."""
    w = world(rps=lambda _t: 4.0, doom=lambda o: "bytes" if o.role is Role.PREFILL else "")
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    run = await planner(w, policy())
    wants(run, {"p": 3, "d": 2})

    def ordered() -> int:
        return sum(o.role is Role.PREFILL for o in w.provisions)

    await run.step(60)
    assert dead_ends.DEAD_END_STARTS <= ordered() <= dead_ends.DEAD_END_STARTS + 2
    before = ordered()
    await run.step(600)
    assert ordered() == before  # bounded: not even once in ten minutes
    why = next(r for r in run.decisions[-1].why if r.code == "dead_end")
    assert why.pool == "prefill" and "(bytes; p-" in why.text and "policy again" in why.text
    assert run.decisions[-1].why[0] == why
    # The other pool is another matter, and what serves goes on serving.
    assert live(w, Role.DECODE) == 2 and live(w) == 1
    shown = (await run.service.state(MODEL))["pools"]["prefill"]["dead_ends"]
    assert [(d["kind"], d["starts"] >= 2, d["digest"]) for d in shown] == [("bytes", True, DIGEST)]

    # A new version of the policy, though it changes nothing, is an explicit word to try again.
    await run.service.set_policy({}, merge=True)
    await run.step(60)
    assert before < ordered() <= before + dead_ends.DEAD_END_STARTS + 2
    assert "dead_end" in run.codes()

    # The artifact was mended: after the word it starts, and nothing is left of the condition.
    w.doom = lambda _order: ""
    await run.service.set_policy({}, merge=True)
    await run.step(60)
    assert live(w) >= 3 and "dead_end" not in run.codes()
    assert run.service._memory.dead_ends == ()


async def test_b132_one_end_stops_nobody_and_a_good_start_forgets_it() -> None:
    """B132: a node's own trouble looks alike once."""
    kinds = iter(["trust"])
    w = world(rps=lambda _t: 4.0)
    w.doom = lambda o: next(kinds, "") if o.role is Role.PREFILL else ""
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    run = await planner(w, policy())
    wants(run, {"p": 2, "d": 1})
    await run.step(60)
    assert live(w) == 2
    assert run.service._memory.dead_ends == ()


async def test_b132_standbys_that_the_engine_cannot_are_ordered_no_more_and_others_are() -> None:
    """B132: what a standby cannot is nothing that a worker that serves at once would meet."""
    w = world(rps=lambda _t: 4.0, doom=lambda o: "not_offered" if o.standby else "")
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    asleep = {"prefill": {"standby": 1, "standby_holds": "asleep"}}
    run = await planner(w, merged(policy(), asleep))
    wanted = {"p": 2, "d": 1}
    wants(run, wanted)

    def ordered(*, standby: bool) -> int:
        return sum(o.role is Role.PREFILL and o.standby is standby for o in w.provisions)

    await run.step(300)
    before = ordered(standby=True)
    assert before == dead_ends.DEAD_END_STARTS and live(w) == 2
    wanted["p"] = 4
    await run.step(600)
    assert ordered(standby=True) == before, "good starts of others are no reason to try again"
    assert live(w) == 4, "what serves at once is ordered as ever"
    why = next(r for r in run.decisions[-1].why if r.code == "dead_end")
    assert why.pool == "prefill" and "policy.prefill.standby_holds" in why.text
    shown = (await run.service.state(MODEL))["pools"]["prefill"]["dead_ends"]
    assert [(d["kind"], d["standby"]) for d in shown] == [("not_offered", True)]
    # The policy's next version, here one with another kind of standby, is tried again.
    w.doom = lambda _order: ""
    await run.service.set_policy({"prefill": {"standby_holds": "weights"}}, merge=True)
    await run.step(60)
    assert len(w.members(Role.PREFILL, WorkerState.STANDBY)) == 1
    assert "dead_end" not in run.codes() and run.service._memory.dead_ends == ()


def test_b132_a_standby_is_shut_by_what_ends_every_start_and_no_other_start_by_a_standby() -> None:
    """B132."""
    every = DeadEnd("prefill", "sha256:a", "bytes", "x", 2, ("p-1", "p-2"), 1)
    only = DeadEnd("decode", "sha256:a", "not_offered", "x", 2, ("d-1", "d-2"), 1, standby=True)
    memory = Memory(dead_ends=(every, only))
    assert dead_ends.shut(memory, "prefill", "sha256:a", standby=True) == every
    assert dead_ends.shut(memory, "decode", "sha256:a", standby=True) == only
    assert dead_ends.shut(memory, "decode", "sha256:a") is None


def test_b132_a_rejected_artifact_does_not_shut_the_one_before() -> None:
    """B132: it is one artifact's condition: a roll-back to the last one is ordered."""
    found = DeadEnd("prefill", "sha256:new", "identity", "x", 2, ("p-1", "p-2"), 1)
    memory = Memory(dead_ends=(found,))
    assert dead_ends.shut(memory, "prefill", "sha256:new") == found
    assert dead_ends.shut(memory, "prefill", "sha256:old") is None
    assert dead_ends.shut(memory, "decode", "sha256:new") is None


def test_b45_a_worker_of_two_nodes_costs_sixteen() -> None:
    """2 nodes x 8 GPUs are 16 of the budget; with an unknown shape only shrinking goes on."""
    wide, narrow = Limits(1, 9, gpus=16), Limits(1, 9, gpus=1)
    grow = Verdict(4, grow=2)
    counts = (Counts(2, 0), Counts(3, 0))
    p, d = guard.budgeted((grow, Verdict(5, grow=2)), counts, (wide, narrow), 52)
    assert (p.grow, d.grow) == (1, 1), "35 are held: room for one of 16, and one of 1"
    shapeless = Limits(1, 9, gpus=0)
    p, d = guard.budgeted((grow, Verdict(2, shrink=1)), counts, (shapeless, narrow), 52)
    assert (p.grow, d.shrink) == (0, 1)
    assert ("shape_unknown", d.reasons) == (p.reasons[-1][0], ())
    p, d = guard.budgeted((Verdict(1, shrink=1), grow), counts, (shapeless, narrow), 52)
    assert (p.shrink, d.grow) == (1, 0), "what the other pool holds is not known either"
    p, _d = guard.budgeted((grow, grow), counts, (shapeless, narrow), None)
    assert p.grow == 2, "without a budget nobody asks"
