"""The work of requests, and the least workers that it needs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane import profiles
from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile
from readyplane.core.work import Slo
from readyplane_agent.engines.modelled.core import EngineModel
from readyplane_agent.engines.modelled.core_events import EngineRequest, Finished, TokensEmitted
from readyplane_lab.proof.oracle.demand import (
    Work,
    bursts,
    hindsight,
    ideal_cached,
    peak_workers,
    request_work,
    spread,
)
from readyplane_lab.workload.request import WorkloadRequest, prompt_hashes

SLO = Slo(2.0, 0.05)
# 1 ms a token above 100 tokens; an iteration of 10 ms + 1 ms a sequence + 1 us a KV token.
PLAIN = ClassProfile(
    name="plain",
    source="made up",
    worker_class="plain",
    gpus=1,
    price_per_gpu_hour=1.0,
    prefill_points=((100.0, 100.0), (1000.0, 1000.0)),
    decode_points=(
        (1.0, 100.0, 11.1),
        (10.0, 100.0, 20.1),
        (1.0, 1000.0, 12.0),
        (10.0, 9000.0, 29.0),
    ),
    kv_capacity_tokens=1_000_000,
    kv_bytes_per_token=1,
)


def requests(*rows: tuple[float, int, int]) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(i, at_s, isl, osl, ((1000 + i, isl),))
        for i, (at_s, isl, osl) in enumerate(rows)
    ]


def test_the_work_of_one_request_by_hand() -> None:
    work = request_work(requests((0.0, 500, 3)), prefill=PLAIN, decode=PLAIN, slo=SLO)
    assert work.prefill_s == pytest.approx([0.5])
    # Iterations over 499, 500 and 501 KV tokens; two of them share `a` with as many as fit 50 ms.
    own = 3 * 0.001 + 1e-6 * (499 + 500 + 501)
    assert work.decode_s == pytest.approx([own + 0.010 * 2 * (0.001 + 500e-6) / 0.040])
    assert work.residence_s == pytest.approx([0.030 + own])
    assert work.allowed_s == pytest.approx([0.15])


def test_a_full_batch_is_charged_what_it_takes() -> None:
    """26 short requests fill iterations of 50 ms almost: their work is almost all of the time."""
    many = requests(*[(0.0, 500, 2)] * 26)
    work = request_work(many, prefill=PLAIN, decode=PLAIN, slo=SLO, strict=True)
    assert PLAIN.iteration_s(26, 26 * 500) == pytest.approx(0.049)
    assert work.decode_s.sum() == pytest.approx(26 * 0.0015 * 0.05 / 0.04)
    assert work.decode_s.sum() < 0.049


@pytest.mark.parametrize("bound", ["count", "memory"])
def test_batches_end_where_the_engine_ends_them(bound: str) -> None:
    doc = PLAIN.document()
    doc["max_num_seqs" if bound == "count" else "kv_capacity_tokens"] = (
        2 if bound == "count" else 2000
    )
    small = ClassProfile.from_document(doc)
    work = request_work(requests((0.0, 1000, 11)), prefill=small, decode=small, slo=SLO)
    own = 11 * 0.001 + 1e-6 * sum(range(999, 1010))
    shared = 11 / 2 if bound == "count" else sum(range(999, 1010)) / 2000
    assert work.decode_s == pytest.approx([own + 0.010 * shared])


def test_a_class_that_is_too_slow_is_refused() -> None:
    with pytest.raises(InvalidField):
        request_work(requests((0.0, 1, 1)), prefill=PLAIN, decode=PLAIN, slo=Slo(2.0, 0.010))


@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.integers(2, 60), st.integers(0, 40)),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=60, deadline=None)
def test_no_engine_undercuts_the_decode_work(rows: list[tuple[int, int, int]]) -> None:
    """Whatever joins when: an engine in which all keep TPOT is busy for at least their work."""
    profile = profiles.load("h200-llama8b-fp8")
    engine = EngineModel(profile, block_size=16, kv_blocks=profile.kv_capacity_tokens // 16)
    at_s = 0.0
    for i, (isl, osl, gap) in enumerate(rows):
        at_s += 0.004 * gap
        engine.submit(EngineRequest(f"r{i}", isl, osl), now_s=at_s)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while (now_s := engine.next_event_s()) is not None:
        for event in engine.advance(now_s):
            if isinstance(event, TokensEmitted):
                first.setdefault(event.request_id, event.at_s)
            elif isinstance(event, Finished):
                last[event.request_id] = event.at_s
    means = [(last[f"r{i}"] - first[f"r{i}"]) / (osl - 1) for i, (_, osl, _) in enumerate(rows)]
    work = request_work(
        requests(*[(0.0, isl, osl) for isl, osl, _ in rows]),
        prefill=profile,
        decode=profile,
        slo=Slo(2.0, max(means)),  # which all have just kept
        strict=True,
    )
    assert work.prefill_s.sum() + work.decode_s.sum() <= max(last.values()) + 1e-6


def test_lengths_are_looked_up_as_the_profile_says() -> None:
    profile = profiles.load("h100-tp4-llama70b")
    some = requests((0.0, 700, 1), (1.0, 9000, 1), (2.0, 700, 1), (3.0, 3, 1))
    cached = np.array([0.0, 640.0, 64.0, 0.0])
    work = request_work(some, prefill=profile, decode=profile, slo=SLO, cached=cached)
    assert work.prefill_s == pytest.approx(
        [profile.prefill_s(r.isl - c, c) for r, c in zip(some, cached, strict=True)]
    )


def test_a_strict_prefill_is_no_more_and_holds_when_the_order_changes() -> None:
    """The second is served first and brings the first's blocks along."""
    profile = profiles.load("h200-llama8b-fp8")
    shared = (7, 1152)
    some = [
        WorkloadRequest(0, 0.0, 1152, 2, (shared,)),
        WorkloadRequest(1, 0.5, 2304, 2, (shared, (9, 1152))),
    ]
    cached = ideal_cached(some, 64)
    assert cached.tolist() == [0.0, 1152.0]
    usual = request_work(some, prefill=profile, decode=profile, slo=SLO, cached=cached)
    strict = request_work(
        some, prefill=profile, decode=profile, slo=SLO, cached=cached, strict=True
    )
    swapped_s = profile.prefill_s(2304) + profile.prefill_s(64, 1088)
    assert strict.prefill_s.sum() <= swapped_s < usual.prefill_s.sum()
    assert np.all(strict.prefill_s <= usual.prefill_s + 1e-9)


def held_by_hashes(some: list[WorkloadRequest], block_size: int) -> list[int]:
    seen: set[int] = set()
    out = []
    for r in some:
        hashes = prompt_hashes(r, block_size)
        hits = next((k for k, value in enumerate(hashes) if value not in seen), len(hashes))
        out.append(min(hits, (r.isl - 1) // block_size) * block_size)
        seen.update(hashes)
    return out


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(1, 3), st.sampled_from([8, 16, 24, 40])), min_size=1, max_size=4
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=200, deadline=None)
def test_what_is_cached_is_what_the_hashes_say(prompts: list[list[tuple[int, int]]]) -> None:
    some = [
        WorkloadRequest(i, float(i), sum(n for _, n in parts), 1, tuple(parts))
        for i, parts in enumerate(prompts)
    ]
    assert ideal_cached(some, 16).tolist() == held_by_hashes(some, 16)


def test_needs_by_hand() -> None:
    """Two seconds of prefill work at once, to be done within 1.95 s; the grid is 1 s."""
    work = Work(*(np.array([v]) for v in (1.0, 1.95, 6.0, 1.0, 2.0)))
    known = hindsight(work, slo=SLO, step_s=1.0, span_s=6.0)
    assert known.work_p.tolist() == [0.0, 1.95, 0.0, 0.0, 0.0, 0.0]
    assert known.load_p == pytest.approx([0.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    assert known.need_p.tolist() == [0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    # 6 worker-seconds of decode from 2.95 s on, over two seconds.
    assert known.load_d == pytest.approx([0.0, 0.0, 3.0, 3.0, 3.0, 0.0])
    assert known.need_d.tolist() == [0.0, 0.0, 3.0, 3.0, 3.0, 0.0]
    assert peak_workers(known) == 4.0


@given(
    st.lists(
        st.tuples(st.floats(0, 50), st.floats(0.01, 20), st.floats(0, 5)), min_size=1, max_size=20
    )
)
@settings(max_examples=100, deadline=None)
def test_spreading_keeps_every_second_of_work(rows: list[tuple[float, float, float]]) -> None:
    begin, length, amount = (np.array(column) for column in zip(*rows, strict=True))
    edges = np.arange(0.0, 80.0, 0.7)
    exact = [
        sum(
            a * min(1.0, max(0.0, (t - b) / n))
            for b, n, a in zip(begin, length, amount, strict=True)
        )
        for t in edges
    ]
    assert spread(begin, begin + length, amount, edges) == pytest.approx(exact, abs=1e-6)


def test_a_burst_within_a_step_needs_more_than_the_mean() -> None:
    """Four seconds of work in one moment of a step of 10 s, each to be done within 2 s."""
    at_s, amount = np.array([12.0, 12.0]), np.array([2.0, 2.0])
    need = bursts(at_s, amount, within_s=2.0, step_s=10.0, steps=4)
    assert need.tolist() == [0.0, 2.0, 0.0, 0.0]
    # Spread over two seconds more there is twice the time; across an edge both steps need it.
    late = bursts(np.array([18.0, 20.0]), amount, within_s=2.0, step_s=10.0, steps=4)
    assert late.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert bursts(at_s, amount, within_s=2.0, step_s=0.1, steps=400).max() == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 39), st.floats(0.01, 3.0)), min_size=1, max_size=30),
    st.sampled_from([0.5, 2.0, 7.0]),
)
@settings(max_examples=80, deadline=None)
def test_bursts_never_ask_for_more_than_the_densest_moment(
    rows: list[tuple[float, float]], within_s: float
) -> None:
    """No stretch needs more than if all that is ever open together had to be done at once."""
    at_s, amount = (np.array(column) for column in zip(*rows, strict=True))
    need = bursts(at_s, amount, within_s=within_s, step_s=10.0, steps=4)
    pairs = [
        amount[(at_s >= a) & (at_s <= b)].sum() / (b - a + within_s)
        for a in at_s
        for b in at_s
        if a <= b
    ]
    assert need.max() <= max(pairs) + 1e-9
    for k in range(4):
        if not ((at_s >= 10 * k - 10 - within_s) & (at_s < 10 * (k + 1))).any():
            assert need[k] == 0.0 or within_s * 5 > 10


def test_a_workload_on_one_instant_still_has_a_step() -> None:
    work = request_work(requests((0.0, 500, 3)), prefill=PLAIN, decode=PLAIN, slo=SLO)
    known = hindsight(work, slo=SLO, step_s=10.0, span_s=0.0)
    assert known.need_p.tolist() == [1.0] and known.need_d.tolist() == [1.0]
