"""What goes into the engine model and what comes out: requests and events, as plain values.

Owns no behaviour; `core` makes the events. Times are seconds of the caller's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RequestMode(StrEnum):
    """Which part of a request this engine does.

    LOCAL: prefill and decode. REMOTE_DECODE (P leg): prefill and one token, then its KV is held
    for a reader. REMOTE_PREFILL (D leg): blocks are allocated, KV arrives, then decode.
    """

    LOCAL = "local"
    REMOTE_DECODE = "remote_decode"
    REMOTE_PREFILL = "remote_prefill"


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request as the engine sees it: lengths and block hashes, no token ids.

    Attributes:
        request_id: unique among the living. prompt_tokens: at least 1.
        output_tokens: tokens that will be emitted (the answer's true length), at least 1; a P leg
            emits 1 whatever is written here.
        block_hashes: sequence hashes of the full prompt blocks; empty when not known (then the
            prompt neither hits nor fills the prefix cache).
        output_hashes: sequence hashes of the full blocks after those, up to the end of the
            output, where known: they join the cache when the sequence ends.
        finish_reason: what `Finished` says at the end: `stop` or `length`.
    """

    request_id: str
    prompt_tokens: int
    output_tokens: int
    block_hashes: tuple[int, ...] = ()
    mode: RequestMode = RequestMode.LOCAL
    output_hashes: tuple[int, ...] = ()
    finish_reason: str = "length"


@dataclass(frozen=True, slots=True)
class TokensEmitted:
    """`count` more tokens of a request exist at `at_s`."""

    request_id: str
    count: int
    at_s: float


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The whole prompt is computed; `cached_tokens` came from the prefix cache."""

    request_id: str
    cached_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The request is over: `stop`, `length`, `abort`, `error` (its KV could not be loaded), or
    `moved` (it decoded, and another engine goes on with it).

    Attributes:
        output_tokens: tokens emitted in all. queue_s: submission to first scheduled.
        prefill_s: first scheduled to first token (on a D leg: until its KV is there).
        held: its KV waits for a reader (P leg, or moved).
    """

    request_id: str
    reason: str
    output_tokens: int
    at_s: float
    held: bool = False
    queue_s: float = 0.0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Preempted:
    """Its blocks were taken back; it waits and will be computed again."""

    request_id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class KvWanted:
    """A D leg has blocks now: bring the KV of `tokens` tokens, then call `kv_arrived`."""

    request_id: str
    tokens: int
    cached_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class KvStored:
    """Full blocks joined the prefix cache: hashes of blocks `first_block`… of a request."""

    request_id: str
    first_block: int
    block_hashes: tuple[int, ...]
    at_s: float


@dataclass(frozen=True, slots=True)
class KvRemoved:
    """Blocks left the prefix cache."""

    block_hashes: tuple[int, ...]
    at_s: float


@dataclass(frozen=True, slots=True)
class KvCleared:
    """The prefix cache is empty."""

    at_s: float


@dataclass(frozen=True, slots=True)
class KvExpired:
    """A held hand-over was not read in time; its blocks are free."""

    request_id: str
    at_s: float


EngineEvent = (
    TokensEmitted
    | PrefillDone
    | Finished
    | Preempted
    | KvWanted
    | KvStored
    | KvRemoved
    | KvCleared
    | KvExpired
)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges now, and counters since the engine began.

    Attributes:
        waiting: not scheduled yet. running: prefilling or decoding. loading: D legs whose KV is
            on its way. held: P legs whose KV waits for a reader.
        waiting_prefill_tokens: prompt tokens not yet computed, queued or running.
        kv_used_blocks: in use (held ones too, idle cached ones not). kv_cached_blocks: idle
            blocks that still hold a prefix.
        prompt_tokens_total: prompts taken in; computed_tokens_total: really prefilled;
            cached_tokens_total of queried_tokens_total: prefix cache hits.
    """

    waiting: int
    running: int
    loading: int
    held: int
    waiting_prefill_tokens: int
    kv_used_blocks: int
    kv_cached_blocks: int
    kv_total_blocks: int
    prompt_tokens_total: int
    computed_tokens_total: int
    queried_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    finished_total: int
    aborted_total: int
    preemptions_total: int
    iterations_total: int
    kv_expired_total: int
