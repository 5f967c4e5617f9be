"""GuideLLM exports: `benchmarks.json` and both shapes of `benchmarks.csv`, many runs each (pure).

The newer CSV has three rows of heads (group, field, statistic), the older one a single row
(`Successful Time to first token ms mean`). Only successful requests count.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane_lab.profiling.columns import key, milliseconds, number, split_unit
from readyplane_lab.profiling.runs import Run

FIELDS = {
    "time_to_first_token": "ttft",
    "inter_token_latency": "itl",
    "prompt_token_count": "isl",
    "output_token_count": "osl",
    "request_concurrency": "concurrency",
    "requests_per_second": "rate",
}
TIMES = {"ttft", "itl"}
GROUPS = {
    "time to first token": "ttft",
    "inter token latency": "itl",
}
NAMED = {
    "input tokens": "isl",
    "output tokens": "osl",
    "concurrency": "concurrency",
    "requests sec": "rate",
}
HEADS = 3


def is_csv(text: str) -> bool:
    """Whether the head is one of GuideLLM's."""
    head = key(text.lstrip("\ufeff").split("\n", 1)[0])
    return head.startswith("run info") or "successful time to first token" in head


def is_json(document: Any) -> bool:
    """Whether a document is GuideLLM's report."""
    return isinstance(document, Mapping) and isinstance(document.get("benchmarks"), list)


def read_json(document: Mapping[str, Any], *, where: str) -> list[Run]:
    """Every benchmark of a report. Raises InvalidField naming what is missing."""
    runs = []
    for i, benchmark in enumerate(document["benchmarks"]):
        values: dict[str, float] = {}
        metrics = benchmark.get("metrics") if isinstance(benchmark, Mapping) else None
        for name, block in metrics.items() if isinstance(metrics, Mapping) else ():
            field, unit = _field(name)
            good = block.get("successful") if isinstance(block, Mapping) else None
            value = number(good.get("mean")) if isinstance(good, Mapping) else None
            if field and value is not None:
                values[field] = _scaled(field, value, unit, f"{where}[{i}].{name}")
        runs.append(_run(values, f"{where}[{i}]"))
    return runs


def read_csv(text: str, *, where: str) -> list[Run]:
    """Every row of a CSV. Raises InvalidField naming what is missing."""
    rows = [r for r in csv.reader(io.StringIO(text.lstrip("\ufeff"))) if any(c.strip() for c in r)]
    heads = HEADS if key(rows[0][0]) == "run info" else 1
    columns = _three_rows(rows[:heads]) if heads == HEADS else _one_row(rows[0])
    runs = []
    for number_of_row, row in enumerate(rows[heads:], start=heads + 1):
        values: dict[str, float] = {}
        for at, (field, unit) in columns.items():
            value = number(row[at]) if at < len(row) else None
            if value is not None:
                place = f"{where} row {number_of_row}, {rows[0][at]}"
                values.setdefault(field, _scaled(field, value, unit, place))
        runs.append(_run(values, f"{where} row {number_of_row}"))
    return runs


def _three_rows(heads: Sequence[Sequence[str]]) -> dict[int, tuple[str, str]]:
    """Column -> (field, unit) of means of successful requests."""
    groups, names, kinds = heads
    found = {}
    for at, (group, name, kind) in enumerate(zip(groups, names, kinds, strict=False)):
        status, _, rest = name.strip().partition(" ")
        if key(kind) != "mean" or status.lower() != "successful":
            continue
        field = GROUPS.get(key(group)) or NAMED.get(key(rest))
        if field is not None:
            found[at] = field, rest if field in TIMES else ""
    return found


def _one_row(head: Sequence[str]) -> dict[int, tuple[str, str]]:
    found = {}
    for at, name in enumerate(head):
        words = key(name)
        if not (words.startswith("successful ") and words.endswith(" mean")):
            continue
        inner = words.removeprefix("successful ").removesuffix(" mean")
        field, unit = _field(inner)
        if field:
            found[at] = field, unit
    return found


def _field(name: str) -> tuple[str, str]:
    """(our name, unit) of a metric; empty for one that is not needed."""
    short, unit = split_unit(name)
    for known, field in FIELDS.items():
        if key(name) == key(known):  # as a whole first: the second in a rate is no unit of time
            return field, ""
        if short == key(known):
            return field, unit
    return "", ""


def _scaled(field: str, value: float, unit: str, where: str) -> float:
    return milliseconds(value, unit, column=where) if field in TIMES else value


def _run(values: Mapping[str, float], where: str) -> Run:
    for field, told in (
        ("ttft", "time to first token"),
        ("isl", "prompt tokens"),
        ("osl", "output tokens"),
        ("concurrency", "request concurrency"),
    ):
        if field not in values:
            raise InvalidField(where, told, "no successful requests tell it: benchmark a stream")
    return Run(
        isl=values["isl"],
        osl=values["osl"],
        ttft_ms=values["ttft"],
        itl_ms=values.get("itl") or None,
        concurrency=values["concurrency"],
        requests_per_s=values.get("rate"),
    )
