"""The optimiser: the fewest workers that are enough, P and D together."""

import heapq
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.profiles import load
from readyplane_planner.capacity import Supply, decode_model, prefill_model
from readyplane_planner.optimise import Bounds, Demand, Problem, size
from readyplane_planner.optimise.needs import catching_up

PROFILE = load("h200-slow10")
P_MODEL = prefill_model(PROFILE, isl=1155.0, uncached=1155.0, cv2=1.0, factor=1.0, overhead_s=0.05)
D_MODEL = decode_model(PROFILE, isl=1155.0, osl=211.0, factor=1.0)
P_RATE = P_MODEL.rate
D_RATE = D_MODEL.rate_at(0.1)


def problem(p: float = 0.0, d: float = 0.0, **changes: object) -> Problem:
    made = Problem(
        prefill=P_MODEL,
        decode=D_MODEL,
        demand_p=Demand(p, p),
        demand_d=Demand(d, d),
        supply_p=Supply(1),
        supply_d=Supply(1),
        bounds_p=Bounds(1, 40),
        bounds_d=Bounds(1, 40),
        t_ready_p_s=10.0,
        t_ready_d_s=10.0,
        ttft_target_s=2.0,
        tpot_target_s=0.1,
        headroom=0.0,
        band=0.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_idle_is_the_minimum_and_stays_there() -> None:
    """B34: no load at all wants nothing more, however often it is asked."""
    assert {(size(problem()).p, size(problem()).d) for _ in range(3)} == {(1, 1)}
    zero = problem(bounds_p=Bounds(0, 4), bounds_d=Bounds(0, 4))
    assert (size(zero).p, size(zero).d) == (0, 0)


def test_each_pool_follows_its_own_work() -> None:
    """R2.1: an ISL burst grows P alone, an OSL burst grows D alone."""
    calm = size(problem(2 * P_RATE, 2 * D_RATE))
    isl = size(problem(8 * P_RATE, 2 * D_RATE))
    osl = size(problem(2 * P_RATE, 8 * D_RATE))
    assert isl.p > calm.p and isl.d == calm.d
    assert osl.d > calm.d and osl.p == calm.p


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 20])
def test_decode_gets_what_its_demand_needs(n: int) -> None:
    found = size(problem(0.0, (n - 0.3) * D_RATE))
    assert n <= found.d <= n + 2  # the number of sequences varies by chance


def late_share(demand: float, workers: int, *, seed: int, cv2: float = 1.0) -> float:
    """Share of the requests that one shared queue cannot begin in time, played one by one.

    Who would begin too late steps back and keeps nobody waiting (nothing of the planner's in it).
    """
    rng = random.Random(seed)
    free = [0.0] * workers
    slack_s = 2.0 - P_MODEL.own_s - P_MODEL.overhead_s
    at_s, late, count = 0.0, 0, 20_000
    for _ in range(count):
        at_s += rng.expovariate(demand / (P_MODEL.own_s * P_RATE))
        own_s = P_MODEL.own_s * rng.gammavariate(1.0 / cv2, cv2)
        if free[0] - at_s > slack_s:
            late += 1
        else:
            heapq.heapreplace(free, max(at_s, free[0]) + own_s)
    return late / count


@pytest.mark.parametrize("cv2", [0.5, 1.0])
@pytest.mark.parametrize("busy", [1.2, 2.2, 3.3, 4.6, 6.5])
def test_prefill_is_enough_in_a_queue_played_out_and_one_less_is_not(
    busy: float, cv2: float
) -> None:
    """P is one queue (the router binds late) whose excess steps back, so a large pool may be all
    but fully busy: with one in a hundred planned to be late, few are, and one worker less is far
    from enough."""
    wanted = problem(
        prefill=replace(P_MODEL, cv2=cv2),
        demand_p=Demand(busy * P_RATE, busy * P_RATE, backlog=busy * P_MODEL.tokens),
        supply_p=Supply(math.ceil(busy) + 1),
    )
    found = size(wanted)
    # In arrival order; the router keeps more in time, since the longest step back first.
    assert late_share(busy * P_RATE, found.p, seed=found.p, cv2=cv2) <= 0.03
    assert late_share(busy * P_RATE, found.p - 1, seed=found.p, cv2=cv2) > 0.03
    assert busy / found.p >= (0.9 if busy > 4 else 0.55)


def test_a_larger_risk_needs_fewer_and_never_fewer_than_nothing() -> None:
    need = [
        size(problem(5 * P_RATE, 5 * D_RATE, risk=risk)).need_p for risk in (0.001, 0.01, 0.1, 0.5)
    ]
    found = [n.workers for n in need if n is not None]
    assert len(found) == 4 and found == sorted(found, reverse=True)
    assert found[0] > 5.0 > found[2] > 0.0
    assert found[-1] > 0.5 * 5.0 * 0.5, "who steps back is a share, and the rest is served"


def test_all_that_demand_may_be_is_planned_for() -> None:
    """A rare peak weighs what it may bring: more than the mean alone, less than always the peak."""

    def need(*spread: tuple[float, float]) -> float:
        spread_p = tuple((times * P_RATE, share) for times, share in spread)
        found = size(problem(demand_p=Demand(4 * P_RATE, 8 * P_RATE, 4 * P_RATE, spread=spread_p)))
        assert found.need_p is not None
        return found.need_p.workers

    assert need((4.0, 1.0)) < need((4.0, 0.95), (8.0, 0.05)) < need((8.0, 1.0))


def test_headroom_and_band_only_add() -> None:
    plain = size(problem(5.5 * P_RATE, 5.5 * D_RATE))
    roomy = size(problem(5.5 * P_RATE, 5.5 * D_RATE, headroom=0.5, band=0.4))
    assert roomy.p > plain.p and roomy.d > plain.d
    assert roomy.p_keep > roomy.p and roomy.d_keep > roomy.d
    assert plain.p_keep == plain.p


def test_pending_workers_that_suffice_want_no_more() -> None:
    """B20: a target holds those on their way; that they are not there yet asks for nobody more."""
    queue = Demand(2 * P_RATE, 2 * P_RATE, backlog=40 * P_RATE)
    alone = size(problem(demand_p=queue, supply_p=Supply(2)))
    coming = size(problem(demand_p=queue, supply_p=Supply(2, (1.0,) * (alone.p - 2))))
    ready = size(problem(demand_p=queue, supply_p=Supply(alone.p)))
    assert alone.p > 2 and coming.p == alone.p >= ready.p


def test_who_waits_now_is_gone_before_a_slow_start_serves() -> None:
    """A backlog asks for the more, the larger it is and the sooner a worker can be there for it."""

    def wanted(waits: float, t_ready_s: float) -> int:
        queue = Demand(4 * P_RATE, 4 * P_RATE, backlog=waits * P_RATE)
        return size(problem(demand_p=queue, supply_p=Supply(2), t_ready_p_s=t_ready_s)).p

    assert wanted(0.0, 5.0) == wanted(0.0, 60.0), "without a backlog it is the load that counts"
    assert wanted(0.0, 5.0) < wanted(80.0, 60.0) < wanted(80.0, 20.0) < wanted(80.0, 5.0)
    assert wanted(160.0, 20.0) > wanted(80.0, 20.0)


def test_decode_grows_for_what_prefill_will_hand_over() -> None:
    """R21.2: while P clears a backlog, D takes more than what arrives."""
    queue = Demand(2 * P_RATE, 2 * P_RATE, backlog=20 * P_RATE)
    wanted = problem(d=2 * D_RATE, demand_p=queue)
    found = size(wanted)
    assert found.d > size(problem(2 * P_RATE, 2 * D_RATE)).d
    assert found.need_d is not None and found.need_d.why == "backlog"


def test_what_is_in_service_is_no_backlog() -> None:
    """Prompts that are being computed, and a queue that the target leaves room for, bring D
    nothing that was not expected anyway."""
    calm = Demand(2 * P_RATE, 2 * P_RATE, backlog=3.0 * P_MODEL.tokens)
    asked = problem(d=2 * D_RATE, demand_p=calm, supply_p=Supply(3))
    found, empty = size(asked), size(problem(2 * P_RATE, 2 * D_RATE, supply_p=Supply(3)))
    assert catching_up(asked) == 0.0
    assert (found.need_p, found.need_d) == (empty.need_p, empty.need_d)


def test_prefill_is_not_stranded_behind_a_full_decode() -> None:
    """R21.2: P workers whose hand-over D cannot absorb would only stand idle."""
    found = size(problem(8 * P_RATE, 8 * D_RATE, bounds_d=Bounds(1, 2)))
    assert found.d == 2
    assert found.p <= 3 and found.stranded_p > 0
    assert "prefill_capped_by_decode" in {code for code, _text, _pool in found.reasons}


def test_kv_memory_alone_can_ask_for_decode_workers() -> None:
    """R4.1: long contexts fill the KV pool long before the batch is slow."""
    small = replace(D_MODEL, kv_tokens=40_000.0)
    few = problem(d=0.9 * D_RATE)
    tight = replace(few, decode=small)
    assert size(tight).d > size(few).d
    need = size(tight).need_d
    assert need is not None and need.rate < 0.7 * D_RATE, "a worker makes what its KV pool allows"


def test_who_decodes_now_is_held() -> None:
    """R4.1: sequences that will still run when a worker ordered now serves need their places."""

    def wanted(t_ready_s: float) -> tuple[int, str]:
        running = Demand(D_RATE, D_RATE, sequences=400.0)
        need = size(problem(demand_d=running, t_ready_d_s=t_ready_s)).need_d
        assert need is not None
        return math.ceil(need.workers), need.why

    assert wanted(1.0) > (4, "")
    assert wanted(1.0)[1] == "sequences"
    assert wanted(300.0) == (2, "demand"), "they have ended by then"


@pytest.mark.parametrize(("field", "target"), [("ttft_target_s", 0.3), ("tpot_target_s", 0.02)])
def test_an_unreachable_target_adds_nobody(field: str, target: float) -> None:
    """B30, B170: what no replica count can reach is said, and an idle pool still reaches min."""
    idle = size(problem(**{field: target}))
    assert (idle.p, idle.d) == (1, 1)
    assert idle.infeasible
    text = {code: said for code, said, _pool in idle.reasons}["slo_infeasible"]
    assert "best achievable" in text and "planning for" in text
    busy = size(problem(2 * P_RATE, D_RATE, supply_p=Supply(3), **{field: target}))
    # Of 40: a little more for the little time that is left for waiting, and not all there are.
    assert busy.p <= 7 and busy.d <= 6


def test_budget_cuts_both_and_no_minimum() -> None:
    """B45: a class of 16 GPUs counts as 16."""
    found = size(
        problem(
            8 * P_RATE,
            8 * D_RATE,
            bounds_p=Bounds(1, 40, 16),
            bounds_d=Bounds(1, 40, 16),
            budget_gpus=160,
        )
    )
    assert (found.p + found.d) * 16 <= 160 and abs(found.p - found.d) <= 2
    least = size(
        problem(8 * P_RATE, 8 * D_RATE, bounds_p=Bounds(3, 9), bounds_d=Bounds(3, 9), budget_gpus=4)
    )
    assert (least.p, least.d) == (3, 3)


def test_a_class_that_can_do_nothing_gets_its_minimum() -> None:
    """B13: a profile that gives 0 must not divide anything."""
    broken = problem(5.0, 5.0, prefill=replace(P_MODEL, rate=0.0))
    assert size(broken).p == 1
    never = problem(5.0, 5.0, decode=replace(D_MODEL, sequences_max=0.0))
    assert size(never).d == 1


@given(
    p=st.floats(0, 1e6),
    d=st.floats(0, 1e6),
    backlog=st.floats(0, 1e7),
    sequences=st.floats(0, 1e4),
    ready=st.integers(0, 40),
    budget=st.one_of(st.none(), st.integers(1, 60)),
)
def test_any_demand_gives_targets_in_bounds(
    p: float, d: float, backlog: float, sequences: float, ready: int, budget: int | None
) -> None:
    found = size(
        problem(
            demand_p=Demand(p, p * 1.2, backlog=backlog),
            demand_d=Demand(d, d * 1.2, sequences=sequences),
            supply_p=Supply(ready, (3.0,)),
            budget_gpus=budget,
            headroom=0.1,
            band=0.2,
        )
    )
    assert 1 <= found.p <= found.p_keep <= 40
    assert 1 <= found.d <= found.d_keep <= 40
