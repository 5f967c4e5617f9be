"""Starts of `bench.startup` that were taken before, so that a long matrix may be measured in parts.

Owns one file per engine: its first line says under what the starts were taken, each other line is one
start with its segments, from which its path is computed anew. Starts that were taken under anything
else are refused and never mixed in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.startup_cells import Cell, Taken
from readyplane.core.errors import InvalidField
from readyplane.core.startup import Segment, SegmentName, critical_path


class Kept:
    """The starts of one engine in a folder."""

    def __init__(self, folder: Path, engine: str, under: dict[str, Any]) -> None:
        """`under`: what has to be the same for starts to be compared.

        Raises:
            InvalidField: the folder has starts that were taken under something else.
        """
        self._path = folder / f"{engine}.jsonl"
        self.taken: list[Taken] = []
        folder.mkdir(parents=True, exist_ok=True)
        if not self._path.exists():
            self._path.write_text(json.dumps(under) + "\n")
            return
        first, *rest = self._path.read_text().splitlines()
        if json.loads(first) != under:
            what = f"{self._path} was measured under {first}"
            raise InvalidField("--into", what, f"name another folder for {json.dumps(under)}")
        self.taken = [_start(json.loads(line)) for line in rest if line]

    def add(self, taken: Taken) -> None:
        """Keep one more."""
        self.taken.append(taken)
        begin_s, end_s = taken.begin_s, taken.begin_s + taken.path.wall_s
        told = {
            "cell": asdict(taken.cell),
            "tier": taken.tier,
            "begin_s": begin_s,
            "end_s": end_s,
            "segments": [asdict(segment) for segment in taken.segments],
        }
        with self._path.open("a") as file:
            file.write(json.dumps(told) + "\n")

    def left(self, cells: Sequence[Cell]) -> list[Cell]:
        """Of the cells that are to be started, those that have not been yet."""
        out, had = [], [taken.cell for taken in self.taken]
        for cell in cells:
            if cell in had:
                had.remove(cell)
            else:
                out.append(cell)
        return out


def _start(told: dict[str, Any]) -> Taken:
    segments = tuple(
        Segment(**{**segment, "name": SegmentName(segment["name"])}) for segment in told["segments"]
    )
    begin_s = float(told["begin_s"])
    path = critical_path(segments, start_s=begin_s, end_s=float(told["end_s"]))
    return Taken(Cell(**told["cell"]), path, segments, told["tier"], begin_s)
