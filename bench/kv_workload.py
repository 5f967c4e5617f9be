"""What the index bench plays: 64 engines with full prefix caches, as wire bytes for both sides.

Owns the made-up prompts, the engines' caches (least recently used, leaves first, as vLLM frees
them) and the packing: session messages for us, the JSON that Dynamo's binding takes for it. Both
sides get the same events in the same order, and the same questions between them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

import numpy as np

from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane.ports import Renewal
from readyplane.wire.router import renewal_to_proto

WORKERS = 64
COPIES = 4
DEPTH = 128
HEAD = 32
"""Blocks that the prompts of a family share, such as a system prompt and tools."""
FAMILY = 4
STEP_BLOCKS = 32
"""A prefill step of 2,048 tokens in blocks of 64."""
LOOKUP_EVERY = 8
CACHE_SHARE = 0.75
"""Of what a worker is told to store fits; the rest pushes older blocks out."""
PART_OPS = 1_500

FRAME = Struct("<BII").pack
EVENTS, LOOKUP = 0, 1


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: blocks pushed out, and blocks stored behind `parent` (position -1: none)."""

    worker: int
    removed: tuple[int, ...]
    stored: tuple[int, ...]
    parent: int


@dataclass(frozen=True, slots=True)
class Ask:
    """A lookup of one prompt."""

    blocks: tuple[int, ...]


class Blocks:
    """Hashes of every block: ours (and the engine's) chained, theirs also of the tokens alone."""

    def __init__(self, count: int, rng: np.random.Generator) -> None:
        self.chained: list[int] = rng.integers(1, 2**63, count, dtype=np.uint64).tolist()
        self.local: list[int] = rng.integers(1, 2**63, count, dtype=np.uint64).tolist()


class Cache:
    """One engine's prefix cache; what was used last goes last, and of a prompt its end goes first."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used: OrderedDict[int, None] = OrderedDict()

    def store(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Put blocks in; returns those that went."""
        over = len(self.used) + len(blocks) - self.size
        gone = tuple(self.used.popitem(last=False)[0] for _ in range(max(0, over)))
        self.used.update(dict.fromkeys(blocks))
        return gone

    def finish(self, prompt: Sequence[int]) -> None:
        """A prompt's blocks are free for others, its last one first."""
        for block in reversed(prompt):
            if block in self.used:
                self.used.move_to_end(block)


def make(announcements: int, seed: int) -> tuple[Blocks, list[Step | Ask]]:
    """Steps of all engines, mixed, with lookups between them."""
    rng = np.random.default_rng(seed)
    own = DEPTH - HEAD
    family_blocks = HEAD + FAMILY * own
    families = max(1, round(announcements / COPIES / family_blocks))
    blocks = Blocks(families * family_blocks, rng)
    todo: list[list[tuple[int, ...]]] = [[] for _ in range(WORKERS)]
    prompts = []
    for family in range(families):
        first = family * family_blocks
        head = tuple(range(first, first + HEAD))
        members = [
            head + tuple(range(first + HEAD + i * own, first + HEAD + (i + 1) * own))
            for i in range(FAMILY)
        ]
        prompts += members
        for worker in rng.choice(WORKERS, COPIES, replace=False):
            todo[worker] += members
    size = round(CACHE_SHARE * announcements / WORKERS)
    engines = [_engine(number, Cache(size), work, rng) for number, work in enumerate(todo)]
    return blocks, list(_mixed(engines, prompts, rng))


def _engine(
    number: int, cache: Cache, prompts: list[tuple[int, ...]], rng: np.random.Generator
) -> Iterator[Step]:
    for which in rng.permutation(len(prompts)):
        prompt = prompts[which]
        at = next((i for i, b in enumerate(prompt) if b not in cache.used), DEPTH)
        cache.finish(prompt[:at])  # what is found there is in use, and so is the last to go
        while at < DEPTH:
            part = prompt[at : at + STEP_BLOCKS]
            yield Step(number, cache.store(part), part, prompt[at - 1] if at else -1)
            at += len(part)
        cache.finish(prompt)


def _mixed(
    engines: list[Iterator[Step]], prompts: list[tuple[int, ...]], rng: np.random.Generator
) -> Iterator[Step | Ask]:
    living, count = [*engines], 0
    while living:
        which = int(rng.integers(len(living)))
        step = next(living[which], None)
        if step is None:
            living.pop(which)
            continue
        yield step
        count += 1
        if count % LOOKUP_EVERY == 0:
            yield Ask(prompts[int(rng.integers(len(prompts)))])


def write(
    blocks: Blocks, steps: Sequence[Step | Ask], folder: Path
) -> tuple[list[tuple[Path, Path]], int]:
    """Both sides' parts as files (ours, theirs), and how many blocks they tell of."""
    told, parts = 0, []
    sequences = [0] * WORKERS
    for number, start in enumerate(range(0, len(steps), PART_OPS)):
        ours, theirs = folder / f"ours-{number}", folder / f"theirs-{number}"
        with ours.open("wb") as here, theirs.open("wb") as there:
            for step in steps[start : start + PART_OPS]:
                if isinstance(step, Ask):
                    here.write(_asked(blocks.chained, step.blocks))
                    there.write(_asked(blocks.local, step.blocks))
                    continue
                sequences[step.worker] += 1
                told += len(step.removed) + len(step.stored)
                here.write(_framed(step.worker, _message(blocks, step, sequences[step.worker])))
                for document in _documents(blocks, step, sequences[step.worker]):
                    there.write(_framed(step.worker, document))
        parts.append((ours, theirs))
    return parts, told


def worker_id(number: int) -> str:
    """Name of a worker on our side."""
    return f"worker-{number}"


INCARNATION = "0f5ad4be"


def _message(blocks: Blocks, step: Step, sequence: int) -> bytes:
    events = []
    if step.removed:
        events.append(KvEvent("removed", tuple(blocks.chained[b] for b in step.removed)))
    parent = None if step.parent < 0 else blocks.chained[step.parent]
    events.append(KvEvent("stored", tuple(blocks.chained[b] for b in step.stored), parent))
    renewal = Renewal(
        worker_id(step.worker), INCARNATION, 1, kv_events=(KvEventBatch(sequence, tuple(events)),)
    )
    return renewal_to_proto(renewal).SerializeToString()


def _documents(blocks: Blocks, step: Step, sequence: int) -> Iterator[bytes]:
    if step.removed:
        gone = {"block_hashes": [blocks.chained[b] for b in step.removed]}
        yield _document(2 * sequence, {"removed": gone})
    stored = [
        {"block_hash": blocks.chained[b], "tokens_hash": blocks.local[b]} for b in step.stored
    ]
    parent = None if step.parent < 0 else blocks.chained[step.parent]
    yield _document(2 * sequence + 1, {"stored": {"parent_hash": parent, "blocks": stored}})


def _document(number: int, data: dict[str, object]) -> bytes:
    doc = {"event_id": number, "data": data, "dp_rank": 0}
    return json.dumps(doc, separators=(",", ":")).encode()


def _framed(worker: int, data: bytes) -> bytes:
    return FRAME(EVENTS, worker, len(data)) + data


def _asked(hashes: Sequence[int], blocks: Sequence[int]) -> bytes:
    data = np.array([hashes[b] for b in blocks], dtype="<u8").tobytes()
    return FRAME(LOOKUP, 0, len(data)) + data
