"""The policy that `up` and `replay` begin with, checked before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def demo_policy(over: Path | None, *, quick: bool = False) -> dict[str, Any]:
    """The demo's policy with the fields of a file laid over it.

    Raises:
        InvalidField: the file cannot be read, or a field is wrong. UnknownField: with its place.
    """
    from readyplane_lab.demo import DEMO_POLICY, QUICK_POLICY
    from readyplane_lab.up.options import read_policy
    from readyplane_planner.policy import overlay
    from readyplane_planner.policy import read_policy as check

    wanted = dict(DEMO_POLICY)
    if quick:
        wanted = overlay(wanted, QUICK_POLICY)
    if over is not None:
        wanted = overlay(wanted, read_policy(over))
    check(wanted)
    return wanted
