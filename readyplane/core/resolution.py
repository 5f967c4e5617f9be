"""The answer to a need: one artifact, or the nearest ones with the fields in which they differ. Pure.

Owns the values that Resolve hands out; which artifact is chosen is the registry's `catalog`.
A withdrawn artifact is told by a tag, so that it stays readable and nobody resolves to it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from readyplane.core.identity import FieldDifference, Manifest

CANDIDATES_SHOWN_MAX = 5
CANDIDATES_MAX = 100
WITHDRAWN = "withdrawn/"


@dataclass(frozen=True, slots=True)
class Candidate:
    """An artifact that does not meet a need, and why: `left` is needed, `right` is found."""

    digest: str
    differing: tuple[FieldDifference, ...]

    def __str__(self) -> str:
        """`DIGEST: field: needed X, has Y, …`."""
        fields = (f"{f.field}: needed {f.left}, has {f.right}" for f in self.differing)
        return f"{self.digest}: {', '.join(fields)}"


@dataclass(frozen=True, slots=True)
class Resolution:
    """What a need resolves to.

    Attributes:
        manifest: the artifact that meets every field; None when none does.
        candidates: the others, the one with the fewest differing fields first.
        left_off: how many more there are, that differ as much or more.
    """

    manifest: Manifest | None
    candidates: tuple[Candidate, ...] = ()
    left_off: int = 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why none was chosen, one line a candidate."""
        told = tuple(str(candidate) for candidate in self.candidates)
        if self.left_off:
            told += (f"and {self.left_off} more that differ as much or more",)
        return told


def withdrawn_tag(digest: str) -> str:
    """The tag that says of an artifact that nobody may resolve to it any more."""
    return WITHDRAWN + digest.removeprefix("sha256:")
