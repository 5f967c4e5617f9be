"""The proof from end to end on small inputs: whole, repeatable, resumable, and never below the bound."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import InvalidField
from readyplane_lab.proof import entrants, prove, settle
from readyplane_lab.proof.bounds import undercut
from readyplane_lab.proof.inputs import make_case
from readyplane_lab.proof.jobs import Job, Results, execute
from readyplane_lab.proof.port import Scenario
from readyplane_lab.proof.verdict import OURS

SMALL = settle.Errand(
    scenario="flash-crowd",
    t_ready_s=20.0,
    peak=4.0,
    seed=3,
    contenders=(OURS, "static-peak"),
    attainment=0.9,
    knobs=2,
)


def job(contender: str = "hpa", knob: float = 0.7, **more: Any) -> Job:
    return replace(SMALL.job("event", contender, knob), **more)


def test_one_seed_gives_one_document() -> None:
    first, second = (json.dumps(execute(job()), sort_keys=True) for _ in range(2))
    assert first == second
    assert json.dumps(execute(job(seed=4)), sort_keys=True) != first


def test_an_input_is_swept_confirmed_and_bracketed(tmp_path: Path) -> None:
    told: list[float] = []
    found, document = settle.settle(
        SMALL, Results(tmp_path), lambda _text, share: told.append(share)
    )
    assert told == sorted(told) and 0 < told[-1] < 1
    assert found.ours is not None and found.osim_gpu_hours is not None
    assert 0 < found.floor_gpu_hours <= found.lower_gpu_hours
    assert len(found.entries["static-peak"].fluid) == 2
    assert found.entries[OURS].event, "ours is always confirmed by events"
    assert document["undercut"] == []
    assert document["ours"]["trace"]["prefill.ready"][0] >= 1
    # Everything is kept: the same errand runs nothing a second time.
    files = {f.name: f.stat().st_mtime_ns for f in tmp_path.iterdir()}
    again, _ = settle.settle(SMALL, Results(tmp_path), lambda _text, _share: None)
    assert again == found
    assert {f.name: f.stat().st_mtime_ns for f in tmp_path.iterdir()} == files


def test_no_fleet_without_a_miss_is_below_the_floor(tmp_path: Path) -> None:
    """The bound holds for whoever attains everything: static, reactive and clairvoyant fleets."""
    results = Results(tmp_path)
    steps = settle._Steps(SMALL, results, lambda _text, _share: None, total=1.0)
    perfect = 0
    for name in ("static-peak", "hpa", "clairvoyant"):
        knob = entrants.contenders()[name].values[-1]
        for mode in ("fluid", "event"):
            run = steps.run(SMALL.job(mode, name, knob))
            perfect += run["scores"]["attainment"] == 1.0
    assert perfect >= 2, "the test says nothing if nobody attains everything"
    assert steps.undercut == []


def test_an_impossible_bill_is_found() -> None:
    bound = {
        "floor_gpu_hours": 5.0,
        "floor_any_gpu_hours": 4.0,
        "floor_convertible_gpu_hours": 3.0,
    }

    def said(gpu_hours: float, attainment: float = 1.0, **fielded: Any) -> str:
        scores = {"gpu_hours": gpu_hours, "attainment": attainment, "starts": 3}
        usual = {"initial": None, "convertible": False}
        return undercut(bound, {"scores": scores, "fielded": {**usual, **fielded}})

    assert said(5.0) == ""
    assert "below the floor of 5.0000" in said(4.9)
    assert said(1.0, attainment=0.999) == ""
    assert said(4.5, initial=[3, 3]) == "" and said(3.9, initial=[3, 3])
    assert said(3.5, convertible=True) == "" and said(2.9, convertible=True)


def test_a_case_has_the_peak_that_was_asked_for() -> None:
    scenario: Scenario = entrants.scenarios()["flash-crowd"]
    small, large = (make_case(scenario, peak=peak) for peak in (4.0, 12.0))
    assert small.peak == pytest.approx(4.0, rel=0.3)
    assert large.peak == pytest.approx(12.0, rel=0.15)
    assert len(large.requests) > 2 * len(small.requests)
    assert small.setting.initial[0] <= small.setting.high[0]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (prove.Ask(scenarios=("nowhere",)), "--scenario: nowhere"),
        (prove.Ask(contenders=("nobody",)), "--policy: nobody"),
        (prove.Ask(seeds=()), "grid"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_runs(
    ask: prove.Ask, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidField, match=re.escape(said.split(":", maxsplit=1)[0])):
        prove.prove(ask, tmp_path)


def children(pid: int) -> list[int]:
    """Processes started by one, and by those."""
    file = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(child) for child in file.read_text().split()] if file.exists() else []
    return [*found, *(grandchild for child in found for grandchild in children(child))]


def test_a_killed_proof_leaves_no_process_behind(tmp_path: Path) -> None:
    argv = (sys.executable, "-m", "readyplane_lab.cli", "prove", "--scenario", "flash-crowd")
    running = subprocess.Popen([*argv, "--processes", "2", "--out", str(tmp_path)])
    deadline = time.monotonic() + 60.0
    while len(children(running.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    started = children(running.pid)
    assert len(started) >= 2
    running.kill()
    running.wait()
    deadline = time.monotonic() + 45.0
    left = started
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
    assert left == []


def test_an_input_without_its_data_is_skipped_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READYPLANE_DATA", "/nowhere")
    ask = prove.Ask(
        scenarios=("az-code", "flash-crowd"),
        contenders=("static-peak",),
        t_ready_s=(20.0,),
        peaks=(4.0,),
        seeds=(3,),
        events=False,
        processes=1,
        quick=True,
    )
    proof = prove.prove(ask, tmp_path)
    assert [one.scenario for one in proof.centre] == ["flash-crowd"]
    ((key, why),) = proof.skipped.items()
    assert key.startswith("az-code") and "READYPLANE_DATA" in why
    assert proof.faults == {} and proof.undercut == ()


def test_a_result_that_is_not_of_the_job_is_made_anew(tmp_path: Path) -> None:
    results = Results(tmp_path)
    wanted = SMALL.job("bound")
    results.put(wanted, execute(wanted))
    (file,) = tmp_path.iterdir()
    for text in ("{}", "[]", '{"job": {}, "bound": {"floor_gpu_hours": -1}}', "\0", ""):
        file.write_text(text)
        assert Results(tmp_path).get(wanted) is None


def test_a_rule_that_breaks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(job: Job) -> dict[str, Any]:
        if job.contender == "static-peak":
            raise ZeroDivisionError("boom")
        return execute(job)

    monkeypatch.setattr(settle, "execute", broken)
    with pytest.raises(settle.RunFault, match=r"static-peak at 0\.6 \(fluid\): ZeroDivisionError"):
        settle.settle(SMALL, Results(tmp_path), lambda _text, _share: None)
