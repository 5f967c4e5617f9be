"""Whole lives of an agent against twins: start, serve, drain, leave, and every way to fail."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from readyplane.core import gate_checks as gc
from readyplane.core.errors import LostLease, StaleEpoch, Unauthenticated, Unavailable
from readyplane.core.identity import Manifest
from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane.core.startup import SegmentName, WeightTier, critical_path
from readyplane.core.worker import CheckResult, Holds
from readyplane.ports import Directive, GateVerdict, GroupStatus, RankReport
from readyplane_agent import draining
from readyplane_agent import life as life_module
from readyplane_agent.lifecycle import ExitCode, State
from tests.unit.agent_twins import (
    CHUNK,
    Artifact,
    TwinEngine,
    TwinRouter,
    artifact,
)
from tests.unit.agent_world import ART, World, begin, living, ready, until
from tests.unit.staged_twin import StagedTwin


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_module, "ENGINE_WATCH_S", 0.05)
    monkeypatch.setattr(life_module, "DRAIN_NEWS_S", 0.05)


# --------------------------------------------------------------------------- the good life


@dataclass
class JudgingByGroup(TwinRouter):
    """Refuses whoever names another group than that of its lease, as the gate does."""

    loses_at: int = 0
    asked: int = 0

    async def report_rank(self, report: RankReport) -> GroupStatus:
        status = await super().report_rank(report)
        return replace(status, group_epoch=100 + report.epoch) if status.group_epoch else status

    async def admit(self, *args: Any, checks: Sequence[CheckResult], **kwargs: Any) -> GateVerdict:
        self.asked += 1
        if self.asked == self.loses_at:
            self.lease = None
        named = next(c.evidence["group_epoch"] for c in checks if c.name == gc.GROUP)
        self.refuse = () if named == 100 + self.epoch else (f"group epoch {named}",)
        return await super().admit(*args, checks=checks, **kwargs)


@pytest.mark.parametrize("loses_at", [1, 2])
async def test_a_lease_that_is_lost_between_group_and_gate_is_no_refusal(
    tmp_path: Path, loses_at: int
) -> None:
    """Of a start, and of a worker that rejoins: the group forms anew under the next lease."""
    async with living(tmp_path) as w:
        w.router = router = JudgingByGroup(loses_at=loses_at)
        w.life = w._life("w1-abc")
        running = begin(w)
        await until(lambda: w.life.state is State.READY or running.done())
        assert w.life.state is State.READY, w.life.trace.failure
        if loses_at == 2:
            router.lease = None
            await until(lambda: router.epoch == 3 or running.done())
        await until(lambda: w.life.state is State.READY or running.done())
        assert w.life.state is State.READY, w.life.trace.failure
        assert w.life.session.epoch == 1 + loses_at and router.asked == 2 + loses_at


async def test_a_start_from_order_to_ready_to_gone(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        running = await ready(w)
        life = w.life
        assert w.router.steps == ["scheduled", "verified", "connected", "placed", "canary_passed"]
        told, checks = w.router.admitted[0]
        by_name = {c.name: c for c in checks}
        assert set(by_name) == set(gc.GATE_CHECKS)
        for name, fields in gc.GATE_CHECKS.items():
            assert by_name[name].passed, by_name[name]
            assert not [f for f in fields if f not in by_name[name].evidence], name
        assert by_name[gc.CANARY].evidence["token_ids"] == [7, 8, 9, 2]
        assert by_name[gc.GROUP].evidence == {"group_epoch": 11}
        assert told.tier is WeightTier.L4_OBJECT
        assert told.tokenizer_digest == ART.manifest.tokenizer_digest
        assert w.router.offers[0].scale_decision_id == "d-1"
        assert w.router.offers[0].ordered_ago_s is not None
        # The engine was given the bytes that were verified, without a copy.
        assert w.engine.spec is not None and w.engine.spec.wait_weights
        assert set(w.engine.tensors) == {t.name for t in ART.manifest.tensors}
        for tensor in ART.manifest.tensors:
            data = ART.files[tensor.file][tensor.offset_bytes :][: tensor.size_bytes]
            assert w.engine.tensors[tensor.name] == data
        # Ready: it gives its weights to others, and the node keeps them.
        await until(lambda: "peer:w1:w1-abc" in w.registry.announced)
        peer = w.registry.announced["peer:w1:w1-abc"]
        assert (peer.tier, peer.incarnation) == (WeightTier.L1_HOST, "w1-abc")
        await until(lambda: w.cache.holds(ART.manifest))

        w.router.directives = [Directive("drain", 30.0, "scale down")]
        assert await running is ExitCode.LEFT
        assert w.router.left == ["drained"]
        assert w.registry.withdrawn == ["peer:w1:w1-abc"]
        assert w.engine.stopped == 1
        assert life.state is State.GONE
        assert not w.settings.work_dir.exists()


async def test_the_segments_explain_the_start(tmp_path: Path) -> None:
    """R6.1: exclusive shares and what is unexplained sum to the wall time."""
    async with living(tmp_path) as w:
        w.engine.init_s = 0.5
        await ready(w)
        assert w.life.ready_s is not None
        trace = w.life.trace
        path = critical_path(trace.segments(), start_s=trace.begin_s, end_s=w.life.ready_s)
        assert path.unexplained_fraction < 0.05, path
        assert {
            SegmentName.SCHEDULE,
            SegmentName.RUNTIME_IMPORT,
            SegmentName.ARTIFACT_DISCOVERY,
            SegmentName.WEIGHT_TRANSFER,
            SegmentName.VERIFY,
            SegmentName.COMPILE,
            SegmentName.CANARY,
            SegmentName.GROUP_BARRIER,
            SegmentName.ROUTER_REGISTRATION,
        } <= set(path.inclusive_s)
        assert all(s.end_s is not None for s in trace.segments())
        assert path.dominant is SegmentName.COMPILE
        # The router hears the finished segments once more after admission.
        await until(lambda: w.router.renewals[-1].load is not None)
        told = [r.progress for r in w.router.renewals if r.progress is not None][-1]
        assert all(s.end_s is not None for s in told.segments)


async def test_the_lease_comes_first_and_a_hang_is_seen(tmp_path: Path) -> None:
    """A start that hangs shows its blocking segment and the end of the log at the router."""
    async with living(tmp_path) as w:
        w.engine.hang = True
        begin(w)

        def blocked() -> bool:
            progress = [r.progress for r in w.router.renewals if r.progress is not None]
            return bool(progress) and any(
                s.name is SegmentName.COMPILE and s.end_s is None for s in progress[-1].segments
            )

        await until(blocked)
        assert w.router.renewals[-1].progress is not None
        assert w.router.renewals[-1].progress.log_tail == "engine log"
        assert w.life.state is State.STARTING
        w.life.signalled()
        assert await w.running is ExitCode.LEFT  # type: ignore[attr-defined]
        assert w.engine.stopped == 1


@pytest.mark.parametrize(
    ("memory", "tier"), [("copy", WeightTier.L2_NVME), ("map", WeightTier.L1_HOST)]
)
async def test_a_second_start_on_the_node_reads_the_cache(
    tmp_path: Path, memory: str, tier: WeightTier
) -> None:
    async with living(tmp_path, weights_memory=memory) as w:
        running = await ready(w)
        await until(lambda: w.cache.holds(ART.manifest))
        w.life.direct(Directive("stop"))
        assert await running is ExitCode.LEFT
        w.registry.sources = []
        w.engine, w.router = TwinEngine(), TwinRouter()
        w.settings.work_dir.mkdir()
        w.life = w._life("w1-def")
        await ready(w)
        assert w.router.admitted[0][0].tier is tier


# --------------------------------------------------------------------------- failing starts


@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda w: setattr(w.router, "refuse", ("canary: wrong", "kv_pool: 0")), "kv_pool: 0"),
        (lambda w: setattr(w.engine, "die_in_start", True), "out of memory"),
        (lambda w: setattr(w.engine, "golden", (1, 1, 1, 2)), "canary: answered"),
        (lambda w: setattr(w.engine, "golden", (7, 8, 9, 2, 9, 2)), "canary"),
        (lambda w: w.registry.manifests.clear(), "not known"),
        (lambda w: w.registry.sources.clear(), "no source holds"),
    ],
)
async def test_a_failed_start_says_why_and_leaves_nothing(
    tmp_path: Path, spoil: Callable[[World], None], says: str
) -> None:
    async with living(tmp_path, fetch_limit_s=1.0) as w:
        spoil(w)
        code = await asyncio.wait_for(begin(w), 10)
        assert code is ExitCode.START_FAILED
        assert says in w.life.trace.failure
        last = w.router.renewals[-1].progress
        assert last is not None and says in last.failure
        assert w.router.steps[-1] == "failed"
        assert says in w.router.left[0]
        assert not w.router.admitted
        assert w.engine.stopped == 1
        arena = w.life.started.arena
        assert arena is None or arena.fd == -1
        assert not w.settings.work_dir.exists()
        told = [s for s in w.registry.announced if s.startswith("peer:")]
        assert w.registry.withdrawn == told  # from its first chunk on it was a source


@pytest.mark.parametrize("more", [{}, {"standby": True, "holds": Holds.PROCESS}])
async def test_no_room_for_a_chunk_is_a_wrong_setting_and_known_before_anything_begins(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    """Also of who waits with a process only: it could not load when it is told to serve."""
    async with living(tmp_path, staging_bytes=CHUNK - 1, **more) as w:
        w.engine = StagedTwin()
        w.life = w._life("w1-abc")
        assert await asyncio.wait_for(begin(w), 10) is ExitCode.USAGE
        why = w.life.trace.failure
        assert f"--staging-bytes: {CHUNK - 1} " in why and f"{CHUNK} bytes" in why
        told = w.router.renewals[-1].progress
        assert told is not None and told.failure == why, "the router knows it too"
        assert w.life.started.arena is None and w.registry.plans == 0
        assert w.engine.bare is None and w.engine.spec is None


async def test_a_process_stands_by_while_the_registry_is_away(tmp_path: Path) -> None:
    async with living(tmp_path, standby=True, holds=Holds.PROCESS) as w:
        w.engine = StagedTwin()
        w.life = w._life("w1-abc")

        async def away(digest: str) -> Manifest:
            raise Unavailable("the registry is away", "wait")

        w.registry.get_manifest = away  # type: ignore[method-assign]
        running = begin(w)
        await until(lambda: w.life.state is State.BARE or running.done())
        assert w.life.state is State.BARE, w.life.trace.failure


async def test_wrong_bytes_are_never_ready(tmp_path: Path) -> None:
    """B117, end to end: one byte of one tensor."""
    wrong = dict(ART.files)
    data = bytearray(wrong["model-1.safetensors"])
    data[-9] ^= 1
    wrong["model-1.safetensors"] = bytes(data)
    async with living(tmp_path, Artifact(ART.manifest, wrong)) as w:
        assert await asyncio.wait_for(begin(w), 10) is ExitCode.START_FAILED
        assert "model-1.safetensors: chunk" in w.life.trace.failure
        assert not w.router.admitted
        assert not w.cache.holds(ART.manifest)


async def test_a_start_that_takes_too_long_names_its_segment(tmp_path: Path) -> None:
    async with living(tmp_path, start_limit_s=0.8) as w:
        w.engine.hang = True
        assert await asyncio.wait_for(begin(w), 10) is ExitCode.START_FAILED
        assert "hangs in compile" in w.life.trace.failure


async def test_a_manifest_of_another_model_is_refused(tmp_path: Path) -> None:
    other = artifact(model="other")
    async with living(tmp_path) as w:
        w.registry.manifests = {ART.manifest.digest: other.manifest}
        assert await asyncio.wait_for(begin(w), 10) is ExitCode.START_FAILED
        assert "digest" in w.life.trace.failure


# --------------------------------------------------------------------------- serving


async def test_sigterm_drains_before_leaving(tmp_path: Path) -> None:
    """B61, B65: the router hears of it first, work ends first, then lease and engine go."""
    async with living(tmp_path) as w:
        running = await ready(w)
        w.engine.idle = False
        w.life.signalled()
        await until(lambda: w.life.state is State.DRAINING)
        await until(lambda: bool(w.router.drains))
        await asyncio.sleep(0.3)
        assert not running.done() and w.engine.stopped == 0
        assert not any(r.drained for r in w.router.renewals)
        w.engine.idle = True
        assert await running is ExitCode.LEFT
        assert any(r.drained for r in w.router.renewals)
        assert w.engine.stopped == 1


async def test_a_second_interrupt_leaves_at_once(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        running = await ready(w)
        w.engine.idle = False
        w.life.signalled(signal.SIGINT)
        w.life.signalled(signal.SIGINT)
        assert await asyncio.wait_for(running, 3) is ExitCode.LEFT
        assert w.engine.stopped == 1
        assert w.router.left


async def test_a_drain_is_bounded_by_its_deadline(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        running = await ready(w)
        w.engine.idle = False
        w.router.directives = [Directive("drain", 0.3, "scale down")]
        assert await asyncio.wait_for(running, 5) is ExitCode.LEFT
        assert "deadline" in w.router.left[0]


async def test_an_engine_that_hangs_holds_up_no_deadline_of_a_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "IDLE_ASKED_S_MAX", 0.1)
    async with living(tmp_path) as w:
        running = await ready(w)

        async def hangs() -> bool:
            await asyncio.Event().wait()
            return True

        monkeypatch.setattr(w.engine, "is_idle", hangs)
        w.router.directives = [Directive("drain", 0.3, "scale down")]
        assert await asyncio.wait_for(running, 5) is ExitCode.LEFT
        assert "deadline" in w.router.left[0]


async def test_a_drain_does_not_wait_for_a_router_that_is_gone(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        running = await ready(w)
        w.router.away = True
        w.life.signalled()
        begin_s = asyncio.get_running_loop().time()
        assert await asyncio.wait_for(running, 10) is ExitCode.LEFT
        took_s = asyncio.get_running_loop().time() - begin_s
        assert took_s > 0.8 * w.router.ttl_s - 0.3, "but a whole lease is waited for"
        assert w.engine.stopped == 1


async def test_a_router_that_is_away_ends_nobody(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        running = await ready(w)
        w.router.away = True
        await until(lambda: w.life.session.failures >= 2)
        assert w.life.state is State.READY and not running.done()
        w.router.away = False
        count = len(w.router.renewals)
        await until(lambda: len(w.router.renewals) > count)
        assert len(w.router.offers) == 1
        # What may have been lost is told anew.
        assert w.life.kv.replays >= 1


async def test_a_router_that_came_back_empty_gets_everything_again(tmp_path: Path) -> None:
    """Same incarnation, new epoch, the gate passed again; the engine never stopped."""
    async with living(tmp_path) as w:
        await ready(w)
        w.router.lease = None
        w.router.admitted.clear()
        await until(lambda: len(w.router.admitted) == 1 and w.life.state is State.READY)
        assert [o.incarnation for o in w.router.offers] == ["w1-abc", "w1-abc"]
        checks = {c.name: c for c in w.router.admitted[0][1]}
        assert checks[gc.LEASE].evidence == {"epoch": 2}
        assert w.engine.stopped == 0


@pytest.mark.parametrize("how", ["stale", "lost"])
async def test_a_fenced_worker_stops_serving(tmp_path: Path, how: str) -> None:
    async with living(tmp_path) as w:
        running = await ready(w)
        if how == "stale":
            w.router.fail_next = [StaleEpoch("epoch", 9, 1, "stop")]
        else:
            w.router.register_error = LostLease("w1", "w1-abc", "a newer incarnation took over")
            w.router.fail_next = [LostLease("w1", "w1-abc", "another incarnation has it")]
        assert await asyncio.wait_for(running, 5) is ExitCode.FENCED
        assert w.engine.stopped == 1
        assert not w.router.left, "the name is somebody else's now (B145)"


async def test_the_engines_death_ends_the_worker_loudly(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        running = await ready(w)
        w.engine.returncode = -11
        assert await asyncio.wait_for(running, 5) is ExitCode.ENGINE_DIED
        assert "ended with -11" in w.router.left[0]
        last = w.router.renewals[-1].progress
        assert last is not None and "ended with -11" in last.failure


async def test_kv_events_travel_and_are_replayed_when_asked(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        await ready(w)
        w.engine.events.put_nowait(KvEventBatch(0, (KvEvent("stored", (1, 2, 3)),)))

        def told() -> list[KvEventBatch]:
            return [b for r in w.router.renewals for b in r.kv_events]

        await until(lambda: len(told()) == 1)
        assert told()[0].sequence == 1
        w.router.directives = [Directive("replay_kv")]
        await until(lambda: len(told()) == 2)
        assert [e.kind for e in told()[1].events] == ["cleared", "stored"]
        assert told()[1].sequence == 2


async def test_metrics_and_health_are_served(tmp_path: Path) -> None:
    from readyplane_agent.engines.exchange import exchange

    async with living(tmp_path) as w:
        await ready(w)
        page = (await exchange(w.life.transfer.url, "/metrics")).body.decode()
        assert 'readyplane_agent_start_segment_seconds{worker_id="w1"' in page
        size = ART.manifest.size_bytes
        assert f'tier="L4"}} {size}' in page
        health = await exchange(w.life.transfer.url, "/healthz")
        assert (health.status, health.body) == (200, b"ready\n")


async def test_a_router_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        w.router.away = True
        begin(w)
        await asyncio.sleep(0.3)
        assert w.life.state is State.NEW
        w.router.away = False
        await until(lambda: w.life.state is State.READY)


async def test_a_router_that_is_away_during_a_start_is_waited_for(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        w.engine.init_s = 0.3
        begin(w)
        await until(lambda: w.life.state is State.STARTING)
        w.router.away = True
        await asyncio.sleep(0.8)
        assert w.life.state in {State.PROVING, State.STARTING}
        w.router.away = False
        await until(lambda: w.life.state is State.READY)


async def test_a_lease_that_is_lost_during_a_start_is_asked_for_again(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        w.engine.init_s = 0.3
        begin(w)
        await until(lambda: w.life.state is State.STARTING)
        w.router.lease = None
        await until(lambda: w.life.state is State.READY)
        assert [o.incarnation for o in w.router.offers] == ["w1-abc", "w1-abc"]
        checks = {c.name: c for c in w.router.admitted[0][1]}
        assert checks[gc.LEASE].evidence == {"epoch": 2}


async def test_a_router_that_refuses_for_good_is_not_asked_again(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        w.router.register_error = Unauthenticated()
        assert await asyncio.wait_for(begin(w), 5) is ExitCode.START_FAILED
        assert "not authenticated" in w.life.trace.failure


async def test_an_unwanted_start_leaves_without_draining(tmp_path: Path) -> None:
    async with living(tmp_path) as w:
        w.engine.hang = True
        w.router.directives = [Directive("drain", 300.0, "not needed any more")]
        assert await asyncio.wait_for(begin(w), 5) is ExitCode.LEFT
        assert w.engine.stopped == 1
