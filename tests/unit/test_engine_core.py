"""The engine model: closed forms, conservation laws, and jumping equals stepping."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane import profiles
from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile
from readyplane_agent.engines.modelled.core import EngineModel
from readyplane_agent.engines.modelled.core_events import (
    EngineEvent,
    EngineRequest,
    Finished,
    KvCleared,
    KvExpired,
    KvRemoved,
    KvStored,
    KvWanted,
    Preempted,
    PrefillDone,
    RequestMode,
    TokensEmitted,
)

E = TypeVar("E")
PROFILE = profiles.load("h200-llama8b-fp8")
LINEAR = ClassProfile(
    name="linear",
    source="test",
    worker_class="test",
    gpus=1,
    price_per_gpu_hour=1.0,
    prefill_points=((1.0, 1.0), (1000.0, 1000.0)),  # 1 ms a token
    decode_points=((1.0, 1.0, 11.0), (10.0, 10.0, 20.0), (10.0, 1000.0, 20.0)),
    kv_capacity_tokens=100_000,
    kv_bytes_per_token=1000,
    max_batch_tokens=512,
    max_num_seqs=64,
)


def engine(**options: Any) -> EngineModel:
    sizes: dict[str, Any] = {"block_size": 16, "kv_blocks": 4096, **options}
    return EngineModel(sizes.pop("profile", LINEAR), **sizes)


def drain(model: EngineModel, *, until_s: float = 1e9) -> list[EngineEvent]:
    """Step from event to event until nothing happens any more."""
    events: list[EngineEvent] = []
    for _ in range(100_000):
        when = model.next_event_s()
        if when is None or when > until_s:
            return events
        events += model.advance(when)
    raise AssertionError("the engine does not come to an end")


def of(events: list[EngineEvent], kind: type[E]) -> list[E]:
    return [e for e in events if isinstance(e, kind)]


# --------------------------------------------------------------------------- closed forms


def test_one_request_takes_prefill_and_its_iterations() -> None:
    model = engine(profile=PROFILE)
    model.submit(EngineRequest("a", 1000, 5, finish_reason="stop"), 10.0)
    events = drain(model)
    first, *_ = of(events, TokensEmitted)
    assert first.at_s == pytest.approx(10.0 + PROFILE.prefill_s(1000))
    (done,) = of(events, Finished)
    wanted = sum(PROFILE.iteration_s(1, 1000 + i) for i in range(4))
    assert done.at_s - first.at_s == pytest.approx(wanted, rel=1e-9)
    assert (done.reason, done.output_tokens, done.held) == ("stop", 5, False)
    assert done.queue_s == 0.0
    assert done.prefill_s == pytest.approx(PROFILE.prefill_s(1000))


def test_prompts_queue_as_in_m_d_1() -> None:
    """First come first served with a constant service time: the closed form of each wait."""
    model = engine(profile=PROFILE, prefix_caching=False)
    service_s = PROFILE.prefill_s(1000)
    arrivals = [0.0, 0.3 * service_s, 0.5 * service_s, 2.0 * service_s, 7.0 * service_s]
    free_s, wanted = 0.0, []
    for at in arrivals:
        free_s = max(at, free_s) + service_s
        wanted.append(free_s)
    got: list[float] = []
    for i, at in enumerate(arrivals):
        got += [e.at_s for e in of(model.advance(at), PrefillDone)]
        model.submit(EngineRequest(str(i), 1000, 1, mode=RequestMode.REMOTE_DECODE), at)
    got += [e.at_s for e in of(drain(model, until_s=30.0), PrefillDone)]
    assert got == pytest.approx(wanted)


def test_the_mean_wait_is_that_of_an_m_d_1_queue() -> None:
    rng, load = random.Random(7), 0.7
    service_s = PROFILE.prefill_s(1000)
    model = engine(profile=PROFILE, kv_blocks=10**6)
    now, waits = 0.0, []
    for i in range(6000):
        now += rng.expovariate(load / service_s)
        waits += [e.queue_s for e in of(model.advance(now), Finished)]
        model.submit(EngineRequest(str(i), 1000, 1), now)
    waits += [e.queue_s for e in of(drain(model), Finished)]
    theory = service_s * load / (2 * (1 - load))
    assert sum(waits) / len(waits) == pytest.approx(theory, rel=0.12)


def test_chunks_respect_the_token_budget_and_decode_goes_on_beside_them() -> None:
    model = engine(coalesce_s=0.0)
    model.submit(EngineRequest("a", 16, 100), 0.0)
    model.advance(0.1)
    model.submit(EngineRequest("b", 1200, 1), 0.1)
    events = drain(model)
    (done,) = [e for e in of(events, Finished) if e.request_id == "b"]
    beside = [e.at_s for e in of(events, TokensEmitted) if e.request_id == "a"]
    gaps = [b - a for a, b in pairwise(beside)]
    # 1200 tokens beside one decoding sequence: chunks of 511, 511 and 178.
    assert sorted(g for g in gaps if g > 0.1) == pytest.approx([0.188, 0.521, 0.521], abs=2e-3)
    assert done.at_s < beside[-1]


def test_who_comes_during_an_iteration_joins_at_its_end() -> None:
    model = engine()
    model.submit(EngineRequest("a", 100, 1), 0.0)
    assert model.next_event_s() == pytest.approx(0.1)
    model.submit(EngineRequest("b", 100, 1), 0.05)
    done = {e.request_id: e for e in of(drain(model), Finished)}
    assert done["a"].at_s == pytest.approx(0.1)
    assert done["b"].at_s == pytest.approx(0.2)
    assert done["b"].queue_s == pytest.approx(0.05)


def test_an_eager_engine_is_slower_by_its_factor() -> None:
    quick, slow = engine(), engine(iteration_factor=1.3)
    for model in (quick, slow):
        model.submit(EngineRequest("a", 100, 20), 0.0)
    (a,), (b,) = of(drain(quick), Finished), of(drain(slow), Finished)
    assert b.at_s == pytest.approx(1.3 * a.at_s)


# --------------------------------------------------------------------------- prefix cache


def test_a_repeated_prompt_hits_all_but_its_last_block() -> None:
    model = engine()
    hashes = tuple(range(1, 65))  # 64 blocks of 16 = 1024 tokens
    model.submit(EngineRequest("a", 1024, 1, block_hashes=hashes), 0.0)
    first = drain(model)
    assert [h for e in of(first, KvStored) for h in e.block_hashes] == list(hashes)
    model.submit(EngineRequest("b", 1024, 1, block_hashes=hashes), 10.0)
    (done,) = of(second := drain(model), PrefillDone)
    # One token at least must be computed, so the last block is.
    assert done.cached_tokens == 63 * 16
    assert done.at_s - 10.0 == pytest.approx(LINEAR.prefill_s(16, 63 * 16))
    assert not of(second, KvStored)
    stats = model.stats()
    assert (stats.queried_tokens_total, stats.cached_tokens_total) == (2048, 1008)
    assert (stats.kv_used_blocks, stats.kv_cached_blocks) == (0, 64)


def test_the_block_released_longest_ago_goes_first_and_tails_before_heads() -> None:
    model = engine(kv_blocks=8)
    model.submit(EngineRequest("a", 64, 1, block_hashes=(1, 2, 3, 4)), 0.0)
    drain(model)
    model.submit(EngineRequest("b", 64, 1, block_hashes=(5, 6, 7, 8)), 1.0)
    drain(model)
    model.submit(EngineRequest("c", 48, 1, block_hashes=(9, 10, 11)), 2.0)
    removed = [h for e in of(drain(model), KvRemoved) for h in e.block_hashes]
    assert removed == [4, 3, 2]


def test_generated_blocks_join_the_cache_when_their_hashes_are_known() -> None:
    model = engine()
    model.submit(EngineRequest("a", 20, 30, block_hashes=(1,), output_hashes=(2, 3)), 0.0)
    stored = [h for e in of(drain(model), KvStored) for h in e.block_hashes]
    # 20 + 29 KV tokens: the last token's KV was never computed.
    assert stored == [1, 2, 3]


def test_reset_clears_only_an_unused_cache() -> None:
    model = engine()
    model.submit(EngineRequest("a", 64, 4, block_hashes=(1, 2, 3, 4)), 0.0)
    model.advance(0.07)
    assert model.reset_prefix_cache(0.07) is False
    drain(model)
    assert model.reset_prefix_cache(5.0) is True
    assert of(model.advance(5.0), KvCleared)
    assert model.stats().kv_cached_blocks == 0


# --------------------------------------------------------------------------- hand-over


def test_a_prefill_leg_holds_its_blocks_until_they_are_read() -> None:
    model = engine()
    model.submit(EngineRequest("a", 100, 50, mode=RequestMode.REMOTE_DECODE), 0.0)
    (done,) = of(model.advance(1.0), Finished)
    assert (done.reason, done.output_tokens, done.held) == ("length", 1, True)
    assert model.stats().held == 1 and not model.is_idle()
    assert model.stats().kv_used_blocks == 7
    assert model.kv_pulled("a", 2.0)
    assert model.is_idle() and model.stats().kv_used_blocks == 0
    assert not model.kv_pulled("a", 2.0)


def test_a_hold_expires_and_an_extended_one_later() -> None:
    model = engine(hold_s=30.0)
    for name in ("a", "b"):
        model.submit(EngineRequest(name, 100, 1, mode=RequestMode.REMOTE_DECODE), 0.0)
    model.advance(1.0)
    assert model.kv_extend("b", 20.0)
    (gone,) = of(model.advance(40.0), KvExpired)
    assert gone.request_id == "a" and gone.at_s == pytest.approx(30.1)
    assert not model.kv_pulled("a", 40.0)
    (late,) = of(model.advance(60.0), KvExpired)
    assert late.request_id == "b" and late.at_s == pytest.approx(50.0)
    assert model.stats().kv_expired_total == 2 and model.is_idle()


def test_an_expiry_lets_the_queue_in() -> None:
    model = engine(kv_blocks=10, hold_s=5.0)
    model.submit(EngineRequest("a", 150, 1, mode=RequestMode.REMOTE_DECODE), 0.0)
    model.submit(EngineRequest("b", 150, 1), 0.5)
    done = {e.request_id: e for e in of(drain(model), Finished)}
    assert done["b"].at_s == pytest.approx(0.15 + 5.0 + 0.15)


def test_a_decode_leg_asks_for_its_kv_and_decodes_from_there() -> None:
    model = engine()
    request = EngineRequest("a", 100, 4, block_hashes=tuple(range(6)))
    model.submit(replace(request, mode=RequestMode.REMOTE_PREFILL), 0.0)
    (wanted,) = of(model.advance(0.0), KvWanted)
    assert (wanted.tokens, wanted.cached_tokens) == (100, 0)
    assert model.next_event_s() is None
    assert model.stats().loading == 1 and model.stats().waiting_prefill_tokens == 0
    assert model.kv_arrived("a", 0.5)
    (done,) = of(events := drain(model), Finished)
    assert sum(e.count for e in of(events, TokensEmitted)) == 4
    assert done.at_s == pytest.approx(0.5 + sum(LINEAR.iteration_s(1, 99 + i) for i in range(4)))
    assert model.stats().computed_tokens_total == 0
    # The same prompt again: only what is not cached here has to come.
    model.submit(replace(request, request_id="b", mode=RequestMode.REMOTE_PREFILL), done.at_s)
    (wanted,) = of(model.advance(done.at_s), KvWanted)
    assert (wanted.tokens, wanted.cached_tokens) == (4, 96)


@pytest.mark.parametrize("coalesce_s", [None, 0.0, 5.0])
def test_the_first_token_of_a_decode_leg_is_told_at_once(coalesce_s: float | None) -> None:
    model = engine(coalesce_s=coalesce_s)
    model.submit(EngineRequest("other", 10, 500), 0.0)
    model.submit(EngineRequest("a", 100, 400, mode=RequestMode.REMOTE_PREFILL), 0.0)
    model.advance(1.0)
    model.kv_arrived("a", 1.0)
    first = next(e for e in of(drain(model), TokensEmitted) if e.request_id == "a")
    assert first.count == 1
    assert 1.0 < first.at_s <= 1.0 + 2 * LINEAR.iteration_s(2, 700)


def test_a_failed_load_is_an_error_and_frees_its_blocks() -> None:
    model = engine()
    model.submit(EngineRequest("a", 100, 4, mode=RequestMode.REMOTE_PREFILL), 0.0)
    model.advance(0.0)
    assert model.kv_failed("a", 1.0)
    (done,) = of(model.advance(1.0), Finished)
    assert (done.reason, done.output_tokens) == ("error", 0)
    assert model.is_idle() and model.stats().kv_used_blocks == 0
    assert not model.kv_arrived("a", 1.0)


# --------------------------------------------------------------------------- preemption, limits


def test_the_youngest_yields_and_still_finishes_whole() -> None:
    model = engine(kv_blocks=12)
    model.submit(EngineRequest("old", 64, 100), 0.0)
    model.submit(EngineRequest("young", 64, 60), 0.001)
    events = drain(model)
    assert [e.request_id for e in of(events, Preempted)] == ["young"]
    for name, count in (("old", 100), ("young", 60)):
        told = sum(e.count for e in of(events, TokensEmitted) if e.request_id == name)
        assert told == count
    done = {e.request_id: e.at_s for e in of(events, Finished)}
    assert done["old"] < done["young"]


def test_a_preempted_decode_leg_is_computed_again_where_it_is() -> None:
    model = engine(kv_blocks=12)
    model.submit(EngineRequest("a", 64, 100), 0.0)
    model.submit(EngineRequest("b", 64, 60, mode=RequestMode.REMOTE_PREFILL), 0.0)
    model.advance(0.2)
    model.kv_arrived("b", 0.2)
    events = drain(model)
    assert [e.request_id for e in of(events, Preempted)] == ["b"]
    assert not of(events, KvWanted)  # its giver has freed the KV long ago
    assert {e.request_id: e.output_tokens for e in of(events, Finished)} == {"a": 100, "b": 60}


def test_the_last_sequence_yields_to_a_held_kv_and_comes_back() -> None:
    model = engine(kv_blocks=16)
    model.submit(EngineRequest("a", 100, 60), 0.0)
    model.submit(EngineRequest("held", 113, 1, mode=RequestMode.REMOTE_DECODE), 0.0)
    events = model.advance(5.0)
    assert [e.request_id for e in of(events, Preempted)] == ["a"]
    assert model.next_event_s() == pytest.approx(0.213 + 30.0, abs=0.1)
    model.kv_pulled("held", 6.0)
    (done,) = of(drain(model), Finished)
    assert (done.request_id, done.output_tokens) == ("a", 60)


def test_sequences_beyond_the_limit_wait() -> None:
    model = engine(max_num_seqs=2)
    for i in range(3):
        model.submit(EngineRequest(str(i), 10, 50), 0.0)
    model.advance(0.1)
    assert (model.stats().running, model.stats().waiting) == (2, 1)
    assert {e.request_id for e in of(drain(model), Finished)} == {"0", "1", "2"}


@pytest.mark.parametrize(
    "change, field_name",
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"output_tokens": 0}, "output_tokens"),
        ({"block_hashes": (1,)}, "block_hashes"),
        ({"output_hashes": (1,), "prompt_tokens": 100}, "output_hashes"),
        ({"prompt_tokens": 4096 * 16 + 1}, "prompt_tokens"),
        ({"request_id": "there"}, "request_id"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(change: dict[str, Any], field_name: str) -> None:
    model = engine()
    model.submit(EngineRequest("there", 10, 1), 0.0)
    with pytest.raises(InvalidField) as caught:
        model.submit(replace(EngineRequest("a", 100, 10), **change), 0.0)
    assert caught.value.field == field_name
    assert model.stats().waiting == 1


@pytest.mark.parametrize(
    "change", [{"block_size": 0}, {"kv_blocks": 0}, {"max_batch_tokens": 64, "max_num_seqs": 64}]
)
def test_an_engine_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidField):
        engine(**change)


# --------------------------------------------------------------------------- properties


@dataclass
class Life:
    """What one run of a script showed."""

    tokens: dict[str, int] = field(default_factory=dict)
    told: list[tuple[Any, ...]] = field(default_factory=list)
    stats: object = None


MODES = st.sampled_from(list(RequestMode))
STEPS = st.lists(
    st.tuples(
        st.floats(0.0, 0.4),  # pause before it
        st.integers(1, 150),  # prompt
        st.integers(1, 80),  # output
        st.integers(0, 3),  # which shared prefix
        MODES,
        st.one_of(st.none(), st.floats(0.0, 2.0)),  # abort after
        st.sampled_from(["arrives", "fails", "late"]),
    ),
    min_size=1,
    max_size=14,
)


Steps = list[tuple[float, int, int, int, RequestMode, float | None, str]]


def live(steps: Steps, *, coalesce_s: float | None, pace_s: float | None, kv_blocks: int) -> Life:
    """Run a script of requests; `pace_s` makes additional, useless calls in between."""
    model = engine(kv_blocks=kv_blocks, max_num_seqs=5, coalesce_s=coalesce_s, hold_s=3.0)
    life = Life()
    todo: list[tuple[float, int, str, str]] = []
    now = 0.0
    requests = {}
    for i, (pause, prompt, output, prefix, mode, abort, kv) in enumerate(steps):
        now += pause
        name = f"r{i}"
        full = prompt // 16
        shared = tuple(range(prefix * 1000, prefix * 1000 + min(full, 4)))
        hashes = shared + tuple(10_000 + 100 * i + j for j in range(full - len(shared)))
        requests[name] = (EngineRequest(name, prompt, output, hashes, mode), kv)
        todo.append((now, 0, "submit", name))
        if abort is not None:
            todo.append((now + abort, 1, "abort", name))
    stored: dict[int, int] = {}
    tick = 0

    def see(events: list[EngineEvent]) -> None:
        for e in events:
            if isinstance(e, TokensEmitted):
                life.tokens[e.request_id] = life.tokens.get(e.request_id, 0) + e.count
            elif isinstance(e, KvStored):
                for h in e.block_hashes:
                    assert h not in stored, "a hash is stored twice"
                    stored[h] = 1
            elif isinstance(e, KvRemoved):
                for h in e.block_hashes:
                    del stored[h]
            elif isinstance(e, KvWanted):
                after = {"arrives": 0.05, "fails": 0.05, "late": 0.7}[requests[e.request_id][1]]
                todo.append((e.at_s + after, 2, "kv", e.request_id))
            elif isinstance(e, Finished):
                if e.held:
                    todo.append((e.at_s + 0.3, 3, "pull", e.request_id))
                life.told.append((e.request_id, e.reason, e.output_tokens, e.at_s))
            elif isinstance(e, Preempted | KvExpired):
                life.told.append((type(e).__name__, e.request_id, e.at_s))
        pool = model.pool
        assert min(pool.private, pool.shared, pool.idle, pool.available) >= 0
        assert pool.private + pool.shared + pool.idle <= pool.total
        assert set(stored) == set(pool._runs.where)

    while True:
        due = min(todo, default=None)
        nxt = model.next_event_s()
        if due is None and nxt is None:
            break
        when = min(w for w in (nxt, due[0] if due else None) if w is not None)
        if pace_s is not None:
            while tick * pace_s < when:
                see(model.advance(tick * pace_s))
                model.next_event_s()
                model.stats()
                tick += 1
            due = min(todo, default=None)
            nxt = model.next_event_s()
            if due is None and nxt is None:
                break
            when = min(w for w in (nxt, due[0] if due else None) if w is not None)
        see(model.advance(when))
        while todo and min(todo)[0] <= when:
            at, _, what, name = item = min(todo)
            todo.remove(item)
            if what == "submit":
                model.submit(requests[name][0], at)
            elif what == "abort":
                model.abort(name, at)
            elif what == "pull":
                model.kv_pulled(name, at)
            elif requests[name][1] == "fails":
                model.kv_failed(name, at)
            else:
                model.kv_arrived(name, at)
            see(model.advance(at))
    assert model.is_idle()
    assert model.pool.used == 0, "blocks leaked"
    assert model.pool.private == 0
    assert model._batch.is_clean() and model.stats().waiting_prefill_tokens == 0
    life.stats = model.stats()
    return life


@settings(max_examples=150)
@given(STEPS, st.integers(16, 40))
def test_tokens_and_blocks_are_conserved_and_everything_ends(steps: Steps, kv_blocks: int) -> None:
    life = live(steps, coalesce_s=0.05, pace_s=None, kv_blocks=kv_blocks)
    ended = {row[0]: row for row in life.told if row[0].startswith("r")}
    aborted = {f"r{i}" for i, step in enumerate(steps) if step[5] is not None}
    for i, (_, _, output, _, mode, _, kv) in enumerate(steps):
        name = f"r{i}"
        if name not in ended:
            assert name in aborted
            continue
        _, reason, emitted, _ = ended[name]
        wanted = 1 if mode is RequestMode.REMOTE_DECODE else output
        if reason == "length":
            assert emitted == wanted == life.tokens[name]
        elif reason == "error":
            assert kv == "fails" and emitted == 0
        else:
            assert reason == "abort" and name in aborted
            assert life.tokens.get(name, 0) <= emitted <= wanted


@settings(max_examples=70)
@given(STEPS, st.integers(16, 40), st.sampled_from([0.003, 0.05, 0.33]))
def test_jumping_equals_stepping(steps: Steps, kv_blocks: int, pace_s: float) -> None:
    """However often and whenever one looks, the same things happen at the same instants."""
    jump = live(steps, coalesce_s=None, pace_s=None, kv_blocks=kv_blocks)
    step = live(steps, coalesce_s=0.0, pace_s=pace_s, kv_blocks=kv_blocks)
    assert sorted(jump.told, key=str) == sorted(step.told, key=str)
    assert jump.stats == step.stats


@given(STEPS)
def test_the_same_input_gives_the_same_life(steps: Steps) -> None:
    assert live(steps, coalesce_s=0.1, pace_s=None, kv_blocks=24) == live(
        steps, coalesce_s=0.1, pace_s=None, kv_blocks=24
    )


@pytest.mark.parametrize("coalesce_s", [0.0, 0.025, 0.15])
def test_groups_of_tokens_span_at_most_coalesce_s(coalesce_s: float) -> None:
    model = engine(profile=PROFILE, coalesce_s=coalesce_s)
    for i in range(8):
        model.submit(EngineRequest(str(i), 500, 200), i * 0.01)
    events = drain(model)
    for i in range(8):
        times = [e.at_s for e in of(events, TokensEmitted) if e.request_id == str(i)]
        assert sum(e.count for e in of(events, TokensEmitted) if e.request_id == str(i)) == 200
        longest_s = PROFILE.prefill_s(500) + PROFILE.iteration_s(8, 8 * 700)
        gaps = [b - a for a, b in pairwise(times)]
        assert max(gaps) <= max(coalesce_s, longest_s) + 1e-9


def test_long_decodes_are_jumped_over_quickly() -> None:
    """40,000 tokens in a handful of spans; stepping would take seconds."""
    model = engine(profile=PROFILE, kv_blocks=60_000)
    for i in range(40):
        model.submit(EngineRequest(str(i), 1000, 1000 + i), 0.0)
    begun = time.process_time()
    events = drain(model)
    assert time.process_time() - begun < 0.5
    assert sum(e.output_tokens for e in of(events, Finished)) == sum(1000 + i for i in range(40))
    assert model.stats().iterations_total > 1000
