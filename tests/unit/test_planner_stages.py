"""Stages and kinds of standby as the planner sees, orders, tells and counts them; the mode's whole way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from readyplane import wire
from readyplane.core.errors import InvalidField
from readyplane.core.identity import Manifest
from readyplane.core.profile import ClassProfile
from readyplane.core.stage import CapacityStage, UpgradeState
from readyplane.core.startup import StartMode, StartQuantiles
from readyplane.core.worker import Holds, Role, Worker, WorkerState
from readyplane.kit.clock import SystemClock
from readyplane.kit.telemetry import Metrics
from readyplane.ports import Order
from readyplane.profiles import load as load_profile
from readyplane.v1 import actuator_pb2
from readyplane_agent.engines.modelled import settings as engine_settings
from readyplane_agent.engines.modelled.adapter import ModelledEngine
from readyplane_agent.ordered import own_engine
from readyplane_agent.settings import AgentSettings, parse
from readyplane_lab.up.actuator import LocalActuator, WorkerPlace
from readyplane_lab.up.processes import ProcessTable
from readyplane_planner.capacity import decode_model
from readyplane_planner.decide import Memory, fast
from readyplane_planner.decide.acting import act
from readyplane_planner.decide.demand import _holding
from readyplane_planner.decide.mixing import mixes, worth
from readyplane_planner.decide.pools import Pool, census, quantiles_of
from readyplane_planner.decide.values import Changing
from readyplane_planner.guard import Verdict
from readyplane_planner.metrics import PlannerMetrics
from readyplane_planner.outcomes import Follower
from readyplane_planner.policy import make_plan
from readyplane_planner.signals.fleet import _view
from readyplane_planner.standby_time import StandbyTime
from readyplane_planner.starts import StartBook
from tests.unit.agent_twins import artifact
from tests.unit.cli_world import worker
from tests.unit.planner_world import DIGEST, policy
from tests.unit.test_planner_fast import NOW_S, seen, view

D, STANDBY = Role.DECODE, WorkerState.STANDBY


def staged(
    state: UpgradeState, *, kv_tokens: int = 160_000, failure: str = "", took_s: float = 7.0
) -> Worker:
    found = worker("d-1", WorkerState.READY)
    assert found.serving is not None
    stage = CapacityStage(state, "h200-slow10", (1, 2), kv_tokens, 10, failure, took_s)
    blocks = kv_tokens // found.serving.block_size
    return replace(
        found,
        offer=replace(found.offer, role=D, scale_decision_id="x-1"),
        serving=replace(found.serving, stage=stage, kv_total_blocks=blocks),
    )


def seen_as(found: Worker) -> Any:
    return _view(found, None, 100.0, "", None)


# ------------------------------------------------------------------ capacity follows


@pytest.mark.parametrize(
    ("state", "mode"),
    [
        (UpgradeState.FIRST, "eager"),
        (UpgradeState.CAPTURING, "eager"),
        (UpgradeState.CHECKING, "eager"),
        (UpgradeState.ROLLED_BACK, "eager"),
        (UpgradeState.COMPLETE, "jit"),
        (UpgradeState.UNSUPPORTED, "jit"),
    ],
)
def test_a_worker_counts_as_what_it_runs_with(state: UpgradeState, mode: str) -> None:
    found = seen_as(staged(state, failure="why"))
    assert (found.mode, found.kv_published) == (mode, 160_000)


def test_an_upgrade_makes_it_worth_more_and_its_kv_less() -> None:
    plan = make_plan(policy(graph_stages=True), version=1, manifest_digest=DIGEST)
    assert plan.graph_stages and mixes(plan, "decode")
    values = worth("decode", seen(), plan, Memory())
    assert values["h200-slow10/eager"] < values["h200-slow10/jit"] == pytest.approx(1.0)
    profile = load_profile("h200-slow10")
    model = decode_model(profile, isl=1000.0, osl=200.0, factor=1.0)
    before, after = 100_000, 90_000
    pool = Pool("decode", ready=[seen_as(staged(UpgradeState.FIRST, kv_tokens=before))])
    assert _holding(model, profile, pool).kv_tokens == before
    pool = Pool("decode", ready=[seen_as(staged(UpgradeState.COMPLETE, kv_tokens=after))])
    assert _holding(model, profile, pool).kv_tokens == after


def test_b143_a_published_capacity_counts_and_never_for_more_than_the_profile() -> None:
    profile = load_profile("h200-slow10")
    assert profile.measured, "the profile alone would be believed"
    model = decode_model(profile, isl=1000.0, osl=200.0, factor=1.0)
    most = profile.kv_capacity_tokens
    for published, counted in ((most // 3, most // 3), (most * 2, most)):
        pool = Pool("decode", ready=[seen_as(staged(UpgradeState.COMPLETE, kv_tokens=published))])
        assert _holding(model, profile, pool).kv_tokens == counted


def test_a_policy_of_eager_starts_has_no_stages() -> None:
    with pytest.raises(InvalidField, match=r"policy\.graph_stages"):
        policy(graph_stages=True, start_mode="eager")


# ------------------------------------------------------------------ kinds of standby


def test_who_has_its_weights_is_told_before_who_has_a_process_and_for_less_long() -> None:
    bare = view("a", state=STANDBY, bare=True, standby_age_s=500.0)
    loaded = view("b", state=STANDBY, standby_age_s=5.0)
    first, second = fast.activations([bare, loaded], 2, "decode")
    assert (first.worker_id, first.deadline_s) == ("b", fast.ACTIVATE_S_MAX)
    assert (second.worker_id, second.deadline_s) == ("a", fast.LOAD_S_MAX)


def test_a_process_that_loads_is_expected_as_a_start_until_loads_were_seen() -> None:
    observation = seen(view("s", state=STANDBY, bare=True, told="activate"))
    plan = make_plan(policy(), version=1, manifest_digest=DIGEST)
    memory = Memory(changing=(Changing("s", "activate", "decode", NOW_S - 20.0, 900.0),))
    pool = census("decode", observation, plan, memory, now_s=NOW_S)
    (coming,) = pool.coming
    assert (coming.mode, coming.age_s) == (fast.LOAD, 20.0)
    assert quantiles_of(observation, "decode", coming) == observation.t_ready["decode"]
    known = StartQuantiles(4.0, 5.0, 6.0, 9, 0.0)
    key = f"decode/{coming.worker_class}/{fast.LOAD}"
    told = replace(observation, t_ready={**observation.t_ready, key: known})
    assert quantiles_of(told, "decode", coming) == known
    alone = census("decode", observation, plan, Memory(), now_s=NOW_S)
    assert [c.mode for c in alone.coming] == [fast.LOAD], "by the router's word alone"


def test_what_became_of_standbys_and_upgrades_is_told_once_and_a_load_is_no_cold_start() -> None:
    book = StartBook()
    follower = Follower(book)
    found = worker("d-1", STANDBY)
    offer = replace(found.offer, role=D, standby=True, holds=Holds.PROCESS, scale_decision_id="x-1")
    waits = replace(found, offer=offer, serving=None, holds=Holds.PROCESS)
    serves = replace(staged(UpgradeState.FIRST), offer=offer)
    upgraded = replace(staged(UpgradeState.COMPLETE), offer=offer)
    for at, each in enumerate([waits, waits, serves, upgraded, upgraded]):
        follower.look([each], (), fleet_known=True, now_s=200.0 + at, wall_s=1000.0 + at)
    told = {o.kind: o.document for o in follower.collect()}
    assert told["stood_by"] == {"holds": "process"}
    assert told["upgraded"]["seconds"] == 7.0 and told["upgraded"]["shapes"] == [1, 2]
    assert "ready" in told and "upgrade_failed" not in told
    prior = StartQuantiles(60.0, 90.0, 120.0, 0, 0.0)
    kept = book.quantiles(D, worker_class=offer.worker_class, mode="jit", prior=prior, now_s=300.0)
    assert kept == prior, "what came without its imports says nothing of a start"


def test_a_staged_start_says_nothing_of_a_whole_one() -> None:
    prior = StartQuantiles(60.0, 90.0, 120.0, 0, 0.0)
    book = StartBook()
    follower = Follower(book)
    follower.look([staged(UpgradeState.FIRST)], (), fleet_known=True, now_s=200.0, wall_s=1000.0)
    (outcome,) = [o for o in follower.collect() if o.kind == "ready"]
    assert outcome.document["sample"]["staged"] is True
    again = StartBook()
    again.recall([(outcome.document, 200.0)])
    worker_class = staged(UpgradeState.FIRST).offer.worker_class
    for each in (book, again):
        found = [
            each.quantiles(
                D, worker_class=worker_class, mode="jit", prior=prior, now_s=300.0, staged=kind
            ).count
            for kind in (True, False)
        ]
        assert found == [1, 0]


def test_an_upgrade_that_failed_is_told_with_its_reason() -> None:
    follower = Follower(StartBook())
    back = staged(UpgradeState.ROLLED_BACK, failure="other tokens")
    follower.look([back], (), fleet_known=True, now_s=200.0, wall_s=1000.0)
    (failed,) = [o for o in follower.collect() if o.kind == "upgrade_failed"]
    assert failed.document["why"] == "other tokens" and failed.subject == "d-1"


def test_gpu_hours_of_standbys_are_counted_by_what_they_hold() -> None:
    plan = make_plan(policy(), version=1, manifest_digest=DIGEST)
    gpus = plan.decode.profile.gpus
    standbys = [
        replace(worker("d-1", STANDBY), holds=holds)
        for holds in (Holds.PROCESS, Holds.WEIGHTS, Holds.WEIGHTS)
    ]
    standbys = [replace(w, offer=replace(w.offer, role=D)) for w in standbys]
    made, registry = StandbyTime(), Metrics()
    page = PlannerMetrics(registry)
    for now_s in (0.0, 2.0, 5.0, 500.0, 501.0):  # it was away between 5 and 500
        made.look([*standbys, worker("d-2", WorkerState.READY)], plan, now_s=now_s)
        page.stood(plan, made.seconds)
    assert made.by_pool("decode") == {"process": 6.0 * gpus, "weights": 12.0 * gpus}
    assert made.by_pool("prefill") == {}
    text = generate_latest(registry).decode()
    assert 'readyplane_standby_gpu_seconds_total{holds="weights"' in text


# ------------------------------------------------------------------ a mode's way to the engine


async def argv_of(tmp_path: Path, order: Order) -> list[str]:
    async with ProcessTable(tmp_path / "run", on_exit=lambda *_: None) as table:
        place = WorkerPlace("r:1", "g:2", tmp_path, tmp_path, {})
        made = LocalActuator(table, place, clock=SystemClock(), profile_of=lambda name: name)
        return made._argv(order)


class _Arena:
    """What `own_engine` asks of an arena."""

    def __init__(self, folder: Path) -> None:
        self.path, self.rank_paths = folder / "arena", (folder / "arena",)


def engine_told(
    s: AgentSettings, manifest: Manifest, profile: ClassProfile, folder: Path
) -> engine_settings.ModelledSettings:
    spec = own_engine(
        s,
        manifest,
        _Arena(folder),  # type: ignore[arg-type]
        engine_id="e",
        profile=profile,
        compiles=True,
        graph_stages=s.graph_stages,
    )
    return engine_settings.parse(ModelledEngine().command(spec)[3:])


@pytest.mark.parametrize(
    ("mode", "stages", "holds"),
    [
        (StartMode.EAGER, False, Holds.WEIGHTS),
        (StartMode.JIT, True, Holds.PROCESS),
        (StartMode.AOT, False, Holds.ASLEEP),
    ],
)
async def test_a_chosen_mode_arrives_at_the_engines_process(
    tmp_path: Path, mode: StartMode, stages: bool, holds: Holds
) -> None:
    """Order, its message, the actuator's command line, the agent's settings, the engine's flags."""
    ordered = Order(
        "d-1", D, "tiny", "h200-slow10", "sha256:x", mode=mode, standby=True, holds=holds,
        graph_stages=stages,
    )  # fmt: skip
    message = actuator_pb2.Order.FromString(wire.order_to_proto(ordered).SerializeToString())
    assert wire.order_from_proto(message) == ordered
    argv = await argv_of(tmp_path, wire.order_from_proto(message))
    work = tmp_path / "d-1"
    work.mkdir()
    s = parse(argv[3:], {})
    assert (s.mode, s.standby, s.holds, s.graph_stages) == (mode, True, holds, stages)
    told = engine_told(s, artifact().manifest, load_profile("h200-slow10"), work)
    assert (told.mode, told.graph_stages) == (mode, stages)


def test_the_planner_orders_what_its_policy_says() -> None:
    wanted = policy(
        graph_stages=True, decode={"standby": 1, "standby_holds": "process"}, start_mode="jit"
    )
    plan = make_plan(wanted, version=1, manifest_digest=DIGEST)
    observation = seen(view("d-0"), view("p-0", Role.PREFILL))
    pools = (
        census("prefill", observation, plan, Memory(), now_s=NOW_S),
        census("decode", observation, plan, Memory(), now_s=NOW_S),
    )
    acted = act(
        observation, plan, Memory(), pools, (Verdict(2, 1, 0), Verdict(1, 0, 0)), [], "x-1",
        now_s=NOW_S,
    )  # fmt: skip
    by = {(o.pool, o.standby): o for o in acted.orders}
    grown, waits = by["prefill", False], by["decode", True]
    assert (grown.graph_stages, grown.holds, grown.mode) == (True, "weights", "jit")
    assert (waits.holds, waits.graph_stages) == ("process", True)
