"""What each source of a load gave, how fast, and what went wrong (R7.1).

Owns the account of one load. `pipeline` adds each verified chunk, `loader` the sources in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from readyplane.core.startup import WeightTier
from readyplane.core.weight_bound import bound_words
from readyplane_agent.files import ReadWays
from readyplane_agent.ranges import Fault

# A shorter run of chunks says more about scheduling than about the way they came.
BANDWIDTH_CHUNKS = 6
# Of a load that waits long, the latest uses that gave nothing are kept, so many in all.
USES_MAX = 256


@dataclass(slots=True)
class SourceUse:
    """What one source did in one load.

    Attributes:
        times: (seconds, bytes) of each verified chunk, in the order they were done.
        ways: how the bytes of local files were read.
        way: how bytes of a peer came, where that is not as usual.
        again_bytes: of chunks at the end of the load that a slower source was bringing already.
        turned_away: the registry granted no place, since others are there; nothing was asked.
    """

    source_id: str
    tier: WeightTier
    chunks: int = 0
    bytes_read: int = 0
    elapsed_s: float = 0.0
    fault: Fault | None = None
    times: list[tuple[float, int]] = field(default_factory=list)
    ways: ReadWays = field(default_factory=ReadWays)
    way: str = ""
    again_bytes: int = 0
    turned_away: bool = False

    def done(self, size: int, now_s: float) -> None:
        """One more chunk was verified."""
        self.chunks += 1
        self.bytes_read += size
        self.times.append((now_s, size))

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """What the way from this source has shown to be able to: its fastest run of chunks."""
        times = sorted(self.times)
        best = 0.0
        for start in range(len(times) - BANDWIDTH_CHUNKS):
            run = times[start : start + BANDWIDTH_CHUNKS + 1]
            took_s = run[-1][0] - run[0][0]
            if took_s > 0:
                best = max(best, sum(size for _, size in run[1:]) / took_s)
        return best

    def text(self, now_s: float | None = None, start_s: float = 0.0) -> str:
        """One line for the segment's detail: bytes, rate, bound and efficiency (R7.1)."""
        took_s = self.elapsed_s if now_s is None else now_s - start_s
        rate = self.bytes_read / took_s if took_s > 0 else 0.0
        parts = [f"{self.tier} {self.source_id}: {self.bytes_read / 1e6:.1f} MB"]
        parts.append(f"{self.chunks} chunks, {rate / 1e9:.2f} GB/s")
        fastest = max(self.bandwidth_bytes_per_s, rate) if now_s is None else 0.0
        if bound := bound_words(self.bytes_read, fastest_bytes_per_s=fastest, took_s=took_s):
            parts.append(bound)
        if self.way:
            parts.append(self.way)
        if self.again_bytes:
            parts.append(f"{self.again_bytes / 1e6:.1f} MB read twice")
        if ways := self.ways.text():
            parts.append(ways)
        if self.fault is not None:
            parts.append(str(self.fault))
        return ", ".join(parts)


@dataclass(slots=True)
class Fetched:
    """A finished load: what each source gave, how long it took, where most bytes came from."""

    uses: list[SourceUse] = field(default_factory=list)
    elapsed_s: float = 0.0
    staging_peak_bytes: int = 0

    def add(self, use: SourceUse) -> None:
        """One more use begins; the oldest that gave nothing makes room for it."""
        if len(self.uses) >= USES_MAX:
            vain = (n for n, old in enumerate(self.uses) if old.fault and not old.bytes_read)
            if (oldest := next(vain, None)) is not None:
                del self.uses[oldest]
        self.uses.append(use)

    @property
    def tier(self) -> WeightTier:
        """Tier that gave most bytes."""
        given: dict[WeightTier, int] = {}
        for use in self.uses:
            given[use.tier] = given.get(use.tier, 0) + use.bytes_read
        return max(given, key=lambda t: given[t]) if given else WeightTier.UNKNOWN

    @property
    def again_bytes(self) -> int:
        """Bytes of chunks that two sources brought (`endgame`)."""
        return sum(use.again_bytes for use in self.uses)

    @property
    def faults(self) -> tuple[str, ...]:
        """What went wrong on the way, one line a source."""
        return tuple(f"{u.source_id}: {u.fault}" for u in self.uses if u.fault is not None)
