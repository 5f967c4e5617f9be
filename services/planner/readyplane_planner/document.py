"""JSON text of the planner's documents: fast, strict, without NaN."""

from __future__ import annotations

from typing import Any

import msgspec

_ENCODER = msgspec.json.Encoder()


def dumps(value: Any) -> str:
    """JSON text; a float that is not finite becomes null, which means 'not known'."""
    return _ENCODER.encode(value).decode()
