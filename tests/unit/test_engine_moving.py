"""A request that decodes goes on at another engine: token for token, with all that decides the next.

Tokens, KV, the state of the draws and that of a constraint are carried; what lacks one of them gives
another answer, so that these tests can fail.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import zmq

from readyplane import profiles
from readyplane.core.profile import LinkClass
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines.modelled import answer
from readyplane_agent.engines.modelled.answer_state import Choices, Draws
from readyplane_agent.engines.modelled.body import BadBody, read_ask
from readyplane_agent.engines.modelled.core import EngineModel
from readyplane_agent.engines.modelled.core_events import EngineRequest, Finished, RequestMode
from readyplane_agent.engines.modelled.handover import HandoverChannel
from readyplane_agent.engines.modelled.metrics import EngineMetrics
from readyplane_agent.engines.modelled.runtime import Job, Piece, Runtime

PROFILE = profiles.load("h200-llama8b-fp8")
WEIGHTS = 0x1234
PROMPT = "tell me a long story"
TOKENS = 60


class Heard:
    """What the client of one leg gets."""

    def __init__(self) -> None:
        self.text = ""
        self.reason = ""
        self.failure = ""
        self.ended = asyncio.Event()
        self.some = asyncio.Event()

    def deliver(self, job: Job, piece: Piece) -> None:
        self.text += piece.text
        self.reason, self.failure = piece.reason, piece.failure
        self.some.set()
        if piece.reason or piece.failure:
            self.ended.set()


@contextmanager
def engine(name: str, *, weights: int = WEIGHTS, hold_s: float = 30.0) -> Iterator[Runtime]:
    context: zmq.Context[Any] = zmq.Context()
    numbers = count()
    runtime = Runtime(
        EngineModel(PROFILE, block_size=16, kv_blocks=4096, hold_s=hold_s, coalesce_s=0.0),
        SystemClock(),
        metrics=EngineMetrics("demo"),
        weights=weights,
        max_model_len=4096,
        max_waiting=16,
        link=LinkClass("test", 40e9, 0.001),
        engine_id=name,
        host="127.0.0.1",
        make_id=lambda: f"{name}-{next(numbers)}",
    )
    runtime.channel = HandoverChannel(
        context,
        host="127.0.0.1",
        port=0,
        engine_id=name,
        kv_format={"dtype": "fp8"},
        on_pulled=runtime.on_pulled,
        on_extend=runtime.on_extend,
    )
    try:
        yield runtime
    finally:
        runtime.stop()
        runtime.channel.close()
        context.destroy(linger=0)


def begin(runtime: Runtime, **fields: Any) -> Heard:
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, **fields}
    ask = read_ask(
        json.dumps(body).encode(), chat=False, model="demo", vocab_size=512, max_model_len=4096
    )
    heard = Heard()
    runtime.submit(ask, heard.deliver)
    return heard


async def moved(giver: Runtime, taker: Runtime, *, at: int, **fields: Any) -> tuple[str, Heard]:
    """Begin on one engine, move after `at` letters, end on the other."""
    first = begin(giver, request_id="r-1", **fields)
    while len(first.text) < at:
        first.some.clear()
        await asyncio.wait_for(first.some.wait(), 10)
    told = giver.move_out("r-1")
    assert told is not None
    assert first.reason == "moved"
    assert first.text == answer.decode(told["continuation"]["output_token_ids"])
    second = begin(taker, **fields, **told)
    await asyncio.wait_for(second.ended.wait(), 10)
    for _ in range(100):  # the giver hears that its KV was read
        if giver.is_idle():
            break
        await asyncio.sleep(0.02)
    assert giver.is_idle()
    assert taker.is_idle()
    return first.text + second.text, second


async def whole(runtime: Runtime, **fields: Any) -> tuple[str, Heard]:
    heard = begin(runtime, **fields)
    await asyncio.wait_for(heard.ended.wait(), 10)
    return heard.text, heard


LONG = ["the first of them all", "the first of two", "something quite different", "the furthest"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"seed": 7, "temperature": 0.8},
        {"structured_outputs": {"choice": LONG}},
        {"structured_outputs": {"choice": LONG}, "seed": 3, "temperature": 1.0},
        {"stop": ["q"], "seed": 11, "temperature": 1.0},
        {"ignore_eos": False, "vllm_xargs": {"modelled_output_tokens": 30}},
    ],
    ids=["greedy", "sampled", "constrained", "sampled and constrained", "stop text", "own length"],
)
async def test_the_answer_is_the_same_token_for_token(fields: dict[str, Any]) -> None:
    with engine("a") as a, engine("b") as b:
        expected, ended = await whole(a, **fields)
        got, second = await moved(a, b, at=3, **fields)
        assert got == expected
        assert second.reason == ended.reason


async def test_it_may_move_again() -> None:
    with engine("a") as a, engine("b") as b:
        fields: dict[str, Any] = {"seed": 5, "temperature": 1.0}
        expected, _ = await whole(a, **fields)
        first = begin(a, request_id="r", **fields)
        text, giver, taker, heard = "", a, b, first
        for _ in range(3):
            heard.some.clear()
            await asyncio.wait_for(heard.some.wait(), 10)
            told = giver.move_out("r")
            assert told is not None
            text += heard.text
            heard = begin(taker, request_id="r", **fields, **told)
            giver, taker = taker, giver
        await asyncio.wait_for(heard.ended.wait(), 10)
        assert text + heard.text == expected


@pytest.mark.parametrize("lost", ["draws", "kv"])
async def test_what_is_not_carried_is_missed(lost: str) -> None:
    fields: dict[str, Any] = {"seed": 7, "temperature": 0.8}
    with engine("a") as a, engine("b", weights=WEIGHTS + (lost == "kv")) as b:
        expected, _ = await whole(a, **fields)
        first = begin(a, request_id="r-1", **fields)
        while len(first.text) < 5:
            first.some.clear()
            await asyncio.wait_for(first.some.wait(), 10)
        told = a.move_out("r-1")
        assert told is not None
        if lost == "draws":
            told["continuation"]["draws"] = None
        second = begin(b, **fields, **told)
        await asyncio.wait_for(second.ended.wait(), 10)
        assert first.text + second.text != expected
        assert expected.startswith(first.text)


async def test_only_what_decodes_moves() -> None:
    with engine("a") as a:
        assert a.move_out("nobody") is None
        heard = begin(a, request_id="new")
        assert a.move_out("new") is None  # it is still to be prefilled
        await asyncio.wait_for(heard.ended.wait(), 10)
        assert heard.reason == "length"
        assert a.move_out("new") is None
        assert len(heard.text) == TOKENS


async def test_a_state_that_is_not_of_these_choices_is_refused() -> None:
    with engine("a") as a:
        state = {"output_token_ids": [3], "choices": {"matched": 1, "alive": [9]}}
        with pytest.raises(BadBody, match="not of these choices"):
            begin(
                a,
                structured_outputs={"choice": LONG},
                continuation=state,
            )


def test_the_model_holds_the_kv_of_what_it_gave_away() -> None:
    """What moves takes its blocks along only when it was read, or its hold has run out."""
    model = EngineModel(PROFILE, block_size=16, kv_blocks=64, hold_s=2.0)
    model.submit(EngineRequest("r", 40, 200), 0.0)
    assert model.move_out("r", 0.0) is None
    model.advance(0.5)
    emitted = model.move_out("r", 0.5)
    assert emitted is not None
    (end,) = [e for e in model.advance(0.5) if isinstance(e, Finished)]
    assert (end.reason, end.output_tokens, end.held) == ("moved", emitted, True)
    stats = model.stats()
    assert (stats.running, stats.held) == (0, 1)
    assert stats.kv_used_blocks == -(-(40 + emitted - 1) // 16)
    assert not model.is_idle()  # a drain waits for the reader (B60)
    taker = EngineModel(PROFILE, block_size=16, kv_blocks=64)
    whole = 40 + emitted
    left = EngineRequest("r", whole, 200 - emitted, mode=RequestMode.REMOTE_PREFILL)
    taker.submit(left, 0.6)
    taker.advance(0.6)
    assert taker.kv_arrived("r", 0.7)
    assert model.kv_pulled("r", 0.7)
    assert model.is_idle()
    assert model.stats().kv_used_blocks == 0
    (end,) = [e for e in taker.advance(1e4) if isinstance(e, Finished)]
    assert end.output_tokens == 200 - emitted


def test_draws_go_on_where_they_were() -> None:
    begun = Draws(42)
    first = [begun.next() for _ in range(5)]
    assert first == [Draws(42).after(i).next() for i in range(5)]
    assert len(set(first)) == 5


def test_choices_leave_only_their_texts() -> None:
    texts = [tuple(answer.encode(t)) for t in ("abc", "abd", "b")]
    choices = Choices.of(texts)
    assert answer.decode(choices.allowed()) == "ab"
    choices.step(texts[0][0])
    choices.step(texts[0][1])
    assert answer.decode(choices.allowed()) == "cd"
    again = Choices.of(texts).resumed(choices.document())
    again.step(texts[1][2])
    assert again.allowed() == []
    assert again.alive == (1,)
