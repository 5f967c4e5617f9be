"""Waiting is bounded under any load, and a tenant that floods the queue is late by itself (R19.2)."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField, NoPair, Overloaded
from readyplane.core.work import Slo
from readyplane.core.worker import Role
from readyplane_router.desk import Desk
from readyplane_router.pair import PairPolicy, Seat
from readyplane_router.policy import RouterPolicy
from readyplane_router.service import RouterService
from readyplane_router.triage import Job, Shares, too_late
from tests.router_world import MODEL, SERVED, World, events, on_virtual_time, shape

P, D = Role.PREFILL, Role.DECODE
BOUND_S, EMPTY_S = 3.0, 4.0
PAIR = PairPolicy(slo=Slo(2.0, 0.5), wait_max_s=BOUND_S, empty_wait_max_s=EMPTY_S)
POLICY = RouterPolicy(pair=PAIR, reservation_ttl_s=10.0)


@dataclass
class Clients:
    """Requests of some tenants, served as fast as an engine would; what became of each."""

    router: RouterService
    world: World
    ends: list[tuple[str, str, float]] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def send(self, tenant: str, isl: int, *, priority: int = 0) -> None:
        name = f"r{len(self.tasks)}"
        self.tasks.append(asyncio.create_task(self._one(name, tenant, isl, priority)))

    async def _one(self, name: str, tenant: str, isl: int, priority: int) -> None:
        began_s = self.world.clock.monotonic_s()
        asked = shape(name, isl, first=len(self.tasks) * 7, tenant=tenant, priority=priority)
        try:
            pair = await self.router.route(asked)
        except (NoPair, Overloaded) as error:
            typed = error.retry_after_s is not None and error.retry_after_s > 0
            self._note(tenant, type(error).__name__ if typed else "no retry-after", began_s)
            return
        self._note(tenant, "placed", began_s)
        seat = self.router.desks[MODEL].held[pair.reservation_id].prefill
        await asyncio.sleep(seat.remaining_s(self.world.clock.monotonic_s()))
        await self.router.complete(events(pair, *SERVED))

    def _note(self, tenant: str, how: str, began_s: float) -> None:
        self.ends.append((tenant, how, self.world.clock.monotonic_s() - began_s))


happenings = st.lists(
    st.tuples(
        st.sampled_from(["ask"] * 8 + ["leave", "stop", "join_p", "join_d", "hang"]),
        st.sampled_from([16, 300, 2_000, 6_000]),
        st.sampled_from(["a", "a", "b"]),
        st.sampled_from([0, 0, 1]),
        st.sampled_from([0.0, 0.0, 0.02, 0.4, 2.0]),
    ),
    min_size=5,
    max_size=50,
)


@settings(max_examples=15)
@given(happenings)
def test_no_request_waits_beyond_its_bound(told: list[tuple[str, int, str, int, float]]) -> None:
    """Whatever comes, goes, hangs or leaves: an answer, or a typed refusal that says when again."""

    async def main(world: World) -> None:
        router = await world.router()
        workers = [await world.worker(router, "p0", P), await world.worker(router, "d0", D)]
        clients = Clients(router, world)
        for number, (what, isl, tenant, priority, later_s) in enumerate(told):
            await asyncio.sleep(later_s)
            if what == "ask":
                clients.send(tenant, isl, priority=priority)
            elif what == "leave" and clients.tasks:
                clients.tasks[-1].cancel()
            elif what == "stop" and workers:
                await workers.pop().leave()
            elif what == "join_p":
                workers.append(await world.worker(router, f"p{number + 1}", P))
            elif what == "join_d":
                workers.append(await world.worker(router, f"d{number + 1}", D))
            elif what == "hang":  # a pair that nobody speaks of again until it runs out
                hung = asyncio.create_task(router.route(shape(f"hung{number}", isl)))
                await asyncio.sleep(0.01)
                hung.cancel()
        await asyncio.gather(*clients.tasks, return_exceptions=True)
        assert len(clients.ends) + sum(t.cancelled() for t in clients.tasks) >= len(clients.tasks)
        for _tenant, how, waited_s in clients.ends:
            assert how in ("placed", "NoPair", "Overloaded")
            assert waited_s <= BOUND_S + EMPTY_S + 0.1, (how, waited_s)
        assert not router.desks[MODEL].queue and not router.desks[MODEL].queued_tokens

    on_virtual_time(main, policy=POLICY)


def test_a_fleet_that_empties_and_fills_in_turns_does_not_renew_the_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each regime has a bound of its own (B90); both together are never passed."""
    join = Desk.seat_worker

    def join_full(desk: Desk, seat: Seat, *, now_s: float) -> None:
        seat.works["before"] = seat.work_s = 99.0
        seat.head_since_s = now_s
        join(desk, seat, now_s=now_s)

    monkeypatch.setattr(Desk, "seat_worker", join_full)

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "d0", D)
        clients = Clients(router, world)
        clients.send("a", 300)
        for number in range(8):  # for two seconds nobody, for two seconds somebody who is full
            await asyncio.sleep(2.0)
            made = await world.worker(router, f"p{number}", P)
            await asyncio.sleep(2.0)
            await made.leave()
        ((_, how, waited_s),) = clients.ends
        assert how in ("NoPair", "Overloaded")
        assert waited_s == pytest.approx(BOUND_S + EMPTY_S, abs=0.1)

    on_virtual_time(main, policy=POLICY)


@pytest.mark.parametrize("room", [10_000, 60])
def test_a_tenant_that_floods_the_queue_is_late_by_itself(room: int) -> None:
    """Eight times what the worker can do from one, a fifth of it from the other."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        await world.worker(router, "d0", D)
        clients = Clients(router, world)
        for step in range(400):
            for _ in range(2):
                clients.send("flood", 200)
            if step % 20 == 0:
                clients.send("calm", 200)
            await asyncio.sleep(0.05)
        await asyncio.gather(*clients.tasks)
        calm = [(how, waited_s) for tenant, how, waited_s in clients.ends if tenant == "calm"]
        assert {how for how, _ in calm} == {"placed"} and len(calm) == 20
        assert max(waited_s for _, waited_s in calm) < PAIR.slo.ttft_s
        found = Counter((tenant, how) for tenant, how, _ in clients.ends)
        assert found["flood", "placed"] > 60  # what is left of the worker is its own
        assert found["flood", "Overloaded"] > 500

    on_virtual_time(main, policy=replace(POLICY, queue_requests_max=room))


def test_the_long_prompt_of_a_calm_tenant_does_not_wait_for_all_of_a_flood() -> None:
    """It cannot be in time, so it is among those that stepped back: there, too, in turns."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        await world.worker(router, "d0", D)
        clients = Clients(router, world)
        for step in range(120):
            for _ in range(3):
                clients.send("flood", 200)
            if step == 20:
                clients.send("calm", 2_400)
            await asyncio.sleep(0.05)
        await asyncio.gather(*clients.tasks)
        (calm,) = [(how, waited_s) for tenant, how, waited_s in clients.ends if tenant == "calm"]
        assert calm[0] in ("placed", "Overloaded") and calm[1] <= BOUND_S + 0.1

    on_virtual_time(main, policy=POLICY)


# ------------------------------------------------------------------------- the rules by themselves


def test_whoever_has_the_most_steps_back() -> None:
    """Six of one and two of another, and room for four: an equal share each, not the shortest."""
    jobs = [Job(0, 0.5, 2.0, "flood")] * 6 + [Job(0, 1.0, 2.0, "calm")] * 2
    late = too_late(jobs, workers=1.0, busy_s=0.0)
    assert sum(jobs[p].tenant == "flood" for p in range(8) if p not in late) == 2
    assert sum(jobs[p].tenant == "calm" for p in range(8) if p not in late) == 1
    alone = [replace(job, tenant="") for job in jobs]
    assert {6, 7} <= too_late(alone, workers=1.0, busy_s=0.0)  # as many as can be: the short ones


def test_turns_go_to_whoever_has_had_least() -> None:
    shares = Shares()
    flood = [shares.turn(0, "flood", 1.0) for _ in range(5)]
    assert flood == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert shares.turn(0, "calm", 1.0) == 0.0
    shares.served(0, 3.0)
    assert shares.turn(0, "late", 1.0) == 3.0  # nobody saves up while it asks for nothing
    assert shares.turn(1, "flood", 1.0) == 0.0  # another priority is another queue
    shares.clear()
    assert shares.turn(0, "flood", 1.0) == 0.0


@pytest.mark.parametrize(("wait_s", "hold_s"), [(25.1, 30.0), (20.0, 24.0)])
def test_a_wait_longer_than_the_engines_hold_kv_is_refused_with_both(
    wait_s: float, hold_s: float
) -> None:
    """B67: a decode end that comes later than that reads blocks that are another request's."""
    document = {"kv_hold_s": hold_s, "pair": {"wait_max_s": wait_s}}
    with pytest.raises(InvalidField) as caught:
        RouterPolicy.from_document(document)
    for words in (f"{wait_s:g}", "kv_hold_s", f"{hold_s:g}", "kv_hold_margin_s"):
        assert words in str(caught.value)
    RouterPolicy.from_document({"kv_hold_s": hold_s, "pair": {"wait_max_s": hold_s - 5.0}})


def test_what_is_told_of_a_request_does_not_depend_on_its_tenant_alone() -> None:
    """One tenant: the order is that of deadlines, as if there were no shares."""
    jobs = [Job(0, 1.0, left) for left in (1.0, 2.0, 2.5, 3.0)]
    named = [replace(job, tenant="only") for job in jobs]
    assert too_late(jobs, workers=1.0, busy_s=0.0) == too_late(named, workers=1.0, busy_s=0.0)
