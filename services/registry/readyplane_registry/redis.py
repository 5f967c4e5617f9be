"""The live store in Redis or Valkey: `LiveStore` in a handful of Lua scripts.

Owns the keys and the scripts; each script judges by the server's own `TIME` (B152) and changes
all or nothing (B145). Every key carries the hash tag `{registry}` and an expiry, so the store
stays small and may be a cluster. Redis 7.0 is enough. Handed to the service by `__main__`.

Keys below `readyplane:{registry}:` (names hold no `|`), times in whole milliseconds of the server:

    src|ID       hash   json, incarnation, digest, tier, places, first, expires, mean, best, samples
    held|DIGEST  zset   source ids by expiry
    all          zset   source ids by expiry
    old|ID|LIFE  text   an earlier life of a source
    read|ID      zset   transfer ids by expiry
    places       zset   transfer ids by expiry, of all sources
    tran|ID      hash   a reader's place, kept for its report after it has ended
    req|…        text   transfer id of a request that may come again
    bar|ID       hash   reason, until
    acc|…        zset   sources that a reader has called corrupt, by the end of that memory
    tiers        hash   TIER:mean, TIER:best, TIER:samples
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from redis.asyncio import Redis

from readyplane.core.startup import WeightTier
from readyplane.kit.redis import redis_errors
from readyplane.ports import Source, Transfer
from readyplane_registry.live import (
    ACCUSATIONS_S,
    EARLIER_LIVES_S,
    EXPIRED_SHOWN_S,
    REPORT_WINDOW_S,
    LiveSource,
    Place,
    Released,
    Report,
    TransferRecord,
    earlier_life,
    source_barred,
    source_full,
    source_gone,
)
from readyplane_registry.sources import Bandwidth, sample

PREFIX = "readyplane:{registry}:"
NOW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""
# KEYS src held all old(this) read; ARGV json incarnation digest tier places ttl shown earlier
#   old-key-prefix held-key-prefix id
ANNOUNCE = (
    NOW
    + """
local was = redis.call('HMGET', KEYS[1], 'incarnation', 'digest')
if redis.call('EXISTS', KEYS[4]) == 1 then return {'earlier', was[1] or ''} end
if was[1] and was[1] ~= ARGV[2] then
  redis.call('SET', ARGV[9] .. was[1], '1', 'PX', ARGV[8])
end
if was[1] ~= ARGV[2] or was[2] ~= ARGV[3] then
  if was[2] then redis.call('ZREM', ARGV[10] .. was[2], ARGV[11]) end
  redis.call('DEL', KEYS[1], KEYS[5])
  redis.call('HSET', KEYS[1], 'first', now)
end
local expires = now + tonumber(ARGV[6])
local keep = tonumber(ARGV[6]) + tonumber(ARGV[7])
redis.call('HSET', KEYS[1], 'json', ARGV[1], 'incarnation', ARGV[2], 'digest', ARGV[3],
  'tier', ARGV[4], 'places', ARGV[5], 'expires', expires)
redis.call('PEXPIRE', KEYS[1], keep)
for _, key in ipairs({KEYS[2], KEYS[3]}) do
  redis.call('ZADD', key, expires, ARGV[11])
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now - tonumber(ARGV[7]))
  redis.call('PEXPIRE', key, keep)
end
return {'ok'}
"""
)
# KEYS src all read; ARGV id held-key-prefix
WITHDRAW = """
local digest = redis.call('HGET', KEYS[1], 'digest')
redis.call('DEL', KEYS[3])
if not digest then return 0 end
redis.call('ZREM', ARGV[2] .. digest, ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[1])
return 1
"""
# KEYS src read bar req tran(new) places; ARGV digest transfer-id ttl window own-places tier
#   source-id worker incarnation tran-key-prefix
ACQUIRE = (
    NOW
    + """
local incarnation, tier, places = '', ARGV[6], ARGV[5]
if places == '' then
  local src = redis.call('HMGET', KEYS[1], 'expires', 'digest', 'incarnation', 'tier', 'places')
  if not src[1] or tonumber(src[1]) <= now then return {'gone'} end
  if src[2] ~= ARGV[1] then return {'other', src[2]} end
  incarnation, tier, places = src[3], src[4], src[5]
end
local bar = redis.call('HMGET', KEYS[3], 'reason', 'until')
if bar[2] and tonumber(bar[2]) > now then return {'barred', bar[1], tonumber(bar[2]) - now} end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local ttl, window = tonumber(ARGV[3]), tonumber(ARGV[4])
local mine = redis.call('GET', KEYS[4])
local id = ARGV[2]
if mine and redis.call('ZSCORE', KEYS[2], mine) then
  id = mine
else
  local readers = redis.call('ZCARD', KEYS[2])
  if readers >= tonumber(places) then
    local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
    return {'full', readers, (tonumber(first[2]) or now) - now}
  end
  redis.call('HSET', KEYS[5], 'source', ARGV[7], 'life', incarnation, 'digest', ARGV[1],
    'tier', tier, 'worker', ARGV[8], 'incarnation', ARGV[9], 'before', readers + 1,
    'request', KEYS[4])
end
redis.call('ZADD', KEYS[2], now + ttl, id)
redis.call('PEXPIRE', KEYS[2], ttl)
redis.call('ZREMRANGEBYSCORE', KEYS[6], '-inf', now)
redis.call('ZADD', KEYS[6], now + ttl, id)
redis.call('PEXPIRE', KEYS[6], ttl)
redis.call('SET', KEYS[4], id, 'PX', ttl)
redis.call('PEXPIRE', ARGV[10] .. id, ttl + window)
return {'ok', id}
"""
)
# KEYS tran src read bar acc tiers places; ARGV transfer-id rate weight bar reason accuse memory
#   window source-id
RELEASE = (
    NOW
    + """
local was = redis.call('HMGET', KEYS[1], 'source', 'life', 'tier', 'released', 'barred', 'request')
if not was[1] then return {'unknown'} end
if was[4] then return {'again', was[5] or '0'} end
local expires = redis.call('ZSCORE', KEYS[3], ARGV[1])
local held = (expires and tonumber(expires) > now) and 1 or 0
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[7], ARGV[1])
redis.call('DEL', was[6])
local life = redis.call('HGET', KEYS[2], 'incarnation')
local same = life and life == was[2]
local function learn(key, prefix, rate)
  local k = redis.call('HMGET', key, prefix .. 'mean', prefix .. 'best', prefix .. 'samples')
  local mean, best, samples = rate, rate, 1
  if k[3] then
    mean = tonumber(k[1]) + tonumber(ARGV[3]) * (rate - tonumber(k[1]))
    best = math.max(tonumber(k[2]), rate)
    samples = tonumber(k[3]) + 1
  end
  redis.call('HSET', key, prefix .. 'mean', string.format('%.17g', mean),
    prefix .. 'best', string.format('%.17g', best), prefix .. 'samples', samples)
end
if ARGV[2] ~= '' then
  local rate = tonumber(ARGV[2])
  learn(KEYS[6], was[3] .. ':', rate)
  if same then learn(KEYS[2], '', rate) end
end
if ARGV[6] == '1' then
  redis.call('ZADD', KEYS[5], now + tonumber(ARGV[7]), ARGV[9])
  redis.call('PEXPIRE', KEYS[5], ARGV[7])
end
local barred = '0'
if tonumber(ARGV[4]) > 0 and same then
  local until_ms = now + tonumber(ARGV[4])
  local held_until = redis.call('HGET', KEYS[4], 'until')
  if not held_until or tonumber(held_until) < until_ms then
    redis.call('HSET', KEYS[4], 'reason', ARGV[5], 'until', until_ms)
    redis.call('PEXPIRE', KEYS[4], ARGV[4])
  end
  barred = '1'
end
redis.call('HSET', KEYS[1], 'released', '1', 'barred', barred)
redis.call('PEXPIRE', KEYS[1], ARGV[8])
return {'ok', barred, held}
"""
)


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
        return [
            _live(src, bar, places, now)
            for src, bar, places in zip(found[1::3], found[2::3], found[3::3], strict=True)
            if src.get(b"digest") == digest.encode()
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
                ],
            )
        match answer[0]:
            case b"ok":
                return Transfer(answer[1].decode(), place.ttl_s)
            case b"full":
                raise source_full(name, int(answer[1]), int(answer[2]) / 1000)
            case b"barred":
                raise source_barred(name, answer[1].decode(), int(answer[2]) / 1000)
            case b"other":
                raise source_gone(name, f"it holds {answer[1].decode()}")
            case _:
                raise source_gone(name, "it has gone or did not announce itself again")

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
                ],
                args=[
                    transfer_id,
                    "" if rate is None or not report.learn_rate else repr(rate),
                    repr(self._weight),
                    _ms(report.bar_s),
                    report.reason,
                    int(report.accuse),
                    _ms(ACCUSATIONS_S),
                    _ms(REPORT_WINDOW_S),
                    name,
                ],
            )
        match answer[0]:
            case b"ok":
                return Released(first=True, barred=answer[1] == b"1", held=bool(answer[2]))
            case b"again":
                return Released(first=False, barred=answer[1] == b"1", held=False)
            case _:
                return None


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
    )
