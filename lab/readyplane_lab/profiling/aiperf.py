"""AIPerf exports: `profile_export_aiperf.csv` and `.json`, one run each (pure).

The CSV holds tables one after another, with a blank line between: metrics with their statistics,
then single values. Units are in the metrics' names there, beside the values in the JSON.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane_lab.profiling.columns import key, milliseconds, number, split_unit
from readyplane_lab.profiling.runs import Run

ISL, OSL = "input sequence length", "output sequence length"
TTFT, ITL = "time to first token", "inter token latency"
LATENCY, RATE = "request latency", "request throughput"
AVERAGE = ("avg", "mean")

Metric = tuple[float, str]
"""Mean and unit."""


def is_csv(text: str) -> bool:
    """Whether the first line is the head of AIPerf's first table."""
    head = text.lstrip("\ufeff \r\n").splitlines()[:1]
    return bool(head) and head[0].lower().startswith("metric,")


def is_json(document: Any) -> bool:
    """Whether a document is AIPerf's summary of one run."""
    return isinstance(document, Mapping) and isinstance(
        document.get("time_to_first_token"), Mapping
    )


def read_csv(text: str, *, where: str, concurrency: float | None = None) -> list[Run]:
    """The run of a CSV. Raises InvalidField naming what is missing."""
    metrics: dict[str, Metric] = {}
    columns: list[str] = []
    for row in csv.reader(io.StringIO(text.lstrip("\ufeff"))):
        if not any(cell.strip() for cell in row):
            columns = []
        elif not columns:
            columns = [key(cell) for cell in row]
        elif columns[0] == "metric":
            at = next((columns.index(n) for n in (*AVERAGE, "value") if n in columns), None)
            value = number(row[at]) if at is not None and at < len(row) else None
            name, unit = split_unit(row[0])
            if value is not None:
                metrics.setdefault(name, (value, unit))
    return [_run(metrics, where=where, concurrency=concurrency)]


def read_json(
    document: Mapping[str, Any], *, where: str, concurrency: float | None = None
) -> list[Run]:
    """The run of a JSON summary; its concurrency is the one of its load generator, where told."""
    metrics: dict[str, Metric] = {}
    for name, block in document.items():
        if isinstance(block, Mapping) and "unit" in block:
            value = next((v for n in AVERAGE if (v := number(block.get(n))) is not None), None)
            if value is not None:
                metrics[key(name)] = value, str(block["unit"])
    return [_run(metrics, where=where, concurrency=concurrency or _told(document))]


def _told(document: Mapping[str, Any]) -> float | None:
    config = document.get("input_config")
    if not isinstance(config, Mapping):
        return None
    loadgen = config.get("loadgen")
    phases = config.get("phases")
    entries = [loadgen] if isinstance(loadgen, Mapping) else []
    entries += [
        p
        for p in (phases if isinstance(phases, list) else [])
        if isinstance(p, Mapping) and not p.get("exclude_from_results")
    ]
    return next((v for e in entries if (v := number(e.get("concurrency"))) is not None), None)


def _run(metrics: Mapping[str, Metric], *, where: str, concurrency: float | None) -> Run:
    def mean(name: str) -> float:
        if name not in metrics:
            raise InvalidField(where, name, "no such metric there: export it from a streaming run")
        return metrics[name][0]

    def ms(name: str) -> float:
        return milliseconds(mean(name), metrics[name][1], column=f"{where}: {name}")

    rate = metrics[RATE][0] if RATE in metrics else None
    if rate is not None and metrics[RATE][1] not in {"requests/sec", "requests/s"}:
        raise InvalidField(f"{where}: {RATE}", metrics[RATE][1], "give it in requests/sec")
    if concurrency is None:
        if rate is None or LATENCY not in metrics:
            remedy = "it does not say how many requests ran at once; give --concurrency"
            raise InvalidField(where, "concurrency", remedy)
        concurrency = rate * ms(LATENCY) / 1e3
    return Run(
        isl=mean(ISL),
        osl=mean(OSL),
        ttft_ms=ms(TTFT),
        itl_ms=ms(ITL) if ITL in metrics else None,
        concurrency=concurrency,
        requests_per_s=rate,
    )
