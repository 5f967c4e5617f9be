"""The shared state in Redis 7.0, Redis 8 or Valkey.

Owns the key layout. All keys of one model share a hash tag, so that the one script (`store.lua`)
can take both sides of a pair at once. Every call is bounded by `call_timeout_s`; whatever goes
wrong with the store is raised as `Unavailable`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import redis.asyncio
from redis.exceptions import NoScriptError

from readyplane.core.worker import WorkerState
from readyplane.kit.redis import Bounded, facts_of, is_cluster, redis_errors
from readyplane_router import lease
from readyplane_router.bundle import BUNDLE_OPERATIONS_MAX, Bundles
from readyplane_router.channel import Channel
from readyplane_router.seats import SWEEP_MAX, Side, Take, Taken, Use
from readyplane_router.signal_store import Kept
from readyplane_router.store import (
    KV_LOG_BATCHES_MAX,
    KV_PAGE_BATCHES,
    Change,
    KvEntry,
    Record,
    Renew,
    Vitals,
)

SCRIPT = (Path(__file__).parent / "store.lua").read_text()
SCRIPT_SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()  # as Redis names it
PREFIX = "rp"
MODELS = f"{PREFIX}:models"
ROUTERS = f"{PREFIX}:routers"
LEADERS = f"{PREFIX}:leaders"
CHANGES = f"{PREFIX}:changes"
PARTS = ("records", "epochs", "leases", "vitals", "seats", "reservations", "expiries")
AMOUNTS = ("s", "b", "w", "t")
GRANT_TRIES_MAX = 8
PUT_BACK_MAX = 200
AT_ONCE_MAX = 32
"""Calls under way together where a whole fleet is concerned; fewer than there are connections."""
SNAPSHOT_TTL_S = 3_600

_records = msgspec.json.Decoder(Record)
_vitals = msgspec.json.Decoder(Vitals)
_leases = msgspec.json.Decoder(lease.Held)
_encode = msgspec.json.Encoder().encode


class RedisStore:
    """Shared state of all routers on one Redis. Built with `readyplane.kit.redis.connect`."""

    shared = True

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        call_timeout_s: float = 1.0,
        takes_within_s: float = 0.0,
    ) -> None:
        """Use a client that returns bytes; `aclose` closes it. `takes_within_s`: how long a take
        may wait for others to share its call.
        """
        self._redis = client
        self._takes_within_s = takes_within_s
        self._timeout_s = call_timeout_s
        self._channel = Channel(client, silent_s=call_timeout_s)
        self._bundles = Bundles(self._send_bundle)
        self._clustered = is_cluster(client)
        self._known: set[str] = set()

    async def identity(self) -> str:
        servers = await self._bounded(facts_of(self._redis, "server"))
        self._channel.life = str(servers[0]["run_id"])
        return "+".join(str(server["run_id"]) for server in servers)

    async def attend(self, router_id: str, *, ttl_s: float) -> int:
        async def call() -> int:
            seconds, micros = await self._redis.time()
            now_s = seconds + micros / 1e6
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.zadd(ROUTERS, {router_id: now_s + ttl_s})
                pipe.zremrangebyscore(ROUTERS, "-inf", now_s)
                pipe.zcard(ROUTERS)
                return int((await pipe.execute())[2])

        return int(await self._bounded(call()))

    async def fence(self, model: str, leader_epoch: int) -> int:
        async def call() -> int:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.zadd(LEADERS, {model: leader_epoch}, gt=True)
                pipe.zscore(LEADERS, model)
                return int((await pipe.execute())[1])

        return int(await self._bounded(call()))

    async def put_ration(self, model: str, packed: bytes, *, ttl_s: float) -> None:
        await self._bounded(self._redis.set(_ration_key(model), packed, px=_ms(ttl_s)))

    async def ration(self, model: str) -> tuple[bytes, float] | None:
        async def call() -> tuple[bytes | None, int]:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.get(_ration_key(model))
                pipe.pttl(_ration_key(model))
                packed, left_ms = await pipe.execute()
                return packed, int(left_ms)

        packed, left_ms = await self._bounded(call())
        return (packed, left_ms / 1000) if packed is not None and left_ms > 0 else None

    async def put_signals(self, router_id: str, packed: bytes, *, ttl_s: float) -> None:
        await self._bounded(self._redis.set(_signals_key(router_id), packed, px=_ms(ttl_s)))

    async def signals(self) -> Kept:
        async def call() -> Kept:
            seconds, micros = await self._redis.time()
            after = f"({seconds + micros / 1e6}"
            found: list[Any] = await self._redis.zrangebyscore(ROUTERS, after, "+inf")
            ids = [raw.decode() for raw in found]
            async with self._redis.pipeline(transaction=True) as pipe:
                for router_id in ids:
                    pipe.get(_signals_key(router_id))
                    pipe.pttl(_signals_key(router_id))
                told = await pipe.execute()
            return {
                router_id: (packed, left_ms / 1000) if packed is not None and left_ms > 0 else None
                for router_id, packed, left_ms in zip(ids, told[::2], told[1::2], strict=True)
            }

        kept: Kept = await self._bounded(call())
        return kept

    async def grant(self, record: Record, *, ttl_s: float) -> Record | lease.Lost | lease.Stale:
        offer = record.offer
        for _ in range(GRANT_TRIES_MAX):
            found, current = await self._held(offer.model, offer.worker_id)
            verdict = lease.grant(
                current,
                worker_id=offer.worker_id,
                incarnation=offer.incarnation,
                epoch=record.epoch,
                ttl_s=ttl_s,
                now_s=0.0,
            )
            if not isinstance(verdict, lease.Granted):
                return verdict
            data = b"" if verdict.repeated else _encode(record)
            if await self._cas(offer.model, found, verdict.held, ttl_s, data, fresh=True):
                if not verdict.repeated:
                    return record
                stored = await self.worker(offer.model, offer.worker_id)
                if stored is not None:
                    return stored[0]
        return lease.Lost("others keep registering this worker id at the same time")

    async def restore(self, record: Record, *, ttl_s: float, vitals: Vitals | None) -> bool:
        offer = record.offer
        for _ in range(GRANT_TRIES_MAX):
            found, current = await self._held(offer.model, offer.worker_id)
            if current is not None and current.epoch > record.epoch:
                return False
            past = current.past if current is not None else ()
            held = lease.Held(
                offer.worker_id, offer.incarnation, record.epoch, ttl_s, 0.0, past=past
            )
            if await self._cas(offer.model, found, held, ttl_s, _encode(record), fresh=False):
                if vitals is not None:
                    await self.renew(
                        [Renew(offer.model, offer.worker_id, record.epoch, ttl_s, vitals)]
                    )
                return True
        return False

    async def put(self, record: Record) -> bool:
        return await self._record("put", record)

    async def end(self, record: Record) -> bool:
        return await self._record("finish", record)

    async def forget(self, model: str, worker_id: str, epoch: int) -> None:
        await self._call("forget", model, worker_id, epoch)

    async def renew(self, items: Sequence[Renew]) -> list[str]:
        by_model: dict[str, list[int]] = {}
        for index, item in enumerate(items):
            by_model.setdefault(item.model, []).append(index)
        out = [""] * len(items)
        for model, indexes in by_model.items():
            args: list[Any] = []
            for index in indexes:
                item = items[index]
                vitals = b"" if item.vitals is None else _encode(item.vitals)
                args += [item.worker_id, item.epoch, _ms(item.ttl_s), vitals]
            answers = await self._call("renew", model, *args)
            for index, answer in zip(indexes, answers, strict=True):
                out[index] = answer.decode()
        return out

    async def expire(self) -> list[Change]:
        out = []
        for model in await self._models():
            over = [raw.decode() for raw in await self._call("expire", model, SWEEP_MAX)]
            for start in range(0, len(over), AT_ONCE_MAX):
                some = over[start : start + AT_ONCE_MAX]
                await asyncio.gather(*(self._write_off(model, worker_id) for worker_id in some))
            out += [Change(model, worker_id) for worker_id in over]
        return out

    async def _write_off(self, model: str, worker_id: str) -> None:
        found = await self.worker(model, worker_id)
        if found is not None:
            gone = _encode(replace(found[0], state=WorkerState.GONE))
            await self._call("put", model, worker_id, f"-{found[0].epoch}", gone)

    async def workers(self) -> list[tuple[Record, Vitals | None]]:
        out: list[tuple[Record, Vitals | None]] = []
        for model in await self._models():
            keys = _keys(model)

            async def call(records: str = keys[0], vitals: str = keys[3]) -> tuple[Any, Any]:
                async with self._redis.pipeline(transaction=False) as pipe:
                    pipe.hgetall(records)
                    pipe.hgetall(vitals)
                    found = await pipe.execute()
                    return found[0], found[1]

            records, vitals = await self._bounded(call())
            out += [
                (_records.decode(raw), _vitals.decode(vitals[k]) if k in vitals else None)
                for k, raw in records.items()
            ]
        return out

    async def worker(self, model: str, worker_id: str) -> tuple[Record, Vitals | None] | None:
        keys = _keys(model)

        async def call() -> tuple[Any, Any]:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.hget(keys[0], worker_id)
                pipe.hget(keys[3], worker_id)
                found = await pipe.execute()
                return found[0], found[1]

        record, vitals = await self._bounded(call())
        if record is None:
            return None
        return _records.decode(record), None if vitals is None else _vitals.decode(vitals)

    async def seat(
        self, model: str, worker_id: str, epoch: int, *, is_open: bool, sequences: int, blocks: int
    ) -> bool:
        answer = await self._call("seat", model, worker_id, epoch, int(is_open), sequences, blocks)
        return bool(answer)

    async def take(self, model: str, take: Take) -> Taken:
        sides = _encode([_plain(side) for side in take.sides])
        answer = await self._bundles.add(
            model,
            ("take", take.reservation_id, _ms(take.ttl_s), sides, take.payload),
            within_s=self._takes_within_s,
        )
        if answer[0] == b"held":
            return Taken(answer[1].decode(), repeated=True)
        amounts = answer[2:]
        used = tuple(Use(*amounts[i : i + 4]) for i in range(0, len(amounts), 4))
        if answer[0] == b"refused":
            return Taken(refused=answer[1].decode(), used=used)
        return Taken(take.payload, used=used)

    async def put_back(self, model: str, takes: Sequence[Take]) -> list[str]:
        out: list[str] = []
        for start in range(0, len(takes), PUT_BACK_MAX):
            some = takes[start : start + PUT_BACK_MAX]
            args: list[Any] = [_ms(some[0].ttl_s)]
            for take in some:
                sides = _encode([_plain(side) for side in take.sides])
                args += [take.reservation_id, sides, take.payload]
            out += [raw.decode() for raw in await self._call("put_back", model, *args)]
        return out

    async def release(self, model: str, items: Sequence[tuple[str, int]]) -> int:
        unknown = 0
        for start in range(0, len(items), BUNDLE_OPERATIONS_MAX):
            some = items[start : start + BUNDLE_OPERATIONS_MAX]
            told = [self._bundles.add(model, ("release", *item)) for item in some]
            unknown += sum(await asyncio.gather(*told))
        return unknown

    async def grow(self, model: str, reservation_id: str, side: int, blocks: int) -> bool:
        return bool(await self._call("grow", model, reservation_id, side, blocks))

    async def extend(self, model: str, reservation_ids: Sequence[str], *, ttl_s: float) -> None:
        if reservation_ids:
            await self._call("extend", model, _ms(ttl_s), *reservation_ids)

    async def missing(self, model: str, reservation_ids: Sequence[str]) -> list[str]:
        if not reservation_ids:
            return []
        return [raw.decode() for raw in await self._call("missing", model, *reservation_ids)]

    async def sweep(self, model: str) -> list[str]:
        return [raw.decode() for raw in await self._call("sweep", model, SWEEP_MAX)]

    async def usage(self, model: str) -> dict[str, Use]:
        raw = await self._bounded(self._redis.hgetall(_keys(model)[4]))
        amounts: dict[str, dict[str, int]] = {}
        for key, value in raw.items():
            worker_id, _, name = key.decode().rpartition("\x1f")
            found = amounts.setdefault(worker_id, {})
            if name in AMOUNTS:
                found[name] = int(value)
        return {
            worker_id: Use(*(found.get(name, 0) for name in AMOUNTS))
            for worker_id, found in amounts.items()
        }

    async def append_kv(self, model: str, entries: Sequence[KvEntry]) -> None:
        for start in range(0, len(entries), KV_PAGE_BATCHES):
            await self._bounded(self._append(model, entries[start : start + KV_PAGE_BATCHES]))

    async def _append(self, model: str, entries: Sequence[KvEntry]) -> None:
        async with self._redis.pipeline(transaction=False) as pipe:
            for entry in entries:
                pipe.xadd(
                    _log_key(model),
                    {
                        b"o": entry.origin,
                        b"w": entry.worker_id,
                        b"i": entry.incarnation,
                        b"b": entry.packed,
                    },
                    maxlen=KV_LOG_BATCHES_MAX,
                    approximate=True,
                )
            await pipe.execute()

    async def read_kv(self, model: str, after: str) -> list[KvEntry]:
        found = await self._bounded(
            self._redis.xrange(
                _log_key(model), min=f"({after}" if after else "-", count=KV_PAGE_BATCHES
            )
        )
        return [
            KvEntry(
                entry_id.decode(),
                values[b"o"].decode(),
                values[b"w"].decode(),
                values[b"i"].decode(),
                values[b"b"],
            )
            for entry_id, values in found
        ]

    async def put_snapshot(self, model: str, worker_id: str, incarnation: str, data: bytes) -> None:
        key = _snapshot_key(model, worker_id, incarnation)
        if data:
            await self._bounded(self._redis.set(key, data, ex=SNAPSHOT_TTL_S))
        else:
            await self._bounded(self._redis.delete(key))

    async def snapshot(self, model: str, worker_id: str, incarnation: str) -> bytes:
        found = await self._bounded(self._redis.get(_snapshot_key(model, worker_id, incarnation)))
        return bytes(found) if found else b""

    async def watch(self) -> AsyncIterator[Change]:
        with redis_errors():
            async with self._redis.pubsub() as channel:
                await channel.subscribe(CHANGES)
                while True:
                    message = await channel.get_message(ignore_subscribe_messages=True, timeout=4.0)
                    if message is not None:
                        model, worker_id = json.loads(message["data"])
                        yield Change(model, worker_id)

    async def aclose(self) -> None:
        await self._bundles.aclose()
        await self._channel.aclose()
        await self._redis.aclose()

    async def _held(self, model: str, worker_id: str) -> tuple[bytes, lease.Held | None]:
        """The lease text as stored, and its meaning (`ended` from the negated epoch)."""
        raw, epoch = await self._bounded(
            self._redis.hmget(_keys(model)[1], [f"lease\x1f{worker_id}", worker_id])
        )
        if raw is None:
            return b"", None
        held = _leases.decode(raw)
        return raw, replace(held, ended=epoch is None or epoch.startswith(b"-"))

    async def _cas(
        self,
        model: str,
        found: bytes,
        held: lease.Held,
        ttl_s: float,
        record: bytes,
        *,
        fresh: bool,
    ) -> bool:
        if model not in self._known:
            await self._bounded(self._redis.sadd(MODELS, model))
            self._known.add(model)
        text = _encode(replace(held, expires_s=0.0, ended=False))
        renewed = bool(record) and fresh
        answer = await self._call(
            "cas",
            model,
            held.worker_id,
            found,
            text,
            held.epoch,
            _ms(ttl_s),
            record,
            int(renewed),
        )
        return bool(answer)

    async def _record(self, op: str, record: Record) -> bool:
        offer = record.offer
        answer = await self._call(op, offer.model, offer.worker_id, record.epoch, _encode(record))
        return bool(answer)

    async def _models(self) -> list[str]:
        found = await self._bounded(self._redis.smembers(MODELS))
        self._known = {raw.decode() for raw in found}
        return sorted(self._known)

    async def _send_bundle(self, model: str, arguments: Sequence[Any]) -> Sequence[Any]:
        answers: Sequence[Any] = await self._call("bundle", model, *arguments)
        return answers

    async def _call(self, op: str, model: str, *args: Any) -> Any:
        command = (len(PARTS), *_keys(model), op, CHANGES, model, *args)
        with redis_errors():
            try:
                return await self._send("EVALSHA", SCRIPT_SHA, *command)
            except NoScriptError:
                return await self._send("EVAL", SCRIPT, *command)

    async def _send(self, *command: Any) -> Any:
        if not self._clustered:
            return await self._channel.call(*command)
        # The client knows the node of the slot, and learns where it has moved.
        async with Bounded(self._timeout_s):
            return await self._redis.execute_command(*command)  # type: ignore[no-untyped-call]

    async def _bounded(self, call: Any) -> Any:
        with redis_errors():
            async with Bounded(self._timeout_s):
                return await call


@lru_cache(maxsize=256)
def _keys(model: str) -> tuple[str, ...]:
    return tuple(f"{PREFIX}:{{{model}}}:{part}" for part in PARTS)


def _ration_key(model: str) -> str:
    return f"{PREFIX}:{{{model}}}:ration"


def _signals_key(router_id: str) -> str:
    return f"{PREFIX}:{{routers}}:signals:{router_id}"  # in one slot, so that they are read at once


def _log_key(model: str) -> str:
    return f"{PREFIX}:{{{model}}}:kv"


def _snapshot_key(model: str, worker_id: str, incarnation: str) -> str:
    return f"{PREFIX}:{{{model}}}:snapshot:{worker_id}:{incarnation}"


def _plain(side: Side) -> list[Any]:
    use = side.use
    return [side.worker_id, side.epoch, use.sequences, use.blocks, use.work_us, use.tokens]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
