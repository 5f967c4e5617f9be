"""A tokenizer that costs next to nothing, here as in the engines of `bench.gateway_workers`.

The bench measures what a gateway adds, not how fast somebody tokenises: its engines do that at once,
so the tokenizer that the gateway keeps (`--tokenizers-dir`) does so too, by the same function. In
front of `sys.path` it is found as `tokenizers`, and everything of the gateway's own around it (the
comparison with the engines, the trust, the comparing again) is what runs everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CHARACTERS_A_TOKEN = 4


def token_ids(text: str) -> list[int]:
    """One token for four characters, so that another text has other tokens."""
    data = text.encode()
    whole = data[: len(data) // CHARACTERS_A_TOKEN * CHARACTERS_A_TOKEN]
    found: list[int] = (np.frombuffer(whole, "<u4") % 32_000).tolist()
    return found


@dataclass(frozen=True, slots=True)
class Encoding:
    """What `encode` gives, as far as it is asked."""

    ids: list[int]


class Tokenizer:
    """The two calls that the gateway makes of the package."""

    @classmethod
    def from_file(cls, path: str) -> Tokenizer:
        """The file says nothing more."""
        del path
        return cls()

    def encode(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """There are no special tokens."""
        del add_special_tokens
        return Encoding(token_ids(text))
