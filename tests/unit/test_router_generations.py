"""How requests of each generation ended: what a roll-out is judged by."""

from __future__ import annotations

import asyncio

import pytest

from readyplane.core.identity import KvFormat
from readyplane.core.work import EventKind, RequestEvent, RequestShape, Slo
from readyplane.core.worker import Role
from readyplane_router.bookings import Owed
from readyplane_router.desk import Desk
from readyplane_router.policy import RouterPolicy
from readyplane_router.signals import GENERATIONS_MAX, Generations
from tests.router_world import seat

OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64
SLO = Slo(1.0, 0.1)


class Counter:
    """A desk with one pair, at which requests are booked by hand."""

    def __init__(self, digest: str) -> None:
        self.desk = Desk("m", RouterPolicy())
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            self.desk.seat_worker(seat(name, role, kv=KvFormat(digest)), now_s=0.0)
        self.digest = digest

    def book(self, name: str, *, now_s: float = 0.0) -> None:
        entry = self.desk.entry(
            name,
            RequestShape(name, "m", 100, max_tokens=64, slo=SLO),
            now_s=now_s,
            granted=asyncio.get_running_loop().create_future(),
            avoid=frozenset(),
        )
        self.desk.enqueue(entry)
        self.desk.pump(now_s=now_s)
        assert entry.granted.done()

    def tell(self, name: str, kind: EventKind, *, now_s: float = 0.0, **facts: object) -> None:
        event = RequestEvent(name, kind, **facts)  # type: ignore[arg-type]
        assert self.desk.event(event, Owed(), now_s=now_s)

    def seen(self, *, now_s: float = 0.0) -> tuple[int, int, int, int]:
        found = {g.manifest_digest: g for g in self.desk.ends_by_generation(now_s=now_s)}
        mine = found[self.digest]
        return mine.finished_total, mine.attained_total, mine.failed_total, mine.late_requests


async def test_ends_are_counted_for_the_artifact_of_the_pair() -> None:
    counter = Counter(NEW)
    for name, attained in (("a", True), ("b", False)):
        counter.book(name)
        counter.tell(name, EventKind.FINISHED, output_tokens=5, attained=attained)
    assert counter.seen() == (2, 1, 0, 0)
    assert [g.manifest_digest for g in counter.desk.ends_by_generation(now_s=0.0)] == [NEW]


@pytest.mark.parametrize(("detail", "failed"), [("reset by peer", 1), ("busy: no seat", 0)])
async def test_a_failed_leg_counts_unless_its_worker_was_only_busy(
    detail: str, failed: int
) -> None:
    counter = Counter(NEW)
    counter.book("a")
    counter.tell("a", EventKind.LEG_FAILED, failed_worker_id="d", detail=detail)
    assert counter.seen() == (0, 0, 1, 0) if failed else not counter.desk.generations.snapshot()


async def test_a_worker_that_goes_fails_what_it_held_and_a_drain_does_not() -> None:
    counter = Counter(NEW)
    counter.book("a")
    counter.book("b")
    counter.desk.unseat_worker(next(k for k in counter.desk.seats if "d" in k), now_s=1.0)
    assert counter.seen() == (0, 0, 2, 0)
    drained = Counter(NEW)
    drained.book("a")
    drained.desk.abort_on(next(k for k in drained.desk.seats if "d" in k), now_s=1.0)
    assert not drained.desk.generations.snapshot()


async def test_who_waits_too_long_for_a_first_token_is_late_before_it_ends() -> None:
    counter = Counter(NEW)
    counter.book("a")
    assert not counter.desk.ends_by_generation(now_s=0.9)
    assert counter.seen(now_s=1.1) == (0, 0, 0, 1)
    counter.tell("a", EventKind.ABORTED, now_s=5.0)  # its client has had enough
    assert counter.seen(now_s=5.0) == (0, 0, 1, 0)


async def test_a_client_that_leaves_in_time_is_nobodys_failure() -> None:
    counter = Counter(NEW)
    counter.book("a")
    counter.tell("a", EventKind.ABORTED, now_s=0.5)
    assert not counter.desk.ends_by_generation(now_s=0.5)


async def test_a_slow_stream_is_late_by_what_was_told_of_it() -> None:
    counter = Counter(NEW)
    counter.book("a")
    counter.tell("a", EventKind.FIRST_TOKEN, now_s=0.5, ttft_s=0.5, output_tokens=1)
    counter.tell("a", EventKind.PROGRESS, now_s=5.5, output_tokens=50)  # 0.1 s a token
    assert not counter.desk.ends_by_generation(now_s=60.0), "no news is no lateness"
    counter.tell("a", EventKind.PROGRESS, now_s=20.5, output_tokens=80)  # 0.25 s a token
    assert counter.seen(now_s=20.5) == (0, 0, 0, 1)


def test_only_so_many_artifacts_are_remembered() -> None:
    found = Generations()
    for number in range(3 * GENERATIONS_MAX):
        found.of(f"sha256:{number:064x}").finished += 1
    kept = found.snapshot()
    assert len(kept) == GENERATIONS_MAX
    assert kept[-1][0] == f"sha256:{3 * GENERATIONS_MAX - 1:064x}"
