"""Service rates of workers and links are corrected while they serve, within bounds (R20.1)."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.profile import LinkClass
from readyplane.core.work import EventKind
from readyplane.core.worker import LoadReport, Role
from readyplane_router.cuts import Cuts
from readyplane_router.pair import PairPolicy
from readyplane_router.rates import FACTOR_MAX, LINK_FACTOR_MAX, OWN_FACTOR_MAX, Correction, Rates
from tests.router_world import MODEL, World, events, on_virtual_time, seat, shape

FAR = LinkClass("far", 1e9, 0.01)
NEAR = LinkClass("near", 2e9, 0.001)
POLICY = PairPolicy(local_link=NEAR, network_link=FAR)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=60), st.floats(1.1, 20.0))
def test_a_factor_stays_within_its_bounds_whatever_is_measured(
    measured: list[float], most: float
) -> None:
    correction = Correction(factor_max=most)
    for one in measured:
        correction.add(predicted_s=1.0, measured_s=one, now_s=0.0)
        assert 1.0 / most - 1e-9 <= correction.factor <= most + 1e-9


def test_twice_as_slow_and_twice_as_fast_cancel_out() -> None:
    """The mean of 2 and 1/2 is 1.25; that of their logarithms is none."""
    correction = Correction()
    for _ in range(300):
        correction.add(predicted_s=1.0, measured_s=2.0, now_s=0.0)
        correction.add(predicted_s=1.0, measured_s=0.5, now_s=0.0)
    assert correction.factor == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("measured_s", [0.0, -1.0, math.inf, math.nan])
def test_what_cannot_be_is_no_sample(measured_s: float) -> None:
    correction = Correction()
    correction.add(predicted_s=1.0, measured_s=measured_s, now_s=0.0)
    assert correction.count == 0


def test_one_slow_worker_is_told_from_its_class() -> None:
    rates, slow = Rates(), seat("slow")
    others = [seat(f"p{n}") for n in range(7)]
    for number in range(300):
        for one in (slow, *others):
            taken_s = 1.6 if one is slow else 1.0
            rates.prefilled(one, predicted_s=1.0, measured_s=taken_s, now_s=float(number))
    assert slow.prefill_factor == pytest.approx(1.6 / 1.15, rel=0.1)
    assert all(one.prefill_factor == pytest.approx(1.0, abs=0.1) for one in others)
    assert dict(rates.own_of(slow.key)) == {"prefill": pytest.approx(1.3, rel=0.1)}
    assert rates.own_of(others[0].key) == []
    for _ in range(2_000):
        rates.prefilled(slow, predicted_s=1.0, measured_s=1e6, now_s=1e3)
    assert slow.prefill_factor <= FACTOR_MAX * OWN_FACTOR_MAX
    rates.forget(slow.key)
    assert rates.own_of(slow.key) == []


def test_a_decode_worker_that_is_slow_is_noticed_and_prompts_between_are_not_its_fault() -> None:
    rates, d, both = Rates(), seat("d", Role.DECODE), seat("both", Role.BOTH)
    for _ in range(200):
        rates.decoded(d, predicted_s=0.02, measured_s=0.05, tokens=100, now_s=0.0)
        rates.decoded(both, predicted_s=0.02, measured_s=0.05, tokens=100, now_s=0.0)
        rates.decoded(d, predicted_s=0.02, measured_s=9.0, tokens=3, now_s=0.0)
    assert d.decode_factor == pytest.approx(2.5 / 1.15, rel=0.05)
    assert both.decode_factor == 1.0


def test_a_link_that_is_not_what_its_class_says() -> None:
    rates = Rates()
    assert rates.corrected(POLICY) is POLICY
    for _ in range(300):
        rates.moved(FAR, predicted_s=0.5, rest_s=0.05, measured_s=4.05, now_s=0.0)
    far = rates.corrected(POLICY).network_link
    assert far.bandwidth_bytes_per_s == pytest.approx(1e9 * 1.5 / 8.0, rel=0.05)
    assert rates.corrected(POLICY) is rates.corrected(POLICY)
    # What is short, or mostly not the link's, says nothing of it.
    for _ in range(300):
        rates.moved(NEAR, predicted_s=0.01, rest_s=0.0, measured_s=9.0, now_s=0.0)
        rates.moved(NEAR, predicted_s=0.5, rest_s=0.4, measured_s=9.0, now_s=0.0)
    assert "near" not in rates.links
    for _ in range(3_000):
        rates.moved(FAR, predicted_s=0.5, rest_s=0.0, measured_s=1e9, now_s=0.0)
    assert rates.factor_of(FAR) <= LINK_FACTOR_MAX


def test_within_a_machine_is_never_taken_for_slower_than_between_machines() -> None:
    """The argmin rests on it."""
    rates = Rates()
    for _ in range(300):
        rates.moved(NEAR, predicted_s=0.5, rest_s=0.0, measured_s=8.0, now_s=0.0)
    corrected = rates.corrected(POLICY)
    near, far = corrected.local_link, corrected.network_link
    assert near.bandwidth_bytes_per_s >= far.bandwidth_bytes_per_s and near.setup_s <= far.setup_s


# ------------------------------------------------------------------------- links that fail


def cuts() -> Cuts:
    return Cuts(failures_max=3, window_s=30.0, open_s=5.0)


def test_a_link_opens_lets_one_probe_through_and_closes() -> None:
    links = cuts()
    for now_s in (0.0, 1.0):
        links.failed("p", "d", now_s=now_s)
    assert links.now(now_s=1.0) == {}
    links.failed("p", "d", now_s=2.0)
    assert links.now(now_s=2.0) == {"d": frozenset({"p"})} and links.open_links == 1
    links.succeeded("p", "d")  # late, of a pair from before
    assert links.now(now_s=6.9) == {"d": frozenset({"p"})}
    assert links.now(now_s=7.0) == {}
    links.taken("p", "d")
    assert links.now(now_s=7.1) == {"d": frozenset({"p"})}  # the probe is under way
    links.given_back("p", "d")
    assert links.now(now_s=7.2) == {}  # it ended without a verdict: another may go
    links.taken("p", "d")
    links.failed("p", "d", now_s=8.0)
    assert links.now(now_s=12.9) == {"d": frozenset({"p"})}
    assert links.now(now_s=13.0) == {}
    links.taken("p", "d")
    links.succeeded("p", "d")
    assert links.now(now_s=13.1) == {} and links.open_links == 0


def test_links_of_workers_that_are_gone_are_forgotten() -> None:
    links = cuts()
    for d in ("d1", "d2"):
        for _ in range(3):
            links.failed("p", d, now_s=0.0)
    assert links.open_links == 2
    links.forget("d1")
    assert links.now(now_s=0.0) == {"d2": frozenset({"p"})}
    links.forget("p")
    assert links.now(now_s=0.0) == {}


def test_a_reading_from_before_a_prompt_ended_is_no_work_of_strangers() -> None:
    """It would lengthen a queue that has just become shorter, and a class would look the quicker."""

    async def main(world: World) -> None:
        router = await world.router()
        worker = await world.worker(router, "p0", Role.PREFILL, renewing=False)
        await world.worker(router, "d0", Role.DECODE)
        p0 = next(s for s in router.desk(MODEL).seats.values() if s.worker_id == "p0")

        async def told(waiting_tokens: int) -> int:
            await worker.renew(load=LoadReport(waiting_prefill_tokens=waiting_tokens))
            return p0.foreign_tokens

        first = await router.route(shape("a", 160))
        await router.route(shape("b", 320, first=5_000))
        assert await told(480) == 0
        await router.complete(events(first, EventKind.PREFILL_DONE))
        assert p0.prefill_tokens == 320
        assert await told(480) == 0, "read while the first one was there"
        assert await told(480) == 160, "read again: somebody else's"
        assert await told(320) == 0

    on_virtual_time(main)
