"""The whole planner over a tiny fluid fleet: what field reports say goes wrong must not."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from readyplane.core.errors import (
    Conflict,
    InvalidField,
    NotFound,
    StaleEpoch,
    UnknownField,
)
from readyplane.core.worker import Role, WorkerState
from readyplane_planner.journal import decode_inputs, encode_inputs, replay
from readyplane_planner.leadership import Leadership, MemoryLeaseStore
from readyplane_planner.optimise import Problem, Proposal
from tests.unit.planner_world import DIGEST, MODEL, HandClock, Run, World, planner, policy


def world(**changes: object) -> World:
    return World(HandClock(), **changes)  # type: ignore[arg-type]


def noisy(rps: float, seed: int = 1) -> "object":
    rng = random.Random(seed)
    return lambda _t: max(0.0, rps * (1 + 0.3 * rng.gauss(0, 1)))


def reversals(run: Run) -> int:
    memory = run.service._memory
    return memory.guard_p.reversals + memory.guard_d.reversals


async def test_first_ticks_bring_up_the_minimum() -> None:
    """B12, B13: nothing is ready, nothing is known: the floor is ordered, once."""
    run = await planner(world())
    await run.step(3)
    assert sorted(o.role for o in run.world.provisions) == [Role.DECODE, Role.PREFILL]
    assert {o.manifest_digest for o in run.world.provisions} == {DIGEST}
    names = [o.worker_id for o in run.world.provisions]
    assert names[0].startswith("p-") and names[1].startswith("d-") and len(set(names)) == 2
    await run.step(10)
    state = await run.service.state()
    for pool in state["pools"].values():
        assert (pool["desired"], pool["provisioned"], pool["ready"]) == (1, 1, 1)


async def test_load_moves_both_pools_and_the_queue_goes() -> None:
    run = await planner(world(rps=noisy(5.5)))
    await run.step(120)
    peak_p, peak_d = (max(pool) for pool in zip(*run.between(0, 120), strict=True))
    assert 3 <= peak_p <= 6 and 2 <= peak_d <= 4
    assert run.world.ttft_s < 2.0 and run.world.tpot_s < 0.1


async def test_burst_then_silence_returns_to_the_minimum() -> None:
    """B04, B29: latency windows are empty when nobody calls; the pool still walks down."""
    run = await planner(world(rps=lambda t: 7.0 if 20 <= t < 80 else 0.0))
    await run.step(80)
    assert run.desired[-1][1] >= 4
    await run.step(400)
    assert run.desired[-1][1:] == (1, 1)
    assert "idle" in run.codes()
    assert len(run.world.members(Role.PREFILL, WorkerState.READY)) == 1
    downs = [p for p, _ in run.between(80, 480)]
    assert all(b <= a for a, b in pairwise(downs)), "only downwards"


async def test_silence_keeps_the_target_constant() -> None:
    """B34: fresh zeros for 200 rounds add nobody."""
    run = await planner(world())
    await run.step(200)
    assert set(run.between(0, 200)) == {(1, 1)}
    assert len(run.world.provisions) == 2


async def test_signals_lost_at_the_peak_shrink_nothing() -> None:
    """B02: the router answers, but with nothing of this model: that is no zero."""
    run = await planner(world(rps=noisy(6.0)))
    await run.step(100)
    before, drained = run.desired[-1][1:], len(run.world.drains)
    run.world.empty = True
    await run.step(60)
    assert all(p >= before[0] and d >= before[1] for p, d in run.between(101, 160))
    assert len(run.world.drains) == drained
    state = await run.service.state()
    assert "without this model" in state["degraded"]
    assert state["pools"]["prefill"]["load"] is None or state["pools"]["prefill"]["load"] > 0


async def test_router_away_keeps_everything() -> None:
    run = await planner(world(rps=noisy(6.0)))
    await run.step(100)
    before = run.desired[-1][1:]
    drained = len(run.world.drains)
    run.world.away = True
    await run.step(60)
    assert run.desired[-1][1:] == before and len(run.world.drains) == drained
    assert run.world.releases == [], "who cannot be asked about has not vanished"
    assert "router does not answer" in (await run.service.state())["degraded"]
    run.world.away = False
    await run.step(30)
    assert (await run.service.state())["degraded"] == ""


async def test_answers_that_stand_still_are_no_news() -> None:
    """The same answer again says nothing of the time since: no zero rate, and nobody drained."""
    run = await planner(world(rps=noisy(6.0)))
    await run.step(100)
    before = run.desired[-1][1:]
    drained = len(run.world.drains)
    run.world.frozen = True
    await run.step(60)
    assert run.desired[-1][1:] == before and len(run.world.drains) == drained
    state = await run.service.state()
    assert "stands still" in state["degraded"]
    run.world.frozen = False
    await run.step(30)
    assert (await run.service.state())["degraded"] == ""


async def test_router_restart_mid_peak_holds() -> None:
    """B16: right after a restart the rate is unknown, not zero."""
    run = await planner(world(rps=noisy(6.0)))
    await run.step(100)
    before, drained = run.desired[-1][1:], len(run.world.drains)
    run.world.incarnation = "router-2"
    run.world.router_begun_s = run.world.clock.now_s
    run.world.totals.clear()
    await run.step(8)
    assert all(pair >= before for pair in run.between(100.5, 108))
    assert len(run.world.drains) == drained
    assert "hold" in run.codes(5)


async def test_router_that_forgot_its_workers_costs_none() -> None:
    """A restarted router knows nobody for a moment; leases come back, nobody is replaced."""
    run = await planner(world(rps=noisy(5.5)))
    await run.step(100)
    ordered = len(run.world.provisions)
    for box in run.world.boxes.values():
        box.leased = False
    await run.step(8)
    for box in run.world.boxes.values():
        box.leased = True
    await run.step(10)
    assert len(run.world.provisions) == ordered and run.world.releases == []


async def test_a_lost_lease_is_released_and_replaced() -> None:
    """Orphans: an allocation that served and has no lease for long is given back."""
    run = await planner(world(rps=noisy(1.0)))
    await run.step(30)
    victim = run.world.members(Role.PREFILL, WorkerState.READY)[0]
    victim.leased = False
    await run.step(40)
    assert run.world.releases == [victim.order.worker_id]
    assert len(run.world.members(Role.PREFILL, WorkerState.READY)) >= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -5, "NaN", 1e308])
async def test_a_bad_sample_moves_nothing(value: object) -> None:
    """B01: the targets stay, the decision says which sample it refused, and it is counted."""
    run = await planner(world(rps=noisy(5.5)))
    await run.step(80)
    before = run.desired[-1][1:]
    run.world.overrides = {"queued_tokens": value, "decoding_requests": value}
    await run.step(20)
    assert set(run.between(81, 100)) == {before}
    assert "bad_value" in run.codes()
    assert run.service._memory.bad_samples >= 20


async def test_partial_data_grows_but_never_shrinks() -> None:
    """B05: one missing signal may hide the reverse of what the others say."""
    run = await planner(world(rps=lambda t: 6.0 if t < 60 else 0.2))
    await run.step(60)
    before = run.desired[-1][1:]
    run.world.overrides = {"decoding_requests": None}
    await run.step(60)
    assert run.desired[-1][1:] == before
    assert {"hold"} & run.codes()
    run.world.overrides = {}
    await run.step(120)
    assert run.desired[-1][1:] == (1, 1)


async def test_floor_is_kept_through_an_outage() -> None:
    """B12: metrics gone, and a crash leaves 1 of 2: the planner still lifts to the minimum."""
    run = await planner(world(), policy(prefill={"min": 2}))
    await run.step(20)
    run.world.empty = True
    box = run.world.members(Role.PREFILL, WorkerState.READY)[0]
    box.exited_s, box.state, box.failed = run.world.clock.now_s, WorkerState.GONE, True
    await run.step(20)
    assert len(run.world.members(Role.PREFILL, WorkerState.READY)) == 2


async def test_one_order_while_it_starts() -> None:
    """B20: T_ready of many ticks, need of +2: exactly one order of 2, then patience."""
    load = policy(
        t_ready_prior={"p50_s": 100.0, "p90_s": 120.0, "p99_s": 150.0},
        up={"cooldown_s": 0.0, "pending_max": 8, "max_step": 8},
        catch_up_s=600.0,
    )
    w = world(t_ready_s=lambda _n: 100.0)
    w.add(Role.PREFILL, 2)
    w.add(Role.DECODE, 4)
    w.rps = lambda t: 4.0 if t < 40 else 6.2
    run = await planner(w, load)
    await run.step(40)
    ordered = len(w.provisions)
    await run.step(80)
    orders = [o for o in w.provisions[ordered:] if o.role is Role.PREFILL]
    assert 1 <= len(orders) <= 4, "never a new order on every tick"
    live = len(w.members(Role.PREFILL, WorkerState.READY, WorkerState.PROVISIONED))
    assert live == run.desired[-1][1] <= 6


async def test_a_start_that_hangs_expires_and_is_ordered_anew_slower() -> None:
    """B20, B36: beyond the bound of its ETA a start counts no more; repeats back off."""
    w = world(rps=noisy(5.5), hang=lambda order: order.role is Role.PREFILL)
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 3)
    run = await planner(w, policy(eta_bound_factor=1.0, up={"max_step": 1, "pending_max": 1}))
    await run.step(200)
    times = [b.allocated_s for b in w.boxes.values() if b.order.role is Role.PREFILL][1:]
    gaps = [b - a for a, b in pairwise(times)]
    assert 3 <= len(times) <= 9
    assert gaps[-1] > gaps[0] + 10
    assert all(
        name in w.releases
        for name in [o.worker_id for o in w.provisions if o.role is Role.PREFILL][:-1]
    )
    assert "overdue" in run.codes(200) and "backoff" in run.codes(60)


async def test_a_worker_that_never_comes_does_not_keep_the_pool_large() -> None:
    """B36: the third is pending for ever, load stops: the order is cancelled, both pools shrink."""
    w = world(rps=lambda t: 6.5 if t < 60 else 0.0)
    w.hang = lambda order: len([o for o in w.provisions if o.role is order.role]) >= 3
    run = await planner(w)
    await run.step(60)
    assert run.desired[-1][1] >= 3
    await run.step(140)
    assert run.desired[-1][1:] == (1, 1)
    assert not w.members(Role.PREFILL, WorkerState.PROVISIONED)


async def test_a_refused_order_is_said_and_retried() -> None:
    """B35: refusal is an outcome, belief follows what is, and the order comes again later."""
    w = world(rps=noisy(5.0))
    w.refuse = lambda _o: "no free place" if w.clock.now_s < w.begun_s + 60 else ""
    run = await planner(w)
    await run.step(30)
    assert "refused" in run.codes(30) and "backoff" in run.codes(30)
    state = await run.service.state()
    assert state["pools"]["prefill"]["provisioned"] == 0
    assert state["pools"]["prefill"]["desired"] >= 1
    decision = next(d for d in run.decisions if d.orders)
    outcomes = (await run.journal.get(decision.decision_id))[1]
    assert {o.kind for o in outcomes} == {"refused"}
    assert "no free place" in (await run.service.explain(decision.decision_id))["text"]
    await run.step(120)
    assert len(w.members(Role.PREFILL, WorkerState.READY)) >= 2


async def test_a_cancelled_start_does_not_count_while_it_ends() -> None:
    """What was given back is still seen for its grace; the target must not go up and down on it."""
    w = world(rps=lambda t: 7.0 if t < 26 else 0.0, t_ready_s=lambda n: 6.0 if n < 3 else 60.0)
    slow = policy(
        t_ready_prior={"p50_s": 60.0, "p90_s": 60.0, "p99_s": 60.0},
        down={"hold_s": 2.0, "cooldown_s": 2.0, "window_s": 2.0},
    )
    run = await planner(w, slow)
    await run.step(240)
    assert w.releases, "starts that are needed no more are cancelled"
    downs = [p for p, _ in run.between(40, 240)]
    assert all(b <= a for a, b in pairwise(downs)), "only downwards"
    assert run.desired[-1][1:] == (1, 1)


async def test_a_refused_drain_is_no_drain() -> None:
    """B35: the worker is counted as it stands, and asked again later."""
    w = world(rps=lambda t: 6.0 if t < 40 else 0.0)
    run = await planner(w)
    await run.step(40)
    serving = len(w.members(Role.PREFILL, WorkerState.READY))
    drain = w.drain

    async def refuses(worker_id: str, **_kwargs: object) -> object:
        raise NotFound("worker", worker_id)

    w.drain = refuses  # type: ignore[assignment,method-assign]
    await run.step(60)
    assert "refused" in run.codes(60)
    assert run.decisions[-1].prefill.counts.ready >= serving - 1
    w.drain = drain  # type: ignore[method-assign]
    await run.step(120)
    assert run.desired[-1][1:] == (1, 1)


async def test_idle_rolling_replacement_keeps_the_target() -> None:
    """B22: surge, slow drains and starting workers in idle traffic change no target."""
    w = world()
    run = await planner(w, policy(prefill={"min": 2}, decode={"min": 2}))
    await run.step(30)
    new = "sha256:" + "b" * 64
    await run.service.set_policy({"manifest": new}, merge=True)
    await run.step(120)
    assert set(run.between(31, 150)) == {(2, 2)}
    serving = w.members(Role.PREFILL, WorkerState.READY) + w.members(Role.DECODE, WorkerState.READY)
    assert {b.order.manifest_digest for b in serving} == {new}
    assert {b.order.generation for b in serving} == {2}
    assert len(serving) == 4


async def test_rollout_never_goes_below_the_target() -> None:
    """R17.2: an old worker leaves only when the new one serves."""
    w = world(rps=lambda _t: 1.0)
    run = await planner(w)
    await run.step(30)
    await run.service.set_policy({"manifest": "sha256:" + "c" * 64}, merge=True)
    least = []
    for _ in range(60):
        await run.step(1)
        least.append(len(w.members(Role.PREFILL, WorkerState.READY)))
    assert min(least) >= 1
    assert w.members(Role.PREFILL, WorkerState.READY)[0].order.generation == 2


async def test_the_backlog_is_worked_off_before_anybody_goes() -> None:
    """B23: growing cuts the average at once; the pool stays until the old queue is gone."""
    w = world(rps=lambda t: 6.0 if 20 <= t < 50 else 0.3)
    run = await planner(w, policy(down={"hold_s": 0.0, "cooldown_s": 2.0, "window_s": 2.0}))
    shrunk_with_queue = []
    for _ in range(80):
        before = len(w.drains)
        await run.step(1)
        if len(w.drains) > before and any(name.startswith("p-") for name in w.drains[before:]):
            shrunk_with_queue.append(run.decisions[-1].signals["queue"].get())
    assert shrunk_with_queue, "it shrinks in the end"
    assert all(queue < 2 * 3000 for queue in shrunk_with_queue)


async def test_busy_workers_are_no_victims() -> None:
    """B23, B64, B66: who holds the fewest goes; the engine's own zero counts for nothing."""
    w = world(rps=lambda _t: 0.0)
    w.add(Role.PREFILL, 3)
    w.add(Role.DECODE, 1)
    run = await planner(w, policy(down={"hold_s": 0.0, "cooldown_s": 2.0, "window_s": 2.0}))
    busy = next(iter(w.boxes))
    original = w.worker

    def patched(box: object) -> object:
        worker = original(box)  # type: ignore[arg-type]
        if worker.worker_id == busy:
            # The engine says 0 while the router has just sent 40.
            return replace(worker, active=40, load=replace(worker.load, running=0))
        return worker

    w.worker = patched  # type: ignore[assignment,method-assign]
    await run.step(40)
    assert busy not in w.drains and len(w.drains) == 2
    victim = next(d for d in run.decisions if d.drains)
    assert "sequences" in victim.drains[0].why


async def test_square_wave_stays_within_the_reversal_bound() -> None:
    """R25.1 oscillation: a period of two T_ready makes few changes of direction."""
    run = await planner(world(rps=lambda t: 6.0 if (t // 12) % 2 else 1.5))
    await run.step(360)
    assert reversals(run) <= 6
    pairs = run.between(60, 360)
    changes = sum(1 for a, b in pairwise(pairs) if a != b)
    assert changes <= 20


async def test_noise_around_a_rounding_edge_changes_at_most_once() -> None:
    """B31: 5.97 to 6.06 of 2 a worker is one size, not two in turns."""
    rng = random.Random(7)
    w = world(rps=lambda _t: 5.0 * (1 + 0.01 * rng.uniform(-1, 1)))
    run = await planner(w)
    await run.step(150)
    settled = run.between(150, 250)
    await run.step(100)
    settled = run.between(150, 250)
    changes = sum(1 for a, b in pairwise(settled) if a != b)
    assert changes <= 1


async def test_a_spike_of_one_tick_is_one_step_at_most() -> None:
    """B28: a forecast fifty times too large moves the pool by max_step."""
    w = world(rps=lambda t: 300.0 if 60 <= t < 61 else 1.0)
    w.add(Role.PREFILL, 1)
    run = await planner(w, policy(prefill={"max": 100}, up={"max_step": 2, "pending_max": 100}))
    await run.step(59)
    before = run.desired[-1][1]
    await run.step(2.0)
    assert run.desired[-1][1] <= before + 2


async def ramp(
    t_ready_s: float, monkeypatch: pytest.MonkeyPatch | None = None
) -> tuple[Run, float]:
    """A planner on a ramp, and for how many seconds TTFT was over its target."""
    w = world(rps=lambda t: 1.0 + t / 40.0, t_ready_s=lambda _n: t_ready_s)
    prior = {"p50_s": t_ready_s, "p90_s": t_ready_s, "p99_s": t_ready_s}
    wide = policy(t_ready_prior=prior, prefill={"max": 12}, decode={"max": 8})
    run = await planner(w, wide)
    if monkeypatch is not None:
        monkeypatch.setattr(run.service, "_brain", _with(_reactive))
    late_s = 0.0
    for _ in range(180):
        await run.step(1)
        late_s += w.ttft_s > 2.0
    return run, late_s


def _reactive(found: Problem) -> Proposal:
    """Follows the load of this moment: no horizon, no backlog, no headroom."""
    p = math.ceil(found.demand_p.level / found.prefill.rate)
    d = math.ceil(found.demand_d.level / found.decode.rate_at(found.tpot_target_s))
    return Proposal(p, d, p, d)


async def test_a_longer_t_ready_is_planned_for_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    """R5, B24: twice the T_ready means ordering earlier, and less lateness than reacting."""
    short, _late = await ramp(20.0)
    long, late_s = await ramp(40.0)

    def ordered(run: Run, workers: int) -> float:
        return next(t for t, p, _d in run.desired if p >= workers)

    assert ordered(long, 3) < ordered(short, 3)
    _run, reactive_late_s = await ramp(40.0, monkeypatch)
    assert late_s < 0.8 * reactive_late_s


async def test_a_shorter_t_ready_keeps_less_headroom() -> None:
    """R5.2: visible in the bound that the capacity is planned for."""
    bounds = []
    for t_ready_s in (5.0, 60.0):
        prior = {"p50_s": t_ready_s, "p90_s": t_ready_s, "p99_s": t_ready_s}
        w = world(rps=noisy(4.0), t_ready_s=lambda _n, s=t_ready_s: s)
        run = await planner(w, policy(t_ready_prior=prior))
        await run.step(90)
        made = run.decisions[-1].prefill.forecast
        bounds.append(made.upper / made.level)
    assert bounds[0] < bounds[1] - 0.05


async def test_measured_t_ready_replaces_the_prior() -> None:
    """R1.2: quantiles come from starts, with their number; the horizon follows."""
    run = await planner(world(rps=noisy(6.0), t_ready_s=lambda _n: 20.0))
    await run.step(120)
    pool = (await run.service.state())["pools"]["prefill"]
    assert pool["t_ready_samples"] >= 3
    assert pool["t_ready_p50_s"] == pytest.approx(20.0, abs=2.0)
    assert run.decisions[-1].prefill.forecast.horizon_s > 15.0


async def test_a_hand_edit_is_seen_and_reconciled() -> None:
    """B41: desired is compared with what is there, not with itself."""
    w = world()
    run = await planner(w)
    await run.step(30)
    w.add(Role.PREFILL, 2, prefix="manual")
    await run.step(2)
    assert "drift" in run.codes(2)
    await run.step(90)
    assert len(w.members(Role.PREFILL, WorkerState.READY)) == 1


async def test_a_crashed_worker_is_replaced() -> None:
    w = world()
    run = await planner(w)
    await run.step(30)
    box = w.members(Role.DECODE, WorkerState.READY)[0]
    box.exited_s, box.state, box.failed = w.clock.now_s, WorkerState.GONE, True
    await run.step(15)
    assert len(w.members(Role.DECODE, WorkerState.READY)) == 1
    assert "drift" in run.codes(15)


async def test_a_failed_optimiser_falls_back_and_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R23.1: a controller that only follows the measured load stands in, and never shrinks."""
    w = world(rps=noisy(5.5))
    run = await planner(w)
    await run.step(60)
    before = run.desired[-1][1:]

    def breaks(_problem: object) -> Proposal:
        raise ZeroDivisionError("learned nonsense")

    monkeypatch.setattr(run.service, "_brain", _with(breaks))
    await run.step(20)
    assert run.service._memory.fallbacks == 20
    assert run.desired[-1][1] >= before[0] and run.desired[-1][2] >= before[1]
    assert "optimiser_failed" in run.codes()


async def test_a_wild_optimiser_stays_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """R23.2: a learned optimiser cannot get past the guard."""
    run = await planner(world(rps=noisy(2.0)))
    await run.step(20)
    wild = Proposal(10_000, -50, 10_000, -50)
    monkeypatch.setattr(run.service, "_brain", _with(lambda _p: wild))
    await run.step(120)
    assert all(1 <= p <= 6 and 1 <= d <= 4 for p, d in run.between(0, 140))
    assert len(run.world.members(Role.PREFILL, WorkerState.READY)) <= 6


def _with(optimiser: object) -> object:
    from readyplane_planner.decide import decide

    def wrapped(*args: object, **kwargs: object) -> object:
        return decide(*args, **kwargs, optimiser=optimiser)  # type: ignore[arg-type]

    return wrapped


async def test_slow_first_batches_do_not_shrink_the_estimate() -> None:
    """B26: samples of workers that have just become ready are left out of the capacity fit."""
    w = world(rps=noisy(5.0))
    run = await planner(w)
    original = w.worker

    def slow(box: object) -> object:
        worker = original(box)  # type: ignore[arg-type]
        rate = 0.2 if w.clock.now_s - (worker.ready_s or 0) < 60 else 1.0
        total = round(3000 * rate * w.clock.now_s)
        load = replace(worker.load, waiting_prefill_tokens=9_000, prefill_tokens_total=total)
        return replace(worker, load=load)

    w.worker = slow  # type: ignore[assignment,method-assign]
    await run.step(60)
    assert run.decisions[-1].prefill.correction == pytest.approx(1.0, abs=0.05)


async def test_steady_slow_workers_do_shrink_it() -> None:
    """R4.3: the correction factor follows what is measured, slowly and within bounds."""
    w = world(rps=lambda _t: 1.0)
    w.add(Role.PREFILL, 1)
    w.add(Role.DECODE, 1)
    run = await planner(w, policy(prefill={"max": 1}, decode={"max": 1}))
    original = w.worker

    def slow(box: object) -> object:
        worker = original(box)  # type: ignore[arg-type]
        total = round(0.5 * 2960 * w.clock.now_s)
        return replace(
            worker,
            load=replace(worker.load, waiting_prefill_tokens=9_000, prefill_tokens_total=total),
        )

    w.worker = slow  # type: ignore[assignment,method-assign]
    await run.step(300)
    assert 0.5 <= run.decisions[-1].prefill.correction < 0.62


async def test_every_decision_replays_bit_for_bit() -> None:
    """A production decision is one call away: same inputs, equal decision, equal digest."""
    run = await planner(world(rps=noisy(6.0), t_ready_s=lambda n: 4.0 + n % 3), sample_every_s=5.0)
    await run.step(150)
    by_id = {d.decision_id: d for d in run.decisions}
    records = await run.journal.newest(MODEL, limit=500)
    assert len(records) > 30
    assert any(r.changed for r in records) and any(not r.changed for r in records)
    for record in records:
        full, _outcomes = await run.journal.get(record.decision_id)
        assert replay(full) == by_id[record.decision_id]
        packed, digest = encode_inputs(decode_inputs(full.inputs))
        assert packed == full.inputs
        assert digest == full.document["inputs_digest"]


async def test_explain_tells_the_start_and_the_drain() -> None:
    """R24.2: desired, provisioned, ready by segment, and what took longest."""
    run = await planner(world(rps=lambda t: 6.0 if t < 60 else 0.0))
    await run.step(160)
    ordered = next(d for d in run.decisions if d.orders)
    answer = await run.service.explain(ordered.decision_id)
    start = answer["starts"][0]
    assert start["status"] == "ready"
    assert list(start["after_s"]) == ["ordered", "provisioned", "ready"]
    assert start["after_s"]["ready"] == pytest.approx(6.0, abs=1.5)
    assert start["dominant_segment"] == "weight_transfer"
    assert "weight_transfer took" in answer["answer"]
    assert sum(start["exclusive_s"].values()) + start["unexplained_s"] == pytest.approx(
        start["wall_s"]
    )
    drained = next(d for d in run.decisions if d.drains)
    told = await run.service.explain(drained.decision_id)
    assert told["drains"][0]["status"] == "drained"
    assert told["answer"].startswith("draining took")
    with pytest.raises(NotFound, match="decision"):
        await run.service.explain("nothing")


async def test_worker_seconds_run_from_allocation_to_release() -> None:
    run = await planner(world())
    await run.step(100)
    seconds = (await run.service.state())["counters"]["worker_seconds"]
    assert seconds["prefill"] == pytest.approx(99.0, abs=2.0)


async def test_two_models_share_a_router_and_not_a_planner() -> None:
    """B10: what happens to another model changes nothing here."""
    run = await planner(world())
    await run.step(30)
    with pytest.raises(NotFound, match="this planner plans demo"):
        await run.service.state("other")


# --------------------------------------------------------------------------- policy and pause


async def test_pause_stops_every_writing() -> None:
    run = await planner(world(rps=lambda t: 1.0 if t < 30 else 7.0))
    await run.step(30)
    before = len(run.world.provisions)
    assert await run.service.set_paused(True, reason="a test") is True
    await run.step(60)
    assert len(run.world.provisions) == before and "paused" in run.codes()
    assert (await run.service.state())["paused"] is True
    assert await run.service.set_paused(False) is False
    await run.step(30)
    assert len(run.world.provisions) > before


async def test_policy_is_in_force_from_the_next_tick() -> None:
    """B44: hot, versioned, and in every decision."""
    run = await planner(world(rps=noisy(6.0)))
    await run.step(60)
    first = run.decisions[-1]
    document, version = await run.service.set_policy({"prefill": {"max": 2}}, merge=True)
    assert version == 2 and document["prefill"]["max"] == 2 and document["prefill"]["min"] == 1
    await run.step(1)
    assert run.decisions[-1].policy_version == 2
    assert run.decisions[-1].policy_digest != first.policy_digest
    assert run.desired[-1][1] == 2
    await run.step(60)
    assert len(run.world.members(Role.PREFILL, WorkerState.READY)) == 2


async def test_policy_compare_and_set() -> None:
    run = await planner(world())
    document, version = await run.service.get_policy()
    await run.service.set_policy({"headroom": 0.3}, merge=True, expected_version=version)
    with pytest.raises(Conflict, match="expected 1, found 2"):
        await run.service.set_policy(document, expected_version=version)
    with pytest.raises(UnknownField, match=r"policy\.up\.max_step or policy\.down\.max_step"):
        await run.service.set_policy({"max_step": 4}, merge=True)
    with pytest.raises(InvalidField, match=r"policy\.prefill\.min"):
        await run.service.set_policy({"prefill": {"min": 9}}, merge=True)
    assert (await run.service.get_policy())[1] == 2, "nothing half-written"


async def test_a_restarted_planner_goes_on() -> None:
    """Policy, T_ready samples and decisions survive in the journal; nobody is ordered twice."""
    w = world(rps=noisy(5.5))
    run = await planner(w)
    await run.step(100)
    await run.service.set_policy({"headroom": 0.2}, merge=True)
    ordered, live = len(w.provisions), run.desired[-1][1:]
    await run.service.aclose()
    again = await planner(w, policy(headroom=0.7), journal=run.journal)
    assert (await again.service.get_policy())[0]["headroom"] == 0.2
    again.desired = []
    await again.step(5)
    assert all(abs(a - b) <= 1 for a, b in zip(again.desired[-1][1:], live, strict=True))
    assert len(w.provisions) <= ordered + 1 and w.releases == run.world.releases
    assert (await again.service.state())["pools"]["prefill"]["t_ready_samples"] >= 3


async def test_slow_watchers_get_the_newest_state() -> None:
    run = await planner(world())
    await run.step(3)
    states = run.service.watch_state()
    first = await anext(states)
    await run.step(5)
    newest = await anext(states)
    assert newest["now_s"] == first["now_s"] + 5
    assert "history" not in newest
    await states.aclose()  # type: ignore[attr-defined]
    assert not run.service._watchers
    history = (await run.service.state())["history"]
    assert len(history["t_s"]) == 8 == len(history["prefill"]["ready"])


async def test_of_two_planners_one_acts() -> None:
    """B146: the second watches, takes over when the first is gone, and the old one is refused."""
    w = world(rps=noisy(5.5))
    first = await planner(w)
    second = await planner(w)
    store = MemoryLeaseStore(w.clock.monotonic_s)
    for name, run in (("a", first), ("b", second)):
        run.service._leadership = Leadership(
            store, name=MODEL, holder=name, ttl_s=10.0, now_s=w.clock.monotonic_s
        )
        run.service._journal = first.journal
    for _ in range(40):
        await first.step(1)
        await second.service.tick()
    ordered = {o.scale_decision_id for o in w.provisions}
    assert ordered and ordered <= {d.decision_id for d in first.decisions}
    assert "standing by; a leads" in (await second.service.state())["degraded"]
    before = len(w.provisions)
    await second.step(15)  # the first says nothing any more
    for box in w.members(Role.PREFILL, WorkerState.READY):
        box.exited_s, box.state, box.failed = w.clock.now_s, WorkerState.GONE, True
    await second.step(25)
    assert second.desired[-1][1] >= 3
    assert before < len(w.provisions) <= before + 6
    old_epoch = 1
    assert w.fences.newest(MODEL) > old_epoch
    with pytest.raises(StaleEpoch):
        await w.provision(w.provisions[0], leader_epoch=old_epoch)
