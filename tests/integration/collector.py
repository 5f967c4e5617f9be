"""A double of an OpenTelemetry collector: takes spans from the real exporter and keeps them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


@dataclass(frozen=True)
class Span:
    """One span; ids in hex, times in seconds; `links` are (trace id, span id)."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...] = ()


class Collector(pb_grpc.TraceServiceServicer):
    """Serves `TraceService` on a free port of 127.0.0.1 from a thread."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        pb_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(  # noqa: N802 - name of the rpc
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        for resource in request.resource_spans:
            service = _attributes(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += [
                    Span(
                        service=service,
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        start_s=span.start_time_unix_nano / 1e9,
                        end_s=span.end_time_unix_nano / 1e9,
                        attributes=_attributes(span.attributes),
                        links=tuple((k.trace_id.hex(), k.span_id.hex()) for k in span.links),
                    )
                    for span in scope.spans
                ]
        return pb.ExportTraceServiceResponse()

    def stop(self) -> None:
        """Take no more."""
        self._server.stop(1.0).wait()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
