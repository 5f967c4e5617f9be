"""The cells of `bench.startup`: what a start finds, and how each of them is told apart afterwards.

Owns the matrix and the arithmetic of one cell. Pure. A start counts only where its own trace says that
it found what its cell promises: a hit that was a miss is no figure of a hit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product

from readyplane.core.startup import CriticalPath, Segment, SegmentName

HIT, MISS, EAGER = "hit", "miss", "eager"
REUSED, FULL, TOLD = "reused", "full", "told"
LOCAL, REMOTE = "local", "remote"
COMPILED = {HIT: "cache=hit", MISS: "cache=miss"}
TIERS = {LOCAL: ("L1", "L2"), REMOTE: ("L0", "L1", "L3", "L4")}
PEER = "L1 peer:"
"""How a segment names another worker's memory, which is L1 of that worker's node."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """What a start finds.

    Attributes:
        weights: `local` (this node's cache) or `remote` (the registry's store, or a worker of another
            node where one holds them).
        code: `hit`, `miss`, or `eager`, which compiles nothing.
        kv: `reused` (a measured KV size holds), `full` (it is measured), or `told` for an engine that
            measures none.
        standby: a process that has imported everything waits for the order.
    """

    weights: str
    code: str
    kv: str
    standby: bool

    @property
    def name(self) -> str:
        """In a table."""
        standby = "standby" if self.standby else "-"
        return f"{self.weights:<6} {self.code:<5} {self.kv:<6} {standby:<7}"

    @property
    def mode(self) -> str:
        """The start mode that the agent is told."""
        return "eager" if self.code == EAGER else "jit"


def cold_cell(*, sizes_kv: bool) -> Cell:
    """A start that finds nothing."""
    return Cell(REMOTE, MISS, FULL if sizes_kv else TOLD, standby=False)


def warm_cell(*, sizes_kv: bool, standby: bool) -> Cell:
    """A start that finds everything."""
    return Cell(LOCAL, HIT, REUSED if sizes_kv else TOLD, standby)


def essential(*, sizes_kv: bool) -> tuple[Cell, ...]:
    """The cells of the figures, and what the standby and compiling are each worth."""
    warm = (warm_cell(sizes_kv=sizes_kv, standby=standby) for standby in (False, True))
    eager = Cell(REMOTE, EAGER, FULL if sizes_kv else TOLD, standby=False)
    return (cold_cell(sizes_kv=sizes_kv), eager, *warm)


def matrix(*, sizes_kv: bool) -> tuple[Cell, ...]:
    """Every cell."""
    kinds = (FULL, REUSED) if sizes_kv else (TOLD,)
    every = product((REMOTE, LOCAL), (MISS, HIT, EAGER), kinds, (False, True))
    return tuple(Cell(weights, code, kv, standby) for weights, code, kv, standby in every)


@dataclass(frozen=True, slots=True)
class Taken:
    """One start as it was.

    Attributes:
        path: exclusive seconds by segment. segments: as the agent told them. tier: of the weights.
        begin_s: when it began, on the clock of its segments.
    """

    cell: Cell
    path: CriticalPath
    segments: tuple[Segment, ...]
    tier: str
    begin_s: float = 0.0

    @property
    def compile_s(self) -> float:
        """Seconds of the compile segment, nan where there was none."""
        return self.path.inclusive_s.get(SegmentName.COMPILE, math.nan)

    @property
    def from_peer(self) -> bool:
        """Whether another worker's memory gave weights."""
        names = SegmentName.WEIGHT_READ, SegmentName.WEIGHT_TRANSFER
        return any(PEER in self.details(name) for name in names)

    def details(self, name: SegmentName) -> str:
        """What the segments of this name say."""
        return "; ".join(s.detail for s in self.segments if s.name is name)


def widest_gap(taken: Taken) -> str:
    """The longest time of a start that no segment explains, in words; empty without one."""
    rows = sorted((s.start_s, s.end_s or s.start_s, str(s.name)) for s in taken.segments)
    end_s, before, widest = rows[0][0], "", (0.0, "")
    for start_s, until_s, name in rows:
        if before and start_s - end_s > widest[0]:
            widest = (start_s - end_s, f"{start_s - end_s:.3f} s between {before} and {name}")
        if until_s >= end_s:
            end_s, before = until_s, name
    return widest[1]


def mistaken(taken: Taken) -> list[str]:
    """Where a start was not what its cell says; empty for a true one."""
    cell, found = taken.cell, []
    wrong_place = taken.tier == "L1" and taken.from_peer != (cell.weights == REMOTE)
    if taken.tier not in TIERS[cell.weights] or wrong_place:
        found.append(f"weights came from {taken.tier}, not {cell.weights}")
    compiling = taken.details(SegmentName.COMPILE)
    if cell.code == EAGER and compiling:
        found.append(f"an eager start compiled: {compiling}")
    if cell.code != EAGER and COMPILED[cell.code] not in compiling:
        found.append(f"compile says {compiling or 'nothing'}, not {COMPILED[cell.code]}")
    profiling = taken.details(SegmentName.KV_PROFILE)
    if cell.kv != TOLD and profiling.startswith("reused") != (cell.kv == REUSED):
        found.append(f"kv_profile says {profiling or 'nothing'}, not {cell.kv}")
    return found


@dataclass
class Figures:
    """All starts of one engine, and why others are not there.

    Attributes:
        not_run: reason by the name of a cell.
    """

    cold: Cell
    warm: Cell
    taken: list[Taken] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)

    def of(self, cell: Cell) -> list[Taken]:
        """The starts of one cell."""
        return [t for t in self.taken if t.cell == cell]

    def ready_s(self, cell: Cell) -> float:
        """Median T_ready; nan without a start."""
        return median(t.path.wall_s for t in self.of(cell))

    @property
    def ready_ratio(self) -> float:
        """Warm with a standby over cold."""
        return self.ready_s(self.warm) / self.ready_s(self.cold)

    @property
    def compile_ratio(self) -> float:
        """Compile segment of all hits over that of all misses."""
        return self._compile_s(HIT) / self._compile_s(MISS)

    def _compile_s(self, code: str) -> float:
        return median(t.compile_s for t in self.taken if t.cell.code == code)

    @property
    def unexplained(self) -> float:
        """The worst share of T_ready that no segment explains."""
        return max((t.path.unexplained_fraction for t in self.taken), default=math.nan)

    def line(self, name: str) -> str:
        """The last line of a report."""
        return (
            f"{name} ready_ratio={self.ready_ratio:.3f} compile_ratio={self.compile_ratio:.3f} "
            f"unexplained={self.unexplained:.4f}"
        )


def median(values: Iterable[float]) -> float:
    """The median; nan of nothing."""
    found = list(values)
    return statistics.median(found) if found else math.nan


def table(figures: Figures, cells: Sequence[Cell]) -> list[str]:
    """A line a cell: starts, median T_ready, the worst unexplained share, and mean exclusive seconds."""
    names = [n for n in SegmentName if any(t.path.exclusive_s.get(n) for t in figures.taken)]
    short = {n: "".join(word[:4] for word in n.split("_"))[:8] for n in names}
    head = f"{'weights':<7}{'code':<6}{'kv':<7}{'standby':<8} n  T_ready  unexpl"
    lines = [head + "".join(f"{short[n]:>9}" for n in names)]
    for cell in cells:
        found = figures.of(cell)
        if not found:
            why = figures.not_run.get(cell.name, "")
            lines.append(f"{cell.name} not run: {why}" if why else f"{cell.name} not run")
            continue
        means = (statistics.fmean(t.path.exclusive_s.get(n, 0.0) for t in found) for n in names)
        worst = max(t.path.unexplained_fraction for t in found)
        lines.append(
            f"{cell.name} {len(found):>2} {figures.ready_s(cell):>7.2f}s {worst:>6.2%}"
            + "".join(f"{mean:>9.3f}" for mean in means)
        )
    slept = {s.name for t in figures.taken for s in t.segments if s.modelled}
    if slept:
        told = ", ".join(str(n) for n in names if n in slept)
        lines.append(f"slept, as the engine was told, and not computed (modelled): {told}")
    lines.append("columns: " + ", ".join(f"{short[n]} = {n}" for n in names))
    return lines
