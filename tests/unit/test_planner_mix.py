"""Which classes are started and given up: tables, and properties against trying everything."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane_planner.optimise.mix import NODES_MAX, Held, Offer, gives, start_cost, starts

CHEAP = Offer("cheap", rate=0.5, cost=0.4, gpus=1, room=4)
FAST = Offer("fast", rate=1.0, cost=1.0, gpus=2, room=8)


@pytest.mark.parametrize(
    ("need", "offers", "room", "gpus", "counts", "missing"),
    [
        (0.0, (CHEAP, FAST), 9, None, {}, 0.0),
        (-1.0, (CHEAP, FAST), 9, None, {}, 0.0),
        (1.0, (CHEAP, FAST), 9, None, {"cheap": 2}, 0.0),
        (3.0, (CHEAP, FAST), 9, None, {"cheap": 4, "fast": 1}, 0.0),
        # Fewer places than the cheapest would take: the larger ones.
        (2.0, (CHEAP, FAST), 2, None, {"fast": 2}, 0.0),
        # GPUs bind: four cheap ones are worth two GPUs each.
        (2.0, (CHEAP, FAST), 9, 4, {"cheap": 4}, 0.0),
        # A remainder is not filled with a whole fast one.
        (1.4, (CHEAP, FAST), 9, None, {"cheap": 3}, 0.0),
        # Denied or without quota: the other class, dearer as it is.
        (1.0, (Offer("cheap", 0.5, 0.4, 1, 0), FAST), 9, None, {"fast": 1}, 0.0),
        # What cannot be had is missing, and the most of it is still taken.
        (9.0, (CHEAP, Offer("fast", 1.0, 1.0, 2, 1)), 9, None, {"cheap": 4, "fast": 1}, 6.0),
        (1.0, (), 9, None, {}, 1.0),
        # A class that cannot keep the targets is worth nothing and is not taken.
        (1.0, (Offer("slow", 0.0, 0.1, 1, 9), FAST), 9, None, {"fast": 1}, 0.0),
        # A minimum of a class is owed whatever is needed.
        (0.0, (Offer("kept", 1.0, 5.0, 1, 4, owed=2), FAST), 9, None, {"kept": 2}, 0.0),
        (3.0, (Offer("kept", 1.0, 5.0, 1, 4, owed=2), FAST), 9, None, {"kept": 2, "fast": 1}, 0.0),
    ],
)
def test_starts(
    need: float,
    offers: tuple[Offer, ...],
    room: int,
    gpus: int | None,
    counts: dict[str, int],
    missing: float,
) -> None:
    found = starts(need, offers, room=room, gpus=gpus)
    assert dict(found.counts) == counts
    assert found.missing == pytest.approx(missing)
    assert len(found.classes()) == found.count == sum(counts.values())


@pytest.mark.parametrize(
    ("surplus", "most", "counts"),
    [
        (0.0, 9, {}),
        (0.9, 9, {"cheap": 1}),
        (1.0, 9, {"fast": 1}),  # the dearer for its work goes first
        (1.5, 9, {"fast": 1, "cheap": 1}),
        (9.0, 2, {"fast": 2}),
        (9.0, 0, {}),
    ],
)
def test_gives(surplus: float, most: int, counts: dict[str, int]) -> None:
    held = (Held("cheap", 0.5, 0.4, spare=3), Held("fast", 1.0, 1.0, spare=2))
    assert dict(gives(surplus, held, most=most).counts) == counts


def test_a_late_class_pays_for_what_it_misses() -> None:
    def of(ready_s: float, in_time_s: float) -> float:
        return start_cost(
            price_per_s=1.0,
            ready_s=ready_s,
            life_s=100.0,
            rate=1.0,
            in_time_s=in_time_s,
            missed_per_s=10.0,
        )

    assert of(60.0, 60.0) == 160.0
    assert of(60.0, 0.0) == 160.0 + 600.0
    assert of(10.0, 0.0) < of(60.0, 60.0) + 100.0


small = st.builds(
    Offer,
    st.sampled_from("abcd"),
    rate=st.floats(0.1, 3.0),
    cost=st.floats(0.1, 5.0),
    gpus=st.integers(1, 4),
    room=st.integers(0, 4),
)
offered = st.lists(small, min_size=1, max_size=4, unique_by=lambda o: o.worker_class)
budgets = st.none() | st.integers(0, 16)


def best(need: float, offers: list[Offer], room: int, gpus: int | None) -> tuple[float, float]:
    """(missing, cost) of the best of all combinations."""
    found = []
    for counts in itertools.product(*(range(o.room + 1) for o in offers)):
        pairs = list(zip(counts, offers, strict=True))
        if sum(counts) > room or (gpus is not None and sum(n * o.gpus for n, o in pairs) > gpus):
            continue
        missing = max(0.0, need - sum(n * o.rate for n, o in pairs))
        found.append((missing if missing > 1e-9 else 0.0, sum(n * o.cost for n, o in pairs)))
    return min(found)


@settings(max_examples=200, deadline=None)
@given(st.floats(0.0, 10.0), offered, st.integers(0, 8), budgets)
def test_starts_are_within_every_limit_and_near_the_best(
    need: float, offers: list[Offer], room: int, gpus: int | None
) -> None:
    found = starts(need, offers, room=room, gpus=gpus)
    by_name = {o.worker_class: o for o in offers}
    assert found.count <= room
    assert all(0 < n <= by_name[name].room for name, n in found.counts)
    assert gpus is None or sum(n * by_name[name].gpus for name, n in found.counts) <= gpus
    missing, cost = best(need, offers, room, gpus)
    # A thousandth of a worker that is missing is not worth a start.
    assert missing - 1e-6 <= found.missing <= 1.02 * missing + 1e-3
    assert missing > 0 or found.cost <= 1.02 * cost + 1e-6
    assert starts(need, list(reversed(offers)), room=room, gpus=gpus).counts == found.counts


@settings(max_examples=150, deadline=None)
@given(st.floats(0.1, 30.0), offered, st.integers(0, 40))
def test_a_class_that_another_one_beats_is_never_chosen(
    need: float, offers: list[Offer], room: int
) -> None:
    better = offers[0]
    better = Offer("best", better.rate, better.cost, better.gpus, room=40)
    worse = Offer("worse", better.rate * 0.9, better.cost * 1.1, better.gpus, room=40)
    found = dict(starts(need, [worse, *offers[1:], better], room=room).counts)
    assert "worse" not in found


@settings(max_examples=150, deadline=None)
@given(
    st.floats(0.0, 8.0),
    st.lists(
        st.builds(
            Held,
            st.sampled_from("abcd"),
            rate=st.floats(0.1, 3.0),
            saving=st.floats(0.0, 5.0),
            spare=st.integers(0, 4),
        ),
        max_size=4,
        unique_by=lambda h: h.worker_class,
    ),
    st.integers(0, 8),
)
def test_what_is_given_up_was_surplus(surplus: float, held: list[Held], most: int) -> None:
    found = gives(surplus, held, most=most)
    by_name = {h.worker_class: h for h in held}
    assert found.rate <= surplus + 1e-6
    assert found.count <= most
    assert all(n <= by_name[name].spare for name, n in found.counts)
    saved = 0.0
    for counts in itertools.product(*(range(h.spare + 1) for h in held)):
        pairs = list(zip(counts, held, strict=True))
        if sum(counts) <= most and sum(n * h.rate for n, h in pairs) <= surplus:
            saved = max(saved, sum(n * h.saving for n, h in pairs))
    assert found.cost >= 0.98 * saved - 1e-6


def test_eight_classes_and_hundreds_of_workers_take_milliseconds() -> None:
    offers = [
        Offer(f"c{k}", rate := 0.5 + 0.23 * k, rate * (1.0 + 0.013 * (k * k % 7)), 1 + k % 4, 200)
        for k in range(8)
    ]
    began_s = time.thread_time()
    found = starts(412.3, offers, room=1000, gpus=2000)
    assert time.thread_time() - began_s < 0.1  # a few ms where nothing else runs
    assert found.missing == 0.0
    assert found.steps <= NODES_MAX
    # Near the bound that no whole number of workers can beat.
    assert found.cost < 1.02 * min(o.cost / o.rate for o in offers) * 412.3 * 1.1
