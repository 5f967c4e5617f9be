"""Names and units of other tools' columns, read without guessing (pure).

A column's unit is in its name (`Time to First Token (ms)`, `time_to_first_token_ms`), beside it
(`{"unit": "ms"}`), or in a row of units. Where a time has none, nothing is assumed: the reader says
which column and asks.
"""

from __future__ import annotations

import re

from readyplane.core.errors import InvalidField

TO_MS = {
    "ms": 1.0,
    "msec": 1.0,
    "millisecond": 1.0,
    "milliseconds": 1.0,
    "s": 1e3,
    "sec": 1e3,
    "secs": 1e3,
    "second": 1e3,
    "seconds": 1e3,
    "us": 1e-3,
    "µs": 1e-3,
    "microseconds": 1e-3,
    "ns": 1e-6,
    "nanoseconds": 1e-6,
}
_BRACKET = re.compile(r"^(?P<name>.*?)\s*[(\[](?P<unit>[^()\[\]]+)[)\]]\s*$")
_LAST = re.compile(r"^(?P<name>.+?)[_ ](?P<unit>[A-Za-zµ]+)$")
_WORDS = re.compile(r"[^a-z0-9]+")


def key(name: str) -> str:
    """A name without case and punctuation: `Time to First Token` and `time_to_first_token` alike."""
    return _WORDS.sub(" ", name.lower()).strip()


def split_unit(name: str) -> tuple[str, str]:
    """(name as a key, unit or empty) of a column's name."""
    bracket = _BRACKET.match(name)
    if bracket is not None:
        return key(bracket["name"]), bracket["unit"].strip().lower()
    last = _LAST.match(name.strip())
    if last is not None and last["unit"].lower() in TO_MS:
        return key(last["name"]), last["unit"].lower()
    return key(name), ""


def milliseconds(value: float, unit: str, *, column: str) -> float:
    """The value in milliseconds.

    Raises:
        InvalidField: no unit, or none of time.
    """
    factor = TO_MS.get(unit.strip().lower())
    if factor is None:
        shown = f"unit {unit!r}" if unit else "no unit"
        remedy = "name the column with its unit, as in `Time to First Token (ms)`"
        raise InvalidField(column, shown, remedy)
    return value * factor


def number(text: object) -> float | None:
    """A number, with thousands separators if need be; None for anything else."""
    if isinstance(text, bool):
        return None
    if isinstance(text, int | float):
        return float(text)
    if not isinstance(text, str):
        return None
    try:
        return float(text.replace(",", "").strip())
    except ValueError:
        return None
