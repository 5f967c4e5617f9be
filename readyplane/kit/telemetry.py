"""Logs, metrics and traces of one process; shells write them from what brains return.

Owns the log format, the process's metric registry and the switch of tracing. OpenTelemetry is
imported only when an endpoint is configured; without one every span is a no-op.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Generic, Protocol, TypeVar, cast

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
)

DECISION_ATTRIBUTE = "readyplane.scale_decision_id"
SERIES_MAX = 5_000
OTHER = "other"
SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip

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


# --------------------------------------------------------------------------- metrics


M = TypeVar("M", Counter, Gauge, Histogram)


class Family(Generic[M]):
    """One metric name with its labels; a child is bound once and afterwards costs a lookup.

    At most `series_max` label combinations are kept. Further ones share the child whose label
    values are all `other`, and are counted, so that what callers send cannot grow memory.
    """

    def __init__(
        self, metric: M, labels: tuple[str, ...], overflow: Counter, series_max: int
    ) -> None:
        self._metric: M = metric
        self._labels = labels
        self._children: dict[tuple[str, ...], M] = {}
        self._overflow = overflow
        self._series_max = series_max

    def labels(self, *values: object, **named: object) -> M:
        """The child of these label values, given in order or by name."""
        if named:
            values = (*values, *(named[name] for name in self._labels[len(values) :]))
        key = tuple(map(str, values))
        child = self._children.get(key)
        return self._bind(key) if child is None else child

    def _bind(self, key: tuple[str, ...]) -> M:
        if len(self._children) >= self._series_max:
            self._overflow.inc()
            key = (OTHER,) * len(self._labels)
        child = self._children.get(key)
        if child is None:
            child = self._metric.labels(*key) if self._labels else self._metric
            self._children[key] = child
        return child

    def forget(self, **values: object) -> int:
        """Remove every series with these label values; returns how many."""
        if not values or not set(values) <= set(self._labels):
            return 0
        wanted = [(self._labels.index(name), str(value)) for name, value in values.items()]
        gone = [key for key in self._children if all(key[i] == value for i, value in wanted)]
        for key in gone:
            del self._children[key]
            with contextlib.suppress(KeyError):
                self._metric.remove(*key)
        return len(gone)


class Metrics(CollectorRegistry):
    """The metric registry of a process. Asking twice for one name gives the same family."""

    def __init__(self, *, process: bool = False, series_max: int = SERIES_MAX) -> None:
        super().__init__(auto_describe=True)
        self._families: dict[str, Family[Any]] = {}
        self._series_max = series_max
        self._overflow = Counter(
            "readyplane_metric_series_overflow_total",
            "Label combinations counted under `other` because their metric has its most series",
            registry=self,
        )
        if process:
            for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
                self.register(collector)

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Family[Counter]:
        """A counter family; the exposed name ends with `_total`."""
        return self._family(name, labels, lambda: Counter(name, text, labels, registry=self))

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Family[Gauge]:
        """A gauge family."""
        return self._family(name, labels, lambda: Gauge(name, text, labels, registry=self))

    def histogram(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS_BUCKETS,
    ) -> Family[Histogram]:
        """A histogram family; buckets default to seconds from 1 ms to half an hour."""
        return self._family(
            name, labels, lambda: Histogram(name, text, labels, buckets=buckets, registry=self)
        )

    def forget(self, **values: object) -> int:
        """Remove every series with these label values, for example of a worker that is gone.

        Families that lack one of the labels keep what they have. Returns how many series went.
        """
        return sum(family.forget(**values) for family in self._families.values())

    def _family(self, name: str, labels: Sequence[str], make: Callable[[], M]) -> Family[M]:
        known = self._families.get(name)
        if known is None:
            known = Family(make(), tuple(labels), self._overflow, self._series_max)
            self._families[name] = known
        return cast("Family[M]", known)


metrics = Metrics(process=True)
"""The registry that this process's `/metrics` shows."""

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
        start_time: int | None = None,
    ) -> Span:
        real = self._find()
        if real is None:
            return _NO_SPAN
        return cast(
            "Span", real.start_span(name, context, attributes=attributes, start_time=start_time)
        )


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

    provider = TracerProvider(resource=Resource.create({"service.name": f"readyplane-{name}"}))
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
