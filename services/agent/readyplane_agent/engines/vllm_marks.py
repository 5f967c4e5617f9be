"""What a vLLM does when, during its start: marks of its processes, and the segments made of them.

Owns the file that vLLM's processes add to (a line a mark, in one write each, so that lines of
several processes never mix) and the meaning of each mark: it ends what ran before and begins what
its row in `STEPS` says. So every moment of a start belongs to one segment or to somebody else's (the
agent's own, while the engine waits for verified weights). Seconds on CLOCK_MONOTONIC, which all
processes of this machine share.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from readyplane.core.startup import Segment, SegmentName

MARKS_ENV = "READYPLANE_VLLM_MARKS"
SERVER_PID_ENV = "READYPLANE_VLLM_SERVER_PID"
MARKS_BYTES_MAX = 1 << 20
FACTS = "facts"
AS_CONFIGURED = "as configured"


@dataclass(frozen=True, slots=True)
class Mark:
    """One moment: `name` is a key of `STEPS`; `pid` of the process; `detail` for the segment."""

    name: str
    at_s: float
    pid: int
    detail: str = ""


# What begins with each mark, in the order of a start. None: somebody else's time.
STEPS: Mapping[str, tuple[SegmentName, str] | None] = {
    "spawned": (SegmentName.RUNTIME_IMPORT, "Python"),
    "launched": (SegmentName.RUNTIME_IMPORT, "modules of server and engine"),
    "imported": None,
    "ordered": (SegmentName.RUNTIME_IMPORT, "command line"),
    "registered": (SegmentName.RUNTIME_IMPORT, "configuration"),
    "engine_begun": (SegmentName.RUNTIME_IMPORT, "modules of the engine process"),
    "engine": (SegmentName.PARALLEL_INIT, "executor"),
    "worker_begun": (SegmentName.RUNTIME_IMPORT, "modules of the worker process"),
    "worker": (SegmentName.PARALLEL_INIT, "worker"),
    "device": (SegmentName.PARALLEL_INIT, "device and communicator"),
    "model": (SegmentName.WEIGHT_DESERIALIZE, "the model's modules"),
    "weights_awaited": None,
    "weights": (SegmentName.WEIGHT_DESERIALIZE, "from the arena into parameters"),
    "weights_loaded": (SegmentName.WEIGHT_DESERIALIZE, "into the layout of its kernels"),
    "model_loaded": (SegmentName.PARALLEL_INIT, "KV layout"),
    "kv_profile": (SegmentName.KV_PROFILE, "memory"),
    "compile": (SegmentName.COMPILE, ""),
    "first_run": (SegmentName.WARMUP, "first run"),
    "compiled": (SegmentName.KV_PROFILE, "memory"),
    "kv_pool": (SegmentName.KV_PROFILE, "KV pool"),
    "warmup": (SegmentName.WARMUP, "kernels"),
    "graphs": (SegmentName.CUDA_GRAPH, ""),
    "graphs_captured": (SegmentName.WARMUP, "kernels"),
    "scheduler": (SegmentName.WARMUP, "scheduler and connector"),
    "engine_up": (SegmentName.WARMUP, "server"),
    "first_logprobs": (SegmentName.WARMUP, "first request with logprobs"),
}


def write_mark(name: str, *, at_s: float, detail: str = "", path: str = "") -> None:
    """Add a mark to the file that the environment (or `path`) names; nothing without one.

    A mark that cannot be written is left out: no start fails for want of a time.
    """
    target = path or os.environ.get(MARKS_ENV, "")
    if not target:
        return
    line = json.dumps([name, at_s, os.getpid(), detail]) + "\n"
    try:
        fd = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line.encode())
        finally:
            os.close(fd)
    except OSError:
        return


def read_facts(path: Path) -> dict[str, Any]:
    """What the engine told of itself (the mark `facts`), empty until it has."""
    found: dict[str, Any] = {}
    for _name, detail in ((n, d) for n, _, _, d in _lines(path) if n == FACTS):
        try:
            told = json.loads(detail)
        except ValueError:
            continue
        if isinstance(told, dict):
            found = told
    return found


def _lines(path: Path) -> list[tuple[str, float, int, str]]:
    try:
        with path.open("rb") as file:
            text = file.read(MARKS_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            name, at_s, pid, detail = json.loads(line)
            found.append((str(name), float(at_s), int(pid), str(detail)))
        except (ValueError, TypeError):
            continue
    return found


def read_marks(path: Path) -> tuple[Mark, ...]:
    """The marks there are, in the order they were written; unknown and unfinished lines left out."""
    return tuple(Mark(*line) for line in _lines(path) if line[0] in STEPS)


def chain(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    """One mark a name, in time: of several ranks the last one counts, since all wait for it.

    Names that may come again in one process (`compile`, `first_run`, `compiled`) are kept each.
    """
    again = {
        "kv_profile",
        "compile",
        "first_run",
        "compiled",
        "graphs",
        "graphs_captured",
        "warmup",
    }
    last: dict[str, Mark] = {}
    many: list[Mark] = []
    pids: dict[str, int] = {}
    for mark in marks:
        if mark.name in again:
            # Of one rank only: steps that repeat cannot be laid over those of another.
            if pids.setdefault(mark.name, mark.pid) == mark.pid:
                many.append(mark)
        elif mark.name not in last or mark.at_s >= last[mark.name].at_s:
            last[mark.name] = mark
    return tuple(sorted((*last.values(), *many), key=lambda m: m.at_s))


def _told(row: Sequence[Mark], at: int) -> str:
    """What a mark adds to its segment; what came of a compilation is known at its end."""
    if row[at].name == "compile":
        return next((m.detail for m in row[at + 1 :] if m.name == "compiled"), "")
    return "" if row[at].name == "compiled" else row[at].detail


def segments_of(
    marks: Iterable[Mark], *, ordered_s: float, up_s: float | None, stood_by_s: float = 0.0
) -> tuple[Segment, ...]:
    """Segments of a start, from its order until the engine answers; the running one is open.

    Args:
        ordered_s: when it was ordered; what was before is not of this start. up_s: when it answered.
        stood_by_s: seconds that it had imported for before it was ordered.
    """
    row = chain(marks)
    found: list[Segment] = []
    for at, mark in enumerate(row):
        told = STEPS[mark.name]
        end_s = row[at + 1].at_s if at + 1 < len(row) else up_s
        if told is None or (end_s is not None and end_s <= ordered_s):
            continue
        if mark.name == "launched" and stood_by_s > 0:
            continue
        name, detail = told
        text = ", ".join(part for part in (detail, _told(row, at)) if part)
        start_s = max(mark.at_s, ordered_s)
        if up_s is not None:
            end_s = up_s if end_s is None else min(end_s, up_s)
        if end_s is not None and end_s <= start_s:
            continue
        before = found[-1] if found else None
        if before is not None and (before.name, before.detail, before.end_s) == (
            name,
            text,
            start_s,
        ):
            found[-1] = replace(before, end_s=end_s)
        else:
            found.append(Segment(name, start_s, end_s, detail=text))
    if stood_by_s > 0:
        detail = "imported while it stood by"
        kept = Segment(
            SegmentName.RUNTIME_IMPORT, ordered_s, ordered_s, detail=detail, saved_s=stood_by_s
        )
        return (kept, *found)
    return tuple(found)
