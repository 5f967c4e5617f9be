"""Starts that failed: where they ended, and by which error, told apart by what is common to many. Pure.

They are counted beside those that became ready and never among their quantiles: how long somebody
waited for nothing says nothing about T_ready.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

ERROR_MAX = 160
NOWHERE = "unknown"
"""It ended without having told of any segment that ran."""
_IDS = re.compile(r"\b(?:sha256:)?[0-9a-f]{12,}\b")
_PORTS = re.compile(r"(?<=:)\d{4,5}\b")


@dataclass(frozen=True, slots=True)
class FailedStart:
    """One start that did not become ready.

    Attributes:
        ended_in: the segment that ran, NOWHERE where none did. error: in words.
        after_s: since its order, None where nobody told.
    """

    worker_id: str
    ended_in: str
    error: str
    after_s: float | None = None
    worker_class: str = ""
    mode: str = ""
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Failures:
    """Starts of one class and mode that ended in the same place by the same error."""

    worker_class: str
    mode: str
    ended_in: str
    error: str
    count: int
    workers: tuple[str, ...]


def alike(failed: Iterable[FailedStart]) -> list[Failures]:
    """The most frequent first."""
    found: dict[tuple[str, str, str, str], list[FailedStart]] = {}
    for start in failed:
        key = (start.worker_class, start.mode, start.ended_in, common_words(start))
        found.setdefault(key, []).append(start)
    made = [
        Failures(*key, len(starts), tuple(sorted(s.worker_id for s in starts)))
        for key, starts in found.items()
    ]
    return sorted(made, key=lambda f: (-f.count, f.worker_class, f.mode, f.ended_in, f.error))


def common_words(start: FailedStart) -> str:
    """The error's first line without what only this start has: its name, ids and ports."""
    line = start.error.strip().partition("\n")[0]
    if start.worker_id:
        line = re.sub(rf"(?<![\w-]){re.escape(start.worker_id)}(?![\w-])", "WORKER", line)
    line = _PORTS.sub("PORT", _IDS.sub("ID", line))
    return line if len(line) <= ERROR_MAX else line[: ERROR_MAX - 1] + "…"
