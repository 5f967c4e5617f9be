"""The planner's ports: one suite over the memory twin and the real store."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from readyplane.core.errors import Conflict, NotFound, StaleEpoch
from readyplane.kit.database import async_engine, migrate
from readyplane.kit.redis import connect
from readyplane_planner.journal import Journal, MemoryJournal, Outcome, Record, StoredPolicy
from readyplane_planner.leadership import Leadership, LeaseStore, MemoryLeaseStore
from readyplane_planner.postgres import FENCE, PostgresJournal
from readyplane_planner.redis import RedisLeaseStore

BEGUN_S = 1_700_000_000.0


@pytest.fixture(params=["memory", "postgres"])
async def journal(request: pytest.FixtureRequest) -> AsyncIterator[Journal]:
    if request.param == "memory":
        yield MemoryJournal()
        return
    url: str = request.getfixturevalue("database_url")
    await migrate(url, "readyplane_planner")
    engine = async_engine(url)
    async with engine.begin() as connection:
        await connection.execute(
            text("TRUNCATE decisions, decision_outcomes, policies, planner_fences RESTART IDENTITY")
        )
    try:
        yield PostgresJournal(engine)
    finally:
        await engine.dispose()


def record(number: int, *, changed: bool = True, model: str = "m") -> Record:
    return Record(
        decision_id=f"{model}-{number}",
        model=model,
        create_s=BEGUN_S + number,
        changed=changed,
        summary=f"prefill {number} → {number + 1}",
        policy_version=3,
        document={"orders": [], "load": 0.1 + number, "none": None, "text": "ü"},
        inputs=b"\x1f\x8b" + bytes([number]),
    )


async def test_what_was_added_is_what_is_read(journal: Journal) -> None:
    await journal.append(record(1))
    found, outcomes = await journal.get("m-1")
    assert found == replace(record(1), sequence=found.sequence) and found.sequence > 0
    assert outcomes == []


async def test_the_first_record_of_an_id_stays(journal: Journal) -> None:
    await journal.append(record(1))
    await journal.append(replace(record(1), summary="another"))
    assert (await journal.get("m-1"))[0].summary == "prefill 1 → 2"


async def test_an_unknown_id_is_an_error_with_a_remedy(journal: Journal) -> None:
    with pytest.raises(NotFound, match="decision 'x' is not known"):
        await journal.get("x")


async def test_newest_first_in_pages_without_inputs(journal: Journal) -> None:
    for number in range(6):
        await journal.append(record(number, changed=number % 2 == 0))
    await journal.append(record(9, model="other"))
    page = await journal.newest("m", limit=4)
    assert [r.decision_id for r in page] == ["m-5", "m-4", "m-3", "m-2"]
    assert {r.inputs for r in page} == {b""}
    rest = await journal.newest("m", limit=4, before=page[-1].sequence)
    assert [r.decision_id for r in rest] == ["m-1", "m-0"]
    changes = await journal.newest("m", limit=9, changes_only=True)
    assert [r.decision_id for r in changes] == ["m-4", "m-2", "m-0"]


async def test_what_came_after_a_record_oldest_first(journal: Journal) -> None:
    for number in range(5):
        await journal.append(record(number))
        await journal.append(record(number, model="other"))
    first = (await journal.get("m-1"))[0]
    after = await journal.since("m", first.sequence, limit=2)
    assert [r.decision_id for r in after] == ["m-2", "m-3"]
    assert {r.inputs for r in after} == {b""}
    assert await journal.since("m", after[-1].sequence + 9, limit=9) == []


async def test_outcomes_are_told_once_and_in_order(journal: Journal) -> None:
    await journal.append(record(1))
    ordered = Outcome("m-1", "p-1", "ordered", BEGUN_S + 1.5, {"note": "local"})
    ready = Outcome("m-1", "p-1", "ready", BEGUN_S + 7.25, {"start": {"wall_s": 5.75}})
    await journal.attach([ordered])
    await journal.attach([replace(ordered, at_s=BEGUN_S + 99), ready])
    await journal.attach([])
    assert (await journal.get("m-1"))[1] == [ordered, ready]
    assert await journal.outcomes("m", "ready", limit=5) == [ready]
    assert await journal.outcomes("other", "ready", limit=5) == []
    assert await journal.outcomes_of(["m-1", "m-9"], ["ready", "x"]) == [ready]
    assert (
        await journal.outcomes_of(["m-1"], ["x"]) == await journal.outcomes_of([], ["ready"]) == []
    )


async def test_pruning_keeps_changes_before_samples(journal: Journal) -> None:
    for number in range(8):
        await journal.append(record(number, changed=number < 3))
        await journal.attach([Outcome(f"m-{number}", "p", "ready", BEGUN_S)])
    assert await journal.prune("m", keep=4, older_than_s=0.0) == 4
    kept = [r.decision_id for r in await journal.newest("m", limit=9)]
    assert kept == ["m-7", "m-2", "m-1", "m-0"]
    assert await journal.prune("m", keep=99, older_than_s=BEGUN_S + 1.5) == 2
    assert [r.decision_id for r in await journal.newest("m", limit=9)] == ["m-7", "m-2"]
    assert len(await journal.outcomes("m", "ready", limit=99)) == 2


async def test_policy_moves_by_compare_and_set(journal: Journal) -> None:
    assert await journal.policy("m") is None
    first = await journal.put_policy(
        StoredPolicy("m", 0, {"headroom": 0.1}, BEGUN_S), expected_version=0
    )
    assert first.version == 1
    second = await journal.put_policy(
        StoredPolicy("m", 0, {"headroom": 0.2}, BEGUN_S), expected_version=1
    )
    assert await journal.policy("m") == second == StoredPolicy("m", 2, {"headroom": 0.2}, BEGUN_S)
    with pytest.raises(Conflict, match="expected 1, found 2"):
        await journal.put_policy(StoredPolicy("m", 0, {}, BEGUN_S), expected_version=1)
    with pytest.raises(Conflict, match="expected 1, found 0"):
        await journal.put_policy(StoredPolicy("new", 0, {}, BEGUN_S), expected_version=1)


async def test_epochs_only_grow(journal: Journal) -> None:
    numbers = [await journal.next_epoch(model) for model in "mnmn"]
    assert numbers == sorted(set(numbers)) and numbers[0] > 0
    at_once = await asyncio.gather(*(journal.next_epoch("m") for _ in range(4)))
    assert len(set(at_once)) == 4 and min(at_once) > numbers[-1]
    with pytest.raises(StaleEpoch):
        await journal.append(record(1), leader_epoch=max(at_once) - 1)
    await journal.append(record(1), leader_epoch=max(at_once))


async def test_a_record_of_a_stale_leader_is_refused(journal: Journal) -> None:
    old = await journal.next_epoch("m")
    await journal.append(record(1), leader_epoch=old)
    other = await journal.next_epoch("other")
    await journal.append(record(2), leader_epoch=old)  # another model's leader fences nobody here
    new = await journal.next_epoch("m")
    with pytest.raises(StaleEpoch, match=f"expected {old}, found {new}; stand by"):
        await journal.append(record(3), leader_epoch=old)
    with pytest.raises(StaleEpoch):
        await journal.append(record(3))
    await journal.append(record(4), leader_epoch=new)
    await journal.append(record(5, model="other"), leader_epoch=other)
    assert [r.decision_id for r in await journal.newest("m", limit=9)] == ["m-4", "m-2", "m-1"]


async def test_a_new_number_waits_for_the_record_that_is_being_written(database_url: str) -> None:
    """What a new leader reads after it has its number is all that older ones ever add."""
    await migrate(database_url, "readyplane_planner")
    engine = async_engine(database_url)
    try:
        journal = PostgresJournal(engine)
        await journal.next_epoch("slow")
        async with engine.begin() as writing:
            await writing.execute(FENCE, {"model": "slow"})
            taking = asyncio.create_task(journal.next_epoch("slow"))
            done, _ = await asyncio.wait({taking}, timeout=0.2)
            assert not done
        assert await taking > 0
    finally:
        await engine.dispose()


async def test_the_database_refuses_to_rewrite_history(database_url: str) -> None:
    await migrate(database_url, "readyplane_planner")
    engine = async_engine(database_url)
    try:
        await PostgresJournal(engine).append(record(41, model="history"))
        for statement in (
            "UPDATE decisions SET summary = 'x'",
            "UPDATE decisions SET document = '{}'",
        ):
            with pytest.raises(DBAPIError, match="never change"):
                async with engine.begin() as connection:
                    await connection.execute(text(statement))
    finally:
        await engine.dispose()


# --------------------------------------------------------------------------- leadership


class Lab:
    """A lease store and a way to let its time pass."""

    def __init__(self, store: LeaseStore, expire: Callable[[str], object]) -> None:
        self.store = store
        self.expire = expire


@pytest.fixture(params=["memory", "redis"])
async def leases(request: pytest.FixtureRequest) -> AsyncIterator[Lab]:
    if request.param == "memory":
        clock = [0.0]

        async def pass_time(_name: str) -> None:
            clock[0] += 100.0

        yield Lab(MemoryLeaseStore(lambda: clock[0]), pass_time)
        return
    client = connect(request.getfixturevalue("redis_url"))

    async def drop(name: str) -> None:
        await client.pexpire(f"readyplane/planner/leader/{{{name}}}", 1)
        while await client.exists(f"readyplane/planner/leader/{{{name}}}"):
            pass

    try:
        yield Lab(RedisLeaseStore(client), drop)
    finally:
        await client.aclose()


async def test_one_holder_at_a_time(leases: Lab) -> None:
    store = leases.store
    assert await store.holder("m") == ""
    assert await store.take("m", "a", 10.0) is True
    assert await store.take("m", "b", 10.0) is False
    assert await store.take("m", "a", 10.0) is True
    assert await store.take("other", "b", 10.0) is True
    assert await store.holder("m") == "a"
    assert 5.0 < await store.left_s("m") <= 10.0
    await leases.expire("m")  # type: ignore[misc]
    assert (await store.holder("m"), await store.left_s("m")) == ("", 0.0)
    assert await store.left_s("never") == 0.0


async def test_a_former_holder_cannot_release_the_next(leases: Lab) -> None:
    """B145: release is conditional and atomic."""
    store = leases.store
    assert await store.take("m", "a", 10.0)
    await leases.expire("m")  # type: ignore[misc]
    assert await store.take("m", "b", 10.0) is True
    assert await store.give_up("m", "a") is False
    assert await store.take("m", "a", 10.0) is False
    assert await store.holder("m") == "b"
    assert await store.give_up("m", "b") is True
    assert await store.take("m", "a", 10.0) is True


async def test_a_paused_leader_stops_and_its_number_is_old() -> None:
    """B146: whoever slept through its lease does not act on it, and its successor's number is
    greater whatever became of the lease store.
    """
    clock = [0.0]
    numbers = MemoryJournal()
    store = MemoryLeaseStore(lambda: clock[0])

    def leader(name: str) -> Leadership:
        return Leadership(store, name="m", holder=name, ttl_s=10.0, now_s=lambda: clock[0])

    first, second = leader("a"), leader("b")
    assert await first.renew(partial(numbers.next_epoch, "m")) and first.leading
    assert not await second.renew(partial(numbers.next_epoch, "m"))
    assert second.other == "a" and not second.leading
    old = first.epoch
    clock[0] += 30.0
    assert not first.leading
    assert await second.renew(partial(numbers.next_epoch, "m"))
    assert second.epoch > old
    assert not await first.renew(partial(numbers.next_epoch, "m")) and first.epoch == 0
    await second.resign()
    assert await first.renew(partial(numbers.next_epoch, "m")) and first.epoch > second.epoch


async def test_a_renewal_keeps_its_number() -> None:
    clock = [0.0]
    numbers = MemoryJournal()
    held = Leadership(
        MemoryLeaseStore(lambda: clock[0]),
        name="m",
        holder="a",
        ttl_s=10.0,
        now_s=lambda: clock[0],
    )
    await held.renew(partial(numbers.next_epoch, "m"))
    before = held.epoch
    for _ in range(5):
        clock[0] += 5.0
        assert await held.renew(partial(numbers.next_epoch, "m"))
    assert held.epoch == before
    clock[0] += 5.0
    held.lose()
    assert held.epoch == before and held.leading
    clock[0] += 20.0
    held.lose()
    assert held.epoch == 0 and not held.leading
