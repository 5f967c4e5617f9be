"""The standings at the centre as a Markdown table, as `docs/proof.md` shows them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from readyplane_lab.proof.report.page import chosen_scores, percent
from readyplane_lab.proof.verdict import OURS

HEAD = ("input", "ours", "attained", "cheapest baseline, tuned", "O_LB", "O_SIM", "R")


def standings(document: Mapping[str, Any]) -> str:
    """A row an input, GPU-hours; a dash where there is no figure at the attainment asked for."""
    asked = document["attainment"]
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += [
        "| " + " | ".join(_row(one, asked)) + " |"
        for one in document["inputs"].values()
        if one["about"]["centre"]
    ]
    return "\n".join([*lines, "", f"`{document['line']}`", ""])


def _row(one: Mapping[str, Any], asked: float) -> tuple[str, ...]:
    scores = one["ours"]["scores"]
    hours, share = scores["gpu_hours"], scores["attainment"]
    osim = one["bracket"]["osim_gpu_hours"]
    reached = share >= asked
    return (
        one["about"]["scenario"],
        f"{hours:.1f}" if reached else f"({hours:.1f})",
        percent(share),
        _best(one),
        f"{one['bound']['lower_gpu_hours']:.1f}",
        "-" if osim is None else f"{osim:.1f}{_mark(one['bracket'])}",
        f"{hours / osim:.2f}" if reached and osim else "-",
    )


def _mark(bracket: Mapping[str, Any]) -> str:
    return " (fluid)" if bracket.get("mode") == "fluid" else ""


def _best(one: Mapping[str, Any]) -> str:
    """The cheapest baseline that gets there; else the one that comes nearest, with its share."""
    rivals = [
        (name, entry, chosen_scores(entry))
        for name, entry in one["entries"].items()
        if name != OURS and not entry["bound"]
    ]
    there = [r for r in rivals if r[1]["reached"]]
    if there:
        name, entry, scores = min(there, key=lambda r: (r[2]["gpu_hours"], r[0]))
        return f"{scores['gpu_hours']:.1f} {name} at {entry['chosen']:g}"
    if not rivals:
        return "-"
    name, entry, scores = max(rivals, key=lambda r: (r[2]["attainment"], r[0]))
    return f"none ({name} at {entry['chosen']:g}: {percent(scores['attainment'])})"
