"""Field reports of routing and pairing, each by its number; those of gateways are in the second half."""

import asyncio
import math
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest

from readyplane import profiles
from readyplane.core.errors import (
    InvalidField,
    LostLease,
    NoCompatiblePair,
    NoPair,
    StaleEpoch,
)
from readyplane.core.identity import KvFormat
from readyplane.core.work import EventKind, Slo
from readyplane.core.worker import LoadReport, Role
from readyplane_agent.engines.modelled.core import EngineModel
from readyplane_agent.engines.modelled.core_events import (
    EngineRequest,
    Finished,
    RequestMode,
    TokensEmitted,
)
from readyplane_gateway.bounds import Bounds
from readyplane_router.answers import learn
from readyplane_router.pair import Ask, Chosen, PairPolicy, Shed, Wait, decide, pair_terms
from readyplane_router.policy import RouterPolicy
from readyplane_router.seats import Use
from readyplane_router.service import RouterService
from tests.router_world import (
    KV,
    MODEL,
    SERVED,
    FakeWorker,
    World,
    events,
    offer,
    on_virtual_time,
    seat,
    serving,
    shape,
)
from tests.unit import gateway_world as gw

P, D = Role.PREFILL, Role.DECODE
POLICY = PairPolicy(slo=Slo(2.0, 0.2))
QUICK = RouterPolicy(pair=replace(POLICY, wait_max_s=5.0, empty_wait_max_s=5.0))
PROFILE = profiles.load("h200-llama8b-fp8")


def ask(isl: int = 160, **changes: Any) -> Ask:
    good = Ask(isl=isl, slo=POLICY.slo, output_tokens=50.0, output_reserved=100, max_tokens=200)
    return replace(good, **changes)


async def one_each(world: World) -> RouterService:
    router = await world.router()
    await world.worker(router, "p0", P)
    await world.worker(router, "d0", D)
    return router


async def nothing_held(world: World, router: RouterService) -> None:
    """At the seats and at the store, as soon as it was told."""
    await router.tick()
    for one in router.desks[MODEL].seats.values():
        assert (one.sequences, one.kv_blocks, one.works, one.transfers, one.sending) == (
            *(0, 0, {}, 0, 0),
        )
    used = await world.store.usage(MODEL)
    assert all((u.sequences, u.blocks, u.work_us) == (0, 0, 0) for u in used.values()), used


# ------------------------------------------------------------------------- B67: hold and wait


def test_b67_kv_that_was_held_too_long_is_never_read() -> None:
    """The reader is told that it is gone, and its request ends with an error and without a token."""
    p = EngineModel(PROFILE, block_size=16, kv_blocks=256, hold_s=30.0)
    d = EngineModel(PROFILE, block_size=16, kv_blocks=256)
    p.submit(EngineRequest("r", 64, 1, mode=RequestMode.REMOTE_DECODE), 0.0)
    d.submit(EngineRequest("r-d", 64, 8, mode=RequestMode.REMOTE_PREFILL), 0.0)
    p.advance(5.0)
    d.advance(5.0)
    assert not p.kv_pulled("r", 36.0)
    assert d.kv_failed("r-d", 36.0)
    told = d.advance(60.0)
    assert [e.reason for e in told if isinstance(e, Finished)] == ["error"]
    assert not [e for e in told if isinstance(e, TokensEmitted)]
    # Who says in time that it will come is waited for.
    p.submit(EngineRequest("s", 64, 1, mode=RequestMode.REMOTE_DECODE), 60.0)
    p.advance(65.0)
    assert p.kv_extend("s", 85.0) and p.kv_pulled("s", 110.0)


def test_b67_no_wait_is_longer_than_the_hold() -> None:
    with pytest.raises(InvalidField, match="kv_hold_s"):
        RouterPolicy.from_document({"pair": {"wait_max_s": 29.0}})
    policy = RouterPolicy()
    assert policy.pair.wait_max_s <= policy.kv_hold_s - policy.kv_hold_margin_s
    assert Bounds().decode_first_s_max <= policy.kv_hold_s - policy.kv_hold_margin_s


# ------------------------------------------------------------------------- circuits


def test_b68_an_open_prefill_circuit_refuses_at_once_and_one_good_probe_closes_it() -> None:
    async def main(world: World) -> None:
        router = await one_each(world)
        for number in range(5):
            pair = await router.route(shape(f"r{number}"))
            await router.complete(events(pair, EventKind.LEG_FAILED, failed_worker_id="p0"))
        began_s = world.clock.monotonic_s()
        with pytest.raises(NoPair, match="circuit open") as caught:
            await router.route(shape("now"))
        assert world.clock.monotonic_s() == began_s and caught.value.retry_after_s
        assert router.desks[MODEL].decodes[0].sequences == 0  # D is not even asked
        await asyncio.sleep(6.1)
        probe = await router.route(shape("probe"))
        await router.complete(events(probe, *SERVED))
        for number in range(5):
            pair = await router.route(shape(f"after{number}"))
            await router.complete(events(pair, *SERVED))
        await nothing_held(world, router)

    on_virtual_time(main, policy=QUICK)


def test_b68_a_link_that_fails_is_avoided_although_both_its_workers_are_well() -> None:
    async def main(world: World) -> None:
        router = await one_each(world)
        await world.worker(router, "d1", D)
        picked: Counter[str] = Counter()
        for number in range(60):
            pair = await router.route(shape(f"r{number}", first=number * 300))
            name = pair.decode.worker_id
            picked[name] += number >= 30
            await router.complete(events(pair, EventKind.PREFILL_DONE))
            if name == "d0":  # KV never comes over this one link
                await router.complete(events(pair, EventKind.LEG_FAILED, failed_worker_id="x"))
            else:
                await router.complete(events(pair, EventKind.FIRST_TOKEN, EventKind.FINISHED))
        assert picked == {"d0": 0, "d1": 30}
        assert router.desks[MODEL].cuts.open_links == 1
        told = await router.route(shape("why"), dry_run=True, explain=True)
        assert told.explanation is not None
        assert told.explanation["excluded"]["p0+d0"] == "circuit of their link open"
        await asyncio.sleep(6.0)  # half open: one probe, and it is good
        d1 = next(s for s in router.desks[MODEL].decodes if s.worker_id == "d1")
        d1.last_used += 10_000
        probe = await router.route(shape("probe", first=99_000))
        assert probe.decode.worker_id == "d0"
        await router.complete(events(probe, *SERVED))
        assert router.desks[MODEL].cuts.open_links == 0

    on_virtual_time(main, policy=QUICK)


@pytest.mark.parametrize("detail", ["busy: 429", "busy: 503"])
def test_b70_busy_is_not_broken(detail: str) -> None:
    async def main(world: World) -> None:
        router = await one_each(world)
        for number in range(50):
            pair = await router.route(shape(f"r{number}"))
            failed = events(pair, EventKind.LEG_FAILED, failed_worker_id="p0", detail=detail)
            await router.complete(failed)
        desk = router.desks[MODEL]
        assert all(c.failures == 0 for c in desk.circuits.values()) and not desk.cuts.open_links
        await router.complete(events(await router.route(shape("other")), *SERVED))

    on_virtual_time(main, policy=QUICK)


# ------------------------------------------------------------------------- compatibility


@pytest.mark.parametrize("field", [f.name for f in fields(KvFormat)])
def test_b69_one_differing_field_is_enough_and_is_named(field: str) -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        other: Any = {"block_size": 32, "tp": 8}.get(field, "other")
        odd = seat("odd", D, kv=replace(KV, **{field: other}))
        desk = router.desk(MODEL)
        desk.seat_worker(odd, now_s=0.0)
        with pytest.raises(NoCompatiblePair, match=f"{field}: ") as caught:
            await router.route(shape("r1"))
        assert caught.value.retry_after_s is not None
        desk.seat_worker(seat("good", D, kv=desk.prefills[0].kv), now_s=0.0)
        told = await router.route(shape("r2"), dry_run=True, explain=True)
        assert told.decode.worker_id == "good" and told.explanation is not None
        assert field in told.explanation["excluded"]["p0+odd"]

    on_virtual_time(main, policy=QUICK)


# ------------------------------------------------------------------------- incarnations


def test_b72_b78_a_worker_that_restarts_at_its_address_pairs_again_at_once() -> None:
    """Either end; the other one is not restarted, and who held the address before is refused."""

    async def main(world: World) -> None:
        router = await world.router()
        before = {
            name: await world.worker(router, name, role, renewing=False)
            for name, role in (("p0", P), ("d0", D))
        }
        for name, role in (("p0", P), ("d0", D)):
            lost = await router.route(shape(f"lost-{name}"))
            old = before[name]
            new = await FakeWorker(router, offer(name, role, incarnation=f"{name}-2")).start()
            assert new.lease.epoch > old.lease.epoch
            with pytest.raises((StaleEpoch, LostLease)):
                await old.renew()
            assert await router.complete(events(lost, EventKind.FINISHED)) == 1  # it is gone
            pair = await router.route(shape(f"again-{name}"))
            end = pair.prefill if role is P else pair.decode
            assert (end.incarnation, end.epoch) == (f"{name}-2", new.lease.epoch)
            await router.complete(events(pair, *SERVED))
        await nothing_held(world, router)

    on_virtual_time(main, policy=QUICK)


def test_b83_a_worker_that_comes_back_without_an_address_is_gone_at_once() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P, renewing=False)
        await world.worker(router, "d0", D, renewing=False)
        again = FakeWorker(router, offer("p0", P, incarnation="p0-2"))
        await again.register()
        await again.form()
        for url in ("", "nowhere", "http://"):
            reasons = await again.admit(serves=serving(engine_url=url))
            assert any("engine_url" in r for r in reasons), reasons
            assert [s.worker_id for s in router.desks[MODEL].seats.values()] == ["d0"]
        with pytest.raises(NoPair):
            await router.route(shape("r1"), dry_run=True)

    on_virtual_time(main, policy=QUICK)


def test_b84_ranks_that_a_restart_does_not_bring_back_leave_pool_and_index() -> None:
    """Each data-parallel rank is a worker with a lease; seven of eight are not renewed any more."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        await world.worker(router, "other", D)
        for rank in range(1, 8):
            await world.worker(router, f"e-{rank}", D, renewing=False)
        await world.worker(router, "e-0", D, renewing=False)
        await world.worker(router, "e-0", D, incarnation="e-0-again")
        for number in range(4):
            await asyncio.sleep(2.5)
            await router.complete(events(await router.route(shape(f"r{number}")), *SERVED))
        left = {s.worker_id for s in router.desks[MODEL].seats.values()}
        assert left == {"p0", "other", "e-0"}

    on_virtual_time(main, policy=QUICK)


# ------------------------------------------------------------------------- load


def test_b73_a_decode_worker_takes_no_prompts_and_one_of_both_stages_says_that_it_does() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "d0", D)
        with pytest.raises(NoPair, match="no ready prefill worker"):
            await router.route(shape("strict"))
        await world.worker(router, "b0", Role.BOTH)
        pair = await router.route(shape("local"))
        assert pair.local and pair.prefill.worker_id == "b0"

    on_virtual_time(main, policy=QUICK)


def test_b74_old_reports_of_idleness_attract_no_more_than_a_probe() -> None:
    async def main(world: World) -> None:
        router = await one_each(world)
        old = await world.worker(router, "d1", D, renewing=False)
        await old.renew(load=LoadReport(running=0, iterations_total=1, age_s=60.0))
        await asyncio.sleep(1.5)
        for number in range(10):
            pair = await router.route(shape(f"r{number}", 16, first=number * 99))
            await router.complete(events(pair, EventKind.PREFILL_DONE))
        found = {s.worker_id: s.sequences for s in router.desks[MODEL].decodes}
        assert found == {"d0": 9, "d1": 1}
        shown = (await router.list_workers()).workers["d1"]
        assert shown.load.age_s >= 60.0

    on_virtual_time(main)


def test_b80_a_worker_without_samples_gets_a_share_and_not_everything() -> None:
    async def main(world: World) -> None:
        router = await one_each(world)
        for number in range(40):
            pair = await router.route(shape(f"r{number}", 16, first=number * 99))
            await router.complete(events(pair, EventKind.PREFILL_DONE))
        await world.worker(router, "new", D, renewing=False)
        for number in range(30):
            pair = await router.route(shape(f"n{number}", 16, first=number * 99))
            await router.complete(events(pair, EventKind.PREFILL_DONE))
        found = {s.worker_id: s.sequences for s in router.desks[MODEL].decodes}
        assert found["new"] <= RouterPolicy().ramp_sequences < found["d0"]

    on_virtual_time(main, policy=replace(QUICK, pair=replace(QUICK.pair, tpot_admit=100.0)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_b81_what_engines_report_and_what_routers_promise_are_not_the_same_field(
    order: tuple[int, ...],
) -> None:
    d = seat("d", D, kv_total_blocks=100)
    news = [
        lambda: setattr(d, "foreign_blocks", 99),  # the engine: 99 % full
        lambda: learn(d, Use(1, 1, 0, 0)),  # a router: next to nothing promised
        lambda: learn(d, Use(0, 0, 0, 0)),
    ]
    verdict: object = None
    for place in order:
        news[place]()
        verdict = decide(ask(64, output_reserved=16), [seat("p")], [d], POLICY, now_s=0.0)
    assert isinstance(verdict, Wait) and verdict.regime == "busy"


def test_b82_neither_load_nor_cache_decides_alone() -> None:
    warm, cold, d = seat("warm"), seat("cold"), seat("d", D)
    warm.works["before"] = warm.work_s = 10.0
    what = ask(1000, cached_tokens={warm.key: 896})
    verdict = decide(what, [warm, cold], [d], POLICY, now_s=0.0)
    assert isinstance(verdict, Chosen) and verdict.prefill is cold
    first, last = seat("a"), seat("b")
    first.works["before"] = first.work_s = 0.4  # the smallest index is the fullest
    verdict = decide(ask(200), [first, last], [d], POLICY, now_s=0.0)
    assert isinstance(verdict, Chosen) and verdict.prefill is last
    for isl, held in ((1, 0), (1, 1), (16, 16), (17, 160)):
        terms = pair_terms(
            ask(isl, cached_tokens={first.key: held, d.key: held}), first, d, POLICY, now_s=0.0
        )
        assert all(math.isfinite(v) and v >= 0 for v in (terms.cost_s, terms.ttft_s, terms.tpot_s))


def test_b87_paced_requests_that_never_overlap_are_spread() -> None:
    async def main(world: World) -> None:
        router = await one_each(world)
        await world.worker(router, "p1", P)
        await world.worker(router, "d1", D)
        await asyncio.sleep(4.0)
        picked: Counter[str] = Counter()
        for number in range(64):
            pair = await router.route(shape(f"r{number}", 160, first=number * 300))
            picked.update((pair.prefill.worker_id, pair.decode.worker_id))
            await router.complete(events(pair, *SERVED))
            await asyncio.sleep(0.3)
        assert max(picked.values()) <= 0.65 * 64, picked

    on_virtual_time(main)


def test_b88_one_hot_worker_does_not_end_affinity_elsewhere() -> None:
    hot, warm, d = seat("hot"), seat("warm"), seat("d", D)
    hot.works["before"] = hot.work_s = 50.0
    ps = [hot, seat("cold"), warm]
    verdict = decide(ask(600, cached_tokens={warm.key: 592}), ps, [d], POLICY, now_s=0.0)
    assert isinstance(verdict, Chosen) and verdict.prefill is warm


# ------------------------------------------------------------------------- waiting and release


def test_b76_waits_have_a_default_bound_and_the_dead_are_not_served() -> None:
    assert 0 < RouterPolicy().pair.wait_max_s < 30 and 0 < RouterPolicy().pair.empty_wait_max_s < 60

    async def main(world: World) -> None:
        router = await world.router()
        dead = [asyncio.create_task(router.route(shape(f"dead{i}"))) for i in range(500)]
        await asyncio.sleep(1.0)
        for task in dead:
            task.cancel()
        await asyncio.gather(*dead, return_exceptions=True)
        assert not router.desks[MODEL].queue and router.desks[MODEL].queued_tokens == 0
        fresh = asyncio.create_task(router.route(shape("fresh")))
        await world.worker(router, "p0", P)
        await world.worker(router, "d0", D)
        pair = await fresh
        assert pair.waited_s < 0.1 and set(router.desks[MODEL].held) == {pair.reservation_id}

    on_virtual_time(main)


@pytest.mark.parametrize("how", ["d_refuses", "p_dies", "client_leaves"])
def test_b86_whatever_ends_a_pair_early_both_sides_are_free(how: str) -> None:
    async def main(world: World) -> None:
        router = await world.router()
        p0 = await world.worker(router, "p0", P)
        await world.worker(router, "d0", D)
        pair = await router.route(shape("r1"))
        if how == "d_refuses":
            await router.complete(events(pair, EventKind.PREFILL_DONE))
            refused = events(
                pair, EventKind.LEG_FAILED, failed_worker_id="d0", detail="busy: no blocks"
            )
            await router.complete(refused)
        elif how == "p_dies":
            p0.left = True  # not a word more
            await asyncio.sleep(RouterPolicy().lease_ttl_s + 2.5)
        else:
            await router.complete(events(pair, EventKind.ABORTED))
        await nothing_held(world, router)

    on_virtual_time(main, policy=QUICK)


def test_b89_what_is_sent_the_moment_a_worker_is_there_is_counted_and_freed_once() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        early = asyncio.create_task(router.route(shape("early")))
        await asyncio.sleep(0.5)
        await world.worker(router, "d0", D)
        pair = await early
        assert router.desks[MODEL].decodes[0].sequences == 1
        assert (await world.store.usage(MODEL))["d0"].sequences == 1
        assert await router.complete(events(pair, *SERVED)) == 0
        assert await router.complete(events(pair, EventKind.FINISHED)) == 1
        await nothing_held(world, router)

    on_virtual_time(main, policy=QUICK)


def test_b90_an_empty_pool_and_a_full_one_have_budgets_of_their_own() -> None:
    policy = replace(POLICY, empty_wait_max_s=300.0, wait_max_s=20.0)

    async def main(world: World) -> None:
        router = await world.router()
        began_s = world.clock.monotonic_s()
        with pytest.raises(NoPair):
            await router.route(shape("empty"))
        assert world.clock.monotonic_s() - began_s == pytest.approx(300.0, abs=0.1)

    on_virtual_time(main, policy=RouterPolicy(pair=policy))
    full = seat("p")
    full.works["before"] = full.work_s = 99.0
    over = decide(ask(regime_s=20.0, waited_s=200.0), [full], [seat("d", D)], policy, now_s=0.0)
    assert isinstance(over, Shed) and over.kind == "overloaded"
    # The regime has just changed: its clock begins anew.
    anew = decide(ask(regime_s=0.0, waited_s=200.0), [full], [seat("d", D)], policy, now_s=0.0)
    assert isinstance(anew, Wait)


def test_b91_a_burst_waits_for_decode_before_prefill_and_nobody_s_deadline_counts_it() -> None:
    """A pair is reserved whole: no prompt is prefilled before its D has a place."""

    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        await world.worker(router, "d0", D, serves=serving(max_num_seqs=4))
        at_once = 0

        async def one(number: int) -> None:
            nonlocal at_once
            pair = await router.route(shape(f"r{number}", 16, first=number * 50))
            at_once += 1
            assert at_once <= 4
            await router.complete(events(pair, EventKind.PREFILL_DONE))
            await asyncio.sleep(0.4)
            at_once -= 1
            await router.complete(events(pair, EventKind.FIRST_TOKEN, EventKind.FINISHED))

        await asyncio.gather(*(one(number) for number in range(32)))
        await nothing_held(world, router)

    on_virtual_time(main, policy=QUICK)


# ------------------------------------------------------------------------- gateways


def test_b70_fifty_prompts_that_are_too_long_are_nobody_s_fault_but_their_client_s() -> None:
    async def story(world: gw.World) -> None:
        for name in ("p1", "p2"):
            world.engine(name).plans.extend(gw.Plan("400") for _ in range(25))
        got = [await world.ask(stream=True) for _ in range(50)]
        assert {one.status for one in got} == {400}
        other = await world.ask(stream=True)
        assert other.status == 200
        await world.settle()
        told = [e for r in world.router.reservations.values() for e in r.events]
        assert not [e for e in told if e.kind == "leg_failed"]

    gw.play(story)


@pytest.mark.parametrize(("name", "how"), [("p1", "refuse"), ("p1", "500"), ("d1", "500")])
def test_b71_when_one_leg_fails_the_other_is_given_up_within_a_tenth_of_a_second(
    name: str, how: str
) -> None:
    async def story(world: gw.World) -> None:
        for number in "12":
            world.engine(f"{name[0]}{number}").plans.append(gw.Plan(how))
        got = await world.ask(stream=True)
        assert got.status in (502, 503)
        await asyncio.sleep(0.1)
        world.check_nothing_leaks()
        assert world.ends() == {"leg_failed": 2}
        assert not world.held  # no prefill engine keeps KV for a reader that never comes

    gw.play(story)


def test_b75_a_worker_that_never_answers_slows_nobody_else() -> None:
    async def story(world: gw.World) -> None:
        world.engine("d1").plans.extend(gw.Plan("hang") for _ in range(20))
        began_s = world.clock.monotonic_s()

        async def timed() -> tuple[str, int, float]:
            got = await world.ask(stream=True)
            took_s = world.clock.monotonic_s() - began_s
            return got.headers.get("x-readyplane-decode", ""), got.status, took_s

        done = await asyncio.gather(*(timed() for _ in range(20)))
        quick = [took_s for _, _, took_s in done if took_s < 1.0]
        assert len(quick) >= 10 and max(quick) < 0.5
        bound_s = 2 * Bounds().decode_first_s_max + 1
        assert all(status in (200, 504) and took_s < bound_s for _, status, took_s in done)

    gw.play(story)


def test_b78_kv_that_could_not_be_loaded_is_never_decoded_on() -> None:
    d = EngineModel(PROFILE, block_size=16, kv_blocks=256)
    d.submit(EngineRequest("r", 640, 8, mode=RequestMode.REMOTE_PREFILL), 0.0)
    d.advance(1.0)
    assert d.kv_failed("r", 1.0)
    told = d.advance(9.0)
    assert [e.reason for e in told if isinstance(e, Finished)] == ["error"]
    assert not [e for e in told if isinstance(e, TokensEmitted)]
    assert d.is_idle() and d.pool.used == 0
