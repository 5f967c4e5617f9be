"""Prometheus queries: what is asked, that it names one deployment, and what an answer is worth.

Owns the checks at start (unit, deployment selector) and the reading of `/api/v1/query`. An empty
answer is no data, never zero (B02); several series are no number; a store shared with other
deployments is never added up over them (B10).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from readyplane.core.errors import InvalidField
from readyplane_planner.signals import samples, units
from readyplane_planner.signals.outside import SIGNAL_UNITS, Reading

PLACE = "$selector"
_TOKEN = re.compile(
    r'"(?:[^"\\]|\\.)*"'
    r"|'(?:[^'\\]|\\.)*'"
    r"|`[^`]*`"
    r"|\{[^}]*\}"
    r"|\[[^\]]*\]"
    r"|[A-Za-z_:][A-Za-z0-9_:]*"
    r"|[0-9][0-9A-Za-z_.]*"
    r"|\S"
)
_LISTS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS = _LISTS | {"and", "or", "unless", "bool", "offset", "atan2", "inf", "nan"}
_FILLED = re.compile(r"\bor\b\s*(?:(?:on|ignoring)\s*\([^)]*\)\s*)?vector\s*\(", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z_:]")
_LABEL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Query:
    """One signal's query as it is sent; `unit` is the declared one, `window_s` of a latency."""

    signal: str
    text: str
    unit: str
    window_s: float = 0.0


def query(
    signal: str,
    text: str,
    unit: object,
    *,
    selector: Mapping[str, str],
    window_s: float | None = None,
    field: str = "prometheus.queries",
) -> Query:
    """A checked query with the deployment's selector in it.

    Args:
        text: PromQL in which every metric carries `{$selector}`, beside labels of its own.
        selector: label names and values of this one deployment. field: where it was written.

    Raises:
        InvalidField: unknown signal, no unit, no selector, a metric that does not carry it, or a
            number in the place of no data.
    """
    where = f"{field}.{signal}"
    if signal not in SIGNAL_UNITS:
        raise InvalidField(where, text, f"use one of {', '.join(SIGNAL_UNITS)}")
    units.factor(unit, SIGNAL_UNITS[signal], field=f"{where}.unit")
    latency = SIGNAL_UNITS[signal] == "s" or signal.endswith("_count")
    if latency and not window_s:
        raise InvalidField(f"{where}.window_s", window_s, "say how many seconds it covers")
    if _FILLED.search(text):
        remedy = "leave `or vector(…)` away: lost data would be read as no load (B02)"
        raise InvalidField(f"{where}.query", text, remedy)
    bare = unselected(text)
    if bare or PLACE not in text:
        what = f"{bare} may be of any deployment; " if bare else ""
        remedy = f"{what}write {PLACE} into the braces of every metric"
        raise InvalidField(f"{where}.query", text, remedy)
    return Query(signal, text.replace(PLACE, matchers(selector, field)), str(unit), window_s or 0.0)


def matchers(selector: Mapping[str, str], field: str = "prometheus") -> str:
    """The selector in PromQL. Raises InvalidField without one, or with a label that cannot be."""
    where = f"{field.removesuffix('.queries')}.selector"
    if not selector:
        remedy = "name the labels of this one deployment, as in {namespace: prod, model_name: m}"
        raise InvalidField(where, dict(selector), remedy)
    for label, value in selector.items():
        if not _LABEL.fullmatch(label) or not value:
            raise InvalidField(f"{where}.{label}", value, "give a label name and a value")
    return ",".join(f"{k}={_quoted(v)}" for k, v in selector.items())


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def unselected(text: str) -> str:
    """The first metric of a query that does not carry the selector; empty when all do."""
    parts: list[str] = [*_TOKEN.findall(text), "", ""]
    listed = False
    for place, part in enumerate(parts[:-2]):
        before, after = parts[place - 1] if place else "", parts[place + 1]
        if part in "()":
            listed = part == "(" and (before in _LISTS or listed)
        elif part.startswith("{"):
            if PLACE not in part:
                return f"{before if _NAME.match(before) else ''}{part}"
        elif _NAME.match(part) and not listed and part.lower() not in _WORDS:
            # `sum by (pod) (…)`: the grouping of a function may stand before its argument.
            called = after == "(" or (after in {"by", "without"} and parts[place + 2] == "(")
            if not called and not after.startswith("{"):
                return part
    return ""


def answer(asked: Query, body: object, *, asked_s: float) -> Reading:
    """What the JSON body of an answer is worth."""
    unit = SIGNAL_UNITS[asked.signal]

    def nothing(why: str, bad: str = "", *, empty: bool = False) -> Reading:
        return Reading(asked.signal, unit, None, asked_s, why, bad, asked.window_s, empty=empty)

    if not isinstance(body, Mapping):
        return nothing("the answer is no JSON object")
    if body.get("status") != "success":
        return nothing(f"the query failed: {str(body.get('error') or body.get('status'))[:200]}")
    data = body.get("data")
    found = data.get("result") if isinstance(data, Mapping) else None
    kind = data.get("resultType") if isinstance(data, Mapping) else None
    if kind == "scalar":
        pair: object = found
    elif kind == "vector" and isinstance(found, list):
        if not found:
            return nothing("no data: the query gave no series")
        if len(found) > 1:
            return nothing(f"{len(found)} series are no number: aggregate them")
        pair = found[0].get("value") if isinstance(found[0], Mapping) else None
    else:
        return nothing(f"resultType {kind!r} is no vector and no scalar")
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return nothing("the series has no value")
    return _number(asked, pair[1], asked_s, unit)


def _number(asked: Query, shown: object, asked_s: float, unit: str) -> Reading:
    bad: list[str] = []
    try:
        value: object = float(shown) if isinstance(shown, str) else shown
    except ValueError:
        value = shown
    latency = unit == "s"
    if latency and value != value:  # noqa: PLR0124 - NaN: a quantile over no samples (B04)
        why = "no samples in its window"
        return Reading(asked.signal, unit, None, asked_s, why, window_s=asked.window_s, empty=True)
    number = samples.check(asked.signal, value, bad)
    if number is None:
        refused = bad[0] if bad else f"{asked.signal}=null"
        return Reading(asked.signal, unit, None, asked_s, "refused", refused, asked.window_s)
    one = units.factor(asked.unit, unit, field=f"prometheus.queries.{asked.signal}.unit")
    return Reading(asked.signal, unit, number * one, asked_s, window_s=asked.window_s)
