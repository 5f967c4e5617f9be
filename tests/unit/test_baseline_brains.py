"""Every contender as a brain: what is missing, what is idle, bounds, and what its knob does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from readyplane.core.worker import Role
from readyplane_lab.proof.baselines import contenders
from readyplane_lab.proof.baselines.parts.brain import convertible_as_decode
from readyplane_lab.proof.baselines.parts.facts import Recent, read
from readyplane_lab.proof.port import Contender, Fielded
from readyplane_planner.decide.values import Decision, Memory
from readyplane_planner.policy import merged, read_policy
from readyplane_planner.signals import Observation
from tests.unit.baseline_world import (
    PROFILE,
    facts,
    fleet,
    latency,
    observation,
    plan,
    setting,
    worker,
)

KNOW_IT_ALL = {"clairvoyant", "lookahead"}
"""They follow a plan, not signals."""
ALL = {name: contender for name, contender in contenders().items() if name not in KNOW_IT_ALL}
CLOSED = [name for name, contender in ALL.items() if not name.startswith("static")]
LOAD: dict[str, Any] = {
    "arrivals": 30.0,
    "prompt_work": 30_000.0,
    "prefill_work": 30_000.0,
    "finished": 30.0,
    "generated": 6_000.0,
    "queue": 6_000.0,
    "in_flight": 260.0,
    "decoding": 250.0,
    "remaining": 25_000.0,
    "kv": 250.0 * 1100,
    "latency": {"ttft_actual": latency(0.3), "tpot_actual": latency(0.042)},
}


class Play:
    """A fleet that has whatever was wanted at the next tick; sequences spread evenly."""

    def __init__(self, fielded: Fielded, prefill: int = 4, decode: int = 6) -> None:
        self.brain = fielded.brain
        self.tick_s = float(fielded.policy["tick_s"])
        self.memory = Memory()
        self.fleet = [prefill, decode]
        self.now_s = 0.0
        self.plan = plan(tick_s=self.tick_s, down={"cooldown_s": max(15.0, self.tick_s)})

    def run(self, seconds: float, load: Mapping[str, Any]) -> Decision:
        decision: Decision | None = None
        for _ in range(max(1, math.ceil(seconds / self.tick_s))):
            sequences = load.get("decoding") or 0.0
            workers = fleet(*self.fleet, active=math.ceil(sequences / max(1, self.fleet[1])))
            seen = observation(workers, now_s=self.now_s, dt_s=self.tick_s, **load)
            decision, self.memory = self.brain(
                seen, self.plan, self.memory, now_s=self.now_s, decision_id=f"d-{self.now_s}"
            )
            # Orders, drains and cancelled starts are done by the next tick.
            self.memory = replace(self.memory, orders=(), draining=(), served=(), suspects=())
            self.fleet = [decision.prefill.target, decision.decode.target]
            self.now_s += self.tick_s
        assert decision is not None
        return decision


@pytest.mark.parametrize("name", ALL)
def test_policy_fields_are_the_planners(name: str) -> None:
    fielded = ALL[name].make(ALL[name].default, setting())
    merged(read_policy({"model": "m"}), dict(fielded.policy))


@pytest.mark.parametrize("name", ALL)
def test_nothing_known_changes_nothing(name: str) -> None:
    play = Play(ALL[name].make(ALL[name].default, setting()))
    play.run(400.0, LOAD)
    before = list(play.fleet)
    play.run(600.0, {})
    assert play.fleet == before


@pytest.mark.parametrize("name", ALL)
def test_before_the_first_request_the_fleet_stays(name: str) -> None:
    idle = dict.fromkeys(
        (*list(LOAD)[:5], "queue", "in_flight", "decoding", "remaining", "kv"), 0.0
    )
    play = Play(ALL[name].make(ALL[name].default, setting()))
    play.run(400.0, idle)
    assert play.fleet == [4, 6]


@pytest.mark.parametrize("name", CLOSED)
def test_idle_is_known_and_bounds_hold(name: str) -> None:
    idle = {**dict.fromkeys(LOAD, 0.0), "latency": {}}
    play = Play(ALL[name].make(ALL[name].default, setting(high=(7, 9))))
    play.run(400.0, {k: v if k == "latency" else v * 20 for k, v in LOAD.items()})
    assert play.fleet[0] <= 7
    assert play.fleet[1] <= 9
    play.run(700.0, idle)
    # An interval without a request tells Dynamo's throughput modes no length: they hold.
    if not name.startswith("dynamo") or name == "dynamo-load":
        assert play.fleet == [1, 1]
    assert min(play.fleet) >= 1


@pytest.mark.parametrize("name", CLOSED)
def test_the_knob_goes_from_cheap_to_dear(name: str) -> None:
    contender: Contender = ALL[name]
    sizes = []
    for value in contender.values[::3] + contender.values[-1:]:
        play = Play(contender.make(value, setting(high=(64, 64))))
        play.run(400.0, LOAD)
        sizes.append(sum(play.fleet))
    assert sizes[0] < sizes[-1], sizes
    assert sizes == sorted(sizes), sizes


@pytest.mark.parametrize("name", ALL)
def test_two_runs_are_the_same(name: str) -> None:
    ends = []
    for _ in range(2):
        play = Play(ALL[name].make(ALL[name].default, setting()))
        ends.append([play.run(200.0, LOAD), list(play.fleet)])
    assert ends[0] == ends[1]


def read_once(seen: Observation) -> Any:
    return read(seen, plan(), Memory(), Recent(), now_s=0.0)[0]


def test_loads_in_workers() -> None:
    at = read_once(observation(fleet(4, 6, active=40), **LOAD))
    # 1000 tokens in 104.1 ms (between 512: 61.043 and 1024: 106.314): 9592 tokens/s a worker.
    assert at.new == 1000.0
    assert at.prefill_load == pytest.approx((30_000 + 6_000 / 2) / 9592, rel=1e-3)
    # Context 1100: (50 - 28.7217) / (0.27472 + 0.12175) = 53.67 sequences.
    assert at.context == 1100.0
    assert at.decode_load == pytest.approx(240 / 53.67, rel=1e-3)


def test_what_the_router_holds_counts_where_the_shortage_is() -> None:
    queue = {**LOAD, "queue": 40_000.0}
    idle_d = read_once(observation(fleet(4, 6, active=10), **queue))
    assert (idle_d.backlog, idle_d.sequences) == (40_000.0, 60.0)
    full_d = read_once(observation(fleet(4, 6, active=50), **queue))
    assert full_d.backlog == 0.0
    assert full_d.sequences == 300.0 + 40.0  # 40 prompts of 1000 tokens
    assert full_d.decode_engines[0].sequences == pytest.approx(50 + 40 / 6)
    busy_p = tuple(
        replace(w, promised_prefill_tokens=5_000) if w.role is Role.PREFILL else w
        for w in fleet(4, 6, active=50)
    )
    both = read_once(observation(busy_p, **queue))  # of 40,000, 20,000 are promised
    assert (both.backlog, both.sequences) == (40_000.0, 320.0)
    assert both.prefill_engines[0].queue_tokens == 10_000.0


def test_unknown_is_none() -> None:
    at = read_once(observation(fleet(2, 2)))
    assert (at.prefill_load, at.decode_load, at.backlog, at.sequences) == (None,) * 4
    assert (at.ttft_s, at.generated) == (None, None)
    blind = read_once(observation(fleet(2, 2), **{**LOAD, "generated": None}))
    # By the profile: 125 sequences of 1100 tokens on each of two.
    expected = 250 / PROFILE.iteration_s(125, 125 * 1100)
    assert blind.generated == pytest.approx(expected)


def test_a_convertible_decoder_is_a_decoder() -> None:
    workers = (*fleet(2, 0), *(worker(Role.BOTH, i, active=10) for i in range(3)))
    at = read_once(convertible_as_decode(observation(workers, **LOAD)))
    assert (at.prefill.ready, at.decode.ready) == (2, 3)
    plain = observation(fleet(2, 3), **LOAD)
    assert convertible_as_decode(plain) is plain


def test_lengths_are_those_of_the_last_minutes() -> None:
    recent, now_s = Recent(), 0.0
    at = facts()
    for i in range(200):
        load = {**LOAD, "prefill_work": 30_000.0 if i < 100 else 6_000.0}
        seen = observation(fleet(4, 6), now_s=now_s, **load)
        at, recent = read(seen, plan(), Memory(), recent, now_s=now_s)
        now_s += 5.0
    assert at.isl == pytest.approx(1000.0)
    assert at.new == pytest.approx(200.0, abs=1.0)
    assert at.osl == pytest.approx(200.0)
