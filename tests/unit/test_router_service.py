"""The router's requests on virtual time: paired, queued, reserved, grown, given back; and by prefix."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from readyplane.core.errors import (
    InvalidField,
    NoCompatiblePair,
    NoPair,
    NotFound,
    Overloaded,
    PromptTooLong,
)
from readyplane.core.identity import KvFormat
from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane.core.work import EventKind, RequestEvent, Slo, sequence_hashes
from readyplane.core.worker import Role
from readyplane_router.bookings import growth_blocks
from readyplane_router.seats import Use
from readyplane_router.service import RouterService
from tests.router_world import (
    DIGEST,
    MODEL,
    QUICK,
    SERVED,
    FakeWorker,
    World,
    all_free,
    events,
    fleet_of,
    offer,
    on_virtual_time,
    serving,
    shape,
)

P, D = Role.PREFILL, Role.DECODE


# --------------------------------------------------------------------------- requests


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ttft_s", -5.0),
        ("ttft_s", 1e300),
        ("ttft_s", float("nan")),
        ("tpot_s", float("inf")),
        ("tpot_s", -0.1),
        ("output_tokens", 10**15),
        ("output_tokens", -1),
        ("cached_tokens", -1),
        ("cached_tokens", 16_000_001),
    ],
)
def test_an_impossible_fact_is_refused_by_name_and_its_batch_with_it(
    name: str, value: float
) -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router)
        pair = await router.route(shape("r1"))
        good = events(pair, EventKind.PREFILL_DONE, EventKind.FIRST_TOKEN, EventKind.FINISHED)
        before = (await router.signals(MODEL)).models, await world.store.usage(MODEL)
        bad = replace(good[2], **{name: value})  # type: ignore[arg-type]
        with pytest.raises(InvalidField, match=name) as refused:
            await router.complete([good[0], good[1], bad])
        assert refused.value.field == f"events[2].{name}"
        assert ((await router.signals(MODEL)).models, await world.store.usage(MODEL)) == before
        assert await router.complete(good) == 0
        await all_free(world, router)

    on_virtual_time(main)


def test_a_request_is_paired_reserved_and_given_back() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router)
        pair = await router.route(shape("r1"))
        assert (pair.prefill.worker_id, pair.decode.worker_id, pair.local) == ("p0", "d0", False)
        assert pair.predicted_ttft_s == pytest.approx(0.16, abs=0.03)
        used = await world.store.usage(MODEL)
        assert used["p0"] == Use(1, 10, 160_000, 160)
        assert used["d0"].sequences == 1 and used["d0"].blocks == 14  # 160 + 64 tokens
        await router.complete(events(pair, EventKind.PREFILL_DONE))
        assert (await world.store.usage(MODEL))["p0"] == Use()
        worker = (await router.list_workers()).workers["p0"]
        assert worker.active == 1  # its KV is still being read
        await router.complete(events(pair, EventKind.FIRST_TOKEN, ttft_s=0.2, output_tokens=1))
        assert (await router.list_workers()).workers["p0"].active == 0
        done = events(pair, EventKind.FINISHED, tpot_s=0.02, output_tokens=40, attained=True)
        assert await router.complete(done) == 0
        assert await router.complete(done) == 1
        await all_free(world, router)
        told = (await router.signals()).models[MODEL]
        assert (told.arrivals_total, told.arrival_tokens_total) == (1, 160)
        assert (told.finished_total, told.output_tokens_total, told.attained_total) == (1, 40, 1)
        assert (told.handovers_total, told.aborted_total, told.refused_total) == (1, 0, 0)
        assert (told.ttft_actual.count, told.ttft_actual.p50_s) == (1, 0.2)
        assert (told.tpot_actual.count, told.tpot_actual.p50_s) == (1, 0.02)
        assert sum(map(sum, told.length_counts)) == 1

    on_virtual_time(main)


def test_the_same_request_is_the_same_reservation() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        waiting = [asyncio.create_task(router.route(shape("r1"))) for _ in range(3)]
        await asyncio.sleep(0.1)
        await fleet_of(world, router)
        first, *others = await asyncio.gather(*waiting)
        assert all(other == first for other in others)
        assert await router.route(shape("r1")) == first
        assert (await world.store.usage(MODEL))["d0"].sequences == 1
        assert (await router.signals()).models[MODEL].arrivals_total == 1

    on_virtual_time(main)


def test_a_prefill_worker_is_kept_short_and_new_capacity_helps_the_backlog_at_once() -> None:
    """Late binding: what waits in the router can go to whoever becomes ready."""

    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router)
        tasks = [
            asyncio.create_task(router.route(shape(f"r{i}", 400, first=i * 1000))) for i in range(8)
        ]
        await asyncio.sleep(0.01)
        desk = router.desks[MODEL]
        assert [t.done() for t in tasks].count(True) == 2  # 0.4 s each, 0.5 s ahead
        assert desk.queued_tokens == 6 * 400
        told = (await router.signals()).models[MODEL]
        assert (told.queued_requests, told.queued_tokens) == (6, 2400)
        assert (told.prefilling_requests, told.prefilling_tokens) == (2, 800)
        await world.worker(router, "p1", P)
        await asyncio.sleep(0.01)
        assert [t.done() for t in tasks].count(True) == 4
        ends = [t.result().prefill.worker_id for t in tasks if t.done()]
        assert ends == ["p0", "p0", "p1", "p1"]
        for task in tasks:
            task.cancel()

    on_virtual_time(main)


def test_completions_and_mere_time_wake_the_queue() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router)
        pairs = [await router.route(shape(f"r{i}", 400, first=i * 1000)) for i in range(2)]
        began = world.clock.monotonic_s()
        third = await router.route(shape("r2", 400, first=5000))
        assert third.waited_s == pytest.approx(0.3, abs=0.02)  # 0.8 s promised, 0.5 s allowed
        assert world.clock.monotonic_s() - began == pytest.approx(0.3, abs=0.02)
        waiting = asyncio.create_task(router.route(shape("r3", 400, first=9000)))
        await asyncio.sleep(0)
        assert not waiting.done()
        await router.complete(events(pairs[0], EventKind.PREFILL_DONE))
        await router.complete(events(pairs[1], EventKind.PREFILL_DONE))
        await asyncio.sleep(0.001)
        assert waiting.done()

    on_virtual_time(main)


def test_an_empty_pool_is_waited_for_and_then_refused() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        began = world.clock.monotonic_s()
        waiting = asyncio.create_task(router.route(shape("r1")))
        await asyncio.sleep(3.0)
        await fleet_of(world, router)
        pair = await waiting
        assert pair.waited_s == pytest.approx(3.0, abs=0.01)
        assert pair.predicted_ttft_s > 3.0  # waiting is part of it (R4.2)
        await router.drain("p0", reason="test")
        began = world.clock.monotonic_s()
        with pytest.raises(NoPair, match="prefill worker is shut") as caught:
            await router.route(shape("r2"))
        assert not isinstance(caught.value, Overloaded)
        assert world.clock.monotonic_s() - began == pytest.approx(8.0, abs=0.01)

    on_virtual_time(main, policy=QUICK)


def test_a_saturated_pool_refuses_as_overloaded_within_its_own_bound() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router)
        desk = router.desks[MODEL]
        for i in range(64):
            pair = await router.route(shape(f"r{i}", 16, first=i * 1000))
            await router.complete(events(pair, EventKind.PREFILL_DONE))
        assert desk.decodes[0].sequences == 64
        began = world.clock.monotonic_s()
        beat = asyncio.create_task(keep_alive(router, world))
        with pytest.raises(Overloaded) as caught:
            await router.route(shape("late"))
        beat.cancel()
        assert world.clock.monotonic_s() - began == pytest.approx(5.0, abs=0.01)
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1.0
        assert (await router.signals()).models[MODEL].refused_total == 1

    async def keep_alive(router: RouterService, world: World) -> None:
        while True:
            await asyncio.sleep(2.0)
            held = list(router.desks[MODEL].held)
            await router.complete([RequestEvent(r, EventKind.PROGRESS) for r in held])

    on_virtual_time(main, policy=replace(QUICK, pair=replace(QUICK.pair, tpot_admit=100.0)))


def test_a_client_that_leaves_takes_its_request_out_of_the_queue() -> None:
    """B76: dead entries never reach a worker; a fresh request is served next."""

    async def main(world: World) -> None:
        router = await world.router()
        dead = [asyncio.create_task(router.route(shape(f"dead{i}"))) for i in range(200)]
        await asyncio.sleep(1.0)
        assert len(router.desks[MODEL].queue) == 200
        for task in dead:
            task.cancel()
        await asyncio.gather(*dead, return_exceptions=True)
        assert router.desks[MODEL].queued_tokens == 0
        await fleet_of(world, router)
        pair = await router.route(shape("fresh"))
        assert pair.waited_s == 0.0
        await router.complete(events(pair, *SERVED))
        await all_free(world, router)

    on_virtual_time(main)


def test_a_client_that_leaves_between_grant_and_answer_leaves_nothing_booked() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        waiting = asyncio.create_task(router.route(shape("r1")))
        await asyncio.sleep(1.0)
        await world.worker(router, "p0", P)
        made = await world.worker(router, "d0", D)  # grants, and is not yet seen by the caller
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(2.0)
        await all_free(world, router)
        await made.renew()

    on_virtual_time(main)


def test_more_important_requests_go_first_and_push_others_out_of_a_full_queue() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        low = asyncio.create_task(router.route(shape("low", priority=0)))
        await asyncio.sleep(0.1)
        mid = asyncio.create_task(router.route(shape("mid", priority=1)))
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded, match="holds 2 requests"):
            await router.route(shape("late", priority=0))
        high = asyncio.create_task(router.route(shape("high", priority=2)))
        await asyncio.sleep(0.1)
        with pytest.raises(Overloaded, match="more important"):
            await low
        assert [w.shape.request_id for w in router.desks[MODEL].queue] == ["high", "mid"]
        await fleet_of(world, router)
        assert (await high).waited_s < (await mid).waited_s
        assert router.desks[MODEL].refusals == {"queue_full": 1, "outranked": 1}

    on_virtual_time(main, policy=replace(QUICK, queue_requests_max=2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"request_id": ""}, "request_id"),
        ({"model": ""}, "model"),
        ({"isl": 0, "token_ids": b""}, "isl"),
        ({"isl": -5}, "isl"),
        ({"isl": 10**12, "token_ids": b""}, "isl"),
        ({"isl": 161}, "token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"slo": Slo(0.0, 0.1)}, "slo"),
    ],
)
def test_a_shape_that_makes_no_sense_is_refused_by_name(
    changes: dict[str, Any], words: str
) -> None:
    async def main(world: World) -> None:
        router = await world.router()
        with pytest.raises(InvalidField, match=words):
            await router.route(replace(shape("r1"), **changes))

    on_virtual_time(main)


def test_a_prompt_that_no_worker_takes_is_too_long_at_once() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router)
        with pytest.raises(PromptTooLong, match="32768 tokens at most"):
            await router.route(shape("r1", 32_768))
        with pytest.raises(PromptTooLong):
            await router.route(shape("r2", 16, max_tokens=10_000_000))
        assert world.clock.monotonic_s() < 1.0

    on_virtual_time(main)


def test_unknown_models_are_not_found_and_open_no_desk() -> None:
    """B159, B172: unknown is 404, known but without workers is waited for."""

    async def main(world: World) -> None:
        router = await world.router()
        for number in range(300):
            with pytest.raises(NotFound):
                await router.route(shape("r", model=f"junk-{number}"))
        assert set(router.desks) == set()
        assert router.other_refused == 300
        with pytest.raises(NoPair):
            await router.route(shape("r"))
        assert set(router.desks) == {MODEL}

    on_virtual_time(main, policy=QUICK)


def test_incompatible_workers_are_never_paired_and_the_field_is_named() -> None:
    """B69, B169: within a second, with the differing field."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        odd = serving(kv=KvFormat(DIGEST, layout="NHD"))
        await world.worker(router, "d0", D, serves=odd)
        with pytest.raises(NoCompatiblePair, match="layout: HND != NHD"):
            await router.route(shape("r1"))
        assert world.clock.monotonic_s() < 1.0

    on_virtual_time(main)


def test_engines_that_meet_are_told_where_and_under_which_number() -> None:
    """Who asks again is told the same; another pair for the same request meets elsewhere."""

    async def main(world: World) -> None:
        router = await world.router()
        kv = KvFormat(DIGEST, connector="sglang/nixl")
        for name, role, port in (("p0", P, 8998), ("p1", P, 8999), ("d0", D, 0)):
            at = f"10.0.0.1:{port}" if port else ""
            await world.worker(router, name, role, serves=serving(kv=kv, kv_side_channel=at))
        pair = await router.route(shape("r1"))
        room = pair.bootstrap_room
        assert pair.prefill.bootstrap in ("10.0.0.1:8998", "10.0.0.1:8999")
        assert pair.decode.bootstrap == "" and room is not None and 0 <= room < 2**53
        assert (await router.route(shape("r1"))).bootstrap_room == room
        await router.complete(events(pair, EventKind.LEG_FAILED, failed_worker_id="p0"))
        other = await router.route(
            shape("r1"), replaces=pair.reservation_id, avoid=(pair.prefill.worker_id,)
        )
        assert other.prefill.bootstrap != pair.prefill.bootstrap
        assert other.bootstrap_room not in (None, room)

    on_virtual_time(main)


def test_a_reservation_that_nobody_speaks_of_runs_out() -> None:
    """B86."""

    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router)
        silent = await router.route(shape("silent"))
        spoken = await router.route(shape("spoken"))
        for _ in range(4):
            await asyncio.sleep(4.0)
            await router.complete(events(spoken, EventKind.PROGRESS, output_tokens=0))
        assert set(router.desks[MODEL].held) == {spoken.reservation_id}
        assert await router.complete(events(silent, EventKind.FINISHED)) == 1
        await router.complete(events(spoken, *SERVED))
        await all_free(world, router)

    on_virtual_time(main, policy=QUICK)


def test_an_output_longer_than_forecast_grows_its_reservation() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router)
        for number in range(40):  # short answers teach a short forecast
            pair = await router.route(shape(f"r{number}", max_tokens=4096, first=number))
            await router.complete(events(pair, *SERVED, output_tokens=20))
        pair = await router.route(shape("long", max_tokens=4096))
        before = (await world.store.usage(MODEL))["d0"].blocks
        assert before == -(-(160 + 24) // 16)  # 24: the middle of the bin that 20 is in
        await router.complete(events(pair, EventKind.PROGRESS, output_tokens=2))
        assert (await world.store.usage(MODEL))["d0"].blocks == before
        await router.complete(events(pair, EventKind.PROGRESS, output_tokens=40))
        assert (await world.store.usage(MODEL))["d0"].blocks == before + 16
        assert (await router.signals()).models[MODEL].decoding_kv_tokens == 200
        assert (router.desks[MODEL].grown, router.desks[MODEL].overflowed) == (1, 0)
        await router.complete(events(pair, EventKind.FINISHED, output_tokens=60))
        await all_free(world, router)

    on_virtual_time(main)


@pytest.mark.parametrize(
    ("tokens", "most_tokens", "want"),
    [
        (159, None, 0),  # the tenth block still has room
        (160, None, 16),
        (160 + 255, None, 16),
        (160 + 256, None, 32),  # told late: as many chunks as it takes
        (160, 200, 3),  # prompt and max_tokens need 13 blocks, not 26
        (200, 160, 3),  # the engine went beyond max_tokens by itself: the KV is there
        (160, 160, 0),  # all it may ever say is reserved
    ],
)
def test_a_reservation_grows_by_chunks_up_to_max_tokens(
    tokens: int, most_tokens: int | None, want: int
) -> None:
    blocks = growth_blocks(
        tokens, reserved_blocks=10, block_size=16, grow_tokens=256, most_tokens=most_tokens
    )
    assert blocks == want


def test_an_overflow_is_counted_and_promises_no_block_twice() -> None:
    """The output is longer than its forecast and the worker is full: no more is taken there."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", Role.PREFILL)
        await world.worker(router, "d0", Role.DECODE, serves=serving(blocks=60))
        for number in range(40):
            pair = await router.route(shape(f"r{number}", max_tokens=4096, first=number))
            await router.complete(events(pair, *SERVED, output_tokens=20))
        long = await router.route(shape("long", max_tokens=4096))
        second = await router.route(shape("second", 560, max_tokens=4096, first=50))
        await router.complete(events(long, EventKind.PROGRESS, output_tokens=40))
        assert (await world.store.usage(MODEL))["d0"].blocks == 12 + 37 + 16
        assert router.desks[MODEL].overflowed == 1
        with pytest.raises(Overloaded):
            await router.route(shape("third", 16, first=60))
        await router.complete(events(long, EventKind.FINISHED, output_tokens=60))
        third = await router.route(shape("fourth", 16, first=60))
        for one in (second, third):
            await router.complete(events(one, *SERVED))
        await all_free(world, router)

    on_virtual_time(main)


def test_a_dry_run_reserves_nothing_and_explains() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await fleet_of(world, router, p=2)
        pair = await router.route(shape("r1"), dry_run=True, explain=True)
        assert pair.reservation_id == "" and pair.explanation is not None
        assert pair.explanation["candidates"] == 2
        real = await router.route(shape("r2"), explain=True)
        assert real.explanation is not None
        assert real.explanation["chosen"]["prefill"] == real.prefill.worker_id
        await router.complete(events(real, *SERVED))
        await router.drain("p0")
        await router.drain("p1")
        with pytest.raises(NoPair, match="prefill:p0: draining"):
            await router.route(shape("r3"), dry_run=True, explain=True)
        assert (await router.signals()).models[MODEL].arrivals_total == 1
        await all_free(world, router)

    on_virtual_time(main)


# --------------------------------------------------------------------------- prefixes


def test_a_conversation_goes_back_to_the_worker_that_holds_it() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        p0, p1, _ = await fleet_of(world, router, p=2)
        first = await router.route(shape("turn1", 320))
        await router.complete(events(first, *SERVED))
        holder = p0 if first.prefill.worker_id == "p0" else p1
        # A new turn within the speculative time goes there; its events make it last.
        again = await router.route(shape("turn2", 640))
        assert (again.prefill.worker_id, again.prefill.cached_tokens) == (
            holder.offer.worker_id,
            320,
        )
        await router.complete(events(again, *SERVED))
        await asyncio.sleep(30.0)
        cold = await router.route(shape("turn3", 640))
        assert cold.prefill.cached_tokens == 0
        blocks = sequence_hashes(shape("x", 640).token_ids, 16)
        batch = KvEventBatch(1, (KvEvent("stored", blocks),))
        await holder.renew(kv_events=(batch,))
        await router.complete(events(cold, *SERVED))
        await asyncio.sleep(30.0)
        warm = await router.route(shape("turn4", 640))
        assert (warm.prefill.worker_id, warm.prefill.cached_tokens) == (
            holder.offer.worker_id,
            639,
        )
        told = (await router.signals()).models[MODEL]
        assert told.arrival_uncached_tokens_total == 320 + 320 + 640 + 1

    on_virtual_time(main)


def test_events_from_before_the_gate_count_and_a_gap_asks_for_a_replay() -> None:
    """B93."""

    async def main(world: World) -> None:
        router = await world.router()
        worker = FakeWorker(router, offer("p0", P))
        await worker.register()
        await worker.renew(kv_events=(KvEventBatch(0, (KvEvent("stored", (1,)),)),))
        await worker.form()
        assert await worker.admit() == ()
        answer = await worker.renew(kv_events=(KvEventBatch(1, (KvEvent("stored", (2,)),)),))
        assert answer.directives == ()
        answer = await worker.renew(kv_events=(KvEventBatch(4, (KvEvent("stored", (5,)),)),))
        assert [d.kind for d in answer.directives] == ["replay_kv"]
        assert [d.kind for d in (await worker.renew()).directives] == ["replay_kv"]
        anew = KvEventBatch(5, (KvEvent("cleared"), KvEvent("stored", (1, 2, 5))))
        assert (await worker.renew(kv_events=(anew,))).directives == ()

    on_virtual_time(main)
