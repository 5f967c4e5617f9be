"""One picture of several runs: capacities, latencies and decisions, all on one time axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROWS = ("prefill", "decode", "ttft", "tpot", "attained")
HEIGHTS = (3, 3, 2, 2, 1)
UNITS = {"ttft": (1.0, "s"), "tpot": (1000.0, "ms")}


def draw_runs(document: Mapping[str, Any], path: Path) -> None:
    """A column a run, a row a question; rows share their scales, so that columns compare.

    Args:
        document: of `proof.versus`. path: of the PNG; equal documents give equal files.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs: Mapping[str, Mapping[str, Any]] = document["runs"]
    figure, axes = plt.subplots(
        len(ROWS),
        len(runs),
        figsize=(max(10, 7 * len(runs)), 12),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
        height_ratios=HEIGHTS,
    )
    figure.suptitle(
        f"{document['workload']}: {document['requests']:,} requests, "
        f"T_ready {document['t_ready_s']:g} s, peak {document['peak_workers']:g} workers, "
        f"seed {document['seed']}"
    )
    for column, (label, run) in zip(axes.T, runs.items(), strict=True):
        scores = run["scores"]
        column[0].set_title(
            f"{label}: {scores['attainment']:.2%} attained, {scores['gpu_hours']:.2f} GPU-hours"
        )
        for axis, pool in zip(column[:2], ROWS[:2], strict=True):
            _pool(axis, run, pool)
        for axis, name in zip(column[2:4], ROWS[2:4], strict=True):
            _latency(axis, run["trace"], name, document["slo"][f"{name}_s"])
        column[4].step(run["trace"]["t_s"], _values(run["trace"]["attained"]), "C2", where="mid")
        column[4].set_ylim(0, 1.05)
        column[4].set_xlabel("seconds since the first arrival; vertical lines are decisions")
    for axis, name in zip(axes[:, 0], ROWS, strict=True):
        unit = UNITS.get(name, (1.0, ""))[1]
        axis.set_ylabel(f"{name.upper()} P90, {unit}" if unit else _said(name))
    for axis in axes[:2, 0]:
        axis.set_ylim(bottom=0)  # once all columns are drawn: it holds for the whole row
        axis.legend(loc="upper left", ncols=2)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)


def _said(name: str) -> str:
    return "share attained" if name == "attained" else f"{name} workers"


def _pool(axis: Any, run: Mapping[str, Any], pool: str) -> None:
    trace = run["trace"]
    t = trace["t_s"]
    axis.fill_between(
        t, _values(trace[f"{pool}.need"]), step="mid", color="C7", alpha=0.25, label="needed"
    )
    for key, style, label in (
        ("held", "C1-", "paid for"),
        ("ready", "C2-", "ready"),
        ("target", "C3--", "target"),
    ):
        axis.step(t, _values(trace[f"{pool}.{key}"]), style, where="mid", label=label)
    for decision in run["decisions"]:
        for change in decision.get("changes") or ():
            if change.get("pool") == pool and decision.get("at_s") is not None:
                colour = "C2" if change["to"] > change["from"] else "C3"
                axis.axvline(decision["at_s"], color=colour, alpha=0.2, linewidth=1)


def _latency(axis: Any, trace: Mapping[str, Sequence[float | None]], name: str, to: float) -> None:
    factor, _ = UNITS[name]
    axis.plot(trace["t_s"], factor * _values(trace[f"{name}.p90_s"]), "C0-", linewidth=1)
    axis.axhline(factor * to, color="C3", linestyle="--")
    axis.set_ylim(0, 3 * factor * to)


def _values(column: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([np.nan if v is None else v for v in column], dtype=float)
