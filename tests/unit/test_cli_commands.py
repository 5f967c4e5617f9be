"""Commands against fake services: what they ask, what they print, and the shape of their documents."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import NoPair, NotFound, Unavailable
from readyplane.core.work import RequestShape
from readyplane.core.worker import CheckResult, Holds, Role, Worker, WorkerState
from readyplane_lab.cli.change import why_over
from tests.unit.cli_world import (
    CLUSTER,
    FakePlanner,
    FakeRouter,
    Terminal,
    clean_environment,
    fleet,
    stand_in,
    worker,
)

PLANNER = ("--planner", "10.0.0.1:7002")


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    return Terminal(capfd)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> FakeRouter:
    made = FakeRouter(
        fleet(
            worker(),
            worker("d-1-bbbb", role=Role.DECODE),
            worker("p-2-cccc", WorkerState.PROVISIONED),
        )
    )
    stand_in(monkeypatch, "RouterClient", made)
    return made


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> FakePlanner:
    made = FakePlanner()
    stand_in(monkeypatch, "PlannerClient", made)
    return made


# --------------------------------------------------------------------------- workers


WORKER_KEYS = {
    "ranks",
    *("worker_id", "incarnation", "role", "state", "model", "worker_class", "node", "generation"),
    *("epoch", "mode", "tier", "attached", "engine_url", "active", "kv_usage", "decision"),
    *("holds", "stage", "unheard_s"),
    *("t_ready_s", "starting_s", "dominant_segment", "dominant_s", "blocking_segment", "failure"),
    *("log_tail", "drain_reason", "checks_failed", "convertible", "told"),
}


def test_workers_as_a_document(cli: Terminal, router: FakeRouter) -> None:
    found = cli("workers", "--json", *CLUSTER).document
    assert set(found) == {"version", "degraded", "workers", "not_ordered"} and found["version"] == 4
    rows = {row["worker_id"]: row for row in found["workers"]}
    assert all(set(row) == WORKER_KEYS for row in rows.values())
    assert list(rows) == ["p-1-aaaa", "p-2-cccc", "d-1-bbbb"], "prefill first, by id"
    ready, starting = rows["p-1-aaaa"], rows["p-2-cccc"]
    assert ready["t_ready_s"] == pytest.approx(5.0) and ready["starting_s"] is None
    assert (ready["dominant_segment"], ready["dominant_s"]) == ("weight_transfer", 3.0)
    assert ready["kv_usage"] == 0.25 and ready["decision"] == "d1790000000-aaaa"
    assert ready["blocking_segment"] is None and ready["log_tail"] is None
    assert starting["t_ready_s"] is None and starting["starting_s"] == pytest.approx(6.0)
    assert starting["blocking_segment"] == "canary" and starting["log_tail"] == "loading"
    assert starting["tier"] is None, "where its weights come from is not known yet"


def test_workers_as_a_table_fits_a_hundred_columns(cli: Terminal, router: FakeRouter) -> None:
    said = cli("workers", *CLUSTER)
    assert said.code == 0 and said.err == ""
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= 100
    row = next(line for line in lines if "p-2-cccc" in line)
    assert "provisioned" in row and "waits in canary" in row and row.rstrip().endswith("aaaa")
    assert "class h200-slow10" in said.out, "what all have in common stands below"


def test_a_worker_that_is_only_ordered_comes_from_the_planner(
    cli: Terminal, router: FakeRouter, planner: FakePlanner
) -> None:
    start = {"wall_s": 0.4, "blocking_segment": "schedule", "exclusive_s": {}}
    planner.rows = [
        {"worker_id": "p-9-dddd", "role": "prefill", "state": "ordered", "start": start},
        {"worker_id": "p-1-aaaa", "role": "prefill", "state": "ready", "start": {}},
    ]
    rows = cli("workers", "--json", *CLUSTER, *PLANNER).document["workers"]
    assert [r["worker_id"] for r in rows if r["state"] == "ordered"] == ["p-9-dddd"]
    assert len(rows) == 4, "what the router knows is not told twice"


def test_a_silent_planner_is_said_and_does_not_hide_the_fleet(
    cli: Terminal, router: FakeRouter, planner: FakePlanner
) -> None:
    planner.error = Unavailable("the planner cannot be reached", "start it")
    said = cli("workers", "--json", *CLUSTER, *PLANNER)
    assert said.code == 0 and len(said.document["workers"]) == 3
    assert "only ordered are not shown" in said.err


def test_workers_watch_prints_a_document_a_line_until_interrupted(
    cli: Terminal, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sleep(_self: Any, _seconds: float) -> None:
        looks.append(1)
        if len(looks) == 2:
            router.error = Unavailable("the router cannot be reached", "start it")
        if len(looks) == 3:
            raise KeyboardInterrupt

    looks: list[int] = []
    monkeypatch.setattr("readyplane.kit.clock.SystemClock.sleep", sleep)
    said = cli("workers", "--watch", "--json", *CLUSTER)
    assert said.code == 130
    import json

    documents = [json.loads(line) for line in said.out.splitlines() if line]
    assert len(documents) == 3
    assert documents[-1]["degraded"] == "the router cannot be reached; start it"
    assert documents[-1]["workers"] == documents[0]["workers"], "the last that was known"


def test_a_refused_check_and_a_failure_are_shown(cli: Terminal, router: FakeRouter) -> None:
    bad = worker(checks=(CheckResult("canary", passed=False, reason="another answer"),))
    router.now = fleet(bad)
    row = cli("workers", "--json", *CLUSTER).document["workers"][0]
    assert row["checks_failed"] == ["canary"]


# --------------------------------------------------------------------------- activate and flip


def test_a_standby_is_told_to_serve_and_waited_for(cli: Terminal, router: FakeRouter) -> None:
    said = cli("activate", "d-1", "--deadline", "7", "--reason", "a burst", *CLUSTER)
    assert said.code == 0 and said.out.strip() == "d-1-bbbb is told to serve"
    told = {"worker_id": "d-1-bbbb", "reason": "a burst", "deadline_s": 7.0}
    assert router.calls == [("activate", told)]
    said = cli("activate", "d-1", "--wait", "--json", *CLUSTER)  # the next look finds it ready
    assert said.document["done"] is True and said.document["worker"]["state"] == "ready"


def test_an_activation_is_given_what_the_standby_needs(cli: Terminal, router: FakeRouter) -> None:
    assert cli("activate", "d-1", *CLUSTER).code == 0
    assert router.calls[-1][1]["deadline_s"] == 0.0, "the router knows what it holds"


def test_who_waits_for_a_standby_is_told_what_for_and_when_its_start_has_failed(
    cli: Terminal, router: FakeRouter
) -> None:
    bare = worker(
        "d-1-bbbb", WorkerState.STANDBY, Role.DECODE, holds=Holds.PROCESS, told="activate"
    )
    loads = worker("d-1-bbbb", WorkerState.PROVISIONED, Role.DECODE, told="activate")
    loads = replace(loads, state=WorkerState.STANDBY)  # as the router calls it until its gate
    assert loads.progress is not None
    failed = replace(loads, progress=replace(loads.progress, failure="no peer has the bytes"))
    looks = [bare, bare, loads, replace(failed, state=WorkerState.GONE)]
    router.on_look = lambda n: setattr(router, "now", fleet(looks[min(n, len(looks)) - 1]))
    said = cli("activate", "d-1", "--deadline", "15", "--wait", *CLUSTER)
    assert said.code != 0 and router.looks == len(looks)
    assert "its start has failed: no peer has the bytes" in said.err
    assert "holds a process only and loads first, at most 45 s" in said.err
    assert "d-1-bbbb is standby, told to serve: canary" in said.err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_word_stands_while_the_router_is_silent_and_the_lease_is_lost(
    cli: Terminal, router: FakeRouter, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    """The router is silent, the worker is gone and forgotten for a moment, then it serves."""
    monkeypatch.setattr("readyplane_lab.cli.change.SILENT_EVERY_S", 0.01)
    there = worker(
        "d-1-bbbb", WorkerState.STANDBY, Role.DECODE, holds=Holds.PROCESS, told="activate"
    )
    silent = Unavailable("the router did not answer in time", "ask again")
    looks: list[Worker | Unavailable | None] = [
        there,
        there,
        silent,
        silent,
        replace(there, state=WorkerState.GONE, told="", drain_reason="its lease expired"),
        None,
        replace(there, epoch=9, state=WorkerState.PROVISIONED),
        replace(there, epoch=9, state=WorkerState.READY, told=""),
    ]

    def look(number: int) -> None:
        now = looks[min(number, len(looks)) - 1]
        router.error = now if isinstance(now, Unavailable) else None
        if not isinstance(now, Unavailable):
            router.now = fleet(*([] if now is None else [now]))

    router.on_look = look
    words = ("--json",) if as_json else ()
    said = cli("activate", "d-1", "--wait", *words, *CLUSTER)
    assert said.code == 0 and router.looks == len(looks)
    assert said.err.count("the router does not answer, the word stands") == 1
    assert said.err.count("d-1-bbbb is gone (its lease expired), and was standby before") == 1
    assert "at most 930 s" in said.err


def test_who_waits_to_the_end_is_told_that_it_did_not_come_back_or_nobody_answers(
    cli: Terminal, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter(range(0, 10_000, 5))
    monkeypatch.setattr(
        "readyplane.kit.clock.SystemClock.monotonic_s", lambda _self: float(next(now_s))
    )
    monkeypatch.setattr("readyplane_lab.cli.change.SILENT_EVERY_S", 0.01)
    there = fleet(worker("d-1-bbbb", WorkerState.STANDBY, Role.DECODE))
    router.on_look = lambda n: setattr(router, "now", there if n == 1 else fleet())
    said = cli("activate", "d-1", "--deadline", "9", "--wait", *CLUSTER)
    assert said.code == 1 and "it is gone for" in said.err and "did not come back" in said.err
    router.looks, router.now = 0, there
    away = Unavailable("the router is away", "ask again")
    router.on_look = lambda n: setattr(router, "error", away if n > 1 else None)
    said = cli("activate", "d-1", "--deadline", "9", "--wait", *CLUSTER)
    assert said.code == 3 and "error the router is away" in said.err


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (None, ""),
        ({"gone": "drained by a person"}, "it was drained and has left (drained by a person)"),
        ({"gone": "", "why": "its lease expired"}, ""),
        ({"gone": "a flip", "told": "flip"}, ""),
        ({"told": ""}, "the word was not followed in time"),
        ({"incarnation": "other"}, "another process of that name"),
        ({}, ""),
    ],
)
def test_nothing_is_waited_for_that_cannot_come(now: dict[str, str] | None, why: str) -> None:
    last = worker("d-1-bbbb", WorkerState.STANDBY, Role.DECODE, told="activate")
    seen = None
    if now is not None:
        offer = replace(last.offer, incarnation=now.get("incarnation", last.offer.incarnation))
        seen = replace(last, told=now.get("told", last.told), offer=offer)
        if "gone" in now:
            seen = replace(
                seen,
                state=WorkerState.GONE,
                drain_reason=now["gone"] or now["why"],
                draining_s=100.0 if now["gone"] else None,
            )
            last = replace(last, told=seen.told)
    assert why_over(last, last, seen).startswith(why) and bool(why_over(last, last, seen)) == bool(
        why
    )


def test_a_worker_is_told_to_serve_the_other_stage(cli: Terminal, router: FakeRouter) -> None:
    said = cli("flip", "p-1", "--to", "decode", *CLUSTER)
    assert said.code == 0 and said.out.strip() == "p-1-aaaa is told to serve decode"
    assert router.calls[0][1]["role"] is Role.DECODE
    flipped = replace(router.now.workers["p-1-aaaa"].offer, role=Role.DECODE)
    there = replace(router.now.workers["p-1-aaaa"], offer=flipped)
    router.on_look = lambda _n: setattr(
        router, "now", replace(router.now, workers={**router.now.workers, "p-1-aaaa": there})
    )
    said = cli("flip", "p-1", "--to", "decode", "--wait", *CLUSTER)
    assert said.code == 0 and "p-1-aaaa serves as told after" in said.out


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("flip", "p-1", "--to", "both"), "--to"),
        (("flip", "p-1", "--to", "decode", "--deadline", "0"), "--deadline"),
        (("activate", "p-1", "--deadline", "nan"), "--deadline"),
    ],
)
def test_what_cannot_be_told_is_named(
    cli: Terminal, router: FakeRouter, words: tuple[str, ...], field: str
) -> None:
    said = cli(*words, *CLUSTER)
    assert said.code == 2 and field in said.err and router.calls == []


# --------------------------------------------------------------------------- drain


def test_drain_takes_the_beginning_of_an_id(cli: Terminal, router: FakeRouter) -> None:
    said = cli("drain", "d-1", "--deadline", "12", "--reason", "kernel", *CLUSTER)
    assert said.code == 0 and "d-1-bbbb drains (3 requests are finishing)" in said.out
    assert router.calls == [
        ("drain", {"worker_id": "d-1-bbbb", "reason": "kernel", "deadline_s": 12.0})
    ]


def test_drain_waits_until_the_worker_has_left(cli: Terminal, router: FakeRouter) -> None:
    leaving = worker("d-1-bbbb", WorkerState.DRAINING, Role.DECODE, active=1)
    router.after_drain = [fleet(leaving), fleet(worker("d-1-bbbb", WorkerState.GONE, Role.DECODE))]
    said = cli("drain", "d-1-bbbb", "--wait", "--json", *CLUSTER)
    assert said.code == 0
    assert said.document["left"] is True and said.document["worker"]["state"] == "draining"


def test_drain_that_does_not_end_fails(
    cli: Terminal, router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 10_000, 20))
    monkeypatch.setattr(
        "readyplane.kit.clock.SystemClock.monotonic_s", lambda _self: float(next(now))
    )
    said = cli("drain", "d-1-bbbb", "--wait", "--deadline", "5", *CLUSTER)
    assert said.code == 1 and "it has not left" in said.err


# --------------------------------------------------------------------------- decisions


def test_decisions(cli: Terminal, planner: FakePlanner) -> None:
    found = cli("decisions", "--json", *PLANNER).document["decisions"]
    assert [d["decision_id"] for d in found] == ["d1790000001-bbbb", "d1790000000-aaaa"]
    assert planner.asked[-1] == {"model": "", "limit": 20, "changes_only": True}
    everything = cli("decisions", "--all", "-n", "5", "--json", *PLANNER).document["decisions"]
    assert len(everything) == 3
    table = cli("decisions", *PLANNER).out
    assert "d1790000001-bbbb" in table and "TTFT passes its target" in table
    assert "about decode" not in table, "the reason shown is one of the pool that changed"
    assert max(map(len, table.splitlines())) <= 100


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("last", "d1790000001-bbbb"),
        ("d1790000000-aaaa", "d1790000000-aaaa"),
        ("d1790000000", "d1790000000-aaaa"),
        ("aaaa", "d1790000000-aaaa"),
        ("d1790000002", "d1790000002-cccc"),
    ],
)
def test_explain_finds_the_decision(
    cli: Terminal, planner: FakePlanner, given: str, meant: str
) -> None:
    assert cli("explain", given, "--json", *PLANNER).document["decision_id"] == meant


def test_explain_refuses_what_is_not_one_decision(cli: Terminal, planner: FakePlanner) -> None:
    several = cli("explain", "d179", *PLANNER)
    assert several.code == 2 and "d1790000001-bbbb" in several.err
    nothing = cli("explain", "d9", *PLANNER)
    assert nothing.code == 1 and "'d9' is not known" in nothing.err
    planner.known = []
    assert "nothing has been changed yet" in cli("explain", "last", *PLANNER).err


def test_explain_for_a_person(cli: Terminal, planner: FakePlanner) -> None:
    out = cli("explain", "last", *PLANNER).out
    assert "prefill: TTFT passes its target [ttft]" in out
    assert "ordered 0.1 s → provisioned 1.0 s → ready 6.0 s" in out
    compile_bar = next(line for line in out.splitlines() if "compile (modelled)" in line)
    canary_bar = next(line for line in out.splitlines() if line.strip().startswith("canary"))
    assert compile_bar.count("█") == 14 and canary_bar.count("█") == 26, "2 and 3.8 of 5.9 s in 40"
    assert compile_bar.index("█") < canary_bar.index("█")
    assert "answer  p-2-bbbb took 5.9 s" in out and "unexplained" in out


# --------------------------------------------------------------------------- route


def test_route_as_a_document(cli: Terminal, router: FakeRouter) -> None:
    said = cli("route", "--tokens", "1200", "--max-tokens", "50", "--json", *CLUSTER)
    found = said.document
    assert set(found) == {
        *("model", "isl", "max_tokens", "prefill", "decode", "local", "predicted", "explanation")
    }
    assert found["prefill"]["cached_tokens"] == 160
    assert found["predicted"] == {"ttft_s": 0.563, "tpot_s": 0.07}
    assert found["explanation"]["excluded"] == {"decode:d-2-cccc": "12 KV blocks free"}
    shape, how = router.calls[-1][1]
    assert (shape.model, shape.isl, shape.max_tokens, shape.token_ids) == ("demo", 1200, 50, b"")
    assert how == {"explain": True, "dry_run": True}, "nothing may be reserved"


def test_route_tokenises_a_prompt_by_an_engine(
    cli: Terminal, router: FakeRouter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, Any]] = []

    async def post(self: Any, target: str, body: Any, *, timeout_s: float) -> Any:
        asked.append((self.url + target, body))
        return {"tokens": [72, 105]}

    monkeypatch.setattr("readyplane_agent.engines.openai.OpenAiEngine.post", post)
    (tmp_path / "p.txt").write_text("Hi")
    found = cli("route", "--prompt-file", str(tmp_path / "p.txt"), "--json", *CLUSTER).document
    assert found["isl"] == 2
    assert asked == [("http://127.0.0.1:9/tokenize", {"model": "demo", "prompt": "Hi"})]
    shape, _ = router.calls[-1][1]
    assert shape.token_ids == bytes([72, 0, 0, 0, 105, 0, 0, 0])


def test_route_for_a_person(cli: Terminal, router: FakeRouter) -> None:
    said = cli("route", "--tokens", "1200", *CLUSTER)
    assert "prefill p-1-aaaa (160 tokens cached there)" in said.out
    assert "predicted TTFT 0.563 s, target 2 s" in said.out
    assert "12 KV blocks free" in said.out and "KV hand-over" in said.out
    assert "prefixes are not looked for" in said.err


def test_route_without_a_pair_is_a_refusal(cli: Terminal, router: FakeRouter) -> None:
    async def route(*_: Any, **__: Any) -> Any:
        raise NoPair("no ready decode worker", 5.0)

    router.route = route  # type: ignore[method-assign]
    said = cli("route", "--tokens", "10", "--json", *CLUSTER)
    assert (said.code, said.out) == (1, "")
    assert said.err == "error no pair: no ready decode worker; retry after 5.0 s\n"


def test_route_needs_to_know_the_model(cli: Terminal, router: FakeRouter) -> None:
    router.now = fleet()
    assert cli("route", "--tokens", "10", *CLUSTER).code == 1
    assert (
        cli("route", "--tokens", "10", "--model", "m", "--json", *CLUSTER).document["model"] == "m"
    )


async def _nobody_knows(shape: RequestShape, **_: Any) -> Any:
    raise NotFound("model", shape.model, "list the models, or start a worker for it")


@pytest.mark.parametrize(
    "command",
    [
        ("workers", "--model", "nosuch"),
        ("workers", "--model", "nosuch", "--json"),
        ("workers", "--model", "nosuch", "--watch"),
        ("route", "--model", "nosuch", "--prompt", "hello"),
        ("route", "--model", "nosuch", "--tokens", "10"),
    ],
)
def test_an_unknown_model_is_no_empty_answer(
    cli: Terminal, router: FakeRouter, command: tuple[str, ...]
) -> None:
    router.route = _nobody_knows  # type: ignore[method-assign]
    said = cli(*command, *CLUSTER)
    assert (said.code, said.out) == (1, "")
    assert "model 'nosuch' is not known" in said.err


def test_a_model_that_is_known_may_have_no_workers(cli: Terminal, router: FakeRouter) -> None:
    async def route(*_: Any, **__: Any) -> Any:
        raise NoPair("no ready prefill worker", 5.0)

    router.route = route  # type: ignore[method-assign]
    said = cli("workers", "--model", "published", "--json", *CLUSTER)
    assert (said.code, said.document["workers"]) == (0, [])


# --------------------------------------------------------------------------- policy


def test_policy_show(cli: Terminal, planner: FakePlanner) -> None:
    assert cli("policy", "show", "--json", *PLANNER).document == {
        "version": 3,
        "policy": planner.policy,
        "warnings": [],
    }
    out = cli("policy", "show", *PLANNER).out
    assert out.startswith("# policy of demo, version 3\n")
    import yaml

    assert yaml.safe_load(out) == planner.policy, "what is shown can be given back"


def test_policy_set_changes_dotted_fields(cli: Terminal, planner: FakePlanner) -> None:
    said = cli("policy", "set", "policy.prefill.max=8", "slo.ttft_s=15e-1", "--json", *PLANNER)
    assert said.document == {
        "version": 4,
        "changed": {"prefill.max": {"from": 6, "to": 8}, "slo.ttft_s": {"from": 2.0, "to": 1.5}},
        "warnings": [],
    }
    wanted, how = planner.asked[-1]
    assert wanted == {"prefill": {"max": 8}, "slo": {"ttft_s": 1.5}}
    assert how == {"model": "", "merge": True, "expected_version": 0}
    assert "nothing differs" in cli("policy", "set", "prefill.max=8", *PLANNER).out


def test_a_target_out_of_reach_is_shown(cli: Terminal, planner: FakePlanner) -> None:
    """B18: it is saved and said, by whoever shows or sets it."""
    text = "one sequence alone takes 0.05 s a token: policy.slo.tpot_s = 0.001 is never met"
    planner.warnings = [{"code": "target_unreachable", "text": text}]
    assert f"# target_unreachable: {text}" in cli("policy", "show", *PLANNER).out
    said = cli("policy", "set", "prefill.max=8", *PLANNER).out
    assert said.endswith(f"\ntarget_unreachable: {text}\n")


def test_policy_set_from_a_file(cli: Terminal, planner: FakePlanner, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("prefill: {max: 2}\n")
    said = cli("policy", "set", "--file", str(path), "--expected-version", "3", *PLANNER)
    assert said.out == "prefill.max: 6 → 2\npolicy version 4\n"
    cli("policy", "set", str(path), *PLANNER)
    assert planner.asked[-1][0] == {"prefill": {"max": 2}} and planner.asked[-1][1]["merge"]
    cli("policy", "set", "--file", str(path), "--whole", *PLANNER)
    assert planner.asked[-1][1]["merge"] is False


@pytest.mark.parametrize(
    ("argv", "code", "fragment"),
    [
        (("prefil.max=8",), 2, "policy.prefil"),
        (("prefill.max=8", "--expected-version", "1"), 1, "expected 1, found 3"),
        (("prefill",), 2, "write it like prefill.max=8"),
        (("prefill..max=1",), 2, "write it like prefill.max=8"),
        (("a=1", "a=2"), 2, "each field once"),
        (("a=1", "a.b=2"), 2, "already has a value"),
        (("a=[1",), 2, "write valid YAML"),
        (("a=2026-01-01",), 2, "write a number"),
        ((), 2, "give fields, or a FILE"),
        (("a=1", "--file", "x"), 2, "give fields, or a FILE"),
        (("--file", "/nonexistent/p.yaml"), 2, "--file"),
    ],
)
def test_policy_set_refuses(
    cli: Terminal, planner: FakePlanner, argv: tuple[str, ...], code: int, fragment: str
) -> None:
    said = cli("policy", "set", *argv, *PLANNER)
    assert (said.code, said.out) == (code, "")
    assert fragment in said.err and said.err.count("\n") == 1
    assert planner.version == 3


@pytest.fixture(autouse=True)
def _no_signals_left() -> Iterator[None]:
    import signal

    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) == before
