"""What the start-up bench counts, and what it leaves out."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from bench.startup_cells import (
    EAGER,
    FULL,
    HIT,
    LOCAL,
    MISS,
    REMOTE,
    REUSED,
    TOLD,
    Cell,
    Figures,
    Taken,
    cold_cell,
    essential,
    matrix,
    mistaken,
    table,
    warm_cell,
    widest_gap,
)
from bench.startup_kept import Kept
from readyplane.core.errors import InvalidField
from readyplane.core.startup import Segment, SegmentName, critical_path

COLD, WARM = cold_cell(sizes_kv=True), warm_cell(sizes_kv=True, standby=True)
CODE = {HIT: "cache=hit", MISS: "cache=miss:absent"}


def taken(cell: Cell, *, compile_s: float, gap_s: float = 0.0, tier: str = "") -> Taken:
    """A start of 4 s and its compilation, that found what its cell says."""
    segments = [Segment(SegmentName.WEIGHT_READ, 0.0, 2.0)]
    if cell.code != EAGER:
        detail = CODE[cell.code]
        segments.append(Segment(SegmentName.COMPILE, 2.0, 2.0 + compile_s, detail=detail))
    end_s = 4.0 + compile_s
    detail = "reused: 7 blocks" if cell.kv == REUSED else "measured"
    segments.append(Segment(SegmentName.KV_PROFILE, 2.0 + compile_s + gap_s, end_s, detail=detail))
    path = critical_path(segments, start_s=0.0, end_s=end_s)
    found = tier or {LOCAL: "L2", REMOTE: "L4"}[cell.weights]
    return Taken(cell, path, tuple(segments), found)


def test_the_matrix_has_every_combination_once() -> None:
    assert len(set(matrix(sizes_kv=True))) == 2 * 3 * 2 * 2
    assert len(set(matrix(sizes_kv=False))) == 2 * 3 * 2
    for sizes_kv in (True, False):
        assert set(essential(sizes_kv=sizes_kv)) <= set(matrix(sizes_kv=sizes_kv))
    assert {c.kv for c in matrix(sizes_kv=False)} == {TOLD}


def test_figures_of_starts() -> None:
    figures = Figures(COLD, WARM)
    figures.taken = [taken(COLD, compile_s=4.0), taken(WARM, compile_s=0.5, gap_s=0.09)]
    assert figures.ready_ratio == pytest.approx(4.5 / 8.0)
    assert figures.compile_ratio == pytest.approx(0.5 / 4.0)
    assert figures.unexplained == pytest.approx(0.09 / 4.5)
    assert widest_gap(figures.taken[1]) == "0.090 s between compile and kv_profile"
    assert widest_gap(figures.taken[0]) == ""
    wanted = "bench-startup ready_ratio=0.562 compile_ratio=0.125 unexplained=0.0200"
    assert figures.line("bench-startup") == wanted


def test_a_figure_that_nobody_took_is_nan_and_not_zero() -> None:
    figures = Figures(COLD, WARM)
    assert math.isnan(figures.ready_ratio) and math.isnan(figures.compile_ratio)
    assert figures.line("x") == "x ready_ratio=nan compile_ratio=nan unexplained=nan"
    figures.taken, figures.not_run = [taken(COLD, compile_s=1.0)], {WARM.name: "no standby here"}
    assert math.isnan(figures.ready_ratio)
    lines = table(figures, (COLD, WARM))
    assert any("not run: no standby here" in line for line in lines)


@pytest.mark.parametrize(
    ("said", "found", "why"),
    [
        (Cell(LOCAL, HIT, REUSED, False), {"code": MISS}, "cache=hit"),
        (Cell(LOCAL, MISS, REUSED, False), {"code": HIT}, "cache=miss"),
        (Cell(LOCAL, EAGER, FULL, False), {"code": HIT}, "an eager start compiled"),
        (Cell(LOCAL, HIT, FULL, False), {"kv": REUSED}, "not full"),
        (Cell(LOCAL, HIT, REUSED, False), {"kv": FULL}, "not reused"),
    ],
)
def test_a_start_that_found_something_else_counts_for_nothing(
    said: Cell, found: dict[str, str], why: str
) -> None:
    really = Cell(said.weights, found.get("code", said.code), found.get("kv", said.kv), False)
    start = taken(really, compile_s=1.0)
    assert not mistaken(start)
    (told,) = mistaken(Taken(said, start.path, start.segments, start.tier))
    assert why in told


def test_weights_from_elsewhere_are_no_local_ones() -> None:
    (told,) = mistaken(taken(Cell(LOCAL, HIT, TOLD, True), compile_s=1.0, tier="L4"))
    assert told == "weights came from L4, not local"
    assert mistaken(taken(Cell(REMOTE, HIT, TOLD, True), compile_s=1.0, tier="unknown"))
    assert not mistaken(taken(Cell(REMOTE, HIT, TOLD, True), compile_s=1.0, tier="L0"))


@pytest.mark.parametrize(
    ("detail", "weights"),
    [("L1 peer:partner:i-1: 5.3 MB, 1 chunks", REMOTE), ("L1 mapped:node-local: 5.3 MB", LOCAL)],
)
def test_memory_is_remote_when_it_is_another_workers(detail: str, weights: str) -> None:
    cells = {place: Cell(place, HIT, TOLD, False) for place in (LOCAL, REMOTE)}
    start = taken(cells[weights], compile_s=1.0, tier="L1")
    read = Segment(SegmentName.WEIGHT_READ, 0.0, 2.0, detail=detail)
    segments = (read, *start.segments[1:])
    for place, cell in cells.items():
        found = mistaken(Taken(cell, start.path, segments, "L1"))
        assert found == ([] if place == weights else [f"weights came from L1, not {place}"])


def test_a_matrix_is_taken_in_parts_and_never_mixed(tmp_path: Path) -> None:
    under = {"args": ["--worker-class", "x"], "bytes": 7}
    first = Kept(tmp_path, "modelled", under)
    assert first.taken == [] and first.left([COLD, WARM, COLD]) == [COLD, WARM, COLD]
    one = replace(taken(COLD, compile_s=4.0, gap_s=0.09), begin_s=0.0)
    first.add(one)
    again = Kept(tmp_path, "modelled", under)
    assert again.taken == [one], "the path is computed anew from the same segments"
    assert again.left([COLD, WARM, COLD]) == [WARM, COLD]
    with pytest.raises(InvalidField, match="another folder"):
        Kept(tmp_path, "modelled", {**under, "bytes": 8})


def test_what_was_slept_is_said() -> None:
    figures = Figures(COLD, WARM)
    figures.taken = [taken(COLD, compile_s=4.0)]
    assert not any("slept" in line for line in table(figures, (COLD,)))
    slept = tuple(replace(s, modelled=s.name is SegmentName.COMPILE) for s in taken_segments())
    figures.taken = [replace(figures.taken[0], segments=slept)]
    (said,) = [line for line in table(figures, (COLD,)) if "slept" in line]
    assert said.endswith("(modelled): compile")


def taken_segments() -> tuple[Segment, ...]:
    return taken(COLD, compile_s=4.0).segments
