"""The live store in Redis or Valkey: `LiveStore` by the scripts of `live_scripts`.

Every key carries the hash tag `{registry}` and an expiry, so the store stays small and may be a
cluster. Redis 7.0 is enough. Handed to the service by `__main__`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from redis.asyncio import Redis

from readyplane.core.errors import ReadyplaneError
from readyplane.core.startup import WeightTier
from readyplane.kit.redis import redis_errors
from readyplane.ports import Source, Transfer
from readyplane_registry.live import (
    ACCUSATIONS_S,
    BAR_DOUBLINGS_MAX,
    BARS_REMEMBERED_S,
    BARS_SHOWN_MAX,
    CHAIN_MAX,
    EARLIER_LIVES_S,
    EXPIRED_SHOWN_S,
    REPORT_WINDOW_S,
    BarRecord,
    LiveSource,
    Place,
    Released,
    Report,
    TransferRecord,
    bar_record,
    granted,
)
from readyplane_registry.live_scripts import ACQUIRE, ANNOUNCE, RELEASE, WITHDRAW
from readyplane_registry.rates import Bandwidth, sample
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

PREFIX = "readyplane:{registry}:"


class RedisLive:
    """See `LiveStore`.

    Args:
        client: of `readyplane.kit.redis`.
        weight: share of a new sample in a moving average of bandwidth.
        prefix: of every key; holds a hash tag.
    """

    def __init__(self, client: Redis, *, weight: float, prefix: str = PREFIX) -> None:
        self._client: Any = client  # its stubs name every type that an answer might ever have
        self._weight, self._prefix = weight, prefix
        self._announce = client.register_script(ANNOUNCE)
        self._withdraw = client.register_script(WITHDRAW)
        self._acquire = client.register_script(ACQUIRE)
        self._release = client.register_script(RELEASE)

    def _key(self, *parts: str) -> str:
        return self._prefix + "|".join(parts)

    async def announce(self, source: Source, *, ttl_s: float) -> None:
        """See `LiveStore`."""
        name = source.source_id
        with redis_errors():
            answer = await self._announce(
                keys=[
                    self._key("src", name),
                    self._key("held", source.digest),
                    self._key("all"),
                    self._key("old", name, source.incarnation),
                    self._key("read", name),
                ],
                args=[
                    msgspec.json.encode(source),
                    source.incarnation,
                    source.digest,
                    str(source.tier),
                    source.readers_max,
                    _ms(ttl_s),
                    _ms(EXPIRED_SHOWN_S),
                    _ms(EARLIER_LIVES_S),
                    self._key("old", name, ""),
                    self._key("held", ""),
                    name,
                    source.worker_id,
                    int(source.partial),
                    int(source.draining),
                    source.layout_digest,
                ],
            )
        if answer[0] == b"earlier":
            raise earlier_life(source, answer[1].decode() or "a later one")

    async def withdraw(self, source_id: str) -> bool:
        """See `LiveStore`."""
        with redis_errors():
            answer = await self._withdraw(
                keys=[self._key("src", source_id), self._key("all"), self._key("read", source_id)],
                args=[source_id, self._key("held", "")],
            )
        return bool(answer)

    async def sources(self, digest: str) -> list[LiveSource]:
        """See `LiveStore`."""
        with redis_errors():
            names = await self._client.zrange(self._key("held", digest), 0, -1)
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.time()
                for name in sorted(n.decode() for n in names):
                    pipe.hgetall(self._key("src", name))
                    pipe.hgetall(self._key("bar", name))
                    pipe.zrange(self._key("read", name), 0, -1, withscores=True)
                found = await pipe.execute()
            now = _now_ms(found[0])
            held = [
                _live(src, bar, places, now)
                for src, bar, places in zip(found[1::3], found[2::3], found[3::3], strict=True)
                if src.get(b"digest") == digest.encode()
            ]
            async with self._client.pipeline(transaction=False) as pipe:
                for one in held:
                    up = self._key("up", one.source.worker_id, one.source.incarnation)
                    pipe.zrangebyscore(up, f"({now}", "+inf")
                above = await pipe.execute()
        return [
            replace(one, reads_from=_names(up)) if one.source.worker_id else one
            for one, up in zip(held, above, strict=True)
        ]

    async def count(self) -> tuple[int, int]:
        """See `LiveStore`."""
        with redis_errors():
            now = _now_ms(await self._client.time())
            live = await self._client.zcount(self._key("all"), f"({now}", "+inf")
            places = await self._client.zcount(self._key("places"), f"({now}", "+inf")
        return int(live), int(places)

    async def readers(self, source_id: str) -> int:
        """See `LiveStore`."""
        with redis_errors():
            now = _now_ms(await self._client.time())
            return int(await self._client.zcount(self._key("read", source_id), f"({now}", "+inf"))

    async def tiers(self) -> Mapping[WeightTier, Bandwidth]:
        """See `LiveStore`."""
        with redis_errors():
            held = await self._client.hgetall(self._key("tiers"))
        return {
            tier: _bandwidth(held, f"{tier}:")
            for tier in WeightTier
            if f"{tier}:mean".encode() in held
        }

    async def acquire(self, place: Place) -> Transfer:
        """See `LiveStore`."""
        name = place.source_id
        with redis_errors():
            answer = await self._acquire(
                keys=[
                    self._key("src", name),
                    self._key("read", name),
                    self._key("bar", name),
                    self._key("req", name, place.worker_id, place.incarnation, place.request_id),
                    self._key("tran", place.transfer_id),
                    self._key("places"),
                    self._key("up", place.worker_id, place.incarnation),
                ],
                args=[
                    place.digest,
                    place.transfer_id,
                    _ms(place.ttl_s),
                    _ms(REPORT_WINDOW_S),
                    "" if place.readers_max is None else place.readers_max,
                    str(place.tier),
                    name,
                    place.worker_id,
                    place.incarnation,
                    self._key("tran", ""),
                    place.source_incarnation,
                    place.layout_digest,
                    "" if place.readers_seen is None else place.readers_seen,
                    self._key("src", ""),
                    self._key("up", ""),
                    CHAIN_MAX,
                ],
            )
        if answer[0] == b"ok":
            source = msgspec.json.decode(answer[3], type=Source) if answer[3] else None
            return granted(place, answer[1].decode(), source, int(answer[2]))
        raise _refusal(place, answer)

    async def transfer(self, transfer_id: str) -> TransferRecord | None:
        """See `LiveStore`."""
        with redis_errors():
            held = await self._client.hgetall(self._key("tran", transfer_id))
            if not held:
                return None
            record = _record(transfer_id, held)
            now = _now_ms(await self._client.time())
            accused = await self._client.zrangebyscore(
                self._key("acc", record.worker_id, record.incarnation), f"({now}", "+inf"
            )
        others = sum(1 for name in accused if name.decode() != record.source_id)
        return replace(record, accused_before=others)

    async def release(self, transfer_id: str, report: Report) -> Released | None:
        """See `LiveStore`."""
        record = await self.transfer(transfer_id)
        if record is None:
            return None
        name = record.source_id
        rate = sample(
            transferred_bytes=report.transferred_bytes,
            elapsed_s=report.elapsed_s,
            readers_before=record.readers_before,
            readers_after=max(1, await self.readers(name)),
        )
        learns = report.learn_rate and not record.partial
        with redis_errors():
            answer = await self._release(
                keys=[
                    self._key("tran", transfer_id),
                    self._key("src", name),
                    self._key("read", name),
                    self._key("bar", name),
                    self._key("acc", record.worker_id, record.incarnation),
                    self._key("tiers"),
                    self._key("places"),
                    self._key("up", record.worker_id, record.incarnation),
                    self._key("bars"),
                ],
                args=[
                    transfer_id,
                    repr(rate) if rate is not None and learns else "",
                    repr(self._weight),
                    _ms(report.bar_s),
                    report.reason,
                    int(report.accuse),
                    _ms(ACCUSATIONS_S),
                    _ms(REPORT_WINDOW_S),
                    name,
                    msgspec.json.encode(bar_record(record, report.reason, report.bar_s)),
                    _ms(BARS_REMEMBERED_S),
                    BAR_DOUBLINGS_MAX,
                    BARS_SHOWN_MAX,
                ],
            )
        match answer[0]:
            case b"ok":
                return Released(first=True, barred=answer[1] == b"1", held=bool(answer[2]))
            case b"again":
                return Released(first=False, barred=answer[1] == b"1", held=False)
            case _:
                return None

    async def bars(self) -> list[BarRecord]:
        """See `LiveStore`."""
        with redis_errors():
            now = _now_ms(await self._client.time())
            held = await self._client.lrange(self._key("bars"), 0, BARS_SHOWN_MAX - 1)
        found = []
        for line in held:
            at, bar, text = line.split(b" ", 2)
            record = msgspec.json.decode(text, type=BarRecord)
            found.append(replace(record, bar_s=int(bar) / 1000, ago_s=(now - int(at)) / 1000))
        return found


def _refusal(place: Place, answer: list[Any]) -> ReadyplaneError:
    """The error that the script's answer stands for."""
    name = place.source_id
    match answer[0]:
        case b"full":
            return source_full(name, int(answer[1]), int(answer[2]) / 1000)
        case b"busier":
            return source_busier(name, int(answer[1]), place.readers_seen or 0)
        case b"barred":
            return source_barred(name, answer[1].decode(), int(answer[2]) / 1000)
        case b"leaves":
            return source_leaves(name)
        case b"circle":
            return source_circle(name)
        case b"life":
            return other_life(name, place.source_incarnation, answer[1].decode())
        case b"layout":
            return other_layout(name, place.layout_digest, answer[1].decode())
        case b"other":
            return source_gone(name, f"it holds {answer[1].decode()}")
        case _:
            return source_gone(name, "it has gone or did not announce itself again")


def _names(pairs: list[bytes]) -> tuple[str, ...]:
    """The sources of `TRANSFER|SOURCE` members."""
    return tuple(sorted(pair.decode().partition("|")[2] for pair in pairs))


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))


def _now_ms(time: tuple[int, int]) -> int:
    return int(time[0]) * 1000 + int(time[1]) // 1000


def _bandwidth(held: Mapping[bytes, bytes], prefix: str = "") -> Bandwidth:
    key = prefix.encode()
    if key + b"mean" not in held:
        return Bandwidth()
    return Bandwidth(
        float(held[key + b"mean"]), float(held[key + b"best"]), int(held[key + b"samples"])
    )


def _live(
    src: Mapping[bytes, bytes],
    bar: Mapping[bytes, bytes],
    places: list[tuple[bytes, float]],
    now: int,
) -> LiveSource:
    readers = sum(1 for _id, expires in places if expires > now)
    source: Any = msgspec.json.decode(src[b"json"], type=Source)
    until = int(bar.get(b"until", 0))
    barred = until > now
    return LiveSource(
        source=replace(source, readers=readers),
        announced_ago_s=(now - int(src[b"first"])) / 1000,
        expires_in_s=(int(src[b"expires"]) - now) / 1000,
        readers=readers,
        measured=_bandwidth(src),
        barred=bar[b"reason"].decode() if barred else "",
        barred_for_s=(until - now) / 1000 if barred else 0.0,
    )


def _record(transfer_id: str, held: Mapping[bytes, bytes]) -> TransferRecord:
    def text(name: str) -> str:
        return held[name.encode()].decode()

    return TransferRecord(
        transfer_id=transfer_id,
        source_id=text("source"),
        source_incarnation=text("life"),
        digest=text("digest"),
        tier=WeightTier(text("tier")),
        worker_id=text("worker"),
        incarnation=text("incarnation"),
        readers_before=int(text("before")),
        partial=held.get(b"partial") == b"1",
    )
