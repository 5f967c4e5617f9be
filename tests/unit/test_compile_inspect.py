"""What is seen of a machine: devices, driver, packages, arguments, and what cannot be seen."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.compile_key import FACTORS, absent, compile_key, known
from readyplane.core.identity import Manifest
from readyplane.core.worker import Role
from readyplane_agent import compile_device, compile_inspect
from readyplane_agent.compile_inspect import Inspector, ProbeFailed, content_digest, run
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.engines.ranks import RankSpec
from tests.unit.agent_twins import artifact

MODEL = artifact().manifest
H100 = {"name": "NVIDIA H100 80GB HBM3", "capability": "sm90", "sm_count": 132, "total_bytes": 1}
SPEC = EngineSpec(
    engine_id="e",
    role=Role.BOTH,
    model="tiny",
    manifest_digest=MODEL.digest,
    arena_path=Path("/dev/null"),
    tensor_table_path=Path("/dev/null"),
    config_path=Path("/dev/null"),
    tokenizer_path=None,
    profile="h200-slow10",
    work_dir=Path("/tmp/w1"),
    log_path=Path("/tmp/w1/log"),
)


class Machine:
    """Answers of probes."""

    def __init__(self, devices: Any, driver: str = "560.35.03\n") -> None:
        self.devices, self.driver = devices, driver
        self.versions: dict[str, str | None] = {"vllm": "0.12.0", "torch": "2.9.1+cu128"}
        self.asked: list[Sequence[str]] = []

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> str:
        self.asked.append(command)
        if "readyplane_agent.compile_device" in command:
            if isinstance(self.devices, str):
                raise ProbeFailed(self.devices)
            return json.dumps(self.devices)
        if command[0] == "nvidia-smi":
            return self.driver
        return json.dumps({"versions": self.versions, "python": "CPython 3.12.1"})

    def inspector(self, engine: str = "modelled", **environ: str) -> Inspector:
        there = {"/dev/nvidiactl"}
        return Inspector(engine, environ, run=self.run, exists=lambda p: p in there)


@pytest.fixture(autouse=True)
def no_driver_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compile_inspect, "DRIVER_FILE", tmp_path / "none")


def factors(inspector: Inspector, spec: EngineSpec = SPEC, manifest: Manifest = MODEL) -> Any:
    return inspector.facts(spec, manifest).factors


def test_this_machine_gives_a_whole_key() -> None:
    facts = Inspector("modelled", {"PATH": "/usr/bin"}, exists=lambda _: False).facts(SPEC, MODEL)
    key = compile_key(facts)
    assert key.usable, key.problems
    assert set(FACTORS) <= set(key.factors)
    assert key.factors["driver"] == key.factors["device"] == "absent"
    assert "/" not in key.factors["profile"]


def test_a_device_is_described_by_its_class() -> None:
    found = factors(Machine({"devices": [H100, H100]}).inspector())
    assert found["device"] == known("NVIDIA H100 80GB HBM3")
    assert found["capability"] == known("sm90")
    assert found["sm_count"] == known(132)
    assert found["mig"] == absent()
    assert found["driver"] == known("560.35.03")
    slice_ = {**H100, "name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "sm_count": 16}
    assert factors(Machine({"devices": [slice_]}).inspector())["mig"] == known("1g.10gb")


def test_a_driver_is_read_from_the_kernels_file_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31\n")
    monkeypatch.setattr(compile_inspect, "DRIVER_FILE", file)
    assert factors(Machine({"devices": [H100]}).inspector())["driver"] == known("550.90.07")


@pytest.mark.parametrize(
    ("machine", "problem"),
    [
        (Machine("no answer within 10 s"), "no answer"),
        (Machine({"problem": "cuInit answered 999"}), "999"),
        (Machine({"devices": [H100, {**H100, "sm_count": 114}]}), "several kinds"),
        (Machine({"devices": [{"name": "x"}]}), "capability"),
    ],
)
def test_a_device_that_cannot_be_told_makes_the_key_useless(machine: Machine, problem: str) -> None:
    key = compile_key(machine.inspector().facts(SPEC, MODEL))
    assert not key.usable
    assert problem in key.problems["device"]


def test_two_drivers_or_none_are_not_known() -> None:
    for told in ("560.1\n570.1\n", ""):
        key = compile_key(Machine({"devices": [H100]}, told).inspector().facts(SPEC, MODEL))
        assert "driver" in key.problems


def test_devices_of_other_makers_are_not_taken_for_none() -> None:
    inspector = Inspector("modelled", {}, exists=lambda p: p == "/dev/kfd")
    assert "not inspected" in compile_key(inspector.facts(SPEC, MODEL)).problems["device"]


def test_packages_are_those_of_the_engines_own_python(tmp_path: Path) -> None:
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o700)
    machine = Machine({"devices": [H100]})
    found = factors(machine.inspector("vllm", PATH=str(script.parent)))
    assert found["engine_version"] == known("vllm=0.12.0")
    assert found["framework"] == known("torch=2.9.1+cu128")
    assert found["compiler"] == absent()
    assert found["python"] == known("CPython 3.12.1")
    assert any(command[0] == str(script.parent / "python") for command in machine.asked)
    machine.versions = {}
    assert (
        "not installed"
        in factors(machine.inspector("vllm", PATH=str(script.parent)))["engine_version"].problem
    )


def test_on_a_processor_the_cxx_compiler_counts(tmp_path: Path) -> None:
    """What vLLM compiles there is C++; the engine's program may be named instead of found."""
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.touch(0o700)
    machine = Machine({"devices": []})

    def run(command: Sequence[str], environ: Mapping[str, str]) -> str:
        if command[-1] == "--version":
            return f"{command[0]} 12.2.0\nCopyright\n"
        return machine.run(command, environ)

    def look(engine: str, **environ: str) -> Any:
        made = Inspector(engine, environ, run=run, exists=lambda _: False)
        return factors(made)["compiler"]

    for told in (script, script.parent):
        assert look("vllm", READYPLANE_VLLM_BIN=str(told)) == known("cxx=g++ 12.2.0")
    assert look("vllm", READYPLANE_VLLM_BIN=str(script), CXX="clang") == known("cxx=clang 12.2.0")
    assert look("modelled") == absent()


def test_a_cxx_compiler_that_does_not_answer_is_not_known(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.touch(0o700)
    machine = Machine({"devices": []})

    def run(command: Sequence[str], environ: Mapping[str, str]) -> str:
        if command[-1] == "--version":
            raise ProbeFailed("No such file or directory")
        return machine.run(command, environ)

    environ = {"READYPLANE_VLLM_BIN": str(script)}
    made = Inspector("vllm", environ, run=run, exists=lambda _: False)
    assert "C++ compiler: No such file" in factors(made)["compiler"].problem


def test_an_engine_that_is_not_there_is_not_known() -> None:
    found = factors(Machine({"devices": [H100]}).inspector("vllm", PATH="/nowhere"))
    assert "not on PATH" in found["engine_version"].problem


def test_arguments_count_and_those_of_a_pod_do_not() -> None:
    inspector = Inspector("modelled", {}, exists=lambda _: False)
    plain = compile_key(inspector.facts(SPEC, MODEL))
    pod = replace(
        SPEC,
        extra_args=("--port", "81", "--gpu-memory-utilization", "0.5"),
        port=81,
        host="10.0.0.9",
        engine_id="other",
        work_dir=Path("/tmp/w2"),
        kv_tokens=1000,
        environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": "5", "VLLM_LOGGING_LEVEL": "DEBUG"},
    )
    assert compile_key(inspector.facts(pod, MODEL)) == plain
    for words in (("--tensor-parallel-size", "2"), ("--new-flag",), ("--dtype=bfloat16",)):
        assert compile_key(inspector.facts(replace(SPEC, extra_args=words), MODEL)) != plain
    two = replace(SPEC, ranks=(RankSpec(1, Path("/dev/null"), Path("/dev/null")),))
    assert compile_key(inspector.facts(two, MODEL)).factors["tp"] == "2"
    key = compile_key(inspector.facts(replace(SPEC, extra_args=("-tp", "2")), MODEL))
    assert key.factors["tp"] == "2"


def test_the_models_structure_counts_and_its_values_do_not() -> None:
    inspector = Inspector("modelled", {}, exists=lambda _: False)
    one, other = artifact(seed=1).manifest, artifact(seed=2).manifest
    assert one.digest != other.digest
    assert compile_key(inspector.facts(SPEC, one)) == compile_key(inspector.facts(SPEC, other))
    wider = artifact(floats=60_000).manifest
    assert compile_key(inspector.facts(SPEC, wider)) != compile_key(inspector.facts(SPEC, one))


def test_a_folder_counts_by_its_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tuned.json").write_text("{}")
    assert content_digest(str(tmp_path / "a")) == content_digest(str(tmp_path / "b")) != ""
    (tmp_path / "b" / "tuned.json").write_text("{1}")
    assert content_digest(str(tmp_path / "a")) != content_digest(str(tmp_path / "b"))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert content_digest(str(tmp_path / "link")) == content_digest(str(tmp_path / "a"))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for text in ("not a path", str(tmp_path / "none"), f"x={tmp_path}", str(tmp_path / "loop")):
        assert content_digest(text) == ""


def test_a_probe_that_fails_hangs_or_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_inspect, "PROBE_LIMIT_S", 0.2)
    for command, why in (
        (["/no/such/program"], "No such file"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "exit status 3"),
        ([sys.executable, "-c", "import time; time.sleep(9)"], "no answer within"),
    ):
        with pytest.raises(ProbeFailed, match=why):
            run(command, {})


class Library:
    """A driver's library."""

    def __init__(self, **codes: int) -> None:
        self.codes = codes

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = 1
            if name == "cuDeviceGetName":
                arguments[0].value = b"NVIDIA X"
            if name == "cuDeviceGetAttribute":
                values = {75: 9, 76: 0, 16: 132}
                arguments[0]._obj.value = values[arguments[1]]
            return self.codes.get(name, 0)

        return call


def test_the_drivers_library_is_asked() -> None:
    assert compile_device.devices(Library()) == {
        "devices": [{"name": "NVIDIA X", "capability": "sm90", "sm_count": 132, "total_bytes": 0}]
    }
    assert compile_device.devices(Library(cuInit=100)) == {"devices": []}
    assert "999" in compile_device.devices(Library(cuInit=999))["problem"]
    assert "problem" in compile_device.devices(Library(cuDeviceGetAttribute=1))


def test_the_device_program_prints_json() -> None:
    command = [sys.executable, "-m", "readyplane_agent.compile_device"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(json.loads(done.stdout)) <= {"devices", "problem"}
