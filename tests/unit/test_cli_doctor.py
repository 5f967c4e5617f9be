"""`readyplane doctor`: each thing that can be wrong is found, named, and answered with what to do."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from readyplane_lab.cli import (
    doctor_engine,
    doctor_left,
    doctor_machine,
    doctor_stores,
    doctor_system,
)
from readyplane_lab.cli.doctor_left import Orphan
from readyplane_lab.cli.finding import Finding
from readyplane_lab.cli.where import run
from tests.unit.cli_world import Terminal, clean_environment

METRICS = """# TYPE vllm:num_requests_running gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1
vllm:num_requests_running{model_name="m"} 2
vllm:num_requests_waiting{model_name="m"} 1
vllm:prompt_tokens_total{model_name="m"} 10
vllm:generation_tokens_total{model_name="m"} 10
vllm:kv_cache_usage_perc{model_name="m"} 0.1
"""


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    return Terminal(capfd)


def _gather(found: Any) -> list[Finding]:
    async def gather() -> list[Finding]:
        return [finding async for finding in found]

    return run(gather())


def _machine(name: str, *ports: int, data_dir: Path | None = None) -> Finding:
    return next(f for f in doctor_machine.findings(ports, data_dir) if f.name == name)


@contextmanager
def serving(answers: dict[str, tuple[int, str]]) -> Iterator[str]:
    """An HTTP server with fixed answers by path; others are 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            self.rfile.read(length)
            status, text = answers.get(self.path, (404, "{}"))
            body = text.encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 - the name is the library's

        def log_message(self, *_: Any) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def engine(**changes: tuple[int, str]) -> dict[str, tuple[int, str]]:
    models = {"data": [{"id": "m", "max_model_len": 8192}]}
    answers = {
        "/health": (200, ""),
        "/v1/models": (200, json.dumps(models)),
        "/metrics": (200, METRICS),
        "/tokenize": (200, json.dumps({"tokens": [1, 2, 3], "count": 3, "max_model_len": 8192})),
    }
    return {**answers, **{f"/{k.replace('__', '/')}": v for k, v in changes.items()}}


def _statuses(findings: list[Finding]) -> dict[str, str]:
    return {f.name: f.status for f in findings}


# --------------------------------------------------------------------------- machine


def test_a_port_that_is_taken_fails(cli: Terminal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = cli("doctor", "--port", str(port), "--json")
    assert said.code == 1
    found = {f["name"]: f for f in said.document["findings"]}[f"port {port}"]
    assert found["status"] == "fail" and "ss -ltnp" in found["remedy"]
    assert said.document["counts"]["fail"] >= 1
    assert _machine(f"port {port}", port).status == "ok", "and is free afterwards"


def test_every_finding_that_is_not_well_says_what_to_do(cli: Terminal) -> None:
    for finding in cli("doctor", "--json").document["findings"]:
        assert set(finding) == {"area", "name", "status", "found", "remedy"}
        assert bool(finding["remedy"]) == (finding["status"] != "ok")


def test_doctor_for_a_person(cli: Terminal) -> None:
    out = cli("doctor").out
    assert out.splitlines()[0] == "machine" and "  ok   Python: 3." in out
    assert "stores" in out and "running `up`: none of this user" in out
    assert out.rstrip().splitlines()[-1].endswith("failures")


@pytest.mark.parametrize(("available", "status"), [(8e9, "ok"), (3e9, "warn"), (1e9, "fail")])
def test_memory(monkeypatch: pytest.MonkeyPatch, available: float, status: str) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=available))
    monkeypatch.setattr(doctor_machine, "_cgroup_room", lambda: float("inf"))
    assert _machine("memory").status == status
    monkeypatch.setattr(doctor_machine, "_cgroup_room", lambda: 1e9)
    assert _machine("memory").status == "fail", "the container's limit counts"


def test_a_full_disk_and_a_small_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=5e6))
    assert _machine("temporary folder").status == "fail"
    assert _machine("/dev/shm").status == "warn"


def test_folders_that_cannot_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    assert _machine("data folder", data_dir=file).status == "fail"
    assert "holds other files" in _machine("data folder", data_dir=tmp_path).found
    assert _machine("data folder", data_dir=tmp_path / "new" / "er").status == "ok"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    for name in ("state folder", "data folder"):
        found = _machine(name, data_dir=tmp_path / "new")
        assert found.status == "fail" and found.remedy


def test_what_a_killed_run_left_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(doctor_left, "orphans", list)
    assert _machine("left behind").status == "ok"
    left, held = tmp_path / "readyplane-up-a", tmp_path / "readyplane-up-b"
    for folder in (left, held):
        folder.mkdir()
        (folder / "lock").write_text("{}")
    monkeypatch.setattr(doctor_left, "orphans", lambda: [Orphan(17, "postgres", left)])
    with (held / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = _machine("left behind")
    assert found.status == "warn" and str(left) in found.found and str(held) not in found.found
    assert "readyplane up" in found.remedy
    assert "process 17 (postgres)" in found.found


def test_what_others_left_is_told_as_theirs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    kept = tmp_path / "their data"
    monkeypatch.setattr(
        doctor_left,
        "orphans",
        lambda: [Orphan(17, "python", kept, "/other/.venv"), Orphan(18, "sleep")],
    )
    found = [f for f in doctor_machine.findings([], None) if f.name.startswith("left behind")]
    theirs, nobodys = found
    assert theirs.name == f"left behind in {kept}" and theirs.status == "warn"
    assert theirs.found == "process 17 (python) of the installation /other/.venv"
    assert f"--data-dir '{kept}'" in theirs.remedy
    assert nobodys.found == "process 18 (sleep)" and "kill 18" in nobodys.remedy
    own = [f for f in doctor_machine.findings([], kept) if f.name == "left behind"]
    assert "process 17" in own[0].found, "the folder that is wanted is ours"


def test_an_orphan_is_a_carrier_below_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def process(
        pid: int, parent: int, *, carries: bool = True, status: str = "running", program: str = ""
    ) -> Any:
        environment = {"READYPLANE_RUN": "r"} if carries else {}
        return SimpleNamespace(
            pid=pid,
            environ=lambda: environment,
            ppid=lambda: parent,
            name=lambda: f"p{pid}",
            status=lambda: status,
            cmdline=lambda: [program or sys.executable, "-m", "x"],
        )

    several = [
        process(10, 1),  # its supervisor is gone
        process(11, 10),  # its child
        process(20, 99),  # of a run that lives
        process(30, 1, carries=False),
        process(40, 1, status="zombie"),
        process(50, 1),  # its `up` is the first process of a container, and runs
        process(60, 1, program="/other/.venv/bin/python"),
    ]
    runs = {10: tmp_path, 50: tmp_path / "held", 60: tmp_path / "else"}
    monkeypatch.setattr("psutil.process_iter", lambda: iter(several))
    monkeypatch.setattr(doctor_left, "_folder_of", runs.get)
    monkeypatch.setattr(doctor_left, "held", lambda folder: folder.name == "held")
    assert doctor_left.orphans() == [
        Orphan(10, "p10", tmp_path),
        Orphan(60, "p60", tmp_path / "else", "/other/.venv"),
    ]


def test_a_run_is_known_by_the_log_that_its_process_writes_to(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "a.log").open("w") as log:
        child = subprocess.Popen(["sleep", "60"], stdout=log)
        try:
            assert doctor_left._folder_of(child.pid) is None
            (tmp_path / "READYPLANE").write_text("{}")
            assert doctor_left._folder_of(child.pid) == tmp_path
        finally:
            child.kill()
            child.wait()


# --------------------------------------------------------------------------- stores


def test_embedded_stores_run_here() -> None:
    found = _gather(doctor_stores.findings("", ""))
    assert _statuses(found) == {"PostgreSQL (own)": "ok", "Valkey (own)": "ok"}
    assert all("version" in f.found for f in found)


def test_stores_that_do_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_stores, "ANSWER_S_MAX", 0.5)
    urls = ("postgresql+asyncpg://u:secret@127.0.0.1:1/x", "redis://:secret@127.0.0.1:1/0")
    found = _gather(doctor_stores.findings(*urls))
    assert [f.status for f in found] == ["fail", "fail"]
    assert all(f.remedy and "secret" not in f"{f.name}{f.found}{f.remedy}" for f in found)


# --------------------------------------------------------------------------- system


def test_nothing_runs_and_a_stale_book(cli: Terminal, tmp_path: Path) -> None:
    none = {"registry": "", "router": "", "planner": ""}
    (found,) = _gather(doctor_system.findings(none))
    assert (found.status, found.found) == ("ok", "none of this user")
    book = tmp_path / "state" / "readyplane" / "up.json"
    book.parent.mkdir(parents=True)
    book.write_text("{}")
    (found,) = _gather(doctor_system.findings(none))
    assert "of a killed one" in found.found


def test_a_service_that_is_not_ready_or_whose_clock_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving({"/readyz": (200, "{}")}) as url:
        assert run(doctor_system._http("router", url)).status == "ok"
        monkeypatch.setattr("readyplane.kit.clock.SystemClock.wall_s", lambda _: 1e9)
        skewed = run(doctor_system._http("router", url))
        assert skewed.status == "warn" and "clock" in skewed.found and "NTP" in skewed.remedy
    with serving({"/readyz": (503, '{"why": "Redis does not answer"}')}) as url:
        found = run(doctor_system._http("router", url))
        assert found.status == "fail" and "Redis does not answer" in found.found
    gone = run(doctor_system._http("router", url))
    assert gone.status == "fail" and "router.log" in gone.remedy


def test_a_given_address_where_nobody_listens(cli: Terminal) -> None:
    said = cli("doctor", "--planner", "127.0.0.1:1", "--json")
    assert said.code == 1
    names = {f["name"]: f["status"] for f in said.document["findings"] if f["area"] == "system"}
    assert names == {"planner (gRPC)": "fail", "planner's view": "fail"}


# --------------------------------------------------------------------------- engine


def test_an_engine_that_can_be_attached() -> None:
    with serving(engine()) as url:
        found = _gather(doctor_engine.findings(url))
    assert [f.status for f in found] == ["ok"] * 5
    assert {f.name: f.found for f in found}["KV pool"] == "1,000 blocks of 16 tokens"


@pytest.mark.parametrize(
    ("changes", "name", "status", "fragment"),
    [
        ({"health": (500, "down")}, "health", "fail", ""),
        ({"v1__models": (200, '{"data": []}')}, "models", "fail", "none"),
        ({"v1__models": (200, '{"data": [{"id": "m"}]}')}, "models", "fail", "max_model_len"),
        ({"metrics": (404, "")}, "metrics", "fail", ""),
        ({"metrics": (200, "up 1\n")}, "KV pool", "fail", "num_gpu_blocks"),
        (
            {"metrics": (200, METRICS.replace("vllm:num_requests_waiting", "other"))},
            "load",
            "warn",
            "vllm:num_requests_waiting",
        ),
        ({"tokenize": (404, "{}")}, "/tokenize", "warn", ""),
    ],
)
def test_what_an_engine_lacks(
    changes: dict[str, tuple[int, str]], name: str, status: str, fragment: str
) -> None:
    with serving(engine(**changes)) as url:
        found = {f.name: f for f in _gather(doctor_engine.findings(url))}
    assert found[name].status == status and found[name].remedy
    assert fragment in found[name].found


def test_no_engine_there() -> None:
    (found,) = _gather(doctor_engine.findings("http://127.0.0.1:1"))
    assert (found.name, found.status) == ("health", "fail")


def test_artifacts_that_are_ordered_no_more_are_named_with_the_way_out() -> None:
    """B132."""
    found = {"digest": "sha256:" + "a" * 64, "kind": "bytes", "starts": 2, "why": "m.safetensors"}
    state = {"pools": {"prefill": {"dead_ends": [found]}, "decode": {}}}
    (finding,) = doctor_system._dead_ends(state)
    assert (finding.name, finding.status) == ("starts of prefill workers", "fail")
    assert "sha256:aaaa" in finding.found and "(bytes: m.safetensors)" in finding.found
    assert "readyplane policy again" in finding.remedy
    found = {**found, "kind": "not_offered", "standby": True}
    state = {"pools": {"prefill": {}, "decode": {"dead_ends": [found]}}}
    (finding,) = doctor_system._dead_ends(state)
    assert (finding.name, finding.status) == ("starts of decode standbys", "warn")
    assert "decode.standby_holds=weights" in finding.remedy


def test_a_worker_whose_engine_does_not_answer_is_named() -> None:
    rows = [
        {"worker_id": "d-1", "state": "ready", "start": None},
        {"worker_id": "d-2", "state": "stalled", "start": {"failure": ""}},
        {"worker_id": "d-3", "state": "gone", "start": {"failure": "no peer has the bytes"}},
    ]
    stalled, failed = doctor_system._workers({"workers": rows})
    assert (stalled.name, stalled.status) == ("worker d-2", "warn")
    assert "does not answer" in stalled.found and "readyplane drain d-2" in stalled.remedy
    assert (failed.name, failed.found) == ("worker d-3", "no peer has the bytes")
