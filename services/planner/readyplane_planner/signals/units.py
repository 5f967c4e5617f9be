"""Units: every number from outside is declared in one and normalised before anybody reads it.

Owns the table of units and the refusal of what is not in it. A number without a declared unit, or
in one of another kind, is a configuration error and never a guess (B11).
"""

from __future__ import annotations

from types import MappingProxyType

from readyplane.core.errors import InvalidField

UNITS = MappingProxyType(
    {
        "s": ("s", 1.0),
        "seconds": ("s", 1.0),
        "ms": ("s", 1e-3),
        "milliseconds": ("s", 1e-3),
        "us": ("s", 1e-6),
        "microseconds": ("s", 1e-6),
        "requests": ("requests", 1.0),
        "sequences": ("sequences", 1.0),
        "tokens": ("tokens", 1.0),
        "ktokens": ("tokens", 1e3),
        "blocks": ("blocks", 1.0),
        "iterations": ("iterations", 1.0),
        "requests/s": ("requests/s", 1.0),
        "requests/min": ("requests/s", 1.0 / 60.0),
        "tokens/s": ("tokens/s", 1.0),
        "tokens/min": ("tokens/s", 1.0 / 60.0),
        "ratio": ("ratio", 1.0),
        "percent": ("ratio", 1e-2),
    }
)
"""By declared name: the unit that the brains use, and what one of the declared is in it."""


def factor(declared: object, wanted: str, *, field: str) -> float:
    """What one of the `declared` unit is in the `wanted` one.

    Args:
        declared: as written by a person or stated by a source. field: where it was written.

    Raises:
        InvalidField: no unit, an unknown one, or one of another kind.
    """
    fitting = sorted(name for name, (unit, _) in UNITS.items() if unit == wanted)
    remedy = f"declare one of {', '.join(fitting)}"
    known = UNITS.get(declared) if isinstance(declared, str) else None
    if known is None:
        raise InvalidField(field, declared, remedy)
    unit, one = known
    if unit != wanted:
        raise InvalidField(field, declared, f"{remedy}: the brains count in {wanted}")
    return one
