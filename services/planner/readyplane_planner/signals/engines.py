"""Engine metrics by table: the names of vLLM and SGLang, each with its unit, as one kind of load.

Owns the tables and what a name means; where the text comes from is the shell's business. A number
that is absent stays unknown, a broken one is refused and named, and hits of a prefix cache are no
work that was done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from readyplane_planner.signals import exposition, samples, units
from readyplane_planner.signals.exposition import Sample
from readyplane_planner.signals.outside import EngineLoad

LIFE = "process_start_time_seconds"


@dataclass(frozen=True, slots=True)
class Row:
    """Where one number comes from.

    Attributes:
        names: of the metric, the first that is there counts; series are added up.
        unit: in which the engine states it. label: the number stands in that label of an `_info`.
        only: series with these labels. less: metrics to be taken off, where they are there.
    """

    names: tuple[str, ...]
    unit: str
    label: str = ""
    only: Mapping[str, str] = field(default_factory=dict)
    less: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """One engine's names. `one_rank`: a label whose ranks all tell the same, so one is read."""

    rows: Mapping[str, Row]
    one_rank: str = ""

    @cached_property
    def names(self) -> frozenset[str]:
        """Every metric that is read."""
        rows = self.rows.values()
        return frozenset({LIFE, *(n for row in rows for n in (*row.names, *row.less))})


WANTED = {
    "running": "sequences",
    "waiting": "requests",
    "kv_usage": "ratio",
    "block_size": "tokens",
    "blocks": "blocks",
    "prefill_tokens_total": "tokens",
    "decode_tokens_total": "tokens",
    "iterations_total": "iterations",
}
"""Unit of each number as the brains count it."""
TABLES: Mapping[str, Table] = {
    "vllm": Table(
        {
            "running": Row(("vllm:num_requests_running",), "sequences"),
            "waiting": Row(("vllm:num_requests_waiting",), "requests"),
            "kv_usage": Row(("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"), "ratio"),
            "block_size": Row(("vllm:cache_config_info",), "tokens", label="block_size"),
            "blocks": Row(("vllm:cache_config_info",), "blocks", label="num_gpu_blocks"),
            "prefill_tokens_total": Row(
                ("vllm:prompt_tokens_total",),
                "tokens",
                less=("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total"),
            ),
            "decode_tokens_total": Row(("vllm:generation_tokens_total",), "tokens"),
            "iterations_total": Row(("vllm:iteration_tokens_total_count",), "iterations"),
        }
    ),
    "sglang": Table(
        {
            "running": Row(("sglang:num_running_reqs",), "sequences"),
            "waiting": Row(("sglang:num_queue_reqs",), "requests"),
            "kv_usage": Row(("sglang:token_usage",), "ratio"),
            "block_size": Row(("sglang:cache_config_info",), "tokens", label="page_size"),
            "blocks": Row(("sglang:cache_config_info",), "blocks", label="num_pages"),
            "prefill_tokens_total": Row(
                ("sglang:realtime_tokens_total",), "tokens", only={"mode": "prefill_compute"}
            ),
            "decode_tokens_total": Row(
                ("sglang:realtime_tokens_total",), "tokens", only={"mode": "decode"}
            ),
        },
        one_rank="tp_rank",
    ),
}
MEANS = frozenset({"kv_usage", "block_size", "iterations_total"})
"""Of several engines of one worker; they step side by side, so a step of all is a step of each."""


def read(text: str, engine: str) -> tuple[EngineLoad, str, tuple[str, ...]]:
    """(load, life of the process, refused samples) of one engine's `/metrics`.

    Raises:
        KeyError: no table for that engine; the settings refuse it before.
    """
    table = TABLES[engine]
    found, unread = exposition.read(text, table.names)
    bad: list[str] = [f"{unread} lines that are no metrics"] if unread else []
    values = {name: _value(found, table, name, row, bad) for name, row in table.rows.items()}
    life = next((f"{s.value:.3f}" for s in found if s.name == LIFE), "")
    return _load(values), life, tuple(bad)


def _value(
    found: Sequence[Sample], table: Table, name: str, row: Row, bad: list[str]
) -> float | None:
    for metric in row.names:
        rank = _first_rank(found, metric, table.one_rank)
        chosen = [
            s
            for s in found
            if s.name == metric
            and all(s.labels.get(k) == v for k, v in row.only.items())
            and (not rank or s.labels.get(table.one_rank, rank) == rank)
        ]
        if not chosen:
            continue
        numbers = [_number(s, row, bad) for s in chosen]
        if None in numbers:
            return None
        known = [n for n in numbers if n is not None]
        value = sum(known) / (len(known) if name in MEANS else 1)
        for other in row.less:
            off = sum(s.value for s in found if s.name == other)
            value = max(0.0, value - (samples.check(other, off, bad) or 0.0))
        value *= units.factor(row.unit, WANTED[name], field=f"engines.{metric}.unit")
        if WANTED[name] == "ratio" and value > 1.0:
            # A share of more than all: another unit than the table says, or a broken sample.
            bad.append(f"{metric}={value:g} of 1")
            return None
        return value
    return None


def _first_rank(found: Sequence[Sample], metric: str, label: str) -> str:
    ranks = {s.labels[label] for s in found if s.name == metric and label in s.labels}
    return min(ranks, default="") if label else ""


def _number(sample: Sample, row: Row, bad: list[str]) -> float | None:
    if not row.label:
        return samples.check(sample.name, sample.value, bad)
    shown = sample.labels.get(row.label)
    try:
        return None if shown is None else samples.check(sample.name, float(shown), bad)
    except ValueError:
        # vLLM writes "None" until its KV pool is measured.
        return None


def _load(values: Mapping[str, float | None]) -> EngineLoad:
    blocks, size, usage = values.get("blocks"), values.get("block_size"), values.get("kv_usage")
    capacity = None if blocks is None or size is None else blocks * size
    return EngineLoad(
        running=_whole(values.get("running")),
        waiting=_whole(values.get("waiting")),
        kv_usage=usage,
        kv_tokens=None if capacity is None or usage is None else capacity * usage,
        kv_capacity_tokens=capacity,
        prefill_tokens_total=values.get("prefill_tokens_total"),
        decode_tokens_total=values.get("decode_tokens_total"),
        iterations_total=values.get("iterations_total"),
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
