"""The queue of a full fleet: who waits is not judged by every event, and nothing is lost by it."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.work import EventKind, RequestEvent, RequestShape
from readyplane.core.worker import Role
from readyplane_router.bookings import Owed
from readyplane_router.desk import Desk, Waiting
from readyplane_router.policy import RouterPolicy
from tests.router_world import seat


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
