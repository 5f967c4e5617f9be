"""Standbys, activations and flips as the planner sees and remembers them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import Role, WorkerState
from readyplane_planner.decide import Decision, Memory, OpenOrder, Plan, fast
from readyplane_planner.decide.acting import act
from readyplane_planner.decide.follow import Targets, follow
from readyplane_planner.decide.pools import census, eta_s, not_draining, quantiles_of
from readyplane_planner.decide.values import Changing, Owned
from readyplane_planner.guard import Verdict
from readyplane_planner.journal import replayed
from readyplane_planner.policy import make_plan, merged
from readyplane_planner.signals import Allocation, Observation, Priors, Refusal, WorkerView, observe
from tests.unit.planner_world import DIGEST, MODEL, HandClock, World, planner, policy

P, D = Role.PREFILL, Role.DECODE
STANDBY, READY, DRAINING = WorkerState.STANDBY, WorkerState.READY, WorkerState.DRAINING
T_READY = StartQuantiles(30.0, 60.0, 120.0, 5, 0.0)
NOW_S = 100.0


def plan() -> Plan:
    return make_plan(policy(), version=1, manifest_digest=DIGEST)


def view(name: str, role: Role = D, state: WorkerState = READY, **changes: Any) -> WorkerView:
    made = WorkerView(name, f"{name}/1", role, state, "h200-slow10", epoch=3, ready_age_s=50.0)
    return replace(made, flips=True, **changes)


def held(name: str, role: Role = D, **changes: Any) -> Allocation:
    return replace(Allocation(name, role, "running", "h200-slow10", allocated_ago_s=5.0), **changes)


def seen(
    *workers: WorkerView, allocations: tuple[Allocation, ...] = (), **more: Any
) -> Observation:
    made = observe(
        model=MODEL,
        previous=None,
        current=None,
        allocations=allocations,
        t_ready={"prefill": T_READY, "decode": T_READY},
        priors=Priors(),
        now_s=NOW_S,
    )
    return replace(made, workers=workers, fleet_known=True, **more)


def names(name: str, observation: Observation, memory: Memory) -> dict[str, list[str]]:
    pool = census(name, observation, plan(), memory, now_s=NOW_S)
    kinds = ("ready", "standby", "preparing", "coming", "draining", "failed", "overdue")
    found = {kind: getattr(pool, kind) for kind in kinds}
    return {k: [getattr(m, "worker_id", m) for m in v] for k, v in found.items() if v}


def told(name: str, kind: str, to: str, since_s: float = 98.0) -> Memory:
    return Memory(changing=(Changing(name, kind, to, since_s, 30.0),))


@pytest.mark.parametrize(
    ("observation", "memory", "expected"),
    [
        # Waiting to be told: neither ready nor on its way.
        (seen(view("s", state=STANDBY)), Memory(), {"standby": ["s"]}),
        # Told, by our memory, or by the router's word alone (a planner that has just begun).
        (seen(view("s", state=STANDBY)), told("s", "activate", "decode"), {"coming": ["s"]}),
        (seen(view("s", state=STANDBY, told="activate")), Memory(), {"coming": ["s"]}),
        # On its way to stand by: with a lease, without one, and not even seen.
        (
            seen(view("s", state=WorkerState.PROVISIONED, standby=True), allocations=(held("s"),)),
            Memory(),
            {"preparing": ["s"]},
        ),
        (seen(allocations=(held("s", standby=True),)), Memory(), {"preparing": ["s"]}),
        (
            seen(),
            Memory(orders=(OpenOrder("s", "decode", 99.0, "d-1", standby=True),)),
            {"preparing": ["s"]},
        ),
        # Told while it loads: it will serve as soon as it is loaded.
        (
            seen(view("s", state=WorkerState.PROVISIONED, standby=True), allocations=(held("s"),)),
            told("s", "activate", "decode"),
            {"coming": ["s"]},
        ),
        # One that serves is one that serves, whatever it was ordered as.
        (seen(view("s", standby=True)), Memory(), {"ready": ["s"]}),
        # A start that failed is a failure of the pool.
        (
            seen(view("s", state=WorkerState.PROVISIONED, standby=True, failure="no")),
            Memory(),
            {"failed": ["s"]},
        ),
    ],
)
def test_standbys_are_told_apart(
    observation: Observation, memory: Memory, expected: dict[str, list[str]]
) -> None:
    assert names("decode", observation, memory) == expected
    assert names("prefill", observation, memory) == {}


@pytest.mark.parametrize(
    ("worker", "memory", "prefill", "decode"),
    [
        # Told and not drained yet: it leaves one pool and comes to the other.
        (view("w", P), told("w", "flip", "decode"), "draining", "coming"),
        (view("w", P, DRAINING, told="flip"), told("w", "flip", "decode"), "draining", "coming"),
        (view("w", P, DRAINING, told="flip"), Memory(), "draining", "coming"),
        # Between its two leases nobody sees it.
        (None, told("w", "flip", "decode"), "", "coming"),
        # It proves itself for the other stage, then serves it.
        (view("w", D, WorkerState.PROVISIONED), told("w", "flip", "decode"), "", "coming"),
        (view("w", D), told("w", "flip", "decode"), "", "ready"),
    ],
)
def test_a_flip_is_in_one_pool_at_a_time(
    worker: WorkerView | None, memory: Memory, prefill: str, decode: str
) -> None:
    workers = () if worker is None else (worker,)
    # The actuator knows it as what it was ordered as, from long ago.
    mine = held("w", P, allocated_ago_s=9_000.0)
    observation = seen(*workers, allocations=(mine,))
    memory = replace(memory, served=("w",))
    assert names("prefill", observation, memory) == ({prefill: ["w"]} if prefill else {})
    assert names("decode", observation, memory) == {decode: ["w"]}


def act_on(observation: Observation, memory: Memory) -> Memory:
    """The memory after a decision that wants what is there."""
    memory = not_draining(observation, memory)
    pools = tuple(
        census(n, observation, plan(), memory, now_s=NOW_S) for n in ("prefill", "decode")
    )
    verdicts = (Verdict(len(pools[0].ready)), Verdict(len(pools[1].ready)))
    acted = act(observation, plan(), memory, (pools[0], pools[1]), verdicts, [], "d-1", now_s=NOW_S)
    return acted.memory


def test_a_flip_leaves_no_drain_behind() -> None:
    """The same worker id serves again: a drain that were remembered would end it."""
    memory = told("w", "flip", "decode")
    for worker in (view("w", P, DRAINING, told="flip"), view("w", D)):
        observation = seen(worker, allocations=(held("w", P),))
        memory = not_draining(observation, memory)
        pools = tuple(
            census(n, observation, plan(), memory, now_s=NOW_S) for n in ("prefill", "decode")
        )
        acted = act(
            observation,
            plan(),
            memory,
            pools,  # type: ignore[arg-type]
            (Verdict(1), Verdict(1)),
            [],
            "d-1",
            now_s=NOW_S,
        )
        memory = acted.memory
        assert memory.draining == () and acted.releases == []
    assert memory.changing == (), "done"
    assert "w" in memory.served


def test_who_is_told_is_expected_within_its_own_lead_time() -> None:
    observation = seen(view("s", state=STANDBY))
    pool = census("decode", observation, plan(), told("s", "activate", "decode", 99.8), now_s=NOW_S)
    (coming,) = pool.coming
    assert coming.age_s == pytest.approx(0.2) and coming.mode == "activate"
    assert eta_s(coming.age_s, quantiles_of(observation, "decode", coming), late=True) < 5.0
    measured = StartQuantiles(0.3, 0.4, 0.5, 9, 0.0)
    key = "decode/h200-slow10/activate"
    known = replace(observation, t_ready={**observation.t_ready, key: measured})
    assert quantiles_of(known, "decode", coming) == measured
    flip = replace(coming, mode="flip")
    assert quantiles_of(observation, "decode", flip).p50_s < T_READY.p50_s


def test_standbys_occupy_gpus_and_are_no_capacity() -> None:
    observation = seen(view("r"), view("s", state=STANDBY), allocations=(held("n", standby=True),))
    pool = census("decode", observation, plan(), Memory(), now_s=NOW_S)
    counts = pool.counts(backlog=False, breach=False)
    assert (counts.live, counts.standby, counts.held) == (1, 2, 3)


@pytest.mark.parametrize(
    ("worker", "more", "age_s", "left"),
    [
        (view("s", state=STANDBY), {}, 2.0, 1),
        (view("s"), {}, 2.0, 0),  # done
        (view("s", state=STANDBY), {"refused": (Refusal("s", "decode", "no"),)}, 2.0, 0),
        (view("s", state=STANDBY), {}, 50.0, 0),  # its time is over, and nobody did it
        (None, {}, 2.0, 1),
        (None, {}, 50.0, 0),  # gone
        (None, {"fleet_known": False}, 50.0, 1),  # or only out of sight
        (None, {"allocations": (held("s", state="exited"),)}, 2.0, 0),
    ],
)
def test_what_was_told_is_remembered_until_done_refused_or_over(
    worker: WorkerView | None, more: dict[str, Any], age_s: float, left: int
) -> None:
    memory = told("s", "activate", "decode", NOW_S - age_s)
    observation = replace(seen(*(() if worker is None else (worker,))), **more)
    assert len(fast.settled(observation, memory).changing) == left


def test_a_lost_call_is_made_again_and_a_word_that_is_known_is_not() -> None:
    memory = Memory(
        changing=(
            Changing("a", "activate", "decode", 98.0, 30.0),
            Changing("b", "activate", "decode", 98.0, 30.0),
            Changing("f", "flip", "prefill", 98.0, 30.0),
            Changing("o", "activate", "decode", 10.0, 30.0),
        )
    )
    observation = seen(
        view("a", state=STANDBY),
        view("b", state=STANDBY, told="activate"),
        view("f", D),
        view("o", state=STANDBY),
    )
    activations, flips = fast.untold(observation, memory)
    assert [(a.worker_id, a.deadline_s) for a in activations] == [("a", 28.0)]
    assert [(f.worker_id, f.pool, f.to) for f in flips] == [("f", "decode", "prefill")]


def test_the_oldest_standby_of_the_newest_generation_serves_first() -> None:
    waiting = [
        view("a", state=STANDBY, generation=1, standby_age_s=90.0),
        view("b", state=STANDBY, generation=2, standby_age_s=10.0),
        view("c", state=STANDBY, generation=2, standby_age_s=20.0),
    ]
    assert [a.worker_id for a in fast.activations(waiting, 2, "decode")] == ["c", "b"]
    assert fast.activations(waiting, 0, "decode") == ()


def test_who_flips_holds_least_and_can() -> None:
    workers = [
        view("busy", P, active=9),
        view("idle", P, active=0),
        view("fresh", P, ready_age_s=1.0),
        view("vllm", P, active=0, ready_age_s=99.0),
        view("theirs", P, attached=True),
        view("told", P, told="flip"),
    ]
    workers[3] = replace(workers[3], flips=False)
    chosen = fast.flips(workers, 5, "prefill", plan())
    assert [(f.worker_id, f.to) for f in chosen] == [("idle", "decode"), ("busy", "decode")]


def test_memory_of_it_survives_the_journal_and_another_clock() -> None:
    memory = fast.noted(
        Memory(),
        fast.activations([view("s", state=STANDBY)], 1, "decode"),
        fast.flips([view("w", P)], 1, "prefill", plan()),
        now_s=NOW_S,
    )
    assert [(c.worker_id, c.kind, c.to) for c in memory.changing] == [
        ("s", "activate", "decode"),
        ("w", "flip", "decode"),
    ]
    again = fast.noted(
        memory, fast.activations([view("s", state=STANDBY)], 1, "decode"), (), now_s=105
    )
    assert again is memory, "told once"
    back = msgspec.json.decode(msgspec.json.encode(memory.changing), type=tuple[Changing, ...])
    assert back == memory.changing
    assert {c.since_s for c in fast.moved(memory.changing, 7.0)} == {NOW_S + 7.0}


class Follows:
    """Wants so many workers of each pool; the test changes its mind."""

    def __init__(self, prefill: int, decode: int) -> None:
        self.wanted = (prefill, decode)

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        targets = Targets(*self.wanted, "as told")
        return follow(targets, observation, plan, memory, now_s=now_s, decision_id=decision_id)


def states(world: World, role: Role) -> list[str]:
    return sorted(str(b.state) for b in world.boxes.values() if b.alive and b.role is role)


async def test_a_pool_that_grows_takes_its_standby_and_has_another_one_loaded() -> None:
    wants = Follows(1, 1)
    wanted = merged(policy(), {"decode": {"standby": 1}})
    run = await planner(World(HandClock()), wanted, brain=wants)
    await run.step(10)
    assert states(run.world, D) == ["ready", "standby"]
    assert [o.standby for o in run.world.provisions if o.role is D] == [False, True]
    wants.wanted = (1, 2)
    await run.step(3)
    assert [kind for kind, _ in run.world.words] == ["activate"]
    assert states(run.world, D).count("ready") == 2, "long before a start would be over"
    assert run.decisions[-1].decode.counts.ready == 2
    orders = [o for o in run.world.provisions if o.role is D]
    assert [o.standby for o in orders] == [False, True, True], "nobody was started for the growth"
    await run.step(10)
    assert states(run.world, D) == ["ready", "ready", "standby"]
    assert run.service._memory.changing == () and run.service._memory.orders == ()
    state = await run.service.state()
    assert {w["state"] for w in state["workers"]} == {"ready", "standby"}
    # Fewer are wanted than stand by: the youngest is given back.
    await run.service.set_policy({"decode": {"standby": 0}}, merge=True)
    await run.step(8)
    assert states(run.world, D) == ["ready", "ready"] and not run.world.drains


async def test_an_activation_that_was_lost_is_told_again() -> None:
    wants = Follows(1, 1)
    run = await planner(
        World(HandClock()), merged(policy(), {"decode": {"standby": 1}}), brain=wants
    )
    await run.step(10)
    run.world.deaf, wants.wanted = True, (1, 2)
    await run.step(3)
    assert len(run.world.words) >= 2 and states(run.world, D).count("ready") == 1
    run.world.deaf = False
    await run.step(3)
    assert states(run.world, D).count("ready") == 2
    started = [o for o in run.world.provisions if o.role is D and not o.standby]
    assert len(started) == 1, "told twice, counted once"


def test_a_drain_is_of_one_process_and_not_of_its_name() -> None:
    """Who left by itself and was started again under its name has not been told to leave."""
    memory = replace(Memory(), served=("w",))
    first = view("w", P, DRAINING, incarnation="w/1")
    leaves = act_on(seen(first), memory)
    assert [name for name, _ in leaves.draining] == ["w"]
    # The same process, which the router shows as ready: what it was told is lost, and told again.
    same = act_on(seen(view("w", P, incarnation="w/1", epoch=9)), leaves)
    assert [name for name, _ in same.draining] == ["w"]
    assert census("prefill", seen(first), plan(), same, now_s=NOW_S).draining
    observation = seen(view("w", P, incarnation="w/2", epoch=10))
    other = act_on(observation, same)
    assert other.draining == () and other.draining_as == ()
    assert names("prefill", observation, other) == {"ready": ["w"]}


@pytest.mark.parametrize("flip", [True, False])
async def test_what_one_pool_gives_up_the_other_one_gets(flip: bool) -> None:
    wants = Follows(3, 1)
    run = await planner(World(HandClock()), merged(policy(), {"flip": flip}), brain=wants)
    await run.step(25)
    assert states(run.world, P) == ["ready"] * 3
    started = len(run.world.provisions)
    wants.wanted = (2, 2)
    await run.step(5)
    assert states(run.world, D).count("ready") == (2 if flip else 1)
    assert len(run.world.provisions) == started + (0 if flip else 1)
    await run.step(15)
    assert (states(run.world, P), states(run.world, D)) == (["ready"] * 2, ["ready"] * 2)
    assert [kind for kind, _ in run.world.words] == (["flip"] if flip else [])
    counts = run.decisions[-1].decode.counts, run.decisions[-1].prefill.counts
    assert [c.ready for c in counts] == [2, 2] and not run.world.releases
    assert run.service._memory.draining == () and run.service._memory.changing == ()


async def test_the_decision_replays_with_what_it_told() -> None:
    wants = Follows(1, 1)
    run = await planner(
        World(HandClock()), merged(policy(), {"decode": {"standby": 1}}), brain=wants
    )
    await run.step(10)
    wants.wanted = (1, 2)
    await run.step(2)
    record = next(r for r in await run.journal.newest(MODEL, limit=9) if r.document["activations"])
    assert "1 activated" in record.summary
    whole, _outcomes = await run.journal.get(record.decision_id)
    decision, memory, _ = replayed(whole, brain=wants)
    assert [a.worker_id for a in decision.activations] == [
        a["worker_id"] for a in record.document["activations"]
    ]
    assert [c.kind for c in memory.changing] == ["activate"]


async def test_what_it_took_is_told_with_the_decision_and_expected_the_next_time() -> None:
    wants = Follows(1, 1)
    run = await planner(
        World(HandClock()), merged(policy(), {"decode": {"standby": 1}}), brain=wants
    )
    await run.step(10)
    wants.wanted = (1, 2)
    await run.step(4)
    told = await run.journal.outcomes(MODEL, "activated", limit=9)
    assert [o.document["seconds"] for o in told] == [pytest.approx(1.0, abs=0.6)]
    stood_by = await run.journal.outcomes(MODEL, "stood_by", limit=9)
    assert stood_by[0].document["sample"]["ready_s"] == pytest.approx(5.4, abs=0.5)
    known = run.service._book.changes(now_s=run.world.clock.now_s)
    assert known["decode/h200-slow10/activate"].count == 1
    state = await run.service.state()
    assert state["pools"]["decode"]["standby"] in (0, 1)


@pytest.mark.parametrize(
    ("worker", "memory", "said"),
    [
        (view("w", P, DRAINING, told="flip"), Memory(), "prefill: w was told by hand"),
        (view("w", D, DRAINING, told="flip"), Memory(), "decode: w was told by hand"),
        (view("w", P, DRAINING, told="flip"), told("w", "flip", "decode"), ""),
        (view("w", P, STANDBY, told="activate"), Memory(), ""),
        (view("w", P), Memory(owned_p=Owned(known=("w",))), ""),
        # It was a P worker in the last look, and nobody saw it change.
        (view("w", D), Memory(owned_p=Owned(known=("w",))), "prefill: w was told by hand"),
        (view("w", D), replace(told("w", "flip", "decode"), owned_p=Owned(known=("w",))), ""),
    ],
)
def test_a_flip_that_no_planner_asked_for_is_told_apart(
    worker: WorkerView, memory: Memory, said: str
) -> None:
    found = [f"{r.pool}: {r.text}" for r in fast.by_hand(seen(worker), memory)]
    assert [text.startswith(said) for text in found] == ([True] if said else [])


@pytest.mark.parametrize("least", [1, 3])
async def test_a_flip_by_hand_is_no_loss_of_a_worker(least: int) -> None:
    world = World(HandClock(), rps=lambda _t: 1.0)
    run = await planner(world, merged(policy(), {"prefill": {"min": 3}}))
    await run.step(25)
    await run.service.set_policy({"prefill": {"min": least}}, merge=True)
    await run.step(1)
    chosen = world.members(P, READY)[0].order.worker_id
    await world.flip(chosen, role=D, leader_epoch=run.service._leadership.epoch)
    before = len(run.decisions)
    await run.step(12)
    why = [r for d in run.decisions[before:] for r in d.why if r.pool == "prefill"]
    assert not [r for r in why if r.code == "lost" or "what was lost" in r.text]
    turned = [r for r in why if r.code == "turned_by_hand"]
    assert turned
    assert turned[0].text.startswith(f"{chosen} was told by hand to serve decode")
    _record, outcomes = await run.journal.get(world.boxes[chosen].order.scale_decision_id)
    kinds = {o.kind for o in outcomes if o.subject == chosen}
    assert "flipped" in kinds and "left" not in kinds
    replaced = {r.text for r in why if r.code == "replace"}
    if least == 1:
        assert "the other 2 are enough" in turned[0].text and not replaced
    else:
        assert f"1 ordered in its place ({chosen} was told by hand" in replaced.pop()
