"""Measured deployments against the engine model: profiles from some rows predict the others.

Owns which of the published rows can be used and why the others cannot, the class profile formed
from a part of them, and the prediction of the rest: the same `EngineModel` that the simulator runs,
driven by as many clients as the row says, each sending its next request when its last one ended.

A row is one deployment at one concurrency: mean TTFT and TPOT. Rows of one deployment (model, GPU,
framework and version, precision, parallelism) with several prompt lengths and concurrencies make a
group. Every second concurrency of each shape forms the profile, the ones between are predicted.

The profile, in closed form: B clients come at once and send `WAVES` requests each, one after the
other ended, so prompts queue in the first wave and are computed while the others decode after it:

    TTFT = f(isl) (1 + (B - 1) / 2 WAVES) + TPOT / 2
    TPOT = a + b B + c B (isl + osl / 2) + f(isl) (B - 1) / osl

One non-negative least squares fit of both, relative errors weighed equally, gives a, b, c and f.
"""

from __future__ import annotations

import csv
import io
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
import zstandard
from scipy.optimize import nnls

from readyplane.core.profile import ClassProfile
from readyplane_agent.engines.modelled.core import EngineModel
from readyplane_agent.engines.modelled.core_events import EngineRequest, Finished, TokensEmitted

GROUP_BY = (
    "model_path",
    "system",
    "backend",
    "backend_version",
    "precision",
    "gemm_quant_mode",
    "moe_quant_mode",
    "tp_size",
    "pp_size",
    "attention_dp_size",
    "moe_tp_size",
    "moe_ep_size",
)
ROWS_MIN = 6
HELD_OUT_MIN = 2
ENGINE_GPUS_MAX = 16
WAVES = 10  # requests a client sends, as the usual load generators do (an assumption)
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One measured deployment at one concurrency; seconds."""

    system: str
    isl: int
    osl: int
    clients: int
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """A held-out row and what the engine model says of it."""

    row: Row
    ttft_s: float
    tpot_s: float


@dataclass(slots=True)
class Verdict:
    """What could be used. `left_out`: rows by reason. `formed`: rows that made a profile."""

    predicted: list[Predicted]
    formed: int
    groups: int
    left_out: Counter[str]

    def by_clients(self) -> list[tuple[str, int, float, float, float, float]]:
        """The same by how many clients there were; errors of TTFT and TPOT with their medians' sign."""
        out = []
        for low, high in ((1, 16), (17, 32), (33, 64), (65, 10_000)):
            rows = [p for p in self.predicted if low <= p.row.clients <= high]
            ttft = [p.ttft_s / p.row.ttft_s - 1.0 for p in rows]
            tpot = [p.tpot_s / p.row.tpot_s - 1.0 for p in rows]
            ends = f"{low} to {high}" if high < 10_000 else f"from {low}"
            out.append(
                (
                    ends,
                    len(rows),
                    mean(map(abs, ttft)),
                    median(ttft),
                    mean(map(abs, tpot)),
                    median(tpot),
                )
            )
        return out

    def table(self) -> list[tuple[str, int, float, float, float, float]]:
        """(GPU class, rows, mean and median error of TTFT, of TPOT), fractions; the last is all."""
        by_system: dict[str, list[Predicted]] = defaultdict(list)
        for found in self.predicted:
            by_system[found.row.system].append(found)
        out = []
        for name, rows in [*sorted(by_system.items()), ("all", self.predicted)]:
            ttft = [abs(p.ttft_s / p.row.ttft_s - 1.0) for p in rows]
            tpot = [abs(p.tpot_s / p.row.tpot_s - 1.0) for p in rows]
            out.append((name, len(rows), mean(ttft), median(ttft), mean(tpot), median(tpot)))
        return out


def judge(path: Path) -> Verdict:
    """Form profiles, predict what was held out, and say what was left out and why."""
    raw = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes())).read()
    verdict = Verdict([], 0, 0, Counter())
    groups: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in csv.DictReader(io.StringIO(raw.decode())):
        if row["mode"] != "agg":
            unknown = not row["decode_num_workers"]
            why = "workers and batches unknown" if unknown else "two classes at once"
            verdict.left_out[f"disaggregated, {why}"] += 1
            continue
        groups[tuple(row[name] for name in GROUP_BY)].append(_row(row))
    for key, rows in groups.items():
        of = dict(zip(GROUP_BY, key, strict=True))
        if of["attention_dp_size"] not in ("", "0", "1"):
            verdict.left_out["several engines (attention data parallel)"] += len(rows)
        elif int(of["tp_size"]) * int(of["pp_size"]) > ENGINE_GPUS_MAX:
            verdict.left_out[f"a rack (more than {ENGINE_GPUS_MAX} GPUs)"] += len(rows)
        else:
            _judge_group(rows, verdict)
    return verdict


def _row(row: dict[str, str]) -> Row:
    return Row(
        system=row["system"],
        isl=int(row["isl"]),
        osl=int(row["osl"]),
        clients=int(row["batch_size"]),
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
    )


def _judge_group(rows: list[Row], verdict: Verdict) -> None:
    if len({r.isl for r in rows}) < 2:
        verdict.left_out["one prompt length only"] += len(rows)
        return
    if len(rows) < ROWS_MIN:
        verdict.left_out[f"fewer than {ROWS_MIN} rows of a deployment"] += len(rows)
        return
    formed, held = _split(rows)
    if len(held) < HELD_OUT_MIN or len({r.isl for r in formed}) < 2:
        verdict.left_out["too few concurrencies to hold some out"] += len(rows)
        return
    profile = form(formed)
    verdict.groups += 1
    verdict.formed += len(formed)
    for row in held:
        ttft_s, tpot_s = closed_loop(profile, row.clients, row.isl, row.osl)
        verdict.predicted.append(Predicted(row, ttft_s, tpot_s))


def _split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Every second concurrency of each (isl, osl), the lowest and the next but one first."""
    shapes: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rows:
        shapes[row.isl, row.osl].append(row)
    formed: list[Row] = []
    held: list[Row] = []
    for found in shapes.values():
        levels = sorted({r.clients for r in found})
        for row in found:
            (held if levels.index(row.clients) % 2 else formed).append(row)
    return formed, held


def form(rows: Sequence[Row]) -> ClassProfile:
    """A class profile whose prefill and iteration times explain these rows best."""
    lengths = sorted({r.isl for r in rows})
    design, target = [], []
    for r in rows:
        place = 3 + lengths.index(r.isl)
        waits, stalls = np.zeros(3 + len(lengths)), np.zeros(3 + len(lengths))
        waits[place] = (1.0 + (r.clients - 1) / (2.0 * WAVES)) / r.ttft_s
        target.append(max(0.2, 1.0 - r.tpot_s / 2.0 / r.ttft_s))
        stalls[:3] = 1.0, r.clients, r.clients * (r.isl + r.osl / 2.0)
        stalls[place] = (r.clients - 1) / r.osl
        target.append(1.0)
        design += [waits, stalls / r.tpot_s]
    matrix = np.array(design)
    scale = matrix.max(axis=0)
    a, b, c, *alone = (nnls(matrix / scale, np.array(target))[0] / scale).tolist()
    ms = np.maximum.accumulate(np.maximum(1e-3, 1e3 * np.array(alone)))
    prefill = list(zip(map(float, lengths), ms.tolist(), strict=True))
    places = ((1, 1000), (64, 70_000), (8, 200_000), (128, 128_000))
    return ClassProfile(
        name="formed",
        source="measured rows",
        worker_class="formed",
        gpus=1,
        price_per_gpu_hour=1.0,
        prefill_points=tuple(prefill),
        decode_points=tuple(
            (float(n), float(kv), max(1e-3, 1e3 * (a + b * n + c * kv))) for n, kv in places
        ),
        kv_capacity_tokens=50_000_000,
        kv_bytes_per_token=1,
        max_num_seqs=2048,
    )


def closed_loop(profile: ClassProfile, clients: int, isl: int, osl: int) -> tuple[float, float]:
    """Mean TTFT and TPOT of `clients` that each send their next request when one ended."""
    engine = EngineModel(
        profile,
        block_size=BLOCK,
        kv_blocks=profile.kv_capacity_tokens // BLOCK,
        prefix_caching=False,
    )
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    ttft: list[float] = []
    tpot: list[float] = []
    count, now_s = 0, 0.0

    def send() -> None:
        nonlocal count
        name = str(count)
        count += 1
        sent[name] = now_s
        engine.submit(EngineRequest(name, isl, osl), now_s)

    for _ in range(clients):
        send()
    while sent:
        due_s = engine.next_event_s()
        assert due_s is not None
        now_s = due_s
        for event in engine.advance(now_s):
            if isinstance(event, TokensEmitted):
                first.setdefault(event.request_id, event.at_s)
            elif isinstance(event, Finished):
                began_s, first_s = sent.pop(event.request_id), first.pop(event.request_id)
                ttft.append(first_s - began_s)
                tpot.append((event.at_s - first_s) / max(1, osl - 1))
                if count < clients * WAVES:
                    send()
    return mean(ttft), mean(tpot)
