"""One suite for both stores of the router: what is taken, what is given back, who is alive."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from readyplane.core.errors import Unavailable
from readyplane.core.worker import LoadReport, Role, WorkerState
from readyplane.kit.clock import SystemClock
from readyplane.kit.redis import connect
from readyplane_router import lease
from readyplane_router import redis as router_redis
from readyplane_router.redis import RedisStore
from readyplane_router.seats import ALL_SIDES, INCOMPLETE, PUT_BACK, TWIN, Side, Take, Taken, Use
from readyplane_router.store import (
    Change,
    KvEntry,
    MemoryStore,
    Record,
    Renew,
    Store,
    Vitals,
)
from tests.router_world import evidence, offer, serving

M = "demo"
LONG_S = 60.0


@dataclass
class Case:
    """A store, and a way to let its clock go on."""

    store: Store
    passing: Callable[[float], Awaitable[None]]


class SteppedClock(SystemClock):
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s


@pytest.fixture(params=["memory", "redis"])
async def case(request: pytest.FixtureRequest) -> AsyncIterator[Case]:
    if request.param == "memory":
        clock = SteppedClock()

        async def step(seconds: float) -> None:
            clock.now_s += seconds

        yield Case(MemoryStore(clock, shared=True), step)
    else:
        client = connect(request.getfixturevalue("redis_url"))
        await client.flushall()
        store = RedisStore(client, call_timeout_s=5.0)
        yield Case(store, asyncio.sleep)
        await store.aclose()


def record(worker_id: str = "p0", epoch: int = 1, **changes: Any) -> Record:
    role = Role.PREFILL if worker_id.startswith("p") else Role.DECODE
    incarnation = changes.pop("incarnation", f"{worker_id}-1")
    good = Record(offer(worker_id, role, incarnation=incarnation), epoch, WorkerState.PROVISIONED)
    return replace(good, **changes)


async def seated(store: Store, worker_id: str, epoch: int = 1, *, n: int = 4, b: int = 100) -> None:
    granted = await store.grant(record(worker_id, epoch), ttl_s=LONG_S)
    assert isinstance(granted, Record)
    assert await store.seat(M, worker_id, epoch, is_open=True, sequences=n, blocks=b)


def pair(rid: str, *, n: int = 1, b: int = 10, ttl_s: float = LONG_S, epoch: int = 1) -> Take:
    sides = (
        Side("p0", epoch, Use(n, b, 1_000, 160)),
        Side("d0", epoch, Use(n, b)),
    )
    return Take(rid, sides, f"payload of {rid} \u00e9", ttl_s)


# --------------------------------------------------------------------------- leases


async def test_a_grant_is_repeated_for_one_incarnation_and_fences_another(case: Case) -> None:
    store = case.store
    first = await store.grant(record(epoch=1), ttl_s=LONG_S)
    assert isinstance(first, Record) and first.epoch == 1
    again = await store.grant(record(epoch=2), ttl_s=LONG_S)
    assert isinstance(again, Record) and again.epoch == 1
    newer = await store.grant(record(epoch=3, incarnation="p0-2"), ttl_s=LONG_S)
    assert isinstance(newer, Record) and newer.epoch == 3
    assert isinstance(await store.grant(record(epoch=4), ttl_s=LONG_S), lease.Lost)
    assert await store.renew([Renew(M, "p0", 1, LONG_S), Renew(M, "p0", 3, LONG_S)]) == [
        "stale",
        "ok",
    ]
    assert not await store.put(record(epoch=1))
    assert not await store.end(record(epoch=1))


async def test_an_older_epoch_is_refused(case: Case) -> None:
    await case.store.grant(record(epoch=9), ttl_s=LONG_S)
    verdict = await case.store.grant(record(epoch=8, incarnation="p0-2"), ttl_s=LONG_S)
    assert verdict == lease.Stale(9)


async def test_of_many_that_register_at_once_one_holds_the_lease(case: Case) -> None:
    async def one(number: int) -> object:
        return await case.store.grant(record(epoch=number, incarnation=f"p0-{number}"), ttl_s=9.0)

    verdicts = await asyncio.gather(*(one(number) for number in range(1, 9)))
    granted = [v.epoch for v in verdicts if isinstance(v, Record)]
    assert 8 in granted
    renewed = await case.store.renew([Renew(M, "p0", epoch, 9.0) for epoch in granted])
    assert renewed.count("ok") == 1
    assert renewed[granted.index(max(granted))] == "ok"


async def test_a_record_comes_back_as_it_was(case: Case) -> None:
    await case.store.grant(record(), ttl_s=LONG_S)
    full = record(
        state=WorkerState.READY,
        serving=serving(),
        checks=tuple(evidence(1, 2)),
        ready_wall_s=1.5,
        group_epoch=2,
        keeper="router-1",
        told="flip",
        told_reason="decode is short",
        told_role="decode",
        told_for_s=30.0,
        words=2,
    )
    assert await case.store.put(full)
    vitals = Vitals(load=LoadReport(running=3, kv_used_blocks=None), drained=True)
    assert await case.store.renew([Renew(M, "p0", 1, LONG_S, vitals)]) == ["ok"]
    assert await case.store.worker(M, "p0") == (full, vitals)
    assert await case.store.workers() == [(full, vitals)]
    assert await case.store.worker(M, "nobody") is None


async def test_a_lease_runs_out_by_the_store_s_clock_and_is_told_once(case: Case) -> None:
    store = case.store
    await store.grant(record("p0"), ttl_s=0.2)
    await store.grant(record("d0"), ttl_s=LONG_S)
    assert await store.expire() == []
    await case.passing(0.25)
    both = await asyncio.gather(store.expire(), store.expire())
    assert sorted(both, key=len) == [[], [Change(M, "p0")]]
    found = await store.worker(M, "p0")
    assert found is not None and found[0].state is WorkerState.GONE
    assert await store.renew([Renew(M, "p0", 1, LONG_S)]) == ["stale"]
    back = await store.grant(record("p0", epoch=2), ttl_s=LONG_S)
    assert isinstance(back, Record) and back.epoch == 2


async def test_renewal_keeps_a_lease_alive(case: Case) -> None:
    await case.store.grant(record(), ttl_s=0.3)
    for _ in range(3):
        await case.passing(0.15)
        assert await case.store.renew([Renew(M, "p0", 1, 0.3)]) == ["ok"]
        assert await case.store.expire() == []


async def test_an_ended_lease_is_forgotten_and_an_unknown_one_is_said_to_be_unknown(
    case: Case,
) -> None:
    store = case.store
    await seated(store, "p0")
    await store.forget(M, "p0", 1)  # it lives: nothing is forgotten
    assert await store.worker(M, "p0") is not None
    assert await store.end(record(state=WorkerState.GONE))
    assert not await store.end(record(state=WorkerState.GONE))
    await store.forget(M, "p0", 1)
    assert await store.worker(M, "p0") is None
    assert await store.usage(M) == {}
    assert await store.renew([Renew(M, "nobody", 1, LONG_S)]) == ["unknown"]


async def test_a_store_that_lost_everything_is_refilled_and_no_epoch_goes_back(case: Case) -> None:
    store = case.store
    assert await store.restore(record(epoch=7), ttl_s=LONG_S, vitals=Vitals(drained=True))
    assert await store.renew([Renew(M, "p0", 7, LONG_S)]) == ["ok"]
    assert not await store.restore(record(epoch=6), ttl_s=LONG_S, vitals=None)
    assert await store.restore(record(epoch=7), ttl_s=LONG_S, vitals=None)
    found = await store.worker(M, "p0")
    assert found is not None and found[0].epoch == 7 and found[1] == Vitals(drained=True)


# --------------------------------------------------------------------------- seats and takes


async def test_both_sides_are_taken_or_none(case: Case) -> None:
    store = case.store
    await seated(store, "p0", n=2)
    await seated(store, "d0", n=1)
    taken = await store.take(M, pair("r1"))
    assert taken == Taken(pair("r1").payload, used=(Use(1, 10, 1_000, 160), Use(1, 10)))
    refused = await store.take(M, pair("r2"))
    assert refused.refused == "d0: no free sequence"
    assert refused.used == (Use(1, 10, 1_000, 160), Use(1, 10))
    assert (await store.usage(M))["p0"].sequences == 1


@pytest.mark.parametrize("which", ["p0", "d0"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("shut", "shut"),
        ("newer", "epoch 2, wanted 1"),
        ("full", "no free blocks"),
        ("gone", "shut"),
        ("never", "no seat"),
    ],
)
async def test_why_a_side_is_refused(case: Case, which: str, change: str, why: str) -> None:
    store = case.store
    for name in ("p0", "d0"):
        if change != "never" or name != which:
            await seated(store, name)
    if change == "shut":
        await store.seat(M, which, 1, is_open=False, sequences=4, blocks=100)
    elif change == "newer":
        await store.grant(record(which, 2, incarnation="next"), ttl_s=LONG_S)
        await store.seat(M, which, 2, is_open=True, sequences=4, blocks=100)
    elif change == "full":
        await store.seat(M, which, 1, is_open=True, sequences=4, blocks=9)
    elif change == "gone":
        await store.end(record(which, state=WorkerState.GONE))
    assert (await store.take(M, pair("r"))).refused == f"{which}: {why}"
    assert all(use == Use() for use in (await store.usage(M)).values())


async def test_the_same_reservation_taken_twice_is_one(case: Case) -> None:
    await seated(case.store, "p0")
    await seated(case.store, "d0")
    await case.store.take(M, pair("r"))
    again = await case.store.take(M, replace(pair("r"), payload="another"))
    assert again.repeated and again.payload == pair("r").payload
    assert (await case.store.usage(M))["d0"] == Use(1, 10)


async def test_release_of_one_side_of_all_and_of_what_is_not_known(case: Case) -> None:
    store = case.store
    await seated(store, "p0")
    await seated(store, "d0")
    await store.take(M, pair("r"))
    assert await store.release(M, [("r", 0), ("r", 0)]) == 0
    assert await store.usage(M) == {"p0": Use(), "d0": Use(1, 10)}
    assert await store.release(M, [("r", ALL_SIDES), ("r", ALL_SIDES), ("x", ALL_SIDES)]) == 2
    assert await store.usage(M) == {"p0": Use(), "d0": Use()}


async def test_a_local_pair_is_one_side(case: Case) -> None:
    await seated(case.store, "d0")
    one = Take("r", (Side("d0", 1, Use(1, 20, 5, 160)),), "", LONG_S)
    assert (await case.store.take(M, one)).used == (Use(1, 20, 5, 160),)
    assert await case.store.release(M, [("r", ALL_SIDES)]) == 0
    assert await case.store.usage(M) == {"d0": Use()}


async def test_growth_is_never_refused_and_is_given_back_too(case: Case) -> None:
    store = case.store
    await seated(store, "p0")
    await seated(store, "d0", b=15)
    await store.take(M, pair("r"))
    assert await store.grow(M, "r", 1, 16)
    assert (await store.usage(M))["d0"].blocks == 26
    assert not await store.grow(M, "nobody", 1, 16)
    await store.release(M, [("r", ALL_SIDES)])
    assert (await store.usage(M))["d0"] == Use()


async def test_a_new_epoch_starts_with_nothing_used_and_old_releases_do_not_reach_it(
    case: Case,
) -> None:
    store = case.store
    await seated(store, "p0")
    await seated(store, "d0")
    await store.take(M, pair("r"))
    await store.grant(record("d0", 2, incarnation="next"), ttl_s=LONG_S)
    await store.seat(M, "d0", 2, is_open=True, sequences=4, blocks=100)
    assert not await store.seat(M, "d0", 1, is_open=True, sequences=4, blocks=100)
    other = Take("s", (Side("d0", 2, Use(1, 7)),), "", LONG_S)
    assert not (await store.take(M, other)).refused
    assert await store.release(M, [("r", ALL_SIDES)]) == 0
    assert await store.usage(M) == {"p0": Use(), "d0": Use(1, 7)}


async def test_reservations_run_out_unless_extended_and_are_told_once(case: Case) -> None:
    store = case.store
    await seated(store, "p0")
    await seated(store, "d0")
    await store.take(M, pair("short", ttl_s=0.2))
    await store.take(M, pair("long", ttl_s=0.2))
    await store.extend(M, ["long", "nobody"], ttl_s=LONG_S)
    assert await store.sweep(M) == []
    await case.passing(0.25)
    both = await asyncio.gather(store.sweep(M), store.sweep(M))
    assert sorted(both, key=len) == [[], ["short"]]
    assert (await store.usage(M))["d0"] == Use(1, 10)
    assert await store.release(M, [("short", ALL_SIDES)]) == 1


async def test_the_store_says_which_reservations_it_lacks(case: Case) -> None:
    store = case.store
    await seated(store, "p0")
    await seated(store, "d0")
    assert await store.missing(M, []) == []
    await store.take(M, pair("swept", ttl_s=0.2))
    await store.take(M, pair("kept"))
    assert await store.missing(M, ["nobody", "swept", "kept"]) == ["nobody"]
    await case.passing(0.25)
    assert await store.missing(M, ["swept"]) == []  # due, and still counted until it is swept
    assert await store.sweep(M) == ["swept"]
    assert await store.release(M, [("kept", 0)]) == 0
    assert await store.missing(M, ["swept", "kept"]) == ["swept"]  # one side of it is left
    assert (await store.usage(M))["d0"] == Use(1, 10)  # asking changed nothing
    assert await store.release(M, [("kept", 1)]) == 0
    assert await store.missing(M, ["swept", "kept"]) == ["swept", "kept"]


async def test_what_was_promised_without_the_store_is_put_back_compared_by_nobody(
    case: Case,
) -> None:
    store = case.store
    await seated(store, "p0", n=1)
    await seated(store, "d0", n=1)
    await store.take(M, pair("r1"))
    assert await store.put_back(M, [pair("r2")]) == [PUT_BACK]
    assert (await store.usage(M))["d0"].sequences == 2
    # What is there already is made what its router holds: grown, its prefill end given back.
    grown = replace(pair("r1"), sides=(Side("p0", 1, Use()), Side("d0", 1, Use(1, 26))))
    for _ in range(2):
        assert await store.put_back(M, [grown, pair("r2")]) == [PUT_BACK, PUT_BACK]
        assert await store.usage(M) == {"p0": Use(1, 10, 1_000, 160), "d0": Use(2, 36)}
    other = replace(pair("r1"), payload="another router's pair")
    assert await store.put_back(M, [other]) == [TWIN]
    assert await store.release(M, [("r1", ALL_SIDES), ("r2", ALL_SIDES)]) == 0
    assert await store.usage(M) == {"p0": Use(), "d0": Use()}


async def test_what_was_put_back_before_its_seat_takes_nothing_from_others(case: Case) -> None:
    """Counted on no seat, released from no seat: else two would be promised its place."""
    store = case.store
    await seated(store, "p0")
    assert await store.put_back(M, [pair("early"), pair("late")]) == [INCOMPLETE, INCOMPLETE]
    await seated(store, "d0", n=1)
    assert not (await store.take(M, pair("r"))).refused
    assert await store.release(M, [("early", ALL_SIDES)]) == 0
    assert (await store.usage(M))["d0"] == Use(1, 10)
    assert (await store.take(M, pair("s"))).refused == "d0: no free sequence"
    assert await store.put_back(M, [pair("late")]) == [PUT_BACK]
    assert (await store.usage(M)) == {"p0": Use(2, 20, 2_000, 320), "d0": Use(2, 20)}


async def test_a_seat_made_anew_under_its_epoch_is_another_seat(case: Case) -> None:
    """Forgotten, then restored by the router that still has it: old releases do not reach it."""
    store = case.store
    await seated(store, "p0")
    await seated(store, "d0")
    await store.take(M, pair("old"))
    await store.end(record("d0", state=WorkerState.GONE))
    await store.forget(M, "d0", 1)
    assert await store.restore(record("d0"), ttl_s=LONG_S, vitals=None)
    await store.seat(M, "d0", 1, is_open=True, sequences=4, blocks=100)
    await store.take(M, pair("new"))
    await store.release(M, [("old", ALL_SIDES)])
    assert (await store.usage(M))["d0"] == Use(1, 10)


async def test_two_at_once_never_take_the_last_place_both(case: Case) -> None:
    await seated(case.store, "p0", n=50)
    await seated(case.store, "d0", n=5)
    takes = await asyncio.gather(*(case.store.take(M, pair(f"r{i}", b=1)) for i in range(20)))
    assert sum(not t.refused for t in takes) == 5
    assert (await case.store.usage(M)) == {
        "p0": Use(5, 5, 5_000, 800),
        "d0": Use(5, 5),
    }


operations = st.lists(
    st.tuples(
        st.sampled_from(["take", "release", "release_p", "grow", "reseat", "shut"]),
        st.integers(0, 5),
        st.integers(1, 3),
    ),
    max_size=25,
)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(operations)
async def test_both_stores_do_the_same(redis_url: str, told: list[tuple[str, int, int]]) -> None:
    """The twin is honest: the same calls give the same answers and the same usage."""
    client = connect(redis_url)
    await client.flushall()
    stores: list[Store] = [MemoryStore(SteppedClock()), RedisStore(client, call_timeout_s=5.0)]
    answers: list[list[object]] = []
    for store in stores:
        out: list[object] = []
        epoch = {"p0": 1, "d0": 1}
        for name in epoch:
            await seated(store, name, n=3, b=30)
        for what, number, amount in told:
            rid = f"r{number}"
            if what == "take":
                sides = (
                    Side("p0", epoch["p0"], Use(1, 4 * amount, amount, 9)),
                    Side("d0", epoch["d0"], Use(1, 5 * amount)),
                )
                out.append(await store.take(M, Take(rid, sides, rid, LONG_S)))
            elif what in ("release", "release_p"):
                which = ALL_SIDES if what == "release" else 0
                out.append(await store.release(M, [(rid, which)]))
            elif what == "grow":
                out.append(await store.grow(M, rid, amount % 2, amount))
            elif what == "reseat":
                epoch["d0"] += 1
                out.append(
                    await store.seat(M, "d0", epoch["d0"], is_open=True, sequences=3, blocks=30)
                )
            else:
                out.append(
                    await store.seat(
                        M, "p0", 1, is_open=bool(amount % 2), sequences=amount, blocks=30
                    )
                )
            out.append(await store.usage(M))
        answers.append(out)
        await store.aclose()
    assert answers[0] == answers[1]


# --------------------------------------------------------------------------- KV and watching


async def test_the_kv_log_is_read_from_where_one_left_off(case: Case) -> None:
    store = case.store
    for number in range(3):
        await store.append_kv(M, [KvEntry("", "router-1", "p0", "p0-1", bytes([number, 255]))])
    found = await store.read_kv(M, "")
    assert [e.packed for e in found] == [b"\x00\xff", b"\x01\xff", b"\x02\xff"]
    assert [e.packed for e in await store.read_kv(M, found[1].entry_id)] == [b"\x02\xff"]
    assert await store.read_kv(M, found[2].entry_id) == []
    assert await store.read_kv("another", "") == []


async def test_snapshots_belong_to_an_incarnation(case: Case) -> None:
    await case.store.put_snapshot(M, "p0", "p0-1", b"\x00data")
    assert await case.store.snapshot(M, "p0", "p0-1") == b"\x00data"
    assert await case.store.snapshot(M, "p0", "p0-2") == b""
    await case.store.put_snapshot(M, "p0", "p0-1", b"")
    assert await case.store.snapshot(M, "p0", "p0-1") == b""


async def test_changes_are_watched(case: Case) -> None:
    seen: list[Change] = []

    async def follow() -> None:
        async for change in case.store.watch():
            seen.append(change)

    task = asyncio.create_task(follow())
    async with asyncio.timeout(10):
        while not seen:  # a subscription takes a moment
            await case.store.grant(record("p9", epoch=len(seen) + 1), ttl_s=LONG_S)
            await case.store.put(record("p9", epoch=1))
            await asyncio.sleep(0.02)
        await case.store.grant(record("d0"), ttl_s=LONG_S)
        while Change(M, "d0") not in seen:
            await asyncio.sleep(0.02)
    task.cancel()
    assert set(seen) == {Change(M, "p9"), Change(M, "d0")}


async def test_routers_that_live_are_counted(case: Case) -> None:
    assert await case.store.attend("one", ttl_s=0.2) == 1
    assert await case.store.attend("two", ttl_s=LONG_S) == 2
    await case.passing(0.25)
    assert await case.store.attend("two", ttl_s=LONG_S) == 1


async def test_a_leaders_number_only_grows_by_model(case: Case) -> None:
    """Whichever router a leader speaks to, the others know it from then on (B146)."""
    store = case.store
    assert [await store.fence(M, n) for n in (3, 7, 5, 7)] == [3, 7, 7, 7]
    assert await store.fence("other", 2) == 2
    assert await store.fence(M, 1) == 7


# --------------------------------------------------------------------------- keys


@pytest.mark.parametrize("model", ["demo", "org/name:8b", "{odd}", "a b"])
def test_all_keys_of_a_model_are_in_one_slot(model: str) -> None:
    """A cluster runs a script only where all its keys are, and keeps a model's keys together."""
    keys = [
        *router_redis._keys(model),
        router_redis._log_key(model),
        router_redis._snapshot_key(model, "p0", "p0-1"),
    ]
    assert len(set(keys)) == len(keys)
    assert len({key_slot(key.encode()) for key in keys}) == 1


def test_the_script_touches_the_keys_that_it_is_given_and_no_other() -> None:
    text = re.sub(r"--[^\n]*", "", router_redis.SCRIPT)
    declared = re.findall(r"(\w+(?:, \w+)*) =\s+(KEYS\[\d\](?:, KEYS\[\d\])*)", text)
    names = [name for names, _ in declared for name in names.split(", ")]
    assert len(names) == len(router_redis.PARTS) == sum(k.count("KEYS") for _, k in declared)
    touched = re.findall(r"redis\.call\('(\w+)'(?:, ([^,)]+))?", text)
    assert {key for command, key in touched if command not in ("TIME", "PUBLISH")} <= set(names)


async def test_b151_a_full_store_is_a_typed_error_and_takes_nothing(redis_url: str) -> None:
    """It fails closed: no lease and no place is granted that it could not write down."""
    client = connect(redis_url)
    store = RedisStore(client, call_timeout_s=5.0)
    await seated(store, "p0")
    await seated(store, "d0")
    await client.config_set("maxmemory", 1)
    try:
        with pytest.raises(Unavailable, match="memory"):
            await store.take(M, pair("r"))
        with pytest.raises(Unavailable, match="memory"):
            await store.grant(record("d1"), ttl_s=LONG_S)
    finally:
        await client.config_set("maxmemory", 0)
    assert await store.usage(M) == {"p0": Use(), "d0": Use()}
    assert not (await store.take(M, pair("r"))).refused
    await store.aclose()
