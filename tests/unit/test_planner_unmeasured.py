"""Without a profile: conservative figures, learned online, and advice before anything is done."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from readyplane import profiles
from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile
from readyplane.core.profile_default import UNKNOWN_CLASS, conservative
from readyplane.core.worker import LoadReport, Role, Worker
from readyplane_planner.capacity import (
    CORRECTION_RANGE_UNMEASURED,
    EVIDENCE_MIN_S,
    Correction,
    correct,
)
from readyplane_planner.journal import decode_inputs, replay
from tests.unit.planner_world import MODEL, PROFILE, Box, HandClock, Run, World, planner, policy

UNKNOWN = {"profile": "unknown"}


def test_the_shipped_profile_is_what_the_assumptions_say() -> None:
    assert profiles.load("unknown") == conservative(UNKNOWN_CLASS)
    taken = profiles.load("unknown", worker_class="b300")
    assert (taken.name, taken.worker_class, taken.measured) == ("unknown-b300", "b300", False)
    assert ClassProfile.from_document(taken.document()) == taken
    assert profiles.load("h200-slow10", worker_class="b300").worker_class == "h200-slow10"


@pytest.mark.parametrize("name", ["h200-llama8b-fp8", "h100-tp4-llama70b", "a100-tp4-llama70b"])
def test_assumptions_are_slower_than_what_was_measured_and_within_reach(name: str) -> None:
    """Slow on purpose, and never so slow that the correction could not find the truth."""
    real = profiles.load(name)
    weights = 8.5e9 if "8b" in name else 139e9
    assumed = conservative(
        real.worker_class,
        gpus=real.gpus,
        model_bytes=weights,
        kv_tokens=real.kv_capacity_tokens,
        kv_bytes_per_token=real.kv_bytes_per_token,
    )
    low, high = CORRECTION_RANGE_UNMEASURED
    for isl in (512, 2048, 8192):
        assert 1.0 < assumed.prefill_s(isl) / real.prefill_s(isl) < high
    for n in (1, 16, 64):
        ratio = assumed.iteration_s(n, n * 1200) / real.iteration_s(n, n * 1200)
        assert max(1.0, low) < ratio < high


def test_what_a_worker_offers_is_used() -> None:
    small, big = conservative("x"), conservative("x", gpus=8, kv_tokens=900_000)
    assert big.prefill_s(4096) < small.prefill_s(4096)
    assert (big.kv_capacity_tokens, big.gpus) == (900_000, 8)
    heavy = conservative("x", gpus=8, model_bytes=140e9)
    assert heavy.iteration_s(8, 8000) > big.iteration_s(8, 8000)


def test_a_document_that_says_unmeasured_wrongly_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"profile\.measured"):
        ClassProfile.from_document({**PROFILE.document(), "measured": "no"})
    with pytest.raises(InvalidField, match=r"profile\.fit\.prefill"):
        ClassProfile.from_document({**PROFILE.document(), "fit": {"prefill": {"error": 0.1}}})
    assert "measured" not in PROFILE.document(), "the identity of measured profiles stays"


def test_the_range_of_a_correction_is_the_callers() -> None:
    held = Correction()
    for _ in range(1000):
        held = correct(held, [40.0], dt_s=2.0, within=CORRECTION_RANGE_UNMEASURED)
    assert held.factor == pytest.approx(10.0, rel=0.01)
    once = correct(Correction(), [0.25], dt_s=EVIDENCE_MIN_S, within=CORRECTION_RANGE_UNMEASURED)
    moved = once.log_factor / math.log(0.25)
    assert 0.9 < moved < 1.0, "what is asked for before acting is nine tenths of the way"


def busy(world: World, *, rate: float = 2960.0) -> None:
    """Engines that tell of a queue that never ends and of iterations as the profile has them."""
    original = world.worker
    steps: dict[str, float] = {}
    last: dict[str, float] = {}

    def told(box: Box) -> Worker:
        worker = original(box)
        now_s, name = world.clock.now_s, box.order.worker_id
        if box.order.role is Role.PREFILL:
            load = LoadReport(
                running=1,
                waiting_prefill_tokens=90_000,
                prefill_tokens_total=round(rate * now_s),
            )
        else:
            used = round(59_000 * 0.4)
            each_s = PROFILE.iteration_s(box.active, used * 16)
            steps[name] = steps.get(name, 0.0) + (now_s - last.get(name, now_s)) / each_s
            last[name] = now_s
            load = LoadReport(
                running=max(1, box.active),
                kv_used_blocks=used,
                kv_total_blocks=59_000,
                iterations_total=round(steps[name]),
            )
        return replace(worker, load=load)

    world.worker = told  # type: ignore[method-assign]


async def unmeasured(rps: float) -> Run:
    world = World(HandClock(), rps=lambda _t: rps)
    world.add(Role.PREFILL, 1)
    world.add(Role.DECODE, 1)
    busy(world)
    return await planner(world, policy(prefill=UNKNOWN, decode=UNKNOWN, warm_worker_s=0.0))


async def test_it_advises_first_and_acts_on_what_it_has_learned() -> None:
    run = await unmeasured(6.0)
    await run.step(60)
    early = run.decisions[-1]
    assert {"profile_unmeasured", "hold"} <= {r.code for r in early.why}
    assert any("advice only: unknown-h200-slow10" in r.text for r in early.why)
    assert early.prefill.wanted > early.prefill.target == 1, "the advice is shown"
    assert not run.world.provisions and not run.world.drains
    await run.step(EVIDENCE_MIN_S + 60)
    late = run.decisions[-1]
    assert len(run.world.provisions) >= 1
    assert "profile_unmeasured" in {r.code for r in late.why}, "it is still no measurement"
    assert not any("advice only" in r.text for r in late.why)
    assert late.decode.wanted == 4, "by what its workers say they hold, not by the KV assumed"
    assert early.decode.wanted >= late.decode.wanted


async def test_decisions_replay_with_the_profile_that_they_were_made_with(tmp_path: Path) -> None:
    """The journal holds the profile whole: its mark, its fit and its points."""
    fit = {"decode": {"error": 0.02, "worst": 0.1, "held_out": 9, "points": 9}}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**PROFILE.document(), "fit": fit}))
    world = World(HandClock(), rps=lambda _t: 6.0)
    run = await planner(
        world, policy(prefill={"profile": str(file)}, decode=UNKNOWN), sample_every_s=5.0
    )
    await run.step(30)
    file.write_text("{}")
    records = await run.journal.newest(MODEL, limit=50)
    assert len(records) > 4
    by_id = {d.decision_id: d for d in run.decisions}
    for record in records:
        full, _ = await run.journal.get(record.decision_id)
        assert replay(full) == by_id[record.decision_id]
        plan = decode_inputs(full.inputs).plan
        assert plan.prefill.profile.fit[0].worst == 0.1 and not plan.decode.profile.measured


async def test_the_floor_is_held_though_nothing_was_measured() -> None:
    """Else there would never be a worker to learn from."""
    world = World(HandClock(), rps=lambda _t: 0.5)
    run = await planner(world, policy(prefill=UNKNOWN, decode=UNKNOWN))
    await run.step(30)
    assert len(world.provisions) == 2
    assert (run.decisions[-1].prefill.target, run.decisions[-1].decode.target) == (1, 1)


async def test_it_learns_far_beyond_the_range_of_a_measured_profile() -> None:
    """R4.3 of figures that were assumed: seven times as fast is found, and planned with."""
    world = World(HandClock(), rps=lambda _t: 1.0)
    world.add(Role.PREFILL, 1)
    world.add(Role.DECODE, 1)
    busy(world, rate=18_000.0)
    pools = {"prefill": {**UNKNOWN, "max": 1}, "decode": {**UNKNOWN, "max": 1}}
    run = await planner(world, policy(warm_worker_s=0.0, **pools))
    await run.step(500)
    last = run.decisions[-1]
    assert last.prefill.correction > 4.0
    assert last.prefill.worker_rate == pytest.approx(18_000.0, rel=0.15)


@pytest.mark.parametrize(("kv_share", "learns"), [(0.4, True), (0.99, False)])
async def test_a_full_kv_pool_teaches_nothing(kv_share: float, learns: bool) -> None:
    """A saturated worker preempts and computes prompts again: not its speed."""
    world = World(HandClock(), rps=lambda _t: 1.0)
    world.add(Role.PREFILL, 1)
    world.add(Role.DECODE, 1)
    original = world.worker

    def slow(box: Box) -> Worker:
        worker = original(box)
        if box.order.role is not Role.DECODE:
            return worker
        load = LoadReport(
            running=30,
            kv_used_blocks=round(59_000 * kv_share),
            kv_total_blocks=59_000,
            iterations_total=round(world.clock.now_s * 5),
        )
        return replace(worker, load=load)

    world.worker = slow  # type: ignore[method-assign]
    run = await planner(world, policy(prefill={"max": 1}, decode={"max": 1}))
    await run.step(200)
    assert (run.decisions[-1].decode.correction != 1.0) is learns


async def test_old_news_teach_nothing() -> None:
    """Frozen when stale: the last good answer, again and again, moves no correction."""
    world = World(HandClock(), rps=lambda _t: 1.0)
    world.add(Role.PREFILL, 1)
    world.add(Role.DECODE, 1)
    busy(world, rate=1800.0)
    run = await planner(world, policy(prefill={"max": 1}, decode={"max": 1}, warm_worker_s=0.0))
    await run.step(40)
    world.frozen = True
    await run.step(3)
    learned = run.decisions[-1].prefill.correction
    assert 0.6 < learned < 1.0
    await run.step(60)
    assert run.decisions[-1].prefill.correction == learned


async def test_a_pool_in_transition_teaches_nothing() -> None:
    """Frozen during a start: what is measured then is the change."""
    world = World(HandClock(), rps=lambda _t: 1.0, hang=lambda _order: True)
    world.add(Role.PREFILL, 1)
    world.add(Role.DECODE, 1)
    busy(world, rate=1500.0)
    slow_start = {"p50_s": 400.0, "p90_s": 500.0, "p99_s": 600.0}
    run = await planner(
        world, policy(prefill={"min": 2}, warm_worker_s=0.0, t_ready_prior=slow_start)
    )
    await run.step(120)
    assert run.decisions[-1].prefill.counts.pending == 1
    assert run.decisions[-1].prefill.correction == 1.0
