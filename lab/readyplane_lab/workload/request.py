"""One request of a workload, the token ids of its prompt, and its block hashes without them.

Owns the deterministic meaning of a prompt: a prompt is a list of parts, each the first `length`
tokens of an endless stream named by a seed. Prompts that begin with the same parts share a prefix,
which is how multi-turn chats and published block hashes are both expressed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

FIRST_TOKEN = 3
TOKEN_KINDS = 256
_STREAM_TOKENS = 2048
_SEED_BITS = 2**63 - 1
_BLOCKS_BITS = 32  # no stream has more blocks


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


def prompt_hashes(request: WorkloadRequest, block_size: int) -> tuple[int, ...]:
    """Sequence hashes of the full blocks of a prompt: equal exactly when the tokens up to there are.

    They name the stream and the place in it instead of the tokens, which are worked out only for a
    block that two parts share. Not the hashes of `core.work.sequence_hashes`: use one or the other.
    """
    out: list[int] = []
    parent = 0
    begun: list[tuple[int, int, int]] = []  # (seed, offset, tokens) of the block not yet full
    before: tuple[int, int] = (0, 0)  # where the run of the block's first part hangs: parent, seed
    for seed, length in request.parts:
        offset = 0
        if begun:
            offset = min(length, block_size - sum(tokens for _, _, tokens in begun))
            begun.append((seed, 0, offset))
            if sum(tokens for _, _, tokens in begun) < block_size:
                continue
            parent = _shared_block(begun, block_size, parent, before)
            out.append(parent)
            begun = []
        run, whole = (parent, seed & _SEED_BITS), (length - offset) // block_size
        if whole:
            out += _run_hashes(run, offset, whole, block_size)
            parent = out[-1]
        offset += whole * block_size
        if offset < length:
            begun, before = [(seed, offset, length - offset)], run
    return tuple(out)


def _run_hashes(run: tuple[int, int], offset: int, blocks: int, block_size: int) -> range:
    """Hashes of blocks of one stream that follow each other: one-to-one with their offsets.

    They count up from a drawn place among 2**63, so that blocks which are used together lie
    together in any table of them.
    """
    key = xxhash.xxh3_64_intdigest(b"%d:%d" % run) >> 1
    first = key + (offset % block_size << _BLOCKS_BITS) + offset // block_size
    return range(first, first + blocks)


def _shared_block(
    pieces: list[tuple[int, int, int]], block_size: int, parent: int, run: tuple[int, int]
) -> int:
    """Hash of a block that several parts make up, by its tokens."""
    tokens = np.concatenate([stream(seed, at + n)[at:] for seed, at, n in pieces])
    seed, at, _ = pieces[0]
    if np.array_equal(tokens, stream(seed, at + block_size)[at:]):  # by chance as if it went on
        return _run_hashes(run, at, 1, block_size)[0]
    return xxhash.xxh3_64_intdigest(tokens.tobytes(), seed=parent)


@lru_cache(maxsize=4096)
def _block(seed: int, index: int) -> NDArray[np.uint32]:
    generator = np.random.Generator(np.random.Philox(key=(seed & _SEED_BITS, index)))
    return generator.integers(FIRST_TOKEN, FIRST_TOKEN + TOKEN_KINDS, _STREAM_TOKENS, np.uint32)
