"""The report of a proof: one HTML page that needs nothing else, and a table for a spreadsheet.

Owns what a person sees of a comparison. Made from the proof's JSON document alone, so that a kept
`proof.json` can be shown again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from readyplane_lab.proof.report.page import page
from readyplane_lab.proof.report.sheet import sheet
from readyplane_lab.proof.report.standings import standings
from readyplane_lab.proof.whole_file import write_whole


def write_report(document: Mapping[str, Any], out: Path) -> tuple[Path, ...]:
    """`report.html`, `proof.csv` and `standings.md` in `out`."""
    files = (out / "report.html", out / "proof.csv", out / "standings.md")
    texts = (page(document), sheet(document), standings(document))
    for file, text in zip(files, texts, strict=True):
        write_whole(file, text)
    return files
