"""Takes and releases that share a call of the script do what they do one after the other."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from readyplane.kit.redis import connect
from readyplane_router.redis import RedisStore
from readyplane_router.seats import ALL_SIDES, Side, Take, Taken, Use
from readyplane_router.store import MemoryStore, Store
from tests.contract.test_router_store import LONG_S, M, SteppedClock, seated

# (take or release, which reservation, amount): some of each at a time.
together = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "take_alike", "take_old", "release", "release_p"]),
            st.integers(0, 4),
            st.integers(1, 3),
        ),
        min_size=1,
        max_size=8,
    ),
    max_size=6,
)


async def _played(
    store: Store, groups: Sequence[Sequence[tuple[str, int, int]]], *, at_once: bool
) -> list[object]:
    for name in ("p0", "d0", "d1"):
        await seated(store, name, n=3, b=30)
    out: list[object] = []
    for group in groups:
        calls: list[Coroutine[Any, Any, object]] = []
        for what, number, amount in group:
            rid, epoch = f"r{number}", 7 if what == "take_old" else 1
            use, decode = Use(1, 4 * amount, amount, 9), f"d{number % 2}"
            if what in ("take", "take_old"):
                sides: tuple[Side, ...] = (
                    Side("p0", 1, use),
                    Side(decode, epoch, Use(1, 5 * amount)),
                )
                calls.append(store.take(M, Take(rid, sides, rid, LONG_S)))
            elif what == "take_alike":  # one worker on both sides
                sides = (Side(decode, 1, use), Side(decode, 1, Use(1, 5 * amount)))
                calls.append(store.take(M, Take(rid, sides, rid, LONG_S)))
            else:
                which = ALL_SIDES if what == "release" else 0
                calls.append(store.release(M, [(rid, which)]))
        out += await asyncio.gather(*calls) if at_once else [await call for call in calls]
        out.append(await store.usage(M))
    return out


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(together)
async def test_together_is_as_one_after_the_other(
    redis_url: str, groups: list[list[tuple[str, int, int]]]
) -> None:
    client = connect(redis_url)
    await client.flushall()
    store = RedisStore(client, call_timeout_s=5.0)
    one = await _played(MemoryStore(SteppedClock()), groups, at_once=False)
    other = await _played(store, groups, at_once=True)
    left = await _left(client)
    await store.aclose()
    assert one == other
    assert left[0] == left[1]  # whatever is reserved runs out, and nothing else


async def _left(client: Redis) -> tuple[set[Any], set[Any]]:
    reserved: Any = await client.hkeys(f"rp:{{{M}}}:reservations")
    running_out: Any = await client.zrange(f"rp:{{{M}}}:expiries", 0, -1)
    return set(reserved), set(running_out)


async def test_one_that_is_refused_does_not_touch_the_others(redis_url: str) -> None:
    client = connect(redis_url)
    await client.flushall()
    store = RedisStore(client, call_timeout_s=5.0)
    for name in ("p0", "d0"):
        await seated(store, name, n=2, b=30)

    def take(rid: str, epoch: int = 1, blocks: int = 10) -> Take:
        sides = (Side("p0", 1, Use(1, blocks)), Side("d0", epoch, Use(1, blocks)))
        return Take(rid, sides, rid, LONG_S)

    told = await asyncio.gather(
        store.take(M, take("good")),
        store.take(M, take("old", epoch=2)),
        store.take(M, take("large", blocks=31)),
        store.take(M, take("good")),
        store.take(M, take("last")),
        store.take(M, take("none left")),
        store.release(M, [("good", ALL_SIDES), ("nobody", ALL_SIDES)]),
        store.take(M, take("room again")),
    )
    usage = await store.usage(M)
    await store.aclose()
    takes = [each for each in told if isinstance(each, Taken)]
    assert [each.refused for each in takes] == [
        "",
        "d0: epoch 1, wanted 2",
        "p0: no free blocks",
        "",
        "",
        "p0: no free sequence",
        "",
    ]
    assert [each.repeated for each in takes] == [False, False, False, True, False, False, False]
    assert told[6] == 1
    assert usage == {"p0": Use(2, 20), "d0": Use(2, 20)}
