"""A vLLM as an engine, without one: what it is told, what its marks mean, what its plugin refuses."""

import asyncio
import json
import logging
import types
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core import gate_checks as gc
from readyplane.core.errors import InvalidField, Unavailable
from readyplane.core.startup import SegmentName, StartMode, critical_path
from readyplane.core.worker import CheckResult, Role
from readyplane.kit.clock import SystemClock
from readyplane_agent import basics
from readyplane_agent.engines import vllm, vllm_command, vllm_launch
from readyplane_agent.engines.choice import TellsFormats, engine_for
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.engines.vllm_hooks import ACCESS_LOG, facts_of, worth_telling
from readyplane_agent.engines.vllm_kept import may_keep
from readyplane_agent.engines.vllm_marks import (
    STEPS,
    Mark,
    read_facts,
    read_marks,
    segments_of,
    write_mark,
)

DIGEST = "sha256:" + "a" * 64


def spec(tmp_path: Path, **more: Any) -> EngineSpec:
    made = EngineSpec(
        engine_id="w1-a",
        role=Role.PREFILL,
        model="m",
        manifest_digest=DIGEST,
        arena_path=tmp_path / "arena",
        tensor_table_path=tmp_path / "tensors.json",
        config_path=tmp_path / "config.json",
        tokenizer_path=None,
        profile="h200-slow10",
        work_dir=tmp_path,
        log_path=tmp_path / "engine.log",
    )
    return replace(made, **more)


def value(words: list[str], flag: str) -> Any:
    return json.loads(words[words.index(flag) + 1])


# ------------------------------------------------------------------------------ what it is told


def test_the_command_line_of_vllm(tmp_path: Path) -> None:
    words = vllm_command.command(
        spec(tmp_path, mode=StartMode.EAGER, kv_tokens=100, extra_args=("--max-num-seqs", "8")),
        model_dir=tmp_path / "files",
        port=8000,
        replay_port=5558,
    )
    assert words[:3] == ["vllm", "serve", str(tmp_path / "files")]
    events = value(words, "--kv-events-config")
    assert events["endpoint"].startswith("ipc://@")  # to an address of TCP vLLM connects
    assert len(events["endpoint"]) < 100
    assert events["replay_endpoint"] == "tcp://127.0.0.1:5558"
    assert value(words, "--kv-transfer-config") == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "engine_id": "w1-a",
    }
    assert words[words.index("--load-format") + 1] == "readyplane"
    assert value(words, "--model-loader-extra-config") == {
        "arena": str(tmp_path / "arena"),
        "tensor_table": str(tmp_path / "tensors.json"),
        "manifest_digest": DIGEST,
        "wait_s": 5,
    }
    assert "--enforce-eager" in words
    assert value(words, "--num-gpu-blocks-override") == 7
    assert words[-2:] == ["--max-num-seqs", "8"]


def test_a_cpu_hands_kv_over_in_host_memory_and_has_larger_blocks(tmp_path: Path) -> None:
    order = spec(tmp_path, role=Role.DECODE, kv_tokens=1000)
    words = vllm_command.command(
        order, model_dir=Path("files"), port=1, replay_port=3, device="cpu"
    )
    assert value(words, "--kv-transfer-config")["kv_buffer_device"] == "cpu"
    waits = vllm_command.loader_words(replace(order, wait_weights=True))
    assert value(waits, "--model-loader-extra-config")["wait_s"] == 7200
    assert value(words, "--num-gpu-blocks-override") == 8
    for words_given in (("--block-size", "32"), ("--block-size=32",)):
        told = replace(order, extra_args=words_given)
        assert vllm_command.block_size_of(told, device="cpu") == 32


@pytest.mark.parametrize(
    ("environ", "files", "device"),
    [
        ({}, (), "cpu"),
        ({}, ("/dev/nvidiactl",), ""),
        ({}, ("/dev/kfd",), ""),
        ({"VLLM_TARGET_DEVICE": "cpu"}, ("/dev/nvidiactl",), "cpu"),
        ({"VLLM_TARGET_DEVICE": "cuda"}, (), ""),
    ],
)
def test_where_it_computes(environ: dict[str, str], files: tuple[str, ...], device: str) -> None:
    assert vllm_command.device_of(environ, exists=lambda path: path in files) == device


def test_what_vllm_reads_from_its_environment(tmp_path: Path) -> None:
    order = spec(tmp_path, compile_cache_dir=tmp_path / "c", environment={"VLLM_HOST_IP": "::1"})
    found = vllm_command.environment(order, side_channel_port=5600)
    assert found["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert found["VLLM_CACHE_ROOT"] == str(tmp_path / "c")
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        assert found[name].startswith(f"{tmp_path}/c/"), "all that is compiled lies in one folder"
    assert found["VLLM_HOST_IP"] == "::1", "who ordered it has the last word"
    before = vllm_command.process_environment(order, device="cpu")
    assert before["VLLM_TARGET_DEVICE"] == "cpu"
    assert before["HF_HUB_OFFLINE"] == "1"


def program_in(folder: Path, script: str) -> Path:
    """A `vllm` with a `python` beside it that runs a shell script."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("vllm", "exit 9"), ("python", script)):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o700)
    return folder / "vllm"


def test_the_program_is_given_or_named_or_found(tmp_path: Path) -> None:
    one, two = program_in(tmp_path / "one", ""), program_in(tmp_path / "two", "")
    environ = {"READYPLANE_VLLM_BIN": str(two.parent), "PATH": str(one.parent)}
    assert vllm_command.find_program(one, environ) == one
    assert vllm_command.find_program(None, environ) == two, "a folder stands for its program"
    assert vllm_command.find_program(None, {"PATH": str(one.parent)}) == one
    assert vllm_command.python_of(one) == one.parent / "python"
    for given_path, environment, why in (
        (None, {"PATH": str(tmp_path)}, "'vllm' is not on PATH"),
        (tmp_path / "nothing", {}, "cannot be run"),
    ):
        with pytest.raises(Unavailable, match=f"{why}.*make vllm-env"):
            vllm_command.find_program(given_path, environment)
    (one.parent / "python").unlink()
    with pytest.raises(Unavailable, match="no python beside it"):
        vllm_command.find_program(one, {})


async def test_a_missing_vllm_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("READYPLANE_VLLM_BIN", raising=False)
    engine = engine_for("vllm", clock=SystemClock())
    with pytest.raises(Unavailable, match="program 'vllm' is not on PATH"):
        await engine.start(spec(tmp_path, wait_weights=True))
    assert engine.pid == 0
    await engine.stop()


async def test_what_vllm_is_told_does_not_depend_on_the_workers_folder(tmp_path: Path) -> None:
    """vLLM keys its compile cache by the model's path: two workers have to give the same (B139)."""
    program = program_in(tmp_path / "bin", 'echo "in $(pwd)"; head -n 1; sleep 60')
    for name in ("w1", "w2"):
        work = tmp_path / name
        engine = vllm.VllmEngine(clock=SystemClock(), program=program)
        await engine.start(spec(work, wait_weights=True))
        try:
            async with asyncio.timeout(10):
                while "words" not in engine.log_tail():
                    await asyncio.sleep(0.02)
            where, line = engine.log_tail().splitlines()
            assert where == f"in {work}"
            words, environment, folder = vllm_launch.read_order(line.encode())
            assert words[:2] == ["serve", "files"]
            assert environment["VLLM_HOST_IP"] == "127.0.0.1"
            assert folder == str(work)
        finally:
            await engine.stop()
        assert engine.returncode is not None


async def test_a_process_stands_by_and_takes_its_order_later(tmp_path: Path) -> None:
    script = (
        'now() { cut -d" " -f1 /proc/uptime; }\n'
        'mark() { echo "[\\"$1\\", $(now), $$, \\"\\"]" >> "$READYPLANE_VLLM_MARKS"; }\n'
        "mark launched; mark imported; read order; mark ordered; echo told; sleep 60"
    )
    engine = vllm.VllmEngine(clock=SystemClock(), program=program_in(tmp_path / "bin", script))
    nowhere = Path("/nowhere")
    bare = spec(tmp_path, arena_path=nowhere, tensor_table_path=nowhere, config_path=nowhere)
    try:
        waits = await engine.stand_by(bare, stall_s=10, limit_s=20)
        assert waits.pid == engine.pid > 0
        assert waits.resident_bytes
        assert "told" not in engine.log_tail()
        assert engine.startup_segments() == (), "what was before its order is of no start"
        await engine.start(spec(tmp_path))
        assert engine.pid == waits.pid
        async with asyncio.timeout(10):
            while "told" not in engine.log_tail():
                await asyncio.sleep(0.02)
        kept = engine.startup_segments()[0]
        assert kept.name is SegmentName.RUNTIME_IMPORT
        assert kept.saved_s == pytest.approx(waits.ready_s - waits.start_s, abs=0.5)
    finally:
        await engine.stop()


async def test_a_process_that_ends_or_stalls_says_why(tmp_path: Path) -> None:
    no_module = program_in(
        tmp_path / "a", "echo No module named readyplane_agent.engines >&2; exit 1"
    )
    engine = vllm.VllmEngine(clock=SystemClock(), program=no_module)
    with pytest.raises(Unavailable, match="does not have readyplane installed"):
        await engine.stand_by(spec(tmp_path / "wa"), stall_s=10, limit_s=20)
    silent = vllm.VllmEngine(
        clock=SystemClock(), program=program_in(tmp_path / "b", "echo hm; sleep 60")
    )
    try:
        with pytest.raises(Unavailable, match=r"does not get on.*its log ends: hm"):
            await silent.stand_by(spec(tmp_path / "wb"), stall_s=3, limit_s=20)
    finally:
        await silent.stop()


@pytest.mark.parametrize("line", [b"", b"{}", b"[1]", b'{"words": 1, "environment": {}}'])
def test_an_order_that_is_none_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidField, match="order"):
        vllm_launch.read_order(line)


@pytest.mark.parametrize(
    ("environ", "on_cpu", "keeps"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, True, False),
        ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, True, True),
        ({"READYPLANE_VLLM_KEEP_IMPORTS": "0"}, False, False),
    ],
)
def test_processes_are_forked_where_that_changes_nothing(
    environ: dict[str, str], on_cpu: bool, keeps: bool
) -> None:
    assert may_keep(environ, on_cpu=on_cpu) is keeps


# ------------------------------------------------------------------------------- marks and segments

A_START = [
    ("spawned", 100.0, 1),
    ("launched", 100.4, 1),
    ("imported", 110.0, 1),
    ("ordered", 110.0, 1),
    ("registered", 110.5, 1),
    ("engine_begun", 111.0, 2),
    ("engine", 111.2, 2),
    ("worker_begun", 111.3, 3),
    ("worker", 111.5, 3),
    ("device", 112.0, 3),
    ("model", 112.2, 3),
    ("weights_awaited", 112.5, 3),
    ("weights", 120.0, 3),
    ("weights_loaded", 120.5, 3),
    ("model_loaded", 121.0, 3),
    ("kv_profile", 121.1, 3),
    ("compile", 121.1, 3),
    ("first_run", 150.0, 3),
    ("compiled", 151.0, 3),
    ("kv_pool", 151.2, 3),
    ("scheduler", 152.0, 2),
    ("engine_up", 152.5, 2),
]


def marks_of(rows: list[tuple[str, float, int]]) -> list[Mark]:
    told = {"compiled": "cache=miss:engine (1 compiled, 0 found)"}
    return [Mark(name, at_s, pid, told.get(name, "")) for name, at_s, pid in rows]


def test_a_start_is_explained_but_for_the_wait_for_weights() -> None:
    found = segments_of(marks_of(A_START), ordered_s=100.0, up_s=153.0)
    path = critical_path(found, start_s=100.0, end_s=153.0)
    assert path.unexplained_s == pytest.approx(7.5), "the agent's own segments are there meanwhile"
    assert path.inclusive_s[SegmentName.COMPILE] == pytest.approx(28.9)
    compiled = next(s for s in found if s.name is SegmentName.COMPILE)
    assert compiled.detail == "cache=miss:engine (1 compiled, 0 found)"
    assert path.inclusive_s[SegmentName.RUNTIME_IMPORT] == pytest.approx(11.4)
    assert path.inclusive_s[SegmentName.WEIGHT_DESERIALIZE] == pytest.approx(1.3)
    assert sum(path.exclusive_s.values()) + path.unexplained_s == pytest.approx(53.0)


def test_of_a_standby_only_what_comes_after_its_order_counts() -> None:
    rows = [(n, t + (40.0 if t >= 110.0 and n != "imported" else 0.0), p) for n, t, p in A_START]
    found = segments_of(marks_of(rows), ordered_s=150.0, up_s=193.0, stood_by_s=10.0)
    assert found[0].saved_s == 10.0
    assert found[0].start_s == found[0].end_s == 150.0
    assert min(s.start_s for s in found) >= 150.0
    path = critical_path(found, start_s=150.0, end_s=193.0)
    assert path.inclusive_s[SegmentName.RUNTIME_IMPORT] == pytest.approx(1.4)


def test_the_running_step_is_open() -> None:
    found = segments_of(marks_of(A_START[:17]), ordered_s=100.0, up_s=None)
    assert [s.name for s in found if s.end_s is None] == [SegmentName.COMPILE]


def test_of_several_ranks_the_last_one_counts() -> None:
    rows = [*A_START[:14], ("weights_loaded", 125.0, 4), ("model_loaded", 126.0, 4)]
    found = segments_of(marks_of(rows), ordered_s=100.0, up_s=None)
    copied = [s for s in found if "from the arena" in s.detail]
    assert [(s.start_s, s.end_s) for s in copied] == [(120.0, 125.0)]


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.floats(0, 1000), st.integers(1, 4)),
        max_size=30,
    ),
    st.floats(0, 1000),
    st.floats(0, 1000),
)
def test_segments_never_overlap_nor_leave_the_start(
    rows: list[tuple[str, float, int]], ordered_s: float, longer_s: float
) -> None:
    up_s = ordered_s + longer_s
    found = segments_of(marks_of(rows), ordered_s=ordered_s, up_s=up_s)
    for one, two in pairwise(found):
        assert one.end_s is not None
        assert one.end_s <= two.start_s
    for s in found:
        assert s.end_s is not None
        assert ordered_s <= s.start_s < s.end_s <= up_s


def test_marks_are_lines_and_odd_ones_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "marks"
    assert read_marks(path) == ()
    assert read_facts(path) == {}
    monkeypatch.setenv("READYPLANE_VLLM_MARKS", str(path))
    write_mark("launched", at_s=1.0)
    write_mark("facts", at_s=2.0, detail='{"block_size": 128}')
    with path.open("a") as file:
        file.write(
            '["of another version", 1.0, 1, ""]\nnot json\n["launched", "x", 1, ""]\n["ordered", 3.'
        )
    assert [(m.name, m.at_s) for m in read_marks(path)] == [("launched", 1.0)]
    assert read_facts(path) == {"block_size": 128}
    monkeypatch.delenv("READYPLANE_VLLM_MARKS")
    write_mark("ordered", at_s=2.0)
    write_mark("ordered", at_s=2.0, path="/proc/nowhere/marks")
    assert len(read_marks(path)) == 1, "without a file, or with a bad one, nothing is marked"


def test_the_facts_of_an_engine() -> None:
    config = types.SimpleNamespace(
        cache_config=types.SimpleNamespace(
            cache_dtype="auto", block_size=128, num_gpu_blocks=64, kv_cache_layout="LBHNC"
        ),
        model_config=types.SimpleNamespace(
            dtype="torch.bfloat16",
            quantization=None,
            hf_config=types.SimpleNamespace(quantization_config=None),
            hf_text_config=types.SimpleNamespace(rope_parameters={"rope_theta": 10000.0}),
        ),
        parallel_config=types.SimpleNamespace(tensor_parallel_size=1),
        scheduler_config=types.SimpleNamespace(max_num_seqs=8),
    )
    found = facts_of(config)
    assert (found["kv_dtype"], found["kv_layout"]) == ("bfloat16", "LBHNC")
    assert (found["positions"], found["quantisation"]) == ("rope/10000", "none")
    config.cache_config.cache_dtype = "fp8_e4m3"
    config.model_config.hf_text_config = types.SimpleNamespace()
    assert facts_of(config)["kv_dtype"] == "fp8_e4m3"
    assert facts_of(config)["positions"] == "unknown"
    config.model_config.quantization = "gptq_marlin"
    assert facts_of(config)["quantisation"] == "gptq_marlin", "it quantises what was plain"
    config.model_config.hf_config.quantization_config = {"quant_method": "gptq"}
    assert facts_of(config)["quantisation"] == "as configured"


def test_the_log_leaves_out_that_the_agent_reads_the_load(caplog: pytest.LogCaptureFixture) -> None:
    """A line a second: the end of the log, by which an engine's end is told, held nothing else."""
    access = logging.getLogger(ACCESS_LOG)
    access.addFilter(worth_telling)
    line = '%s - "%s %s HTTP/%s" %d'
    try:
        with caplog.at_level(logging.INFO, logger=ACCESS_LOG):
            for path, status in (("/metrics", 200), ("/health", 200), ("/health", 503)):
                access.info(line, "127.0.0.1:1", "GET", path, "1.1", status)
            access.info(line, "127.0.0.1:1", "POST", "/v1/completions", "1.1", 200)
            access.info("another line")
    finally:
        access.removeFilter(worth_telling)
    assert [m.partition(" - ")[2] or m for m in caplog.messages] == [
        '"GET /health HTTP/1.1" 503',
        '"POST /v1/completions HTTP/1.1" 200',
        "another line",
    ]


async def test_formats_are_told_in_the_manifests_names(tmp_path: Path) -> None:
    marks = tmp_path / "engine-marks.jsonl"
    program = program_in(tmp_path / "bin", "head -n 1; sleep 60")
    engine = vllm.VllmEngine(clock=SystemClock(), program=program)
    assert isinstance(engine, TellsFormats)
    assert engine.formats() == {}
    (tmp_path / "config.json").write_text(json.dumps({"quantisation": "fp8"}))
    await engine.start(spec(tmp_path))
    try:
        for told, expected in (("as configured", "fp8"), ("none", "none")):
            doc = {"kv_dtype": "bfloat16", "quantisation": told}
            write_mark("facts", at_s=1.0, detail=json.dumps(doc), path=str(marks))
            assert engine.formats() == {"kv_dtype": "bfloat16", "quantisation": expected}
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("told", "quantisation", "kv_dtype"),
    [
        ({"quantisation": "fp8", "kv_dtype": "bfloat16"}, "fp8", "bfloat16"),
        ({"kv_dtype": "bfloat16"}, gc.NOT_TOLD, "bfloat16"),
        ({}, gc.NOT_TOLD, gc.NOT_TOLD),
    ],
)
async def test_the_gate_hears_of_formats_that_the_metrics_do_not_tell(
    told: dict[str, str], quantisation: str, kv_dtype: str
) -> None:
    nobody = OpenAiEngine("http://127.0.0.1:1", model="m")
    serving: Any = types.SimpleNamespace(block_size=16)
    (check,) = await basics.amended(
        [CheckResult(gc.BASICS, True, {}, "")],
        nobody,
        prompt=(1,),
        arena=None,
        serving=serving,
        wanted_tokens=None,
        told=told,
    )
    assert check.evidence["quantisation"] == quantisation
    assert check.evidence["kv_dtype"] == kv_dtype
