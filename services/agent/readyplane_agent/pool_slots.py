"""Who may use which memory, and when: the states of a pooled arena (R15).

Owns the transition table; `pool` carries the steps out on shared memory. Memory goes to another
content only through ZEROING and a proof that covers every byte of it. What holds the very bytes
that are wanted is lent again as it is: the loader verifies them chunk by chunk before anybody sees
them. Whoever ends without a word leaves a state from which the memory is zeroed, never one from
which it is lent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from readyplane.core.errors import InvalidField


class State(StrEnum):
    """Where a slot stands."""

    FREE = "free"
    """Zeroed, with proof."""
    RESERVED = "reserved"
    """Lent; nothing was written yet."""
    FILLING = "filling"
    """Being written."""
    SEALED = "sealed"
    """Whole and verified, written by nobody any more."""
    ADOPTED = "adopted"
    """An engine maps it."""
    RELEASED = "released"
    """Nobody's; holds a content that was whole."""
    DIRTY = "dirty"
    """Nobody's; holds anything."""
    ZEROING = "zeroing"
    """Being zeroed."""


class Event(StrEnum):
    """What happens to a slot."""

    RESERVE = "reserve"
    FILL = "fill"
    SEAL = "seal"
    ADOPT = "adopt"
    RELEASE = "release"
    ROLL_BACK = "roll_back"
    OWNER_DIED = "owner_died"
    EVICT = "evict"
    ZERO = "zero"
    PROVED = "proved"
    DISPROVED = "disproved"


_S, _E = State, Event
TABLE: dict[tuple[State, Event], State] = {
    (_S.FREE, _E.RESERVE): _S.RESERVED,
    (_S.FREE, _E.DISPROVED): _S.DIRTY,
    (_S.RESERVED, _E.FILL): _S.FILLING,
    (_S.RESERVED, _E.ROLL_BACK): _S.DIRTY,
    (_S.RESERVED, _E.OWNER_DIED): _S.DIRTY,
    (_S.FILLING, _E.SEAL): _S.SEALED,
    (_S.FILLING, _E.ROLL_BACK): _S.DIRTY,
    (_S.FILLING, _E.OWNER_DIED): _S.DIRTY,
    (_S.SEALED, _E.ADOPT): _S.ADOPTED,
    (_S.SEALED, _E.RELEASE): _S.RELEASED,
    (_S.SEALED, _E.ROLL_BACK): _S.DIRTY,
    (_S.SEALED, _E.OWNER_DIED): _S.RELEASED,
    (_S.ADOPTED, _E.RELEASE): _S.RELEASED,
    (_S.ADOPTED, _E.ROLL_BACK): _S.DIRTY,
    (_S.ADOPTED, _E.OWNER_DIED): _S.RELEASED,
    (_S.RELEASED, _E.RESERVE): _S.RESERVED,
    (_S.RELEASED, _E.EVICT): _S.DIRTY,
    (_S.DIRTY, _E.ZERO): _S.ZEROING,
    (_S.ZEROING, _E.PROVED): _S.FREE,
    (_S.ZEROING, _E.DISPROVED): _S.DIRTY,
    (_S.ZEROING, _E.ROLL_BACK): _S.DIRTY,
    (_S.ZEROING, _E.OWNER_DIED): _S.DIRTY,
}
OWNED = (_S.RESERVED, _S.FILLING, _S.SEALED, _S.ADOPTED, _S.ZEROING)


@dataclass(frozen=True, slots=True)
class Slot:
    """One arena of the pool.

    Attributes:
        size_bytes: of its memory. content: digest of what it holds or will hold, empty when free.
        owner: incarnation that has it, empty for nobody.
        proved_bytes: how many bytes, from the first on, were read back as zero since the last
            write; only of a free slot.
    """

    name: str
    state: State
    size_bytes: int
    content: str = ""
    owner: str = ""
    proved_bytes: int = 0


def step(
    slot: Slot, event: Event, *, owner: str = "", content: str = "", proved_bytes: int = 0
) -> Slot:
    """The slot after an event.

    Args:
        owner: who reserves or zeroes. content: what it is reserved for. proved_bytes: with PROVED.

    Raises:
        InvalidField: the table has no such step, memory would pass to another content unproved, a
            proof does not cover all of it, or nobody is named who wants it.
    """
    to = TABLE.get((slot.state, event))
    if to is None:
        raise InvalidField(f"pool.{slot.name}", f"{slot.state} on {event}", "see the table")
    if event is Event.RESERVE:
        return _reserved(slot, owner, content)
    if event is Event.PROVED:
        if proved_bytes != slot.size_bytes:
            raise InvalidField(
                f"pool.{slot.name}.proved_bytes", proved_bytes, f"prove all {slot.size_bytes}"
            )
        return replace(slot, state=to, content="", owner="", proved_bytes=proved_bytes)
    if event is Event.ZERO and not owner:
        raise InvalidField(f"pool.{slot.name}.owner", owner, "say who zeroes it")
    kept = slot.content if to not in (State.DIRTY, State.ZEROING) else ""
    holder = (owner if event is Event.ZERO else slot.owner) if to in OWNED else ""
    return replace(slot, state=to, content=kept, owner=holder, proved_bytes=0)


def _reserved(slot: Slot, owner: str, content: str) -> Slot:
    where = f"pool.{slot.name}"
    if not owner or not content:
        raise InvalidField(f"{where}.owner", owner, "say who wants it, and for what")
    if slot.state is State.RELEASED and content != slot.content:
        raise InvalidField(f"{where}.content", content, f"zero what held {slot.content} first")
    if slot.state is State.FREE and slot.proved_bytes != slot.size_bytes:
        raise InvalidField(
            f"{where}.proved_bytes", slot.proved_bytes, "prove that all of it is zero"
        )
    return replace(slot, state=State.RESERVED, owner=owner, content=content, proved_bytes=0)


def left_alone(slot: Slot) -> Slot:
    """A slot whose owner's lock is free: what becomes of it."""
    return step(slot, Event.OWNER_DIED) if slot.state in OWNED else slot
