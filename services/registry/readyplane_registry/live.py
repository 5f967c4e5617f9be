"""Who holds bytes right now, and who is reading from whom: the port, and its memory twin.

Owns the promises of the live store: an announcement expires by the store's own clock (B152), an
earlier life of a source cannot speak for a later one (B144, B146), a reader's place is taken and
given back in one step and only by its owner (B145), and nothing is kept for ever. Handed to the
service; `redis` keeps the same promises, and one contract suite holds both to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from readyplane.core.errors import NotFound, Overloaded, StaleEpoch
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import Clock
from readyplane.ports import Source, Transfer
from readyplane_registry.sources import UNMEASURED, Bandwidth, learn, sample

Key = TypeVar("Key")

EXPIRED_SHOWN_S = 60.0
EARLIER_LIVES_S = 3600.0
REPORT_WINDOW_S = 600.0
ACCUSATIONS_S = 120.0
FORGET_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class LiveSource:
    """A source as the store sees it now; durations by the store's clock."""

    source: Source
    announced_ago_s: float
    expires_in_s: float
    readers: int
    measured: Bandwidth = UNMEASURED
    barred: str = ""
    barred_for_s: float = 0.0


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


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """A reader's place as it was taken."""

    transfer_id: str
    source_id: str
    source_incarnation: str
    digest: str
    tier: WeightTier
    worker_id: str
    incarnation: str
    readers_before: int
    accused_before: int = 0


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
            Overloaded: every place is taken, or the source is barred; `retry_after_s` says when.
        """
        ...

    async def transfer(self, transfer_id: str) -> TransferRecord | None:
        """A place by its name, for `REPORT_WINDOW_S` after it was last renewed."""
        ...

    async def release(self, transfer_id: str, report: Report) -> Released | None:
        """Give the place back and take the report in, both once; None for an unknown place.

        A bar counts only for the life of the source that the reader read from.
        """
        ...


def source_gone(source_id: str, why: str) -> NotFound:
    """The error for a source that cannot be read from any more."""
    return NotFound("source", source_id, f"{why}; plan the fetch anew")


def source_full(source_id: str, readers: int, retry_after_s: float) -> Overloaded:
    """The error for a source without a free place."""
    why = f"all {readers} reader places of source {source_id} are taken"
    return Overloaded(why, max(0.1, retry_after_s))


def source_barred(source_id: str, reason: str, for_s: float) -> Overloaded:
    """The error for a source that is not offered for a while."""
    return Overloaded(f"source {source_id} is not offered: {reason}", max(0.1, for_s))


def earlier_life(source: Source, current: str) -> StaleEpoch:
    """The error for an announcement that comes from a life that is over."""
    return StaleEpoch(
        f"incarnation of source {source.source_id}",
        source.incarnation,
        current,
        "a later life of this source has announced itself: stop giving bytes",
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
        )

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
        source_incarnation, tier, places_max = "", place.tier, place.readers_max
        if places_max is None:
            held = state.sources.get(place.source_id)
            if held is None or held.expires_s <= now:
                raise source_gone(place.source_id, "it has gone or did not announce itself again")
            if held.source.digest != place.digest:
                raise source_gone(place.source_id, f"it holds {held.source.digest}")
            source_incarnation, tier = held.source.incarnation, held.source.tier
            places_max = held.source.readers_max
        reason, until = state.bars.get(place.source_id, ("", 0.0))
        if until > now:
            raise source_barred(place.source_id, reason, until - now)
        request = (place.source_id, place.worker_id, place.incarnation, place.request_id)
        taken = self._reading(place.source_id, now)
        for mine in taken:
            if mine.request == request:
                mine.expires_s = now + place.ttl_s
                return Transfer(mine.record.transfer_id, place.ttl_s)
        if len(taken) >= places_max:
            raise source_full(place.source_id, len(taken), min(t.expires_s for t in taken) - now)
        record = TransferRecord(
            transfer_id=place.transfer_id,
            source_id=place.source_id,
            source_incarnation=source_incarnation,
            digest=place.digest,
            tier=tier,
            worker_id=place.worker_id,
            incarnation=place.incarnation,
            readers_before=len(taken) + 1,
        )
        mine = _Taken(record, request, now + place.ttl_s)
        state.taken[place.transfer_id] = mine
        state.places.setdefault(place.source_id, []).append(mine)
        return Transfer(place.transfer_id, place.ttl_s)

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
        if rate is not None and report.learn_rate:
            state.tiers[record.tier] = learn(
                state.tiers.get(record.tier, UNMEASURED), rate, weight=self._weight
            )
            if same and source is not None:
                source.measured = learn(source.measured, rate, weight=self._weight)
        if report.accuse:
            reader = (record.worker_id, record.incarnation)
            state.accused.setdefault(reader, {})[record.source_id] = now + ACCUSATIONS_S
        if report.bar_s > 0 and same:
            _reason, until = state.bars.get(record.source_id, ("", 0.0))
            if now + report.bar_s > until:
                state.bars[record.source_id] = (report.reason, now + report.bar_s)
            taken.barred = True
        return Released(first=True, barred=taken.barred, held=held_on)

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
        for accused in state.accused.values():
            _drop(accused, [k for k, until in accused.items() if until <= now])
        _drop(state.accused, [k for k, accused in state.accused.items() if not accused])


def _drop(table: dict[Key, Any], keys: Sequence[Key]) -> None:
    for key in keys:
        del table[key]
