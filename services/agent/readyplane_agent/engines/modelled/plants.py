"""Faults that can be planted in a modelled engine, so that tests see the gate find them.

For tests and `make bench-gate` only (`--plant NAME`): each is one way in which an engine comes up,
answers, and is not what was ordered. Owns what each does to weights, requests and KV events.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import StrEnum

from readyplane_agent.engines.layout import TensorSlot
from readyplane_agent.engines.modelled.body import Ask

# Added to what the weights amount to: they were cast to another format on their way in.
_CAST = 0x5EED


class Plant(StrEnum):
    """The faults.

    swapped_tensors: two tensors of one shape lie in each other's place. other_packing: the first
    tensor's bytes are packed another way. wrong_quantisation: the weights were cast to another
    format. wrong_tokenizer: text becomes other tokens. one_way_kv: it reads no other engine's KV.
    kv_hashes: its KV events name other tokens than were computed. half_kv: half of the KV blocks.
    wrong_eos: it does not know where answers end. not_greedy: temperature 0 samples.
    seed_ignored: a seeded answer does not repeat. choices_ignored: structured outputs are free text.
    graph_tokens: graphs that were captured later answer other tokens. graph_fails: they cannot all be
    captured.
    """

    SWAPPED_TENSORS = "swapped_tensors"
    OTHER_PACKING = "other_packing"
    WRONG_QUANTISATION = "wrong_quantisation"
    WRONG_TOKENIZER = "wrong_tokenizer"
    ONE_WAY_KV = "one_way_kv"
    KV_HASHES = "kv_hashes"
    HALF_KV = "half_kv"
    WRONG_EOS = "wrong_eos"
    NOT_GREEDY = "not_greedy"
    SEED_IGNORED = "seed_ignored"
    CHOICES_IGNORED = "choices_ignored"
    GRAPH_TOKENS = "graph_tokens"
    GRAPH_FAILS = "graph_fails"


def spoiled_slots(slots: Sequence[TensorSlot], plants: Collection[Plant]) -> tuple[TensorSlot, ...]:
    """The slots as the engine finds them: two of one shape may have changed places."""
    out = list(slots)
    if Plant.SWAPPED_TENSORS not in plants:
        return tuple(out)
    for i, one in enumerate(out):
        for j in range(i + 1, len(out)):
            other = out[j]
            alike = (one.dtype, one.shape) == (other.dtype, other.shape)
            if alike and one.size_bytes > 0:
                out[i] = replace(one, offset_bytes=other.offset_bytes)
                out[j] = replace(other, offset_bytes=one.offset_bytes)
                return tuple(out)
    return tuple(out)


def spoiled_bytes(content: memoryview, plants: Collection[Plant]) -> bytes | memoryview:
    """One tensor's bytes as the engine reads them."""
    if Plant.OTHER_PACKING not in plants:
        return content
    return bytes(content[0::2]) + bytes(content[1::2])


def spoiled_weights(weights: int, plants: Collection[Plant]) -> int:
    """What the weights amount to."""
    return weights ^ _CAST if Plant.WRONG_QUANTISATION in plants else weights


def spoiled_ask(ask: Ask, number: int, plants: Collection[Plant]) -> Ask:
    """A request as the engine understands it; `number` differs from one request to the next."""
    if Plant.WRONG_EOS in plants:
        ask = replace(ask, ignore_eos=True)
    if Plant.CHOICES_IGNORED in plants:
        ask = replace(ask, choices=())
    greedy = ask.seed is None
    if (greedy and Plant.NOT_GREEDY in plants) or (not greedy and Plant.SEED_IGNORED in plants):
        ask = replace(ask, seed=number)
    return ask


def spoiled_tokens(tokens: Sequence[int], plants: Collection[Plant]) -> list[int]:
    """Tokens of a text."""
    step = 1 if Plant.WRONG_TOKENIZER in plants else 0
    return [token + step for token in tokens]
