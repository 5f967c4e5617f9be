"""Every run of a proof as a row of a CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from typing import Any

COLUMNS = (
    "scenario",
    "t_ready_s",
    "peak",
    "seed",
    "contender",
    "knob",
    "mode",
    "chosen",
    "attainment",
    "gpu_hours",
    "boot_gpu_hours",
    "standby_gpu_hours",
    "ready_gpu_hours",
    "drain_gpu_hours",
    "never_gpu_hours",
    "cost",
    "peak_cost_per_h",
    "violation",
    "excess_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "tpot_p95_s",
    "tpot_p99_s",
    "starts",
    "wasted",
    "reversals",
    "reversals_per_h",
    "short_s",
    "effect_s",
    "ready_after_s",
    "floor_gpu_hours",
    "lower_gpu_hours",
    "osim_gpu_hours",
)


def sheet(document: Mapping[str, Any]) -> str:
    """CSV text, one row per run; what is not known is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for one in document["inputs"].values():
        bounds = {
            "floor_gpu_hours": one["bound"]["floor_gpu_hours"],
            "lower_gpu_hours": one["bound"]["lower_gpu_hours"],
            "osim_gpu_hours": one["bracket"]["osim_gpu_hours"],
        }
        for name, entry in one["entries"].items():
            for mode in ("fluid", "event"):
                for knob, scores in entry[mode].items():
                    chosen = mode == entry["mode"] and float(knob) == entry["chosen"]
                    row = {"contender": name, "knob": knob, "mode": mode, "chosen": int(chosen)}
                    writer.writerow({**one["about"], **row, **scores, **bounds})
    return text.getvalue()
