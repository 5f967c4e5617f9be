"""The trace of one start, exported once it is over (R6.2): one span a segment, under one root.

Owns the turning of monotonic segments into wall-clock spans; the exporter is the kit's. The root
links to the span of the decision that ordered the start. Nothing is imported or sent unless an
endpoint is configured, and never before the worker is ready.
"""

from __future__ import annotations

from readyplane.core.startup import WeightTier
from readyplane.kit.clock import Clock
from readyplane.kit.decision_trace import decision_links
from readyplane.kit.telemetry import setup_tracing, span_attributes, tracer
from readyplane_agent.settings import AgentSettings
from readyplane_agent.trace import StartTrace

NS = 1_000_000_000


def export_start(
    settings: AgentSettings,
    trace: StartTrace,
    *,
    incarnation: str,
    tier: WeightTier,
    end_s: float,
    clock: Clock,
) -> None:
    """Send the spans of a finished start. Blocking for as long as the exporter takes.

    Args:
        tier: where the weights came from. end_s: when it was over, on the trace's clock.
    """
    if not settings.otlp_endpoint:
        return
    flush = setup_tracing("agent", settings.otlp_endpoint)
    offset_s = clock.wall_s() - clock.monotonic_s()

    def at(seconds: float) -> int:
        return int((seconds + offset_s) * NS)

    attributes = span_attributes(
        scale_decision_id=settings.scale_decision_id,
        worker_id=settings.worker_id,
        incarnation=incarnation,
        role=str(settings.role),
        worker_class=settings.worker_class,
        model=settings.model,
        tier=str(tier),
        mode=str(settings.mode),
        generation=settings.generation,
        node=settings.node,
        standby=settings.standby,
        failure=trace.failure,
        ended_in=trace.open_segment() if trace.failure else "",
    )
    spans = tracer("agent")
    root = spans.start_span(
        "start",
        attributes=attributes,
        links=decision_links(settings.scale_decision_id),
        start_time=at(trace.begin_s),
    )
    from opentelemetry.trace import Span, set_span_in_context

    context = set_span_in_context(root) if isinstance(root, Span) else None
    for segment in trace.segments():
        span = spans.start_span(
            str(segment.name),
            context,
            attributes={
                **attributes,
                "readyplane.modelled": segment.modelled,
                "readyplane.detail": segment.detail,
            },
            start_time=at(segment.start_s),
        )
        span.end(at(end_s if segment.end_s is None else segment.end_s))
    root.end(at(end_s))
    flush()
