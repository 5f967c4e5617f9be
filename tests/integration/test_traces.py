"""Traces of the running system, as a collector gets them: starts by segment, requests end to end."""

from __future__ import annotations

import time
from collections import defaultdict

from readyplane.core.startup import SegmentName, WeightTier
from tests.integration.collector import Span
from tests.integration.conftest import FullStack

DECISION = "readyplane.scale_decision_id"
WHO = ("worker_class", "tier", "mode", "generation")
ALWAYS = {
    *("schedule", "runtime_import", "artifact_discovery", "arena_prefault", "host_to_device"),
    *("parallel_init", "compile", "cuda_graph", "kv_profile", "warmup", "verify"),
    *("group_barrier", "canary", "router_registration"),
}
WITHIN_S = 60.0


def starts(full_stack: FullStack) -> dict[str, list[Span]]:
    """Spans of agents by trace, waited for: exporters send in batches."""
    deadline = time.monotonic() + WITHIN_S
    spans: list[Span] = []
    while time.monotonic() < deadline:
        spans = [s for s in full_stack.collector.spans if s.service == "readyplane-agent"]
        if sum(s.name == "start" for s in spans) >= 2:
            break
        time.sleep(0.2)
    traces: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        traces[span.trace_id].append(span)
    return traces


def test_each_start_is_one_trace_with_a_span_a_segment(full_stack: FullStack) -> None:
    traces = starts(full_stack)
    assert len(traces) >= 2
    workers = [spans[0].attributes["readyplane.incarnation"] for spans in traces.values()]
    assert len(set(workers)) == len(workers)
    known = {str(name) for name in SegmentName}
    for spans in traces.values():
        (root,) = [s for s in spans if s.name == "start"]
        segments = [s for s in spans if s is not root]
        assert {s.name for s in segments} <= known
        assert {s.name for s in segments} >= ALWAYS
        assert all(s.parent_id == root.span_id for s in segments)
        assert all(root.start_s <= s.start_s <= s.end_s <= root.end_s for s in segments)
        compile_span = next(s for s in segments if s.name == "compile")
        assert compile_span.attributes["readyplane.modelled"] is True
        canary = next(s for s in segments if s.name == "canary")
        assert canary.attributes["readyplane.modelled"] is False
        told = {name: root.attributes[f"readyplane.{name}"] for name in WHO}
        assert told["tier"] in {str(tier) for tier in WeightTier if tier is not WeightTier.UNKNOWN}
        assert told["mode"] == "jit" and told["generation"] >= 1 and told["worker_class"]
        for segment in segments:
            assert {n: segment.attributes[f"readyplane.{n}"] for n in WHO} == told


def test_a_start_links_to_the_span_of_the_decision_that_ordered_it(full_stack: FullStack) -> None:
    deadline = time.monotonic() + WITHIN_S
    decided: dict[str, Span] = {}
    roots: list[Span] = []
    while time.monotonic() < deadline:
        spans = list(full_stack.collector.spans)
        decided = {s.attributes[DECISION]: s for s in spans if s.name == "planner.decision"}
        roots = [s for spans in starts(full_stack).values() for s in spans if s.name == "start"]
        if roots and {r.attributes[DECISION] for r in roots} <= decided.keys():
            break
        time.sleep(0.2)
    for root in roots:
        decision = decided[root.attributes[DECISION]]
        assert decision.service == "readyplane-planner"
        assert root.links == ((decision.trace_id, decision.span_id),)
        assert root.trace_id != decision.trace_id  # one decision orders many starts
        assert decision.parent_id == ""
        assert decision.start_s <= root.start_s + 1.0


def test_the_decision_that_ordered_a_start_is_in_its_trace_and_on_the_page(
    full_stack: FullStack,
) -> None:
    traced = {s.attributes[DECISION] for spans in starts(full_stack).values() for s in spans}
    state = full_stack.state()
    shown = {d["decision_id"] for d in state["decisions"]}
    ordered_by = {w["scale_decision_id"] for w in state["workers"]}
    assert traced
    assert traced <= shown
    assert ordered_by <= shown


def test_a_request_is_one_trace_from_gateway_to_router(full_stack: FullStack) -> None:
    full_stack.drive(2.0, rate_rps=2.0)
    deadline = time.monotonic() + WITHIN_S
    joined: set[str] = set()
    while not joined and time.monotonic() < deadline:
        time.sleep(0.3)
        spans = list(full_stack.collector.spans)
        requests = {s.trace_id for s in spans if s.name == "gateway.request"}
        routed = {s.trace_id for s in spans if s.service == "readyplane-router"}
        joined = requests & routed
    assert joined
