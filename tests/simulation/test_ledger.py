"""GPU-seconds are booked once, for what they were held for, and they add up."""

from __future__ import annotations

import pytest

from readyplane.core.worker import Role
from readyplane_lab.simulator.faults import Crash, SpotReclaim
from readyplane_lab.simulator.ledger import Ledger, Part
from readyplane_lab.simulator.world_result import WorldResult
from tests.simulation.sim_world import Fixed, steady, world

MIXED = {
    "prefill": {"min": 1, "max": 6, "worker_class": "h200-slow10", "profile": "h200-slow10"},
    "decode": {"min": 1, "max": 4, "worker_class": "h100-tp4", "profile": "h100-tp4-llama70b"},
}


class Cranked:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def parts(result: WorldResult) -> dict[tuple[str, str], float]:
    found = {}
    for name, value in result.counts.items():
        if name.startswith("gpu_s."):
            _, pool, part = name.split(".")
            found[pool, part] = value
    return found


def test_every_second_is_booked_for_what_it_was() -> None:
    clock = Cranked()
    ledger = Ledger(clock)
    account = ledger.open("decode", 4)
    clock.now_s = 10.0
    account.become(Part.IDLE)
    clock.now_s = 30.0
    account.busy(15.0, 30.0)
    clock.now_s = 40.0
    account.become(Part.DRAIN)
    clock.now_s = 45.0
    account.busy(42.0, 45.0)  # what it does while it drains is drain
    account.close()
    clock.now_s = 100.0
    booked = {str(part): seconds / 4 for (_, part), seconds in ledger.booked().items()}
    assert booked == {"boot": 10.0, "standby": 0.0, "idle": 15.0, "serve": 15.0, "drain": 5.0}
    assert ledger.total() == 4 * 45.0


def test_only_the_window_counts() -> None:
    clock = Cranked()
    ledger = Ledger(clock)
    early, late = ledger.open("prefill", 1), ledger.open("decode", 1)
    clock.now_s = 5.0
    early.become(Part.IDLE)
    ledger.open("prefill", 1).close()
    clock.now_s = 20.0
    ledger.bill(20.0, 60.0)
    clock.now_s = 50.0
    early.busy(10.0, 50.0)
    late.become(Part.IDLE)
    clock.now_s = 80.0
    booked = ledger.booked()
    assert booked["prefill", Part.SERVE] == 30.0
    assert booked["prefill", Part.IDLE] == 10.0
    assert booked["prefill", Part.BOOT] == 0.0
    assert booked["decode", Part.BOOT] == 30.0
    assert ledger.total() == 80.0


def test_a_run_bills_its_window_and_nothing_else() -> None:
    result = world(Fixed((0.0, 2, 2)))
    span_s = result.run().span_s
    last_s = result.records[-1].at_s
    booked = parts(result)
    assert sum(booked.values()) == pytest.approx(4 * last_s)
    assert last_s == pytest.approx(span_s, abs=1.0)
    assert booked["prefill", "boot"] == booked["decode", "drain"] == 0.0
    for pool in ("prefill", "decode"):
        assert booked[pool, "serve"] > 0.0
        assert booked[pool, "idle"] > 0.0


def test_boots_drains_and_crashes_are_billed_as_what_they_are() -> None:
    steps = ((0.0, 2, 2), (5.0, 3, 2), (20.0, 2, 2))
    faults = (Crash(8.0, Role.DECODE), SpotReclaim(10.0, Role.PREFILL, notice_s=5.0))
    result = world(Fixed(*steps), faults=faults)
    booked = parts(result)
    end_s = result.records[-1].at_s
    for pool in ("prefill", "decode"):
        lives = [w for w in result.lives if w.pool == pool]
        held = sum(min(w.released_s, end_s) - max(w.allocated_s, 0.0) for w in lives)
        assert sum(v for (p, _), v in booked.items() if p == pool) == pytest.approx(held)
        boots = sum(
            (w.released_s if w.ready_s is None else w.ready_s) - w.allocated_s
            for w in lives
            if w.allocated_s > 0
        )
        assert booked[pool, "boot"] == pytest.approx(boots)
    drains = sum(
        min(w.released_s, end_s) - w.drain_s for w in result.lives if w.drain_s is not None
    )
    assert booked["prefill", "drain"] + booked["decode", "drain"] == pytest.approx(drains)


def test_pools_of_two_classes_are_billed_by_their_gpus_and_prices() -> None:
    result = world(
        Fixed((0.0, 2, 1)), steady(0.5), policy=MIXED, initial=(2, 1), prices={"h100-tp4": 2.5}
    )
    lives = {w.pool: w for w in result.lives}
    assert (lives["prefill"].gpus, lives["decode"].gpus) == (1, 4)
    assert lives["prefill"].worker_class == "h200-slow10"
    assert lives["decode"].price_per_gpu_hour == 2.5
    booked, end_s = parts(result), result.records[-1].at_s
    assert sum(v for (p, _), v in booked.items() if p == "decode") == pytest.approx(4 * end_s)
    assert sum(v for (p, _), v in booked.items() if p == "prefill") == pytest.approx(2 * end_s)
