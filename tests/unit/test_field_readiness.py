"""Field reports of readiness and groups (B46 to B59), each as the row says; cited by number.

Elsewhere besides: B46 of an engine that hangs (test_field_leases), B51 of a gateway (test_gateway_api),
B58 of the barrier under any order of reports (test_router_group_machine).
"""

import asyncio
import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from readyplane.core.errors import NoCompatiblePair, NoPair, Unavailable
from readyplane.core.identity import KvFormat
from readyplane.core.work import Slo
from readyplane.core.worker import LoadReport, Role, StartProgress, WorkerState
from readyplane.ports import GroupStatus, RankReport
from readyplane_agent.engines.modelled.adapter import ModelledEngine
from readyplane_agent.engines.openai import LOAD_LIMIT_S, OpenAiEngine
from readyplane_agent.lifecycle import ExitCode
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop, run_virtual
from readyplane_planner.decide import decide
from readyplane_planner.optimise import Problem, Proposal
from readyplane_router import circuit
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy
from readyplane_router.store import Change, MemoryStore
from tests.router_world import (
    DIGEST,
    MODEL,
    FakeWorker,
    World,
    offer,
    on_virtual_time,
    serving,
    shape,
)
from tests.unit import agent_world, gateway_world, planner_world
from tests.unit.planner_world import HandClock, Run

P, D = Role.PREFILL, Role.DECODE
POLICY = RouterPolicy(
    pair=PairPolicy(slo=Slo(2.0, 10.0), wait_max_s=8.0, empty_wait_max_s=8.0, prefill_ahead_s=60.0)
)


def wants(run: Run, wanted: dict[str, int]) -> None:
    def answer(_problem: Problem) -> Proposal:
        return Proposal(wanted["p"], wanted["d"], wanted["p"], wanted["d"])

    run.service._brain = partial(decide, optimiser=answer)


async def told(worker: FakeWorker, seconds: int, **load: Any) -> None:
    for _ in range(seconds):
        await worker.renew(load=LoadReport(**load))
        await asyncio.sleep(1.0)


@pytest.mark.parametrize(("running", "state"), [(3, WorkerState.STALLED), (0, WorkerState.READY)])
def test_b46_heartbeats_are_not_progress(running: int, state: WorkerState) -> None:
    """The agent renews, the counter stands still: stalled with sequences, idle without."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        d0 = await world.worker(router, "d0", D, renewing=False)
        await told(d0, 14, iterations_total=7, running=running)
        assert (await router.list_workers()).workers["d0"].state is state
        if running:
            with pytest.raises(NoPair, match="stalled"):
                await router.route(shape("r1"), dry_run=True)
        else:
            assert (await router.route(shape("r1"))).decode.worker_id == "d0"

    on_virtual_time(main, policy=POLICY)


async def test_b46_a_stalled_worker_is_replaced() -> None:
    w = planner_world.World(HandClock())
    w.add(P, 1)
    w.add(D, 2)
    run = await planner_world.planner(w)
    wants(run, {"p": 1, "d": 2})
    await run.step(5)
    assert w.provisions == []
    sick = next(name for name, box in w.boxes.items() if box.role is D)
    w.boxes[sick].state = WorkerState.STALLED
    await run.step(30)
    assert [o.role for o in w.provisions] == [D]
    assert sick in w.releases


async def test_b47_registered_is_not_listed_and_a_closed_port_is_never_admitted(
    tmp_path: Path,
) -> None:
    """The engine says it is up; its generate endpoint does not answer: nothing is published."""
    async with agent_world.living(tmp_path) as world:

        async def shut(*_: Any, **__: Any) -> Any:
            raise Unavailable("connection refused", "wait")

        world.engine.generate = shut  # type: ignore[method-assign]
        code = await asyncio.wait_for(agent_world.begin(world), 20.0)
    assert code is ExitCode.START_FAILED
    assert world.router.offers, "it was registered"
    assert world.router.admitted == []
    assert "refused" in world.life.trace.failure


def test_b47_callers_meanwhile_are_told_when_to_come_again() -> None:
    async def story(world: gateway_world.World) -> None:
        listed = (await world.ask(path="/v1/models", method="GET")).json["data"]
        assert "cold" not in [card["id"] for card in listed]
        got = await world.ask({"model": "cold", "prompt": [1]})
        assert (got.status, got.error["code"]) == (503, "no_ready_pair")
        assert float(got.headers["retry-after"]) > 0

    gateway_world.play(story, workers=[_cold("c1", P), _cold("c2", D)])


def _cold(name: str, role: Role, failure: str = "") -> Any:
    return replace(
        gateway_world.worker(name, role, model="cold"),
        state=WorkerState.PROVISIONED,
        serving=None,
        progress=StartProgress(0.0, 1.0, failure=failure),
    )


def test_b48_an_engine_that_answers_after_fifteen_seconds_and_works_stays_ready() -> None:
    """Two of three readings are late; between two of them it got on: slow is not dead."""

    async def main(world: World) -> None:
        router = await world.router()
        d0 = await world.worker(router, "d0", D, renewing=False)
        load = LoadReport()
        for second in range(90):
            read = second - second % 15
            load = LoadReport(iterations_total=7 + read, running=2, age_s=float(second - read))
            await d0.renew(load=load)
            await asyncio.sleep(1.0)
            assert (await router.list_workers()).workers["d0"].state is WorkerState.READY, second
        for second in range(30):  # nothing is heard at all any more
            await d0.renew(load=replace(load, age_s=15.0 + second))
            await asyncio.sleep(1.0)
        assert (await router.list_workers()).workers["d0"].state is WorkerState.STALLED

    on_virtual_time(main, policy=POLICY)
    assert LOAD_LIMIT_S > 15.0, "the agent waits for such an answer"


def test_b49_nothing_trips_a_breaker_before_the_gate_and_it_recovers_within_a_wait() -> None:
    """500 callers meet warming workers: they wait, no circuit opens, all are served."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "d0", D)
        p0 = FakeWorker(router, offer("p0", P))
        await p0.register()
        await p0.form()
        calls = [
            asyncio.create_task(router.route(shape(f"r{n}", 16, first=n * 40))) for n in range(60)
        ]
        await asyncio.sleep(2.0)
        desk = router.desks[MODEL]
        assert not any(call.done() for call in calls)
        assert all(found.state == circuit.CLOSED for found in desk.circuits.values())
        assert await p0.admit() == ()
        await asyncio.sleep(1.0)
        assert calls[0].done() and calls[0].result().prefill.worker_id == "p0"
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    on_virtual_time(main, policy=POLICY)
    default = RouterPolicy()
    assert default.circuit_open_s < default.pair.empty_wait_max_s, "a caller outwaits a breaker"
    open_ = circuit.Circuit(circuit.OPEN, since_s=0.0)
    half = circuit.looked_at(open_, now_s=default.circuit_open_s, open_s=default.circuit_open_s)
    assert circuit.passes(half) and circuit.passes(circuit.succeeded(half))


def test_b51_a_router_that_begins_anew_is_ready_with_all_workers_or_not_at_all() -> None:
    async def main(world: World) -> None:
        first = await world.router()
        for n in range(10):
            await world.worker(first, f"p{n}", P)
            await world.worker(first, f"d{n}", D)
        again = world.service()
        store = cast("MemoryStore", world.store)
        workers = store.workers

        async def away() -> Any:
            raise Unavailable("redis does not answer", "start it")

        store.workers = away  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="redis does not answer"):
            await again.start()
        store.workers = workers  # type: ignore[method-assign]
        await again.start()
        states = [w.state for w in (await again.list_workers()).workers.values()]
        assert states == [WorkerState.READY] * 20
        pair = await again.route(shape("r1"))
        assert pair.prefill.worker_id.startswith("p")

    on_virtual_time(main, policy=POLICY, shared=True)


def test_b52_a_model_that_could_not_be_added_says_why_and_is_not_unknown() -> None:
    """Not 404: its workers were refused. (A load that failed is a 500 with its reason, B172.)"""

    async def story(world: gateway_world.World) -> None:
        got = await world.ask({"model": "cold", "prompt": [1]})
        assert (got.status, got.error["code"]) == (500, "model_load_failed")
        assert "digest mismatch" in got.error["message"]
        listed = (await world.ask(path="/v1/models", method="GET")).json["data"]
        assert "cold" not in [card["id"] for card in listed]

    failed = "manifest: digest mismatch, sha256:1 != sha256:2"
    gateway_world.play(story, workers=[_cold("c1", P, failed), _cold("c2", D, failed)])


def test_b52_the_gate_names_another_revision() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        p0 = FakeWorker(router, offer("p0", P))
        await p0.register()
        await p0.form()
        other = "sha256:" + "f" * 64
        reasons = await p0.admit(model_revision={"manifest_digest": other})
        assert reasons == (f"model_revision: loaded {other}, ordered {DIGEST}",)
        seen = (await router.list_workers()).workers["p0"]
        assert [c.name for c in seen.checks if not c.passed] == ["model_revision"]

    on_virtual_time(main, policy=POLICY)


def test_b53_only_complete_sets_are_candidates_and_a_group_counts_once() -> None:
    """Set A has P alone, set B is whole: all goes to B. Without B it is said what is missing."""

    async def main(world: World) -> None:
        router = await world.router()
        odd = serving(kv=KvFormat(DIGEST, dtype="bf16"))
        await world.worker(router, "a-p", P, serves=odd)
        b_d = await world.worker(router, "b-d", D)
        big = FakeWorker(router, offer("b-p", P, ranks=4))
        await big.register()
        await big.form()
        coverage = {"tensors": 2, "tensors_expected": 2, "missing": [], "ranks": 4}
        coverage["rank_tensors"] = [2] * 4
        assert await big.admit(shard_coverage=coverage) == ()
        for n in range(6):
            pair = await router.route(shape(f"r{n}", 16, first=n * 40))
            assert (pair.prefill.worker_id, pair.decode.worker_id) == ("b-p", "b-d")
        assert (
            sum(w.worker_id == "b-p" for w in (await router.list_workers()).workers.values()) == 1
        )
        await big.leave()
        with pytest.raises(NoCompatiblePair, match="dtype"):
            await router.route(shape("x"), dry_run=True)
        await b_d.leave()
        with pytest.raises(NoPair, match="decode"):
            await router.route(shape("y"), dry_run=True)

    on_virtual_time(main, policy=POLICY)


async def test_b54_a_larger_pool_that_loads_is_no_breach_of_the_smaller_one() -> None:
    """3 to 5 with two that load for fifteen minutes: the three serve on, nothing is recycled."""
    w = planner_world.World(HandClock())
    w.add(P, 3)
    w.add(D, 1)
    w.t_ready_s = lambda _n: 900.0
    prior = {"p50_s": 600.0, "p90_s": 900.0, "p99_s": 1000.0}
    run = await planner_world.planner(w, planner_world.policy(t_ready_prior=prior))
    wanted = {"p": 3, "d": 1}
    wants(run, wanted)
    await run.step(10)
    before = {name for name, box in w.boxes.items() if box.state is WorkerState.READY}
    wanted["p"] = 5
    await run.step(800, tick_s=5.0)
    assert {n for n, b in w.boxes.items() if b.state is WorkerState.READY} == before
    assert w.releases == []
    assert len([o for o in w.provisions if o.role is P]) == 2, "ordered once"
    await run.step(200, tick_s=5.0)
    assert len(w.members(P, WorkerState.READY)) == 5


@pytest.mark.parametrize("gone", ["p0", "d0", "both"])
def test_b55_down_to_zero_and_back_serves_who_waits(gone: str) -> None:
    async def main(world: World) -> None:
        router = await world.router()
        workers = {"p0": P, "d0": D}
        alive = {name: await world.worker(router, name, role) for name, role in workers.items()}
        left = [name for name in workers if gone in (name, "both")]
        for name in left:
            await alive[name].leave()
        await asyncio.sleep(30.0)
        assert (await router.signals(MODEL)).models[MODEL] is not None, "the router lives at zero"
        call = asyncio.create_task(router.route(shape("r1")))
        await asyncio.sleep(5.0)
        assert not call.done()
        for name in left:
            await world.worker(router, name, workers[name], incarnation=f"{name}-2")
        pair = await asyncio.wait_for(call, 1.0)
        assert 5.0 <= pair.waited_s <= POLICY.pair.empty_wait_max_s

    on_virtual_time(main, policy=POLICY)


class Deaf(MemoryStore):
    """Its changes are never told."""

    async def watch(self) -> Any:
        await asyncio.Event().wait()
        yield Change("", "")


def test_b56_an_event_that_was_dropped_is_made_up_for_by_the_next_resync() -> None:
    async def main(world: World) -> None:
        world.store = Deaf(world.clock, shared=True)
        one, two = await world.router(), await world.router()
        await asyncio.sleep(3.0)
        await world.worker(one, "p0", P)
        await world.worker(one, "d0", D)
        await asyncio.sleep(2 * world.policy.tick_s)
        states = {w.state for w in (await two.list_workers()).workers.values()}
        assert states == {WorkerState.READY}
        assert (await two.route(shape("r1"))).prefill.worker_id == "p0"

    on_virtual_time(main, policy=POLICY, shared=True)


async def rank(worker: FakeWorker, number: int, step: str, progress: int = 0) -> GroupStatus:
    return await worker.router.report_rank(
        RankReport(
            worker.offer.worker_id,
            worker.offer.incarnation,
            worker.lease.epoch,
            number,
            step,
            DIGEST,
            progress=progress,
        )
    )


def test_b58_three_wait_twenty_minutes_for_one_that_gets_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And when it no longer does, the generation ends, names it and frees the others."""
    caplog.set_level(logging.WARNING)

    async def main(world: World) -> None:
        router = await world.router()
        for name in ("slow", "dead"):
            group = FakeWorker(router, offer(name, P, ranks=4))
            await group.register()
            for number in range(3):
                await rank(group, number, "verified")
            status = await rank(group, 3, "scheduled")
            answer = await group.renew()
            for second in range(1200):
                if second % 30 == 0:
                    told_bytes = second if name == "slow" else min(second, 300)
                    status = await rank(group, 3, "scheduled", progress=told_bytes)
                if second % 2 == 0:
                    answer = await group.renew()
                await asyncio.sleep(1.0)
            if name == "slow":
                assert (status.state, status.waiting_for[3]) == ("forming", "rank 3: verified")
                assert "the group is forming" in "; ".join(await group.admit()), "no leader alone"
                await group.form()
                assert group.group_epoch > 0
                await group.leave()
            else:
                assert status.state == "failed"
                assert "rank 3: no progress" in status.waiting_for[0]
                (directive,) = answer.directives
                assert directive.kind == "stop" and "rank 3" in directive.reason

    on_virtual_time(main, policy=POLICY)


async def test_b58_ranks_of_a_failed_group_end_as_failed_starts(tmp_path: Path) -> None:
    """Told to stop while it waits at the barrier: it gives everything back and says why."""
    from readyplane.ports import Directive

    async with agent_world.living(tmp_path) as world:
        world.router.hold_group = True
        running = agent_world.begin(world)
        await agent_world.until(lambda: "canary_passed" in world.router.steps)
        world.router.directives.append(Directive("stop", 0.0, "its group failed: rank 1: OOM"))
        assert await asyncio.wait_for(running, 20.0) is ExitCode.START_FAILED
    assert "rank 1: OOM" in world.life.trace.failure
    assert world.engine.stopped and world.router.left


@pytest.mark.parametrize(
    ("load_s", "still_from_s", "words"),
    [(1200.0, None, ""), (1200.0, 300.0, "host_to_device"), (3.0, None, "")],
)
def test_b59_a_start_is_limited_by_progress_and_not_by_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    load_s: float,
    still_from_s: float | None,
    words: str,
) -> None:
    """Twenty minutes of steady work survive; a standstill fails and names the phase; 3 s are 3 s."""
    monkeypatch.setattr(OpenAiEngine, "get", _answers)
    loop = VirtualLoop()
    clock = VirtualClock(loop)

    async def main() -> float:
        engine = ModelledEngine(clock)
        engine._process = cast("Any", SimpleNamespace(pid=0, returncode=None))
        spec = SimpleNamespace(
            work_dir=tmp_path, log_path=tmp_path / "log", host="127.0.0.1", model=MODEL
        )
        engine._spec = cast("Any", spec)
        work = asyncio.create_task(_loads(tmp_path, clock, load_s, still_from_s))
        try:
            await engine.wait_ready(stall_s=60.0)
        finally:
            work.cancel()
        return clock.monotonic_s()

    began_s = clock.monotonic_s()
    if words:
        with pytest.raises(Unavailable, match=words):
            run_virtual(main(), loop=loop)
    else:
        assert run_virtual(main(), loop=loop) - began_s == pytest.approx(load_s, abs=0.5)


async def _answers(*_: Any, **__: Any) -> bytes:
    return b""


async def _loads(
    folder: Path, clock: VirtualClock, load_s: float, still_from_s: float | None
) -> None:
    began_s = clock.monotonic_s()
    while True:
        done_s = clock.monotonic_s() - began_s
        shown_s = done_s if still_from_s is None else min(done_s, still_from_s)
        segment = {
            "name": "host_to_device",
            "start_s": began_s,
            "end_s": None,
            "modelled": False,
            "saved_s": 0.0,
            "detail": f"{shown_s:.0f} GB",
        }
        state = "ready" if done_s >= load_s else "starting"
        document = {"state": state, "port": 1, "segments": [segment]}
        (folder / "engine-startup.json").write_text(json.dumps(document))
        await clock.sleep(min(20.0, max(0.01, load_s - done_s)))
