"""The pairing brain: an exact argmin, hard constraints first, bounded waiting (R19, R20.2)."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.identity import KvFormat
from readyplane.core.profile import LinkClass
from readyplane.core.work import Slo
from readyplane.core.worker import Role
from readyplane_router.pair import (
    Ask,
    Chosen,
    PairPolicy,
    Seat,
    Shed,
    Times,
    Wait,
    decide,
    pair_terms,
    takes,
)
from readyplane_router.pair.ends import ahead_max_s
from readyplane_router.pair.explain import explain
from tests.router_world import DIGEST, KV, PROFILE, TIMES, seat

POLICY = PairPolicy(slo=Slo(2.0, 0.2), prefill_ahead_s=0.5, locality_patience_s=0.5)
# Links so slow that every term of the cost can decide.
SLOW_LINKS = replace(
    POLICY,
    network_link=LinkClass("far", 5e5, 0.05),
    local_link=LinkClass("near", 2e6, 0.01),
)
SLOWER = Times(replace(PROFILE, name="slower", slow_factor=2.0))


def ask(isl: int = 160, **changes: Any) -> Ask:
    good = Ask(isl=isl, slo=POLICY.slo, output_tokens=50.0, output_reserved=100, max_tokens=200)
    return replace(good, **changes)


def promise(to: Seat, *work_s: float, since_s: float = 0.0) -> Seat:
    for number, seconds in enumerate(work_s):
        to.works[f"{to.worker_id}-{number}"] = seconds
    to.work_s = sum(work_s)
    to.head_since_s = since_s
    return to


def chosen(verdict: object) -> tuple[str, str]:
    assert isinstance(verdict, Chosen), verdict
    return verdict.prefill.worker_id, verdict.decode.worker_id


# ------------------------------------------------------------------------- the argmin is exact


def rarely(*values: Any, else_: Any) -> st.SearchStrategy[Any]:
    return st.integers(0, 9).flatmap(
        lambda n: st.sampled_from(values) if n == 0 else st.just(else_)
    )


@st.composite
def seats(draw: st.DrawFn) -> list[Seat]:
    made = []
    for number in range(draw(st.integers(2, 7))):
        role = draw(st.sampled_from([Role.PREFILL, Role.DECODE, Role.BOTH]))
        odd = (KvFormat(DIGEST, dtype="fp16"), KvFormat(DIGEST, connector="none"))
        one = seat(
            f"w{number}",
            role,
            kv=draw(rarely(*odd, else_=KV)),
            node=draw(st.sampled_from(["n1", "n2", "n3"])),
            times=draw(st.sampled_from([TIMES, SLOWER])),
            shut=draw(rarely("draining", else_="")),
            sequences=draw(st.integers(0, 6)),
            sequences_cap=draw(rarely(4, else_=64)),
            kv_tokens=draw(st.sampled_from([0.0, 500.0, 2_000.0, 20_000.0])),
            kv_blocks=draw(rarely(5_000, 9_985, else_=0)),
            transfers=draw(st.integers(0, 3)),
            sending=draw(st.integers(0, 3)),
            decode_factor=draw(rarely(1.6, else_=1.0)),
            other_sequences=draw(st.integers(0, 2)),
            other_blocks=draw(st.sampled_from([0, 0, 200])),
            other_work_s=draw(st.sampled_from([0.0, 0.1])),
            foreign_tokens=draw(st.sampled_from([0, 200])),
            foreign_blocks=draw(st.sampled_from([0, 0, 300])),
            max_model_len=draw(rarely(300, else_=32_768)),
            prefill_factor=draw(st.sampled_from([1.0, 1.3])),
        )
        decodes = role.serves(Role.DECODE)
        one.decoding = min(one.sequences, draw(st.integers(0, 6))) if decodes else 0
        if role.serves(Role.PREFILL):
            promise(one, *draw(st.lists(st.sampled_from([0.01, 0.1, 0.3]), max_size=2)))
        made.append(one)
    return made


@st.composite
def asks(draw: st.DrawFn, of: list[Seat]) -> Ask:
    isl = draw(st.integers(1, 400))
    held = {s.key: draw(st.sampled_from([0, isl, isl, draw(st.integers(0, isl))])) for s in of}
    cut = draw(rarely({of[-1].key: frozenset({of[0].key, of[1].key})}, else_={}))
    return ask(
        isl,
        output_tokens=draw(st.sampled_from([1.0, 5.0, 50.0, 300.0])),
        max_tokens=draw(st.sampled_from([None, 50, 200])),
        cached_tokens={key: tokens for key, tokens in held.items() if tokens},
        waited_s=draw(st.sampled_from([0.0, 0.5, 3.0])),
        held_s=draw(st.sampled_from([0.0, 0.5])),
        behind=draw(st.sampled_from([0.0, 2.5])),
        cut=cut,
        avoid=frozenset(draw(rarely({of[0].worker_id}, else_=set()))),
    )


def usable(what: Ask, one: Seat) -> bool:
    """The hard constraints of one end."""
    if one.shut or one.worker_id in what.avoid:
        return False
    if what.isl + (what.max_tokens or 1) > one.max_model_len:
        return False
    return one.occupied() < one.sequences_cap


def is_free(what: Ask, p: Seat, now_s: float) -> bool:
    """Whether a prefill worker has little enough work for anybody."""
    fits = usable(what, p) and what.isl <= p.free_blocks() * p.block_size
    return fits and p.remaining_s(now_s) <= SLOW_LINKS.prefill_ahead_s


def fits(what: Ask, p: Seat, d: Seat, now_s: float, prefills: list[Seat]) -> bool:
    """The hard constraints, spelt out pair by pair."""
    if not (usable(what, p) and usable(what, d)):
        return False
    if p is not d and (p.kv != d.kv or p.kv.connector == "none"):
        return False
    if p is not d and p.key in what.cut.get(d.key, ()):
        return False
    if p is d and not p.role.serves(Role.PREFILL):  # it needs nobody, and what is left is no prompt
        held = what.cached_tokens.get(d.key, 0)
        whole = (what.isl - 1) // d.block_size * d.block_size
        return 0 < whole <= held and takes(what, d, SLOW_LINKS)
    somebody_free = any(is_free(what, one, now_s) for one in prefills)
    most_s = ahead_max_s(what, p, SLOW_LINKS) if somebody_free else SLOW_LINKS.prefill_ahead_s
    if p.remaining_s(now_s) > most_s:
        return False
    if what.isl > p.free_blocks() * p.block_size:
        return False
    return takes(what, d, SLOW_LINKS)


@settings(max_examples=250)
@given(st.data())
def test_the_choice_is_the_cheapest_of_all_pairs(data: st.DataObject) -> None:
    of = data.draw(seats())
    what = data.draw(asks(of))
    now_s = data.draw(st.floats(0, 0.3))
    prefills = [s for s in of if s.role.serves(Role.PREFILL)]
    decodes = [s for s in of if s.role.serves(Role.DECODE)]
    couples = [(p, d) for p in prefills for d in decodes]
    couples += [(d, d) for d in decodes if d not in prefills]
    costs = {
        (p.worker_id, d.worker_id): pair_terms(what, p, d, SLOW_LINKS, now_s=now_s).cost_s
        for p, d in couples
        if fits(what, p, d, now_s, prefills)
    }
    verdict = decide(what, prefills, decodes, SLOW_LINKS, now_s=now_s)
    if isinstance(verdict, Chosen):
        pair = chosen(verdict)
        assert pair in costs
        assert costs[pair] == pytest.approx(min(costs.values()), abs=5e-5)
        assert verdict.terms.cost_s == pytest.approx(costs[pair])
        assert math.isfinite(verdict.terms.ttft_s) and verdict.terms.ttft_s > 0
        assert verdict.local is (pair[0] == pair[1])
    elif isinstance(verdict, Wait) and verdict.regime == "locality":
        assert costs and what.held_s < SLOW_LINKS.locality_patience_s
    else:
        assert not costs


@settings(max_examples=30)
@given(st.data())
def test_the_explanation_names_the_same_winner(data: st.DataObject) -> None:
    of = data.draw(seats())
    what = replace(data.draw(asks(of)), held_s=9.0)  # past any patience
    prefills = [s for s in of if s.role.serves(Role.PREFILL)]
    decodes = [s for s in of if s.role.serves(Role.DECODE)]
    told = explain(what, prefills, decodes, SLOW_LINKS, now_s=0.0)
    verdict = decide(what, prefills, decodes, SLOW_LINKS, now_s=0.0)
    if isinstance(verdict, Chosen):
        best = told["pairs"][0]["terms"]["cost_s"]
        assert best == pytest.approx(verdict.terms.cost_s, abs=5e-5)
    else:
        assert told["candidates"] == 0


@given(st.floats(0, 20_000), st.floats(0, 20_000))
def test_quick_times_are_the_profile_s_times(tokens: float, cached: float) -> None:
    assert TIMES.prefill_s(tokens, cached) == pytest.approx(PROFILE.prefill_s(tokens, cached))


# ------------------------------------------------------------------------- what decides


def test_p_goes_by_queue_and_locality_together() -> None:
    """B82: a warm worker with a long queue loses to a cold idle one; no queue and it wins."""
    warm, cold, d = seat("warm"), seat("cold"), seat("d", Role.DECODE)
    what = ask(300, cached_tokens={warm.key: 272})
    assert chosen(decide(what, [warm, cold], [d], POLICY, now_s=0.0)) == ("warm", "d")
    promise(warm, 0.45)
    assert chosen(decide(what, [warm, cold], [d], POLICY, now_s=0.0)) == ("cold", "d")


def test_work_done_since_is_no_longer_queued() -> None:
    busy, d = promise(seat("p"), 0.4, 0.2), seat("d", Role.DECODE)
    assert busy.remaining_s(0.0) == pytest.approx(0.6)
    assert busy.remaining_s(0.3) == pytest.approx(0.3)
    # An engine that stands still has not worked its queue off: no more than the oldest can be done.
    assert busy.remaining_s(99.0) == pytest.approx(0.2)
    verdict = decide(ask(), [busy], [d], POLICY, now_s=0.05)
    assert isinstance(verdict, Wait) and verdict.again_in_s == pytest.approx(0.05)
    assert isinstance(decide(ask(), [busy], [d], POLICY, now_s=0.11), Chosen)


def test_d_goes_by_the_link_to_that_p() -> None:
    slow = replace(POLICY.network_link, bandwidth_bytes_per_s=1e6)
    policy = replace(POLICY, network_link=slow)
    here, there = seat("here", Role.DECODE, node="n1"), seat("there", Role.DECODE, node="n2")
    here.sequences = here.decoding = 1
    p = seat("p", node="n1")
    assert chosen(decide(ask(), [p], [here, there], policy, now_s=0.0)) == ("p", "here")
    p.node = "n2"
    assert chosen(decide(ask(), [p], [here, there], policy, now_s=0.0)) == ("p", "there")


def test_both_ends_are_chosen_together() -> None:
    """Neither end's own best is in the best pair: the link between those two is too slow."""
    policy = replace(POLICY, network_link=replace(POLICY.network_link, bandwidth_bytes_per_s=2e5))
    p1 = promise(seat("p1", node="n1"), 0.05)
    p2 = seat("p2", node="n2")
    d1 = seat("d1", Role.DECODE, node="n1", kv_tokens=2_000.0)
    d2 = seat("d2", Role.DECODE, node="n2", shut="draining")
    d3 = seat("d3", Role.DECODE, node="n3")
    assert chosen(decide(ask(), [p1, p2], [d1, d2, d3], policy, now_s=0.0)) == ("p1", "d1")


def test_transfers_under_way_share_the_link_of_their_d() -> None:
    p, quiet, busy = seat("p"), seat("quiet", Role.DECODE), seat("busy", Role.DECODE)
    busy.transfers, quiet.sequences = 3, 1
    assert chosen(decide(ask(), [p], [quiet, busy], SLOW_LINKS, now_s=0.0)) == ("p", "quiet")
    alone = pair_terms(ask(), p, quiet, SLOW_LINKS, now_s=0.0).transfer_s
    shared = pair_terms(ask(), p, busy, SLOW_LINKS, now_s=0.0).transfer_s
    assert shared - 0.01 == pytest.approx(4 * (alone - 0.01))


def test_the_slow_down_of_others_decides_between_equal_iterations() -> None:
    """Ten short sequences or one long: the same iteration, but ten are slowed down or one."""
    p, many, one = seat("p"), seat("many", Role.DECODE), seat("one", Role.DECODE)
    many.sequences, one.sequences, one.kv_tokens = 10, 1, 9_000.0
    tpots = [pair_terms(ask(), p, d, POLICY, now_s=0.0).tpot_s for d in (many, one)]
    assert tpots[0] == pytest.approx(tpots[1])
    assert chosen(decide(ask(), [p], [many, one], POLICY, now_s=0.0)) == ("p", "one")


def test_kv_that_others_hold_slows_an_iteration_too() -> None:
    for field in ("other_blocks", "foreign_blocks"):
        p, full, free = seat("p"), seat("full", Role.DECODE), seat("free", Role.DECODE)
        setattr(full, field, 2_000)
        free.last_used = 9
        assert chosen(decide(ask(), [p], [full, free], POLICY, now_s=0.0)) == ("p", "free")


def test_a_decode_end_that_is_also_prefilling_answers_later() -> None:
    p, both, d = seat("p"), seat("both", Role.BOTH), seat("d", Role.DECODE)
    promise(both, 5.0)
    d.last_used = 9
    assert chosen(decide(ask(), [p], [both, d], POLICY, now_s=0.0)) == ("p", "d")


def test_a_prefill_worker_without_room_for_the_prompt_s_kv_is_not_used() -> None:
    full, other, d = seat("full", kv_blocks=9_991), seat("other"), seat("d", Role.DECODE)
    other.last_used = 9
    assert chosen(decide(ask(), [full, other], [d], POLICY, now_s=0.0)) == ("other", "d")


def test_kv_that_d_holds_need_not_be_moved() -> None:
    policy = replace(POLICY, network_link=replace(POLICY.network_link, bandwidth_bytes_per_s=1e6))
    p = seat("p", node="n0")
    has, has_not = seat("has", Role.DECODE), seat("hasnot", Role.DECODE)
    has.sequences = 1
    what = ask(320, cached_tokens={has.key: 288})
    assert chosen(decide(what, [p], [has, has_not], policy, now_s=0.0)) == ("p", "has")


def test_a_worker_of_both_stages_is_a_candidate_with_itself() -> None:
    both, d = seat("both", Role.BOTH), seat("d", Role.DECODE)
    verdict = decide(ask(), [both], [both, d], POLICY, now_s=0.0)
    assert isinstance(verdict, Chosen)
    assert verdict.local and verdict.terms.transfer_s == 0.0 and verdict.prefill_blocks == 0
    both.sequences = both.decoding = 40
    assert chosen(decide(ask(), [both], [both, d], POLICY, now_s=0.0)) == ("both", "d")


def test_prefill_on_a_decoding_worker_pays_for_those_it_stalls() -> None:
    both, p, d = seat("both", Role.BOTH), seat("p"), seat("d", Role.DECODE)
    both.sequences = both.decoding = 3
    assert chosen(decide(ask(), [both, p], [both, d], POLICY, now_s=0.0)) == ("p", "d")
    stalled = pair_terms(ask(), both, d, POLICY, now_s=0.0)
    assert stalled.stall_s == pytest.approx(3 * stalled.prefill_s)


def test_ties_go_to_the_least_recently_used() -> None:
    """B87: paced requests that never overlap spread over equal workers."""
    ps = [seat("p1"), seat("p2")]
    ds = [seat("d1", Role.DECODE), seat("d2", Role.DECODE)]
    picks: dict[str, int] = {}
    for number in range(1, 101):
        verdict = decide(ask(), ps, ds, POLICY, now_s=0.0)
        assert isinstance(verdict, Chosen)
        for end in (verdict.prefill, verdict.decode):
            end.last_used = number
            picks[end.worker_id] = picks.get(end.worker_id, 0) + 1
    assert set(picks.values()) == {50}


# ------------------------------------------------------------------------- hard constraints


@pytest.mark.parametrize("field", [f.name for f in fields(KvFormat)])
def test_workers_of_different_kv_formats_are_never_paired(field: str) -> None:
    """B69, one field at a time; the reason names it."""
    other: Any = 32 if field in ("block_size", "tp") else "other"
    odd = replace(KV, **{field: other})
    p, d = seat("p"), seat("d", Role.DECODE, kv=odd)
    verdict = decide(ask(), [p], [d], POLICY, now_s=0.0)
    assert isinstance(verdict, Shed) and verdict.kind == "incompatible"
    assert f"{field}: " in verdict.reason and "p and d differ" in verdict.reason
    good = seat("good", Role.DECODE, sequences=30)
    assert chosen(decide(ask(), [p], [d, good], POLICY, now_s=0.0)) == ("p", "good")


def test_without_a_connector_only_a_worker_with_itself() -> None:
    alone = KvFormat(DIGEST, connector="none")
    b1, b2 = seat("b1", Role.BOTH, kv=alone), seat("b2", Role.BOTH, kv=alone)
    promise(b1, 0.3)
    assert chosen(decide(ask(), [b1, b2], [b1, b2], POLICY, now_s=0.0)) == ("b2", "b2")
    b2.shut = "draining"
    assert chosen(decide(ask(), [b1, b2], [b1, b2], POLICY, now_s=0.0)) == ("b1", "b1")


@pytest.mark.parametrize(
    ("changes", "regime"),
    [
        ({"kv_blocks": 9_990}, "busy"),
        ({"other_blocks": 9_990}, "busy"),
        ({"foreign_blocks": 9_990}, "busy"),
        ({"sequences": 64}, "busy"),
        ({"foreign_sequences": 64}, "busy"),
        ({"sequences_cap": 0}, "busy"),
        ({"kv_tokens": 400_000.0, "sequences": 1}, "busy"),
        ({"shut": "draining"}, "empty"),
    ],
)
def test_a_decode_worker_without_room_is_waited_for(changes: dict[str, Any], regime: str) -> None:
    d = seat("d", Role.DECODE, **changes)
    verdict = decide(ask(), [seat("p")], [d], POLICY, now_s=0.0)
    assert isinstance(verdict, Wait) and verdict.regime == regime


def test_too_long_and_too_large_are_refused_at_once() -> None:
    p, d = seat("p", max_model_len=300), seat("d", Role.DECODE, max_model_len=300)
    verdict = decide(ask(200, max_tokens=101), [p], [d], POLICY, now_s=0.0)
    assert isinstance(verdict, Shed) and verdict.kind == "too_long"
    assert isinstance(decide(ask(200, max_tokens=100), [p], [d], POLICY, now_s=0.0), Chosen)
    small = seat("d", Role.DECODE, kv_total_blocks=10)
    verdict = decide(ask(160), [seat("p")], [small], POLICY, now_s=0.0)
    assert isinstance(verdict, Shed) and verdict.kind == "too_large"


def test_an_open_circuit_of_a_whole_stage_refuses_at_once_and_sends_nothing_to_the_other() -> None:
    """B68."""
    p, d = seat("p", shut="circuit open"), seat("d", Role.DECODE)
    verdict = decide(ask(), [p], [d], POLICY, now_s=0.0)
    assert isinstance(verdict, Shed) and verdict.kind == "broken"


def test_strict_disaggregation_never_falls_back_to_local_prefill() -> None:
    """B73: a decode worker is no prefill worker; only a worker of both stages is."""
    verdict = decide(ask(), [], [seat("d", Role.DECODE)], POLICY, now_s=0.0)
    assert isinstance(verdict, Wait) and verdict.reason == "no ready prefill worker"


def test_a_target_nobody_can_meet_does_not_starve() -> None:
    """B30: TPOT below what an empty worker can do is served best, not refused for ever."""
    what = ask(slo=Slo(2.0, 0.001))
    d = seat("d", Role.DECODE)
    assert isinstance(decide(what, [seat("p")], [d], POLICY, now_s=0.0), Chosen)


# ------------------------------------------------------------------------- bounded waiting


def test_what_a_cache_saves_may_be_waited_for_at_its_worker() -> None:
    """Half a second of work is enough for anybody else: it could go to capacity that arrives."""
    warm, cold, d = promise(seat("warm"), 0.7), seat("cold"), seat("d", Role.DECODE)
    what = ask(1600, cached_tokens={warm.key: 1584}, max_tokens=100)
    assert chosen(decide(what, [warm, cold], [d], POLICY, now_s=0.0)) == ("warm", "d")
    assert chosen(decide(ask(1600), [warm, cold], [d], POLICY, now_s=0.0)) == ("cold", "d")
    assert isinstance(decide(ask(1600), [warm], [d], POLICY, now_s=0.0), Wait)


def test_a_second_of_prefill_counts_for_everybody_who_waits() -> None:
    """Alone it goes where it is done first; before a queue it goes where it costs the pool least."""
    warm, cold, d = promise(seat("warm"), 0.4), seat("cold"), seat("d", Role.DECODE)
    what = ask(300, cached_tokens={warm.key: 160})
    assert chosen(decide(what, [warm, cold], [d], POLICY, now_s=0.0)) == ("cold", "d")
    crowded = replace(what, behind=4.0)
    assert chosen(decide(crowded, [warm, cold], [d], POLICY, now_s=0.0)) == ("warm", "d")
    assert pair_terms(crowded, warm, d, POLICY, now_s=0.0).crowding_s == pytest.approx(4 * 0.14)


def test_a_decode_worker_that_holds_the_whole_prompt_serves_it_alone() -> None:
    p, d, other = seat("p"), seat("d", Role.DECODE, sequences=1), seat("other", Role.DECODE)
    d.decoding = 1
    for isl, held, alone in ((321, 320, True), (320, 304, True), (321, 304, False), (9, 0, False)):
        what = ask(isl, cached_tokens={d.key: held})
        verdict = decide(what, [p], [d, other], POLICY, now_s=0.0)
        assert isinstance(verdict, Chosen)
        assert (verdict.local, verdict.prefill_blocks == 0) == (alone, alone), isl
    what = ask(321, cached_tokens={d.key: 320})
    # No prefill worker, or none that takes it: it needs none.
    assert chosen(decide(what, [], [d], POLICY, now_s=0.0)) == ("d", "d")
    assert chosen(decide(what, [promise(seat("p"), 9.0)], [d], POLICY, now_s=0.0)) == ("d", "d")
    # Whom it would stall is charged, and a policy may forbid it.
    d.sequences = d.decoding = 30
    assert chosen(decide(what, [p], [d, other], POLICY, now_s=0.0)) == ("p", "other")
    never = replace(POLICY, skip_prefill=False)
    assert isinstance(decide(what, [], [d], never, now_s=0.0), Wait)


def test_a_link_is_shared_with_what_its_prefill_worker_sends() -> None:
    quiet, busy, d = seat("quiet", node="n9"), seat("busy", node="n9"), seat("d", Role.DECODE)
    busy.sending, quiet.last_used = 3, 9
    assert chosen(decide(ask(), [quiet, busy], [d], SLOW_LINKS, now_s=0.0)) == ("quiet", "d")
    shared = pair_terms(ask(), busy, d, SLOW_LINKS, now_s=0.0).transfer_s
    alone = pair_terms(ask(), quiet, d, SLOW_LINKS, now_s=0.0).transfer_s
    assert shared - 0.05 == pytest.approx(4 * (alone - 0.05))


def test_locality_holds_a_request_no_longer_than_patience() -> None:
    warm, cold, d = promise(seat("warm"), 0.7), seat("cold", times=SLOWER), seat("d", Role.DECODE)
    what = ask(1600, max_tokens=100)
    verdict = decide(what, [warm, cold], [d], POLICY, now_s=0.0)
    assert isinstance(verdict, Wait) and verdict.regime == "locality"
    assert verdict.again_in_s == pytest.approx(0.2)
    late = replace(what, held_s=0.5)
    assert chosen(decide(late, [warm, cold], [d], POLICY, now_s=0.0)) == ("cold", "d")


def test_one_hot_worker_does_not_end_locality_elsewhere() -> None:
    """B88."""
    hot, warm, d = promise(seat("hot"), 5.0), seat("warm"), seat("d", Role.DECODE)
    what = ask(300, cached_tokens={warm.key: 288})
    assert chosen(decide(what, [hot, warm, seat("cold")], [d], POLICY, now_s=0.0)) == ("warm", "d")


@pytest.mark.parametrize(("regime", "kind"), [("empty", "empty"), ("busy", "overloaded")])
def test_waiting_ends_with_a_typed_refusal_of_its_own_regime(regime: str, kind: str) -> None:
    """B90: an empty pool and a saturated one have bounds of their own."""
    policy = replace(POLICY, empty_wait_max_s=30.0, wait_max_s=5.0)
    bound_s = 30.0 if regime == "empty" else 5.0
    ps = [] if regime == "empty" else [promise(seat("p"), 9.0)]
    ds = [seat("d", Role.DECODE)]
    waiting = decide(ask(regime_s=bound_s - 0.1), ps, ds, policy, now_s=0.0)
    assert isinstance(waiting, Wait) and waiting.regime == regime
    assert waiting.again_in_s is not None and waiting.again_in_s <= 0.1 + 1e-9
    over = decide(ask(regime_s=bound_s), ps, ds, policy, now_s=0.0)
    assert isinstance(over, Shed) and over.kind == kind


def test_avoided_workers_are_not_used_and_said_to_be_the_reason() -> None:
    p, d = seat("p"), seat("d", Role.DECODE)
    verdict = decide(ask(avoid=frozenset({"p"})), [p], [d], POLICY, now_s=0.0)
    assert isinstance(verdict, Wait) and "avoided" in verdict.reason


def test_the_explanation_says_who_is_out_and_why() -> None:
    ps = [seat("p"), seat("full", sequences=64), promise(seat("busy"), 2.0)]
    ds = [
        seat("d", Role.DECODE),
        seat("gone", Role.DECODE, shut="draining"),
        seat("odd", Role.DECODE, kv=replace(KV, dtype="fp16")),
        seat("slow", Role.DECODE, sequences=1, kv_tokens=400_000.0),
    ]
    told = explain(ask(), ps, ds, POLICY, now_s=0.0)
    assert [(p["prefill"], p["decode"]) for p in told["pairs"]] == [("p", "d")]
    assert set(told["pairs"][0]["terms"]) >= {"queue_s", "prefill_s", "transfer_s", "cost_s"}
    out = told["excluded"]
    assert out["prefill:full"] == "64 of 64 sequences"
    assert out["prefill:busy"].startswith("2.000 s of prefill work promised")
    assert out["decode:gone"] == "draining"
    assert "dtype: fp8_e4m3 != fp16" in out["p+odd"]
    assert out["decode:slow"].startswith("TPOT would pass")


# ------------------------------------------------------------------- a lent worker is not waited for


def test_nobody_waits_for_a_decode_worker_beside_a_free_prefill_worker() -> None:
    """What the others lose by a prompt is nothing on one that is lent; a free one costs them none.

    With a long queue behind it, waiting for the decode worker looked cheaper for every request, and
    the queue crept beside idle prefill workers until each of them had waited its bound.
    """
    free = seat("p", Role.PREFILL)
    lent = seat("d", Role.BOTH, lent=True, sequences=20)
    lent.decoding = 20
    promise(lent, 0.6)
    for behind in (0.0, 4.0, 400.0):
        made = decide(ask(behind=behind), [free, lent], [lent], POLICY, now_s=0.0)
        assert chosen(made) == ("p", "d")
