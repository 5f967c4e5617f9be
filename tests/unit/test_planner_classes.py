"""Pools of several classes and modes: what is ordered, refused, given up, and on which node."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField, NotFound, UnknownField
from readyplane.core.identity import ArtifactKind, Manifest
from readyplane.core.startup import StartMode, StartQuantiles, StartSample, WeightTier
from readyplane.core.worker import Role, WorkerState
from readyplane.ports import Order, Source, StartChoice, StartNode, StartPlacement
from readyplane_lab.simulator.artifact import one_tensor_manifest
from readyplane_planner.decide import POOLS, Memory, decide
from readyplane_planner.decide.values import Denied
from readyplane_planner.journal import replay
from readyplane_planner.optimise.modes import ModeOffer, choose_mode
from readyplane_planner.optimise.nodes import NodeOffer, prefer, to_place
from readyplane_planner.places import Places
from readyplane_planner.policy import make_plan, read_policy
from readyplane_planner.signals import Kind, Signal
from readyplane_planner.starts import StartBook, t_ready
from tests.unit.planner_world import DIGEST, MODEL, HandClock, World, planner, policy
from tests.unit.test_planner_follow import NOW_S, seen, view

SLOW = "h200-slow10"


@pytest.fixture
def fast(tmp_path: Path) -> str:
    """Profile of a class that is twice as fast and takes two GPUs."""
    return profile(tmp_path, "fast", slow_factor=5.0, gpus=2)


def profile(folder: Path, name: str, **changes: Any) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"extends": SLOW, "name": name, "worker_class": name, **changes}))
    return str(path)


def both(fast: str, *, slow_price: float = 1.0, fast_price: float = 1.0, **slow: Any) -> Any:
    return [
        {"worker_class": SLOW, "profile": SLOW, "price": slow_price, **slow},
        {"worker_class": "fast", "profile": fast, "price": fast_price},
    ]


def busy(rps: float = 5.0, **changes: Any) -> World:
    return World(HandClock(), rps=lambda t: 0.5 if t < 20 else rps, **changes)


def ordered(world: World, role: Role) -> Counter[str]:
    return Counter(o.worker_class for o in world.provisions if o.role is role)


# --------------------------------------------------------------------------- choice of the class


async def test_each_pool_starts_the_class_whose_work_is_cheapest(fast: str) -> None:
    """Two GPUs at half the price do the work of two others, for what one of those costs."""
    w = busy()
    classes = both(fast, fast_price=0.5)
    run = await planner(w, policy(prefill={"classes": classes}, decode={"classes": classes}))
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    await run.step(60)
    assert ordered(w, Role.PREFILL)["fast"] >= 1
    assert not ordered(w, Role.PREFILL)[SLOW]
    said = [r for d in run.decisions for r in d.why if r.code == "choice"]
    assert "fast" in said[0].text and SLOW in said[0].text


async def test_at_a_worse_price_the_slow_one_is_taken_and_counts_for_what_it_is(fast: str) -> None:
    w = busy(rps=7.0)
    dear = {"classes": both(fast, fast_price=1.6), "max": 16}
    alike = {"p50_s": 10.0, "p90_s": 10.0, "p99_s": 15.0}
    run = await planner(w, policy(prefill=dear, t_ready_prior=alike))
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 2)
    await run.step(60)
    assert ordered(w, Role.PREFILL)[SLOW] >= 1
    assert not ordered(w, Role.PREFILL)["fast"]


async def test_b35_a_refused_class_is_left_alone_and_the_other_one_taken(fast: str) -> None:
    asked: list[tuple[float, str]] = []

    def refuse(order: Order) -> str:
        if order.role is Role.PREFILL:
            asked.append((w.clock.now_s, order.worker_class))
        return "no quota" if order.worker_class == "fast" else ""

    w = busy(rps=7.0, refuse=refuse)
    run = await planner(w, policy(prefill={"classes": both(fast, fast_price=0.9)}))
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 2)
    await run.step(90)
    first_s = next(at for at, name in asked if name == "fast")
    assert ordered(w, Role.PREFILL)[SLOW] >= 1, "the dearer one, and soon"
    assert min(b.allocated_s for b in w.boxes.values() if b.order in w.provisions) < first_s + 20
    times = sorted({at for at, name in asked if name == "fast"})
    assert all(b - a >= 5.0 for a, b in pairwise(times)), "with pauses"
    denied = [r.text for d in run.decisions for r in d.why if r.code == "denied"]
    assert "fast was refused" in denied[0] and "no quota" in denied[0]


async def test_b35_refusals_do_not_turn_the_target(fast: str) -> None:
    """Nothing is to be had for two minutes: asked for with pauses, and the targets stay."""
    del fast
    asked: list[float] = []

    def refuse(order: Order) -> str:
        if order.role is Role.PREFILL and w.clock.now_s < w.begun_s + 160:
            asked.append(w.clock.now_s)
            return "no capacity"
        return ""

    w = busy(rps=6.0, refuse=refuse)
    run = await planner(w)
    w.add(Role.PREFILL, 2)
    w.add(Role.DECODE, 2)
    await run.step(200)
    wanted = [p for t, p, _d in run.desired if 40 <= t <= 155]
    turns = sum(b < a for a, b in pairwise(wanted))
    assert turns <= 1, wanted
    assert 3 <= len(set(asked)) <= 12
    grown = [
        b for b in w.boxes.values() if b.order.role is Role.PREFILL and b.order in w.provisions
    ]
    assert grown, "as soon as it may"


async def test_the_dear_one_goes_first_and_minimum_and_budget_hold(fast: str) -> None:
    w = World(HandClock(), rps=lambda t: 9.0 if t < 60 else 0.2)
    classes = both(fast, fast_price=1.2, min=1, max=2)
    run = await planner(
        w,
        policy(
            prefill={"classes": classes, "max": 6},
            budget_gpus=12,
            down={"hold_s": 10.0, "cooldown_s": 5.0, "window_s": 5.0},
        ),
    )
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 2)
    gpus = {SLOW: 1, "fast": 2}
    most = 0
    for _ in range(160):
        await run.step(1)
        held = [b for b in w.boxes.values() if b.alive]
        most = max(most, sum(gpus[b.order.worker_class] for b in held))
        cheap = [b for b in held if b.order.role is Role.PREFILL and b.order.worker_class == SLOW]
        assert len(cheap) <= 2
    assert 5 < most <= 12
    left = w.members(Role.PREFILL, WorkerState.READY, WorkerState.PROVISIONED)
    assert [b.order.worker_class for b in left] == [SLOW], "the dear ones are gone"


async def test_a_decision_with_classes_replays(fast: str) -> None:
    w = busy(rps=7.0)
    nodes = [{"name": "n1", "gpus": 4}]
    wanted = policy(prefill={"classes": both(fast)}, start_mode="auto", nodes=nodes)
    run = await planner(w, wanted)
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 2)
    await run.step(40)
    made = [d for d in run.decisions if d.orders]
    assert made
    record, _outcomes = await run.journal.get(made[-1].decision_id)
    assert replay(record) == made[-1]
    assert made[-1].orders[0].why


@settings(max_examples=40, deadline=None)
@given(
    rps=st.floats(0.0, 200.0),
    queue=st.floats(0.0, 1e6),
    held=st.tuples(*[st.integers(0, 5)] * 4),
    quota=st.integers(0, 6),
    most=st.integers(2, 12),
    budget=st.none() | st.integers(8, 40),
    denied=st.sampled_from(["", SLOW, "fast"]),
)
def test_r23_no_mix_gets_past_quota_bounds_or_budget(
    rps: float,
    queue: float,
    held: tuple[int, int, int, int],
    quota: int,
    most: int,
    budget: int | None,
    denied: str,
) -> None:
    """Whatever is asked for of whatever fleet: nothing is ordered beyond any limit."""
    with tempfile.TemporaryDirectory() as folder:
        fast = profile(Path(folder), "fast", slow_factor=5.0, gpus=2)
        limits = {"max": most, "classes": both(fast, fast_price=0.8)}
        limits["classes"][1]["max"] = quota
        wanted = policy(
            prefill=limits,
            decode=limits,
            budget_gpus=budget,
            up={"max_step": 8, "pending_max": 8},
            start_mode="auto",
        )
        plan = make_plan(wanted, version=1, manifest_digest=DIGEST)
    kinds = [(r, c) for r in (Role.PREFILL, Role.DECODE) for c in (SLOW, "fast")]
    workers = [
        replace(view(f"{role[0]}-{name}-{i}", role), worker_class=name)
        for (role, name), count in zip(kinds, held, strict=True)
        for i in range(count)
    ]
    work = {"arrivals": rps, "prefill_work": rps * 1000, "queue": queue, "decoding": rps * 20}
    known: dict[str, Any] = {n: Signal(Kind.FRESH, value, "") for n, value in work.items()}
    observation = replace(seen(workers), dt_s=2.0, **known)
    left = tuple(Denied(pool, denied, 1, NOW_S, NOW_S + 30.0) for pool in POOLS if denied)
    memory = Memory(denied=left)
    decision, _after = decide(observation, plan, memory, now_s=NOW_S, decision_id="d1-000001")
    gpus = {SLOW: 1, "fast": 2}
    held_gpus = sum(gpus[w.worker_class] for w in workers)
    new_gpus = sum(gpus[o.worker_class] for o in decision.orders)
    assert not new_gpus or budget is None or held_gpus + new_gpus <= budget
    targets = decision.prefill.target + decision.decode.target
    assert budget is None or targets <= max(budget, len(workers), 2), "each is one GPU at least"
    for role, pool in zip((Role.PREFILL, Role.DECODE), POOLS, strict=True):
        mine = [o for o in decision.orders if o.pool == pool]
        there = [w for w in workers if w.role is role]
        fast_ones = sum(w.worker_class == "fast" for w in there)
        ordered_fast = sum(o.worker_class == "fast" for o in mine)
        assert not mine or len(there) + len(mine) <= most
        assert not ordered_fast or fast_ones + ordered_fast <= quota
        assert denied not in {o.worker_class for o in mine}


# --------------------------------------------------------------------------- spare and mode


async def test_spare_workers_stand_beside_the_need() -> None:
    counts = []
    for spare in (0, 2):
        w = World(HandClock(), rps=lambda _t: 2.0)
        run = await planner(w, policy(prefill={"spare": spare}))
        w.add(Role.PREFILL, 2)
        w.add(Role.DECODE, 2)
        await run.step(60)
        counts.append(run.desired[-1][1])
    assert counts[1] == counts[0] + 2


MODES = [
    ModeOffer("jit", 60.0),
    ModeOffer("eager", 36.0, 1.3),
    ModeOffer("aot", 45.0, 1.0, 0, "nothing was compiled ahead"),
]


@pytest.mark.parametrize(
    ("life_s", "in_time_s", "compiled", "mode"),
    [
        (1800.0, 60.0, False, "jit"),  # what stays is worth a compilation
        (40.0, 60.0, False, "eager"),  # a burst is over before it pays
        (600.0, 0.0, False, "eager"),  # needed now: every second late costs
        (7200.0, 0.0, False, "jit"),  # and still not for hours of slower serving
        (1800.0, 60.0, True, "aot"),
        (7200.0, 0.0, True, "aot"),
    ],
)
def test_the_mode_costs_least_over_the_life_of_the_capacity(
    life_s: float, in_time_s: float, compiled: bool, mode: str
) -> None:
    offers = [*MODES[:2], ModeOffer("aot", 45.0) if compiled else MODES[2]]
    found = choose_mode(
        offers, price_per_s=0.5, life_s=life_s, in_time_s=in_time_s, missed_per_s=10.0
    )
    assert found.mode == mode
    assert "eager" in found.why and ("compiled ahead" in found.why) is not compiled


async def test_a_start_that_is_needed_now_is_eager_and_says_why() -> None:
    w = busy(rps=7.0)
    run = await planner(w, policy(start_mode="auto"))
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 2)
    for box in w.boxes.values():
        box.allocated_s = box.ready_s - 200.0
    await run.step(45)
    modes = [o.mode for o in w.provisions if o.role is Role.PREFILL]
    assert modes[0] is StartMode.EAGER
    said = [r.text for d in run.decisions for r in d.why if r.code == "choice"]
    assert "eager" in said[0] and "jit" in said[0]


def test_modes_have_their_own_quantiles_and_lean_on_the_usual_one() -> None:
    plan = make_plan(policy(start_mode="auto"), version=1, manifest_digest=DIGEST)
    book, prior = StartBook(), StartQuantiles(60.0, 90.0, 120.0, 0, 0.0)
    assumed = t_ready(book, plan, prior=prior, now_s=0.0)
    assert assumed["prefill"].p50_s == 60.0
    assert assumed[f"prefill/{SLOW}/eager"].p50_s == 36.0
    for took_s in (20.0,) * 6:
        book.add(Role.PREFILL, StartSample(SLOW, WeightTier.L1_HOST, StartMode.JIT, 0, took_s, 1))
    found = t_ready(book, plan, prior=prior, now_s=2.0)
    assert found["prefill"].p50_s == 20.0
    assert found[f"prefill/{SLOW}/eager"].p50_s == pytest.approx(12.0)
    book.add(Role.PREFILL, StartSample(SLOW, WeightTier.L1_HOST, StartMode.EAGER, 0, 15.0, 3))
    found = t_ready(book, plan, prior=prior, now_s=4.0)
    assert found[f"prefill/{SLOW}/eager"].p50_s == 15.0
    assert f"prefill/{SLOW}/eager" not in t_ready(
        book,
        make_plan(policy(), version=1, manifest_digest=DIGEST),
        prior=prior,
        now_s=4.0,
    )


# --------------------------------------------------------------------------- nodes

HERE = NodeOffer("here", places=1, fetch_s=2.0, tier="L2", source_node="here")
FREE = NodeOffer("free", places=2, fetch_s=20.0, tier="L4", source_node="")
SOON = NodeOffer("soon", places=0, free_s=5.0, fetch_s=2.0, tier="L1", source_node="soon")
NEVER = NodeOffer("never", places=0, free_s=math.inf, fetch_s=1.0)


def test_r8_2_a_node_free_later_that_holds_the_model_may_win() -> None:
    first, second, third, fourth = prefer([FREE, SOON, NEVER, HERE], 4, init_s=10.0)
    assert first.nodes == ("here", "soon", "free")
    assert second.nodes == ("soon", "free")
    assert third.nodes == fourth.nodes == ("free",)
    assert "here in 12.0 s (free now, artifact 2.0 s from its own L2)" in first.why
    assert len(prefer([FREE], 5, init_s=0.0)) == 2
    unknown = NodeOffer("unknown", places=4)
    assert prefer([unknown, FREE], 1, init_s=0.0)[0].nodes == ("free", "unknown")


def test_r8_3_what_is_fetched_from_far_is_named_for_placing() -> None:
    assert [o.node for o in to_place([HERE, FREE], 3, init_s=1.0)] == ["free"]
    assert to_place([HERE], 1, init_s=1.0) == []


class Registry:
    """Two nodes, one of which holds the weights; something compiled for one mode."""

    def __init__(self) -> None:
        self.asked = 0

    async def resolve(self, reference: str, *, kind: str = "weights", need: Any = None) -> Manifest:
        self.asked += 1
        if kind == ArtifactKind.COMPILE and need == {"key.mode": "aot"}:
            return Manifest(
                kind=ArtifactKind.COMPILE,
                model=reference,
                files=one_tensor_manifest(MODEL).files,
                key={"mode": "aot"},
            )
        raise NotFound(kind, reference)

    async def place_start(
        self, digest: str, *, nodes: Sequence[StartNode], starts: int = 1, layout_digest: str = ""
    ) -> StartPlacement:
        self.asked += 1
        near = Source("s", digest, WeightTier.L2_NVME, "file:///x", node="n1")
        store = Source("s", digest, WeightTier.L4_OBJECT, "http://127.0.0.1:1")
        assert {node.node for node in nodes} <= {"n1", "n2", "far"}
        return StartPlacement(
            (StartChoice("n1", near, 0.0, 2.0, 0.0, 2.0, "place 1"),),
            (StartChoice("n2", store, 0.0, 30.0, 0.0, 30.0, "place 2"),),
            ("node far: nobody gives the artifact",),
        )


async def test_the_registry_is_asked_seldom_and_for_what_may_be_chosen_only() -> None:
    registry = Registry()
    places = Places(registry, every_s=15.0, timeout_s=5.0)
    nodes = [{"name": n, "gpus": 2} for n in ("n1", "n2", "far")]
    usual = make_plan(policy(), version=1, manifest_digest=DIGEST)
    await places.look(usual, now_s=0.0)
    assert registry.asked == 0
    plan = make_plan(policy(start_mode="auto", nodes=nodes), version=1, manifest_digest=DIGEST)
    await places.look(plan, now_s=1.0)
    assert places.compiled == ("aot",)
    assert [(v.node, v.fetch_s, v.tier) for v in places.nodes] == [
        ("n1", 2.0, "L2"),
        ("n2", 30.0, "L4"),
        ("far", None, "unknown"),
    ]
    asked = registry.asked
    await places.look(plan, now_s=10.0)
    assert registry.asked == asked
    await places.look(plan, now_s=17.0)
    assert registry.asked == 2 * asked


async def test_orders_carry_the_nodes_and_decisions_the_placements() -> None:
    w = busy(rps=8.0)
    nodes = [{"name": "n1", "gpus": 1}, {"name": "n2", "gpus": 8}]
    run = await planner(w, policy(nodes=nodes))
    run.service._places = Places(Registry(), every_s=15.0, timeout_s=5.0)
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 2)
    await run.step(45)
    first = next(d for d in run.decisions if d.orders)
    assert first.orders[0].nodes[0] == "n1"
    assert w.provisions[0].node_preference == first.orders[0].nodes
    assert any(r.code == "node" and "n1" in r.text for r in first.why)
    placed = [p for d in run.decisions for p in d.placements]
    assert {p.node for p in placed} == {"n2"}
    assert placed[0].digest == DIGEST


# --------------------------------------------------------------------------- policy


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prefill": {"classes": "both", "worker_class": "b300"}}, "policy.prefill.worker_class"),
        ({"prefill": {"classes": "twice"}}, "policy.prefill.classes"),
        ({"prefill": {"classes": "wrong"}}, "policy.prefill.classes.1.worker_class"),
        ({"decode": {"classes": "slow"}}, "policy.decode.classes.1"),
        ({"decode": {"classes": "small"}}, "policy.decode.classes.1"),
        ({"prefill": {"classes": "slow"}, "slo": {"ttft_s": 0.5}}, "policy.prefill.classes.1"),
        ({"prefill": {"classes": "quota", "min": 4}}, "policy.prefill.classes.max"),
        ({"prefill": {"classes": "bounds"}}, "policy.prefill.classes.1.min"),
        ({"prefill": {"spare": 8, "max": 8}}, "policy.prefill.spare"),
        ({"nodes": [{"name": "n", "gpus": 0}]}, "policy.nodes.0.gpus"),
    ],
)
def test_classes_that_cannot_be_are_refused(
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    slow = {"worker_class": SLOW, "profile": SLOW}
    other = {"worker_class": "fast", "profile": profile(tmp_path, "fast", slow_factor=5.0)}
    tardy = {"worker_class": "tardy", "profile": profile(tmp_path, "tardy", slow_factor=200.0)}
    small = {"worker_class": "small", "profile": profile(tmp_path, "small", kv_capacity_tokens=900)}
    named = {
        "both": [slow, other],
        "twice": [slow, slow],
        "wrong": [slow, {**other, "worker_class": "named"}],
        "slow": [slow, tardy],
        "small": [slow, small],
        "quota": [{**slow, "max": 1}, {**other, "max": 2}],
        "bounds": [slow, {**other, "min": 3, "max": 2}],
    }
    document: dict[str, Any] = {"model": MODEL}
    for name, value in changes.items():
        filled = dict(value) if isinstance(value, dict) else value
        if isinstance(filled, dict) and "classes" in filled:
            filled["classes"] = named[filled["classes"]]
        document[name] = filled
    with pytest.raises(InvalidField) as error:
        read_policy(document)
    assert error.value.field == field


def test_the_reference_class_is_the_first_unless_it_is_named(fast: str) -> None:
    classes = both(fast)
    first = read_policy({"model": MODEL, "prefill": {"classes": classes}})
    assert (first.prefill.worker_class, first.prefill.profile) == (SLOW, SLOW)
    named = {"classes": classes, "worker_class": "fast"}
    other = read_policy({"model": MODEL, "prefill": named})
    assert other.prefill.profile == fast
    plan = make_plan(other, version=1, manifest_digest=DIGEST)
    assert plan.prefill.names == (SLOW, "fast")
    assert [c.price for c in plan.prefill.classes] == [1.0, 2.0]  # of a worker, two GPUs
    assert read_policy(other.document()) == other


def test_a_misspelled_field_of_a_class_is_sent_to_its_place(fast: str) -> None:
    classes = both(fast)
    classes[0]["prize"] = 2.0
    with pytest.raises(UnknownField) as error:
        read_policy({"model": MODEL, "prefill": {"classes": classes}})
    assert error.value.field == "policy.prefill.classes.0.prize"
    assert "price" in str(error.value)
