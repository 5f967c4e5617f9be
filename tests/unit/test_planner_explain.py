"""The timeline of a decision: five services in one order, and what nobody told is said to be so."""

from typing import Any

import pytest

from readyplane_planner.explain import explanation
from readyplane_planner.journal import Outcome, Record
from tests.unit.planner_world import HandClock, World, planner

BEGUN_S = 1_000_000.0
START = {
    "wall_s": 9.0,
    "segments": [
        {"name": "schedule", "start_s": 0.0, "end_s": 2.0, "modelled": False, "detail": ""},
        {
            "name": "weight_transfer",
            "start_s": 2.0,
            "end_s": 8.0,
            "modelled": True,
            "detail": "from p-0",
        },
    ],
    "exclusive_s": {"schedule": 2.0, "weight_transfer": 6.0},
    "unexplained_s": 1.0,
    "dominant_segment": "weight_transfer",
    "blocking_segment": None,
    "log_tail": "",
}
CHECKS = [
    {"name": "identity", "passed": True, "reason": ""},
    {"name": "canary", "passed": True, "reason": ""},
]


def record(**document: Any) -> Record:
    return Record(
        "d0",
        "m",
        BEGUN_S,
        changed=True,
        summary="prefill 1 → 2",
        policy_version=1,
        document={"reasons": [], **document},
    )


ORDERED = record(orders=[{"worker_id": "p-1", "pool": "prefill"}])


def told(kind: str, after_s: float, worker_id: str = "p-1", **document: Any) -> Outcome:
    return Outcome("d0", worker_id, kind, BEGUN_S + after_s, document)


WHOLE = [
    told("ordered", 1.0),
    told("allocated", 0.5, node="n7", note="as wanted"),
    told("running", 2.5),
    told("provisioned", 3.0),
    told("ready", 11.0, start=START, checks=CHECKS, ready_ago_s=1.5, tier="L0"),
    told("first_request", 12.0),
]


def lines(outcomes: list[Outcome], **live: dict[str, Any]) -> list[tuple[Any, str, str]]:
    found = explanation(ORDERED, outcomes, live)["timeline"]
    return [(m["after_s"], m["who"], m["what"]) for m in found]


def test_five_services_in_one_order() -> None:
    assert lines(WHOLE) == [
        (0.0, "planner", "decided"),
        (0.5, "actuator", "order accepted"),
        (0.5, "actuator", "allocated"),
        (0.5, "agent", "schedule"),
        (2.5, "actuator", "process runs"),
        (2.5, "agent", "weight_transfer"),
        (3.0, "router", "lease granted"),
        (9.5, "gate", "admitted"),
        (9.5, "router", "registered, routable"),
        (12.0, "router", "first request"),
    ]
    text = explanation(ORDERED, WHOLE, {})["text"]
    assert "2.5 s  agent     p-1 weight_transfer took 6.00 s (from p-0, modelled)" in text
    assert "9.5 s  gate      p-1 admitted (2 checks passed)" in text


def test_a_worker_that_is_gone_is_told_from_the_journal_alone() -> None:
    gone = [*WHOLE, told("left", 500.0), told("released", 501.0)]
    assert lines(gone)[-2:] == [(500.0, "router", "gone"), (501.0, "actuator", "given back")]


def test_what_nobody_told_is_said_to_be_unknown() -> None:
    found = explanation(ORDERED, [told("ready", 11.0)], {})["timeline"]
    unknown = {m["what"]: m["note"] for m in found if m["after_s"] is None}
    assert set(unknown) == {
        "order accepted",
        "allocated",
        "process runs",
        "start",
        "lease granted",
        "first request",
    }
    assert all(note.startswith("not known: ") for note in unknown.values())
    gate = next(m for m in found if m["who"] == "gate")
    assert "its checks were not kept" in gate["note"]


def test_a_start_under_way_shows_how_far_it_is() -> None:
    segments = [{**START["segments"][0]}, {**START["segments"][1], "end_s": None}]  # type: ignore[index]
    row = {"state": "provisioned", "start": {**START, "segments": segments}, "checks": []}
    found = lines(WHOLE[:4], **{"p-1": row})
    assert (2.5, "agent", "weight_transfer") in found
    assert found[-1] == (None, "router", "registered")
    text = explanation(ORDERED, WHOLE[:4], {"p-1": row})["text"]
    assert "under way" in text and "it is provisioned now" in text
    assert "outcome: not judged yet" in text


def test_a_gate_that_refuses_says_which_check() -> None:
    checks = [*CHECKS, {"name": "kv_format", "passed": False, "reason": "dtype differs"}]
    row = {"state": "provisioned", "start": START, "checks": checks}
    found = explanation(ORDERED, WHOLE[:4], {"p-1": row})["timeline"]
    assert next(m["note"] for m in found if m["who"] == "gate") == "kv_format: dtype differs"


def test_a_failed_start_says_where_it_ended_and_why() -> None:
    start = {**START, "failure": "the canary was wrong", "ended_in": "canary"}
    more: dict[str, Any] = {"worker_class": "h200", "mode": "aot", "checks": []}
    lost = told("failed", 8.0, note="exit code 3", start=start, **more)
    (found,) = explanation(ORDERED, [*WHOLE[:3], lost], {})["starts"]
    assert (found["status"], found["ended_in"]) == ("failed", "canary")
    assert found["failure"] == "the canary was wrong"
    assert (found["worker_class"], found["mode"]) == ("h200", "aot")
    (fine,) = explanation(ORDERED, WHOLE, {})["starts"]
    assert fine["ended_in"] is None


def test_a_standby_that_passed_the_gate_has_started_and_one_with_a_process_has_not() -> None:
    proved = told("stood_by", 8.0, start=START, worker_class="h200", holds="weights", tier="L2")
    (found,) = explanation(ORDERED, [*WHOLE[:3], proved, told("failed", 90.0)], {})["starts"]
    assert (found["status"], found["wall_s"]) == ("stood_by", START["wall_s"])
    assert (found["worker_class"], found["from_standby"]) == ("h200", False)
    bare = told("stood_by", 2.0, holds="process")
    (waits,) = explanation(ORDERED, [*WHOLE[:3], bare], {})["starts"]
    assert waits["status"] == "starting" and waits["wall_s"] is None
    served = told("ready", 60.0, start=START, worker_class="h200", holds="process")
    (late,) = explanation(ORDERED, [*WHOLE[:3], bare, served], {})["starts"]
    assert late["status"] == "ready" and late["from_standby"]


@pytest.mark.parametrize(
    ("outcomes", "last"),
    [
        ([told("refused", 1.0, note="no quota")], ("actuator", "order refused", "no quota")),
        (
            [*WHOLE[:3], told("failed", 8.0, note="exit code 9", start=START, checks=[])],
            ("actuator", "ended by itself", "exit code 9"),
        ),
        (
            [*WHOLE[:3], told("released", 8.0, note="cancelled after 6.0 s")],
            ("actuator", "given back before it served", "cancelled after 6.0 s"),
        ),
    ],
)
def test_a_start_that_ended_early_says_how(
    outcomes: list[Outcome], last: tuple[str, str, str]
) -> None:
    found = explanation(ORDERED, outcomes, {})["timeline"]
    assert (found[-1]["who"], found[-1]["what"], found[-1]["note"]) == last


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (
            [told("draining", 0.4, note="idle"), told("drained", 33.0)],
            [(0.4, "drain accepted"), (33.0, "gone")],
        ),
        ([told("draining", 0.4)], [(0.4, "drain accepted"), (None, "gone")]),
        ([told("drain_failed", 0.4, note="unknown epoch")], [(0.4, "drain refused")]),
        ([told("advised", 0.4)], [(0.4, "drain advised")]),
        ([], [(None, "drain accepted"), (None, "gone")]),
    ],
)
def test_a_drain_is_told_to_its_end(
    outcomes: list[Outcome], expected: list[tuple[float | None, str]]
) -> None:
    drained = record(drains=[{"worker_id": "p-1", "pool": "prefill", "why": "idle"}])
    found = explanation(drained, outcomes, {})["timeline"][1:]
    assert [(m["after_s"], m["what"]) for m in found] == expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        (
            [told("activating", 0.2), told("activated", 1.1, seconds=0.9)],
            [(0.2, "activation accepted", None), (1.1, "serves", 0.9)],
        ),
        ([told("activate_failed", 0.2, note="gone")], [(0.2, "activation refused", None)]),
        ([], [(None, "activation accepted", None), (None, "serves", None)]),
    ],
)
def test_a_standby_that_is_told_to_serve(
    outcomes: list[Outcome], expected: list[tuple[float | None, str, float | None]]
) -> None:
    woken = record(activations=[{"worker_id": "p-1", "pool": "prefill", "why": "at once"}])
    found = explanation(woken, outcomes, {})["timeline"][1:]
    assert [(m["after_s"], m["what"], m["took_s"]) for m in found] == expected


def test_a_standby_that_was_ordered_ends_by_standing_by() -> None:
    stood = told("stood_by", 9.0, start=START, checks=CHECKS)
    assert lines([*WHOLE[:4], stood])[-2:] == [
        (9.0, "gate", "admitted"),
        (9.0, "router", "stands by"),
    ]


def test_the_outcome_is_one_sentence() -> None:
    judged = told(
        "judged",
        300.0,
        "",
        worth=False,
        why="p-1 served for 3 s and took 9 s to come",
        load={"prefill": {"before": 1.4, "after": 0.9}, "decode": {"before": None, "after": 0.5}},
        attainment={"before": 0.5, "after": 0.995},
    )
    text = explanation(ORDERED, [*WHOLE, judged], {})["text"]
    assert (
        "outcome: not worth it: p-1 served for 3 s and took 9 s to come; load of prefill 1.40 → "
        "0.90; attainment 50.0% → 99.5%"
    ) in text


async def test_a_running_planner_tells_it_all() -> None:
    """Order, start, first request, end and judgement of a worker that came and went."""
    run = await planner(World(HandClock(), rps=lambda t: 8.0 if t < 120 else 0.0))
    await run.step(420)
    records = await run.journal.newest("demo", limit=200, changes_only=True)
    stories = [await run.service.explain(r.decision_id) for r in reversed(records)]
    gone = {d["worker_id"] for story in stories for d in story["drains"]}
    started = [s for s in stories if {x["worker_id"] for x in s["starts"]} & gone]
    assert started, "somebody came and went"
    moments = [m for m in started[0]["timeline"] if m["worker_id"] in gone]
    assert {"planner", "actuator", "agent", "gate", "router"} == {
        m["who"] for m in started[0]["timeline"]
    }
    assert {"allocated", "weight_transfer", "registered, routable", "first request", "gone"} <= {
        m["what"] for m in moments if m["after_s"] is not None
    }
    judged = [s["outcome"] for s in stories if s["outcome"] is not None]
    assert judged and {True, False} >= {j["worth"] for j in judged if j["worth"] is not None}
    weighed = [s for s in stories if s["decision"]["candidates"]]
    assert len(weighed) >= len(stories) - 1, "only the first tick knows no demand"
    for story in stories:
        assert {e["pool"] for e in story["decision"]["expected"]} >= {
            x["pool"] for x in (*story["starts"], *story["drains"])
        }


async def test_the_gates_checks_and_its_moment_are_kept() -> None:
    """The router's clock says when it became ready, which a tick sees up to a tick later."""
    run = await planner(World(HandClock(), t_ready_s=lambda _n: 5.5))
    await run.step(20)
    record = (await run.journal.newest("demo", limit=9, changes_only=True))[-1]
    ready = [o for o in (await run.journal.get(record.decision_id))[1] if o.kind == "ready"]
    assert ready and all(o.document["ready_ago_s"] == pytest.approx(0.5) for o in ready)
    assert all(o.document["checks"] == [] for o in ready), "this world has no gate"
    told = (await run.service.explain(record.decision_id))["timeline"]
    registered = [m["after_s"] for m in told if m["what"].startswith("registered")]
    assert registered == [pytest.approx(5.5)] * len(ready)
