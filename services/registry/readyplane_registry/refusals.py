"""Why a reader gets no place, or a source may not announce itself: the errors, in one wording.

Handed to every implementation of `live`, so that memory and Redis say the same.
"""

from __future__ import annotations

from readyplane.core.errors import IdentityMismatch, NotFound, Overloaded, StaleEpoch
from readyplane.ports import Source

REPLAN_AFTER_S = 0.05


def source_gone(source_id: str, why: str) -> NotFound:
    """The error for a source that cannot be read from any more."""
    return NotFound("source", source_id, f"{why}; plan the fetch anew")


def source_full(source_id: str, readers: int, retry_after_s: float) -> Overloaded:
    """The error for a source without a free place."""
    why = f"all {readers} reader places of source {source_id} are taken"
    return Overloaded(why, max(0.1, retry_after_s))


def source_barred(source_id: str, reason: str, for_s: float) -> Overloaded:
    """The error for a source that is not offered for a while."""
    return Overloaded(f"source {source_id} is not offered: {reason}", max(0.1, for_s))


def source_leaves(source_id: str) -> Overloaded:
    """The error for a source that drains: its readers may finish, nobody new comes."""
    return Overloaded(f"source {source_id} takes no new readers, it leaves", 1.0)


def source_busier(source_id: str, readers: int, seen: int) -> Overloaded:
    """The error for the reader that came second after several had planned at once."""
    why = f"source {source_id} has {readers} readers now and had {seen} when planned; plan anew"
    return Overloaded(why, REPLAN_AFTER_S)


def source_circle(source_id: str) -> Overloaded:
    """The error for two that would wait for one another."""
    why = f"source {source_id} itself reads from this reader; plan anew"
    return Overloaded(why, REPLAN_AFTER_S)


def other_life(source_id: str, expected: str, found: str) -> StaleEpoch:
    """The error for a source that has begun anew since the plan was made."""
    remedy = "it has begun anew; plan the fetch anew"
    return StaleEpoch(f"incarnation of source {source_id}", expected, found, remedy)


def other_layout(source_id: str, needed: str, found: str) -> IdentityMismatch:
    """The error for bytes that are the same weights in another order."""
    told = f"layout_digest: needed {needed or 'as in the manifest'}, found {found or 'that'}"
    return IdentityMismatch(f"source {source_id}", [told], "plan the fetch anew")


def earlier_life(source: Source, current: str) -> StaleEpoch:
    """The error for an announcement that comes from a life that is over."""
    return StaleEpoch(
        f"incarnation of source {source.source_id}",
        source.incarnation,
        current,
        "a later life of this source has announced itself: stop giving bytes",
    )
