"""What is compared, and on what: the two things that a new file adds to the proof.

A `Contender` is a planning rule with one knob. A `Scenario` is a workload with its circumstances.
Both are found by their file: every module of `proof/baselines` that has a `CONTENDER`, every module
of `proof/scenarios` that has a `SCENARIO` (or a `SCENARIOS` tuple).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile
from readyplane.core.startup import StartQuantiles
from readyplane.core.work import Slo
from readyplane_lab.simulator.outcome import Floats, RunResult
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_planner.decide.follow import Brain

SLO_DEFAULT = Slo(ttft_s=2.0, tpot_s=0.05)
CLASS_DEFAULT = "h100-tp4-llama70b"


@dataclass(frozen=True, slots=True)
class Hindsight:
    """The whole future, for rules that are meant to know it, and for nobody else.

    Attributes:
        step_s: of the grid. work_p, work_d: worker-seconds of work arriving in each step.
        need_p, need_d: least ready workers of each step (whole numbers).
    """

    step_s: float
    work_p: Floats
    work_d: Floats
    need_p: Floats
    need_d: Floats


@dataclass(frozen=True, slots=True)
class Setting:
    """What every contender is told alike.

    Attributes:
        prefill, decode: profiles of the pools. t_ready: quantiles of a start; only rules that are
            aware of it use it. drain_s: median seconds of a drain by pool.
        low, high: least and most workers of each pool (prefill, decode).
        initial: workers that are ready when the first request arrives.
        hindsight: only for static fleets, the oracle and what is tuned in hindsight by definition.
    """

    prefill: ClassProfile
    decode: ClassProfile
    slo: Slo
    t_ready: StartQuantiles
    drain_s: tuple[float, float]
    low: tuple[int, int]
    high: tuple[int, int]
    initial: tuple[int, int]
    hindsight: Hindsight


@dataclass(frozen=True, slots=True)
class Fielded:
    """A contender ready to play one run.

    Attributes:
        brain: called at every tick. policy: planner policy fields laid over the proof's own
            (`tick_s` at least). initial: overrides the setting's, for static fleets.
        convertible: decode workers may also take prefill work, within a bound.
    """

    brain: Brain
    policy: Mapping[str, Any] = field(default_factory=dict)
    initial: tuple[int, int] | None = None
    convertible: bool = False


@dataclass(frozen=True, slots=True)
class Contender:
    """A planning rule with one knob.

    Attributes:
        name: short, as on the command line. title: one sentence. source: where the rule is
            published. knob: what is swept. values: eight of them, the cheapest fleet first.
        default: the published value, used where nothing is tuned.
        make: (knob value, setting) -> what plays; called once a run, so it may keep state.
        aware: whether it uses T_ready. hindsight: whether it knows the future.
        bound: it is there to bound the others and is no baseline to be beaten.
    """

    name: str
    title: str
    source: str
    knob: str
    values: tuple[float, ...]
    default: float
    make: Callable[[float, Setting], Fielded]
    aware: bool = False
    hindsight: bool = False
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Disturbances:
    """What goes wrong during a run, in seconds since the first arrival. Empty: nothing.

    Attributes:
        faults: values of `readyplane_lab.simulator.faults`.
    """

    faults: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Scenario:
    """A workload and its circumstances.

    Attributes:
        name: as on the command line. title: one sentence. kind: `scenario` or `replay`.
        requests: (scale, seed) -> arrivals, sorted, the first at 0; `scale` multiplies the load and
            keeps its shape. Raises InvalidField where a trace is not there.
        expected: one sentence of what a good planner does here (R25.1).
        check: what of that did not happen, in sentences; empty when all is well. Gets the run of
            the planner.
        disturb: (span in seconds, seed) -> what goes wrong.
        worker_class: profile of both pools. decode_class: of D where it differs.
        startup: overrides of `StartUpModel` fields (say `store_bytes_per_s`).
        initial: ready workers at the first arrival; None: what the first T_ready needs.
        policy: planner policy fields that belong to the scenario (say a quota).
        variant: of another scenario; played when it is named, or in a full proof.
    """

    name: str
    title: str
    requests: Callable[[float, int], Sequence[WorkloadRequest]]
    expected: str
    kind: str = "scenario"
    check: Callable[[RunResult], tuple[str, ...]] = lambda _run: ()
    disturb: Callable[[float, int], Disturbances] = lambda _span_s, _seed: Disturbances()
    worker_class: str = CLASS_DEFAULT
    decode_class: str = ""
    slo: Slo = SLO_DEFAULT
    startup: Mapping[str, Any] = field(default_factory=dict)
    initial: tuple[int, int] | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
    variant: bool = False


def find(name: str, among: Mapping[str, Any], what: str) -> Any:
    """By name.

    Raises:
        InvalidField: no such one, with those there are.
    """
    if name not in among:
        raise InvalidField(what, name, f"use one of {', '.join(sorted(among))}")
    return among[name]
