"""The event simulator against Dynamo's own, with one profile and one trace, fleet by fleet.

Owns the translation (profile to NPZ, requests to Mooncake JSONL), the run in `.venv-dynosim` and
the comparison. Two ways to schedule prefill are asked of Dynamo's simulator:

- `shipped`: its defaults. Waiting prompts share one pass of at most 8,192 tokens, and a pass costs
  what the profile says for that many tokens, however much context they attend to.
- `matched`: one prompt at a time in one pass, as the profile was measured, which is what our
  engine model charges. What is left is router, queueing, cache, hand-over and decode.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.static_fleet import Columns, simulate
from readyplane import profiles
from readyplane.core.profile import ClassProfile, LinkClass
from readyplane_lab.workload.request import WorkloadRequest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-dynosim" / "bin" / "python"
BANDWIDTH_GB_S = 50.0
LINK = LinkClass("as-dynosim", BANDWIDTH_GB_S * 1e9, 0.0)  # it knows no set-up time
BLOCK = 64
TRACE_BLOCK = 512
CONTEXT_MAX = 140_000
WHOLE = 200_000
COMPARED = ("mean_ttft", "p99_ttft", "mean_itl", "worker_s")


@dataclass(frozen=True, slots=True)
class Variant:
    """How Dynamo's simulator is told to run prefill. `sequences`: prompts in one pass at most."""

    name: str
    batch_tokens: int
    sequences: int
    decode_surface: str = "fit"


SHIPPED = Variant("shipped", 8192, 512)
MATCHED = Variant("matched", WHOLE, 1)
STEPS = (
    SHIPPED,
    Variant("one-prompt", 8192, 1),
    MATCHED,
    Variant("matched, measured ITL grid", WHOLE, 1, "grid"),
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One fleet in both simulators. Errors are ours over theirs, minus one."""

    fleet: tuple[int, int]
    variant: str
    ours: dict[str, float]
    theirs: dict[str, float]

    def error(self, name: str) -> float:
        """Relative difference of one figure."""
        return self.ours[name] / self.theirs[name] - 1.0


def compare(
    requests: Sequence[WorkloadRequest],
    profile_name: str,
    fleets: Sequence[tuple[int, int]],
    variants: Sequence[Variant],
) -> list[Compared]:
    """Every fleet once in our simulator and once per variant in theirs."""
    profile = profiles.load(profile_name)
    out: list[Compared] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_trace(requests, place / "trace.jsonl")
        for fleet in fleets:
            ours = simulate(requests, fleet, profile_name, link=LINK, block_size=BLOCK).figures()
            for variant in variants:
                theirs = replay(place, profile, fleet, variant).figures()
                out.append(Compared(fleet, variant.name, ours, theirs))
                print(row_text(out[-1]), flush=True)
    return out


def compare_scaling(
    requests: Sequence[WorkloadRequest],
    profile_name: str,
    variant: Variant,
    *,
    fleet: tuple[int, int] = (2, 1),
    targets: Sequence[tuple[float, int, int]] = ((600.0, 4, 2), (1800.0, 2, 1)),
    startup_s: float = 30.0,
) -> Compared:
    """A fleet that grows and shrinks by a script: starts, drains and their bill."""
    ours = simulate(
        requests,
        fleet,
        profile_name,
        link=LINK,
        block_size=BLOCK,
        tick_s=1.0,
        targets=targets,
        startup_s=startup_s,
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_trace(requests, place / "trace.jsonl")
        profile = profiles.load(profile_name)
        theirs = replay(place, profile, fleet, variant, startup_s=startup_s, targets=targets)
    return Compared(fleet, f"{variant.name}, scaled", ours.figures(), theirs.figures())


def row_text(row: Compared) -> str:
    """One line of the table, milliseconds."""
    p, d = row.fleet
    parts = [f"| {p}P{d}D | {row.variant}"]
    for name in ("mean_ttft", "p99_ttft", "mean_itl"):
        ours, theirs = row.ours[name] * 1e3, row.theirs[name] * 1e3
        parts.append(f"{ours:.1f} / {theirs:.1f} ({row.error(name):+.1%})")
    parts.append(f"{row.ours['worker_s']:.0f} / {row.theirs['worker_s']:.0f}")
    parts.append(f"{row.ours['attainment']:.4f} / {row.theirs['attainment']:.4f}")
    parts.append(f"{row.ours['cached']:.3f} / {row.theirs['cached']:.3f}")
    parts.append(f"{row.ours['lost']:.0f} / {row.theirs['lost']:.0f}")
    return " | ".join(parts) + " |"


def kendall_tau(rows: Sequence[Compared]) -> float:
    """Rank agreement of the fleets by attainment (tau-a over all pairs of fleets)."""
    agree = pairs = 0
    for i, one in enumerate(rows):
        for other in rows[i + 1 :]:
            mine = one.ours["attainment"] - other.ours["attainment"]
            his = one.theirs["attainment"] - other.theirs["attainment"]
            agree += int(np.sign(mine * his))
            pairs += 1
    return agree / pairs if pairs else 1.0


# ------------------------------------------------------------------------- theirs


def replay(
    place: Path,
    profile: ClassProfile,
    fleet: tuple[int, int],
    variant: Variant,
    *,
    startup_s: float | None = None,
    targets: Sequence[tuple[float, int, int]] = (),
) -> Columns:
    """Run Dynamo's simulator in its own environment.

    Args:
        place: folder with `trace.jsonl`. startup_s: of workers that `targets` start.
        targets: (seconds, prefill, decode), a script of scalings.
    """
    npz = place / f"{variant.decode_surface}.npz"
    if not npz.exists():
        write_profile(profile, npz, surface=variant.decode_surface)
    return _columns(
        run(
            {
                "trace": str(place / "trace.jsonl"),
                "fleet": fleet,
                "targets": [(s * 1e3, p, d) for s, p, d in targets],
                "prefill": _engine(profile, npz, "prefill", variant, startup_s),
                "decode": _engine(profile, npz, "decode", variant, startup_s),
            }
        )
    )


def run(
    wanted: Mapping[str, Any],
    *,
    on_tick: Callable[[Mapping[str, Any]], Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """Run `bench/dynosim_replay.py` on a specification; its result.

    Args:
        on_tick: answers each tick of a specification with a `planner`.

    Raises:
        FileNotFoundError: `.venv-dynosim` is not there. CalledProcessError: it failed.
    """
    if not PYTHON.exists():
        raise FileNotFoundError(f"{PYTHON.relative_to(ROOT)} is missing: make .venv-dynosim/stamp")
    with tempfile.TemporaryDirectory() as folder:
        specification, result = Path(folder) / "specification.json", Path(folder) / "result.json"
        specification.write_text(json.dumps(wanted))
        command = [
            str(v) for v in (PYTHON, ROOT / "bench/dynosim_replay.py", specification, result)
        ]
        with subprocess.Popen(
            command,
            env={**os.environ, "DYN_LOG": "error", "PYTHONPATH": ""},
            stdin=subprocess.PIPE,
            stdout=None if on_tick is None else subprocess.PIPE,
            text=True,
        ) as process:
            if on_tick is not None:
                assert process.stdin is not None
                assert process.stdout is not None
                for line in process.stdout:
                    process.stdin.write(json.dumps(on_tick(json.loads(line))) + "\n")
                    process.stdin.flush()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def _engine(
    profile: ClassProfile, npz: Path, kind: str, variant: Variant, startup_s: float | None
) -> dict[str, Any]:
    prefill = kind == "prefill"
    return {
        "engine": {
            "worker_type": kind,
            "block_size": BLOCK,
            "num_gpu_blocks": profile.kv_capacity_tokens // BLOCK,
            "max_num_seqs": variant.sequences if prefill else profile.max_num_seqs,
            "max_num_batched_tokens": variant.batch_tokens if prefill else profile.max_batch_tokens,
            "emit_kv_events": prefill,
            "kv_transfer_bytes_per_token": profile.kv_bytes_per_token,
            "kv_transfer_bandwidth": BANDWIDTH_GB_S,
            "timing_model": {
                "type": "external",
                "provider": "dynamo_profile",
                "config": {"path": str(npz)},
            },
        },
        "startup_time": startup_s,
    }


def _columns(found: dict[str, Any]) -> Columns:
    rows, summary = found["requests"], found["summary"]
    osl = np.array(rows["output_length"])
    tpot = np.array([np.nan if v is None else v for v in rows["itl_ms"]], dtype=np.float64) / 1e3
    tpot[osl <= 1] = np.nan
    ttft = np.array(rows["ttft_ms"], dtype=np.float64) / 1e3
    return Columns(
        ttft_s=ttft,
        tpot_s=tpot,
        lost=summary["num_requests"] - len(ttft),
        worker_s=summary["prefill_worker_seconds"] + summary["decode_worker_seconds"],
        cached=sum(rows["reused_input_tokens"]) / sum(rows["input_length"]),
    )


# ------------------------------------------------------------------------- translation


def write_trace(requests: Sequence[WorkloadRequest], path: Path) -> None:
    """Mooncake JSONL with blocks of 512 tokens; prompts without shared parts get blocks of their own."""
    own = 1 << 33
    with path.open("w") as out:
        for r in requests:
            if all(tokens == TRACE_BLOCK for _, tokens in r.parts[:-1]):
                ids = [seed for seed, _ in r.parts]
            else:
                ids = []
            need = -(-r.isl // TRACE_BLOCK)
            if len(ids) != need:
                ids = list(range(own, own + need))
                own += need
            doc = {
                "timestamp": r.at_s * 1e3,
                "input_length": r.isl,
                "output_length": r.osl,
                "hash_ids": ids,
            }
            out.write(json.dumps(doc) + "\n")


def write_profile(profile: ClassProfile, path: Path, *, surface: str) -> None:
    """The class as their NPZ.

    Prefill is our curve at its own points and beyond them, where both extrapolate with a straight
    line. `surface`: `fit` is our iteration fit on a fine grid of theirs, `grid` the measured points
    themselves, interpolated between measured loads and contexts.
    """
    x = [p[0] for p in profile.prefill_points]
    x += [float(v) for v in (20_000, 40_000, 80_000, CONTEXT_MAX) if v > x[-1]]
    kv = np.linspace(0.0, float(profile.kv_capacity_tokens), 60)
    a, b, c = profile.decode_coefficients_s()
    if surface == "fit":
        context = np.geomspace(16.0, float(CONTEXT_MAX), 80)
        itl = 1e3 * (a + c * kv[:, None] + b * kv[:, None] / context[None, :])
    else:
        context, itl = _measured_grid(profile, kv)
    np.savez(
        path,
        prefill_isl=np.array(x),
        prefill_ttft_ms=np.array([1e3 * profile.prefill_s(v) for v in x]),
        decode_active_kv_tokens=kv,
        decode_context_length=context,
        decode_itl=itl,
    )


def _measured_grid(
    profile: ClassProfile, kv: np.ndarray[Any, np.dtype[np.float64]]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Measured ITL by KV tokens (straight lines) for each measured context."""
    by_context: dict[int, list[tuple[float, float]]] = {}
    for sequences, tokens, ms in profile.decode_points:
        by_context.setdefault(round(tokens / sequences), []).append((tokens, ms))
    # Beyond the measured contexts their straight line would carry the noise of the last two far
    # out (10 % of mean ITL on Mooncake), so the outermost ones are held.
    lengths = sorted(by_context)
    context = np.array([16.0, *lengths, CONTEXT_MAX], dtype=np.float64)
    columns = []
    for length in (lengths[0], *lengths, lengths[-1]):
        points = np.array(sorted(by_context[length]))
        held, itl = points[:, 0], points[:, 1]
        slope = (itl[-1] - itl[0]) / (held[-1] - held[0])
        beyond = np.maximum(0.0, kv - held[-1]) * slope
        columns.append((np.interp(kv, held, itl) + beyond) * profile.slow_factor)
    return context, np.array(columns).T
