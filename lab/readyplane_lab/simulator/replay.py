"""`readyplane replay`: one workload through the simulated world, as JSON and as a picture.

Owns the report of a replay. The JSON holds nothing that differs between two runs of the same
arguments; how long the simulation took is returned apart.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from readyplane.core.errors import InvalidField
from readyplane_lab.demo import DEMO_POLICY
from readyplane_lab.simulator.world import WorldOptions, run_world
from readyplane_lab.simulator.world_result import WorldResult
from readyplane_lab.workload.request import WorkloadRequest

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Replay:
    """What was asked for.

    Attributes:
        name: of the workload. requests: in order of arrival. seed: of start-ups.
        policy: planner policy document; the demo's by default.
    """

    name: str
    requests: Sequence[WorkloadRequest]
    seed: int = 1
    policy: Mapping[str, Any] | None = None


def run_replay(replay: Replay) -> tuple[dict[str, Any], WorldResult]:
    """Simulate; returns the report document and the raw result.

    Raises:
        InvalidField: no requests.
    """
    if not replay.requests:
        raise InvalidField("requests", 0, "give a workload with at least one request")
    policy = dict(replay.policy or DEMO_POLICY)
    result = run_world(WorldOptions(policy=policy, seed=replay.seed), replay.requests)
    return _report(replay, policy, result), result


def write_replay(out: Path, report: Mapping[str, Any], result: WorldResult) -> tuple[Path, Path]:
    """Write `replay.json` and `replay.png` into a folder; returns their paths.

    Raises:
        InvalidField: the folder cannot be made or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(report, indent=1, sort_keys=True, allow_nan=False)
        (out / "replay.json").write_text(text + "\n")
        picture = out / "replay.png"
        _plot(picture, report, result)
    except OSError as error:
        raise InvalidField("--out", str(out), f"give a writable folder ({error})") from error
    return out / "replay.json", picture


def _report(replay: Replay, policy: Mapping[str, Any], result: WorldResult) -> dict[str, Any]:
    records = result.records
    finished = [r for r in records if r.outcome == "finished"]
    hours: dict[str, float] = {}
    for life in result.lives:
        seconds = max(0.0, life.released_s - life.allocated_s)
        hours[life.pool] = hours.get(life.pool, 0.0) + seconds / 3600.0
    starts = [life.took_s for life in result.lives]
    prompt = sum(r.isl for r in finished)
    return {
        "schema": "readyplane/replay/1",
        "workload": replay.name,
        "seed": replay.seed,
        "policy": dict(policy),
        "virtual_s": result.seconds,
        "requests": len(records),
        "outcomes": dict(sorted(Counter(r.outcome for r in records).items())),
        "attainment": sum(r.attained for r in records) / len(records),
        "repaired": sum(r.repaired for r in records),
        "prefix_hit": sum(r.cached_tokens for r in finished) / prompt if prompt else None,
        "ttft_s": _quantiles([r.ttft_s for r in finished]),
        "tpot_s": _quantiles([r.tpot_s for r in finished]),
        "worker_hours": dict(sorted(hours.items())),
        "t_ready_s": _quantiles(starts),
        "workers": [asdict(life) for life in result.lives],
        "decisions": [
            {key: d.get(key) for key in ("decision_id", "at_s", "summary", "changes", "reasons")}
            for d in result.decisions
        ],
        "series": dict(result.series),
    }


def _quantiles(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return None
    found = np.quantile(known, QUANTILES)
    return {f"p{int(100 * q)}": float(v) for q, v in zip(QUANTILES, found, strict=True)}


def _plot(path: Path, report: Mapping[str, Any], result: WorldResult) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    series = result.series
    t = np.array(series["t_s"], dtype=float)
    figure, axes = plt.subplots(5, 1, figsize=(11, 13), sharex=True, layout="constrained")
    share = report["attainment"]
    figure.suptitle(
        f"{report['workload']}: {report['requests']} requests, attainment {share:.1%}, "
        f"worker-hours {sum(report['worker_hours'].values()):.2f}"
    )
    _rates(axes[0], result)
    for axis, pool in zip(axes[1:3], ("prefill", "decode"), strict=True):
        for key, style in (("desired", "C7--"), ("provisioned", "C1-"), ("ready", "C2-")):
            values = _column(series, f"{pool}.{key}")
            axis.step(t, values, style, where="post", label=key)
        axis.set_ylabel(f"{pool} workers")
        axis.legend(loc="upper left", ncols=3)
    slo = report["policy"]["slo"]
    for axis, name, factor, unit in ((axes[3], "ttft", 1, "s"), (axes[4], "tpot", 1000, "ms")):
        seen = [(r.at_s, getattr(r, f"{name}_s")) for r in result.records]
        points = [(at_s, factor * v) for at_s, v in seen if v is not None]
        axis.plot(
            [p[0] for p in points],
            [p[1] for p in points],
            ".",
            markersize=2,
            alpha=0.3,
            label="each request",
        )
        p90 = factor * _column(series, f"{name}.p90_s")
        axis.plot(t, p90, "C3-", label="P90 of the last 20 s")
        axis.axhline(factor * slo[f"{name}_s"], color="C3", linestyle="--", label="target")
        axis.set_ylim(0, 3 * factor * slo[f"{name}_s"])
        axis.set_ylabel(f"{name.upper()}, {unit}")
        axis.legend(loc="upper left", ncols=3)
    for decision in report["decisions"]:
        for change in decision["changes"] or ():
            axis = axes[1 if change["pool"] == "prefill" else 2]
            colour = "C2" if change["to"] > change["from"] else "C3"
            axis.axvline(
                decision["at_s"] - result.began_wall_s, color=colour, alpha=0.25, linewidth=1
            )
    axes[-1].set_xlabel("seconds since the first arrival; vertical lines are decisions")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _rates(axis: Any, result: WorldResult) -> None:
    bin_s = 10.0
    at = np.array([r.at_s for r in result.records])
    edges = np.arange(0.0, max(bin_s, float(at.max())) + bin_s, bin_s)
    for name, colour in (("isl", "C0"), ("osl", "C4")):
        weights = np.array([getattr(r, name) for r in result.records], dtype=float)
        per_s = np.histogram(at, edges, weights=weights)[0] / bin_s
        axis.step(
            edges[:-1], per_s, colour, where="post", label=f"{name.upper()} tokens/s arriving"
        )
    axis.set_ylabel("tokens/s")
    axis.legend(loc="upper left", ncols=2)


def _column(series: Mapping[str, Any], name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = series.get(name) or []
    return np.array([np.nan if v is None else v for v in values], dtype=float)
