"""Logs that can be parsed and hold no secret, bounded metrics, and spans that cost nothing when off."""

import io
import json
import logging
import sys
from concurrent import futures
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from prometheus_client import Gauge, generate_latest

from readyplane.kit import telemetry
from readyplane.kit.telemetry import Metrics, mask_url, setup_logging, span_attributes


@pytest.mark.parametrize(
    "text, hidden, kept",
    [
        ("postgresql+asyncpg://me:pw%40d@h:1/db", "pw%40d", "postgresql+asyncpg://me:***@h:1/db"),
        ("redis://:pw@h/0 and http://a:b@c/", "pw", "redis://:***@h/0 and http://a:***@c/"),
        ("https://h/x?a=1&token=abc&b=2", "abc", "https://h/x?a=1&token=***&b=2"),
        ("authorization: Bearer abc.def-1", "abc", "authorization: Bearer ***"),
        ("http://host:80/path@x", "nothing", "http://host:80/path@x"),
        ("plain a:b@c", "nothing", "plain a:b@c"),
    ],
)
def test_secrets_are_masked(text: str, hidden: str, kept: str) -> None:
    assert mask_url(text) == kept
    assert hidden not in mask_url(text)


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Any:
    root, stream = logging.getLogger(), io.StringIO()
    before = (root.handlers[:], root.level)
    monkeypatch.setattr(sys, "stderr", stream)
    setup_logging("thing", "info")
    yield stream
    root.handlers[:], level = before
    root.setLevel(level)


def test_a_log_line_is_one_line_of_pairs(logged: io.StringIO) -> None:
    log = logging.getLogger("some.where")
    log.debug("not shown")
    log.info("two words", extra={"worker_id": "w-1", "why": 'a "b"\nc', "url": "redis://:pw@h/0"})
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    first, second = logged.getvalue().strip().split("\n")
    assert 'level=info service=thing logger=some.where msg="two words"' in first
    assert "worker_id=w-1" in first and r'why="a \"b\"\nc"' in first
    assert "pw" not in first
    assert "level=error" in second and "ValueError: broken" in json.loads(
        second.split("traceback=")[1]
    )


def test_setup_twice_logs_once(logged: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", logged)  # pytest has put another in its place by now
    setup_logging("thing", "info")
    logging.getLogger("x").info("once")
    assert logged.getvalue().count("msg=once") == 1


def text_of(metrics: Metrics) -> str:
    return generate_latest(metrics).decode()


def test_asking_twice_is_the_same_family() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.counter("readyplane_x_total", "x", ["pool"]).labels("prefill").inc()
        metrics.gauge("readyplane_g", "g").labels().set(3)
        metrics.histogram("readyplane_h_seconds", "h", ["pool"]).labels(pool="decode").observe(3.0)
    assert 'readyplane_x_total{pool="prefill"} 2.0' in text_of(metrics)
    assert "readyplane_g 3.0" in text_of(metrics)
    assert 'readyplane_h_seconds_bucket{le="4.0",pool="decode"} 2.0' in text_of(metrics)


def test_a_plain_prometheus_metric_may_use_the_registry() -> None:
    metrics = Metrics()
    Gauge("readyplane_plain", "x", registry=metrics).set(4)
    assert "readyplane_plain 4.0" in text_of(metrics)


def test_the_series_of_a_gone_worker_go() -> None:
    metrics = Metrics()
    running = metrics.gauge("readyplane_running", "x", ["worker_id", "pool"])
    for worker in ("w-1", "w-2"):
        for pool in ("prefill", "decode"):
            running.labels(worker, pool).set(1)
    metrics.counter("readyplane_other_total", "x", ["pool"]).labels("prefill").inc()
    assert metrics.forget(worker_id="w-1") == 2
    assert metrics.forget(worker_id="w-1") == 0
    shown = text_of(metrics)
    assert "w-1" not in shown and shown.count('worker_id="w-2"') == 2
    assert 'readyplane_other_total{pool="prefill"} 1.0' in shown
    running.labels(pool="decode", worker_id="w-1").set(5)
    assert 'readyplane_running{pool="decode",worker_id="w-1"} 5.0' in text_of(metrics)


def test_what_callers_send_cannot_grow_memory() -> None:
    metrics = Metrics(series_max=10)
    requests = metrics.counter("readyplane_requests_total", "x", ["tenant"])
    for i in range(1_000):
        requests.labels(f"tenant-{i}").inc()
    shown = text_of(metrics)
    assert shown.count("readyplane_requests_total{") <= 11
    assert 'readyplane_requests_total{tenant="other"} 990.0' in shown
    assert "readyplane_metric_series_overflow_total 990.0" in shown
    requests.labels("tenant-3").inc()
    assert 'readyplane_requests_total{tenant="tenant-3"} 2.0' in text_of(metrics)


def test_spans_are_nothing_while_tracing_is_off() -> None:
    tracer = telemetry.tracer("x")
    with tracer.start_as_current_span("a", attributes={"b": 1}) as span:
        span.set_attribute("c", 2)
        assert telemetry.inject() == ()
    tracer.start_span("d", start_time=1).end(end_time=2)
    assert telemetry.extract([("traceparent", "00-1-1-01")]) is None
    assert not telemetry.tracing_on()
    telemetry.setup_tracing("x", "")()


def test_the_decision_is_under_one_name() -> None:
    assert span_attributes(scale_decision_id="d-1", pool="prefill") == {
        "readyplane.scale_decision_id": "d-1",
        "readyplane.pool": "prefill",
    }
    assert span_attributes() == {}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - given by the contract
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.spans += [(resource.resource, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_arrive_at_an_otlp_endpoint() -> None:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    early = telemetry.tracer("early")
    stop = telemetry.setup_tracing("thing", f"http://127.0.0.1:{port}")
    try:
        with early.start_as_current_span(
            "decide", attributes=span_attributes(scale_decision_id="d-7")
        ):
            carried = telemetry.inject()
        context = telemetry.extract(carried)
        early.start_span("load", context, start_time=1_000, attributes={"x": 1}).end(end_time=3_000)
    finally:
        stop()
        server.stop(0)
    assert not telemetry.tracing_on()
    (resource, decide), (_, load) = sorted(collector.spans, key=lambda s: s[1].name)
    assert any(a.value.string_value == "readyplane-thing" for a in resource.attributes)
    assert decide.attributes[0].key == "readyplane.scale_decision_id"
    assert (load.parent_span_id, load.trace_id) == (decide.span_id, decide.trace_id)
    assert (load.start_time_unix_nano, load.end_time_unix_nano) == (1_000, 3_000)
