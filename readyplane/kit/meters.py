"""The metric registry of one process: families by name, with bounded labels.

Owns what `/metrics` shows. Apart from `telemetry`, whose names `Metrics` and `metrics` lead here,
because importing a metrics library costs an agent more than anything else that it does not need.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
)

SERIES_MAX = 5_000
OTHER = "other"
SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip

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
