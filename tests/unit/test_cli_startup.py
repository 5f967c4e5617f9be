"""`readyplane startup report` and `readyplane workers ID`: what they collect, print, write and read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.startup import Segment, SegmentName
from readyplane.core.worker import CheckResult, WorkerState
from tests.unit.cli_world import (
    CLUSTER,
    FakePlanner,
    FakeRouter,
    Terminal,
    clean_environment,
    explanation,
    fleet,
    stand_in,
    worker,
)

BOTH = (*CLUSTER, "--planner", "10.0.0.1:7002")
PNG = b"\x89PNG"


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    stand_in(monkeypatch, "RouterClient", FakeRouter(fleet(worker())))
    stand_in(monkeypatch, "PlannerClient", FakePlanner())
    return Terminal(capfd)


def saved(folder: Path, name: str, *starts: dict[str, Any]) -> Path:
    path = folder / name
    path.write_text(json.dumps({"starts": list(starts)}))
    return path


def start(name: str, tier: str, wall_s: float) -> dict[str, Any]:
    segment = {"name": "weight_transfer", "start_s": 0.0, "end_s": wall_s - 1.0, "modelled": False}
    return {
        "worker_id": name,
        "worker_class": "h200",
        "tier": tier,
        "mode": "jit",
        "pool": "prefill",
        "wall_s": wall_s,
        "exclusive_s": {"weight_transfer": wall_s - 1.0},
        "unexplained_s": 1.0,
        "segments": [{**segment, "detail": ""}],
    }


def test_the_starts_that_the_journal_and_the_router_keep(cli: Terminal) -> None:
    said = cli("startup", "report", "--json", *BOTH)
    assert said.code == 0, said.err
    starts = {s["worker_id"]: s for s in said.document["starts"]}
    ordered = starts["p-2-bbbb"]
    assert (ordered["tier"], ordered["temperature"], ordered["wall_s"]) == ("L2", "warm", 5.9)
    group = next(g for g in said.document["groups"] if g["typical"] == "p-2-bbbb")
    assert group["dominant"] == "canary" and group["modelled"] == ["compile"]


def test_a_waterfall_with_what_is_unexplained(cli: Terminal) -> None:
    said = cli("startup", "report", *BOTH)
    assert said.code == 0, said.err
    assert "longest on average: canary 3.80 s" in said.out
    assert "compile (modelled)" in said.out and "unexplained" in said.out and "P99" in said.out


def test_cold_against_warm_from_files_with_a_picture(cli: Terminal, tmp_path: Path) -> None:
    one = saved(tmp_path, "a.json", start("c1", "L4", 21.0), start("c2", "L3", 11.0))
    two = saved(tmp_path, "b.json", start("w1", "L0", 3.0))
    picture = tmp_path / "starts.png"
    words = ("--from", str(one), "--from", str(two), "--compare", "cold,warm")
    said = cli("startup", "report", *words, "--png", str(picture))
    assert said.code == 0, said.err
    assert picture.read_bytes()[:4] == PNG
    table = said.out.partition("mean exclusive seconds")[2]
    line = next(each for each in table.splitlines() if each.strip().startswith("weight_transfer"))
    assert line.split()[1::2] == ["15.00", "2.00", "13.00"], line


def lost(name: str, ended_in: str | None, failure: str, **more: Any) -> dict[str, Any]:
    """A failed start as an explanation tells it."""
    found = {
        **explanation("d")["starts"][0],
        "worker_id": name,
        "status": "failed",
        "wall_s": 900.0,
        "ended_in": ended_in,
        "failure": failure,
        "note": "ended (exit code 3)",
        "worker_class": "h200",
        "mode": "jit",
    }
    return {**found, **more}


def test_failed_starts_are_counted_apart_by_where_they_ended(
    monkeypatch: pytest.MonkeyPatch, cli: Terminal, tmp_path: Path
) -> None:
    class Journal(FakePlanner):
        async def explain(self, decision_id: str) -> dict[str, Any]:
            told = await super().explain(decision_id)
            bad = [lost("p-7", "canary", "p-7: wrong answer"), lost("p-8", None, "")]
            return {**told, "starts": [*told["starts"], *bad]}

    died = worker("p-9-zzzz", WorkerState.GONE, serving=None)
    assert died.progress is not None
    running = (*died.progress.segments[:2], Segment(SegmentName.CANARY, 104.0, None))
    told = replace(died.progress, segments=running, failure="p-9-zzzz: wrong answer")
    by_hand = replace(died, progress=told)
    stand_in(monkeypatch, "RouterClient", FakeRouter(fleet(worker(), by_hand)))
    stand_in(monkeypatch, "PlannerClient", Journal())
    said = cli("startup", "report", "--json", *BOTH)
    assert said.code == 0, said.err
    found = {f["worker_id"]: f for f in said.document["failed"]}
    assert found["p-7"]["ended_in"] == found["p-9-zzzz"]["ended_in"] == "canary"
    assert (found["p-8"]["ended_in"], found["p-8"]["failure"]) == ("unknown", "ended (exit code 3)")
    assert max(g["p99_s"] for g in said.document["groups"]) < 10.0  # nobody waited 900 s
    path = tmp_path / "all.json"
    path.write_text(json.dumps(said.document))
    shown = cli("startup", "report", "--from", str(path))
    assert shown.code == 0, shown.err
    assert "3 starts failed" in shown.out and "WORKER: wrong answer" in shown.out
    path.write_text(json.dumps({**said.document, "starts": []}))
    only = cli("startup", "report", "--from", str(path), "--png", str(tmp_path / "x.png"))
    assert only.code == 1 and "ready" in only.err
    assert cli("startup", "report", "--from", str(path)).code == 0


def test_the_bound_of_the_weights_beside_what_they_took(cli: Terminal, tmp_path: Path) -> None:
    detail = (
        "L4 store: 1000.0 MB, 120 chunks, 0.50 GB/s, "
        "bound 1.25 s at the fastest measured 0.80 GB/s, efficiency 0.62"
    )
    document = start("c1", "L4", 3.0)
    document["segments"][0]["detail"] = detail
    path = saved(tmp_path, "a.json", document)
    said = cli("startup", "report", "--from", str(path))
    assert "bound M/B_min 1.25 s, efficiency 0.62" in said.out
    (group,) = cli("startup", "report", "--from", str(path), "--json").document["groups"]
    assert group["weights"]["measured_s"] == 2.0
    assert group["weights"]["efficiency"] == pytest.approx(0.625)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--compare", "cold"), "write two words"),
        (("--compare", "cold,frozen"), "frozen"),
        (("--limit", "0"), "give 1 to"),
        (("--from", "/no/such.json"), "readable"),
    ],
)
def test_bad_input_is_refused_by_name(cli: Terminal, words: tuple[str, ...], told: str) -> None:
    said = cli("startup", "report", *words, *BOTH)
    assert said.code == 2 and told in said.err


def test_a_file_of_something_else_is_refused(cli: Terminal, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("[]")
    said = cli("startup", "report", "--from", str(path))
    assert said.code == 2 and "startup report --json" in said.err


def test_one_worker_with_the_evidence_of_its_checks(
    monkeypatch: pytest.MonkeyPatch, cli: Terminal
) -> None:
    bad = CheckResult("canary", False, {"token_ids": [1, 2]}, "answered 1, 2, known answer 3")
    good = CheckResult("lease", True, {"epoch": 5})
    stand_in(monkeypatch, "RouterClient", FakeRouter(fleet(worker(checks=(bad, good)))))
    name = worker().worker_id
    said = cli("workers", name[:3], *CLUSTER)
    assert said.code == 0, said.err
    assert "known answer 3" in said.out and "[1, 2]" in said.out and "epoch" in said.out
    found = cli("workers", name, "--json", *CLUSTER).document
    assert found["worker"]["worker_id"] == name
    assert found["checks"][0]["evidence"] == {"token_ids": [1, 2]}
    assert cli("workers", "nobody", *CLUSTER).code == 1
