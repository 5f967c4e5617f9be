"""One request of a workload, and the token ids of its prompt.

Owns the deterministic meaning of a prompt: a prompt is a list of parts, each the first `length`
tokens of an endless stream named by a seed. Prompts that begin with the same parts share a prefix,
which is how multi-turn chats and published block hashes are both expressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FIRST_TOKEN = 3
TOKEN_KINDS = 256
_STREAM_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One arrival.

    Attributes:
        index: position in the workload. at_s: arrival, seconds since the workload began.
        isl, osl: prompt and output tokens. parts: (seed, tokens) whose sum is `isl`.
        tenant, priority: fairness key and importance.
    """

    index: int
    at_s: float
    isl: int
    osl: int
    parts: tuple[tuple[int, int], ...]
    tenant: str = ""
    priority: int = 0


def prompt_tokens(request: WorkloadRequest) -> NDArray[np.uint32]:
    """Token ids of the prompt, shape (isl,), values 3 to 258 (the byte tokenizer's range)."""
    pieces = [stream(seed, length) for seed, length in request.parts]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint32)


def stream(seed: int, length: int) -> NDArray[np.uint32]:
    """The first `length` tokens of the stream `seed`; longer asks extend shorter ones."""
    if length <= _STREAM_TOKENS:
        return _block(seed, 0)[:length]
    blocks = [_block(seed, i) for i in range(-(-length // _STREAM_TOKENS))]
    return np.concatenate(blocks)[:length]


@lru_cache(maxsize=4096)
def _block(seed: int, index: int) -> NDArray[np.uint32]:
    generator = np.random.Generator(np.random.Philox(key=(seed & (2**63 - 1), index)))
    return generator.integers(FIRST_TOKEN, FIRST_TOKEN + TOKEN_KINDS, _STREAM_TOKENS, np.uint32)
