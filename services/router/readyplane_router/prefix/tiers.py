"""What a prefix is worth that lies below the GPU: its tokens, less the time to load them.

Owns the exchange of load time for tokens. A block in host memory or on disk saves its prefill and
costs its load; the difference, as a share of the prefill, is the share of its tokens that counts as
cached. So the pairing's cost has the load time in it without a term of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from readyplane.core.kv import CPU, DISK, GPU


@dataclass(frozen=True, slots=True)
class TierLoad:
    """How KV comes back to the GPU: bytes a second, and seconds before the first of them."""

    bytes_per_s: float
    setup_s: float

    def seconds(self, size_bytes: float) -> float:
        """Time to load so many bytes."""
        return self.setup_s + size_bytes / self.bytes_per_s


def worth(
    pieces: Sequence[tuple[str, int]],
    loads: Mapping[str, TierLoad],
    *,
    kv_bytes_per_token: int,
    prefill_s: Callable[[float, float], float],
) -> int:
    """Cached tokens that a prefix is as good as.

    Args:
        pieces: (tier, tokens) in the order of the prompt. loads: of each tier but the GPU.
        prefill_s: time of computing so many tokens behind so many.

    Returns:
        At most the sum of the tokens. Pieces that are quicker computed than loaded end it: what is
        behind them would be of use only after them.
    """
    whole, good = 0, 0.0
    for tier, tokens in pieces:
        if tier == GPU:
            good += tokens
        else:
            computed_s = prefill_s(tokens, whole)
            loaded_s = loads[tier].seconds(tokens * kv_bytes_per_token)
            if loaded_s >= computed_s:
                break
            good += tokens * (1.0 - loaded_s / computed_s)
        whole += tokens
    return int(good)


TIERS = (GPU, CPU, DISK)
"""The nearest first: a block that lies on several is loaded from the nearest."""
