"""Signals of several routers as one: what is summed, what is kept, and who is not heard."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from readyplane.core.breakdown import ClientSignals, GenerationSignals
from readyplane.core.ration import PrioritySignals, Ration
from readyplane.ports import LatencyWindow, ModelSignals
from readyplane_router.clients import CLIENTS_TOLD_MAX
from readyplane_router.pooling import (
    COUNTERS,
    GAUGES,
    WINDOWS,
    Others,
    Told,
    add,
    counts_of,
    grown,
    merge,
    merge_clients,
    pool,
)
from readyplane_router.rationing import PRIORITIES_MAX
from readyplane_router.signals import GENERATIONS_MAX

TTL_S = 3.0
M = "demo"


def signals(arrivals: int = 0, **changes: Any) -> ModelSignals:
    return replace(ModelSignals(changes.pop("model", M)), arrivals_total=arrivals, **changes)


def told(uptime_s: float, *models: ModelSignals) -> Told:
    return Told(1, uptime_s, models)


class Life:
    """A router that began at second 100 with ten arrivals, on a clock of its own."""

    def __init__(self) -> None:
        self.others = Others(TTL_S)

    def hear(self, name: str, at_s: float, uptime_s: float, *models: ModelSignals) -> None:
        word = told(uptime_s, *models)
        self.others.hear(name, word, told_s=at_s, now_s=at_s, began_s=100.0)

    def arrivals(self, now_s: float) -> int:
        return self.others.merged({M: signals(10)}, now_s=now_s)[M].arrivals_total


def test_alone_it_tells_its_own_signals_and_no_copies() -> None:
    own = {M: signals(10)}
    assert Others(TTL_S).merged(own, now_s=5.0) is own


def test_every_field_of_the_signals_is_merged_or_named_here() -> None:
    """A field that is added to the signals is not forgotten by the merge."""
    apart = {"model", "length_counts", "generations", "priorities", "ration", "clients"}
    assert {*COUNTERS, *GAUGES, *WINDOWS, *apart} == set(ModelSignals.__dataclass_fields__)


# --------------------------------------------------------------------------- lives


def test_a_router_that_began_later_counts_from_its_beginning() -> None:
    life = Life()
    life.hear("b", 110.0, 1.0, signals(7))
    life.hear("b", 111.0, 2.0, signals(9))
    assert life.arrivals(111.0) == 19


def test_a_router_that_began_earlier_counts_from_when_it_is_heard() -> None:
    life = Life()
    life.hear("b", 101.0, 900.0, signals(5_000))
    assert life.arrivals(101.0) == 10, "what it counted before is no burst of now"
    life.hear("b", 102.0, 901.0, signals(5_004))
    assert life.arrivals(102.0) == 14


def test_one_that_leaves_keeps_its_counts_and_one_that_comes_again_begins_anew() -> None:
    life = Life()
    life.hear("b", 110.0, 1.0, signals(7, queued_requests=4))
    assert life.others.merged({M: signals(10)}, now_s=110.0)[M].queued_requests == 4
    gone = life.others.merged({M: signals(10)}, now_s=110.0 + TTL_S)[M]
    assert (gone.arrivals_total, gone.queued_requests) == (17, 0)
    life.hear("b-again", 120.0, 1.0, signals(2))
    life.hear("b-again", 121.0, 2.0, signals(3))
    assert life.arrivals(121.0) == 20


def test_a_counter_that_went_back_in_one_life_began_anew() -> None:
    assert grown({("", "", "x"): 9, ("", "", "y"): 1}, {("", "", "x"): 2, ("", "", "y"): 1}) == {
        ("", "", "x"): 2
    }


def test_what_was_counted_unheard_is_paid_in_over_as_long_again_and_never_goes_back() -> None:
    life = Life()
    life.hear("b", 110.0, 1.0, signals(0))
    life.hear("b", 140.0, 31.0, signals(300))  # 30 s unheard, 10 requests a second
    seen = [life.arrivals(140.0 + t) for t in range(31)]
    assert seen[0] == 10 and seen[15] == 160 and seen[30] == 310
    assert max(b - a for a, b in pairwise(seen)) <= 11, "no burst"
    for t in range(1, 40):
        life.hear("b", 140.0 + t, 31.0 + t, signals(300 + t))
        assert life.arrivals(140.0 + t) >= seen[min(t, 30)] + t
    assert life.arrivals(180.0) == 349


def test_what_is_paid_in_stays_where_it_was_counted_first() -> None:
    def of(priorities: range, arrivals: int) -> ModelSignals:
        return signals(priorities=tuple(PrioritySignals(p, arrivals) for p in priorities))

    def counted(now_s: float) -> dict[int, int]:
        found = life.others.merged({M: signals()}, now_s=now_s)[M]
        return {p.priority: p.arrivals_total for p in found.priorities}

    life = Life()
    life.hear("b", 110.0, 1.0, signals())
    life.hear("b", 120.0, 11.0, of(range(100, 101), 50))  # late: paid in until 130
    before = counted(124.0)
    life.hear("c", 124.0, 1.0, of(range(PRIORITIES_MAX), 1))  # takes the other places
    after = counted(135.0)
    assert before == {100: 20} and after[100] == 50
    assert sum(after.values()) == 50 + PRIORITIES_MAX


def test_a_word_is_fresh_for_its_time() -> None:
    life = Life()
    life.hear("b", 110.0, 1.0, signals(1))
    assert list(life.others.fresh(112.9)) == ["b"] and not life.others.fresh(113.0)


def test_a_model_that_another_router_alone_serves_is_told_too() -> None:
    life = Life()
    life.hear("b", 110.0, 1.0, signals(3, model="other", queued_tokens=8))
    found = life.others.merged({M: signals(10)}, now_s=110.0)
    assert list(found) == [M, "other"]
    assert (found["other"].arrivals_total, found["other"].queued_tokens) == (3, 8)
    assert list(life.others.merged({}, now_s=110.0, model="other")) == ["other"]


# --------------------------------------------------------------------------- one model


def test_counters_gauges_and_parts_are_summed() -> None:
    a = signals(
        10,
        decoding_remaining_tokens=1.5,
        length_counts=((1.0, 2.0), (0.0, 1.0)),
        generations=(GenerationSignals("g1", 5, 4, 1, 2),),
        priorities=(PrioritySignals(1, 6, 60, 1),),
    )
    b = signals(
        3,
        decoding_remaining_tokens=2.5,
        length_counts=((0.5, 0.0), (1.0, 0.0)),
        generations=(GenerationSignals("g0", 1, 1, 0, 0), GenerationSignals("g1", 2, 1, 0, 3)),
        priorities=(PrioritySignals(5, 1, 9, 0), PrioritySignals(1, 2, 20, 0)),
        ration=Ration(1, 0.5, 9.0),
    )
    found = merge(a, counts_of(b), {"b": b})
    assert (found.arrivals_total, found.decoding_remaining_tokens) == (13, 4.0)
    assert found.length_counts == ((1.5, 2.0), (1.0, 1.0))
    assert found.generations == (
        GenerationSignals("g0", 1, 1, 0, 0),
        GenerationSignals("g1", 7, 5, 1, 5),
    )
    assert found.priorities == (PrioritySignals(5, 1, 9, 0), PrioritySignals(1, 8, 80, 1))
    assert found.ration == b.ration


def test_length_counts_of_another_form_are_left_out_and_none_stays_none() -> None:
    a, b = signals(length_counts=((1.0, 2.0),)), signals(length_counts=((1.0,), (2.0,)))
    assert merge(a, {}, {"b": b}).length_counts == a.length_counts
    assert merge(signals(), {}, {"b": b}).length_counts == b.length_counts
    assert merge(signals(), {}, {"b": signals()}).length_counts == ()


def test_priorities_and_generations_of_the_others_are_bounded_and_none_is_lost() -> None:
    totals: dict[str, Any] = {}
    for n in range(100):
        word = signals(
            priorities=(PrioritySignals(n, 1, 2, 0),), generations=(GenerationSignals(f"g{n}", 1),)
        )
        add(totals, {M: counts_of(word)})
    found = merge(signals(), totals[M], {})
    assert len(found.priorities) == PRIORITIES_MAX
    assert sum(p.arrivals_total for p in found.priorities) == 100
    assert len(found.generations) == GENERATIONS_MAX
    assert found.generations[-1].manifest_digest == "g99", "the newest are kept"


# --------------------------------------------------------------------------- windows


def window(values: np.ndarray[Any, Any]) -> LatencyWindow:
    p50, p90, p99 = (float(np.quantile(values, q)) for q in (0.5, 0.9, 0.99))
    return LatencyWindow(20.0, len(values), p50, p90, p99, float(values.mean()))


def test_a_window_without_samples_says_nothing_and_one_with_samples_stays_as_it_is() -> None:
    one = LatencyWindow(20.0, 7, 1.0, 2.0, 3.0, 1.25)
    nothing = LatencyWindow(20.0)
    assert pool([nothing, one]) == one
    assert pool([nothing, nothing]) == nothing


@pytest.mark.parametrize("sizes", [(1000, 1000), (4000, 50), (50, 4000, 700)])
@pytest.mark.parametrize("spread", [1.0, 10.0])
def test_pooled_quantiles_are_never_below_the_true_ones_nor_above_the_slowest_router_s(
    sizes: tuple[int, ...], spread: float
) -> None:
    rng = np.random.default_rng(7)
    samples = [spread**k * rng.lognormal(0.0, 1.0, n) for k, n in enumerate(sizes)]
    parts = [window(s) for s in samples]
    everything = np.concatenate(samples)
    found = pool(parts)
    assert found.count == len(everything)
    assert found.mean_s == pytest.approx(float(everything.mean()))
    for q, name in ((0.5, "p50_s"), (0.9, "p90_s"), (0.99, "p99_s")):
        value = getattr(found, name)
        assert float(np.quantile(everything, q, method="lower")) <= value
        assert value <= max(getattr(p, name) for p in parts)


def test_a_few_slow_samples_of_one_router_do_not_stand_for_all() -> None:
    quick = LatencyWindow(20.0, 1000, 0.2, 0.3, 0.4, 0.2)
    slow = LatencyWindow(20.0, 4, 9.0, 9.0, 9.0, 9.0)
    found = pool([quick, slow])
    assert (found.p50_s, found.p90_s, found.p99_s) == (0.3, 0.4, 9.0)


# --------------------------------------------------------------------------- clients


def test_a_client_s_life_changes_with_those_who_count_it() -> None:
    here = {"": (ClientSignals("acme", 3, 10, 100),)}
    both = here | {"b": (ClientSignals("zeta", 1, 9, 90), ClientSignals("acme", 8, 1, 10))}
    assert merge_clients(here) == here[""], "counted here alone: as it is"
    found = {c.client: c for c in merge_clients(both)}
    assert (found["acme"].arrivals_total, found["acme"].arrival_uncached_tokens_total) == (11, 110)
    assert found["acme"].life not in (3, 8)
    again = {c.client: c for c in merge_clients(both)}
    assert again == found, "the same who count: the same life"
    later = both | {"b": (ClientSignals("acme", 9, 1, 10),)}
    assert {c.client: c for c in merge_clients(later)}["acme"].life != found["acme"].life
    assert all(0 < c.life < 2**63 for c in found.values()), "fit for the wire"


def test_the_largest_at_any_router_come_first_and_are_bounded() -> None:
    told_by = {
        name: tuple(ClientSignals(f"{name}{n}", 1, 1, 1000 - n) for n in range(12))
        for name in ("", "b", "c")
    }
    found = [c.client for c in merge_clients(told_by)]
    assert len(found) == CLIENTS_TOLD_MAX
    assert {"0", "b0", "c0"} == set(found[:3])
