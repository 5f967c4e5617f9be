"""Start-ups: drawn segments, shared sources, caches, standbys and flips; each mechanism by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from readyplane.core.startup import SegmentName, WeightTier
from readyplane.core.worker import Lease, Role, WorkerOffer
from readyplane_lab.demo import DEMO_POLICY
from readyplane_lab.proof.measure import _bill
from readyplane_lab.simulator.directives import Activate, Flip, StandBy
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop, run_virtual
from readyplane_lab.simulator.router import SimRouter
from readyplane_lab.simulator.sources import WeightSources
from readyplane_lab.simulator.startup import Draws, StartUpModel
from readyplane_lab.simulator.worker import SimWorker
from readyplane_planner.policy import overlay
from tests.simulation.sim_world import Fixed, steady, world

MODEL = StartUpModel(
    weight_bytes=800.0, store_bytes_per_s=50.0, peer_bytes_per_s=100.0, peer_readers_max=2
)
KEEP = Fixed((0.0, 2, 2))


def on_virtual_time(
    main: Callable[[WeightSources, VirtualClock], Coroutine[Any, Any, Any]],
    model: StartUpModel = MODEL,
) -> Any:
    loop = VirtualLoop()
    clock = VirtualClock(loop)
    return run_virtual(main(WeightSources(model, clock=clock), clock), loop=loop)


async def timed(sources: WeightSources, clock: VirtualClock, **how: Any) -> tuple[float, str]:
    began_s = clock.monotonic_s()
    tier = await sources.fetch(**how)
    return clock.monotonic_s() - began_s, str(tier)


# --------------------------------------------------------------------------- draws


def test_draws_depend_on_seed_and_names_alone() -> None:
    one, again, other = Draws(1), Draws(1), Draws(2)
    assert one.factor(0.3, "prefill", 3, "compile") == again.factor(0.3, "prefill", 3, "compile")
    assert one.factor(0.3, "prefill", 3, "compile") != other.factor(0.3, "prefill", 3, "compile")
    assert one.factor(0.3, "a", "bc") != one.factor(0.3, "ab", "c")
    assert one.factor(0.0, "a") == 1.0


def test_segments_follow_measured_quantiles_where_there_are_some() -> None:
    spread = {SegmentName.COMPILE: ((0.0, 0.5), (0.5, 1.0), (0.9, 3.0), (1.0, 6.0))}
    model, draws = replace(StartUpModel(), spread=spread), Draws(1)
    drawn = [model.seconds(SegmentName.COMPILE, draws, "prefill", k) for k in range(2000)]
    assert np.quantile(drawn, (0.5, 0.9)) == pytest.approx([1.2, 3.6], rel=0.1)
    assert min(drawn) >= 0.6
    assert max(drawn) <= 7.2
    plain = [StartUpModel().seconds(SegmentName.COMPILE, draws, "prefill", k) for k in range(2000)]
    assert np.log(np.quantile(plain, 0.84) / np.median(plain)) == pytest.approx(0.3, abs=0.03)


def test_a_warm_compile_cache_is_found_by_its_share_of_starts() -> None:
    model = replace(StartUpModel(), compiled_share=0.25, compiled_s=0.01)
    drawn = [model.seconds(SegmentName.COMPILE, Draws(1), "decode", k) for k in range(800)]
    assert np.mean(np.array(drawn) < 0.1) == pytest.approx(0.25, abs=0.05)


def test_stretching_a_start_keeps_its_shape() -> None:
    model = replace(StartUpModel(), cached_share=0.5, compiled_share=0.5)
    longer = model.scaled_to(60.0)
    alone = sum(longer.segments.values()) + longer.weight_bytes / longer.store_bytes_per_s
    assert alone + longer.provision_s == pytest.approx(60.0)
    assert (longer.cached_share, longer.compiled_share) == (0.5, 0.5)
    assert longer.compiled_s / model.compiled_s == pytest.approx(60.0 / 4.95, rel=0.01)


# --------------------------------------------------------------------------- sources


def test_readers_of_the_store_share_it() -> None:
    async def main(sources: WeightSources, clock: VirtualClock) -> list[tuple[float, str]]:
        return list(await asyncio.gather(*(timed(sources, clock) for _ in range(4))))

    took = on_virtual_time(main)
    assert {tier for _, tier in took} == {WeightTier.L4_OBJECT}
    assert [s for s, _ in took] == pytest.approx([64.0] * 4, rel=0.15)


def test_starts_fan_out_from_worker_to_worker() -> None:
    async def main(sources: WeightSources, clock: VirtualClock) -> list[tuple[float, str]]:
        sources.add_peer("a")

        async def start(name: str) -> tuple[float, str]:
            took = await timed(sources, clock)
            sources.add_peer(name)
            return took

        first = await asyncio.gather(start("b"), start("c"))
        then = await asyncio.gather(*(start(f"d{k}") for k in range(6)))
        return [*first, *then]

    took = on_virtual_time(main)
    assert {tier for _, tier in took} == {WeightTier.L1_HOST}
    assert max(s for s, _ in took) <= 16.0  # two readers a peer, never the store's 16 s each


def test_a_node_that_holds_the_weights_asks_nobody() -> None:
    model = replace(MODEL, disk_bytes_per_s=400.0)

    async def main(sources: WeightSources, clock: VirtualClock) -> tuple[float, str]:
        sources.add_peer("a")
        return await timed(sources, clock, cached=True)

    assert on_virtual_time(main, model) == (pytest.approx(2.0), WeightTier.L2_NVME)


def test_after_a_source_has_gone_the_next_gives_what_is_missing() -> None:
    async def main(sources: WeightSources, clock: VirtualClock) -> tuple[float, str]:
        sources.add_peer("a")
        asyncio.get_running_loop().call_later(4.5, sources.remove_peer, "a")
        took, counts = await timed(sources, clock), dict(sources.counts)
        assert counts == {"marks.L1": 4, "marks.L4": 4, "peers_gone": 1, "resumed": 1}
        return took

    # 4 marks of a second each, the fifth is lost when its second is over, 4 of the store's 2 s
    assert on_virtual_time(main) == (pytest.approx(5.0 + 8.0), WeightTier.L4_OBJECT)


def test_a_lie_is_found_at_the_mark_and_the_liar_is_asked_no_more() -> None:
    async def main(sources: WeightSources, clock: VirtualClock) -> dict[str, int]:
        sources.add_peer("a")
        sources.add_peer("b")
        sources.next_lies()
        assert (await timed(sources, clock))[1] == WeightTier.L1_HOST
        assert sources.counts["lies"] == 1
        sources.add_peer("a")  # it may say what it likes
        await asyncio.gather(*(sources.fetch() for _ in range(3)))
        return dict(sources.counts)

    counts = on_virtual_time(main)
    assert counts["lies"] == 1
    assert counts["marks.L1"] == 8 + 16
    assert counts["marks.L4"] == 8  # b has two readers already


def test_a_reader_that_is_given_up_leaves_its_place() -> None:
    async def main(sources: WeightSources, clock: VirtualClock) -> list[tuple[float, str]]:
        sources.add_peer("a")
        readers = [asyncio.create_task(sources.fetch()) for _ in range(2)]
        await clock.sleep(3.0)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        return [await timed(sources, clock)]

    assert on_virtual_time(main) == [(pytest.approx(8.0), WeightTier.L1_HOST)]


def test_a_cached_node_shows_in_the_tier_of_its_worker() -> None:
    tiers = {w.tier for w in world(KEEP, startup=StartUpModel(cached_share=1.0)).lives}
    assert tiers == {"L2"}


# --------------------------------------------------------------------------- standbys and flips


def test_a_standby_serves_soon_after_it_is_told_and_is_paid_for_before() -> None:
    result = world(KEEP, standbys=(1, 0), directives=(Activate(10.0, Role.PREFILL),))
    standby = [w for w in result.lives if "standby" in w.worker_id]
    assert [w.pool for w in standby] == ["prefill"]
    assert standby[0].allocated_s < 0.0
    assert 10.0 < (standby[0].ready_s or 0.0) < 13.0
    assert 0.3 < (standby[0].took_s or 0.0) < 3.0, "from the word"
    others = [w for w in result.lives if "standby" not in w.worker_id]
    assert all(w.start_s == w.allocated_s for w in others)
    # It hears of it with its next renewal.
    booked_s = result.counts["gpu_s.prefill.standby"]
    assert booked_s == pytest.approx(10.25, abs=0.25)
    bill = _bill(result.lives, result.run().span_s)
    assert bill["standby"] == pytest.approx(booked_s, abs=0.01)
    assert 0.0 < bill["boot"] < 3.0 * standby[0].gpus, "from the word alone"


def test_a_standby_that_loses_its_lease_as_it_is_activated_serves_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activate, register = SimWorker._activate, SimRouter.register
    offers: list[WorkerOffer] = []

    async def cut_off(self: SimWorker) -> None:
        self.unreachable_until_s = self._site.clock.monotonic_s() + 12.0
        await activate(self)

    async def seen(self: SimRouter, offer: WorkerOffer) -> Lease:
        offers.append(offer)
        return await register(self, offer)

    monkeypatch.setattr(SimWorker, "_activate", cut_off)
    monkeypatch.setattr(SimRouter, "register", seen)
    result = world(KEEP, standbys=(1, 0), directives=(Activate(10.0, Role.PREFILL),))
    (standby,) = (w for w in result.lives if "standby" in w.worker_id)
    assert result.counts["leases_expired"] == 1
    assert standby.ready_s == pytest.approx(22.0, abs=1.0), "as soon as it is back"
    again = [o for o in offers if o.worker_id == standby.worker_id][1]
    assert again.standby and 40.0 < (again.told_left_s or 0.0) < 49.0


def test_a_standby_loaded_by_hand_is_no_capacity_and_not_given_up() -> None:
    result = world(KEEP, directives=(StandBy(2.0, Role.DECODE, count=2),))
    standbys = [w for w in result.lives if "standby" in w.worker_id]
    assert [w.ready_s for w in standbys] == [None, None]
    assert all(w.released_s > 39.0 for w in standbys)
    assert result.targets == ((0.0, 2, 2),)
    assert result.counts["gpu_s.decode.standby"] > 50.0


def test_a_flipped_worker_serves_the_other_stage_without_a_new_start() -> None:
    flip = (Flip(10.0, Role.PREFILL),)
    result = world(Fixed((0.0, None, None)), directives=flip)
    before = [w for w in result.lives if w.drain_s is not None]
    after = [w for w in result.lives if "flip" in w.worker_id]
    assert [(w.pool, w.tier) for w in after] == [("decode", "L0")]
    assert [w.pool for w in before] == ["prefill"]
    assert after[0].allocated_s == before[0].released_s  # the same GPUs, billed once
    assert 0.3 < (after[0].ready_s or 0.0) - after[0].allocated_s < 3.0
    assert after[0].start_s == after[0].allocated_s
    assert before[0].start_s == before[0].allocated_s
    assert {r.outcome for r in result.records} == {"finished"}
    assert len(result.records) == len(steady())


def test_a_pool_that_grows_takes_its_standby_and_has_another_one_loaded() -> None:
    """Ordered, activated and replaced by the planner's service, through the ports."""
    grows = Fixed((0.0, 2, 3), (20.0, 2, 4))
    policy = overlay(DEMO_POLICY, {"decode": {"standby": 1}})
    result = world(grows, initial=(2, 3), policy=policy)
    decode = [w for w in result.lives if w.pool == "decode" and w.allocated_s > -1.0]
    first, second = sorted(decode, key=lambda w: w.allocated_s)
    assert first.ready_s is not None and second.ready_s is None, "one stands by again"
    # Between the planner's tick and the gate: a renewal and the drawn activation.
    began_s = second.allocated_s
    assert 18.0 < began_s < 24.0 and 0.0 < first.ready_s - began_s < 4.0
    assert result.counts["gpu_s.decode.standby"] > 20.0


def test_what_one_pool_gives_up_the_other_one_gets() -> None:
    moves = Fixed((0.0, 3, 1), (15.0, 2, 2))
    result = world(moves, initial=(3, 1), policy={"flip": True, "min_ready_s": 2.0})
    flipped = [w for w in result.lives if "flip" in w.worker_id]
    assert [(w.pool, w.tier) for w in flipped] == [("decode", "L0")]
    assert len(result.lives) == 5, "four allocations, one of them twice"
    assert {r.outcome for r in result.records} == {"finished"}
    assert result.counts["leases_expired"] == 0
