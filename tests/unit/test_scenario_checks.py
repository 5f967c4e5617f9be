"""The check of each scenario passes a run as it should be, and says what is wrong with another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from readyplane_lab.proof import evidence
from readyplane_lab.proof.scenarios import scenarios
from readyplane_lab.simulator.outcome import Life, RunResult, Served

Late = Sequence[tuple[float, float]]
H = 3600.0


def life(
    pool: str = "prefill", allocated_s: float = -60.0, *, took_s: float = 60.0, **fields: Any
) -> Life:
    """A worker that became ready and stayed."""
    made = Life(
        worker_id=f"{pool}-{allocated_s:g}",
        pool=pool,
        worker_class="h100-tp4",
        gpus=4,
        price_per_gpu_hour=1.0,
        allocated_s=allocated_s,
        ready_s=allocated_s + took_s,
        drain_s=None,
        released_s=1e9,
        decision_id="" if allocated_s < 0 else "d1",
    )
    return replace(made, **fields)


@dataclass(frozen=True)
class Made:
    """A run in short: a request a second, late within `late`, without an answer within `gone`."""

    targets: tuple[tuple[float, int, int], ...]
    span_s: float = 1800.0
    late: Late = ()
    gone: Late = ()
    lives: tuple[Life, ...] = ()
    outcomes: Mapping[str, int] = field(default_factory=lambda: {"finished": 1000})
    counts: Mapping[str, float] = field(default_factory=dict)

    def run(self) -> RunResult:
        at_s = np.arange(0.0, self.span_s, max(1.0, self.span_s / 2000))
        ttft = np.full(len(at_s), 0.5)
        for windows, value in ((self.late, 9.0), (self.gone, np.inf)):
            for begin_s, end_s in windows:
                ttft[(at_s >= begin_s) & (at_s < end_s)] = value
        one = np.ones(len(at_s))
        served = Served(at_s, 1000 * one, 100 * one, ttft, 0.03 * one, one)
        return RunResult(
            self.span_s, self.lives, served, self.outcomes, self.targets, counts=self.counts
        )


def flapping(
    begin_s: float, times: int, every_s: float = 10.0
) -> tuple[tuple[float, int, int], ...]:
    return tuple((begin_s + i * every_s, 3 + i % 2, 5) for i in range(times))


FLEET = tuple(life(pool, -60.0 - i) for i in range(4) for pool in ("prefill", "decode"))
CUT = {"finished": 900, "failed": 100}
STORE: dict[str, Any] = {"tier": "L4"}
PEER: dict[str, Any] = {"tier": "L1"}
GREW = ((0.0, 1, 1), (310.0, 4, 6))
AZ = Made(((0.0, 2, 4), (600.0, 4, 4), (1500.0, 2, 3), (3000.0, 3, 3)), 3500.0)
CODE = Made(((0.0, 1, 1), (60.0, 5, 1), (400.0, 1, 1)), 3436.0)
MOONCAKE = Made(((0.0, 1, 1), (100.0, 4, 4), (900.0, 5, 4)), 3537.0)
LARGE = Made(((0.0, 3, 3), (5 * H, 1, 1), (18.5 * H, 6, 6), (20.5 * H, 3, 3)), 24 * H)
SMALL = Made(
    ((0.0, 2, 1), (2.3 * H, 6, 1), (2.8 * H, 3, 1), (3.2 * H, 7, 1), (4.5 * H, 3, 1)), 6 * H
)
CALM = Made(((0.0, 3, 5), (900.0, 3, 6)), 1500.0)
ISL = Made(((0.0, 2, 3), (610.0, 5, 4), (900.0, 2, 3)), 1500.0, late=((600.0, 700.0),))
OSL = Made(((0.0, 2, 3), (640.0, 2, 7), (1200.0, 2, 3)), late=((650.0, 750.0),))
SHIFT = Made(((0.0, 3, 4), (720.0, 6, 4)), 1600.0, late=((700.0, 800.0),))
COLD = Made(
    GREW,
    late=((300.0, 700.0),),
    lives=(*FLEET, life("decode", 310.0, **STORE), life("prefill", 310.0, **STORE)),
)
WARM = replace(
    COLD,
    lives=(
        *FLEET,
        life("decode", 310.0, took_s=30.0, **PEER),
        life("prefill", 310.0, took_s=60.0, **STORE),
        life("prefill", 340.0, took_s=32.0, **PEER),
    ),
)
FAILING = replace(
    COLD, counts={"sources.peers_gone": 1, "sources.lies": 1, "sources.resumed": 2, "decisions": 9}
)
CHEAP = tuple(life("prefill", worker_class="a100-tp4") for _ in range(4))
FAST = life("prefill", 700.0, released_s=900.0)
MIXED = Made(((0.0, 6, 3),), lives=(*CHEAP, FAST, life("decode")))
OLD = tuple(replace(x, drain_s=600.0, released_s=620.0) for x in FLEET)
NEW = (life("prefill", 430.0), life("decode", 430.0))
ROLLED = Made(((0.0, 3, 5),), lives=(*OLD, *NEW), late=((420.0, 460.0),))
SWING = Made(((0.0, 3, 5), (60.0, 5, 8)))
DRAINED = Made(((0.0, 1, 5), (1000.0, 1, 3)))
CROWD = Made(((0.0, 1, 2), (640.0, 2, 2)), 1500.0, lives=(*FLEET, life("prefill", 640.0)))
TOLD = Made(((0.0, 3, 5), (1010.0, 4, 5)), 1600.0, lives=FLEET)
NOON = Made(
    tuple((300.0 * i + s, p, d) for i in range(5) for s, p, d in ((0.0, 1, 1), (80.0, 4, 6)))
)
DENIED = Made(
    ((0.0, 2, 3), (410.0, 3, 4), (830.0, 4, 6)),
    lives=(*FLEET, life("prefill", 830.0), life("decode", 830.0)),
    counts={"orders_refused": 40},
    late=((430.0, 1100.0),),
    outcomes={"finished": 900, "refused": 100},
)
SPOT = Made(((0.0, 3, 5),), 1500.0, lives=(*FLEET, life("decode", 620.0)))

CASES: dict[str, tuple[Made, dict[str, Made]]] = {
    "az-conv": (
        AZ,
        {
            "95%": replace(AZ, late=((0.0, 300.0),)),
            "larger swing": replace(AZ, targets=((0.0, 2, 2), (600.0, 2, 4))),
            "one ratio": replace(AZ, targets=((0.0, 2, 4), (600.0, 3, 6), (900.0, 2, 4))),
        },
    ),
    "az-code": (
        CODE,
        {
            "given up": replace(CODE, targets=((0.0, 1, 1), (60.0, 5, 1), (400.0, 0, 1))),
            "P stayed": replace(CODE, targets=((0.0, 5, 1),)),
            "answered": replace(CODE, gone=((0.0, 200.0),)),
            "80%": replace(CODE, late=((0.0, 900.0),)),
        },
    ),
    "mc-conv": (
        MOONCAKE,
        {
            "90%": replace(MOONCAKE, late=((0.0, 900.0),)),
            "prefill went": replace(MOONCAKE, targets=((0.0, 3, 4), (900.0, 7, 4))),
            "decode went": replace(MOONCAKE, targets=((0.0, 3, 4), (900.0, 3, 9))),
        },
    ),
    "servegen-large-day": (
        LARGE,
        {
            "95%": replace(LARGE, late=((0.0, 2 * H),)),
            "quiet morning": replace(LARGE, targets=((0.0, 6, 6),)),
        },
    ),
    "servegen-small-day": (
        SMALL,
        {
            "90%": replace(SMALL, late=((0.0, H),)),
            "burst after 2 h": replace(
                SMALL, targets=((0.0, 3, 1), (3.2 * H, 7, 1), (5 * H, 3, 1))
            ),
            "burst after 3 h": replace(
                SMALL, targets=((0.0, 2, 1), (2.3 * H, 6, 1), (5 * H, 3, 1))
            ),
            "stayed as large": replace(
                SMALL, targets=((0.0, 2, 1), (2.3 * H, 6, 1), (3.2 * H, 8, 1))
            ),
        },
    ),
    "calm": (
        CALM,
        {
            "97%": replace(CALM, late=((400.0, 500.0),)),
            "prefill went": replace(CALM, targets=((0.0, 3, 5), (500.0, 5, 5))),
            "changed its direction": replace(CALM, targets=((0.0, 3, 5), *flapping(500, 6))),
        },
    ),
    "osl-burst": (
        OSL,
        {
            "D grew by 0": replace(OSL, targets=((0.0, 2, 3),)),
            "P grew by 4": replace(OSL, targets=((0.0, 2, 3), (640.0, 6, 9))),
            "400 to 570": replace(OSL, late=((400.0, 460.0),)),
            "from 1200": replace(OSL, late=((600.0, 1500.0),)),
        },
    ),
    "cache-shift": (
        SHIFT,
        {
            "P went": replace(SHIFT, targets=((0.0, 3, 4),)),
            "D went": replace(SHIFT, targets=((0.0, 3, 4), (720.0, 6, 9))),
            "400 to 700": replace(SHIFT, late=((400.0, 500.0),)),
            "from 1100": replace(SHIFT, late=((700.0, 1600.0),)),
        },
    ),
    "cold-cluster": (
        COLD,
        {
            "prefill did not grow": replace(COLD, targets=((0.0, 1, 1), (310.0, 1, 6))),
            "weights came from L1": replace(COLD, lives=(*FLEET, life("decode", 310.0, **PEER))),
            "90%": replace(COLD, late=((300.0, 1700.0),)),
        },
    ),
    "warm-peer": (
        WARM,
        {
            "decode did not grow": replace(WARM, targets=((0.0, 1, 1), (310.0, 4, 1))),
            "by the store": replace(WARM, lives=COLD.lives),
            "no less time": replace(
                WARM,
                lives=(
                    life("decode", 310.0, took_s=70.0, **PEER),
                    life(allocated_s=320.0, **STORE),
                ),
            ),
            "92%": replace(WARM, late=((300.0, 1700.0),)),
        },
    ),
    "source-failure": (
        FAILING,
        {
            "did not grow": replace(FAILING, targets=((0.0, 1, 1),)),
            "no source failed": replace(FAILING, counts={"sources.resumed": 0}),
            "went on": replace(FAILING, counts={"sources.peers_gone": 2, "sources.resumed": 1}),
            "ended: 100 failed": replace(FAILING, outcomes={**CUT, "refused": 50}),
            "90%": replace(FAILING, late=((300.0, 1700.0),)),
        },
    ),
    "mixed-hardware": (
        MIXED,
        {
            "5 A100s were held": replace(MIXED, lives=(*MIXED.lives, CHEAP[0])),
            "grew by no H100": replace(MIXED, lives=(*CHEAP, life("decode"))),
            "while A100s were to be had": replace(MIXED, lives=(*CHEAP[1:], FAST, life("decode"))),
            "more than one H100 for two": replace(
                MIXED, lives=(*MIXED.lives, *(life("prefill") for _ in range(2)))
            ),
            "D took A100s": replace(
                MIXED, lives=(*MIXED.lives, life("decode", worker_class="a100-tp4"))
            ),
            "93%": replace(MIXED, late=((500.0, 800.0),)),
        },
    ),
    "rolling-upgrade": (
        ROLLED,
        {
            "nobody served": replace(ROLLED, lives=OLD),
            "decode: all of the old": replace(
                ROLLED, lives=(*OLD, NEW[0], life("decode", 550.0, took_s=70.0))
            ),
            "still there": replace(ROLLED, lives=(*OLD, *NEW, FLEET[0])),
            "without any of the other for 90 s": replace(
                ROLLED, lives=(*OLD, *NEW, replace(OLD[1], drain_s=690.0, released_s=700.0))
            ),
            "ended: 100 failed": replace(ROLLED, outcomes=CUT),
            "95%": replace(ROLLED, late=((420.0, 600.0),)),
        },
    ),
    "long-drain": (
        DRAINED,
        {
            "did not shrink": replace(DRAINED, targets=((0.0, 1, 5),)),
            "ended: 100 failed": replace(DRAINED, outcomes=CUT),
            "ended other": replace(DRAINED, lives=(life(failure="crashed"),)),
            "90%": replace(DRAINED, late=((600.0, 900.0),)),
        },
    ),
    "flash-crowd": (
        CROWD,
        {
            "ordered in the crowd": replace(
                CROWD, lives=tuple(life("decode", 610.0 + i) for i in range(9))
            ),
            "400 to 600": replace(CROWD, late=((500.0, 560.0),)),
            "from 900": replace(CROWD, late=((600.0, 1000.0),)),
        },
    ),
    "telemetry-faults": (
        TOLD,
        {
            "while signals were stale": replace(TOLD, targets=((0.0, 3, 5), (530.0, 2, 5))),
            "while signals were missing": replace(TOLD, targets=((0.0, 3, 5), (770.0, 3, 4))),
            "on an outlier": replace(TOLD, targets=((0.0, 3, 5), (1002.0, 9, 5))),
            "step of the clock": replace(TOLD, targets=((0.0, 3, 5), (1255.0, 3, 9))),
            "95%": replace(TOLD, late=((600.0, 900.0),)),
            "ended: 100 failed": replace(TOLD, outcomes=CUT),
        },
    ),
    "poisoned-forecast": (
        NOON,
        {
            "prefill fell": replace(NOON, targets=(*NOON.targets, (1500.0, 1, 6))),
            "90%": replace(NOON, late=((1400.0, 1600.0),)),
        },
    ),
    "quota-denied": (
        DENIED,
        {
            "decode did not grow": replace(DENIED, lives=(*FLEET, life("prefill", 830.0))),
            "sent to be refused": replace(DENIED, counts={"orders_refused": 400}),
            "targets turned": replace(
                DENIED, targets=((0.0, 2, 3), *flapping(410.0, 30), (830.0, 4, 6))
            ),
            "from 1320": replace(DENIED, late=((400.0, 1800.0),)),
            "ended: 300 refused": replace(DENIED, outcomes={"finished": 700, "refused": 300}),
        },
    ),
    "spot-reclaim": (
        SPOT,
        {
            "in place of three": replace(SPOT, lives=FLEET),
            "from 450": replace(SPOT, late=((450.0, 800.0),)),
            "ended: 100 failed": replace(SPOT, outcomes=CUT),
        },
    ),
    **{
        f"isl-burst{ramp}": (
            ISL,
            {
                "did not grow": replace(ISL, targets=((0.0, 2, 3),)),
                "work of P above all": replace(ISL, targets=((0.0, 2, 3), (610.0, 3, 8))),
                "400 to 570": replace(ISL, late=((400.0, 460.0),)),
                "from 1020": replace(ISL, late=((600.0, 1200.0),)),
            },
        )
        for ramp in ("", "-10s", "-30s")
    },
    **{
        f"oscillation-{kind}": (
            SWING,
            {
                "prefill reversed": replace(SWING, targets=((0.0, 3, 5), *flapping(300.0, 40))),
                "85%": replace(SWING, late=((800.0, 1200.0),)),
            },
        )
        for kind in ("30s", "60s", "120s", "240s", "sine", "phases")
    },
}


def test_every_check_is_tried() -> None:
    assert CASES.keys() == scenarios().keys()


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_good_run_passes(name: str) -> None:
    assert scenarios()[name].check(CASES[name][0].run()) == ()


@pytest.mark.parametrize(
    "name, complaint", [(name, complaint) for name in sorted(CASES) for complaint in CASES[name][1]]
)
def test_a_bad_run_is_told_what_is_wrong_with_it(name: str, complaint: str) -> None:
    told = scenarios()[name].check(CASES[name][1][complaint].run())
    assert any(complaint in sentence for sentence in told), told


def test_a_fluid_that_counts_no_sources_is_not_asked_about_them() -> None:
    assert scenarios()["source-failure"].check(replace(FAILING, counts={}).run()) == ()


def test_a_crowd_longer_than_a_start_may_be_answered_with_workers() -> None:
    quick = replace(CROWD, lives=tuple(life("decode", 602.0, took_s=9.0) for _ in range(9)))
    assert scenarios()["flash-crowd"].check(quick.run()) == ()


def test_a_run_that_ends_before_its_starts_do_cannot_tell() -> None:
    slow = replace(
        COLD,
        late=((300.0, 1800.0),),
        lives=(*FLEET, *(life(p, 310.0, took_s=1400.0, **STORE) for p in evidence.POOLS)),
    )
    assert scenarios()["cold-cluster"].check(slow.run()) == ()
    assert scenarios()["cold-cluster"].check(replace(slow, lives=COLD.lives).run()) != ()


def test_a_turn_is_quick_by_the_starts_of_the_run() -> None:
    swings = Made(((0.0, 3, 5), *flapping(300.0, 12, every_s=60.0)))
    assert evidence.quick_turns(swings.run(), "prefill") > 8
    quick = replace(swings, lives=tuple(life("prefill", 100.0 + i, took_s=9.0) for i in range(3)))
    assert evidence.quick_turns(quick.run(), "prefill") == 0


def test_readings_of_targets() -> None:
    run = Made(((0.0, 2, 3), (10.0, 4, 3), (20.0, 1, 5))).run()
    assert evidence.targets_within(run, "prefill", 5.0, 15.0) == [2, 4]
    assert evidence.targets_within(run, "decode", 25.0, 30.0) == [5]
    assert evidence.mean_target(run, "prefill", 5.0, 15.0) == pytest.approx(3.0)
    assert evidence.growth(run, "prefill", 5.0, 30.0) == 2
    assert evidence.shrinkage(run, "prefill", 5.0, 30.0) == 1
    assert [evidence.a_few(n) for n in (0, 1, 7, 8, 70)] == [1, 1, 1, 2, 10]
    assert evidence.unmet((True, "a"), (False, "b")) == ("b",)


def test_shares_are_of_all_arrivals() -> None:
    run = Made(((0.0, 1, 1),), 100.0, late=((0.0, 10.0),), gone=((10.0, 30.0),)).run()
    assert evidence.attained(run) == pytest.approx(0.7)
    assert evidence.answered(run) == pytest.approx(0.8)
    assert evidence.attained(run, 30.0) == 1.0
    assert evidence.attained(run, 500.0) == 1.0
