"""From runs to verdicts: which knob stands for a contender, and what the comparison comes to.

Owns the rules of the comparison, and nothing that runs. A comparison is made only between points
that reach the attainment asked for; a contender that does not reach it has no figure, and where that
is ours the input counts as missed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from readyplane_lab.proof.oracle.ratios import captured_saving

FLUID_SLACK = 0.01
"""How far the fluid mode may be wrong about attainment before a point is not worth an event run."""
FLUID_MARGIN = 1.25
"""How much dearer than the cheapest a contender may look before it cannot be the best."""
NEAREST = 2
CONFIRMATIONS_MAX = 3
OURS = "readyplane"
STATIC_PEAK = "static-peak"


@dataclass(frozen=True, slots=True)
class Point:
    """One knob of one contender on one input, as one mode of the simulator has it."""

    knob: float
    attainment: float
    gpu_hours: float

    def reaches(self, attainment: float) -> bool:
        """Whether it may be compared."""
        return self.attainment >= attainment


@dataclass(frozen=True, slots=True)
class Entry:
    """One contender on one input.

    Attributes:
        fluid: the sweep. event: confirmed points. bound: it is no baseline.
    """

    contender: str
    fluid: tuple[Point, ...] = ()
    event: tuple[Point, ...] = ()
    bound: bool = False

    def best(self, attainment: float) -> Point | None:
        """The cheapest confirmed point that reaches the attainment."""
        return min(
            (p for p in self.event if p.reaches(attainment)),
            key=lambda p: (p.gpu_hours, p.knob),
            default=None,
        )


@dataclass(frozen=True, slots=True)
class Input:
    """One input: a scenario at a T_ready, a peak and a seed.

    Attributes:
        floor_gpu_hours: rigorous; lower_gpu_hours: O_LB; osim_gpu_hours: O_SIM, None where the
            clairvoyant plan does not reach the attainment.
        ours: our planner's default. reversals_per_h, starts, wasted: of its run.
    """

    key: str
    scenario: str
    kind: str
    entries: Mapping[str, Entry]
    floor_gpu_hours: float
    lower_gpu_hours: float
    osim_gpu_hours: float | None
    ours: Point | None = None
    reversals_per_h: float = 0.0
    starts: int = 0
    wasted: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """The last line. None where no input could tell; inf where one was missed.

    `kept`: inputs on which ours keeps the promise, the only ones that `r_*` is taken over.
    `missed`: on which it does not, and a baseline or a planner that knows the future does.
    """

    r_median: float | None
    r_worst: float | None
    worst_vs_best_tuned: float | None
    worst_vs_one_knob: float | None
    captured_servegen: float | None
    reversals_per_h: float | None
    wasted_starts: float | None
    azure_code_ratio: float | None
    inputs: int = 0
    kept: int = 0
    missed: tuple[str, ...] = ()
    one_knob: Mapping[str, tuple[float, float | None]] = field(default_factory=dict)

    def line(self) -> str:
        """`bench-prove name=value ...`."""
        names = (
            "r_median",
            "r_worst",
            "worst_vs_best_tuned",
            "worst_vs_one_knob",
            "captured_servegen",
            "reversals_per_h",
            "wasted_starts",
            "azure_code_ratio",
        )
        shown = (f"{name}={_shown(getattr(self, name))}" for name in names)
        counts = f"inputs={self.inputs} kept={self.kept} missed={len(self.missed)}"
        return f"bench-prove {' '.join(shown)} {counts}"


def next_knob(entry: Entry, attainment: float, *, most: int = CONFIRMATIONS_MAX) -> float | None:
    """Which point of a sweep to confirm by events next; None when enough is known.

    The cheapest that the fluid mode lets through is tried first. If the events refuse it, the next
    dearer one; if they accept it, one cheaper one that the fluid mode refused by a little.
    """
    tried = {p.knob: p for p in entry.event}
    if len(tried) >= most:
        return None
    ranked = sorted(entry.fluid, key=lambda p: (p.gpu_hours, p.knob))
    enough = [p for p in ranked if p.reaches(attainment)]
    passed = [p for p in tried.values() if p.reaches(attainment)]
    if not enough:
        nearest = max(ranked, key=lambda p: (p.attainment, -p.gpu_hours, -p.knob), default=None)
        return None if nearest is None or nearest.knob in tried else nearest.knob
    if not tried:
        return enough[0].knob
    if passed:
        least = min(p.gpu_hours for p in ranked if p.knob in {q.knob for q in passed})
        close = [
            p
            for p in ranked
            if p.gpu_hours < least and p.reaches(attainment - FLUID_SLACK) and p.knob not in tried
        ]
        return close[-1].knob if close else None
    return next((p.knob for p in enough if p.knob not in tried), None)


def worth_confirming(entries: Sequence[Entry], attainment: float) -> set[str]:
    """Which contenders to confirm by events: ours, the bounds, and whoever may be the cheapest.

    The others keep the figure of the fluid mode, which says by how much they are out of reach.
    Where the fluid mode lets nobody through, those that come nearest are looked at.
    """
    always = {e.contender for e in entries if e.bound or e.contender == OURS}
    rivals = [e for e in entries if e.contender not in always and e.fluid]
    cost = {
        e.contender: min(
            (p.gpu_hours for p in e.fluid if p.reaches(attainment - FLUID_SLACK)), default=math.inf
        )
        for e in rivals
    }
    least = min(cost.values(), default=math.inf)
    if math.isinf(least):
        nearest = sorted(rivals, key=lambda e: -max(p.attainment for p in e.fluid))
        return always | {e.contender for e in nearest[:NEAREST]}
    return always | {name for name, hours in cost.items() if hours <= FLUID_MARGIN * least}


def summary(inputs: Sequence[Input], *, attainment: float) -> Summary:
    """Everything that the last line says, over the inputs of the centre point.

    `r_*`: ours over O_SIM. `worst_vs_best_tuned`: ours over the cheapest baseline, each baseline
    tuned on that input in hindsight; bounds are no baselines.
    `worst_vs_one_knob`: for each baseline the median over inputs of ours over it at its one knob,
    and of these the worst.
    """
    ratios: list[float] = []
    tuned: list[float] = []
    missed: list[str] = []
    kept = 0
    for one in inputs:
        ours = one.ours
        reached = ours is not None and ours.reaches(attainment)
        kept += reached
        if one.osim_gpu_hours and ours is not None and reached:
            ratios.append(ours.gpu_hours / one.osim_gpu_hours)
        best = best_tuned(one, attainment)
        if best is None:
            if one.osim_gpu_hours and not reached:
                missed.append(one.key)  # no baseline, but a planner that knows the future can
            continue
        if ours is not None and reached:
            tuned.append(ours.gpu_hours / best[1].gpu_hours)
        else:
            missed.append(one.key)
            tuned.append(math.inf)
    single = one_knob(inputs, attainment=attainment)
    against = [ratio for _, ratio in single.values() if ratio is not None]
    starts = sum(one.starts for one in inputs)
    replays = [one.reversals_per_h for one in inputs if one.kind == "replay"]
    return Summary(
        r_median=_median(ratios),
        r_worst=max(ratios, default=None),
        worst_vs_best_tuned=max(tuned, default=None),
        worst_vs_one_knob=max(against, default=None),
        captured_servegen=_median(_captured(inputs, attainment)),
        reversals_per_h=max(replays, default=None),
        wasted_starts=sum(one.wasted for one in inputs) / starts if starts else None,
        azure_code_ratio=_code_ratio(inputs, attainment),
        inputs=len(inputs),
        kept=kept,
        missed=tuple(missed),
        one_knob=single,
    )


def best_tuned(one: Input, attainment: float) -> tuple[str, Point] | None:
    """The cheapest baseline of an input, tuned on it in hindsight."""
    found = [
        (entry.contender, point)
        for entry in one.entries.values()
        if not entry.bound and entry.contender != OURS
        if (point := entry.best(attainment)) is not None
    ]
    return min(found, key=lambda f: (f[1].gpu_hours, f[0]), default=None)


def one_knob(
    inputs: Sequence[Input], *, attainment: float
) -> dict[str, tuple[float, float | None]]:
    """Each baseline's one knob for all inputs, and the median of ours over it.

    The knob is the one that reaches the attainment on the most inputs, of these the cheapest in
    total; a baseline that reaches it nowhere has none. Both sides are compared as the fluid mode has them, where every knob was played. Only
    inputs on which both reach the attainment have a ratio.
    """
    out: dict[str, tuple[float, float | None]] = {}
    names = dict.fromkeys(name for one in inputs for name in one.entries)
    for name in names:
        entries = [one.entries[name] for one in inputs if name in one.entries]
        if name == OURS or any(entry.bound for entry in entries):
            continue
        knob = _one_knob(entries, attainment)
        if knob is None:
            continue
        ratios = []
        for one in inputs:
            theirs = _at(one.entries.get(name), knob)
            ours = _default(one)
            if theirs is None or ours is None:
                continue
            if theirs.reaches(attainment) and ours.reaches(attainment):
                ratios.append(ours.gpu_hours / theirs.gpu_hours)
        out[name] = (knob, _median(ratios))
    return out


def _one_knob(entries: Iterable[Entry], attainment: float) -> float | None:
    reached: dict[float, int] = {}
    cost: dict[float, float] = {}
    for entry in entries:
        for point in entry.fluid:
            reached[point.knob] = reached.get(point.knob, 0) + point.reaches(attainment)
            cost[point.knob] = cost.get(point.knob, 0.0) + point.gpu_hours
    if not any(reached.values()):
        return None
    return min(reached, key=lambda k: (-reached[k], cost[k], k))


def _at(entry: Entry | None, knob: float) -> Point | None:
    if entry is None:
        return None
    return next((p for p in entry.fluid if p.knob == knob), None)


def _default(one: Input) -> Point | None:
    """Ours at its default knob, as the fluid mode has it."""
    if one.ours is None:
        return None
    return _at(one.entries.get(OURS), one.ours.knob)


def _captured(inputs: Sequence[Input], attainment: float) -> list[float]:
    """Captured saving on ServeGen: 1 is the clairvoyant fleet, 0 the static peak."""
    out = []
    for one in inputs:
        static = _peak(one, attainment)
        if not one.scenario.startswith("servegen") or static is None or not one.osim_gpu_hours:
            continue
        if one.ours is None or not one.ours.reaches(attainment):
            out.append(-math.inf)
            continue
        saved = captured_saving(
            one.ours.gpu_hours, static_peak=static, achievable=one.osim_gpu_hours
        )
        out += [] if saved is None else [saved]
    return out


def _code_ratio(inputs: Sequence[Input], attainment: float) -> float | None:
    for one in inputs:
        static = _peak(one, attainment)
        if one.scenario == "az-code" and static and one.ours is not None:
            reached = one.ours.reaches(attainment)
            return one.ours.gpu_hours / static if reached else math.inf
    return None


def _peak(one: Input, attainment: float) -> float | None:
    """GPU-hours of a fleet always as large as the peak needs, and larger until it attains."""
    entry = one.entries.get(STATIC_PEAK)
    enough = [] if entry is None else [p for p in entry.fluid if p.knob >= 1.0]
    return min((p.gpu_hours for p in enough if p.reaches(attainment)), default=None)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
