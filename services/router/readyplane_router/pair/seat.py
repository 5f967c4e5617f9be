"""Seats: workers as the pairing brain sees them, and their times.

Owned and written by the service, read by the brain.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from functools import lru_cache

from readyplane.core.identity import KvFormat
from readyplane.core.profile import ClassProfile
from readyplane.core.worker import Role


class Times:
    """A class profile as plain lists: the same times as `ClassProfile`, some ten times quicker."""

    __slots__ = (
        "a",
        "b",
        "c",
        "kv_bytes_per_token",
        "max_batch_tokens",
        "name",
        "tail",
        "xs",
        "ys",
    )

    def __init__(self, profile: ClassProfile) -> None:
        """Sample the profile at its own points."""
        self.name = profile.name
        self.xs = [float(x) for x, _ in profile.prefill_points]
        self.ys = [profile.prefill_s(x) for x in self.xs]
        self.tail = profile.prefill_s(self.xs[-1] + 1.0) - self.ys[-1]
        self.a, self.b, self.c = profile.decode_coefficients_s()
        self.kv_bytes_per_token = profile.kv_bytes_per_token
        self.max_batch_tokens = profile.max_batch_tokens

    def prefill_s(self, tokens: float, cached: float = 0.0) -> float:
        """As `ClassProfile.prefill_s`."""
        if tokens <= 0:
            return 0.0
        alone = self._at(tokens)
        if cached <= 0:
            return alone
        return max(alone, self._at(tokens + cached) - self._at(cached))

    def _at(self, tokens: float) -> float:
        xs, ys = self.xs, self.ys
        if tokens <= xs[0]:
            return ys[0]
        if tokens >= xs[-1]:
            return ys[-1] + self.tail * (tokens - xs[-1])
        right = bisect_left(xs, tokens)
        left = right - 1
        share = (tokens - xs[left]) / (xs[right] - xs[left])
        return ys[left] + share * (ys[right] - ys[left])


@lru_cache(maxsize=64)
def times_of(profile: ClassProfile) -> Times:
    """The times of a profile; seats of one class share them, so that a request asks once."""
    return Times(profile)


@dataclass(slots=True)
class Seat:
    """A worker that passed the gate, as the pairing brain sees it. Owned by the service.

    Attributes:
        key: worker id and incarnation, the key of the prefix index.
        kv_key: text of the KV format; equal texts mean compatible.
        shut: why nothing new may go there; empty when open.
        sequences_cap: most sequences now (engine limit, or less while it is new or its reports are
            old).
        works: promised prefill work in seconds by reservation, oldest first, not yet done.
        head_since_s: when the oldest of `works` can have begun.
        prefill_factor, decode_factor: measured over predicted time of a prefill, of an iteration.
        sequences, kv_tokens, kv_blocks: promised by this router (both stages).
        decoding: sequences for which it is the decode end. transfers, sending: KV on its way here,
            and from here.
        prefill_tokens: promised here and not done; prefill_tokens_most: at most since the last
            report.
        other_*: promised by other routers. foreign_*: what the engine reports beyond promises.
        assigned: requests that still need it, a prefill end until its KV has been read.
        lent: a decode worker that also takes prompts; lent_until_s: what it took must be made up for
            until then, see `pair.lent_s`.
        bootstrap: where its engine meets another (`Serving.bootstrap`), empty for none.
        last_used: grows with every pick; ties go to the least recent.
    """

    worker_id: str
    incarnation: str
    key: str
    epoch: int
    role: Role
    node: str
    engine_url: str
    kv: KvFormat
    kv_key: str
    times: Times
    block_size: int
    kv_total_blocks: int
    max_num_seqs: int
    max_model_len: int
    shut: str = ""
    sequences_cap: int = 0
    works: dict[str, float] = field(default_factory=dict)
    work_s: float = 0.0
    head_since_s: float = 0.0
    prefill_factor: float = 1.0
    decode_factor: float = 1.0
    prefill_tokens: int = 0
    prefill_tokens_most: int = 0
    sequences: int = 0
    decoding: int = 0
    kv_tokens: float = 0.0
    kv_blocks: int = 0
    transfers: int = 0
    sending: int = 0
    assigned: int = 0
    other_work_s: float = 0.0
    other_sequences: int = 0
    other_blocks: int = 0
    other_tokens: int = 0
    foreign_tokens: int = 0
    foreign_sequences: int = 0
    foreign_blocks: int = 0
    lent: bool = False
    bootstrap: str = ""
    lent_until_s: float = 0.0
    last_used: int = 0

    def promise(
        self, times: Times, kv_total_blocks: int, prefill_factor: float, decode_factor: float
    ) -> None:
        """From now on it is that fast and holds so much; factors were measured against its times."""
        if times.name != self.times.name:
            self.prefill_factor, self.decode_factor = prefill_factor, decode_factor
        self.times, self.kv_total_blocks = times, kv_total_blocks

    def prefill_s(self, isl: float, cached: float = 0) -> float:
        """Seconds that this worker takes for a prompt of which it holds the first `cached` tokens."""
        return self.times.prefill_s(isl - cached, cached) * self.prefill_factor

    def remaining_s(self, now_s: float) -> float:
        """Seconds of promised prefill work not yet done.

        Only the oldest can have progressed, and by no more than itself: an engine that stands
        still never looks as if it had worked its queue off.
        """
        left = self.work_s + self.other_work_s
        for head_s in self.works.values():
            gone_s = now_s - self.head_since_s
            if gone_s > 0.0:
                left -= head_s if gone_s > head_s else gone_s
            break
        if self.foreign_tokens:
            left += self.times.prefill_s(self.foreign_tokens)
        return left if left > 0.0 else 0.0

    def free_blocks(self) -> int:
        """KV blocks neither promised nor, beyond that, reported as used."""
        return self.kv_total_blocks - self.kv_blocks - self.other_blocks - self.foreign_blocks

    def occupied(self) -> int:
        """Sequences promised or reported."""
        return self.sequences + self.other_sequences + self.foreign_sequences


def seat_key(worker_id: str, incarnation: str) -> str:
    """The key of one incarnation's seat and prefixes."""
    return f"{worker_id}\x1f{incarnation}"


def kv_key(kv: KvFormat) -> str:
    """A text that is equal for two KV formats exactly when they are compatible."""
    return "\x1f".join(f"{f.name}={getattr(kv, f.name)}" for f in fields(KvFormat))
