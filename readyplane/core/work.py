"""What is asked: one request's shape, block hashes of its prompt, and joint ISL/OSL knowledge.

Token work, never request counts, is the unit of demand (R4).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING

import xxhash

from readyplane.core.errors import InvalidField

if TYPE_CHECKING:  # imported where it is used: agents and engines do without
    import numpy as np
    from numpy.typing import NDArray

_BIG_ENDIAN = array("I", [1]).tobytes()[0] == 0
HASH_SEED = 1337
_TWO_HASHES = Struct("<QQ").pack
OSL_EDGES: tuple[int, ...] = (0, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
ISL_EDGES: tuple[int, ...] = (0, 128, 512, 1024, 2048, 4096, 8192, 32768)


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets of a request class: seconds to the first token, seconds per later token."""

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What the router must know of a request to pair it.

    Attributes:
        request_id: unique id, given by the gateway. model: model name.
        token_ids: prompt as packed little-endian uint32 (4 bytes a token); may be empty when
            `block_hashes` are given.
        block_hashes: sequence hashes of the full prompt blocks for `block_size`.
        isl: prompt tokens. max_tokens: output bound, None when the client gave none.
        priority: larger is more important. tenant: fairness key.
        slo: overrides the policy's targets when given.
        lora, cache_salt: part of the block hash.
    """

    request_id: str
    model: str
    isl: int
    token_ids: bytes = b""
    block_hashes: tuple[int, ...] = ()
    max_tokens: int | None = None
    priority: int = 0
    tenant: str = ""
    slo: Slo | None = None
    lora: str = ""
    cache_salt: str = ""


class EventKind(StrEnum):
    """What happened to a reserved request."""

    PREFILL_DONE = "prefill_done"
    FIRST_TOKEN = "first_token"  # noqa: S105 - not a password
    PROGRESS = "progress"
    FINISHED = "finished"
    ABORTED = "aborted"
    LEG_FAILED = "leg_failed"


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """A fact about a reserved request, told by the gateway (batched).

    Attributes:
        reservation_id: from the pair. kind: what happened.
        ttft_s: arrival at the gateway to first token. tpot_s: mean time per later token.
        output_tokens: tokens emitted so far. cached_tokens: prefix tokens P did not compute.
        failed_worker_id: for LEG_FAILED. attained: both SLOs met, for FINISHED.
        detail: error text for ABORTED and LEG_FAILED.
    """

    reservation_id: str
    kind: EventKind
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int | None = None
    failed_worker_id: str = ""
    attained: bool | None = None
    detail: str = ""


def reservation_id_of(request_id: str, replaces: str = "") -> str:
    """The reservation that a route call makes: `<request_id>.0`, `.1` when it replaces that, ….

    Deterministic, so that the same call finds the same reservation at any router, and a caller
    that did not get its answer can name what it may have been promised.
    """
    if not replaces:
        return f"{request_id}.0"
    head, _, attempt = replaces.rpartition(".")
    if head == request_id and attempt.isdigit():
        return f"{request_id}.{int(attempt) + 1}"
    return f"{request_id}.1"


def bootstrap_room(*names: str) -> int:
    """The number under which two engines meet for one request (0 to 2^53-1: a JSON number).

    Args:
        names: of the reservation and of both incarnations, so that who asks again gets the same,
            and a pair that takes another's place gets another.
    """
    return xxhash.xxh3_64_intdigest("\x1f".join(names).encode()) >> 11


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as packed little-endian uint32.

    Raises:
        InvalidField: an id below 0 or above 2**32 - 1.
    """
    try:
        packed = array("I", token_ids)
        if _BIG_ENDIAN:
            packed.byteswap()
        return packed.tobytes()
    except (OverflowError, ValueError, TypeError) as error:
        raise InvalidField(
            "prompt", str(token_ids)[:60], "use token ids from 0 to 4294967295"
        ) from error


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Block hashes as packed little-endian uint64."""
    packed = array("Q", hashes)
    if _BIG_ENDIAN:
        packed.byteswap()
    return packed.tobytes()


def unpack_hashes(data: bytes) -> tuple[int, ...]:
    """Packed little-endian uint64 as block hashes.

    Raises:
        ValueError: not a whole number of them.
    """
    packed = array("Q", data)
    if _BIG_ENDIAN:
        packed.byteswap()
    return tuple(packed)


def hash_seed(*, lora: str = "", cache_salt: str = "") -> int:
    """Seed of the block hash: adapters and tenants never share a key (field report B96)."""
    seed = HASH_SEED
    if lora:
        seed += xxhash.xxh3_64_intdigest(lora.encode())
    if cache_salt:
        seed += xxhash.xxh3_64_intdigest(cache_salt.encode(), seed=1)
    return seed & 0xFFFFFFFFFFFFFFFF


def sequence_hashes(
    token_ids: bytes, block_size: int, *, lora: str = "", cache_salt: str = ""
) -> tuple[int, ...]:
    """Chained XXH3-64 hashes of the full blocks of a prompt (the scheme that Dynamo publishes).

    Args:
        token_ids: packed little-endian uint32. block_size: tokens a block.

    Returns:
        One unsigned 64-bit hash a full block; a partial tail is not hashed.
    """
    blocks = len(token_ids) // (4 * block_size)
    if not blocks:
        return ()
    seed = hash_seed(lora=lora, cache_salt=cache_salt)
    digest, two = xxhash.xxh3_64_intdigest, _TWO_HASHES
    cut = _blocks_of(4 * block_size)
    whole = memoryview(token_ids)[: blocks * 4 * block_size]
    first, *others = [digest(block, seed) for (block,) in cut(whole)]
    out, value = [first], first
    for local in others:
        value = digest(two(value, local), HASH_SEED)
        out.append(value)
    return tuple(out)


@lru_cache(maxsize=16)
def _blocks_of(width: int) -> Callable[[memoryview], Iterator[tuple[bytes]]]:
    """Cuts a prompt into blocks of so many bytes: no step of it is one of the interpreter's."""
    return Struct(f"{width}s").iter_unpack


def _no_counts() -> NDArray[np.float64]:
    import numpy as np

    return np.zeros((len(ISL_EDGES), len(OSL_EDGES)))


@dataclass(slots=True)
class LengthStats:
    """Joint ISL/OSL counts that age, and what they say about remaining output (R4.1).

    Rows are ISL bins of `ISL_EDGES`, columns OSL bins of `OSL_EDGES`. Mutable on purpose: it is
    a counter owned by one router; brains get `snapshot()`.
    """

    counts: NDArray[np.float64] = field(default_factory=_no_counts)

    def add(self, isl: int, osl: int) -> None:
        """Count one finished request."""
        self.counts[_bin(ISL_EDGES, isl), _bin(OSL_EDGES, osl)] += 1.0

    def age(self, factor: float) -> None:
        """Multiply every count, so that old requests fade."""
        self.counts *= factor

    def snapshot(self) -> tuple[tuple[float, ...], ...]:
        """The counts as plain tuples."""
        return tuple(map(tuple, self.counts.tolist()))


def _bin(edges: Sequence[int], value: int) -> int:
    return max(0, bisect_right(edges, value) - 1)


def place_of(isl: int, osl: int) -> tuple[int, int]:
    """(row, column) of a request in joint counts."""
    return _bin(ISL_EDGES, isl), _bin(OSL_EDGES, osl)


def with_running(
    finished: NDArray[np.float64], running: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Joint counts in which requests that still run stand where they may end.

    Lengths of finished requests alone are those of the short ones: while load or lengths grow, the
    long ones still run. Each running request is spread over the lengths beyond what it has emitted,
    in proportion to what is known to end there (redistribution to the right, which is the
    Kaplan-Meier estimate): by requests with such prompts, else by all. Where nobody was known to go on
    for so long, it takes as long again.

    Args:
        finished: joint ISL/OSL counts. running: the same by output tokens emitted so far.
    """
    whole = finished.copy()
    everybody = finished.sum(axis=0)
    for row, own in zip(running, whole, strict=True):
        for column in row.nonzero()[0].tolist():
            # Of the column's own ends, about half lie beyond what these have emitted.
            for known in (own, everybody):
                beyond = known[column:].copy()
                beyond[0] *= 0.5
                total = float(beyond.sum())
                if total > 1e-9:
                    own[column:] += row[column] * beyond / total
                    break
            else:
                own[_bin(OSL_EDGES, 2 * OSL_EDGES[column])] += row[column]
    return whole


@lru_cache(maxsize=1)
def _osl_bins() -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Upper end, middle and width of each OSL bin."""
    import numpy as np

    edges = np.array(OSL_EDGES, dtype=float)
    upper = np.append(edges[1:], edges[-1] * 2)
    return upper, (edges + upper) / 2, np.maximum(upper - edges, 1.0)


def expected_remaining(
    counts: Sequence[Sequence[float]] | NDArray[np.float64],
    *,
    isl: int,
    emitted: int,
    cap: int | None,
    prior_mean: float = 256.0,
    quantile: float | None = None,
) -> float:
    """Output tokens still to come, given those already emitted.

    Args:
        counts: joint ISL/OSL counts. isl: prompt tokens. emitted: output tokens so far.
        cap: `max_tokens`, None when not known. prior_mean: used where nothing was seen.
        quantile: None for the mean, else that quantile of the conditional distribution.

    Returns:
        At least 1 while the request runs; never above the cap. Unknown falls back to the prior,
        conditional on the emitted tokens (memoryless), so a long answer is never predicted to be
        over.
    """
    import numpy as np

    row = np.asarray(counts[_bin(ISL_EDGES, isl)], dtype=float)
    if row.sum() < 20:
        row = np.asarray(counts, dtype=float).sum(axis=0)
    upper, middle, width = _osl_bins()
    alive = np.minimum(np.maximum((upper - emitted) / width, 0.0), 1.0)
    weight = row * alive
    total = float(weight.sum())
    if total < 1.0:
        value = prior_mean if quantile is None else prior_mean * -float(np.log1p(-quantile))
    else:
        left = np.maximum(np.maximum(middle, (emitted + upper) / 2) - emitted, 1.0)
        if quantile is None:
            value = float((weight * left).sum() / total)
        else:
            order = np.cumsum(weight) / total
            value = float(left[int(np.searchsorted(order, quantile))])
    if cap is not None:
        value = min(value, float(cap - emitted))
    return max(1.0, value)
