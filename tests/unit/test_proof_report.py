"""Charts, page and table of a proof, from a small document made by hand."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from readyplane_lab.proof.report import write_report
from readyplane_lab.proof.report.chart import Axes, Level, Series, draw
from readyplane_lab.proof.report.page import page
from readyplane_lab.proof.report.sheet import sheet
from readyplane_lab.proof.report.standings import standings

TRACE_KEYS = (
    *(f"{pool}.{name}" for pool in ("prefill", "decode") for name in ("need", "held", "target")),
    "prefill.ready",
    "decode.ready",
    "ttft.p90_s",
    "tpot.p90_s",
    "attained",
)


def scores(attainment: float, gpu_hours: float) -> dict[str, Any]:
    names = (
        "boot_gpu_hours drain_gpu_hours never_gpu_hours violation ttft_p99_s tpot_p99_s starts "
        "wasted reversals_per_h short_s effect_s"
    )
    return {
        **dict.fromkeys(names.split(), 1.0),
        "attainment": attainment,
        "gpu_hours": gpu_hours,
        "effect_s": None,
    }


def trace() -> dict[str, list[float | None]]:
    return {"t_s": [0.0, 10.0, 20.0], **{key: [1.0, None, 2.0] for key in TRACE_KEYS}}


def entry(attainment: float, gpu_hours: float, *, bound: bool = False) -> dict[str, Any]:
    return {
        "fluid": {"0.1": scores(attainment, gpu_hours)},
        "event": {"0.1": scores(attainment, gpu_hours)},
        "mode": "event",
        "chosen": 0.1,
        "reached": attainment >= 0.99,
        "bound": bound,
        "trace": trace(),
    }


def an_input(t_ready_s: float, *, centre: bool) -> dict[str, Any]:
    return {
        "key": f"az-conv {t_ready_s}",
        "about": {
            "scenario": "az-conv",
            "kind": "replay",
            "title": "an <hour> of chats",
            "expected": "grows & shrinks",
            "t_ready_s": t_ready_s,
            "peak": 8.0,
            "seed": 1,
            "ttft_s": 2.0,
            "tpot_s": 0.05,
            "default": 0.1,
            "centre": centre,
        },
        "mode": "event",
        "bound": {"lower_gpu_hours": 8.0, "floor_gpu_hours": 7.0},
        "bracket": {"osim_gpu_hours": 9.0},
        "entries": {
            "readyplane": entry(0.995, 12.0),
            "hpa": entry(0.993, 11.0),
            "kpa": entry(0.9, 10.0),
            "clairvoyant": entry(0.999, 9.0, bound=True),
        },
        "ours": {
            "scores": scores(0.995, 12.0),
            "trace": trace(),
            "decisions": [{"at_s": 3.0, "summary": "prefill 2 -> 3", "why": ["<b>demand</b>"]}],
        },
        "unexpected": ["it did not shrink"],
        "undercut": [],
    }


@pytest.fixture
def document() -> dict[str, Any]:
    inputs = {str(t): an_input(t, centre=t == 60.0) for t in (60.0, 10.0, 180.0)}
    names = ("readyplane", "hpa", "kpa", "clairvoyant")
    return {
        "attainment": 0.99,
        "line": "bench-prove r_median=1.33 r_worst=1.33",
        "one_knob": {"hpa": {"knob": 0.7, "median_ratio": None}},
        "inputs": inputs,
        "contenders": {n: {"title": n, "source": "s & t", "knob": "k"} for n in names},
        "undercut": [],
        "missed": ["az-conv 60.0"],
        "faults": {},
        "skipped": {"mc-conv": "trace not there"},
    }


def test_the_page_is_whole_and_needs_nothing_else(document: dict[str, Any]) -> None:
    text = page(document)
    assert "http" not in text and "<script" not in text and "src=" not in text
    assert "an &lt;hour&gt; of chats" in text and "<b>demand</b>" not in text
    assert '<td class="best" title="knob 0.1, attainment 99.30%">11.00</td>' in text
    assert '<td class="missed" title="knob 0.1, event mode">90.00%</td>' in text
    assert "not as expected: it did not shrink" in text
    assert "trace not there" in text
    assert "Missed by the planner" in text and "<li>az-conv 60.0</li>" in text
    assert "r_median" not in text.split("<h2>")[0].replace(document["line"], "")
    assert "The bound was undercut" not in text
    document["undercut"] = ["hpa at 0.7"]
    assert "The bound was undercut" in page(document)


def test_who_is_too_dear_to_be_confirmed_is_shown_in_brackets(document: dict[str, Any]) -> None:
    document["inputs"]["60.0"]["entries"]["kpa"] |= {
        "mode": "fluid",
        "fluid": {"0.1": scores(0.999, 20.0)},
        "event": {},
    }
    assert 'not confirmed">(20.00)</td>' in page(document)


def test_factors_are_drawn_only_where_one_was_varied(document: dict[str, Any]) -> None:
    assert "One factor at a time" in page(document)
    document["inputs"] = {"60.0": document["inputs"]["60.0"]}
    assert "One factor at a time" not in page(document)


def test_the_sheet_has_a_row_for_every_run(document: dict[str, Any]) -> None:
    rows = list(csv.DictReader(io.StringIO(sheet(document))))
    assert len(rows) == 3 * 4 * 2
    assert [(r["contender"], r["mode"], r["chosen"]) for r in rows[:2]] == [
        ("readyplane", "fluid", "0"),
        ("readyplane", "event", "1"),
    ]
    first = rows[0]
    assert (first["gpu_hours"], first["osim_gpu_hours"], first["effect_s"]) == ("12.0", "9.0", "")


def test_files_are_written_whole(document: dict[str, Any], tmp_path: Path) -> None:
    files = write_report(document, tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == sorted(f.name for f in files)


def test_the_standings_give_no_figure_below_the_attainment(document: dict[str, Any]) -> None:
    (row,) = [line for line in standings(document).splitlines() if line.startswith("| az-conv")]
    assert row == "| az-conv | 12.0 | 99.50% | 11.0 hpa at 0.1 | 8.0 | 9.0 | 1.33 |"
    one = document["inputs"]["60.0"]
    one["ours"]["scores"] = scores(0.98, 5.0)
    one["entries"]["hpa"] = entry(0.95, 3.0)
    (row,) = [line for line in standings(document).splitlines() if line.startswith("| az-conv")]
    assert row == "| az-conv | (5.0) | 98.00% | none (hpa at 0.1: 95.00%) | 8.0 | 9.0 | - |"


def svg(text: str) -> ET.Element:
    begin, end = text.index("<svg"), text.index("</svg>") + len("</svg>")
    return ET.fromstring(text[begin:end])


def test_a_gap_breaks_a_line_and_is_never_a_zero() -> None:
    points = [(0.0, 1.0), (1.0, 2.0), None, (3.0, 4.0), (4.0, float("inf"))]
    drawn = svg(draw([Series("a", "c0", points)], Axes("x", "y")))
    paths = [p.attrib["d"] for p in drawn.iter() if p.tag == "path"]
    assert [path.count("L") for path in paths] == [1, 0]


def test_points_lie_where_their_values_are() -> None:
    series = [Series("", "c0", [(0.001, 0.0), (1.0, 10.0)], "dots", ["<low>", "high"])]
    axes = Axes("x", "y", x_low=0.001, x_high=1.0, y_high=10.0, log_x=True)
    drawn = svg(draw(series, axes, levels=[Level("half", "c1", 5.0)]))
    dots = [
        (float(c.attrib["cx"]), float(c.attrib["cy"])) for c in drawn.iter() if c.tag == "circle"
    ]
    (level,) = [float(e.attrib["y1"]) for e in drawn if "level" in e.attrib.get("class", "")]
    assert dots[0][0] < dots[1][0] and dots[0][1] > dots[1][1]
    assert level == pytest.approx((dots[0][1] + dots[1][1]) / 2, abs=0.1)
    assert [c[0].text for c in drawn.iter() if c.tag == "circle"] == ["<low>", "high"]


def test_nothing_to_draw_is_said() -> None:
    assert "nothing to draw" in draw([Series("a", "c0", [None])], Axes("x", "y"))
