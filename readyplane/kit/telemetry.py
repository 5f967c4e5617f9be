"""Logs, metrics and traces of one process; shells write them from what brains return.

Owns the log format and the switch of tracing; the metric registry is `meters`, found here by name.
OpenTelemetry is imported only when an endpoint is configured; without one every span is a no-op.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from readyplane.kit.meters import Metrics, metrics

DECISION_ATTRIBUTE = "readyplane.scale_decision_id"
__all__ = [
    "Metrics",
    "Span",
    "Tracer",
    "extract",
    "inject",
    "mask_url",
    "metrics",
    "setup_logging",
    "setup_tracing",
    "span_attributes",
    "tracer",
    "tracing_on",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Names of `meters`, imported by those who have metrics (PEP 562)."""
        if name in {"Metrics", "metrics"}:
            from readyplane.kit import meters

            return getattr(meters, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --------------------------------------------------------------------------- logs

_USER_INFO = re.compile(r"(?<=://)[^/@\s'\"]*:[^/@\s'\"]*@")
_SECRET_QUERY = re.compile(
    r"(?i)([?&](?:password|token|secret|api_key|key|sig|signature)=)[^&\s'\"]+"
)
_BEARER = re.compile(r"(?i)(bearer\s+)[A-Za-z0-9._~+/=-]+")
_PLAIN_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def mask_url(text: str) -> str:
    """The text with the passwords of its URLs, secret query values and bearer tokens masked."""
    text = _USER_INFO.sub(lambda m: m[0].partition(":")[0] + ":***@", text)
    return _BEARER.sub(r"\1***", _SECRET_QUERY.sub(r"\1***", text))


class _KeyValue(logging.Formatter):
    """`ts=… level=… service=… logger=… msg="…" key=value`; one line a record, traceback escaped."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds")
        pairs: dict[str, object] = {
            "ts": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "msg": record.getMessage(),
        }
        pairs.update((k, v) for k, v in vars(record).items() if k not in _PLAIN_RECORD)
        if record.exc_info:
            pairs["traceback"] = self.formatException(record.exc_info)
        return mask_url(" ".join(f"{key}={_quoted(value)}" for key, value in pairs.items()))


def _quoted(value: object) -> str:
    text = value if isinstance(value, str) else str(value)
    if text and not any(c in text for c in ' ="\n\t\\'):
        return text
    return json.dumps(text, ensure_ascii=False)


def setup_logging(name: str, level: str = "info") -> None:
    """Send this process's logs to stderr as key=value lines. Idempotent."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_KeyValue(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries that say on every call what our own logs and metrics say better.
    for noisy in ("httpx", "httpcore", "asyncio", "alembic", "uvicorn", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))


# --------------------------------------------------------------------------- traces


class Span(Protocol):
    """What is used of an OpenTelemetry span."""

    def set_attribute(self, key: str, value: Any) -> None:
        """Attach one attribute."""
        ...

    def record_exception(self, exception: BaseException) -> None:
        """Attach an exception."""
        ...

    def end(self, end_time: int | None = None) -> None:
        """End it, at a wall time in nanoseconds or now."""
        ...


class Tracer(Protocol):
    """What is used of an OpenTelemetry tracer."""

    def start_as_current_span(
        self, name: str, *, context: Any = None, attributes: Mapping[str, Any] | None = None
    ) -> contextlib.AbstractContextManager[Span]:
        """A span around the block; spans inside become its children."""
        ...

    def start_span(
        self,
        name: str,
        context: Any = None,
        *,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Any] = (),
        start_time: int | None = None,
    ) -> Span:
        """A span that the caller ends; `start_time` is a wall time in nanoseconds."""
        ...


class _NoSpan:
    def set_attribute(self, key: str, value: Any) -> None: ...

    def record_exception(self, exception: BaseException) -> None: ...

    def end(self, end_time: int | None = None) -> None: ...


class _Tracer:
    """Looks for the real tracer at each span, so that it may be made before tracing is set up."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._real: Any = None

    def _find(self) -> Any:
        if _on and self._real is None:
            from opentelemetry import trace

            self._real = trace.get_tracer(self._name)
        return self._real if _on else None

    @contextlib.contextmanager
    def start_as_current_span(
        self, name: str, *, context: Any = None, attributes: Mapping[str, Any] | None = None
    ) -> Iterator[Span]:
        real = self._find()
        if real is None:
            yield _NO_SPAN
            return
        with real.start_as_current_span(name, context=context, attributes=attributes) as span:
            yield span

    def start_span(
        self,
        name: str,
        context: Any = None,
        *,
        attributes: Mapping[str, Any] | None = None,
        links: Sequence[Any] = (),
        start_time: int | None = None,
    ) -> Span:
        real = self._find()
        if real is None:
            return _NO_SPAN
        found = real.start_span(
            name, context, attributes=attributes, links=links, start_time=start_time
        )
        return cast("Span", found)


_NO_SPAN = _NoSpan()
_on: dict[str, Callable[[], None]] = {}


def tracing_on() -> bool:
    """Whether `setup_tracing` was given an endpoint."""
    return bool(_on)


def setup_tracing(name: str, otlp_endpoint: str = "") -> Callable[[], None]:
    """Export spans to an OTLP/gRPC endpoint (`host:port` or `http://host:port`); off when empty.

    Returns:
        A call that sends what is left and stops exporting.
    """
    if not otlp_endpoint:
        return lambda: None
    if name in _on:
        return _on[name]
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from readyplane.kit.decision_trace import id_generator

    resource = Resource.create({"service.name": f"readyplane-{name}"})
    provider = TracerProvider(resource=resource, id_generator=id_generator())
    exporter = OTLPSpanExporter(
        endpoint=otlp_endpoint, insecure=not otlp_endpoint.startswith("https://"), timeout=2
    )
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=4096))
    trace.set_tracer_provider(provider)

    def stop() -> None:
        _on.pop(name, None)
        provider.shutdown()

    _on[name] = stop
    return stop


def tracer(name: str) -> Tracer:
    """A tracer; its spans are no-ops while tracing is off. May be kept from before it is on."""
    return _Tracer(name)


def inject() -> tuple[tuple[str, str], ...]:
    """The current trace context as gRPC metadata; empty while tracing is off."""
    if not _on:
        return ()
    from opentelemetry.propagate import inject as write

    carrier: dict[str, str] = {}
    write(carrier)
    return tuple(carrier.items())


def extract(metadata: Sequence[tuple[str, str | bytes]] | None) -> Any:
    """The trace context of gRPC metadata for `start_as_current_span(context=…)`, or None."""
    if not _on:
        return None
    from opentelemetry.propagate import extract as read

    return read({k: v for k, v in metadata or () if isinstance(v, str)})


def span_attributes(*, scale_decision_id: str = "", **more: object) -> dict[str, Any]:
    """Attributes of a span, with the decision that caused it under its one name (R24.2)."""
    found: dict[str, Any] = {f"readyplane.{name}": value for name, value in more.items()}
    if scale_decision_id:
        found[DECISION_ATTRIBUTE] = scale_decision_id
    return found
