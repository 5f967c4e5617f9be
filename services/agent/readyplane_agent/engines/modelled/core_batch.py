"""The decoding sequences of an engine, advanced together without touching each of them.

Owns requests on their way (`Sequence`), spans of equal iterations (`Span`) and the batch
(`DecodeBatch`): how many KV tokens it holds, which blocks the coming iterations need, who ends
when. A sequence stores where it joined; what it has emitted follows from the iteration counter.
`core` decides who joins and leaves.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import sqrt

from readyplane.core.errors import InvalidField
from readyplane_agent.engines.modelled.core_events import EngineRequest, RequestMode


class State(StrEnum):
    """Where a request is; HELD: finished, its KV waits for a reader."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    LOADING = "loading"
    ARRIVED = "arrived"
    DECODING = "decoding"
    HELD = "held"
    GONE = "gone"


class Sequence:
    """A request on its way. `blocks` are cached blocks in use; the rest of its blocks is private.

    `remote` while a D leg still hopes for its KV; once it came, a preempted one is computed here.
    """

    __slots__ = (
        "blocks",
        "cached",
        "computed",
        "emitted",
        "expires_s",
        "finish_at",
        "hashes",
        "join_at",
        "kv",
        "private",
        "published",
        "remote",
        "request",
        "shown",
        "started_s",
        "state",
        "submitted_s",
        "token_s",
        "total",
    )

    def __init__(self, request: EngineRequest, now_s: float) -> None:
        self.request = request
        self.state = State.WAITING
        self.hashes = request.block_hashes + request.output_hashes
        self.blocks: tuple[int, ...] = ()
        self.private = 0
        self.published = 0
        self.remote = request.mode is RequestMode.REMOTE_PREFILL
        self.computed = 0
        self.cached = 0
        self.total = request.prompt_tokens
        self.emitted = 0
        self.shown = 0
        self.kv = 0
        self.join_at = 0
        self.finish_at = 0
        self.submitted_s = now_s
        self.started_s: float | None = None
        self.token_s = 0.0
        self.expires_s = 0.0


def check(request: EngineRequest, *, block_size: int, kv_blocks: int) -> None:
    """Refuse what an engine of `kv_blocks` blocks can never hold.

    Raises:
        InvalidField: a length below 1, hashes that do not cover the prompt's full blocks, or more
            KV than the whole pool.
    """
    if request.prompt_tokens < 1:
        raise InvalidField("prompt_tokens", request.prompt_tokens, "give at least 1")
    if request.output_tokens < 1:
        raise InvalidField("output_tokens", request.output_tokens, "give at least 1")
    full, given = request.prompt_tokens // block_size, len(request.block_hashes)
    if given not in (0, full):
        raise InvalidField("block_hashes", given, f"give {full} hashes, or none")
    if request.output_hashes and given != full:
        raise InvalidField("output_hashes", "given", "give the prompt's block_hashes too")
    output = 1 if request.mode is RequestMode.REMOTE_DECODE else request.output_tokens
    if -(-(request.prompt_tokens + output - 1) // block_size) > kv_blocks:
        raise InvalidField(
            "prompt_tokens",
            request.prompt_tokens,
            f"keep prompt and output within {kv_blocks * block_size} KV tokens",
        )


def check_sizes(block_size: int, kv_blocks: int, max_num_seqs: int, max_batch_tokens: int) -> None:
    """Refuse an engine that could do nothing.

    Raises:
        InvalidField: a size that makes no sense.
    """
    for name, value, low in (
        ("block_size", block_size, 1),
        ("kv_blocks", kv_blocks, 1),
        ("max_num_seqs", max_num_seqs, 1),
        ("max_batch_tokens", max_batch_tokens, max_num_seqs + 1),
    ):
        if value < low:
            raise InvalidField(name, value, f"use a whole number of at least {low}")


@dataclass(slots=True)
class Span:
    """Iterations with one composition: the k-th ends at `end(k)`; `most` may run, `done` did.

    While nobody joins or leaves, decode iterations are skipped over in closed form: the k-th ends
    at `t0 + k*alpha + beta*k*(k-1)/2` (every sequence adds one KV token an iteration). The span
    keeps its origin however often it is looked at, so that stepping and jumping give the same
    floats.

    Attributes:
        chunk: prompt tokens that its one iteration computes, 0 for decode only.
        target: the iteration whose end is the next boundary, at `target_s`; 0: not worked out.
    """

    start_s: float
    alpha: float
    beta: float
    most: int
    chunk: int = 0
    done: int = 0
    target: int = 0
    target_s: float = 0.0

    def end(self, k: int) -> float:
        """When iteration `k` ends."""
        return self.start_s + k * self.alpha + self.beta * (k * (k - 1) / 2)

    def reached(self, now_s: float, most: int) -> int:
        """The most iterations (up to `most`) that have ended at `now_s`."""
        if now_s >= self.end(most):
            return most
        half = self.alpha - self.beta / 2
        left = max(0.0, now_s - self.start_s)
        if self.beta > 0:
            k = int((sqrt(half * half + 2 * self.beta * left) - half) / self.beta)
        else:
            k = int(left / self.alpha)
        k = min(k, most)
        while k < most and self.end(k + 1) <= now_s:
            k += 1
        while k > 0 and self.end(k) > now_s:
            k -= 1
        return k


class DecodeBatch:
    """The sequences that decode.

    A sequence with `kv` KV tokens at iteration `i` needs a new block for the next iteration when
    `kv` fills its blocks; `_phase` counts sequences by the iteration (modulo the block size) at
    which that is so.

    Attributes:
        members: in the order in which they joined. iteration: engine steps so far.
        kv_tokens: KV tokens of all members.
    """

    __slots__ = ("_finishes", "_phase", "_size", "_ties", "iteration", "kv_tokens", "members")

    def __init__(self, block_size: int) -> None:
        self.members: dict[Sequence, None] = {}
        self.iteration = 0
        self.kv_tokens = 0
        self._size = block_size
        self._phase = [0] * block_size
        self._finishes: list[tuple[int, int, Sequence]] = []
        self._ties = 0

    def join(self, sequence: Sequence, kv: int) -> None:
        """Start to decode with `kv` KV tokens in place."""
        sequence.state = State.DECODING
        sequence.kv, sequence.join_at = kv, self.iteration
        sequence.finish_at = self.iteration + sequence.request.output_tokens - sequence.emitted
        self.members[sequence] = None
        self.kv_tokens += kv
        self._phase[(self.iteration - kv) % self._size] += 1
        self._ties += 1
        heapq.heappush(self._finishes, (sequence.finish_at, self._ties, sequence))

    def leave(self, sequence: Sequence) -> None:
        """Stop to decode; what it emitted and holds is written into it."""
        grown = self.iteration - sequence.join_at
        self._phase[(sequence.join_at - sequence.kv) % self._size] -= 1
        sequence.emitted += grown
        sequence.kv += grown
        self.kv_tokens -= sequence.kv
        sequence.private = -(-sequence.kv // self._size) - len(sequence.blocks)
        del self.members[sequence]

    def step(self, count: int) -> None:
        """`count` iterations have ended."""
        self.kv_tokens += len(self.members) * count
        self.iteration += count

    def emitted(self, sequence: Sequence) -> int:
        """Tokens that a sequence has emitted by now."""
        if sequence.state is not State.DECODING:
            return sequence.emitted
        return sequence.emitted + self.iteration - sequence.join_at

    def due(self) -> Iterator[Sequence]:
        """Members that have emitted their last token."""
        finishes = self._finishes
        while finishes and finishes[0][0] <= self.iteration:
            finish_at, _, sequence = heapq.heappop(finishes)
            if sequence.state is State.DECODING and sequence.finish_at == finish_at:
                yield sequence

    def blocks_for(self, count: int) -> int:
        """Blocks that the members need for the next `count` iterations."""
        size = self._size
        cycles, rest = divmod(count, size)
        need = cycles * len(self.members)
        if rest:
            start = self.iteration % size
            phase = self._phase
            need += sum(phase[start : start + rest])
            if start + rest > size:
                need += sum(phase[: start + rest - size])
        return need

    def jump(self, available: int) -> int:
        """Iterations until a member ends or `available` blocks do not suffice any more (>= 1)."""
        while True:
            finish_at, _, sequence = self._finishes[0]
            if sequence.state is State.DECODING and sequence.finish_at == finish_at:
                break
            heapq.heappop(self._finishes)
        most = max(1, finish_at - self.iteration)
        if self.blocks_for(most) <= available:
            return most
        cycles = available // len(self.members)
        low = max(1, (cycles - 1) * self._size)
        high = min(most, (cycles + 1) * self._size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_for(middle) <= available:
                low = middle
            else:
                high = middle - 1
        return low

    def is_clean(self) -> bool:
        """Whether nothing is left of members that are gone; for tests."""
        return bool(self.members) or (self.kv_tokens == 0 and not any(self._phase))
