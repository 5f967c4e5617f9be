"""Operations that share a call: who gets which answer, and what becomes of those who leave."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from readyplane.core.errors import Unavailable
from readyplane_router.bundle import BUNDLE_OPERATIONS_MAX, Bundles

TAKE_WORDS = 2


class Sender:
    """Answers each `("op", name)` with its name; may be told to wait or to fail."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.fault: Exception | None = None

    async def __call__(self, model: str, arguments: Sequence[Any]) -> Sequence[Any]:
        self.calls.append(list(arguments))
        await self.open.wait()
        if self.fault is not None:
            raise self.fault
        return [f"{model}:{name}" for name in arguments[1::TAKE_WORDS]]


async def test_what_comes_together_goes_together_and_the_rest_with_the_next() -> None:
    sender = Sender()
    bundles = Bundles(sender)
    sender.open.clear()
    first = [bundles.add("m", ("op", name)) for name in "abc"]
    other = bundles.add("n", ("op", "x"))
    await asyncio.sleep(0)
    later = [bundles.add("m", ("op", name)) for name in "de"]
    await asyncio.sleep(0)
    assert sender.calls == [["op", "a", "op", "b", "op", "c"], ["op", "x"]]
    sender.open.set()
    assert await asyncio.gather(*first, *later) == ["m:a", "m:b", "m:c", "m:d", "m:e"]
    assert await other == "n:x"
    assert sender.calls[2] == ["op", "d", "op", "e"]


async def test_a_call_that_fails_is_told_to_those_it_carried() -> None:
    sender = Sender()
    bundles = Bundles(sender)
    sender.fault = Unavailable("Redis does not answer", "check it")
    told = await asyncio.gather(
        *(bundles.add("m", ("op", name)) for name in "ab"), return_exceptions=True
    )
    assert [type(each) for each in told] == [Unavailable, Unavailable]
    sender.fault = None
    assert await bundles.add("m", ("op", "c")) == "m:c"


async def test_who_waits_behind_a_call_that_fails_is_told_at_once() -> None:
    sender = Sender()
    bundles = Bundles(sender)
    sender.open.clear()
    sender.fault = Unavailable("Redis does not answer", "check it")
    first = bundles.add("m", ("op", "a"))
    await asyncio.sleep(0)
    second = bundles.add("m", ("op", "b"))
    sender.open.set()
    told = await asyncio.gather(first, second, return_exceptions=True)
    assert [type(each) for each in told] == [Unavailable, Unavailable]
    assert len(sender.calls) == 1
    sender.fault = None
    assert await bundles.add("m", ("op", "c")) == "m:c"


async def test_who_leaves_before_it_is_sent_is_not_sent_and_after_it_is_not_told() -> None:
    sender = Sender()
    bundles = Bundles(sender)
    sender.open.clear()
    sent = bundles.add("m", ("op", "a"))
    await asyncio.sleep(0)
    unsent, stays = bundles.add("m", ("op", "b")), bundles.add("m", ("op", "c"))
    sent.cancel()
    unsent.cancel()
    sender.open.set()
    assert await stays == "m:c"
    assert sender.calls == [["op", "a"], ["op", "c"]]


async def test_a_bundle_is_bounded() -> None:
    sender = Sender()
    bundles = Bundles(sender)
    answers = [bundles.add("m", ("op", n)) for n in range(BUNDLE_OPERATIONS_MAX + 1)]
    await asyncio.gather(*answers)
    assert [len(call) // TAKE_WORDS for call in sender.calls] == [BUNDLE_OPERATIONS_MAX, 1]


async def test_who_is_in_no_hurry_waits_for_company_and_goes_with_who_is() -> None:
    sender = Sender()
    bundles = Bundles(sender)
    patient = [bundles.add("m", ("op", name), within_s=0.02) for name in "ab"]
    await asyncio.sleep(0)
    assert not sender.calls
    assert await asyncio.gather(*patient) == ["m:a", "m:b"]
    patient = [bundles.add("m", ("op", "c"), within_s=60.0)]
    assert await bundles.add("m", ("op", "d")) == "m:d"
    assert await patient[0] == "m:c"
    assert sender.calls == [["op", "a", "op", "b"], ["op", "c", "op", "d"]]


async def test_closing_tells_who_waits_for_company() -> None:
    sender = Sender()
    bundles = Bundles(sender)
    answer = bundles.add("m", ("op", "a"), within_s=0.01)
    await bundles.aclose()
    with pytest.raises(Unavailable, match="closed"):
        await answer
    await asyncio.sleep(0.02)
    assert not sender.calls


async def test_closing_tells_who_waits() -> None:
    sender = Sender()
    bundles = Bundles(sender)
    sender.open.clear()
    answers = [bundles.add("m", ("op", "a"))]
    await asyncio.sleep(0)
    answers.append(bundles.add("m", ("op", "b")))
    await bundles.aclose()
    for answer in answers:
        with pytest.raises(Unavailable, match="closed"):
            await answer
