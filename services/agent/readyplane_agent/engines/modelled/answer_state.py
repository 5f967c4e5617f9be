"""What a sampled or constrained answer depends on beside its tokens, so that it can go on elsewhere
(pure).

Owns the two states that a migration carries: where the random draws are, and which of the wanted
texts the answer may still become. Both are a few numbers; an engine that goes on without them gives
another answer, as a real one would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MASK = 0xFFFFFFFFFFFFFFFF
_GAMMA = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Draws:
    """SplitMix64: its whole state is one number, which each draw moves on."""

    state: int

    def next(self) -> int:
        """The next 64 random bits."""
        self.state = (self.state + _GAMMA) & _MASK
        mixed = self.state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def after(self, count: int) -> Draws:
        """The same `count` draws later."""
        return Draws((self.state + count * _GAMMA) & _MASK)


@dataclass(slots=True)
class Choices:
    """The answer is one of some texts. `alive`: which it may still be after `matched` tokens."""

    texts: tuple[tuple[int, ...], ...]
    alive: tuple[int, ...]
    matched: int = 0

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> Choices:
        """At the beginning of an answer."""
        return cls(tuple(map(tuple, texts)), tuple(range(len(texts))))

    def allowed(self) -> list[int]:
        """Tokens that may come next, none at the end of the answer."""
        at = self.matched
        return sorted({self.texts[i][at] for i in self.alive if len(self.texts[i]) > at})

    def step(self, token: int) -> None:
        """The answer went on with `token`."""
        at = self.matched
        self.alive = tuple(i for i in self.alive if self.texts[i][at : at + 1] == (token,))
        self.matched += 1

    def document(self) -> dict[str, Any]:
        """What must be carried; the texts themselves are in the request."""
        return {"matched": self.matched, "alive": list(self.alive)}

    def resumed(self, document: Mapping[str, Any]) -> Choices:
        """The same texts at a carried state.

        Raises:
            ValueError: the state is none of these texts'.
        """
        matched, alive = document.get("matched"), document.get("alive")
        if type(matched) is not int or not isinstance(alive, list) or matched < 0:
            raise ValueError("the state of the choices cannot be read")
        if not all(type(i) is int and 0 <= i < len(self.texts) for i in alive):
            raise ValueError("the state is not of these choices")
        return Choices(self.texts, tuple(alive), matched)
