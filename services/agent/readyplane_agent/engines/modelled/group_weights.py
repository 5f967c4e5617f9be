"""What all ranks of a modelled group hold together: agreed on, compared, and one fingerprint.

Owns the three things that the ranks do with one another before they answer. They lay their tables
beside each other until every tensor is there once; what several have whole is compared through a sum
over all ranks; what is cut goes to rank 0, one tensor at a time, where its digest is taken as if it
had never been cut. So the group's answers hang on every rank's bytes, and are those of one rank.

A modelled engine computes no layers: the parts come together once, at the start, and not in every
iteration.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from readyplane.core.errors import IdentityMismatch, InvalidField, NotFound
from readyplane.core.identity import DTYPE_BYTES
from readyplane_agent.engines.layout import (
    RankTable,
    TensorPart,
    TensorSlot,
    read_rank_table,
    read_tensor_table,
)
from readyplane_agent.engines.modelled.answer import fingerprint, golden_answer, tensor_digest
from readyplane_agent.engines.modelled.communicator import Communicator
from readyplane_agent.engines.modelled.plants import (
    Plant,
    spoiled_bytes,
    spoiled_slots,
    spoiled_weights,
)
from readyplane_agent.engines.modelled.settings import ModelledSettings

REMEDY = "order the group anew"
# Asked of each other by ranks whose artifact records no question.
PROMPT, TOKENS = (5, 6, 7, 8), 8
REASONS_MAX = 8


@dataclass(slots=True)
class OwnPart:
    """This rank's memory and the tensors in it, by name."""

    table: RankTable
    slots: Mapping[str, TensorSlot]
    data: memoryview
    size_bytes: int
    plants: Collection[Plant]

    def content(self, name: str) -> memoryview:
        """This rank's part of a tensor; empty when it has none."""
        slot = self.slots.get(name)
        if slot is None:
            return memoryview(b"")
        return self.data[slot.offset_bytes : slot.offset_bytes + slot.size_bytes]

    def digest(self, name: str, part: TensorPart, content: memoryview) -> int:
        """Of a whole tensor, wherever its bytes came from."""
        data = spoiled_bytes(content, self.plants if name == self.table.names[0] else ())
        (found,) = struct.unpack(">Q", tensor_digest(name, part.dtype, part.shape, data))
        return int(found)

    def whole_digests(self) -> list[int]:
        """Digests of the tensors that this rank has whole, at their places; 0 for all others."""
        out = [0] * len(self.table.names)
        for place, name in enumerate(self.table.names):
            part = self.table.parts.get(name)
            if part is not None and part.whole:
                out[place] = self.digest(name, part, self.content(name))
        return out


def map_own(s: ModelledSettings) -> OwnPart:
    """This rank's memory. Raises NotFound, InvalidField."""
    try:
        text = s.tensor_table.read_bytes()
    except OSError as error:
        remedy = f"let the agent write it ({error})"
        raise NotFound("tensor table", str(s.tensor_table), remedy) from None
    table = read_rank_table(text)
    if (table.rank, table.world) != (s.rank, s.world):
        found = f"rank {table.rank} of {table.world}"
        raise InvalidField("tensor_table.rank", found, f"give that of rank {s.rank} of {s.world}")
    slots, size = read_tensor_table(text)
    try:
        with s.arena.open("rb") as file:
            if os.fstat(file.fileno()).st_size < size:
                raise InvalidField("arena", str(s.arena), f"give a file of at least {size} bytes")
            data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        remedy = f"load the weights there first ({error})"
        raise NotFound("arena", str(s.arena), remedy) from None
    spoiled = {slot.name: slot for slot in spoiled_slots(slots, s.plants)}
    return OwnPart(table, spoiled, memoryview(data), size, s.plants)


def agree(link: Communicator, own: RankTable, manifest_digest: str) -> tuple[RankTable, ...]:
    """The tables of all ranks, on every rank, once they are one model's (R17.1).

    Raises:
        IdentityMismatch: on every rank, with what does not fit: another artifact, or a tensor that
            the ranks do not hold once.
    """
    said = json.dumps({"manifest_digest": manifest_digest, "table": own.document()})
    told = [json.loads(bytes(text)) for text in link.gather(said.encode())]
    heard = json.loads(bytes(link.spread(json.dumps(told).encode())))
    tables = tuple(RankTable.from_document(each["table"]) for each in heard)
    wrong = [
        f"rank {rank}: manifest {each['manifest_digest']} != {heard[0]['manifest_digest']}"
        for rank, each in enumerate(heard)
        if each["manifest_digest"] != heard[0]["manifest_digest"]
    ]
    wrong += disagreement(tables)
    if wrong:
        raise IdentityMismatch("placement", wrong[:REASONS_MAX], REMEDY)
    return tables


def disagreement(tables: Sequence[RankTable]) -> list[str]:
    """Why the tables are not those of one model, once; empty when they are."""
    first = tables[0]
    wrong = [
        f"rank {rank}: {name} differs from rank 0's"
        for rank, each in enumerate(tables)
        for name in ("names", "world", "prompt", "golden")
        if getattr(each, name) != getattr(first, name)
    ]
    wrong += [f"rank {at}: it speaks as {t.rank}" for at, t in enumerate(tables) if t.rank != at]
    for name in first.names:
        why = _gap([t.parts[name] for t in tables if name in t.parts])
        if why:
            wrong.append(f"{name}: {why}")
    return wrong


def _gap(parts: Sequence[TensorPart]) -> str:
    if not parts:
        return "no rank holds it"
    if len({(p.shape, p.axis, p.dtype) for p in parts}) > 1:
        return "the ranks have it in different ways"
    if all(part.whole for part in parts):
        return ""
    ranges = sorted((p.start, p.stop) for p in parts)
    met = all(one[1] == other[0] for one, other in pairwise(ranges))
    if ranges[0][0] == 0 and ranges[-1][1] == parts[0].full and met:
        return ""
    return f"parts {ranges} of {parts[0].full}"


def together(
    link: Communicator, own: OwnPart, tables: Sequence[RankTable], digests: Sequence[int]
) -> int:
    """The fingerprint of the whole weights, on every rank.

    Args:
        digests: this rank's `whole_digests`.

    Raises:
        IdentityMismatch: ranks that have a tensor whole have different bytes of it.
    """
    names = own.table.names
    holders = {n: [t.rank for t in tables if n in t.parts] for n in names}
    first = {n: tables[holders[n][0]].parts[n] for n in names}
    # Of those that have a tensor whole the lowest speaks for all, and every other one compares.
    speaks = [d if holders[n][0] == link.rank else 0 for n, d in zip(names, digests, strict=True)]
    values = link.all_reduce(speaks)
    wrong = [
        f"{name}: rank {link.rank} has other bytes of it than rank {holders[name][0]}"
        for name, ours, theirs in zip(names, digests, values, strict=True)
        if first[name].whole and link.rank in holders[name] and ours != theirs
    ]
    (found,) = link.all_reduce([len(wrong)])
    if found:
        reasons = wrong or [f"the ranks have different bytes of {found} tensors"]
        raise IdentityMismatch("weights", reasons[:REASONS_MAX], REMEDY)
    for place, name in enumerate(names):
        if first[name].whole:
            continue
        parts = link.gather(own.content(name))
        if link.rank == 0:
            placed = [(t.parts[name], parts[t.rank]) for t in tables if name in t.parts]
            values[place] = own.digest(name, first[name], memoryview(joined(placed)))
    weights = 0
    if link.rank == 0:
        told = fingerprint(struct.pack(">Q", value) for value in values)
        weights = spoiled_weights(told, own.plants)
    (everywhere,) = link.all_reduce([weights])
    return everywhere


def joined(parts: Sequence[tuple[TensorPart, bytes | memoryview]]) -> bytearray:
    """A tensor from its parts, byte for byte."""
    import numpy as np

    part = parts[0][0]
    before = after = 1
    for length in part.shape[: part.axis]:
        before *= length
    for length in part.shape[part.axis + 1 :]:
        after *= length
    row = after * DTYPE_BYTES[part.dtype]
    whole = bytearray(before * part.full * row)
    view = np.frombuffer(whole, np.uint8).reshape(before, part.full * row)
    for each, content in parts:
        cut = np.frombuffer(content, np.uint8).reshape(before, -1)
        view[:, each.start * row : each.stop * row] = cut
    return whole


def answer_alike(link: Communicator, table: RankTable, weights: int) -> None:
    """Every rank answers the artifact's question; all answers must be the known one (R17.1).

    Raises:
        InvalidField: this rank's is another. IdentityMismatch: another rank's is.
    """
    prompt, count = (table.prompt, len(table.golden)) if table.golden else (PROMPT, TOKENS)
    answer = golden_answer(weights, prompt, count)
    right = not table.golden or answer == table.golden
    (wrong,) = link.all_reduce([int(not right)])
    if not right:
        raise InvalidField("canary", list(answer), f"the known answer is {list(table.golden)}")
    if wrong:
        raise IdentityMismatch("canary", [f"{wrong} ranks answer otherwise"], REMEDY)
