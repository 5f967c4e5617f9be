"""Who holds bytes right now, and who is reading from whom: the port, and its memory twin.

Owns the promises of the live store: an announcement expires by the store's own clock (B152), an
earlier life of a source cannot speak for a later one (B144, B146), a reader's place is taken and
given back in one step and only by its owner (B145), readers never read from one another in a
circle, and nothing is kept for ever. Handed to the service; `redis` keeps the same promises, and
one contract suite holds both to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from readyplane.core.startup import WeightTier
from readyplane.kit.clock import Clock
from readyplane.ports import Source, Transfer
from readyplane_registry.rates import UNMEASURED, Bandwidth, allowance, learn, sample
from readyplane_registry.refusals import (
    earlier_life,
    other_layout,
    other_life,
    source_barred,
    source_busier,
    source_circle,
    source_full,
    source_gone,
    source_leaves,
)

Key = TypeVar("Key")

EXPIRED_SHOWN_S = 60.0
EARLIER_LIVES_S = 3600.0
REPORT_WINDOW_S = 600.0
ACCUSATIONS_S = 120.0
FORGET_EVERY_S = 10.0
# A source that is barred again within this time is barred for twice as long, so often at most.
BARS_REMEMBERED_S = 3600.0
BAR_DOUBLINGS_MAX = 4
BARS_SHOWN_MAX = 200
# Readers behind readers: a chain is followed so far when a circle is looked for.
CHAIN_MAX = 64


@dataclass(frozen=True, slots=True)
class LiveSource:
    """A source as the store sees it now; durations by the store's clock.

    `reads_from` names the sources at which this source's own worker has a reader's place.
    """

    source: Source
    announced_ago_s: float
    expires_in_s: float
    readers: int
    measured: Bandwidth = UNMEASURED
    barred: str = ""
    barred_for_s: float = 0.0
    reads_from: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BarRecord:
    """Why a source was not offered for `bar_s`, on whose word, and how long ago that was."""

    source_id: str
    source_incarnation: str
    digest: str
    tier: WeightTier
    reader: str
    reason: str
    bar_s: float
    ago_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """What a reader asks for.

    Attributes:
        source_id, digest: from whom, what.
        worker_id, incarnation: of the reader.
        request_id: the same asks again for the same place, and renews it.
        transfer_id: the name of the place if it is a new one.
        readers_max: of a source that never announces itself (storage); None for all others.
        tier: likewise.
        source_incarnation: the life of the source that the reader expects; empty: any.
        layout_digest: in which its bytes must lie.
        readers_seen: the most readers that may be there already; None: what the source allows.
    """

    source_id: str
    digest: str
    worker_id: str
    incarnation: str
    request_id: str
    transfer_id: str
    ttl_s: float
    readers_max: int | None = None
    tier: WeightTier = WeightTier.UNKNOWN
    source_incarnation: str = ""
    layout_digest: str = ""
    readers_seen: int | None = None


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """A reader's place as it was taken; `partial`: the source was still loading then."""

    transfer_id: str
    source_id: str
    source_incarnation: str
    digest: str
    tier: WeightTier
    worker_id: str
    incarnation: str
    readers_before: int
    accused_before: int = 0
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """How a transfer went, and what that means for its source (`bar_s` 0: nothing)."""

    transferred_bytes: int
    elapsed_s: float
    bar_s: float = 0.0
    reason: str = ""
    accuse: bool = False
    learn_rate: bool = True


@dataclass(frozen=True, slots=True)
class Released:
    """What a release did.

    Attributes:
        first: False when the place had been given back before; then nothing was changed.
        barred: the source was barred by this transfer's report.
        held: the place was still the reader's, not expired.
    """

    first: bool
    barred: bool
    held: bool


class LiveStore(Protocol):
    """Live sources, readers' places, bars, and measured bandwidth."""

    async def announce(self, source: Source, *, ttl_s: float) -> None:
        """Announce or refresh. Raises StaleEpoch for an earlier life of this source."""
        ...

    async def withdraw(self, source_id: str) -> bool:
        """Forget the source and its readers' places; False when it was not known."""
        ...

    async def sources(self, digest: str) -> list[LiveSource]:
        """Sources of an artifact, those that expired lately and the barred ones included."""
        ...

    async def count(self) -> tuple[int, int]:
        """(live sources, readers' places taken), for the metrics."""
        ...

    async def readers(self, source_id: str) -> int:
        """Places taken at one source (used for storage, which announces nothing)."""
        ...

    async def tiers(self) -> Mapping[WeightTier, Bandwidth]:
        """Measured bandwidth of each tier that has been measured."""
        ...

    async def acquire(self, place: Place) -> Transfer:
        """Take or renew a reader's place.

        Raises:
            NotFound: no such source, or it expired, went, or holds another artifact.
            Overloaded: every place is taken, more readers are there than were seen, the source
                leaves, is barred, or reads from this reader; `retry_after_s` says when.
            StaleEpoch: another life of the source than the expected one.
            IdentityMismatch: its bytes lie in another layout.
        """
        ...

    async def transfer(self, transfer_id: str) -> TransferRecord | None:
        """A place by its name, for `REPORT_WINDOW_S` after it was last renewed."""
        ...

    async def release(self, transfer_id: str, report: Report) -> Released | None:
        """Give the place back and take the report in, both once; None for an unknown place.

        A bar counts only for the life of the source that the reader read from; barred again
        within `BARS_REMEMBERED_S`, a source is barred for twice as long.
        """
        ...

    async def bars(self) -> list[BarRecord]:
        """The latest bars, newest first, `BARS_SHOWN_MAX` at most."""
        ...


def granted(place: Place, transfer_id: str, source: Source | None, readers: int) -> Transfer:
    """The answer to a reader that has its place; `source` is None for storage."""
    if source is None:
        return Transfer(transfer_id, place.ttl_s, readers=readers)
    return Transfer(
        transfer_id,
        place.ttl_s,
        source.incarnation,
        source.layout_digest,
        allowance(source.bandwidth_bytes_per_s, source.slo_share, readers),
        readers,
    )


def bar_record(record: TransferRecord, reason: str, bar_s: float) -> BarRecord:
    """What is told of a bar later."""
    return BarRecord(
        record.source_id,
        record.source_incarnation,
        record.digest,
        record.tier,
        record.worker_id,
        reason,
        bar_s,
    )


@dataclass(slots=True)
class _Held:
    source: Source
    first_s: float
    expires_s: float
    measured: Bandwidth = UNMEASURED


@dataclass(slots=True)
class _Taken:
    record: TransferRecord
    request: tuple[str, str, str, str]
    expires_s: float
    released: bool = False
    barred: bool = False


@dataclass(slots=True)
class _State:
    sources: dict[str, _Held] = field(default_factory=dict)
    earlier: dict[tuple[str, str], float] = field(default_factory=dict)
    taken: dict[str, _Taken] = field(default_factory=dict)
    places: dict[str, list[_Taken]] = field(default_factory=dict)
    bars: dict[str, tuple[str, float]] = field(default_factory=dict)
    barred: dict[str, tuple[int, float]] = field(default_factory=dict)
    told: list[tuple[BarRecord, float]] = field(default_factory=list)
    accused: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    tiers: dict[WeightTier, Bandwidth] = field(default_factory=dict)


class MemoryLive:
    """The twin of `RedisLive`; each call runs without a break, so it is atomic.

    Args:
        clock: the store's clock, the only one that judges an expiry.
        weight: share of a new sample in a moving average of bandwidth.
    """

    def __init__(self, clock: Clock, *, weight: float) -> None:
        self._clock, self._weight = clock, weight
        self._state = _State()
        self._forget_at_s = 0.0

    async def announce(self, source: Source, *, ttl_s: float) -> None:
        """See `LiveStore`."""
        now, state = self._clock.monotonic_s(), self._state
        self._forget(now)
        if state.earlier.get((source.source_id, source.incarnation), 0.0) > now:
            held = state.sources.get(source.source_id)
            raise earlier_life(source, held.source.incarnation if held else "a later one")
        held = state.sources.get(source.source_id)
        if held is not None and held.source.incarnation != source.incarnation:
            state.earlier[source.source_id, held.source.incarnation] = now + EARLIER_LIVES_S
            held = None
        if held is not None and held.source.digest != source.digest:
            held = None
        if held is None:
            self._drop_readers(source.source_id)
            held = _Held(source, now, now)
            state.sources[source.source_id] = held
        held.source, held.expires_s = source, now + ttl_s

    async def withdraw(self, source_id: str) -> bool:
        """See `LiveStore`."""
        self._drop_readers(source_id)
        return self._state.sources.pop(source_id, None) is not None

    async def sources(self, digest: str) -> list[LiveSource]:
        """See `LiveStore`."""
        now = self._clock.monotonic_s()
        self._forget(now)
        return [
            self._seen(held, now)
            for _source_id, held in sorted(self._state.sources.items())
            if held.source.digest == digest and held.expires_s + EXPIRED_SHOWN_S >= now
        ]

    def _seen(self, held: _Held, now: float) -> LiveSource:
        source_id = held.source.source_id
        reason, until = self._state.bars.get(source_id, ("", 0.0))
        barred = until > now
        readers = len(self._reading(source_id, now))
        return LiveSource(
            source=replace(held.source, readers=readers),
            announced_ago_s=now - held.first_s,
            expires_in_s=held.expires_s - now,
            readers=readers,
            measured=held.measured,
            barred=reason if barred else "",
            barred_for_s=until - now if barred else 0.0,
            reads_from=self._reads_from(held.source, now),
        )

    def _reads_from(self, source: Source, now: float) -> tuple[str, ...]:
        """The sources at which a source's own worker has a place."""
        if not source.worker_id:
            return ()
        life = source.worker_id, source.incarnation
        return tuple(
            sorted(
                name
                for name in self._state.places
                for taken in self._reading(name, now)
                if (taken.record.worker_id, taken.record.incarnation) == life
            )
        )

    def _circle(self, source: Source, reader: tuple[str, str], now: float) -> bool:
        """True when the source reads, directly or behind others, from this reader."""
        seen: set[str] = set()
        ahead = [source.source_id]
        while ahead and len(seen) < CHAIN_MAX:
            name = ahead.pop()
            held = self._state.sources.get(name)
            if held is None or name in seen:
                continue
            seen.add(name)
            if (held.source.worker_id, held.source.incarnation) == reader:
                return True
            ahead += self._reads_from(held.source, now)
        return False

    async def count(self) -> tuple[int, int]:
        """See `LiveStore`."""
        now = self._clock.monotonic_s()
        live = sum(1 for held in self._state.sources.values() if held.expires_s > now)
        places = sum(len(self._reading(name, now)) for name in list(self._state.places))
        return live, places

    async def readers(self, source_id: str) -> int:
        """See `LiveStore`."""
        return len(self._reading(source_id, self._clock.monotonic_s()))

    def _reading(self, source_id: str, now: float) -> list[_Taken]:
        """The places of a source that are taken now."""
        held = self._state.places.get(source_id, [])
        held[:] = [taken for taken in held if not taken.released and taken.expires_s > now]
        return held

    async def tiers(self) -> Mapping[WeightTier, Bandwidth]:
        """See `LiveStore`."""
        return dict(self._state.tiers)

    async def acquire(self, place: Place) -> Transfer:
        """See `LiveStore`."""
        now, state = self._clock.monotonic_s(), self._state
        self._forget(now)
        source = self._offered(place, now)
        reason, until = state.bars.get(place.source_id, ("", 0.0))
        if until > now:
            raise source_barred(place.source_id, reason, until - now)
        request = (place.source_id, place.worker_id, place.incarnation, place.request_id)
        taken = self._reading(place.source_id, now)
        for mine in taken:
            if mine.request == request:
                mine.expires_s = now + place.ttl_s
                return granted(place, mine.record.transfer_id, source, len(taken))
        if source is not None and source.draining:
            raise source_leaves(place.source_id)
        places_max = source.readers_max if source is not None else place.readers_max or 0
        if len(taken) >= places_max:
            raise source_full(place.source_id, len(taken), min(t.expires_s for t in taken) - now)
        if place.readers_seen is not None and len(taken) > place.readers_seen:
            raise source_busier(place.source_id, len(taken), place.readers_seen)
        reader = place.worker_id, place.incarnation
        if source is not None and source.partial and self._circle(source, reader, now):
            raise source_circle(place.source_id)
        record = TransferRecord(
            transfer_id=place.transfer_id,
            source_id=place.source_id,
            source_incarnation=source.incarnation if source is not None else "",
            digest=place.digest,
            tier=source.tier if source is not None else place.tier,
            worker_id=place.worker_id,
            incarnation=place.incarnation,
            readers_before=len(taken) + 1,
            partial=source is not None and source.partial,
        )
        mine = _Taken(record, request, now + place.ttl_s)
        state.taken[place.transfer_id] = mine
        state.places.setdefault(place.source_id, []).append(mine)
        return granted(place, place.transfer_id, source, record.readers_before)

    def _offered(self, place: Place, now: float) -> Source | None:
        """The source that the reader means, None for storage; raises for another than expected."""
        if place.readers_max is not None:
            return None
        held = self._state.sources.get(place.source_id)
        if held is None or held.expires_s <= now:
            raise source_gone(place.source_id, "it has gone or did not announce itself again")
        source = held.source
        if source.digest != place.digest:
            raise source_gone(place.source_id, f"it holds {source.digest}")
        if place.source_incarnation not in {"", source.incarnation}:
            raise other_life(place.source_id, place.source_incarnation, source.incarnation)
        if place.layout_digest != source.layout_digest:
            raise other_layout(place.source_id, place.layout_digest, source.layout_digest)
        return source

    async def transfer(self, transfer_id: str) -> TransferRecord | None:
        """See `LiveStore`."""
        now = self._clock.monotonic_s()
        self._forget(now)
        taken = self._state.taken.get(transfer_id)
        if taken is None or taken.expires_s + REPORT_WINDOW_S < now:
            return None
        record = taken.record
        accused = self._state.accused.get((record.worker_id, record.incarnation), {})
        others = sum(1 for s, until in accused.items() if s != record.source_id and until > now)
        return replace(record, accused_before=others)

    async def release(self, transfer_id: str, report: Report) -> Released | None:
        """See `LiveStore`."""
        now, state = self._clock.monotonic_s(), self._state
        self._forget(now)
        taken = state.taken.get(transfer_id)
        if taken is None or taken.expires_s + REPORT_WINDOW_S < now:
            return None
        if taken.released:
            return Released(first=False, barred=taken.barred, held=False)
        record = taken.record
        held_on = taken.expires_s > now
        rate = sample(
            transferred_bytes=report.transferred_bytes,
            elapsed_s=report.elapsed_s,
            readers_before=record.readers_before,
            readers_after=max(1, len(self._reading(record.source_id, now))),
        )
        taken.released, taken.expires_s = True, now
        source = state.sources.get(record.source_id)
        same = source is not None and source.source.incarnation == record.source_incarnation
        if rate is not None and report.learn_rate and not record.partial:
            state.tiers[record.tier] = learn(
                state.tiers.get(record.tier, UNMEASURED), rate, weight=self._weight
            )
            if same and source is not None:
                source.measured = learn(source.measured, rate, weight=self._weight)
        if report.accuse:
            reader = (record.worker_id, record.incarnation)
            state.accused.setdefault(reader, {})[record.source_id] = now + ACCUSATIONS_S
        if report.bar_s > 0 and same:
            self._bar(record, report, now)
            taken.barred = True
        return Released(first=True, barred=taken.barred, held=held_on)

    def _bar(self, record: TransferRecord, report: Report, now: float) -> None:
        state = self._state
        times, remembered = state.barred.get(record.source_id, (0, 0.0))
        times = times if remembered > now else 0
        bar_s = report.bar_s * 2 ** min(times, BAR_DOUBLINGS_MAX)
        state.barred[record.source_id] = times + 1, now + bar_s + BARS_REMEMBERED_S
        _reason, until = state.bars.get(record.source_id, ("", 0.0))
        if now + bar_s > until:
            state.bars[record.source_id] = (report.reason, now + bar_s)
        state.told.insert(0, (bar_record(record, report.reason, bar_s), now))
        del state.told[BARS_SHOWN_MAX:]

    async def bars(self) -> list[BarRecord]:
        """See `LiveStore`."""
        now = self._clock.monotonic_s()
        return [replace(record, ago_s=now - at) for record, at in self._state.told]

    def _drop_readers(self, source_id: str) -> None:
        now = self._clock.monotonic_s()
        for taken in self._reading(source_id, now):
            taken.expires_s = now

    def _forget(self, now: float) -> None:
        """Nothing is kept for ever; the tables hold what the windows above admit."""
        if now < self._forget_at_s:
            return
        self._forget_at_s = now + FORGET_EVERY_S
        _drop(
            self._state.places, [k for k in list(self._state.places) if not self._reading(k, now)]
        )
        state = self._state
        _drop(
            state.sources,
            [k for k, h in state.sources.items() if h.expires_s + EXPIRED_SHOWN_S < now],
        )
        _drop(state.earlier, [k for k, until in state.earlier.items() if until <= now])
        _drop(
            state.taken, [k for k, t in state.taken.items() if t.expires_s + REPORT_WINDOW_S < now]
        )
        _drop(state.bars, [k for k, (_why, until) in state.bars.items() if until <= now])
        _drop(state.barred, [k for k, (_n, until) in state.barred.items() if until <= now])
        for accused in state.accused.values():
            _drop(accused, [k for k, until in accused.items() if until <= now])
        _drop(state.accused, [k for k, accused in state.accused.items() if not accused])


def _drop(table: dict[Key, Any], keys: Sequence[Key]) -> None:
    for key in keys:
        del table[key]
