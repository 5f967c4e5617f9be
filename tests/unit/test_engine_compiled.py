"""What a modelled engine compiles and what it takes over: files that are there and right."""

from pathlib import Path

import pytest

from readyplane import profiles
from readyplane.core.startup import StartMode
from readyplane_agent.engines.modelled import memory
from readyplane_agent.engines.modelled.compiled import (
    captured_shapes,
    compile_key,
    compile_miss,
    folder_of,
    keep_compiled,
    kernel,
)
from readyplane_agent.engines.modelled.settings import ModelledSettings, parse

CONFIG = {"max_model_len": 4096, "vocab_size": 512, "block_size": 16, "name": "x"}
PROFILE = profiles.load("h200-llama8b-fp8")
GIB = 2**30


def settings(*words: str) -> ModelledSettings:
    need = ["--model", "m", "--arena", "a", "--tensor-table", "t", "--config", "c"]
    return parse([*need, "--profile", "p", *words])


def test_shapes_follow_the_settings() -> None:
    assert captured_shapes(settings("--max-num-seqs", "7")) == (1, 2, 4, 7)
    assert captured_shapes(settings("--max-num-seqs", "7", "--mode", "aot")) == (1, 2, 3, 4, 6, 7)
    assert captured_shapes(settings())[-1] == 256
    assert settings("--mode", "aot").mode is StartMode.AOT


def test_what_was_compiled_is_taken_and_another_key_is_named(tmp_path: Path) -> None:
    s = settings("--max-num-seqs", "4")
    key, shapes = compile_key(s, CONFIG), captured_shapes(s)
    assert compile_miss(None, key, shapes) == "no_cache"
    assert compile_miss(tmp_path, key, shapes) == "absent"
    keep_compiled(tmp_path, key, shapes)
    assert compile_miss(tmp_path, key, shapes) == ""
    assert compile_miss(tmp_path, {**key, "profile": "q"}, shapes) == "profile"
    assert compile_miss(tmp_path, {**key, "more": "1"}, shapes) == "more"
    fewer = {k: v for k, v in key.items() if k != "mode"}
    assert compile_miss(tmp_path, fewer, shapes) == "mode", "a field that only the cache has"
    assert compile_key(s, {**CONFIG, "name": "y"}) == key


@pytest.mark.parametrize("shape", [1, 2, 4])
def test_a_file_that_is_missing_or_wrong_is_a_miss_and_is_made_anew(
    tmp_path: Path, shape: int
) -> None:
    s = settings("--max-num-seqs", "4")
    key, shapes = compile_key(s, CONFIG), captured_shapes(s)
    keep_compiled(tmp_path, key, shapes)
    file = folder_of(tmp_path, key) / f"kernel-{shape:04d}.bin"
    for spoilt, why in ((None, "incomplete"), (kernel({"other": "key"}, shape), "corrupt")):
        file.unlink()
        if spoilt is not None:
            file.write_bytes(spoilt)
        assert compile_miss(tmp_path, key, shapes) == f"{why}:{file.name}"
        keep_compiled(tmp_path, key, shapes)
        assert compile_miss(tmp_path, key, shapes) == ""
    (folder_of(tmp_path, key) / "index.json").write_text("{")
    assert compile_miss(tmp_path, key, shapes) == "absent"


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    s = settings()
    (tmp_path / "file").write_text("")
    keep_compiled(tmp_path / "file", compile_key(s, CONFIG), captured_shapes(s))


def account(*words: str) -> memory.Account:
    return memory.account_of(settings(*words), PROFILE, weights_bytes=GIB, block_size=16)


def test_the_parts_of_the_memory_fit_on_the_device() -> None:
    found = account("--device-bytes", str(8 * GIB))
    pool = found.blocks * found.block_bytes
    parts = found.weights + found.activations + found.graphs + found.other
    assert found.measured and parts + pool <= 8 * GIB * memory.MEMORY_SHARE
    beside = account("--device-bytes", str(8 * GIB), "--device-taken-bytes", str(GIB))
    assert found.blocks - beside.blocks == pytest.approx(GIB / found.block_bytes, abs=1)
    assert account("--device-bytes", str(GIB)).blocks == 0
    few = account("--device-bytes", str(8 * GIB), "--kv-tokens", "160")
    assert few.blocks == 10


def test_a_size_is_taken_over_while_it_fits() -> None:
    device = ("--device-bytes", str(8 * GIB))
    found = account(*device)
    pool = str(found.blocks * found.block_bytes)
    again = account(*device, "--kv-reuse-bytes", pool)
    assert (again.blocks, again.measured, again.refused) == (found.blocks, False, "")
    beside = account(*device, "--kv-reuse-bytes", pool, "--device-taken-bytes", str(2 * GIB))
    assert beside.measured and "needed" in beside.refused
    assert beside.blocks < found.blocks
