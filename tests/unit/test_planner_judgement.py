"""Whether a decision was worth it: told once, from the journal alone, by whoever leads then."""

from typing import Any

import pytest

from readyplane_planner.journal import MemoryJournal, Outcome, Record
from readyplane_planner.judgement import due_after_s, judge, to_judge
from readyplane_planner.outcomes import Judge

T = 100.0
BEGUN_S = 1_000_000.0


def pool(load: float | None = 0.5) -> dict[str, Any]:
    t_ready = {"p50_s": T, "p90_s": 1.5 * T, "p99_s": 2 * T, "count": 5, "age_s": 0.0}
    return {"load": {"value": load}, "t_ready": t_ready}


def record(after_s: float = 0.0, *, load: float | None = 0.5, **document: Any) -> Record:
    name = f"d{after_s:g}"
    return Record(
        name,
        "m",
        BEGUN_S + after_s,
        changed=bool(document),
        summary=name,
        policy_version=1,
        document={"prefill": pool(load), "decode": pool(), "totals": None, **document},
        sequence=int(after_s) + 1000,
    )


def order(worker_id: str = "p-1", name: str = "prefill") -> dict[str, Any]:
    return {"worker_id": worker_id, "pool": name}


def told(kind: str, after_s: float, worker_id: str = "p-1", **document: Any) -> Outcome:
    return Outcome("d0", worker_id, kind, BEGUN_S + after_s, document)


STARTED = record(load=1.4, orders=[order()])
DRAINED = record(drains=[{"worker_id": "p-1", "pool": "prefill", "why": "idle"}])
READY = told("ready", 90.0)


@pytest.mark.parametrize(
    ("outcomes", "after", "now_s", "worth", "why"),
    [
        ([READY], [], 300.0, True, "p-1 served for 210 s or longer"),
        ([READY], [], 150.0, None, ""),
        (
            [READY],
            [record(120.0, drains=[order()])],
            300.0,
            False,
            "p-1 served for 30 s and took 100 s to come",
        ),
        ([READY, told("left", 120.0)], [], 300.0, False, "p-1 served for 30 s and took 100 s"),
        ([told("failed", 20.0, note="exit code 1")], [], 300.0, False, "p-1 failed: exit code 1"),
        ([told("refused", 1.0, note="no quota")], [], 300.0, False, "p-1 refused: no quota"),
        ([], [record(50.0, releases=[order()])], 300.0, False, "given up before it served"),
        ([], [], 300.0, None, ""),
        ([], [], 10_000.0, None, "p-1 is not known to have served"),
        (
            [told("refused", 1.0, note="advisory: this planner orders nothing")],
            [],
            300.0,
            None,
            "p-1 was advice: nobody ordered it",
        ),
    ],
)
def test_a_start_pays_when_its_worker_serves_for_one_t_ready(
    outcomes: list[Outcome], after: list[Record], now_s: float, worth: bool | None, why: str
) -> None:
    found = judge(STARTED, outcomes, [], after, now_s=BEGUN_S + now_s)
    if not why:
        assert found is None, "it may yet turn out either way"
        return
    assert found is not None
    assert found["worth"] is worth
    assert why in found["why"]


@pytest.mark.parametrize(
    ("after", "now_s", "worth", "why"),
    [
        ([record(50.0)], 300.0, True, "was not missed within 100 s"),
        ([], 90.0, None, ""),
        ([record(60.0, orders=[order("p-2")])], 300.0, False, "another one was ordered 60 s later"),
        ([record(60.0, orders=[order("d-2", "decode")])], 300.0, True, "was not missed"),
        ([record(150.0, orders=[order("p-2")])], 300.0, True, "was not missed"),
        ([record(40.0, load=1.3)], 300.0, False, "the load reached 1.30 after 40 s"),
        (
            [
                record(
                    40.0,
                    orders=[order("p-2")],
                    reasons=[{"code": "rollout", "pool": "prefill", "text": ""}],
                )
            ],
            300.0,
            True,
            "was not missed",
        ),
    ],
)
def test_a_drain_was_right_when_nobody_was_missed(
    after: list[Record], now_s: float, worth: bool | None, why: str
) -> None:
    outcomes = [told("draining", 0.5), told("drained", 30.0)]
    found = judge(DRAINED, outcomes, [], after, now_s=BEGUN_S + now_s)
    if not why:
        assert found is None
        return
    assert found is not None
    assert found["worth"] is worth
    assert why in found["why"]


@pytest.mark.parametrize(
    ("outcomes", "after", "now_s", "worth", "why"),
    [
        ([told("activated", 0.7)], [], 300.0, True, "activated and stayed"),
        ([told("activated", 0.7)], [], 30.0, None, ""),
        ([], [], 30.0, None, ""),
        ([told("activate_failed", 0.7, note="lease ended")], [], 300.0, False, "lease ended"),
        (
            [told("activated", 0.7)],
            [record(20.0, flips=[{"worker_id": "p-1", "pool": "prefill", "to": "decode"}])],
            300.0,
            False,
            "activated and went after 19 s",
        ),
    ],
)
def test_a_standby_that_is_told_to_serve_shall_stay(
    outcomes: list[Outcome], after: list[Record], now_s: float, worth: bool | None, why: str
) -> None:
    woken = record(activations=[order()])
    assert to_judge(woken.document)
    found = judge(woken, outcomes, [], after, now_s=BEGUN_S + now_s)
    if not why:
        assert found is None
        return
    assert found is not None
    assert found["worth"] is worth and why in found["why"]


def test_a_standby_is_not_judged_by_what_it_serves() -> None:
    found = judge(STARTED, [told("stood_by", 90.0)], [], [], now_s=BEGUN_S + 300.0)
    assert found is not None and found["worth"] is None and "stands by" in found["why"]


def test_one_bad_start_makes_a_decision_bad_and_an_unknown_one_leaves_it_open() -> None:
    both = record(orders=[order("p-1"), order("p-2")])
    good, bad = told("ready", 90.0), told("failed", 9.0, "p-2", note="x")
    found = judge(both, [good, bad], [], [], now_s=BEGUN_S + 300.0)
    assert found is not None and found["worth"] is False
    assert [w["worth"] for w in found["workers"]] == [True, False]
    assert found["ready_s"] == {"p-1": 90.0}
    found = judge(both, [good], [], [], now_s=BEGUN_S + 10_000.0)
    assert found is not None and found["worth"] is None


def totals(ended: int, attained: int, router: str = "r1") -> dict[str, Any]:
    return {
        "router": router,
        "arrivals": ended,
        "finished": ended - 1,
        "refused": 1,
        "aborted": 0,
        "attained": attained,
    }


def test_the_effect_is_measured_over_one_t_ready_on_both_sides() -> None:
    before = [record(-10.0, load=1.2), record(-90.0, load=1.0, totals=totals(100, 90))]
    begun = record(load=1.4, orders=[order()], totals=totals(200, 140))
    after = [
        record(50.0, load=1.6, totals=totals(230, 150)),
        record(100.0, load=0.8, totals=totals(300, 240)),
        record(180.0, load=0.6, totals=totals(400, 338)),
        record(900.0, load=9.0, totals=totals(900, 338)),
    ]
    found = judge(begun, [READY], before, after, now_s=BEGUN_S + 400.0)
    assert found is not None
    assert found["window_s"] == T
    assert found["load"]["prefill"] == {
        "before": pytest.approx((1.0 + 1.2 + 1.4) / 3),
        "after": pytest.approx(0.7),
    }
    assert found["attainment"] == {"before": pytest.approx(0.5), "after": pytest.approx(0.98)}


def test_what_is_not_known_of_the_effect_stays_unknown() -> None:
    """A router that began anew counts from zero: no attainment can be made of that."""
    begun = record(load=None, orders=[order()], totals=totals(200, 140))
    after = [record(100.0, load=None, totals=totals(10, 9, "r2")), record(150.0, load=None)]
    found = judge(begun, [READY], [], after, now_s=BEGUN_S + 400.0)
    assert found is not None
    assert found["load"]["prefill"] == {"before": None, "after": None}
    assert found["attainment"] == {"before": None, "after": None}


def test_only_what_can_turn_out_well_or_badly_is_judged() -> None:
    tidied = record(releases=[{"worker_id": "p-1", "pool": "prefill", "why": "orphan: it served"}])
    cancelled = {"worker_id": "p-1", "pool": "prefill", "why": "cancelled after 3.0 s: not needed"}
    assert not to_judge(record().document) and not to_judge(tidied.document)
    assert to_judge(record(releases=[cancelled]).document)
    assert due_after_s(STARTED.document) == 2 * T


async def test_it_is_written_once_and_a_successor_goes_on() -> None:
    """A later process neither repeats a judgement nor changes it, and judges what was left."""
    journal = MemoryJournal()
    await journal.append(STARTED)
    await journal.attach([READY])
    first = Judge()
    first.expect(STARTED)
    assert await first.look(journal, wall_s=BEGUN_S + 150.0) is None, "not due yet"
    successor = Judge()
    await successor.begin(journal, "m")
    told_once = await successor.look(journal, wall_s=BEGUN_S + 300.0)
    assert told_once is not None and (told_once.subject, told_once.kind) == ("", "judged")
    await journal.attach([told_once])
    assert await successor.look(journal, wall_s=BEGUN_S + 900.0) is None
    late = await first.look(journal, wall_s=BEGUN_S + 5000.0)
    assert late is not None and late.document != told_once.document
    await journal.attach([late])
    assert (await journal.get("d0"))[1] == [READY, told_once], "the first telling stays"
    third = Judge()
    await third.begin(journal, "m")
    assert await third.look(journal, wall_s=BEGUN_S + 9000.0) is None


async def test_a_decision_that_cannot_be_judged_yet_lets_others_go_first() -> None:
    journal = MemoryJournal()
    judge_ = Judge()
    later = record(1.0, drains=[order("p-9")])
    for each in (STARTED, later):
        await journal.append(each)
        judge_.expect(each)
    assert await judge_.look(journal, wall_s=BEGUN_S + 210.0) is None, "the start is still open"
    found = await judge_.look(journal, wall_s=BEGUN_S + 211.0)
    assert found is not None and found.decision_id == "d1"
