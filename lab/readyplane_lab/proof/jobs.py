"""One run as a job: a value that any process can carry out, and whose result is kept in a file.

Owns what identifies a run, so that an interrupted proof goes on where it was and a result of other
code is never taken for one of this. Hands result documents to the proof.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

import readyplane
import readyplane_agent
import readyplane_lab
import readyplane_planner
import readyplane_router
from readyplane.core.identity import digest_of
from readyplane_lab.proof import entrants
from readyplane_lab.proof.bounds import bound_document, bracket_document
from readyplane_lab.proof.inputs import Case, make_case
from readyplane_lab.proof.measure import held_series, ready_series, score
from readyplane_lab.proof.play import play_fielded
from readyplane_lab.proof.port import Fielded, find
from readyplane_lab.proof.whole_file import write_whole
from readyplane_lab.simulator.outcome import Floats, RunResult

Mode = Literal["fluid", "event", "bound", "bracket"]
TRACE_POINTS = 240
PACKAGES = (readyplane, readyplane_agent, readyplane_lab, readyplane_planner, readyplane_router)
DECISIONS_MAX = 400
REASONS_SHOWN = 2


@dataclass(frozen=True, slots=True)
class Job:
    """What identifies a run.

    Attributes:
        mode: `fluid` and `event` play a contender with its knob; `bound` works out the lower bound;
            `bracket` searches the smallest clairvoyant fleet that attains, by events or, for
            `knob` 0, in the fluid mode.
        check: also ask the scenario whether it went as expected.
    """

    scenario: str
    t_ready_s: float
    peak: float
    seed: int
    mode: Mode
    contender: str = ""
    knob: float = 0.0
    attainment: float = 0.99
    check: bool = False

    @property
    def case(self) -> tuple[str, float, float, int]:
        """What the runs of one input share."""
        return (self.scenario, self.t_ready_s, self.peak, self.seed)

    def file_name(self, code: str) -> str:
        """Where its result lies; `code` is the digest of the code that makes it."""
        return digest_of({**asdict(self), "code": code}).removeprefix("sha256:")[:24] + ".json"


@lru_cache(maxsize=1)
def code_digest() -> str:
    """Digest of everything that a result depends on: our sources and the profiles."""
    hasher = xxhash.xxh3_128()
    for package in PACKAGES:
        root = Path(str(package.__file__)).parent
        for file in sorted((*root.rglob("*.py"), *root.rglob("*.json"))):
            if not {"cli", "up", "report"} & set(file.relative_to(root).parts):
                hasher.update(file.read_bytes())
    return hasher.hexdigest()


def execute(job: Job) -> dict[str, Any]:
    """Carry one job out.

    Raises:
        ReadyplaneError: an input that cannot be had, such as a trace that is not there.
    """
    case = case_of(*job.case)
    document: dict[str, Any] = {"job": asdict(job)}
    if job.mode == "bound":
        return {**document, "bound": bound_document(case)}
    if job.mode == "bracket":
        fluid = job.knob == 0
        return {**document, "bracket": bracket_document(case, job.attainment, fluid=fluid)}
    contender = find(job.contender, entrants.contenders(), "--policy")
    fielded = contender.make(job.knob, case.setting)
    document["fielded"] = {"initial": fielded.initial, "convertible": fielded.convertible}
    return {**document, **played(case, fielded, mode=job.mode, check=job.check)}


def played(case: Case, fielded: Fielded, *, mode: str, check: bool) -> dict[str, Any]:
    """One run as a document: scores, the series of a picture, decisions, and, where it is asked,
    what the scenario finds unexpected.
    """
    run = play_fielded(case, fielded, mode=mode)
    found = score(run, slo=case.setting.slo, times=case.times, hindsight=case.hindsight)
    document = {
        "scores": found.document(),
        "trace": trace_of(run, case),
        "decisions": told(run.decisions),
    }
    return {**document, "unexpected": list(case.scenario.check(run))} if check else document


def told(decisions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What a reader wants of decisions, oldest first."""
    rows = [
        {
            "at_s": d["at_s"],
            "summary": d["summary"],
            "changes": d.get("changes") or [],
            "why": [reason["text"] for reason in (d.get("reasons") or [])[:REASONS_SHOWN]],
        }
        for d in decisions
    ]
    return sorted(rows, key=lambda row: row["at_s"])[:DECISIONS_MAX]


@lru_cache(maxsize=2)
def case_of(scenario: str, t_ready_s: float, peak: float, seed: int) -> Case:
    """The case of a job; the last two are kept, since a case's jobs come one after another."""
    found = find(scenario, entrants.scenarios(), "--scenario")
    return make_case(found, t_ready_s=t_ready_s, peak=peak, seed=seed)


def trace_of(run: RunResult, case: Case) -> dict[str, list[float | None]]:
    """What a picture of a run needs, on one coarse time axis.

    `need` in hindsight, `target`, `held` (paid for), `ready` of each pool; the load in
    worker-seconds a second; TTFT (P90) and TPOT (P90) and the share attained of each interval.
    """
    edges = np.linspace(0.0, case.span_s, min(TRACE_POINTS, max(2, int(case.span_s / 5))) + 1)
    at_s = (edges[:-1] + edges[1:]) / 2
    trace: dict[str, list[float | None]] = {"t_s": at_s.round(1).tolist()}
    need = (case.hindsight.need_p, case.hindsight.need_d)
    cell = np.minimum((at_s / case.hindsight.step_s).astype(int), len(need[0]) - 1)
    moved = np.array([t for t, _, _ in run.targets]) if run.targets else np.zeros(0)
    for i, pool in enumerate(("prefill", "decode")):
        trace[f"{pool}.need"] = need[i][cell].tolist()
        targets = np.array([row[1 + i] for row in run.targets], dtype=float)
        place = np.searchsorted(moved, at_s, side="right") - 1
        trace[f"{pool}.target"] = [
            float(targets[k]) if k >= 0 else None for k in place.tolist() if len(targets)
        ] or [None] * len(at_s)
        trace[f"{pool}.held"] = held_series(run.lives, pool, at_s).tolist()
        trace[f"{pool}.ready"] = ready_series(run.lives, pool, at_s).tolist()
    trace |= _latencies(run, case, edges)
    return trace


def _latencies(run: RunResult, case: Case, edges: Floats) -> dict[str, list[float | None]]:
    served, slo = run.served, case.setting.slo
    place = np.clip(np.searchsorted(edges, served.at_s, side="right") - 1, 0, len(edges) - 2)
    order = np.argsort(place, kind="stable")
    cuts = np.searchsorted(place[order], np.arange(len(edges)))
    out: dict[str, list[float | None]] = {"ttft.p90_s": [], "tpot.p90_s": [], "attained": []}
    for a, b in pairwise(cuts.tolist()):
        rows = order[a:b]
        ttft, tpot = served.ttft_s[rows], served.tpot_s[rows]
        for name, values in (("ttft.p90_s", ttft), ("tpot.p90_s", tpot)):
            answered = values[np.isfinite(values)]
            out[name].append(float(np.quantile(answered, 0.9)) if len(answered) else None)
        met = (ttft <= slo.ttft_s) & (tpot <= slo.tpot_s)
        weight = served.weight[rows]
        total = float(weight.sum())
        out["attained"].append(float(weight[met].sum()) / total if total else None)
    return out


def _is_of(document: Mapping[str, Any], job: Job) -> bool:
    """Whether a kept document is the whole result of a job; anything else is made anew."""
    needed = {"bound": {"bound"}, "bracket": {"bracket"}}.get(
        job.mode, {"scores", "fielded", "trace", "decisions"}
    )
    return document.get("job") == asdict(job) and needed <= document.keys()


class Results:
    """Results by job, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._code = code_digest()
        self.found: dict[Job, Mapping[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, job: Job) -> Mapping[str, Any] | None:
        """A result of this code, if there is one."""
        if job in self.found:
            return self.found[job]
        file = self._folder / job.file_name(self._code)
        try:
            document = json.loads(file.read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(document, dict) or not _is_of(document, job):
            return None
        self.found[job] = document
        return self.found[job]

    def put(self, job: Job, document: Mapping[str, Any]) -> None:
        """Keep a result; a reader never sees half a file."""
        self.found[job] = document
        write_whole(self._folder / job.file_name(self._code), json.dumps(document))
