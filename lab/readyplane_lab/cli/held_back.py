"""Which pools are short of ready workers with nothing on the way, or have their orders held back, and why.

Owns telling it from the planner's state and from one decision, and what to do about each reason.
Handed to `readyplane doctor` and `readyplane decisions`, which say it in their own way. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONFLICT = "ownership_conflict"
PAUSED = "paused"
PENDING = "pending"
UNUSED = "unused"
REMEDIES: Mapping[str, str] = {
    CONFLICT: (
        "let one owner change the pool: stop whoever else starts or ends its workers, or hold this "
        "planner with `readyplane policy set paused=true`; by itself it orders again when the time "
        "that the reason names is over; until then start or attach workers by hand"
    ),
    "manual_hold": "wait for it, or set `readyplane policy set hand_hold_s=0`",
    PENDING: "make room where workers start, or wait; `readyplane explain last` has the order",
    "backoff": "see why the starts before came to nothing: `readyplane decisions`; it tries again by itself",
    "shape_unknown": "send a request, or wait until some are measured",
    UNUSED: "see what is said of those workers",
    PAUSED: "let go with `readyplane policy set paused=false`",
}
"""Codes of reasons for which nothing is ordered for a pool, and the way out of each."""
SHUT = ("denied", "dead_end")
"""Codes that have a way of being told of their own, with the order that was refused or failed."""
UNKNOWN = "no reason is told"
REMEDY = "see `readyplane explain last`, and planner.log; start or attach workers by hand meanwhile"
COMING = ("ordered", "provisioned")


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A pool that gets no workers though it should, or whose orders a conflict holds back.

    Attributes:
        ready, desired: workers. coming: on their way to ready. reasons: (code, text), none where
            nobody tells why.
    """

    pool: str
    ready: int
    desired: int
    coming: int
    reasons: tuple[tuple[str, str], ...]

    @property
    def refuses(self) -> bool:
        """Whether every request is refused now, and nothing under way will end that."""
        waits = any(code == PENDING for code, _text in self.reasons)
        return self.ready == 0 and self.desired > 0 and (not self.coming or waits)

    @property
    def why(self) -> str:
        """The reasons in words."""
        return "; ".join(text for _code, text in self.reasons) or UNKNOWN

    @property
    def remedy(self) -> str:
        """What to do, for each reason once."""
        found = dict.fromkeys(REMEDIES[code] for code, _text in self.reasons)
        return "; ".join(found) or REMEDY

    def text(self) -> str:
        """In one line, without the way out."""
        way = f"{self.coming} on the way" if self.coming else "nothing is ordered or on the way"
        return f"{self.ready} of {self.desired} wanted are ready, {way}: {self.why}"


def shortfalls(state: Mapping[str, Any]) -> list[Shortfall]:
    """Of a planner's state document, by pool.

    A pool whose only trouble has a finding of its own (an order that is refused, an artifact that
    came to a dead end) is left out; so is one whose workers are coming and whose orders nobody holds.
    """
    found = []
    for name, pool in (state.get("pools") or {}).items():
        held = [(h["code"], h["text"]) for h in state.get("held", ()) if h["pool"] in (name, "")]
        reasons = tuple(each for each in held if each[0] in REMEDIES)
        if state.get("paused"):
            reasons = (*reasons, (PAUSED, "the planner is paused: targets are held"))
        if unused := _unused(name, state):
            reasons = (*reasons, (UNUSED, f"{unused} are there and take no requests as they are"))
        ready, desired, coming = pool["ready"], pool["desired"], _coming(name, state)
        conflict = any(code == CONFLICT for code, _text in reasons)
        told = any(code in SHUT for code, _text in held) and not reasons
        short = ready < desired and (not coming or any(code == PENDING for code, _text in reasons))
        if conflict or (short and not told):
            found.append(Shortfall(name, ready, desired, coming, reasons))
    return found


def not_ordered(decision: Mapping[str, Any]) -> list[str]:
    """Of a decision: each pool that was to grow and for which nobody was told anything, and why.

    A pool that grew because somebody else added to it is one of them as long as orders are held.
    """
    lines = []
    for change in decision.get("changes") or ():
        pool = change["pool"]
        if change["to"] <= (change["from"] or 0) or _asked(decision, pool):
            continue
        reasons = decision.get("reasons") or ()
        why = [r["text"] for r in reasons if r.get("pool") == pool and _holds(r["code"])]
        if why:
            lines.append(f"{pool}: nothing was ordered: {'; '.join(why)}")
    return lines


def _holds(code: str) -> bool:
    return code in REMEDIES or code in SHUT


def _asked(decision: Mapping[str, Any], pool: str) -> bool:
    """Whether a start, an activation or a flip for that pool was asked for."""
    asked: Sequence[Mapping[str, Any]] = [
        *(order for order in decision.get("orders") or () if not order.get("standby")),
        *(decision.get("activations") or ()),
    ]
    if any(each.get("pool") == pool for each in asked):
        return True
    return any(flip.get("to") == pool for flip in decision.get("flips") or ())


def _coming(pool: str, state: Mapping[str, Any]) -> int:
    """Workers of the pool between order and ready: what failed or is not heard of is none."""
    count = 0
    for worker in state.get("workers", ()):
        if worker.get("unheard_s") is not None or (worker.get("start") or {}).get("failure"):
            continue
        mine = worker["role"] in (pool, "both")
        starts = mine and worker["state"] in COMING
        turns = worker.get("told") == "flip" and not mine
        serves_soon = mine and worker.get("told") == "activate"
        count += bool(starts or turns or serves_soon)
    return count


def _unused(pool: str, state: Mapping[str, Any]) -> int:
    """Workers of the pool that stalled, are not heard of or have nobody to pair with."""
    return sum(
        worker["role"] in (pool, "both")
        and (
            worker["state"] == "stalled"
            or worker.get("unheard_s") is not None
            or bool(worker.get("unpairable"))
        )
        for worker in state.get("workers", ())
    )
