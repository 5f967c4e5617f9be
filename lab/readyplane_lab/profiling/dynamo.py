"""Dynamo's NPZ profiles: the planner's measured surfaces and the simulator's resampled ones (pure).

The planner's profiler writes two files, `prefill_isl, prefill_ttft, prefill_thpt_per_gpu` and
`x_kv_usage, y_context_length, z_itl, z_thpt_per_gpu, max_kv_tokens`; a load is a share of the KV
pool at one context. The simulator reads one file with `prefill_isl, prefill_ttft_ms,
decode_active_kv_tokens, decode_context_length, decode_itl`. All times are milliseconds there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane_lab.profiling.readings import DecodeReading, PrefillReading, Readings

GRID_MAX = 64
"""Points taken of a resampled surface: more of them say nothing more."""


@dataclass(slots=True)
class Surfaces:
    """Readings, and what the file says besides; None where it does not."""

    readings: Readings = field(default_factory=Readings)
    kv_tokens: int | None = None
    gpus: int | None = None


def read(arrays: Mapping[str, Any], *, where: str) -> Surfaces:
    """The surfaces of one file.

    Raises:
        InvalidField: arrays that are missing, of differing lengths or not finite.
    """
    found = Surfaces()
    names = set(arrays)
    if {"x_kv_usage", "y_context_length", "z_itl"} & names:
        _planner_decode(arrays, found, where)
    elif "decode_itl" in names:
        _grid(arrays, found, where)
    if "prefill_isl" in names:
        _prefill(arrays, found, where)
    if not found.readings.prefill and not found.readings.decode:
        raise InvalidField(
            where, ", ".join(sorted(names)) or "empty", "give a file of Dynamo's profiler"
        )
    return found


def _prefill(arrays: Mapping[str, Any], found: Surfaces, where: str) -> None:
    times = "prefill_ttft_ms" if "prefill_ttft_ms" in arrays else "prefill_ttft"
    isl, ttft = _columns(arrays, where, "prefill_isl", times)
    found.readings.prefill += [
        PrefillReading(round(n), ms) for n, ms in zip(isl, ttft, strict=True)
    ]
    if "prefill_thpt_per_gpu" in arrays:
        (rates,) = _columns(arrays, where, "prefill_thpt_per_gpu")
        of = zip(isl, ttft, rates, strict=True)
        found.gpus = max(1, round(median(n / ms * 1e3 / rate for n, ms, rate in of)))


def _planner_decode(arrays: Mapping[str, Any], found: Surfaces, where: str) -> None:
    usage, context, itl = _columns(arrays, where, "x_kv_usage", "y_context_length", "z_itl")
    (most, *_) = _columns(arrays, where, "max_kv_tokens")[0]
    found.kv_tokens = round(most)
    for share, length, ms in zip(usage, context, itl, strict=True):
        held = share * most
        found.readings.decode.append(DecodeReading(round(held / length, 2), held, ms))


def _grid(arrays: Mapping[str, Any], found: Surfaces, where: str) -> None:
    held, context = _columns(arrays, where, "decode_active_kv_tokens", "decode_context_length")
    surface = arrays["decode_itl"]
    if getattr(surface, "shape", None) != (len(held), len(context)):
        shown = f"shape {getattr(surface, 'shape', None)}"
        raise InvalidField(f"{where}: decode_itl", shown, f"use {len(held)} x {len(context)}")
    found.kv_tokens = round(max(held))
    loads = [
        (kv, length, float(surface[i][j]))
        for i, kv in enumerate(held)
        for j, length in enumerate(context)
        if kv >= length > 0
    ]
    step = max(1, -(-len(loads) // GRID_MAX))
    for kv, length, ms in loads[::step]:
        if not (isfinite(ms) and ms > 0):
            raise InvalidField(f"{where}: decode_itl", ms, "use finite milliseconds above 0")
        found.readings.decode.append(DecodeReading(round(kv / length, 2), kv, ms))
    found.readings.notes.append("a resampled surface: its errors are those of the resampling")


def _columns(arrays: Mapping[str, Any], where: str, *names: str) -> list[list[float]]:
    found = []
    for name in names:
        if name not in arrays:
            raise InvalidField(where, name, "no such array there: give the profiler's own file")
        values = [float(v) for v in arrays[name].ravel()]
        if not all(isfinite(v) and v >= 0 for v in values):
            raise InvalidField(f"{where}: {name}", "not finite", "use finite numbers of at least 0")
        found.append(values)
    if (
        len(names) > 1
        and names[0] != "decode_active_kv_tokens"
        and len({len(c) for c in found}) > 1
    ):
        shown = ", ".join(f"{n} {len(c)}" for n, c in zip(names, found, strict=True))
        raise InvalidField(where, shown, "use arrays of one length")
    return found
