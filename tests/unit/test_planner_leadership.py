"""Who leads: each change is told once, however often it is asked."""

import logging

import pytest

from readyplane_planner.journal import MemoryJournal
from readyplane_planner.leadership import Leadership, MemoryLeaseStore


async def test_each_change_of_who_leads_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "readyplane_planner.leadership")
    clock, numbers = [0.0], MemoryJournal()
    store = MemoryLeaseStore(lambda: clock[0])

    def leader(name: str) -> Leadership:
        return Leadership(store, name="m", holder=name, ttl_s=10.0, now_s=lambda: clock[0])

    def told() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    first, second = leader("a"), leader("b")
    for _ in range(3):
        await first.renew(numbers.next_epoch)
        await second.renew(numbers.next_epoch)
    assert told() == ["m: leading under number 1", "m: following a"]
    clock[0] += 11.0
    for _ in range(2):
        first.lose()
    assert told() == ["m: no longer leading: the lease has run out"]
    for _ in range(2):
        await second.renew(numbers.next_epoch)
        await first.renew(numbers.next_epoch)
    assert told() == ["m: leading under number 2", "m: following b"]
    for _ in range(2):
        second.depose()
    assert told() == ["m: no longer leading: a newer leader is obeyed"]
    await second.renew(numbers.next_epoch)
    for _ in range(2):
        await second.resign()
    assert told() == ["m: leading under number 3", "m: no longer leading: it ends"]
