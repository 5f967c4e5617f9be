"""What the modelled engine answers: a function of the loaded tensors and of the tokens (pure).

Owns the weights' fingerprint, the next token, the answer's length, and the byte tokenizer. As with
a real model under greedy decoding, the next token depends on every weight and on every token
before it, and continuing a prompt by its own answer continues that answer. A swapped, missing or
altered tensor therefore changes what a canary sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp

import xxhash

from readyplane.core.work import pack_tokens
from readyplane_agent.engines.modelled.answer_state import Choices, Draws

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = 0, 1, 2
TOKEN_OFFSET = 3
VOCAB_SIZE = 512

# Output lengths when nobody says them: lognormal, with the mean (211) and the tail of published
# conversation traces.
LENGTH_MEDIAN_TOKENS = 150.0
LENGTH_SIGMA = 0.83
LENGTH_MAX_TOKENS = 2048

_LETTERS = b"eeeeettttaaaooiinnsshhrrdlucmfwypvbgk     ,.      eatoinshrdlucm"
_ALPHABET = tuple(byte + TOKEN_OFFSET for byte in _LETTERS)
_PACKED = tuple(token.to_bytes(4, "little") for token in _ALPHABET)
_MASK = len(_ALPHABET) - 1
assert len(_ALPHABET) == 64


def tensor_digest(
    name: str, dtype: str, shape: Sequence[int], content: bytes | bytearray | memoryview
) -> bytes:
    """Digest of one tensor: name, dtype, shape and bytes."""
    head = f"{len(name)}:{name}|{dtype}|{','.join(str(n) for n in shape)}|{len(content)}|"
    return xxhash.xxh3_64_digest(head.encode() + xxhash.xxh3_64_digest(content))


def fingerprint(digests: Iterable[bytes]) -> int:
    """xxh3-64 over the digests of all tensors, whatever their order."""
    return xxhash.xxh3_64_intdigest(b"".join(sorted(digests)))


def kv_digest(weights: int, prompt: bytes) -> int:
    """What the KV of a prompt amounts to: made by these weights, for these tokens.

    Args:
        weights: fingerprint of the engine that computed it. prompt: packed tokens.
    """
    return xxhash.xxh3_64_intdigest(prompt, seed=weights)


class Answer:
    """The greedy continuation of one prompt.

    Args:
        weights: fingerprint of the decoding engine. prompt: packed tokens as the KV has them.
        kv: digest of the KV decoded from, None when this engine computed it itself. KV made by
            other weights or for other tokens leads to another answer, as it would on a GPU.
        draws: sampled with these, not greedy. choices: it is one of these texts.
    """

    __slots__ = ("_choices", "_draws", "_hash", "_taint")

    def __init__(
        self,
        weights: int,
        prompt: bytes,
        *,
        kv: int | None = None,
        draws: Draws | None = None,
        choices: Choices | None = None,
    ) -> None:
        self._draws, self._choices = draws, choices
        self._hash = xxhash.xxh3_64(prompt, seed=weights)
        self._taint = 0 if kv is None else self._hash.intdigest() ^ kv

    def take(self, count: int) -> list[int]:
        """The next `count` tokens, printable letters and spaces; fewer where the choices end."""
        if self._draws is not None or self._choices is not None:
            return self._take_stateful(count)
        digest, update, taint = self._hash.intdigest, self._hash.update, self._taint
        out: list[int] = []
        for _ in range(count):
            mixed = digest() ^ taint
            letter = (mixed ^ (mixed >> 32)) & _MASK
            update(_PACKED[letter])
            out.append(_ALPHABET[letter])
        return out

    def _take_stateful(self, count: int) -> list[int]:
        out: list[int] = []
        for _ in range(count):
            mixed = self._hash.intdigest() ^ self._taint
            mixed ^= mixed >> 32
            if self._draws is not None:
                mixed ^= self._draws.next()
            allowed = _ALPHABET if self._choices is None else self._choices.allowed()
            if not allowed:
                break
            token = allowed[mixed % len(allowed)]
            if self._choices is not None:
                self._choices.step(token)
            self._hash.update(token.to_bytes(4, "little"))
            out.append(token)
        return out


def answer_length(prompt: bytes) -> int:
    """Tokens that the answer to a prompt has when it may end by itself (1 to 2048)."""
    from statistics import NormalDist  # late: most clients say how long their answers are

    share = (xxhash.xxh3_64_intdigest(prompt, seed=2) + 0.5) / 2.0**64
    share = min(max(share, 1e-9), 1 - 1e-9)
    tokens = LENGTH_MEDIAN_TOKENS * exp(LENGTH_SIGMA * NormalDist().inv_cdf(share))
    return max(1, min(LENGTH_MAX_TOKENS, round(tokens)))


def golden_answer(weights: int, prompt_token_ids: Sequence[int], count: int) -> tuple[int, ...]:
    """The known answer that is recorded in a manifest when it is published."""
    return tuple(Answer(weights, pack_tokens(prompt_token_ids)).take(count))


def encode(text: str) -> list[int]:
    """Tokens of a text: each UTF-8 byte plus 3."""
    return [byte + TOKEN_OFFSET for byte in text.encode("utf-8", "surrogatepass")]


def decode(token_ids: Sequence[int]) -> str:
    """Text of tokens; special tokens are silent, tokens beyond the bytes show as U+FFFD."""
    out: list[str] = []
    part = bytearray()
    for token in token_ids:
        if TOKEN_OFFSET <= token < TOKEN_OFFSET + 256:
            part.append(token - TOKEN_OFFSET)
        elif token >= TOKEN_OFFSET + 256:
            out.append(part.decode("utf-8", "replace") + "�")
            part.clear()
    return "".join(out) + part.decode("utf-8", "replace")
