"""Prometheus text as samples: name, labels, value. What is not understood is left out and counted.

Owns the format alone, bounded in lines; what a name means is said by the tables in `engines`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass

LINES_MAX = 50_000
_LINE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)\s*(\{.*\})?\s+(\S+)(?:\s+(-?\d+))?\s*")
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line; the value may be NaN or infinite, which its reader judges."""

    name: str
    labels: Mapping[str, str]
    value: float


def read(text: str, names: Container[str]) -> tuple[tuple[Sample, ...], int]:
    """(samples of these names, lines of them that were not understood).

    An engine exports a thousand lines, and a fleet has a thousand engines: what nobody asked for
    is passed over before it is taken apart.
    """
    found: list[Sample] = []
    bad = 0
    for line in text.splitlines()[:LINES_MAX]:
        if line.partition("{")[0].partition(" ")[0] not in names:
            continue
        sample = _sample(line)
        if sample is None:
            bad += 1
        else:
            found.append(sample)
    return tuple(found), bad


def _sample(line: str) -> Sample | None:
    match = _LINE.fullmatch(line.strip())
    if match is None:
        return None
    labels = _labels(match[2][1:-1]) if match[2] else {}
    try:
        value = float(match[3])
    except ValueError:
        return None
    return None if labels is None else Sample(match[1], labels, value)


def _labels(inside: str) -> dict[str, str] | None:
    out: dict[str, str] = {}
    place = 0
    while place < len(inside):
        match = _LABEL.match(inside, place)
        if match is None:
            return None if inside[place:].strip() else out
        out[match[1]] = re.sub(r"\\.", lambda m: _ESCAPED.get(m[0], m[0]), match[2])
        place = match.end()
    return out
