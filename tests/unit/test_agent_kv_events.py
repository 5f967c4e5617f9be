"""KV events on their way to the router: in order, bounded, and told anew when in doubt."""

import asyncio
from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane_agent.kv_events import KvForwarder


def applied(batches: tuple[KvEventBatch, ...], held: set[int]) -> set[int]:
    """What a router believes after these batches."""
    for batch in batches:
        for event in batch.events:
            if event.kind == "stored":
                held |= set(event.block_hashes)
            elif event.kind == "removed":
                held -= set(event.block_hashes)
            else:
                held.clear()
    return held


async def feed(forwarder: KvForwarder, *events: KvEvent) -> None:
    async def source() -> AsyncIterator[KvEventBatch]:
        for number, event in enumerate(events):
            yield KvEventBatch(number, (event,))

    await forwarder.follow(source())


async def test_events_are_numbered_by_this_incarnation() -> None:
    forwarder = KvForwarder()
    assert forwarder.take() == ()
    await feed(forwarder, KvEvent("stored", (1, 2)), KvEvent("removed", (1,)))
    assert forwarder.pending.is_set()
    (first,) = forwarder.take()
    assert first.sequence == 1 and len(first.events) == 2
    assert not forwarder.pending.is_set()
    await feed(forwarder, KvEvent("stored", (3,)))
    assert forwarder.take()[0].sequence == 2


async def test_replay_clears_first_and_tells_all() -> None:
    forwarder = KvForwarder()
    await feed(forwarder, KvEvent("stored", tuple(range(10_000))))
    forwarder.take()
    forwarder.replay()
    (batch,) = forwarder.take()
    assert batch.events[0].kind == "cleared"
    assert applied((batch,), {77}) == set(range(10_000))
    assert forwarder.replays == 1


async def test_what_piles_up_collapses_into_one_replay() -> None:
    """The queue is bounded: beyond it the whole truth is shorter than its history."""
    forwarder = KvForwarder(pending_blocks_max=10)
    for start in range(0, 100, 5):
        await feed(forwarder, KvEvent("stored", tuple(range(start, start + 5))))
        await feed(forwarder, KvEvent("removed", tuple(range(start, start + 4))))
    (batch,) = forwarder.take()
    assert batch.events[0].kind == "cleared"
    assert applied((batch,), set()) == set(range(4, 100, 5))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["stored", "removed"]), st.lists(st.integers(0, 30))),
            st.just(("cleared", [])),
            st.just(("take", [])),
            st.just(("lost", [])),
        ),
        max_size=40,
    )
)
def test_a_router_that_hears_everything_believes_the_truth(
    story: list[tuple[str, list[int]]],
) -> None:
    async def run() -> None:
        forwarder, truth, believed = KvForwarder(pending_blocks_max=20), set[int](), set[int]()
        for kind, blocks in story:
            if kind == "take":
                believed = applied(forwarder.take(), believed)
            elif kind == "lost":
                forwarder.take()
                forwarder.replay()
            else:
                event = KvEvent(kind, tuple(blocks))
                truth = applied((KvEventBatch(0, (event,)),), truth)
                await feed(forwarder, event)
        assert applied(forwarder.take(), believed) == truth
        assert forwarder.held_blocks == len(truth)

    asyncio.run(run())
