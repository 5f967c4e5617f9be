"""Other tools' files as readings: finds out which tool wrote a file and hands it to its reader.

Owns the files. Several files make one profile: a run each (AIPerf), or a stage each (Dynamo).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from readyplane.core.errors import InvalidField
from readyplane_lab.profiling import aiperf, dynamo, guidellm
from readyplane_lab.profiling.readings import Readings
from readyplane_lab.profiling.runs import Run, readings_of

KNOWN = (
    "Dynamo's .npz, AIPerf's profile_export_aiperf.csv or .json, GuideLLM's benchmarks.csv or .json"
)
FILE_BYTES_MAX = 256_000_000


@dataclass(slots=True)
class Imported:
    """Readings, what the files say besides (None where they do not), and which tools wrote them."""

    readings: Readings = field(default_factory=Readings)
    kv_tokens: int | None = None
    gpus: int | None = None
    tools: list[str] = field(default_factory=list)


def read_files(paths: Sequence[Path], *, concurrency: float | None = None) -> Imported:
    """All of these files together; of a folder every `.npz` below it.

    Args:
        concurrency: requests at once of AIPerf runs that do not say.

    Raises:
        InvalidField: a file that cannot be read, or that no known tool wrote.
    """
    found, runs = Imported(), list[Run]()
    for path in _files(paths):
        if path.suffix == ".npz":
            surfaces = _npz(path)
            found.readings.add(surfaces.readings)
            found.kv_tokens = surfaces.kv_tokens or found.kv_tokens
            found.gpus = surfaces.gpus or found.gpus
            tool = "Dynamo"
        else:
            tool, more = _text(path, concurrency)
            runs += more
        if tool not in found.tools:
            found.tools.append(tool)
    found.readings.add(readings_of(runs))
    return found


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        inside = sorted(path.rglob("*.npz")) if path.is_dir() else [path]
        if not inside:
            raise InvalidField("FILE", str(path), "no .npz below that folder; give files")
        files += inside
    return files


def _npz(path: Path) -> dynamo.Surfaces:
    from readyplane_lab.profiling.npz import read_npz

    return dynamo.read(read_npz(path), where=path.name)


def _text(path: Path, concurrency: float | None) -> tuple[str, list[Run]]:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise InvalidField("FILE", str(path), f"give one of at most {FILE_BYTES_MAX:,} bytes")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField("FILE", str(path), f"give a readable file: {KNOWN} ({error})") from error
    where = path.name
    if aiperf.is_csv(text):
        return "AIPerf", aiperf.read_csv(text, where=where, concurrency=concurrency)
    if guidellm.is_csv(text):
        return "GuideLLM", guidellm.read_csv(text, where=where)
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if aiperf.is_json(document):
        return "AIPerf", aiperf.read_json(document, where=where, concurrency=concurrency)
    if guidellm.is_json(document):
        return "GuideLLM", guidellm.read_json(document, where=where)
    raise InvalidField("FILE", str(path), f"no known tool wrote it; give {KNOWN}")
