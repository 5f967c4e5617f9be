"""Segments of a start, and the spans made of them."""

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.startup import Segment, SegmentName, StartMode, WeightTier, critical_path
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane_agent import spans
from readyplane_agent.settings import AgentSettings
from readyplane_agent.trace import SEAM_S_MAX, StartTrace


class Ticking:
    """A clock that tests move."""

    now_s = 10.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s + 1_000_000.0

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


def test_the_process_start_is_on_the_monotonic_clock() -> None:
    clock = SystemClock()
    code = (
        "from readyplane.kit.clock import SystemClock\n"
        "from readyplane_agent.trace import process_start_s\n"
        "print(process_start_s(now_s=SystemClock().monotonic_s()))"
    )
    before_s = clock.monotonic_s()
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        spawned_s = clock.monotonic_s()
        found = float(child.communicate(timeout=30)[0])
    tick_s = 0.01
    assert before_s - 2 * tick_s <= found <= spawned_s + 2 * tick_s


def test_a_step_that_follows_has_what_leads_to_it_and_no_more() -> None:
    clock = Ticking()
    trace = StartTrace(clock, process_start_s=10.0)
    with trace.span(SegmentName.VERIFY, follows=True) as first:
        clock.now_s = 11.0
    assert first.start_s == 10.0  # nothing went before it
    clock.now_s = 11.2
    with trace.span(SegmentName.CANARY, follows=True) as second:
        clock.now_s = 12.0
    assert second.start_s == 11.0
    clock.now_s = 12.3
    with trace.span(SegmentName.GROUP_BARRIER) as plain:
        clock.now_s = 13.0
        with trace.span(SegmentName.WARMUP, follows=True) as beside:
            clock.now_s = 13.5
    assert (plain.start_s, beside.start_s) == (12.3, 13.0)  # one runs: nothing is idle
    clock.now_s += SEAM_S_MAX + 0.01
    with trace.span(SegmentName.ROUTER_REGISTRATION, follows=True) as late:
        pass
    assert late.start_s == clock.now_s  # longer than any preparation: unexplained
    path = critical_path(trace.segments(), start_s=10.0, end_s=clock.now_s)
    assert path.unexplained_s == pytest.approx(0.3 + SEAM_S_MAX + 0.01)


def test_an_order_comes_before_its_process() -> None:
    trace = StartTrace(Ticking(), process_start_s=9.0, ordered_at_s=8.5)
    assert trace.begin_s == 8.5
    assert trace.segments() == (Segment(SegmentName.SCHEDULE, 8.5, 9.0),)
    # The kernel counts in ticks: a process never looks older than its order.
    late = StartTrace(Ticking(), process_start_s=8.495, ordered_at_s=8.5)
    assert (late.begin_s, late.process_start_s) == (8.5, 8.5)
    assert StartTrace(Ticking(), process_start_s=9.0).begin_s == 9.0


def test_a_block_that_breaks_leaves_its_segment_open() -> None:
    clock = Ticking()
    trace = StartTrace(clock, process_start_s=9.0)
    with trace.span(SegmentName.VERIFY, "all"):
        clock.now_s = 11.0
    with pytest.raises(ValueError), trace.span(SegmentName.CANARY):
        raise ValueError
    done, broken = trace.segments()
    assert (done.start_s, done.end_s, done.detail) == (10.0, 11.0, "all")
    assert broken.end_s is None
    assert trace.open_segment() == "canary"


def test_progress_has_the_engines_segments_and_a_bounded_log() -> None:
    clock = Ticking()
    trace = StartTrace(clock, process_start_s=9.0)
    size = 0
    with trace.span(SegmentName.WEIGHT_TRANSFER, lambda: f"{size} B"):
        trace.follow_engine(lambda: (Segment(SegmentName.COMPILE, 9.5, None, modelled=True),))
        size = 7
        told = trace.progress("x" * 10_000 + "end")
    assert [s.name for s in told.segments] == [SegmentName.COMPILE, SegmentName.WEIGHT_TRANSFER]
    assert told.segments[1].detail == "7 B"
    assert told.log_tail.endswith("end") and len(told.log_tail) == 2000
    path = critical_path(told.segments, start_s=9.0, end_s=12.0)
    assert sum(path.exclusive_s.values()) + path.unexplained_s == pytest.approx(path.wall_s)


class Recorder:
    """What is used of a tracer."""

    def __init__(self) -> None:
        self.spans: dict[str, dict[str, Any]] = {}

    def start_span(
        self,
        name: str,
        context: Any = None,
        *,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Any] = (),
        start_time: int | None = None,
    ) -> Any:
        found = {"attributes": attributes, "start": start_time, "links": links}
        self.spans[name] = found

        class Ended:
            def end(self, end_time: int | None = None) -> None:
                found["end"] = end_time

        return Ended()


def test_one_span_a_segment_under_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """R6.2, R24.2: wall times, and the decision that caused the start on every span."""
    recorder, flushed = Recorder(), []
    monkeypatch.setattr(spans, "tracer", lambda name: recorder)
    monkeypatch.setattr(spans, "setup_tracing", lambda *_: lambda: flushed.append(1))
    clock = Ticking()
    trace = StartTrace(clock, process_start_s=9.0, ordered_at_s=8.0)
    trace.add(SegmentName.COMPILE, 9.0, 9.5)
    trace.add(SegmentName.CANARY, 9.5, None)
    settings = AgentSettings(
        worker_id="w1",
        role=Role.DECODE,
        model="m",
        router="r:1",
        work_dir=Path("w"),
        worker_class="h200",
        generation=3,
        mode=StartMode.AOT,
        scale_decision_id="d-7",
        otlp_endpoint="collector:4317",
    )
    trace.failure = "the canary did not answer"
    tier = WeightTier.L0_PEER_GPU
    spans.export_start(settings, trace, incarnation="w1-a", tier=tier, end_s=10.0, clock=clock)
    assert set(recorder.spans) == {"start", "schedule", "compile", "canary"}
    for span in recorder.spans.values():
        told = {k.removeprefix("readyplane."): v for k, v in span["attributes"].items()}
        assert told["scale_decision_id"] == "d-7"
        who = (told["worker_class"], told["tier"], told["mode"], told["generation"])
        assert who == ("h200", "L0", "aot", 3)
        assert told["failure"] == trace.failure and told["ended_in"] == "canary"
    second = 1_000_000_000
    root, compiled = recorder.spans["start"], recorder.spans["compile"]
    assert (root["start"], root["end"]) == (1_000_008 * second, 1_000_010 * second)
    assert compiled["end"] - compiled["start"] == second // 2
    assert recorder.spans["canary"]["end"] == 1_000_010 * second
    assert flushed == [1]


def test_without_an_endpoint_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "setup_tracing", lambda *_: pytest.fail("must not be called"))
    settings = AgentSettings(
        worker_id="w", role=Role.BOTH, model="m", router="r:1", work_dir=Path("w")
    )
    trace = StartTrace(Ticking(), process_start_s=9.0)
    tier = WeightTier.UNKNOWN
    spans.export_start(settings, trace, incarnation="i", tier=tier, end_s=10.0, clock=Ticking())
