"""Blocks that graphs take while requests run: in any order, and nobody loses or gains a token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane_agent.engines.modelled.core_events import (
    EngineEvent,
    EngineRequest,
    Finished,
    KvRemoved,
    KvStored,
    Preempted,
    TokensEmitted,
)
from readyplane_agent.engines.modelled.core_stages import StagedEngineModel
from tests.unit.test_engine_core import LINEAR, drain, of

BLOCKS = 40


def staged(**options: Any) -> StagedEngineModel:
    return StagedEngineModel(
        LINEAR, **{"block_size": 16, "kv_blocks": BLOCKS, "iteration_factor": 1.3, **options}
    )


def holds(model: StagedEngineModel) -> None:
    pool = model.pool
    assert pool.total + model.withheld == BLOCKS, "no block is counted twice, none is lost"
    assert pool.private >= 0 and pool.shared >= 0 and pool.idle >= 0
    assert pool.private + pool.shared + pool.idle <= pool.total


STEP = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 160), st.integers(1, 60)),
    st.tuples(st.just("pass"), st.floats(0.0, 0.4), st.just(0)),
    st.tuples(st.just("withhold"), st.integers(0, 12), st.just(0)),
    st.tuples(st.just("return"), st.just(0), st.just(0)),
    st.tuples(st.just("factor"), st.sampled_from([1.0, 1.3]), st.just(0)),
    st.tuples(st.just("abort"), st.integers(0, 5), st.just(0)),
)


@given(st.lists(STEP, max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_order_of_capture_failure_upgrade_and_requests(
    steps: list[tuple[str, Any, int]],
) -> None:
    model, now_s = staged(), 0.0
    asked: dict[str, int] = {}
    events: list[EngineEvent] = []
    for name, first, second in steps:
        if name == "ask" and (first + second) <= 16 * (model.pool.total - 1):
            request = EngineRequest(
                f"r{len(asked)}", first, second, block_hashes=tuple(range(1, 1 + first // 16))
            )
            asked[request.request_id] = second
            model.submit(request, now_s)
        elif name == "pass":
            now_s += first
            events += model.advance(now_s)
        elif name == "withhold":
            before = model.pool.total
            taken = first if model.withhold(first, now_s) else 0
            assert model.pool.total == before - taken
        elif name == "return":
            model.return_withheld(now_s)
            assert model.withheld == 0
        elif name == "factor":
            model.run_at(first, now_s)
        elif name == "abort":
            model.abort(f"r{first}", now_s)
        holds(model)
    model.return_withheld(now_s)  # what was asked for when there was more may need it
    events += drain(model)
    holds(model)
    ended = {e.request_id: e.reason for e in of(events, Finished)}
    assert set(ended) == set(asked), "everybody comes to an end"
    for name, wanted in asked.items():
        given_ = sum(e.count for e in of(events, TokensEmitted) if e.request_id == name)
        if ended[name] == "length":
            assert given_ == wanted
        else:
            assert given_ <= wanted


def test_a_block_in_use_is_never_taken_and_a_prefix_that_is_taken_is_told() -> None:
    model = staged()
    hashes = tuple(range(1, 11))
    model.submit(EngineRequest("a", 160, 2, block_hashes=hashes), 0.0)
    events = drain(model)
    assert model.pool.idle == len(of(events, KvStored)[0].block_hashes) == 10
    model.submit(EngineRequest("b", 320, 50), 1.0)
    model.advance(1.5)
    # It holds less now and will hold 24 blocks: so many stay, whatever is free meanwhile.
    assert model.pool.available > BLOCKS - 24
    assert not model.withhold(BLOCKS - 23, 1.5)
    assert model.withhold(BLOCKS - 24, 1.5)
    removed = [h for e in of(model.advance(1.5), KvRemoved) for h in e.block_hashes]
    assert removed, "who counted on that prefix hears that it is gone"
    rest = drain(model)
    assert not of(rest, Preempted) and of(rest, Finished)[0].reason == "length"


def test_the_iteration_under_way_ends_as_it_began_and_the_next_is_quicker() -> None:
    model = staged(coalesce_s=0.0)
    model.submit(EngineRequest("a", 1, 12), 0.0)
    slow, quick = staged(coalesce_s=0.0), staged(coalesce_s=0.0, iteration_factor=1.0)
    for other in (slow, quick):
        other.submit(EngineRequest("a", 1, 12), 0.0)
    slow_s = [e.at_s for e in of(drain(slow), TokensEmitted)]
    quick_s = [e.at_s for e in of(drain(quick), TokensEmitted)]
    middle_s = (slow_s[3] + slow_s[4]) / 2
    events = model.advance(middle_s)
    model.run_at(1.0, middle_s)
    found_s = [e.at_s for e in of([*events, *drain(model)], TokensEmitted)]
    assert found_s[:5] == pytest.approx(slow_s[:5]), "nothing is stalled, nothing is cut"
    steps = [b - a for a, b in pairwise(found_s[5:])]
    wanted = [b - a for a, b in pairwise(quick_s[5:])]
    assert steps == pytest.approx(wanted)
