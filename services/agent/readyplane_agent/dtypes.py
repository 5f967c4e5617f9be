"""Casts between the floating-point types of weights, on numpy arrays. Pure.

Owns the rounding: to nearest, ties to even, as PyTorch does; NaN stays NaN. numpy has no BF16, so
its bits are held as 16-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Bits = np.ndarray[Any, Any]
STORED: Mapping[str, str] = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_QUIET_NAN = np.uint16(0x7FC0)


def bf16_bits(values: Bits) -> Bits:
    """float32 -> BF16 bits."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(
        16
    )
    out: Bits = rounded.astype("<u2")
    nan = np.isnan(values)
    if nan.any():
        sign = (bits >> np.uint32(16)).astype("<u2") & np.uint16(0x8000)
        out = np.where(nan, sign | _QUIET_NAN, out)
    return out


def bf16_values(bits: Bits) -> Bits:
    """BF16 bits -> float32, exactly."""
    values: Bits = (bits.astype("<u4") << np.uint32(16)).view("<f4")
    return values


def _to(kind: str) -> Callable[[Bits], Bits]:
    def cast(values: Bits) -> Bits:
        with np.errstate(over="ignore", invalid="ignore"):  # out of range becomes infinite
            return values.astype(kind)

    return cast


CASTS: Mapping[tuple[str, str], Callable[[Bits], Bits]] = {
    ("F64", "F32"): _to("<f4"),
    ("F64", "F16"): _to("<f2"),
    ("F32", "F16"): _to("<f2"),
    ("F32", "BF16"): bf16_bits,
    ("F32", "F64"): _to("<f8"),
    ("F16", "F32"): _to("<f4"),
    ("F16", "BF16"): lambda values: bf16_bits(values.astype("<f4")),
    ("BF16", "F32"): bf16_values,
    ("BF16", "F16"): lambda bits: _to("<f2")(bf16_values(bits)),
}
"""(from, to) -> cast. F64 to BF16 is missing: through float32 it would round twice."""
