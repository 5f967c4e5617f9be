"""Seconds <-> protobuf time, text <-> enum, mapping <-> JSON: the small pieces of every message.

Seconds travel with nanosecond resolution. Durations cross the wire, never clock readings: an age is
what the sender's clock says now minus then, and the reader subtracts it from its own clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from readyplane.core.errors import InvalidField
from readyplane.core.identity import parse

E = TypeVar("E", bound=StrEnum)
NANOS = 1_000_000_000
SECONDS_MAX = 10_000 * 365 * 86_400


def duration(seconds: float, field: str = "duration") -> Duration:
    """Seconds as Duration.

    Raises:
        InvalidField: not finite, or beyond ten thousand years.
    """
    return Duration(**dict(zip(("seconds", "nanos"), _split(seconds, field), strict=True)))


def seconds_of(value: Duration | Timestamp) -> float:
    """A Duration or Timestamp as seconds."""
    return (value.seconds * NANOS + value.nanos) / NANOS


def timestamp(wall_s: float, field: str = "create_time") -> Timestamp:
    """Seconds since the epoch as Timestamp.

    Raises:
        InvalidField: not finite, or beyond ten thousand years.
    """
    whole = math.floor(wall_s) if math.isfinite(wall_s) else 0
    _split(wall_s, field)
    nanos = min(NANOS - 1, round((wall_s - whole) * NANOS))
    return Timestamp(seconds=whole, nanos=nanos)


def _split(seconds: float, field: str) -> tuple[int, int]:
    if not -SECONDS_MAX <= seconds <= SECONDS_MAX:  # NaN is none of these either
        raise InvalidField(field, seconds, "use a finite number of seconds")
    whole = int(seconds)
    nanos = round((seconds - whole) * NANOS)
    carry = nanos // NANOS if nanos >= 0 else -(-nanos // NANOS)
    return whole + carry, nanos - carry * NANOS


def age(then_s: float, now_s: float) -> Duration:
    """How long ago `then_s` was, on the sender's clock."""
    return duration(now_s - then_s, "age")


def since(ago: Duration, now_s: float) -> float:
    """When that was, on the reader's clock."""
    return now_s - seconds_of(ago)


def enum_of(kind: type[E], text: str, field: str, default: E | None = None) -> E:
    """A member by its text; an empty text is the default.

    Raises:
        InvalidField: unknown text, or empty without a default.
    """
    if not text and default is not None:
        return default
    try:
        return kind(text)
    except ValueError:
        raise InvalidField(field, text, "write one of " + ", ".join(kind)) from None


def json_of(value: Mapping[str, Any] | None, field: str = "document") -> str:
    """JSON of an object, keys sorted; empty for None.

    Raises:
        InvalidField: a value that JSON cannot hold.
    """
    if value is None:
        return ""
    try:
        return json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidField(field, str(value)[:120], f"use values of JSON ({error})") from error


def object_of(text: str, field: str) -> dict[str, Any]:
    """A JSON object; an empty text is an empty object.

    Raises:
        InvalidField: not a JSON object.
    """
    if not text:
        return {}
    found = parse(text, where=field)
    if not isinstance(found, dict):
        raise InvalidField(field, text, "send a JSON object")
    return found
