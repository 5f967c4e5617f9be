"""Readers of public traces: Azure LLM inference CSV and Mooncake JSONL, plain or zstd.

Hands over `WorkloadRequest`s. A broken line is refused with its number; nothing is skipped
silently. Mooncake timestamps come in 3 s ticks, so a seeded jitter U(0, 3 s) is added by default:
without it a replay makes bursts that never were.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import numpy as np
import zstandard

from readyplane.core.errors import InvalidField
from readyplane_lab.workload.request import WorkloadRequest

MOONCAKE_BLOCK_TOKENS = 512
MOONCAKE_TICK_S = 3.0
LENGTH_MAX = 2_000_000
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_UNIQUE = 1 << 40
Row = TypeVar("Row", str, list[str])


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that was read.

    Attributes:
        name: file name without endings. format: `azure` or `mooncake`.
        requests: sorted by arrival; the first arrives at 0. note: what was done to the data.
    """

    name: str
    format: str
    requests: tuple[WorkloadRequest, ...]
    note: str = ""

    @property
    def span_s(self) -> float:
        """Seconds from the first to the last arrival."""
        return self.requests[-1].at_s if self.requests else 0.0


def read_trace(path: Path, *, seed: int = 0, jitter: bool = True, limit: int = 0) -> Trace:
    """Read a trace; the format is told from its content.

    Args:
        path: `.csv`, `.jsonl`, or either with `.zst`. seed: of the jitter.
        jitter: add U(0, 3 s) to Mooncake ticks. limit: most requests, 0 for all.

    Raises:
        InvalidField: missing file, unknown format, or a broken line (with its number).
    """
    text = _read_text(path)
    first = text.lstrip()[:1]
    name = path.name.removesuffix(".zst").removesuffix(".csv").removesuffix(".jsonl")
    if not first:
        raise InvalidField("trace", str(path), "give a file with at least one request")
    if first == "{":
        return _mooncake(name, text, path, seed=seed, jitter=jitter, limit=limit)
    return _azure(name, text, path, limit=limit)


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidField(
            "trace", str(path), f"give a readable file ({error.strerror})"
        ) from error
    try:
        if raw[:4] == b"\x28\xb5\x2f\xfd":
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(raw)) as reader:
                raw = reader.read()
        return raw.decode("utf-8-sig")
    except (zstandard.ZstdError, UnicodeDecodeError) as error:
        raise InvalidField(
            "trace", str(path), f"give Azure CSV or Mooncake JSONL, plain or .zst ({error})"
        ) from error


def _azure(name: str, text: str, path: Path, *, limit: int) -> Trace:
    rows = csv.reader(io.StringIO(text))
    header = [column.strip() for column in next(rows)]
    missing = [column for column in AZURE_COLUMNS if column not in header]
    if missing:
        raise InvalidField(
            f"trace {path.name} line 1",
            ",".join(header)[:80],
            f"give the columns {', '.join(AZURE_COLUMNS)}, or Mooncake JSONL",
        )
    at, isl, osl = (header.index(column) for column in AZURE_COLUMNS)

    def parse(number: int, row: list[str]) -> WorkloadRequest:
        where = f"trace {path.name} line {number}"
        if len(row) != len(header):
            raise InvalidField(where, ",".join(row)[:80], f"give {len(header)} columns")
        try:
            when = datetime.fromisoformat(row[at].strip()[:26]).timestamp()
        except ValueError:
            raise InvalidField(
                where, row[at], "write TIMESTAMP like 2023-11-16 18:15:46.6805900"
            ) from None
        n_in = _length(row[isl], f"{where} ContextTokens")
        n_out = _length(row[osl], f"{where} GeneratedTokens")
        return WorkloadRequest(0, when, n_in, n_out, ((_UNIQUE + number, n_in),))

    return _finish(name, "azure", _each(rows, parse, start=2, limit=limit), path, note="")


def _mooncake(name: str, text: str, path: Path, *, seed: int, jitter: bool, limit: int) -> Trace:
    def parse(number: int, line: str) -> WorkloadRequest:
        where = f"trace {path.name} line {number}"
        try:
            doc = json.loads(line)
            at_ms, ids = float(doc["timestamp"]), doc.get("hash_ids", [])
            isl_raw, osl_raw = doc["input_length"], doc["output_length"]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidField(
                where,
                line[:80],
                "write JSON with timestamp, input_length, output_length, hash_ids "
                f"({type(error).__name__}: {error})",
            ) from error
        if not np.isfinite(at_ms) or at_ms < 0:
            raise InvalidField(f"{where} timestamp", at_ms, "use milliseconds of at least 0")
        isl = _length(isl_raw, f"{where} input_length")
        osl = _length(osl_raw, f"{where} output_length")
        parts, left = [], isl
        for block in ids:
            if left <= 0:
                break
            parts.append((int(block), min(left, MOONCAKE_BLOCK_TOKENS)))
            left -= MOONCAKE_BLOCK_TOKENS
        if left > 0:
            parts.append((_UNIQUE + number, left))
        return WorkloadRequest(0, at_ms / 1000.0, isl, osl, tuple(parts))

    lines = (line for line in text.splitlines() if line.strip())
    found = _each(lines, parse, start=1, limit=limit)
    note = ""
    if jitter:
        generator = np.random.Generator(np.random.Philox(key=seed))
        shift = generator.uniform(0.0, MOONCAKE_TICK_S, len(found))
        found = [replace(r, at_s=r.at_s + float(s)) for r, s in zip(found, shift, strict=True)]
        note = f"jitter U(0, {MOONCAKE_TICK_S:g} s) with seed {seed}: timestamps come in 3 s ticks"
    return _finish(name, "mooncake", found, path, note=note)


def _each(
    rows: Iterator[Row],
    parse: Callable[[int, Row], WorkloadRequest],
    *,
    start: int,
    limit: int,
) -> list[WorkloadRequest]:
    found = []
    for number, row in enumerate(rows, start):
        if not row:
            continue
        found.append(parse(number, row))
        if limit and len(found) >= limit:
            break
    return found


def _finish(name: str, kind: str, found: list[WorkloadRequest], path: Path, *, note: str) -> Trace:
    if not found:
        raise InvalidField("trace", str(path), "give a file with at least one request")
    found.sort(key=lambda r: r.at_s)
    begin = found[0].at_s
    requests = tuple(replace(r, index=i, at_s=r.at_s - begin) for i, r in enumerate(found))
    return Trace(name, kind, requests, note)


def _length(value: object, where: str) -> int:
    try:
        number = int(str(value).strip())
    except ValueError:
        raise InvalidField(where, value, "use a whole number of tokens") from None
    if not 0 < number <= LENGTH_MAX:
        raise InvalidField(where, number, f"use 1 to {LENGTH_MAX} tokens")
    return number
