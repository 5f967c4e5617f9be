"""What a worker can be told besides to drain: to serve at last, or to serve the other stage (pure).

Owns the verdicts on activations and flips; `telling` keeps what was told and hands it down with
renewals. A standby is told to serve for a bounded time and no longer: whoever asked has planned anew
by then. A flip is a drain that ends in another role instead of in an end.
"""

from __future__ import annotations

from dataclasses import dataclass

from readyplane.core.worker import Role, WorkerOffer, WorkerState

ACTIVATE = "activate"
FLIP = "flip"
COUNT_OF = {ACTIVATE: "activated", FLIP: "flipped"}
_SERVES = frozenset({WorkerState.READY, WorkerState.STALLED})


@dataclass(frozen=True, slots=True)
class Told:
    """What a worker has been told and has not done yet.

    Attributes:
        kind: `activate` or `flip`. role: of a flip, the stage to serve then.
        since_s, until_s: router clock; an activation is told no more from `until_s` on.
        number: grows with everything that one incarnation is told, so that a word that comes
            twice, by way of the store, is heard once.
    """

    kind: str
    since_s: float
    until_s: float
    reason: str = ""
    role: Role | None = None
    number: int = 0


def why_not_activate(offer: WorkerOffer, state: WorkerState) -> list[str]:
    """Empty when the word can be given, or has nothing left to change."""
    if state in _SERVES or state is WorkerState.STANDBY:
        return []
    if state is WorkerState.PROVISIONED:
        return []  # a standby that still loads will not stand by; any other one serves anyway
    return [f"{offer.worker_id} is {state}"]


def is_to_tell(offer: WorkerOffer, state: WorkerState) -> bool:
    """Whether there is anything to tell: who serves, or will without being told, needs no word."""
    return state is WorkerState.STANDBY or (state is WorkerState.PROVISIONED and offer.standby)


def why_not_flip(
    offer: WorkerOffer, state: WorkerState, to: Role, *, flips: bool, told: Told | None
) -> list[str]:
    """Every reason why a worker cannot serve the other stage."""
    reasons = []
    if to is Role.BOTH:
        reasons.append("a flip is to prefill or to decode")
    if told is not None and told.kind == FLIP and told.role is not to:
        reasons.append(f"it is becoming {told.role} already")
    elif told is None and state not in _SERVES:
        reasons.append(f"it is {state}: only who serves can change the stage")
    if offer.role is Role.BOTH:
        reasons.append("it serves both stages already")
    if offer.attached:
        reasons.append("its engine was attached and is not ours to change")
    elif state in _SERVES and not flips:
        reasons.append("its engine cannot change its stage without a new start")
    if offer.ranks > 1:
        reasons.append(f"its {offer.ranks} ranks would have to change together")
    return reasons
