"""How well a profile predicts measurements that it was not made of, stage by stage.

Owns the value and its place in a profile's document. Who measures or imports works it out; whoever
plans with the profile sees it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from readyplane.core.errors import InvalidField

STAGES = ("prefill", "decode", "cached")
_FIELDS = ("error", "worst", "held_out", "points")


@dataclass(frozen=True, slots=True)
class StageFit:
    """Errors of one stage, as fractions of what was measured.

    Attributes:
        stage: `prefill`, `decode`, or `cached` (a prompt whose beginning is held already).
        error: median over the held-out points. worst: the largest of them.
        held_out: points that were predicted without themselves. points: measured points in all.
    """

    stage: str
    error: float
    worst: float
    held_out: int
    points: int


def read_fit(document: object) -> tuple[StageFit, ...]:
    """From `{stage: {error, worst, held_out, points}}`.

    Raises:
        InvalidField: an unknown stage or field, or a number that is negative or not finite.
    """
    if not isinstance(document, Mapping):
        raise InvalidField("profile.fit", document, "write an object with one object a stage")
    found = []
    for stage, fields in document.items():
        where = f"profile.fit.{stage}"
        if stage not in STAGES:
            raise InvalidField(where, fields, "use one of " + ", ".join(STAGES))
        if not isinstance(fields, Mapping) or set(fields) != set(_FIELDS):
            raise InvalidField(where, fields, "give exactly " + ", ".join(_FIELDS))
        error, worst, held_out, points = (_amount(fields[n], f"{where}.{n}") for n in _FIELDS)
        found.append(StageFit(str(stage), error, worst, int(held_out), int(points)))
    return tuple(found)


def fit_document(fit: tuple[StageFit, ...]) -> dict[str, object]:
    """The inverse of `read_fit`."""
    return {
        f.stage: {
            "error": f.error,
            "worst": f.worst,
            "held_out": f.held_out,
            "points": f.points,
        }
        for f in fit
    }


def _amount(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidField(where, value, "use a number")
    if not isfinite(value) or value < 0:
        raise InvalidField(where, value, "use a finite number of at least 0")
    return float(value)
