"""One input from beginning to end: sweep every contender, confirm by events, bracket the optimum.

Owns the order of the runs of one input and their sum as an `Input`. Runs in one process of the
proof; every single run is kept as it ends, so that nothing is done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from readyplane.core.errors import ReadyplaneError
from readyplane_lab.proof import entrants
from readyplane_lab.proof.bounds import undercut
from readyplane_lab.proof.inputs import LARGE_REQUESTS
from readyplane_lab.proof.jobs import Job, Mode, Results, execute
from readyplane_lab.proof.port import Contender
from readyplane_lab.proof.verdict import (
    CONFIRMATIONS_MAX,
    OURS,
    Entry,
    Input,
    Point,
    next_knob,
    worth_confirming,
)

Tell = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Errand:
    """One input and how thoroughly it is looked at.

    Attributes:
        contenders: names; ours is always among them. knobs: most values of a sweep.
        events: confirm the chosen points by events; else the fluid mode stands for itself.
        centre: it belongs to the point that is judged.
        at: one knob per contender instead of a sweep; missing ones take their default.
    """

    scenario: str
    t_ready_s: float
    peak: float
    seed: int
    contenders: tuple[str, ...]
    attainment: float
    knobs: int = 8
    events: bool = True
    centre: bool = True
    at: Mapping[str, float] | None = None

    @property
    def key(self) -> str:
        """For a person."""
        return (
            f"{self.scenario}, T_ready {self.t_ready_s:g} s, peak {self.peak:g}, seed {self.seed}"
        )

    def job(self, mode: Mode, contender: str = "", knob: float = 0.0) -> Job:
        """A run of this input."""
        check = mode == "event" and contender == OURS
        return Job(
            scenario=self.scenario,
            t_ready_s=self.t_ready_s,
            peak=self.peak,
            seed=self.seed,
            mode=mode,
            contender=contender,
            knob=knob,
            attainment=self.attainment,
            check=check,
        )


def settle(errand: Errand, results: Results, tell: Tell) -> tuple[Input, dict[str, Any]]:
    """Run what is missing.

    Args:
        tell: called after each run with its name and the share of the errand that is done.

    Returns:
        The input for the verdict, and a document with everything a report shows of it.
    """
    contenders = {name: entrants.contenders()[name] for name in errand.contenders}
    steps = _Steps(errand, results, tell, total=_runs(errand, contenders))
    bound = steps.bound
    entries: dict[str, Entry] = {}
    sweeps: dict[str, dict[float, Mapping[str, Any]]] = {}
    for name, contender in contenders.items():
        entries[name], sweeps[name] = _swept(errand, contender, steps)
    heavy = bound["requests"] > LARGE_REQUESTS
    chosen = worth_confirming(list(entries.values()), errand.attainment)
    shown: dict[str, Any] = {}
    for name, entry in entries.items():
        confirmed: dict[float, Mapping[str, Any]] = {}
        if errand.events and name in chosen and not (heavy and entry.bound):
            most = 1 if heavy else CONFIRMATIONS_MAX
            entries[name], confirmed = _confirmed(errand, entry, steps, most=most)
        shown[name] = _shown(errand, entries[name], sweeps[name], confirmed)
    mode: Mode = "event" if errand.events else "fluid"
    by_events = errand.events and not heavy
    bracket = steps.run(errand.job("bracket", knob=float(by_events)))["bracket"]
    ours = contenders[OURS]
    final = steps.run(errand.job(mode, OURS, ours.default))
    scores = final["scores"]
    shown[OURS] = _as_it_is(errand, shown[OURS], final, ours.default)
    found = Input(
        key=errand.key,
        scenario=errand.scenario,
        kind=entrants.scenarios()[errand.scenario].kind,
        entries=entries,
        floor_gpu_hours=bound["floor_gpu_hours"],
        lower_gpu_hours=bound["lower_gpu_hours"],
        osim_gpu_hours=bracket["osim_gpu_hours"],
        ours=_point(ours.default, scores),
        reversals_per_h=scores["reversals_per_h"],
        starts=scores["starts"],
        wasted=scores["wasted"],
    )
    document = {
        "key": errand.key,
        "about": _about(errand),
        "mode": mode,
        "bound": bound,
        "bracket": bracket,
        "entries": shown,
        "ours": final,
        "unexpected": final.get("unexpected"),
        "undercut": steps.undercut,
    }
    return found, document


def _as_it_is(
    errand: Errand, shown: Mapping[str, Any], final: Mapping[str, Any], default: float
) -> dict[str, Any]:
    """Ours as it is judged: at its default, and not at the knob that hindsight would choose."""
    mode = "event" if errand.events else "fluid"
    return {
        **shown,
        mode: {**shown[mode], str(default): final["scores"]},
        "mode": mode,
        "chosen": default,
        "reached": final["scores"]["attainment"] >= errand.attainment,
        "trace": final["trace"],
    }


def _about(errand: Errand) -> dict[str, Any]:
    """What a person wants to know of the input."""
    scenario = entrants.scenarios()[errand.scenario]
    return {
        "scenario": errand.scenario,
        "kind": scenario.kind,
        "title": scenario.title,
        "expected": scenario.expected,
        "t_ready_s": errand.t_ready_s,
        "peak": errand.peak,
        "seed": errand.seed,
        "ttft_s": scenario.slo.ttft_s,
        "tpot_s": scenario.slo.tpot_s,
        "default": entrants.contenders()[OURS].default,
        "centre": errand.centre,
    }


def _swept(
    errand: Errand, contender: Contender, steps: _Steps
) -> tuple[Entry, dict[float, Mapping[str, Any]]]:
    """Every knob in the fluid mode; without events that is all there is."""
    sweep = {
        knob: steps.run(errand.job("fluid", contender.name, knob))
        for knob in _knobs(errand, contender)
    }
    fluid = tuple(_point(knob, result["scores"]) for knob, result in sweep.items())
    event = () if errand.events else fluid
    return Entry(contender.name, fluid, event, bound=contender.bound), sweep


def _confirmed(
    errand: Errand, entry: Entry, steps: _Steps, *, most: int
) -> tuple[Entry, dict[float, Mapping[str, Any]]]:
    """The points that matter, by events."""
    runs: dict[float, Mapping[str, Any]] = {}
    while (knob := next_knob(entry, errand.attainment, most=most)) is not None:
        runs[knob] = steps.run(errand.job("event", entry.contender, knob))
        point = _point(knob, runs[knob]["scores"])
        entry = Entry(entry.contender, entry.fluid, (*entry.event, point), bound=entry.bound)
    return entry, runs


def _shown(
    errand: Errand,
    entry: Entry,
    sweep: Mapping[float, Mapping[str, Any]],
    confirmed: Mapping[float, Mapping[str, Any]],
) -> dict[str, Any]:
    """A contender as the report shows it: at its best point, of the mode that has one."""
    best = entry.best(errand.attainment)
    points = entry.event or entry.fluid
    chosen = best or max(points, key=lambda p: (p.attainment, -p.gpu_hours))
    runs = confirmed or sweep
    return {
        "fluid": {str(k): r["scores"] for k, r in sweep.items()},
        "event": {str(k): r["scores"] for k, r in confirmed.items()},
        "mode": "event" if confirmed else "fluid",
        "chosen": chosen.knob,
        "reached": best is not None,
        "bound": entry.bound,
        "trace": runs[chosen.knob]["trace"],
    }


def _knobs(errand: Errand, contender: Contender) -> tuple[float, ...]:
    if errand.at is not None:
        return (errand.at.get(contender.name, contender.default),)
    values = contender.values
    if len(values) > errand.knobs:
        places = {round(i * (len(values) - 1) / (errand.knobs - 1)) for i in range(errand.knobs)}
        values = tuple(values[i] for i in sorted(places))
    if contender.name == OURS and contender.default not in values:
        values = (*values, contender.default)
    return values


def _runs(errand: Errand, contenders: Mapping[str, Contender]) -> float:
    """What the errand comes to, in event runs; a fluid run counts as a tenth."""
    fluid = sum(len(_knobs(errand, c)) for c in contenders.values())
    return 0.1 * fluid + (2.0 * len(contenders) + 6.0 if errand.events else 1.0)


def _point(knob: float, scores: Mapping[str, Any]) -> Point:
    return Point(knob, scores["attainment"], scores["gpu_hours"])


class RunFault(RuntimeError):
    """A run broke: a fault of the contender or of the simulator, not of the input."""


class _Steps:
    """Runs with their bookkeeping.

    Attributes:
        undercut: runs that were cheaper than is possible; there must be none.
    """

    def __init__(self, errand: Errand, results: Results, tell: Tell, *, total: float) -> None:
        self._errand, self._results, self._tell = errand, results, tell
        self._total, self._done = total, 0.0
        self.undercut: list[str] = []
        self.bound: Mapping[str, Any] = self.run(errand.job("bound"))["bound"]

    def run(self, job: Job) -> Mapping[str, Any]:
        """The result of a job, from the folder or now."""
        found = self._results.get(job)
        if found is None:
            found = self._executed(job)
            self._results.put(job, found)
        self._done += {"fluid": 0.1, "event": 1.0, "bracket": 5.0, "bound": 0.1}[job.mode]
        name = f"{job.contender or job.mode} {job.knob:g}" if job.contender else job.mode
        if "scores" in found and (why := undercut(self.bound, found)):
            self.undercut.append(f"{job.contender} at {job.knob:g} ({job.mode}): {why}")
        self._tell(f"{self._errand.key}: {name}", min(0.999, self._done / self._total))
        return found

    def _executed(self, job: Job) -> Mapping[str, Any]:
        try:
            return execute(job)
        except ReadyplaneError:
            raise
        except Exception as error:
            who = f"{job.contender} at {job.knob:g}" if job.contender else job.mode
            text = f"{who} ({job.mode}): {type(error).__name__}: {error}"
            raise RunFault(text) from error
