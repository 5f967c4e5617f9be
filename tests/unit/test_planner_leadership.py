"""Who leads: each change is told once, however often it is asked."""

import logging
import socket
from functools import partial
from typing import Any

import pytest
from prometheus_client import generate_latest

from readyplane.core.errors import Unavailable
from readyplane.kit.telemetry import Metrics
from readyplane_planner.__main__ import Settings
from readyplane_planner.journal import MemoryJournal
from readyplane_planner.leadership import Leadership, MemoryLeaseStore, address_of, named
from readyplane_planner.metrics import PlannerMetrics
from tests.unit.planner_world import MODEL, HandClock, World, planner


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
        await first.renew(partial(numbers.next_epoch, "m"))
        await second.renew(partial(numbers.next_epoch, "m"))
    assert told() == ["m: leading under number 1", "m: following a"]
    clock[0] += 11.0
    for _ in range(2):
        first.lose()
    assert told() == ["m: no longer leading: the lease has run out"]
    for _ in range(2):
        await second.renew(partial(numbers.next_epoch, "m"))
        await first.renew(partial(numbers.next_epoch, "m"))
    assert told() == ["m: leading under number 2", "m: following b"]
    for _ in range(2):
        second.depose()
    assert told() == ["m: no longer leading: a newer leader is obeyed"]
    await second.renew(partial(numbers.next_epoch, "m"))
    for _ in range(2):
        await second.resign()
    assert told() == ["m: leading under number 3", "m: no longer leading: it ends"]


@pytest.mark.parametrize(
    ("given", "listening", "reached"),
    [
        ({}, "127.0.0.1:4242", "127.0.0.1:4242"),
        ({"host": "10.0.0.7"}, "10.0.0.7:4242", "10.0.0.7:4242"),
        ({"host": "0.0.0.0"}, "127.0.0.1:4242", f"{socket.gethostname()}:4242"),
        ({"host": "::"}, "[::1]:4242", f"{socket.gethostname()}:4242"),
        ({"host": "0.0.0.0", "advertise": "planner-1.planner:9"}, "127.0.0.1:4242", ""),
    ],
)
def test_a_holder_is_named_by_where_it_is_reached(
    given: dict[str, Any], listening: str, reached: str
) -> None:
    at = Settings(**given).reached_at(listening)
    assert at == (reached or given["advertise"])
    assert address_of(named(at, "9f2c")) == at
    assert named(at, "9f2c") != named(at, "77aa"), "two lives at one address are two holders"
    assert (address_of("one"), address_of("")) == ("one", "")


async def test_who_stands_by_says_where_the_leader_is_and_shows_no_targets() -> None:
    clock = HandClock()
    world = World(clock, rps=lambda _t: 1.0)
    run = await planner(world)
    registry = Metrics()
    run.service._metrics = PlannerMetrics(registry)
    store = MemoryLeaseStore(clock.monotonic_s)
    mine = Leadership(
        store,
        name=MODEL,
        holder=named("planner-0:7003", "1"),
        ttl_s=10.0,
        now_s=clock.monotonic_s,
    )
    run.service._leadership = mine
    await run.step(5)
    targets = (
        "readyplane_desired_replicas{",
        "readyplane_desired_tokens_per_second{",
        "readyplane_desired_ready_gap_tokens_per_second{",
        "readyplane_target_reversals{",
    )
    text = generate_latest(registry).decode()
    assert 'readyplane_planner_leading{model="demo"} 1.0' in text
    assert all(f"\n{name}" in text for name in targets)
    state = await run.service.state()
    elsewhere = {"former_life": False}
    assert state["leader"] == {"here": True, "at": "planner-0:7003", "epoch": 1} | elsewhere
    counted = text.count("readyplane_decisions_total{")

    await mine.resign()
    assert await store.take(MODEL, named("planner-1:7003", "2"), 60.0)
    await run.step(5)
    text = generate_latest(registry).decode()
    assert 'readyplane_planner_leading{model="demo"} 0.0' in text
    assert not any(f"\n{name}" in text for name in targets)
    assert "\nreadyplane_ready_replicas{" in text, "what is there is told by everybody"
    assert text.count("readyplane_decisions_total{") == counted
    state = await run.service.state()
    assert state["leader"] == {"here": False, "at": "planner-1:7003", "epoch": 0} | elsewhere
    assert "planner-1:7003 leads" in state["degraded"]
    with pytest.raises(Unavailable, match="--planner planner-1:7003"):
        await run.service.upgrades.ask("pause", asked_id="a")


async def test_a_planner_started_again_does_not_follow_itself() -> None:
    """Its former life was killed, and holds the lease to its end; nobody is sent to it."""
    clock, numbers = [0.0], MemoryJournal()
    store = MemoryLeaseStore(lambda: clock[0])

    def life(name: str) -> Leadership:
        return Leadership(store, name="m", holder=name, ttl_s=10.0, now_s=lambda: clock[0])

    before, again = life(named("h:1", "aa")), life(named("h:1", "bb"))
    other, nameless = life(named("h:2", "cc")), life("one")
    epoch = partial(numbers.next_epoch, "m")
    assert await before.renew(epoch)
    clock[0] += 3.0
    for standing in (again, other, nameless):
        assert not await standing.renew(epoch)
    clock[0] += 1.0
    assert again.document() == {"here": False, "at": None, "epoch": 0, "former_life": True}
    assert again.standing_by() == (
        "standing by; the life before this one, at h:1 as well, holds the lease for up to 6 s more"
    )
    for standing in (other, nameless):
        assert standing.standing_by() == "standing by; h:1 leads"
        assert standing.document()["at"] == "h:1" and not standing.document()["former_life"]
    clock[0] += 6.5
    assert await again.renew(epoch)
    assert again.document() == {"here": True, "at": "h:1", "epoch": 2, "former_life": False}
    assert life(named("h:1", "dd")).standing_by() == "standing by; nobody yet leads"
