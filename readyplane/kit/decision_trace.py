"""The span of a scale decision, at ids that follow from the decision's own id (R24.2).

Owns the ids. The planner exports the span; whoever a decision has set going (the start of a worker is
a trace of its own) links to it without having been told more than the decision's id. OpenTelemetry is
imported only while traces are exported.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from readyplane.kit.telemetry import span_attributes, tracer, tracing_on

_given: ContextVar[tuple[int, int] | None] = ContextVar("given_span_ids", default=None)
_planner = tracer("planner")


def decision_ids(decision_id: str) -> tuple[int, int]:
    """(trace id, span id) of a decision: 16 and 8 bytes of its hash, neither of them 0."""
    found = hashlib.sha256(b"readyplane/decision/" + decision_id.encode()).digest()
    return int.from_bytes(found[:16], "big") or 1, int.from_bytes(found[16:24], "big") or 1


def id_generator() -> Any:
    """Ids of spans for a tracer provider: random ones, but for the span of a decision."""
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Ids(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            found = _given.get()
            return super().generate_trace_id() if found is None else found[0]

        def generate_span_id(self) -> int:
            found = _given.get()
            return super().generate_span_id() if found is None else found[1]

    return Ids()


def export_decision(decision_id: str, **more: object) -> None:
    """The span of a decision that is carried out from now on; nothing while tracing is off."""
    if not tracing_on():
        return
    from opentelemetry.context import Context

    attributes = span_attributes(scale_decision_id=decision_id, **more)
    with _at(decision_ids(decision_id)):
        # A context without a span: it is the root of its trace, whatever runs around it.
        span = _planner.start_span("planner.decision", Context(), attributes=attributes)
    span.end()


def decision_links(decision_id: str) -> list[Any]:
    """Links to the decision for a span that it caused; none without a decision or tracing."""
    if not decision_id or not tracing_on():
        return []
    from opentelemetry.trace import Link, SpanContext, TraceFlags

    trace_id, span_id = decision_ids(decision_id)
    flags = TraceFlags(TraceFlags.SAMPLED)
    found = SpanContext(trace_id, span_id, is_remote=True, trace_flags=flags)
    return [Link(found, span_attributes(scale_decision_id=decision_id))]


@contextmanager
def _at(ids: tuple[int, int]) -> Iterator[None]:
    token = _given.set(ids)
    try:
        yield
    finally:
        _given.reset(token)
