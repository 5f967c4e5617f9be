"""The file that names sources beyond the router, checked, and those sources asked at once.

Owns the schema of `--signals FILE` and one bounded look at all of them. Where no router is there,
it also says what the queries then have to give. A missing unit or selector is refused at start with
the field that lacks it, never guessed (B10, B11).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from readyplane.core.errors import InvalidField
from readyplane.core.worker import Role, Worker
from readyplane.kit.clock import Clock
from readyplane_planner.engine_source import Engines, EngineSource, Target
from readyplane_planner.policy_words import named
from readyplane_planner.prometheus_source import PrometheusSource
from readyplane_planner.signals.outside import LATENCIES, Beyond, Outside, Silent
from readyplane_planner.signals.queries import Query, query
from readyplane_planner.yaml_text import read_yaml

TARGETS_MAX = 2048
QUERIES_MAX = 64
Seconds = Annotated[float, Field(gt=0.0, le=3600.0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class QueryEntry(_Strict):
    """One signal: PromQL with `$selector` in the braces of every metric, and its unit."""

    query: str = Field(min_length=1, max_length=4000)
    unit: str | None = None
    window_s: Seconds | None = None


class PrometheusEntry(_Strict):
    """A server, the labels of the one deployment, and the queries by signal."""

    url: str = Field(pattern=r"^https?://[^/\s]+")
    selector: dict[str, str] = Field(default_factory=dict)
    lookback_s: Seconds = 30.0
    queries: dict[str, QueryEntry] = Field(min_length=1, max_length=QUERIES_MAX)


class TargetEntry(_Strict):
    """One engine. `role` and `worker_class` are needed where there is no router."""

    url: str = Field(pattern=r"^(https?|tcp)://[^/\s]+")
    engine: Literal["vllm", "sglang", "fpm"]
    worker_id: str = ""
    role: Literal["prefill", "decode", "both"] | None = None
    worker_class: str = ""


class EnginesEntry(_Strict):
    """Engines that are read beside what their agents report."""

    discover: Literal["", "vllm", "sglang"] = ""
    targets: list[TargetEntry] = Field(default_factory=list, max_length=TARGETS_MAX)


class SignalsFile(_Strict):
    """`within_s` bounds every reading of one look; no tick waits longer for them."""

    within_s: Annotated[float, Field(gt=0.0, le=5.0, allow_inf_nan=False)] = 1.0
    stale_after_s: Seconds = 10.0
    prometheus: PrometheusEntry | None = None
    engines: EnginesEntry | None = None


class SignalSources:
    """Prometheus and engines, asked side by side.

    Args:
        alone: no router tells of the fleet: the targets are it.
    """

    def __init__(
        self,
        *,
        prometheus: PrometheusSource | None,
        engines: EngineSource | None,
        within_s: float,
        model: str,
        alone: bool,
    ) -> None:
        self._prometheus, self._engines = prometheus, engines
        self._within_s, self._model, self._alone = within_s, model, alone

    async def look(self, workers: Sequence[Worker]) -> Beyond:
        """Both at once, within the bound. `workers`: of the router, as last known."""
        within_s = self._within_s
        asks = self._prometheus.ask(within_s=within_s) if self._prometheus is not None else _none()
        reads = (
            self._engines.read(workers, within_s=within_s) if self._engines is not None else None
        )
        readings, read = await asyncio.gather(asks, reads if reads is not None else _no_engines())
        silent = {r.why for r in readings if r.value is None and "Prometheus" in r.why}
        fleet = None
        if self._alone and self._engines is not None:
            fleet = self._engines.fleet(read, self._model)
        said = (*(Silent("prometheus", why) for why in sorted(silent)), *read.silent)
        return Beyond(read.samples, Outside(readings, said), fleet)

    async def aclose(self) -> None:
        """Close what was opened."""
        for source in (self._prometheus, self._engines):
            if source is not None:
                await source.aclose()


async def _none() -> tuple[()]:
    return ()


async def _no_engines() -> Engines:
    return Engines()


def load_signals(path: Path) -> SignalsFile:
    """The file, checked field by field.

    Raises:
        InvalidField, UnknownField: naming the field, as in `signals.prometheus.url`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(
            "--signals", str(path), f"give a readable YAML file ({error})"
        ) from error
    document = read_yaml(text, field="--signals", value=str(path))
    try:
        return SignalsFile.model_validate(document)
    except ValidationError as error:
        found = named(error, SignalsFile, root="signals")
        if not found.field.endswith(".url"):
            raise found from error
        # A URL may carry a password: it is named and not shown.
        raise InvalidField(found.field, "***", found.remedy) from error


def make_sources(
    found: SignalsFile, *, model: str, clock: Clock, alone: bool, token: str = ""
) -> SignalSources:
    """The sources of a checked file.

    Args:
        alone: there is no router. token: bearer token for Prometheus.

    Raises:
        InvalidField: a query without unit or selector, a target that lacks what is needed, or,
            without a router, a signal that nobody gives.
    """
    asked = _queries(found.prometheus)
    targets = [
        _target(entry, place, alone=alone)
        for place, entry in enumerate(found.engines.targets if found.engines is not None else ())
    ]
    if alone:
        _check_alone({q.signal for q in asked}, targets)
    prometheus = engines = None
    if found.prometheus is not None:
        prometheus = PrometheusSource(
            found.prometheus.url,
            asked,
            clock=clock,
            lookback_s=found.prometheus.lookback_s,
            token=token,
        )
    if found.engines is not None:
        engines = EngineSource(
            targets,
            clock=clock,
            discover=found.engines.discover,
            stale_after_s=found.stale_after_s,
        )
    return SignalSources(
        prometheus=prometheus, engines=engines, within_s=found.within_s, model=model, alone=alone
    )


def _queries(entry: PrometheusEntry | None) -> list[Query]:
    if entry is None:
        return []
    field = "signals.prometheus.queries"
    asked = [
        query(name, q.query, q.unit, selector=entry.selector, window_s=q.window_s, field=field)
        for name, q in entry.queries.items()
    ]
    names = set(entry.queries)
    for stem in LATENCIES:
        whole = {f"{stem}_{part}" for part in ("p50", "p90", "p99", "count")}
        if names & whole and whole - names:
            lacking = sorted(whole - names)[0]
            remedy = f"a latency is known by {', '.join(sorted(whole))}"
            raise InvalidField(f"{field}.{lacking}", None, remedy)
    return asked


def _target(entry: TargetEntry, place: int, *, alone: bool) -> Target:
    field = f"signals.engines.targets.{place}"
    streamed = entry.engine == "fpm"
    if entry.url.startswith("tcp://") != streamed:
        scheme = "tcp://HOST:PORT" if streamed else "http://HOST:PORT/metrics"
        raise InvalidField(f"{field}.url", "***", f"an engine {entry.engine} is at {scheme}")
    if not entry.worker_id and (alone or not streamed):
        raise InvalidField(f"{field}.worker_id", "", "name the worker that it belongs to")
    if alone and (entry.role is None or not entry.worker_class):
        lacking = "role" if entry.role is None else "worker_class"
        remedy = "without a router nobody else tells of it"
        raise InvalidField(f"{field}.{lacking}", getattr(entry, lacking), remedy)
    role = Role(entry.role) if entry.role is not None else Role.BOTH
    return Target(entry.url, entry.engine, entry.worker_id, role, entry.worker_class)


def _check_alone(asked: set[str], targets: Sequence[Target]) -> None:
    """What nobody but a query tells where there is no router."""
    for name in ("arrivals", "prefill_work", "finished"):
        if name not in asked:
            remedy = "without a router it has to come from a query"
            raise InvalidField(f"signals.prometheus.queries.{name}", None, remedy)
    if not asked & {"queue", "waiting"}:
        remedy = "give the queued tokens, or `waiting` requests"
        raise InvalidField("signals.prometheus.queries.queue", None, remedy)
    if not targets:
        raise InvalidField("signals.engines.targets", [], "without a router they are the fleet")
