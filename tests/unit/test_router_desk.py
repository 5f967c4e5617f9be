"""The queue of a full fleet: who waits is not judged by every event, and nothing is lost by it."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import Overloaded
from readyplane.core.work import EventKind, RequestEvent, RequestShape, Slo
from readyplane.core.worker import Role
from readyplane_router.bookings import Held, Owed
from readyplane_router.desk import Desk
from readyplane_router.policy import RouterPolicy
from readyplane_router.waiting import Waiting
from tests.router_world import TIMES, seat


class Judging(Desk):
    """Judges everybody at every event."""

    def _full_for_s(self, now_s: float) -> float | None:
        del now_s
        return None


def ends(entry: Waiting) -> object:
    """What became of a request so far."""
    if not entry.granted.done():
        return entry.regime, entry.regime_since_s
    if entry.granted.exception() is not None:
        return type(entry.granted.exception())
    held = entry.granted.result()
    return held.prefill.worker_id, held.decode.worker_id, held.sent_s


class Play:
    """One desk and what is done to it."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.loop = asyncio.new_event_loop()
        self.entries: list[Waiting] = []
        self.now_s = 0.0
        for number in range(2):
            desk.seat_worker(seat(f"p{number}", Role.PREFILL), now_s=0.0)
        desk.seat_worker(seat("d0", Role.DECODE), now_s=0.0)

    def arrive(self, isl: int) -> None:
        name = f"r{len(self.entries)}"
        entry = self.desk.entry(
            f"{name}.0",
            RequestShape(request_id=name, model="m", isl=isl, max_tokens=64),
            now_s=self.now_s,
            granted=self.loop.create_future(),
            avoid=frozenset(["p1"] if isl % 7 == 0 else []),
        )
        self.entries.append(entry)
        self.desk.enqueue(entry)

    def tell(self, kind: EventKind) -> None:
        held = next(iter(self.desk.held), None)
        if held is not None:
            self.desk.event(RequestEvent(held, kind), Owed(), now_s=self.now_s)

    def do(self, what: str, how: int, later_s: float) -> None:
        self.now_s += later_s
        if what == "arrive":
            self.arrive(how)
        elif what == "prefilled":
            self.tell(EventKind.PREFILL_DONE)
        elif what == "finished":
            self.tell(EventKind.FINISHED)
        elif what == "shut":
            one = self.desk.seats.get("p0")
            if one is not None:
                one.shut = "" if one.shut else "draining"
        elif what == "leave":
            for key in list(self.desk.seats)[: how % 3]:
                self.desk.unseat_worker(key, now_s=self.now_s)
        elif what == "join":
            name = f"p{100 + len(self.entries)}-{self.now_s}"
            self.desk.seat_worker(seat(name, Role.PREFILL), now_s=self.now_s)
        self.desk.pump(now_s=self.now_s)


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["arrive"] * 8 + ["prefilled"] * 3 + ["finished", "time", "shut", "leave", "join"]
        ),
        st.sampled_from([300, 2_000, 2_100, 8_000, 40_000]),
        st.sampled_from([0.0, 0.01, 0.3, 4.0, 12.0]),
    ),
    max_size=60,
)


@settings(max_examples=60)
@given(steps)
def test_everybody_ends_as_if_judged_at_every_event(told: list[tuple[str, int, float]]) -> None:
    quick, plain = Play(Desk("m", RouterPolicy())), Play(Judging("m", RouterPolicy()))
    for step in told:
        for play in (quick, plain):
            play.do(*step)
        assert [ends(e) for e in quick.entries] == [ends(e) for e in plain.entries]
    for play in (quick, plain):
        play.loop.close()


def test_an_event_that_frees_nobody_judges_nobody() -> None:
    play = Play(Desk("m", RouterPolicy()))
    judged: list[Any] = []
    judge = Desk.judge

    def noted(self: Desk, entry: Waiting, *, now_s: float) -> object:
        judged.append(entry.reservation_id)
        return judge(self, entry, now_s=now_s)

    with patch.object(Desk, "judge", noted):
        for _ in range(12):
            play.do("arrive", 2_000, 0.0)
        waiting = len(play.desk.queue)
        assert waiting > 5
        judged.clear()
        for _ in range(20):
            play.do("time", 0, 0.001)
        assert not judged
        play.do("arrive", 2_000, 0.0)
        assert len(judged) <= 1
        while len(play.desk.queue) >= waiting:
            play.do("prefilled", 0, 0.2)
    play.loop.close()


class InOrder(Desk):
    """Serves by deadline alone: nobody steps back."""

    def _triage(self, now_s: float) -> None:
        del now_s


class Clerk:
    """One P and one D at a desk, by events: a prompt every `every_s`, short and long ones."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.loop = asyncio.new_event_loop()
        self.entries: list[Waiting] = []
        self.ends: dict[str, float] = {}  # when its prefill was done
        self.free_s = 0.0
        for name, role in (("p0", Role.PREFILL), ("d0", Role.DECODE)):
            desk.seat_worker(seat(name, role, kv_total_blocks=1_000_000), now_s=0.0)

    def arrive(self, isl: int, *, now_s: float, priority: int = 0) -> Waiting:
        name = f"r{len(self.entries)}"
        shape = RequestShape(
            request_id=name,
            model="m",
            isl=isl,
            max_tokens=1,
            priority=priority,
            slo=Slo(SLO_S, 9.0),
        )
        granted: asyncio.Future[Held] = self.loop.create_future()
        entry = self.desk.entry(f"{name}.0", shape, now_s=now_s, granted=granted, avoid=frozenset())
        self.entries.append(entry)
        self.desk.enqueue(entry)
        return entry

    def pass_time(self, until_s: float, *, from_s: float) -> None:
        """Let prefills end and the desk look at its queue."""
        now_s = from_s
        while True:
            self.desk.pump(now_s=now_s)
            for name, held in self.desk.held.items():
                if name not in self.ends:
                    self.free_s = max(self.free_s, now_s) + TIMES.prefill_s(held.isl)
                    self.ends[name] = self.free_s
            open_ones = [self.ends[name] for name in self.desk.held]
            now_s = min([now_s + 0.1, *open_ones])
            if now_s > until_s:
                return
            for name in [n for n in self.desk.held if self.ends[n] <= now_s]:
                for kind in (EventKind.PREFILL_DONE, EventKind.FINISHED):
                    self.desk.event(RequestEvent(name, kind), Owed(), now_s=now_s)

    def in_time(self) -> list[bool]:
        return [
            e.granted.exception() is None and self.ends[e.reservation_id] - e.arrived_s <= SLO_S
            for e in self.entries
        ]


SLO_S = 2.0
SHORT, LONG = 200, 1_200


def overloaded(desk: Desk, *, load: float, lasts_s: float = 60.0) -> Clerk:
    """One long prompt to nine short ones, `load` times as much as the worker computes."""
    clerk = Clerk(desk)
    each_s = (9 * TIMES.prefill_s(SHORT) + TIMES.prefill_s(LONG)) / 10
    at_s = 0.0
    while at_s < lasts_s:
        clerk.arrive(LONG if len(clerk.entries) % 10 == 5 else SHORT, now_s=at_s)
        clerk.pass_time(at_s + each_s / load, from_s=at_s)
        at_s += each_s / load
    clerk.pass_time(at_s + 60.0, from_s=at_s)
    clerk.loop.close()
    return clerk


def test_an_overloaded_queue_keeps_most_in_time() -> None:
    """Served by deadline alone it is late for everybody; who cannot be in time goes last."""
    plain = overloaded(InOrder("m", RouterPolicy()), load=1.3).in_time()
    found = overloaded(Desk("m", RouterPolicy()), load=1.3)
    kept = found.in_time()
    assert found.desk.stepped_back > 0
    assert sum(plain) < 0.3 * len(plain)
    assert sum(kept) > 0.85 * len(kept)
    long = [ok for ok, entry in zip(kept, found.entries, strict=True) if entry.shape.isl == LONG]
    assert sum(long) < 0.5 * len(long), "the longest are the first to be late"


def test_nobody_steps_back_while_all_are_in_time() -> None:
    found = overloaded(Desk("m", RouterPolicy()), load=0.6, lasts_s=20.0)
    assert all(found.in_time()) and found.desk.stepped_back == 0


def test_who_stepped_back_is_served_when_there_is_room_and_refused_at_its_bound() -> None:
    found = overloaded(Desk("m", RouterPolicy()), load=1.3)
    late = [e for e, ok in zip(found.entries, found.in_time(), strict=True) if not ok]
    served = [e for e in late if e.granted.exception() is None]
    refused = [e for e in late if e.granted.exception() is not None]
    assert served and refused
    assert all(isinstance(e.granted.exception(), Overloaded) for e in refused)
    bound_s = RouterPolicy().pair.wait_max_s
    assert all(found.ends[e.reservation_id] - e.arrived_s < bound_s + 2 * SLO_S for e in served)
    assert found.desk.queue == []


def test_an_important_one_does_not_step_back_for_others() -> None:
    clerk = Clerk(Desk("m", RouterPolicy()))
    clerk.pass_time(0.0, from_s=0.0)
    others = [clerk.arrive(SHORT, now_s=0.0) for _ in range(12)]
    important = clerk.arrive(LONG, now_s=0.0, priority=1)
    clerk.pass_time(30.0, from_s=0.0)
    clerk.loop.close()
    assert clerk.ends[important.reservation_id] <= SLO_S
    assert clerk.ends[important.reservation_id] < max(clerk.ends[e.reservation_id] for e in others)
