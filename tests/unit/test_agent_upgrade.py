"""Staged graphs as agent protocol: its table, its check, and what is promised in any order of faults."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core import gate_checks as gc
from readyplane.core.errors import Conflict, InvalidField, LostLease, Unavailable
from readyplane.core.stage import CapacityStage, UpgradeState
from readyplane.core.startup import SegmentName, critical_path
from readyplane.core.worker import CheckResult, Lease, Role, Serving
from readyplane.kit.clock import Clock
from readyplane.ports import Directive, GateVerdict
from readyplane_agent import life as life_module
from readyplane_agent.lifecycle import ExitCode, State
from readyplane_agent.reuse import Reuse
from readyplane_agent.settings import AgentSettings
from readyplane_agent.starting import Started
from readyplane_agent.trace import StartTrace
from readyplane_agent.upgrade import TRANSITIONS, Step, Terms, judged, questions, step, why_not
from readyplane_agent.upgrading import Upgrading
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop, run_virtual
from readyplane_router.stages import why_not_stage
from tests.unit.agent_world import World, living, ready, until
from tests.unit.staged_twin import BLOCKS, EACH, SHAPES, StagedTwin

AFTER = BLOCKS - EACH * len(SHAPES)


# ------------------------------------------------------------------ the table


@given(st.lists(st.sampled_from(list(Step)), max_size=12))
def test_complete_only_by_every_step_in_order_and_a_failure_is_for_good(events: list[Step]) -> None:
    state, failed = UpgradeState.FIRST, False
    passed: list[Step] = []
    for event in events:
        try:
            state = step(state, event)
        except Conflict:
            continue
        passed = [] if event is Step.INTERRUPTED and state is UpgradeState.FIRST else passed
        passed = [*passed, event]
        failed = failed or event is Step.FAILED
        assert (state is UpgradeState.ROLLED_BACK) == failed
        if state is UpgradeState.COMPLETE:
            steps = [e for e in passed if e is not Step.INTERRUPTED]
            assert steps == [Step.RESERVED, Step.CAPTURED, Step.CHECKED]


def test_every_state_can_be_interrupted_and_nothing_leads_out_of_a_roll_back() -> None:
    assert all((state, Step.INTERRUPTED) in TRANSITIONS for state in UpgradeState)
    left = {after for (at, _), after in TRANSITIONS.items() if at is UpgradeState.ROLLED_BACK}
    assert left == {UpgradeState.ROLLED_BACK}


async def plan_of(**changes: Any) -> Any:
    return replace(await StagedTwin().graphs(), **changes)


async def test_an_upgrade_that_costs_too_much_kv_is_not_made() -> None:
    plan = await plan_of()
    assert why_not(plan, max_model_len=512, block_size=16) == ""
    assert "fewer than one request" in why_not(plan, max_model_len=AFTER * 16 + 1, block_size=16)
    short = replace(plan, kv_blocks_after=BLOCKS // 2 - 1)
    assert "are kept" in why_not(short, max_model_len=16, block_size=16)


async def test_the_check_names_what_differs() -> None:
    plan = await plan_of()
    done = await plan_of(kv_total_blocks=AFTER, kv_blocks_after=AFTER, captured=SHAPES)
    same = [(1, 2), (3,)]
    assert judged(same, same, done, plan).passed
    other = judged(same, [(1, 2), (4,)], done, plan)
    assert not other.passed and "[1]" in other.reason
    assert "no token" in judged([()], [()], done, plan).reason
    few = judged(same, same, replace(done, kv_total_blocks=AFTER - 1), plan)
    assert f"{AFTER - 1} KV blocks left, promised {AFTER}" in few.reason
    assert "[8]" in judged(same, same, replace(done, captured=SHAPES[:-1]), plan).reason


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.integers(2, 10_000))
def test_the_questions_are_of_the_canarys_tokens_and_fit(prompt: list[int], most: int) -> None:
    asked = questions(prompt, max_model_len=most)
    assert asked[0] == tuple(prompt) and len(asked) > 4
    assert all(0 < len(q) <= max(1, most // 2) and set(q) <= set(prompt) for q in asked[1:])


# ------------------------------------------------------------------ any order of faults


@dataclass
class Believing:
    """A router that believes what the real judgement lets it; `faults`: what it does, call by call."""

    engine: StagedTwin
    serving: Serving
    faults: list[str]
    said: list[CapacityStage] = field(default_factory=list)

    async def admit(
        self, _id: str, _inc: str, epoch: int, *, serving: Serving, checks: Sequence[CheckResult]
    ) -> GateVerdict:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "away":
            raise Unavailable("router is away", "wait")
        if fault == "refuses":
            return GateVerdict(False, ("not today",))
        reasons = why_not_stage(self.serving, serving, checks)
        assert reasons == [], reasons
        assert serving.stage is not None
        self.serving = serving
        self.said.append(serving.stage)
        assert serving.kv_total_blocks <= self.engine.blocks, "never more than the engine has"
        if serving.stage.compiled:
            assert self.engine.used == SHAPES, "never faster than the engine is"
        return GateVerdict(True)


async def upgraded(
    clock: Clock, engine: StagedTwin, faults: list[str], interrupted_s: Sequence[float]
) -> tuple[Believing, Started, Upgrading]:
    started = Started(Role.DECODE)
    terms = Terms("h200-slow10", 16)
    engine.spec = _spec()
    started.stage = terms.first(await engine.graphs())
    started.serving = replace(engine.serving(), stage=started.stage)
    router = Believing(engine, started.serving, faults)
    made = Upgrading(
        AgentSettings(
            worker_id="w",
            role=Role.DECODE,
            model="m",
            router="r",
            work_dir=Path("/tmp"),
            registry="g",
            graph_stages=True,
        ),
        router=router,  # type: ignore[arg-type]
        engine=engine,
        started=started,
        clock=clock,
        trace=StartTrace(clock, process_start_s=0.0),
        lease=lambda: Lease("w", "i", 1, 10.0),
        told=lambda: None,
    )
    made.begin()
    for wait_s in interrupted_s:
        await clock.sleep(wait_s)
        await made.interrupt("a test")
        # What comes between proves everything anew: the router is told what is promised now.
        router.serving = replace(
            engine.serving(), stage=started.stage, kv_total_blocks=started.stage.kv_tokens // 16
        )
        started.serving = router.serving
        assert started.stage.kv_tokens <= engine.blocks * 16
        made.begin()
    while made._task is not None and not made._task.done():
        await clock.sleep(0.5)
    return router, started, made


def _spec() -> Any:
    class Spec:
        manifest_digest = "sha256:" + "0" * 64

    return Spec()


FAULTS = st.lists(st.sampled_from(["", "", "", "away", "refuses"]), max_size=6)


@given(
    faults=FAULTS,
    fails_at=st.none() | st.integers(0, 3),
    other=st.booleans(),
    keeps=st.sampled_from([0, 0, 0, 3]),
    engine_away_s=st.none() | st.floats(0.0, 0.3),
    interrupted_s=st.lists(st.floats(0.0, 0.2), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_whatever_fails_when_nobody_is_promised_more_than_there_is(
    faults: list[str],
    fails_at: int | None,
    other: bool,
    keeps: int,
    engine_away_s: float | None,
    interrupted_s: list[float],
) -> None:
    loop = VirtualLoop()
    clock = VirtualClock(loop)
    engine = StagedTwin()
    engine.fails_at, engine.other_tokens, engine.keeps = fails_at, other, keeps

    async def run() -> None:
        async def away() -> None:
            assert engine_away_s is not None
            await clock.sleep(engine_away_s)
            engine.away = True

        leaves = asyncio.create_task(away()) if engine_away_s is not None else None
        router, started, made = await upgraded(clock, engine, list(faults), interrupted_s)
        if leaves is not None:
            await asyncio.wait({leaves})
        stage = started.stage
        assert stage is not None
        if stage.state is UpgradeState.COMPLETE:
            assert engine.used == SHAPES and stage.kv_tokens == AFTER * 16
            assert not (other or keeps or fails_at is not None)
        else:
            assert stage.state is UpgradeState.ROLLED_BACK and stage.failure
            assert not stage.compiled
            assert "drop_captured" in engine.calls or engine.away
            calls = len(engine.calls)
            made.begin()  # what failed is not tried again
            await clock.sleep(1.0)
            assert len(engine.calls) == calls
        if engine_away_s is None:
            assert router.serving.kv_total_blocks <= engine.blocks
            tried = {"refuses", "away"} & set(faults)
            if fails_at is None and not (other or keeps or tried):
                assert stage.state is UpgradeState.COMPLETE

    run_virtual(run(), loop=loop)


# ------------------------------------------------------------------ in a life


@pytest.fixture
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINE_WATCH_S", "DRAIN_NEWS_S", "STANDBY_NEWS_S"):
        monkeypatch.setattr(life_module, name, 0.05)


def staged_world(w: World, **faults: Any) -> StagedTwin:
    engine = StagedTwin()
    for name, value in faults.items():
        setattr(engine, name, value)
    w.engine = engine
    w.life = w._life("w1-abc")
    return engine


def told(w: World) -> list[CapacityStage]:
    return [s.stage for s, _ in w.router.admitted if s.stage is not None]


async def test_b142_code_is_kept_when_all_of_it_is_there_and_no_sooner(
    tmp_path: Path, brisk: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[UpgradeState] = []

    async def keep(_self: object, _manifest: object) -> None:
        stage = w.life.started.stage
        assert stage is not None
        kept.append(stage.state)

    monkeypatch.setattr(Reuse, "keep_compiled", keep)
    async with living(tmp_path, graph_stages=True) as w:
        staged_world(w)
        await ready(w)
        await until(lambda: bool(kept))
        assert kept == [UpgradeState.COMPLETE]


async def test_a_life_serves_at_once_and_is_upgraded_behind_it(tmp_path: Path, brisk: None) -> None:
    async with living(tmp_path, graph_stages=True) as w:
        engine = staged_world(w)
        running = await ready(w)
        assert engine.spec is not None and engine.spec.graph_stages
        await until(lambda: len(w.router.admitted) == 4)
        states = [stage.state for stage in told(w)]
        assert states == [
            UpgradeState.FIRST,
            UpgradeState.CAPTURING,
            UpgradeState.CHECKING,
            UpgradeState.COMPLETE,
        ]
        assert [s.kv_total_blocks for s, _ in w.router.admitted] == [BLOCKS, AFTER, AFTER, AFTER]
        (check,) = w.router.admitted[-1][1]
        assert check.name == gc.GRAPH_STAGE and check.passed
        assert len(check.evidence["answers"]) >= 2
        # The later stage is shown with the start, and is no part of T_ready.
        await until(lambda: any(_later(r.progress) for r in w.router.renewals))
        segments = w.life.trace.segments()
        assert w.life.up_s is not None
        path = critical_path(segments, start_s=w.life.trace.begin_s, end_s=w.life.up_s + 100)
        assert SegmentName.GRAPH_STAGE not in path.inclusive_s
        page = w.life.metrics()
        assert 'readyplane_agent_graph_stage{worker_id="w1",pool="prefill"' in page
        assert 'state="complete"} 2' in page and 'outcome="complete"} 1' in page
        listed = re.findall(
            r"^\| `(readyplane_agent_(?:graph_\w+|upgrades_total))` \| (\w+) ",
            (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(),
            re.MULTILINE,
        )
        assert len(listed) == 5
        assert not [row for row in listed if f"# TYPE {row[0]} {row[1]}" not in page]
        # A router that came back empty is told the stage as it stands.
        w.router.lease = None
        await until(lambda: len(w.router.admitted) == 5)
        assert told(w)[-1].state is UpgradeState.COMPLETE and not running.done()
        assert w.router.admitted[-1][0].kv_total_blocks == AFTER


def _later(progress: Any) -> bool:
    return progress is not None and any(
        s.name is SegmentName.GRAPH_STAGE and s.end_s is not None for s in progress.segments
    )


@pytest.mark.parametrize(
    ("faults", "why"),
    [
        ({"fails_at": 2}, "out of memory"),
        ({"other_tokens": True}, "other tokens"),
        ({"keeps": 3}, "KV blocks left"),
    ],
)
async def test_a_stage_that_fails_is_rolled_back_told_and_serves_on(
    tmp_path: Path, brisk: None, faults: dict[str, Any], why: str
) -> None:
    async with living(tmp_path, graph_stages=True) as w:
        engine = staged_world(w, **faults)
        running = await ready(w)
        await until(lambda: w.life.started.stage.state is UpgradeState.ROLLED_BACK)  # type: ignore[union-attr]
        last, first = told(w)[-1], told(w)[0]
        assert why in last.failure and last.digest == first.digest
        assert w.router.admitted[-1][0].kv_total_blocks == BLOCKS == engine.blocks
        assert w.life.state is State.READY and not running.done()
        assert 'outcome="rolled_back"} 1' in w.life.metrics()


async def test_a_drain_comes_before_an_upgrade(tmp_path: Path, brisk: None) -> None:
    async with living(tmp_path, graph_stages=True) as w:
        engine = staged_world(w, each_s=0.5)
        running = await ready(w)
        await until(lambda: "capture" in engine.calls)
        w.router.directives = [Directive("drain", 30.0, "scale down")]
        assert await asyncio.wait_for(running, 8) is ExitCode.LEFT
        assert "use_captured" not in engine.calls and "drop_captured" in engine.calls


async def test_a_lost_lease_interrupts_and_the_upgrade_begins_again(
    tmp_path: Path, brisk: None
) -> None:
    async with living(tmp_path, graph_stages=True) as w:
        engine = staged_world(w, each_s=0.2)
        await ready(w)
        await until(lambda: engine.captured != ())
        w.router.lease = None
        await until(lambda: w.life.state is State.REJOINING)
        engine.each_s = 0.01
        await until(lambda: w.life.started.stage.state is UpgradeState.COMPLETE)  # type: ignore[union-attr]
        states = [str(stage.state) for stage in told(w)]
        assert states.count("first") == 2 and states[-1] == "complete"
        assert engine.calls.count("drop_captured") == 1


async def test_an_engine_without_stages_says_so_and_serves_whole(
    tmp_path: Path, brisk: None
) -> None:
    async with living(tmp_path, graph_stages=True) as w:
        await ready(w)
        (stage,) = told(w)
        assert stage.state is UpgradeState.UNSUPPORTED and stage.compiled
        assert "not supported" in stage.failure and w.engine.spec is not None
        assert not w.engine.spec.graph_stages
        assert 'state="unsupported"} 1' in w.life.metrics()


async def test_without_the_flag_nothing_is_staged(tmp_path: Path, brisk: None) -> None:
    async with living(tmp_path) as w:
        engine = staged_world(w)
        await ready(w)
        assert w.router.admitted[0][0].stage is None and engine.calls == []
        assert "graph_stage" not in w.life.metrics()


def test_the_way_to_an_upgrade_needs_a_lease() -> None:
    loop = VirtualLoop()
    clock = VirtualClock(loop)

    async def run() -> None:
        engine = StagedTwin()
        engine.spec = _spec()

        class Lost:
            async def admit(self, *_: Any, **__: Any) -> GateVerdict:
                raise LostLease("w", "i", "another has it")

        started = Started(Role.DECODE)
        started.stage = Terms("p", 16).first(await engine.graphs())
        started.serving = replace(engine.serving(), stage=started.stage)
        made = Upgrading(
            AgentSettings(
                worker_id="w",
                role=Role.DECODE,
                model="m",
                router="r",
                work_dir=Path("/tmp"),
                registry="g",
                graph_stages=True,
            ),
            router=Lost(),  # type: ignore[arg-type]
            engine=engine,
            started=started,
            clock=clock,
            trace=StartTrace(clock, process_start_s=0.0),
            lease=lambda: Lease("w", "i", 1, 1.0),
            told=lambda: None,
        )
        made.begin()
        await clock.sleep(30.0)
        assert started.stage.state is UpgradeState.ROLLED_BACK and "capture" not in engine.calls

    run_virtual(run(), loop=loop)


def test_flags_that_contradict_each_other_are_refused() -> None:
    from readyplane_agent.settings import parse

    base = ["--worker-id", "w", "--role", "decode", "--model", "m", "--router", "r:1"]
    base += ["--work-dir", "/tmp/x", "--registry", "g:1"]
    with pytest.raises(InvalidField, match="--graph-stages"):
        parse([*base, "--graph-stages", "true", "--mode", "eager"], {})
    with pytest.raises(InvalidField, match="--holds"):
        parse([*base, "--holds", "process"], {})
    with pytest.raises(InvalidField, match="write one of weights, process, asleep"):
        parse([*base, "--standby", "true", "--holds", "nothing"], {})
    assert parse([*base, "--standby", "true", "--holds", "asleep"], {}).holds == "asleep"
