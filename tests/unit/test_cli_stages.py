"""What is shown of later stages and of standbys by what they hold."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from readyplane.core.stage import CapacityStage, UpgradeState
from readyplane.core.startup import Segment, SegmentName
from readyplane.core.startup_report import summed
from readyplane.core.worker import Fleet, Holds, StartProgress, Worker, WorkerState
from readyplane_lab.cli.startup_documents import start_document, start_of
from readyplane_lab.cli.startup_tables import later_line
from readyplane_lab.cli.workers import fleet_document, fleet_table, stage_text, worker_row
from readyplane_planner.journal import Outcome
from readyplane_planner.starts import path_of
from readyplane_planner.timeline import _upgraded
from tests.unit.cli_world import worker
from tests.unit.test_planner_explain import record

STAGE = CapacityStage(UpgradeState.CAPTURING, "h200-slow10", (), 160_000, 1000, "", 2.5)


def staged(stage: CapacityStage = STAGE) -> Worker:
    found = worker("d-1", WorkerState.READY)
    assert found.serving is not None
    return replace(found, serving=replace(found.serving, stage=stage))


def shown(*workers: Worker) -> str:
    screen = Console(width=240, record=True)
    screen.print(fleet_table(fleet_document(Fleet(1, {w.worker_id: w for w in workers}), [])))
    return screen.export_text()


def test_a_stage_is_shown_until_it_is_complete_and_whole_when_one_worker_is_asked_for() -> None:
    row = worker_row(staged())
    assert row["stage"]["state"] == "capturing" and row["stage"]["kv_tokens"] == 160_000
    assert "graphs capturing" in shown(staged())
    assert "graphs" not in shown(staged(replace(STAGE, state=UpgradeState.COMPLETE)))
    back = replace(STAGE, state=UpgradeState.ROLLED_BACK, failure="other tokens")
    text = stage_text(worker_row(staged(back))["stage"])
    assert "stage 1" in text and "other tokens" in text and back.digest in text
    assert worker_row(worker("p-1", WorkerState.READY))["stage"] is None


def test_a_standby_is_shown_with_what_it_holds() -> None:
    waits = replace(worker("d-1", WorkerState.STANDBY), holds=Holds.PROCESS, serving=None)
    assert worker_row(waits)["holds"] == "process" and worker_row(waits)["t_ready_s"] is None
    assert "standby, process" in shown(waits)


def test_who_never_was_routable_has_no_t_ready() -> None:
    for state in (WorkerState.STANDBY, WorkerState.GONE, WorkerState.DRAINING):
        assert worker_row(worker("p-9", state))["t_ready_s"] is None
        assert worker_row(worker("p-9", state, ready_s=50.0))["t_ready_s"] is not None
    assert "5.0 s" not in shown(worker("p-9", WorkerState.GONE))
    assert "5.0 s" in shown(worker("p-9", WorkerState.GONE, ready_s=50.0))


def test_what_comes_after_t_ready_is_no_part_of_it() -> None:
    segments = (
        Segment(SegmentName.RUNTIME_IMPORT, 100.0, 100.0, saved_s=2.5),
        Segment(SegmentName.COMPILE, 100.0, 104.0),
        Segment(SegmentName.GRAPH_STAGE, 104.5, None),
    )
    found = replace(
        worker("d-1", WorkerState.READY),
        progress=StartProgress(start_s=100.0, now_s=200.0, segments=segments),
    )
    path, _begun_s = path_of(found) or (None, 0.0)
    assert path is not None and path.wall_s == 4.0
    row = worker_row(found)
    assert row["t_ready_s"] == 4.0 and row["dominant_segment"] == "compile"


def test_a_report_says_what_a_standby_saved_and_when_the_graphs_came() -> None:
    told = {
        "worker_id": "d-1",
        "wall_s": 4.0,
        "exclusive_s": {"compile": 4.0},
        "unexplained_s": 0.0,
        "segments": [
            {
                "name": "runtime_import",
                "start_s": 0.0,
                "end_s": 0.0,
                "modelled": False,
                "detail": "",
                "saved_s": 2.5,
            }
        ],
        "upgrade": {"state": "complete", "seconds": 7.0},
    }
    start = start_of(told)
    assert (start.saved_s, start.upgraded_s) == (2.5, 7.0)
    assert start_of(start_document(start)) == start
    line = later_line(summed("x", [start]))
    assert "2.50 s saved" in line and "all graphs 7.00 s" in line
    failed = start_of({**told, "upgrade": {"state": "rolled_back", "seconds": 7.0}})
    assert failed.upgraded_s is None
    old = start_of({**told, "segments": [], "upgrade": None})
    assert later_line(summed("x", [old])) == ""


def test_an_explanation_says_when_graphs_came_and_why_they_did_not() -> None:
    kept = record()
    document = {"seconds": 7.0, "kv_tokens": 10, "digest": "sha256:1", "why": "other tokens"}
    told = {"upgrade_failed": Outcome("x", "d-1", "upgrade_failed", kept.create_s + 9.0, document)}
    (moment,) = _upgraded("d-1", told, kept)
    assert (moment["what"], moment["took_s"], moment["after_s"]) == ("keeps its graphs", 7.0, 9.0)
    assert moment["note"].startswith("other tokens")
    assert _upgraded("d-1", {}, kept) == []
