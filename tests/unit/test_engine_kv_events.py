"""KV events of an engine in our words: both encodings, opaque hashes, gaps, restarts, replay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane.core.work import pack_tokens, sequence_hashes
from readyplane_agent.engines.kv_translate import HashTranslator, read_batch
from readyplane_agent.engines.modelled.core_events import KvStored
from readyplane_agent.engines.modelled.kv_publish import KvPublisher
from readyplane_agent.engines.vllm_events import KvEventReader

TOKENS = list(range(1, 13))
# Published vectors, block size 4: sequences [1..4], [1..8], [1..12].
GOLDEN = (14643705804678351452, 4945711292740353085, 12583592247330656132)


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 4,
        **more,
    }


def payload(*events: Any, as_map: bool = True) -> bytes:
    batch = {"ts": 1.0, "events": list(events), "data_parallel_rank": 0}
    return msgspec.msgpack.encode(batch if as_map else [1.0, list(events), 0])


def test_token_ids_are_hashed_anew_to_the_published_vectors() -> None:
    event = HashTranslator().translate(stored([b"x", b"y", b"z"], TOKENS))
    assert event == KvEvent("stored", GOLDEN)
    assert sequence_hashes(pack_tokens(TOKENS), 4) == GOLDEN


def test_a_parent_is_found_by_the_engines_own_hash() -> None:
    translator = HashTranslator()
    translator.translate(stored([-5], TOKENS[:4]))
    # i64 and u64 of one hash are one key.
    event = translator.translate(stored([7], TOKENS[4:8], parent=2**64 - 5))
    assert event == KvEvent("stored", GOLDEN[1:2], GOLDEN[0])
    assert translator.translate(stored([8], TOKENS[8:], parent=99)) is None
    assert translator.unknown_total == 1


@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_batch_and_events_choose_their_encoding_independently(outer: bool, inner: bool) -> None:
    event: Any = stored([1], TOKENS[:4])
    if not inner:
        event = ["BlockStored", [1], None, TOKENS[:4], 4, None, "GPU", None, None, "further"]
    removed: Any = {"type": "BlockRemoved", "block_hashes": [1]}
    if not inner:
        removed = ["BlockRemoved", [1]]
    cleared: Any = {"type": "AllBlocksCleared"} if inner else ["AllBlocksCleared"]
    translator = HashTranslator()
    events = read_batch(payload(event, removed, cleared, as_map=outer))
    got = [translator.translate(e) for e in events]
    assert got == [
        KvEvent("stored", GOLDEN[:1]),
        KvEvent("removed", GOLDEN[:1]),
        KvEvent("cleared"),
    ]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x05", b"\x90", msgspec.msgpack.encode({"a": 1})])
def test_what_is_no_batch_is_said(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a batch"):
        read_batch(data)


def test_copies_are_counted() -> None:
    """S(A) S(A) R(A): still there. R(A): gone. R(A) again: nothing (B101)."""
    t = HashTranslator()
    removed = {"type": "BlockRemoved", "block_hashes": [1]}
    assert t.translate(stored([1], TOKENS[:4])) == KvEvent("stored", GOLDEN[:1])
    assert t.translate(stored([1], TOKENS[:4])) is None
    assert t.translate(removed) is None
    assert t.translate(removed) == KvEvent("removed", GOLDEN[:1])
    assert t.translate(removed) is None


def test_an_absent_block_does_not_stop_the_rest_of_a_removal() -> None:
    """B103."""
    t = HashTranslator()
    t.translate(stored([1], TOKENS[:4]))
    event = t.translate({"type": "BlockRemoved", "block_hashes": [99, 1]})
    assert event == KvEvent("removed", GOLDEN[:1])


def test_lora_salt_and_other_media_are_kept_apart() -> None:
    """B96: adapters and tenants never share a key."""
    t = HashTranslator()
    plain = t.translate(stored([1], TOKENS[:4]))
    lora = t.translate(stored([2], TOKENS[:4], lora_name="a"))
    salt = t.translate(stored([3], TOKENS[:4], cache_salt="s"))
    assert plain and lora and salt
    assert len({plain.block_hashes, lora.block_hashes, salt.block_hashes}) == 3
    assert lora.block_hashes == sequence_hashes(pack_tokens(TOKENS[:4]), 4, lora="a")
    assert t.translate(stored([4], TOKENS[:4], medium="EXTERNAL")) is None


def test_an_unknown_event_is_counted_not_fatal() -> None:
    t = HashTranslator()
    assert t.translate({"type": "Novelty"}) is None
    assert t.translate(stored([1, 2], TOKENS[:4])) is None  # fewer tokens than blocks
    assert t.unknown_total == 2


# --------------------------------------------------------------------------- over the wire


class Publisher:
    """An engine's two sockets, with a buffer that may have forgotten its beginning."""

    def __init__(self, *, with_topic: bool = True) -> None:
        self.context = zmq.asyncio.Context()
        self.live, self.replay = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.port = self.live.bind_to_random_port("tcp://127.0.0.1")
        self.replay_port = self.replay.bind_to_random_port("tcp://127.0.0.1")
        self.kept: dict[int, bytes] = {}
        self.asked: list[int] = []
        self._with_topic = with_topic
        self._task = asyncio.create_task(self._answer())

    async def send(self, sequence: int, data: bytes, *, live: bool = True) -> None:
        self.kept[sequence] = data
        if live:
            await self.live.send_multipart([b"kv@x@m", sequence.to_bytes(8, "big"), data])

    async def _answer(self) -> None:
        while True:
            client, _, first = await self.replay.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            topic = [b"kv@x@m"] if self._with_topic else []
            for sequence, data in sorted(self.kept.items()):
                if sequence >= self.asked[-1]:
                    number = sequence.to_bytes(8, "big")
                    await self.replay.send_multipart([client, b"", *topic, number, data])
            end = (-1).to_bytes(8, "big", signed=True)
            await self.replay.send_multipart([client, b"", *topic[:0], end, b""])

    def reader(self) -> KvEventReader:
        host = "tcp://127.0.0.1:"
        return KvEventReader(f"{host}{self.port}", f"{host}{self.replay_port}")

    async def close(self) -> None:
        self._task.cancel()
        self.context.destroy(linger=0)


@pytest.fixture(params=[True, False], ids=["with topic", "without topic"])
async def publisher(request: pytest.FixtureRequest) -> AsyncIterator[Publisher]:
    found = Publisher(with_topic=request.param)
    yield found
    await found.close()


def block(i: int) -> bytes:
    return payload(stored([i], [i] * 4))


def ours(i: int) -> int:
    return sequence_hashes(pack_tokens([i] * 4), 4)[0]


async def take(events: AsyncIterator[KvEventBatch], count: int) -> list[KvEventBatch]:
    async with asyncio.timeout(5):
        return [await anext(events) for _ in range(count)]


async def follow(publisher: Publisher) -> tuple[KvEventReader, AsyncIterator[KvEventBatch]]:
    """A reader that has seen batch 0 live."""
    reader = publisher.reader()
    events = reader.follow()
    await publisher.send(0, block(0), live=False)
    (first,) = await take(events, 1)
    assert first == KvEventBatch(1, (KvEvent("stored", (ours(0),)),))
    await asyncio.sleep(0.2)  # for the subscription to reach the publisher
    return reader, events


async def test_a_late_reader_gets_all_by_replay(publisher: Publisher) -> None:
    for i in range(3):
        await publisher.send(i, block(i), live=False)
    reader = publisher.reader()
    batches = await take(events := reader.follow(), 3)
    assert [b.sequence for b in batches] == [1, 2, 3]
    assert [b.events[0].block_hashes for b in batches] == [(ours(i),) for i in range(3)]
    assert reader.losses_total == 0
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_gap_is_repaired_by_replay(publisher: Publisher) -> None:
    """Sequence 0 then 3: 1 and 2 are asked for, in order, nothing twice (B93, B98)."""
    reader, events = await follow(publisher)
    await publisher.send(1, block(1), live=False)
    await publisher.send(2, block(2), live=False)
    await publisher.send(3, block(3))
    batches = await take(events, 3)
    assert [b.events[0].block_hashes for b in batches] == [(ours(i),) for i in (1, 2, 3)]
    assert [b.sequence for b in batches] == [2, 3, 4]
    assert publisher.asked == [0, 1] and reader.losses_total == 0
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_gap_beyond_the_buffer_clears_first(publisher: Publisher) -> None:
    reader, events = await follow(publisher)
    del publisher.kept[0]
    await publisher.send(3, block(3), live=False)  # 1 and 2 were evicted
    await publisher.send(4, block(4))
    batches = await take(events, 3)
    assert batches[0].events == (KvEvent("cleared"),)
    assert [b.events[0].block_hashes for b in batches[1:]] == [(ours(3),), (ours(4),)]
    assert [b.sequence for b in batches] == [2, 3, 4]
    assert reader.losses_total == 1
    await events.aclose()  # type: ignore[attr-defined]


async def test_an_engine_that_began_anew_clears_first(publisher: Publisher) -> None:
    reader, events = await follow(publisher)
    await publisher.send(1, block(1))
    await take(events, 1)
    publisher.kept.clear()
    await publisher.send(0, block(9))
    batches = await take(events, 2)
    assert batches[0].events == (KvEvent("cleared"),)
    assert batches[1].events == (KvEvent("stored", (ours(9),)),)
    assert reader.losses_total == 1
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_batch_that_cannot_be_read_clears_and_goes_on(publisher: Publisher) -> None:
    reader, events = await follow(publisher)
    await publisher.send(1, b"\xc1")
    await publisher.send(2, block(2))
    batches = await take(events, 2)
    assert batches[0].events == (KvEvent("cleared"),)
    assert batches[1].events == (KvEvent("stored", (ours(2),)),)
    assert reader.losses_total == 1
    await events.aclose()  # type: ignore[attr-defined]


async def test_a_long_replay_loses_nothing() -> None:
    """More batches than a socket's default queue, through the modelled engine's own publisher."""
    context: zmq.Context[Any] = zmq.Context()
    publisher = KvPublisher(
        context,
        host="127.0.0.1",
        port=0,
        replay_port=0,
        topic="kv@e@m",
        block_size=4,
        buffer_steps=10_000,
    )
    tokens = {i: [i, i + 1, i + 2, i + 3] for i in range(5000)}
    for i in tokens:
        publisher.publish(
            [KvStored(str(i), 0, (i,), 0.0)], lambda name, *_: (tokens[int(name)], None, ""), 1.0
        )
    live, replay = publisher.ports
    reader = KvEventReader(f"tcp://127.0.0.1:{live}", f"tcp://127.0.0.1:{replay}")
    batches = await take(events := reader.follow(), len(tokens))
    assert [b.sequence for b in batches] == list(range(1, len(tokens) + 1))
    wanted = [sequence_hashes(pack_tokens(t), 4) for t in tokens.values()]
    assert [b.events[0].block_hashes for b in batches] == wanted
    assert reader.losses_total == 0
    await events.aclose()  # type: ignore[attr-defined]
    publisher.close()
    context.destroy(linger=0)
