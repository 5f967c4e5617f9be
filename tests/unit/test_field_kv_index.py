"""Field reports of the area kv-index, B92 to B105: each row a test.

The index alone, the translation of engine events, and the router on virtual time; the two sockets of
an engine are real ones.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from prometheus_client.core import Metric

from readyplane.core import gate_checks
from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane.core.work import pack_tokens, sequence_hashes
from readyplane.core.worker import Role
from readyplane_agent import probes
from readyplane_agent.engines import vllm_events
from readyplane_agent.engines.kv_translate import HashTranslator, read_batch
from readyplane_agent.engines.openai import OpenAiEngine, read_metrics
from readyplane_agent.engines.vllm_events import KvEventReader
from readyplane_agent.kv_events import KvForwarder
from readyplane_router.gate import Admit, Refuse, judge
from readyplane_router.metrics import RouterCollector
from readyplane_router.prefix import Limits, PrefixIndex
from readyplane_router.prefix.hits import HitGap
from tests.router_world import MODEL, World, evidence, on_virtual_time, serving, shape
from tests.unit.agent_twins import TwinEngine
from tests.unit.test_router_gate import expectations

P, D = Role.PREFILL, Role.DECODE
TOKENS = list(range(1, 13))
# Published vectors, block size 4: sequences [1..4], [1..8], [1..12].
GOLDEN = (14643705804678351452, 4945711292740353085, 12583592247330656132)


def stored(*hashes: int, parent: int | None = None, tier: str = "gpu") -> KvEvent:
    return KvEvent("stored", hashes, parent, tier)


def removed(*hashes: int, tier: str = "gpu") -> KvEvent:
    return KvEvent("removed", hashes, None, tier)


CLEARED = KvEvent("cleared")


def index(*keys: str) -> PrefixIndex:
    made = PrefixIndex(Limits(replay_wait_s=10.0))
    for key in keys:
        made.add(key, blocks_max=1_000)
    return made


def block_stored(hashes: Any, tokens: list[Any], parent: Any = None, **more: Any) -> Any:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": 4,
        **more,
    }


def test_b92_cleared_is_all_of_that_worker_on_all_tiers_and_of_nobody_else() -> None:
    of = index("a", "b")
    for key in ("a", "b"):
        of.apply(key, 0, [stored(1, 2), stored(3, tier="cpu"), stored(4, tier="disk")], now_s=0.0)
    assert of.tiered([1, 2, 3, 4])["a"] == [("gpu", 2), ("cpu", 1), ("disk", 1)]
    of.apply("a", 1, [CLEARED], now_s=0.0)
    assert of.matched([1, 2], now_s=0.0) == {"b": 2}
    assert of.tiered([1, 2, 3, 4]) == {"b": [("gpu", 2), ("cpu", 1), ("disk", 1)]}
    assert of.tiered([3]) == {"b": [("cpu", 1)]}


def test_b92_a_worker_that_went_and_came_back_without_an_event_has_nothing() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        p0 = await world.worker(router, "p0", P, renewing=False)
        await p0.renew(kv_events=(KvEventBatch(0, (stored(1, 2),)),))
        found = router.desks[MODEL].index
        assert list(found.matched([1, 2], now_s=0.0).values()) == [2]
        await p0.leave()
        assert found.matched([1, 2], now_s=0.0) == {} and len(found) == 0
        again = await world.worker(router, "p0", P, renewing=False, incarnation="p0-woken")
        assert found.matched([1, 2], now_s=0.0) == {}
        await again.renew(kv_events=(KvEventBatch(0, (stored(1),)),))
        assert list(found.matched([1, 2], now_s=0.0).values()) == [1]

    on_virtual_time(main)


SLEEPS = b"""vllm:engine_sleep_state{engine="0",sleep_state="awake"} 0.0
vllm:engine_sleep_state{engine="0",sleep_state="weights_offloaded"} 1.0
vllm:engine_sleep_state{engine="0",sleep_state="discard_all"} 0.0
"""


async def test_b92_an_engine_that_sleeps_says_nothing_and_is_purged(engine: Replays) -> None:
    client = OpenAiEngine("http://127.0.0.1:1", model="m")
    awake = SLEEPS.replace(b'awake"} 0', b'awake"} 1')
    engine.frames = [[b"", (0).to_bytes(8, "big"), one_block(0)], END]
    events = engine.reader(slept=client.slept).follow()
    async with asyncio.timeout(5):
        assert (await anext(events)).events[0].block_hashes == (ours(0),)
        for metrics, sleeps in ((awake, False), (SLEEPS, True)):
            await client.load(read_metrics(metrics))
            assert client.slept.is_set() is sleeps
        assert (await anext(events)).events == (CLEARED,)
    await client.load(read_metrics(SLEEPS))
    assert not client.slept.is_set(), "once"
    await events.aclose()  # type: ignore[attr-defined]


def test_b93_a_gap_credits_nothing_asks_for_a_replay_and_is_counted() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        p0 = await world.worker(router, "p0", P, renewing=False)
        found = router.desks[MODEL].index
        for number in range(6):
            batch = KvEventBatch(number, (stored(number),))
            assert not (await p0.renew(kv_events=(batch,))).directives
        answer = await p0.renew(kv_events=(KvEventBatch(9, (stored(9),)),))
        assert [d.kind for d in answer.directives] == ["replay_kv"]
        assert found.counts.gaps == 1
        assert found.matched([0, 1, 2], now_s=0.0) == {}
        # Replayed: everything anew.
        answer = await p0.renew(kv_events=(KvEventBatch(10, (CLEARED, stored(0, 1, 9))),))
        assert not answer.directives
        assert list(found.matched([0, 1, 2], now_s=0.0).values()) == [2]

    on_virtual_time(main)


def test_b93_where_no_replay_comes_what_was_known_is_dropped_and_rebuilt() -> None:
    of = index("a")
    of.apply("a", 0, [stored(1)], now_s=0.0)
    assert not of.apply("a", 4, [stored(4)], now_s=1.0)
    assert not of.apply("a", 5, [stored(5)], now_s=10.9)
    assert of.apply("a", 6, [stored(6)], now_s=11.0)
    assert (of.matched([1], now_s=11.0), of.matched([6], now_s=11.0)) == ({}, {"a": 1})
    # What comes late of it brings nothing back.
    assert not of.apply("a", 1, [stored(1)], now_s=12.0, replayed=True)
    assert not of.apply("a", 2, [stored(2)], now_s=12.0)
    assert of.matched([1], now_s=12.0) == of.matched([2], now_s=12.0) == {}
    assert of.suspects() == ()


def test_b93_a_late_replay_does_not_bring_a_removed_block_back() -> None:
    of = index("a")
    for number, event in enumerate((stored(1, 2), removed(2), stored(3))):
        of.apply("a", number, [event], now_s=0.0)
    for number, event in enumerate((stored(1, 2), removed(2))):
        assert not of.apply("a", number, [event], now_s=1.0, replayed=True)
    assert of.matched([1, 2], now_s=1.0) == {"a": 1}
    of.restore("a", 0, [("gpu", (1, 2))])  # an old snapshot
    assert of.matched([1, 2], now_s=1.0) == {"a": 1}


def test_b95_engines_may_hash_as_they_like() -> None:
    """Their hashes are keys; two processes with seeds of their own say the same of one prompt."""
    told = []
    for names in ([b"seed-1-a", b"seed-1-b", b"seed-1-c"], [-17, 2**63 + 5, 99]):
        told.append(HashTranslator(4).translate(block_stored(names, TOKENS)))
    assert told[0] == told[1] == KvEvent("stored", GOLDEN)
    assert sequence_hashes(pack_tokens(TOKENS), 4) == GOLDEN


def test_b95_a_worker_that_names_blocks_otherwise_is_found_out_at_the_gate() -> None:
    tokens = list(range(33))
    right = [str(h) for h in sequence_hashes(pack_tokens(tokens), 16)]
    name = gate_checks.KV_HASHES

    def verdict(**changed: Any) -> Admit | Refuse:
        told = {"token_ids": tokens, "block_size": 16, "told": right, **changed}
        changes: dict[str, Any] = {name: told}
        return judge(serving(), evidence(5, 6, **changes), expectations())

    assert isinstance(verdict(), Admit)
    assert isinstance(verdict(told=[*right, "5"]), Admit)
    assert isinstance(verdict(told=[]), Admit), "it is silent, and that is shown (B102)"
    for changed in ({"told": ["1", "2"]}, {"told": right[:1]}):
        refused = verdict(**changed)
        assert isinstance(refused, Refuse)
        assert "kv_hashes: hash_mismatch" in refused.reasons[0]
    refused = verdict(block_size=32)
    assert isinstance(refused, Refuse) and "blocks of 32" in refused.reasons[0]
    refused = verdict(token_ids=tokens[:3])
    assert isinstance(refused, Refuse) and "no full block" in refused.reasons[0]


async def test_b95_the_start_ends_when_blocks_are_named_otherwise() -> None:
    engine = TwinEngine()
    question = probes.Question((1, 2, 3), (), None)
    serves = serving()
    for told, passed, why in (((1, 2), False, "hash_mismatch"), ((), True, "guessed")):
        engine.told = True  # nothing by itself
        engine.events.put_nowait(KvEventBatch(0, (stored(*told),)))
        found = await probes.kv_hashes(engine, question, serves, wait_s=0.05)
        assert found.passed is passed and why in found.reason
        assert found.evidence["told"] == [str(h) for h in told]


def test_b96_adapters_and_salts_never_share_a_key() -> None:
    translator, found = HashTranslator(4), []
    keys: tuple[dict[str, str], ...] = (
        {},
        {"lora_name": "A"},
        {"lora_name": "B"},
        {"cache_salt": "X"},
        {"lora_name": "A", "cache_salt": "X"},
    )
    for number, more in enumerate(keys):
        first = translator.translate(block_stored([number], TOKENS[:4], **more))
        # The second step of the same prompt names its parent, and neither adapter nor salt.
        later = translator.translate(block_stored([number + 50], TOKENS[4:8], parent=number))
        assert first is not None and later is not None
        asked = sequence_hashes(
            pack_tokens(TOKENS[:8]),
            4,
            lora=more.get("lora_name", ""),
            cache_salt=more.get("cache_salt", ""),
        )
        assert (*first.block_hashes, *later.block_hashes) == asked
        found.append(asked)
    assert len({h for hashes in found for h in hashes}) == 10
    of = index(*"abcde")
    for key, hashes in zip("abcde", found, strict=True):
        of.apply(key, 0, [stored(*hashes)], now_s=0.0)
    assert [of.matched(hashes, now_s=0.0) for hashes in found] == [{key: 2} for key in "abcde"]


def test_b96_what_is_not_told_apart_by_its_tokens_is_left_out() -> None:
    translator = HashTranslator(4)
    # vLLM's positional form has the salt among the extra keys of the first block.
    salted = ["BlockStored", [1], None, TOKENS[:4], 4, None, "GPU", None, [["X"]]]
    (event,) = read_batch(msgspec.msgpack.encode([1.0, [salted], None]))
    told = translator.translate(event)
    assert told is not None
    assert told.block_hashes == sequence_hashes(pack_tokens(TOKENS[:4]), 4, cache_salt="X")
    others: tuple[dict[str, Any], ...] = (
        {"lora_id": 7},  # an adapter without its name
        {"extra_keys": [["image-hash", 3]]},
        {"extra_keys": [[["image-hash", 3]]]},
        {"block_mm_infos": [{"image": 1}]},
        {"block_size": 8},
        {"medium": "EXTERNAL"},
        {"group_idx": 1},
    )
    for number, more in enumerate(others):
        event = block_stored([number + 10], TOKENS[:8], **more)
        assert translator.translate(event) is None, more
    assert translator.unknown_total == 7
    assert translator.held_blocks == 1


class Replays:
    """An engine's two sockets; a replay answers with `frames`, or with nothing."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.live, self.replay = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.ports = [s.bind_to_random_port("tcp://127.0.0.1") for s in (self.live, self.replay)]
        self.frames: list[list[bytes]] = []
        self.clients: list[bytes] = []
        self._task = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        while True:
            client = (await self.replay.recv_multipart())[0]
            self.clients.append(client)
            for frames in self.frames:
                await self.replay.send_multipart([client, *frames])

    def reader(self, slept: asyncio.Event | None = None) -> KvEventReader:
        live, replay = (f"tcp://127.0.0.1:{port}" for port in self.ports)
        return KvEventReader(live, replay, topic="kv@pod-1@m", slept=slept)

    async def send(self, number: int, data: bytes) -> None:
        await self.live.send_multipart([b"kv@pod-1@m", number.to_bytes(8, "big"), data])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.context.destroy(linger=0)


@pytest.fixture
async def engine() -> AsyncIterator[Replays]:
    made = Replays()
    yield made
    await made.close()


def one_block(i: int) -> bytes:
    return msgspec.msgpack.encode([1.0, [block_stored([i], [i] * 4)], 0])


def ours(i: int) -> int:
    return sequence_hashes(pack_tokens([i] * 4), 4)[0]


END = [b"", b"", (-1).to_bytes(8, "big", signed=True), b""]


async def test_b98_what_is_replayed_must_say_whose_and_which_it_is(engine: Replays) -> None:
    def number(i: int) -> bytes:
        return i.to_bytes(8, "big")

    engine.frames = [
        [b"", b"kv@pod-2@m", number(0), one_block(7)],  # of another worker
        [b"", b"kv@pod-1@m", b"\x00", one_block(8)],  # without a number
        [b"", b"kv@pod-1@m", number(0), one_block(0)],
        [b"", number(1), one_block(1)],  # the older form names no topic: the socket is its own
        END,
        [b"", b"kv@pod-1@m", number(2), one_block(9)],  # behind the end
    ]
    reader = engine.reader()
    events = reader.follow()
    async with asyncio.timeout(5):
        told = [await anext(events) for _ in range(2)]
    assert [b.events[0].block_hashes for b in told] == [(ours(0),), (ours(1),)]
    assert (reader.rejected_total, reader.losses_total) == (2, 0)
    await events.aclose()  # type: ignore[attr-defined]


async def test_b98_a_replay_that_does_not_end_is_given_up_and_asked_anew(
    engine: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_events, "REPLAY_LIMIT_S", 0.2)
    engine.frames = [[b"", (0).to_bytes(8, "big"), one_block(0)]]  # no end marker
    reader = engine.reader()
    events = reader.follow()
    async with asyncio.timeout(5):
        assert (await anext(events)).events[0].block_hashes == (ours(0),)
        waiting = asyncio.ensure_future(anext(events))
        while not waiting.done():  # until the subscription has reached the publisher
            await engine.send(5, one_block(5))
            await asyncio.sleep(0.05)
        told = [await waiting, await anext(events)]
    assert told[0].events == (CLEARED,), "batches 1 to 4 are gone"
    assert told[1].events[0].block_hashes == (ours(5),)
    assert len(set(engine.clients)) == 2, "each by a socket of its own"
    await events.aclose()  # type: ignore[attr-defined]


def test_b99_the_watermark_belongs_to_the_incarnation() -> None:
    of = index("w@1")
    for number in range(8):
        of.apply("w@1", number, [stored(number)], now_s=0.0)
    of.drop("w@1")
    of.add("w@2", blocks_max=10)
    assert of.apply("w@2", 0, [stored(5)], now_s=0.0)
    assert (of.matched([0], now_s=0.0), of.matched([5], now_s=0.0)) == ({}, {"w@2": 1})


@pytest.mark.parametrize("first", [0, 1])
def test_b99_numbers_that_begin_anew_are_a_new_life(first: int) -> None:
    of = index("w")
    for number in range(first, 9):
        of.apply("w", number, [stored(number)], now_s=0.0)
    assert of.apply("w", first, [stored(50, 51)], now_s=1.0)
    assert of.apply("w", first + 1, [stored(52, parent=51)], now_s=1.0)
    assert (of.matched([3], now_s=1.0), of.matched([50, 51, 52], now_s=1.0)) == ({}, {"w": 3})
    assert of.counts.restarted == 1


def test_b99_a_new_life_whose_beginning_was_missed_is_noticed() -> None:
    of = index("w")
    for number in range(9):
        of.apply("w", number, [stored(number)], now_s=0.0)
    for number in (3, 4, 5):
        assert not of.apply("w", number, [stored(100 + number)], now_s=1.0)
    assert of.suspects() == ("w",) and of.matched([3], now_s=1.0) == {}
    assert of.apply("w", 6, [CLEARED, stored(200)], now_s=2.0)
    assert of.suspects() == ()
    assert (of.matched([3], now_s=2.0), of.matched([200], now_s=2.0)) == ({}, {"w": 1})
    assert of.apply("w", 7, [stored(201)], now_s=2.0)


async def test_b99_an_engine_that_began_anew_is_purged_first(engine: Replays) -> None:
    engine.frames = [END]
    reader = engine.reader()
    events = reader.follow()
    waiting = asyncio.ensure_future(anext(events))
    async with asyncio.timeout(5):
        number = 0
        while not waiting.done():
            await engine.send(number, one_block(number))
            number += 1
            await asyncio.sleep(0.05)
        heard = [await waiting]
        await engine.send(number + 3, one_block(100))
        while heard[-1].events[-1].block_hashes != (ours(100),):
            heard.append(await anext(events))
        await engine.send(2, one_block(7))  # its 0 and 1 were not heard, and are not replayed
        told = [await anext(events) for _ in range(3)]
    assert [b.events for b in told[:2]] == [(CLEARED,), (CLEARED,)]
    assert told[2].events[0].block_hashes == (ours(7),)
    await events.aclose()  # type: ignore[attr-defined]


def test_b100_memory_is_back_after_two_thousand_lives_on_three_models() -> None:
    models = [PrefixIndex() for _ in range(3)]
    gaps = [HitGap() for _ in models]

    def lives(count: int) -> None:
        for number in range(count):
            of, gap, key = models[number % 3], gaps[number % 3], f"w{number}@{number}"
            of.add(key, blocks_max=1_000)
            hashes = tuple(range(1000 * number, 1000 * number + 20))
            of.apply(key, 0, [stored(*hashes), stored(*hashes[:3], tier="cpu")], now_s=number)
            of.guess(key, hashes, now_s=number)
            of.matched(hashes, now_s=number)
            gap.count_on(key, 100)
            of.drop(key)
            gap.forget(key)

    lives(200)
    gc.collect()
    tracemalloc.start()
    try:
        lives(100)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        lives(2_000)
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after <= before * 1.1 + 20_000
    assert [len(of) for of in models] == [0, 0, 0]


def test_b100_nothing_of_a_worker_runs_on() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await asyncio.sleep(1.0)
        before = len(asyncio.all_tasks())
        for number in range(60):
            name = f"p{number}"
            worker = await world.worker(router, name, P, renewing=False)
            await worker.renew(kv_events=(KvEventBatch(0, (stored(number),)),))
            await worker.leave()
        await asyncio.sleep(router.policy.gone_kept_s + 5.0)
        assert len(asyncio.all_tasks()) <= before
        assert not (await router.list_workers()).workers
        assert len(router.desks[MODEL].index) == 0

    on_virtual_time(main)


def test_b101_presence_is_counted() -> None:
    of = index("a")
    of.apply("a", 0, [stored(1), stored(1)], now_s=0.0)
    of.apply("a", 1, [removed(1)], now_s=0.0)
    assert of.matched([1], now_s=0.0) == {"a": 1}
    assert not of.apply("a", 1, [removed(1)], now_s=0.0)
    assert not of.apply("a", 0, [stored(1), stored(1)], now_s=0.0)
    assert of.matched([1], now_s=0.0) == {"a": 1}
    of.apply("a", 2, [removed(1)], now_s=0.0)
    assert of.matched([1], now_s=0.0) == {}
    of.apply("a", 3, [removed(1)], now_s=0.0)
    assert (of.counts.duplicates, of.counts.unknown_removed, len(of)) == (2, 1, 0)


def test_b101_copies_under_several_engine_hashes_are_one_content() -> None:
    translator = HashTranslator(4)
    assert translator.translate(block_stored([1], TOKENS[:4])) is not None
    assert translator.translate(block_stored([2], TOKENS[:4])) is None
    gone = [{"type": "BlockRemoved", "block_hashes": [key]} for key in (1, 2, 2)]
    assert [translator.translate(event) for event in gone] == [None, removed(GOLDEN[0]), None]


def test_b102_a_worker_that_never_publishes_is_shown_and_guessed() -> None:
    def silent(router: Any) -> float:
        families: dict[str, Metric] = {m.name: m for m in RouterCollector(router).collect()}
        (sample,) = families["readyplane_router_kv_silent_workers"].samples
        return float(sample.value)

    async def main(world: World) -> None:
        router = await world.router()
        p0 = await world.worker(router, "p0", P)
        await world.worker(router, "d0", D)
        await router.route(shape("r1", 320))
        await asyncio.sleep(9.0)
        assert silent(router) == 0
        await asyncio.sleep(2.0)
        assert silent(router) == 1
        await router.route(shape("r2", 320))
        await asyncio.sleep(20.0)  # beyond what a guess lasts where events come
        assert (await router.route(shape("r3", 320))).prefill.cached_tokens == 319
        await p0.renew(kv_events=(KvEventBatch(0, ()),))
        assert silent(router) == 0

    on_virtual_time(main)


def test_b103_an_absent_block_does_not_stop_a_removal() -> None:
    of = index("a")
    of.apply("a", 0, [stored(1, 2, 3)], now_s=0.0)
    of.apply("a", 1, [removed(99, 3, 98, 2)], now_s=0.0)
    assert of.matched([1, 2, 3], now_s=0.0) == {"a": 1}
    assert of.counts.unknown_removed == 2


def test_b103_a_large_purge_holds_nobody_up() -> None:
    of = PrefixIndex()
    of.add("large", blocks_max=200_000)
    for number in range(400):
        first = 500 * number
        of.apply("large", number, [stored(*range(first, first + 500))], now_s=0.0)
    assert of.blocks_of("large") == 200_000
    begun_s = time.process_time()
    of.drop("large")
    of.add("next", blocks_max=10)
    assert of.apply("next", 0, [stored(1)], now_s=0.0)
    assert time.process_time() - begun_s < 1.0
    assert len(of) == 1


def test_b104_an_engine_that_never_tells_of_removals_fills_no_memory() -> None:
    of = PrefixIndex()
    of.add("a", blocks_max=100)
    for number in range(50):
        of.apply("a", number, [stored(*range(10 * number, 10 * number + 10))], now_s=0.0)
    assert (of.blocks_of("a"), len(of), of.counts.overflow) == (100, 100, 400)
    assert of.matched(range(490, 500), now_s=0.0) == {"a": 10}, "the newest are kept"

    async def forwarded() -> KvForwarder:
        forwarder = KvForwarder(held_blocks_max=100)

        async def told() -> AsyncIterator[KvEventBatch]:
            for number in range(50):
                hashes = range(10 * number, 10 * number + 10)
                yield KvEventBatch(number, (stored(*hashes),))

        await forwarder.follow(told())
        return forwarder

    forwarder = asyncio.run(forwarded())
    assert (forwarder.held_blocks, forwarder.dropped_total) == (100, 400)
    mirror = index("a")
    for batch in forwarder.take():
        mirror.apply("a", batch.sequence, batch.events, now_s=0.0)
    assert mirror.blocks_of("a") == 100


def test_b104_hits_that_do_not_come_lower_the_trust_and_are_shown() -> None:
    gap = HitGap()
    reported = {"honest": 0, "drops": 0}
    for second in range(0, 100, 5):
        for key, total in {**reported, "mute": None}.items():
            gap.count_on(key, 4_096)
            gap.reported(key, total, now_s=float(second))
        reported["honest"] += 4_000
        reported["drops"] += 400
    assert gap.ratios().keys() == {"honest", "drops"}
    assert gap.ratios()["honest"] == 1.0
    assert gap.doubted.keys() == {"drops"} and gap.doubted["drops"] < 0.2
    for second in range(100, 300, 5):  # mended
        gap.count_on("drops", 4_096)
        gap.reported("drops", reported["drops"], now_s=float(second))
        reported["drops"] += 4_096
    assert gap.doubted == {}


def test_b104_a_worker_that_is_doubted_is_credited_with_less() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        p0 = await world.worker(router, "p0", P, renewing=False)
        await world.worker(router, "d0", D)
        hashes = sequence_hashes(shape("x", 320).token_ids, 16)
        await p0.renew(kv_events=(KvEventBatch(0, (stored(*hashes),)),))
        assert (await router.route(shape("r1", 320))).prefill.cached_tokens == 319
        desk, name = router.desks[MODEL], p0.offer.worker_id
        (key,) = (key for key, seat in desk.seats.items() if seat.worker_id == name)
        desk.hits.doubted[key] = 0.1
        assert (await router.route(shape("r2", 320))).prefill.cached_tokens == 32
        await p0.leave()
        assert desk.hits.doubted == {}

    on_virtual_time(main)


def test_b105_a_garbled_event_is_dropped_and_counted_and_nothing_else() -> None:
    translator = HashTranslator(4)
    garbled: list[Any] = [
        block_stored([5], TOKENS[:4], parent=5),  # its own parent
        block_stored([6], ["x"] * 4),
        block_stored("hashes", TOKENS[:4]),
        {"type": "BlockStored"},
        {"type": "BlockRemoved", "block_hashes": 7},
        ["BlockStored", 7],
        7,
        [],
    ]
    good = [block_stored([i], [i] * 4) for i in range(100, 10_100)]
    events = read_batch(msgspec.msgpack.encode([1.0, good[:5_000] + garbled + good[5_000:], 0]))
    told = [translator.translate(event) for event in events]
    assert sum(event is not None for event in told) == 10_000
    assert "cleared" not in {event.kind for event in told if event is not None}
    assert translator.unknown_total == len(garbled)
    assert translator.held_blocks == 10_000


def test_b105_the_index_drops_what_it_does_not_understand() -> None:
    of = index("a")
    of.apply("a", 0, [stored(1, 2)], now_s=0.0)
    strange = [KvEvent("clear_everything"), KvEvent("garbled"), stored(9, tier="moon")]
    of.apply("a", 1, [*strange, stored(7, 8, parent=7), stored(3, parent=2)], now_s=0.0)
    assert of.matched([1, 2, 3], now_s=0.0) == {"a": 3}
    assert of.matched([7, 8], now_s=0.0) == {"a": 2}
    assert (of.counts.malformed, of.matched([9], now_s=0.0)) == (3, {})
