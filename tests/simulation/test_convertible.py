"""Decode workers that may prefill: in short chunks, at a price that the router knows."""

from __future__ import annotations

from itertools import pairwise

import pytest

from readyplane import profiles
from readyplane.core import convertible
from readyplane.core.worker import Role
from readyplane_agent.engines.modelled.core import EngineModel
from readyplane_agent.engines.modelled.core_events import EngineRequest, Finished, RequestMode
from readyplane_lab.simulator.faults import Crash
from tests.simulation.sim_world import Fixed, steady, world

H100 = profiles.load("h100-tp4-llama70b")


def slowest_iteration_s(max_batch_tokens: int) -> float:
    """While a sequence decodes, a long prompt comes: the longest it waits for its next token."""
    engine = EngineModel(
        H100, block_size=64, kv_blocks=4000, max_batch_tokens=max_batch_tokens, coalesce_s=0.0
    )
    engine.submit(EngineRequest("d", 64, 400, mode=RequestMode.LOCAL), 0.0)
    engine.advance(1.0)
    engine.submit(EngineRequest("p", 6000, 1, mode=RequestMode.LOCAL), 1.0)
    tokens_s: list[float] = []
    while (now_s := engine.next_event_s()) is not None:
        events = engine.advance(now_s)
        tokens_s += [now_s for e in events if getattr(e, "request_id", "") == "d"]
        if any(isinstance(e, Finished) and e.request_id == "p" for e in events):
            break
    return max(b - a for a, b in pairwise(tokens_s))


def test_a_chunk_bounds_what_a_prompt_costs_those_who_decode() -> None:
    chunk = convertible.chunk_tokens(H100)
    assert chunk == 512
    dearest_s = max(H100.prefill_s(chunk, held) for held in range(0, 6000, 64))
    bound_s = dearest_s + H100.iteration_s(1, 2000)
    assert slowest_iteration_s(chunk) <= bound_s + 1e-9
    assert slowest_iteration_s(H100.max_batch_tokens) > 3 * bound_s


def test_an_engine_has_room_for_a_token_of_each_sequence() -> None:
    many = profiles.load("h200-llama8b-fp8")
    assert convertible.chunk_tokens(many) == many.max_num_seqs + 1
    EngineModel(convertible.engine_profile(many), block_size=16, kv_blocks=100)


def test_the_router_is_told_that_such_prefill_is_slow() -> None:
    told = convertible.told_profile(H100, tpot_s=0.05)
    assert told.name != H100.name
    assert told.worker_class == H100.worker_class
    for tokens, _ in H100.prefill_points:
        assert told.prefill_s(tokens) > H100.prefill_s(tokens)
    chunks = 4096 / 512
    assert told.prefill_s(4096) - H100.prefill_s(4096) > chunks * H100.iteration_s(1, 0) * 0.9
    assert told.decode_coefficients_s() == pytest.approx(H100.decode_coefficients_s())


def test_decode_workers_stand_in_while_prefill_is_made_up_for() -> None:
    """Every prefill worker dies: convertible decoders take prompts, strict ones wait for a start."""

    def waited(convertible_too: bool) -> float:
        result = world(
            Fixed((0.0, 1, 3)),
            steady(1.0),
            initial=(1, 3),
            convertible=convertible_too,
            faults=(Crash(10.0, Role.PREFILL),),
        )
        during = [r.ttft_s for r in result.records if 10.0 < r.at_s < 20.0]
        return max(float("inf") if s is None else s for s in during)

    assert waited(convertible_too=True) < 0.7 * waited(convertible_too=False)
