"""A request that decodes moves: another worker is reserved before its old one is given back."""

import asyncio

import pytest

from readyplane.core.errors import InvalidField, NotFound, Overloaded
from readyplane.core.identity import KvFormat
from readyplane.core.work import EventKind, RequestEvent
from readyplane.core.worker import Role
from readyplane.ports import Pair
from readyplane_router.service import RouterService
from tests.router_world import World, events, on_virtual_time, serving, shape

OTHER = KvFormat("sha256:" + "f" * 64)


async def decoding(world: World, router: RouterService, name: str = "r") -> Pair:
    """A request of 160 tokens that has given 8."""
    pair = await router.route(shape(name))
    told = events(pair, EventKind.PREFILL_DONE, EventKind.FIRST_TOKEN)
    await router.complete(
        [*told, RequestEvent(pair.reservation_id, EventKind.PROGRESS, None, None, 8)]
    )
    return pair


def used(router: RouterService) -> dict[str, tuple[int, int, int]]:
    """Sequences, blocks and promises of each seat."""
    return {
        s.worker_id: (s.sequences, s.kv_blocks, s.assigned)
        for s in router.desk("demo").seats.values()
    }


@pytest.mark.parametrize("shared", [False, True])
def test_a_move_leaves_one_reservation_and_counts_one_request(shared: bool) -> None:
    async def story(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p", Role.PREFILL)
        await world.worker(router, "d1", Role.DECODE)
        await world.worker(router, "d2", Role.DECODE)
        before = used(router)
        pair = await decoding(world, router)
        source = pair.decode.worker_id
        other = {"d1": "d2", "d2": "d1"}[source]
        await router.drain(source, reason="scale-down")
        moved = await router.move(
            shape("r"), reservation_id=pair.reservation_id, worker_id=source, emitted=8
        )
        again = await router.move(
            shape("r"), reservation_id=pair.reservation_id, worker_id=source, emitted=9
        )
        assert again == moved  # as when the first answer was lost
        assert moved.decode.worker_id == other
        assert moved.local
        assert moved.reservation_id != pair.reservation_id
        assert used(router)[source] == before[source]
        # Prompt, the 8 tokens so far and what may come: as if it had been routed there.
        assert used(router)[other][0] == 1
        assert used(router)[other][1] >= -(-(160 + 64) // 16)
        if shared:
            assert {w for w, u in (await world.store.usage("demo")).items() if u.sequences} == {
                other
            }
        await router.complete(
            [RequestEvent(moved.reservation_id, EventKind.FINISHED, 0.1, 0.01, 20, attained=True)]
        )
        assert used(router) == before
        signals = (await router.signals()).models["demo"]
        assert (signals.arrivals_total, signals.finished_total, signals.aborted_total) == (1, 1, 0)
        assert signals.output_tokens_total == 20
        assert signals.finished_prompt_tokens_total == 160
        await asyncio.sleep(15)  # nothing is lost, nothing is given up
        assert (await router.signals()).models["demo"].aborted_total == 0
        assert router.moving.moved == 1

    on_virtual_time(story, shared=shared)


async def two_decodes(world: World) -> RouterService:
    router = await world.router()
    await world.worker(router, "p", Role.PREFILL)
    await world.worker(router, "d1", Role.DECODE)
    await world.worker(router, "d2", Role.DECODE)
    return router


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", [EventKind.FINISHED, EventKind.ABORTED])
def test_an_end_under_way_in_the_moment_of_a_move_is_counted_once(
    shared: bool, kind: EventKind
) -> None:
    """It names the reservation that was given back: the answer to the move was late, or lost."""

    async def story(world: World) -> None:
        router = await two_decodes(world)
        before = used(router)
        pair = await decoding(world, router)
        rid, at = pair.reservation_id, pair.decode.worker_id
        for _ in range(2):  # and it may move twice
            new = await router.move(shape("r"), reservation_id=rid, worker_id=at, emitted=8)
            rid, at = new.reservation_id, new.decode.worker_id
        late = RequestEvent(pair.reservation_id, EventKind.PROGRESS, None, None, 9)
        assert await router.complete([late]) == 0
        end = RequestEvent(pair.reservation_id, kind, 0.1, 0.01, 20, attained=True)
        assert await router.complete([end]) == 0
        assert used(router) == before
        assert await router.complete([end]) == 1, "told again it is nobody's"
        await asyncio.sleep(60)
        signals = (await router.signals()).models["demo"]
        done = kind is EventKind.FINISHED
        assert (signals.arrivals_total, signals.finished_total) == (1, int(done))
        assert signals.aborted_total == int(not done)
        if shared:
            assert not any(u.sequences for u in (await world.store.usage("demo")).values())

    on_virtual_time(story, shared=shared)


def test_a_request_that_ends_while_it_is_moved_is_not_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(world: World) -> None:
        router = await two_decodes(world)
        before = used(router)
        pair = await decoding(world, router)
        take = router.moving._ledger.take

        async def slow(*given: object) -> object:
            taken = await take(*given)  # type: ignore[arg-type]
            end = RequestEvent(pair.reservation_id, EventKind.FINISHED, 0.1, 0.01, 20)
            assert await router.complete([end]) == 0
            return taken

        monkeypatch.setattr(router.moving._ledger, "take", slow)
        with pytest.raises(NotFound, match="ended meanwhile"):
            await router.move(
                shape("r"),
                reservation_id=pair.reservation_id,
                worker_id=pair.decode.worker_id,
                emitted=8,
            )
        assert used(router) == before and router.moving.moved == 0
        await asyncio.sleep(60)
        signals = (await router.signals()).models["demo"]
        assert (signals.finished_total, signals.aborted_total) == (1, 0)
        assert not any(u.sequences for u in (await world.store.usage("demo")).values())

    on_virtual_time(story, shared=True)


def test_a_request_that_moved_unheard_and_failed_is_paired_anew() -> None:
    """Its gateway did not get the answer, and names what it knows."""

    async def story(world: World) -> None:
        router = await two_decodes(world)
        pair = await decoding(world, router)
        moved = await router.move(
            shape("r"),
            reservation_id=pair.reservation_id,
            worker_id=pair.decode.worker_id,
            emitted=8,
        )
        anew = await router.route(shape("r"), replaces=pair.reservation_id)
        assert anew.reservation_id not in {pair.reservation_id, moved.reservation_id}
        assert anew.prefill.worker_id == "p", "it is prefilled anew, not sent where it was to move"
        assert sum(s.sequences for s in router.desk("demo").decodes) == 1
        await router.complete(events(anew, EventKind.FINISHED))
        signals = (await router.signals()).models["demo"]
        assert (signals.arrivals_total, signals.finished_total) == (1, 1)

    on_virtual_time(story)


def test_only_a_worker_whose_kv_fits_goes_on_with_it() -> None:
    """Generations pair only when compatible, and so do moves."""

    async def story(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p", Role.PREFILL)
        await world.worker(router, "d1", Role.DECODE)
        pair = await decoding(world, router)
        await world.worker(router, "d2", Role.DECODE, attached=True, serves=serving(kv=OTHER))
        with pytest.raises(Overloaded, match="no other decode worker"):
            await router.move(
                shape("r"), reservation_id=pair.reservation_id, worker_id="d1", emitted=8
            )
        assert used(router)["d1"][0] == 1  # it goes on where it is
        assert used(router)["d2"][0] == 0
        assert router.moving.refused == 1

    on_virtual_time(story)


def test_without_room_it_stays_where_it_is() -> None:
    async def story(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p", Role.PREFILL)
        await world.worker(router, "d1", Role.DECODE)
        pair = await decoding(world, router)
        await world.worker(router, "d2", Role.DECODE, serves=serving(blocks=8))
        with pytest.raises(Overloaded):
            await router.move(
                shape("r"), reservation_id=pair.reservation_id, worker_id="d1", emitted=8
            )
        assert used(router)["d1"][0] == 1

    on_virtual_time(story)


def test_what_cannot_move_is_told_so() -> None:
    async def story(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p", Role.PREFILL)
        await world.worker(router, "d1", Role.DECODE)
        with pytest.raises(NotFound, match="nobody"):
            await router.move(shape("r"), reservation_id="r.0", worker_id="nobody", emitted=1)
        with pytest.raises(InvalidField, match="emitted"):
            await router.move(shape("r"), reservation_id="r.0", worker_id="d1", emitted=0)

    on_virtual_time(story)
