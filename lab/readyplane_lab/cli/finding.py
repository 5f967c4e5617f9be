"""One line of `readyplane doctor`: what was looked at, what was found, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding; `remedy` is empty when all is well."""

    area: str
    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""
