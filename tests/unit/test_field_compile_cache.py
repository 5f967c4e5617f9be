"""Public faults of compile caches and KV profiles, as tests (B135, B137 to B143)."""

import itertools
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.compile_key import FACTORS, CompileFacts, compile_key, differences, known
from readyplane_agent.compile_archive import Index, pack, read_index
from readyplane_agent.compile_store import CompileStore

FULL = CompileFacts({name: known(f"v-{name}") for name in FACTORS}, {"VLLM_USE_V1": "1"})
BASE = compile_key(FULL)

# ------------------------------------------------------------------------------------ compile key

relevant = st.sampled_from(
    [*FACTORS, "env.VLLM_USE_V1", "env.VLLM_PP_LAYER_PARTITION", "env.TORCHINDUCTOR_MAX_AUTOTUNE"]
)


def changed(name: str, value: str) -> CompileFacts:
    if name.startswith("env."):
        environment = {**FULL.environment, name.removeprefix("env."): value}
        return replace(FULL, environment=environment)
    return replace(FULL, factors={**FULL.factors, name: known(value)})


@given(relevant, st.text(st.characters(min_codepoint=48, max_codepoint=122), min_size=1))
def test_b135_each_factor_alone_changes_the_key_and_is_named(name: str, value: str) -> None:
    found = compile_key(changed(name, value + "!"))
    assert found.digest != BASE.digest
    assert [d.field for d in differences(BASE.factors, found.factors)] == [name]


@given(
    st.sampled_from(["VLLM_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "CUDA_", "NCCL_", "SGLANG_"])
)
def test_b135_a_variable_that_nobody_has_reviewed_counts(prefix: str) -> None:
    found = compile_key(replace(FULL, environment={**FULL.environment, f"{prefix}NEW_THING": "1"}))
    assert found.digest != BASE.digest
    assert [d.field for d in differences(BASE.factors, found.factors)] == [f"env.{prefix}NEW_THING"]


def test_b135_a_factor_that_only_one_engine_has_counts() -> None:
    more = {**FULL.factors, "encoder_mode": known("eager")}
    assert compile_key(replace(FULL, factors=more)).digest != BASE.digest


per_pod = st.fixed_dictionaries(
    {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": st.ip_addresses().map(str),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": st.integers(1, 65535).map(str),
        "VLLM_HOST_IP": st.ip_addresses().map(str),
        "VLLM_PORT": st.integers(1, 65535).map(lambda n: f"tcp://10.0.0.1:{n}"),
        "VLLM_LOGGING_LEVEL": st.sampled_from(["DEBUG", "INFO", "WARNING"]),
        "VLLM_CACHE_ROOT": st.sampled_from(["/tmp/a", "/var/b"]),
        "VLLM_CPU_KVCACHE_SPACE": st.integers(1, 99).map(str),
        "HOSTNAME": st.sampled_from(["pod-1", "pod-2"]),
        "POD_NAME": st.text(max_size=4),
        "NCCL_DEBUG": st.sampled_from(["INFO", "WARN"]),
        "CUDA_VISIBLE_DEVICES": st.sampled_from(["0", "1", "0,1"]),
    }
)


@given(per_pod)
def test_b139_what_differs_from_pod_to_pod_is_the_same_key(pod: dict[str, str]) -> None:
    found = compile_key(replace(FULL, environment={**FULL.environment, **pod}))
    assert found.usable
    assert found == BASE


# ---------------------------------------------------------------------------------- shared folder


def written(folder: Path, name: str, size_bytes: int = 300_000) -> tuple[bytes, Index]:
    """An archive of one compilation; compiling twice gives other bytes under the same key."""
    source = folder / f"{name}-source"
    source.mkdir()
    for number in range(4):
        (source / f"kernel-{number}").write_bytes(name.encode() * (size_bytes // len(name)))
    index = pack(source, folder / name, factors=BASE.factors)
    return (folder / name).read_bytes(), index


def install(folder: str, archive: str, index: bytes, pause_s: float) -> None:
    """A writer, which takes its time as one on a busy disk does."""
    real = os.write

    def write(fd: int, data: bytes) -> int:
        time.sleep(pause_s)
        return real(fd, data[:50_000])

    os.write = write  # type: ignore[assignment]
    ids = itertools.count()
    shelf = CompileStore(
        Path(folder), bytes_max=2**30, make_id=lambda: f"{os.getpid()}-{next(ids)}"
    )
    found = read_index(index)
    shelf.install(Path(archive).read_bytes(), found, wanted=found.factors)


def test_b138_eight_writers_and_one_killed_leave_a_whole_entry_or_none(tmp_path: Path) -> None:
    kept = tmp_path / "store"
    ids = itertools.count()
    shelf = CompileStore(kept, bytes_max=2**30, make_id=lambda: f"reader-{next(ids)}")
    archives = []
    for number in range(8):
        _, index = written(tmp_path, f"w{number}")
        archives.append((str(tmp_path / f"w{number}"), index))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["readyplane_agent.compile_store", "zstandard"])

    def start(number: int, pause_s: float) -> multiprocessing.process.BaseProcess:
        archive, index = archives[number]
        writer = context.Process(
            target=install, args=(str(kept), archive, index.document(), pause_s)
        )
        writer.start()
        return writer

    victim = start(0, 0.1)
    until_s = time.monotonic() + 20
    while not list((kept / "writing").glob("*/files/*")):
        assert time.monotonic() < until_s and victim.is_alive()
        time.sleep(0.005)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert shelf.take(BASE.factors, tmp_path / "none").miss == "absent", "half an entry is none"
    others = [start(number, 0.005) for number in range(1, 8)]
    seen = []
    reads = itertools.count()
    while any(writer.is_alive() for writer in others):
        target = tmp_path / f"engine-{next(reads)}"
        taken = shelf.take(BASE.factors, target)
        seen.append(taken.miss)
        if not taken.miss:
            assert len({f.read_bytes()[:2] for f in target.iterdir()}) == 1, "of one writer"
            assert taken.files == 4
    for writer in others:
        writer.join(20)
        assert writer.exitcode == 0
    assert set(seen) <= {"", "absent"}
    assert shelf.take(BASE.factors, tmp_path / "last").miss == ""
    assert not list((kept / "writing").iterdir()), "what the killed one left was removed"
    assert not list((kept / "quarantine").iterdir())


def test_b138_a_start_wipes_nothing(tmp_path: Path) -> None:
    ids = itertools.count()
    data, index = written(tmp_path, "w")
    first = CompileStore(tmp_path / "s", bytes_max=2**30, make_id=lambda: str(next(ids)))
    first.install(data, index, wanted=BASE.factors)
    again = CompileStore(tmp_path / "s", bytes_max=2**30, make_id=lambda: str(next(ids)))
    assert again.take(BASE.factors, tmp_path / "engine").files == 4


@pytest.mark.parametrize("number", range(4))
def test_b142_an_entry_that_lacks_a_listed_file_is_no_hit(tmp_path: Path, number: int) -> None:
    ids = itertools.count()
    data, index = written(tmp_path, "w")
    shelf = CompileStore(tmp_path / "s", bytes_max=2**30, make_id=lambda: str(next(ids)))
    shelf.install(data, index, wanted=BASE.factors)
    (shelf.entry(BASE.digest) / "files" / f"kernel-{number}").unlink()
    taken = shelf.take(BASE.factors, tmp_path / "engine")
    assert taken.miss == "incomplete"
    assert f"kernel-{number}" in taken.detail
    assert not (tmp_path / "engine").exists()
    assert list((tmp_path / "s" / "quarantine").iterdir())
