"""What a decision asked for and did not come to be: refused, failed or lost, and why.

Owns which outcomes those are. Handed to whoever lists decisions, so that nobody has to ask for each
by itself whether it was carried out. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from readyplane_planner.explain import PROVED
from readyplane_planner.journal import Outcome

UNDONE = (
    *("refused", "failed", "lost", "release_failed", "drain_failed"),
    *("activate_failed", "flip_failed", "ration_failed"),
)
ASKED = (*UNDONE, *PROVED)
"""Kinds of outcomes that tell it: a start that got ready first did come to be."""


def undone(outcomes: Iterable[Outcome]) -> dict[str, list[dict[str, str]]]:
    """`[{"worker_id", "kind", "why"}]` by decision, in the order in which it was told."""
    told = list(outcomes)
    proved = {(o.decision_id, o.subject) for o in told if o.kind in PROVED}
    found: dict[str, list[dict[str, str]]] = {}
    for outcome in told:
        key = outcome.decision_id, outcome.subject
        if outcome.kind not in UNDONE or (outcome.kind == "failed" and key in proved):
            continue
        row = {"worker_id": outcome.subject, "kind": outcome.kind, "why": _why(outcome)}
        found.setdefault(outcome.decision_id, []).append(row)
    return found


def _why(outcome: Outcome) -> str:
    """The failure as the agent told it, or the words of whoever refused."""
    start: dict[str, Any] = outcome.document.get("start") or {}
    return str(start.get("failure") or outcome.document.get("note") or "no reason given")
