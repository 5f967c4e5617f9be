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


def waits(demand: float, workers: int, *, seed: int, cv2: float = 1.0) -> list[float]:
    """Waits of one shared queue, played request by request (nothing of the planner's in it)."""
    rng = random.Random(seed)
    shape = 1.0 / cv2
    free = [0.0] * workers
    at_s, found = 0.0, []
    for _ in range(20_000):
        at_s += rng.expovariate(demand / (P_MODEL.own_s * P_RATE))
        first = heapq.heappop(free)
        begin_s = max(at_s, first)
        found.append(begin_s - at_s)
        heapq.heappush(free, begin_s + P_MODEL.own_s * rng.gammavariate(shape, cv2))
    return sorted(found[1_000:])


@pytest.mark.parametrize("cv2", [0.5, 1.0])
@pytest.mark.parametrize("busy", [1.2, 2.2, 3.3, 4.6, 6.5])
def test_prefill_is_enough_in_a_queue_played_out_and_one_less_is_not(
    busy: float, cv2: float
) -> None:
    """P is one queue (the router binds late), so a busy pool may be 75 to 90 % busy."""
    wanted = problem(
        prefill=replace(P_MODEL, cv2=cv2),
        demand_p=Demand(busy * P_RATE, busy * P_RATE, backlog=busy * P_MODEL.tokens),
        supply_p=Supply(math.ceil(busy) + 1),
        catch_up_s=60.0,
    )
    found = size(wanted)

    def late(workers: int) -> float:
        found_s = waits(busy * P_RATE, workers, seed=workers, cv2=cv2)
        slack_s = 2.0 - P_MODEL.own_s - P_MODEL.overhead_s
        return sum(w > slack_s for w in found_s) / len(found_s)

    assert late(found.p) <= 0.12
    assert found.p == math.ceil(busy) or late(found.p - 1) > 0.05
    if busy > 3:
        assert busy / found.p >= 0.74


def test_headroom_and_band_only_add() -> None:
    plain = size(problem(5.5 * P_RATE, 5.5 * D_RATE))
    roomy = size(problem(5.5 * P_RATE, 5.5 * D_RATE, headroom=0.5, band=0.4))
    assert roomy.p > plain.p and roomy.d > plain.d
    assert roomy.p_keep > roomy.p and roomy.d_keep > roomy.d
    assert plain.p_keep == plain.p


def test_pending_workers_that_suffice_want_no_more() -> None:
    """B20: the backlog is simulated with the workers that are on their way."""
    queue = Demand(2 * P_RATE, 2 * P_RATE, backlog=40 * P_RATE)
    alone = size(problem(demand_p=queue, supply_p=Supply(2)))
    coming = size(problem(demand_p=queue, supply_p=Supply(2, (1.0, 1.0, 1.0))))
    assert coming.p < alone.p


def test_a_longer_t_ready_wants_more_for_the_same_backlog() -> None:
    growing = Demand(4 * P_RATE, 4 * P_RATE, backlog=2 * P_RATE)
    soon = size(problem(demand_p=growing, supply_p=Supply(2), t_ready_p_s=5.0))
    late = size(problem(demand_p=growing, supply_p=Supply(2), t_ready_p_s=60.0))
    assert late.p > soon.p


def test_decode_grows_for_what_prefill_will_hand_over() -> None:
    """R21.2: while P clears a backlog, D takes more than what arrives."""
    queue = Demand(2 * P_RATE, 2 * P_RATE, backlog=20 * P_RATE)
    wanted = problem(d=2 * D_RATE, demand_p=queue)
    found = size(wanted)
    assert found.d > size(problem(2 * P_RATE, 2 * D_RATE)).d
    assert found.need_d is not None and found.need_d.why == "handover"


def test_what_is_in_service_is_no_backlog() -> None:
    """Prompts that are being computed, and a queue that the target leaves room for, bring D
    nothing that was not expected anyway."""
    calm = Demand(2 * P_RATE, 2 * P_RATE, backlog=3.0 * P_MODEL.tokens)
    found = size(problem(d=2 * D_RATE, demand_p=calm, supply_p=Supply(3)))
    assert found.need_d is not None and found.need_d.why != "handover"
    assert found.need_p is not None and (found.need_p.why, found.need_p.excess) == ("demand", 0.0)


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
    assert need is not None and need.why == "memory"


@pytest.mark.parametrize(("field", "target"), [("ttft_target_s", 0.3), ("tpot_target_s", 0.02)])
def test_an_unreachable_target_adds_nobody(field: str, target: float) -> None:
    """B30, B170: what no replica count can reach is said, and an idle pool still reaches min."""
    idle = size(problem(**{field: target}))
    assert (idle.p, idle.d) == (1, 1)
    assert idle.infeasible
    text = {code: said for code, said, _pool in idle.reasons}["slo_infeasible"]
    assert "best achievable" in text and "planning for" in text
    busy = size(problem(2 * P_RATE, D_RATE, supply_p=Supply(3), **{field: target}))
    assert busy.p <= 5 and busy.d <= 6


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
