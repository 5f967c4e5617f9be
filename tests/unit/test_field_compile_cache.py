"""Public faults of compile caches and KV profiles, as tests (B135, B137 to B143)."""

import itertools
import multiprocessing
import os
import signal
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.compile_key import (
    FACTORS,
    CompileFacts,
    absent,
    compile_key,
    differences,
    known,
    unknown,
)
from readyplane.core.errors import InvalidField
from readyplane.core.identity import KvFormat, canonical
from readyplane.core.kv_profile import (
    KvProfile,
    MemoryFacts,
    Refuse,
    Reuse,
    fingerprint_of,
    group_profile,
    kv_profile_from,
    may_reuse,
    measured,
)
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


def test_b138_a_folder_that_another_writer_swept_before_it_was_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its lock it looks as one whose writer was killed."""
    ids = itertools.count()
    data, index = written(tmp_path, "w")
    shelf = CompileStore(tmp_path / "s", bytes_max=2**30, make_id=lambda: str(next(ids)))
    real = os.open
    swept: list[Path] = []

    def sweep_first(path: Any, *flags: Any, **where: Any) -> int:
        if Path(path).parent.name == "writing" and not swept:
            swept.append(Path(path))
            Path(path).rmdir()
        return real(path, *flags, **where)

    monkeypatch.setattr(os, "open", sweep_first)
    assert shelf.install(data, index, wanted=index.factors)
    assert swept and not list((tmp_path / "s" / "writing").iterdir())
    assert shelf.take(index.factors, tmp_path / "engine").miss == ""


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


# ------------------------------------------------------------------------------------- KV profile

GIB = 2**30
MEMORY = MemoryFacts(
    device_total_bytes=80 * GIB,
    co_tenant_bytes=0,
    co_tenants=0,
    container_limit_bytes=0,
    memory_share=0.9,
    block_size=16,
    max_batch_tokens=8192,
    max_num_seqs=256,
)


def profile(memory: MemoryFacts = MEMORY, **more: int) -> KvProfile:
    assert memory.device_total_bytes is not None and memory.memory_share is not None
    assert memory.co_tenant_bytes is not None and memory.block_size is not None
    numbers = {"weights": 16 * GIB, "activations": 4 * GIB, "graphs": 2 * GIB, "other": GIB}
    return measured(
        fingerprint_of(BASE, memory)[0],
        device_total_bytes=memory.device_total_bytes,
        memory_share=memory.memory_share,
        co_tenant_bytes=memory.co_tenant_bytes,
        block_size=memory.block_size,
        **{"block_bytes": 2 * 2**20, **numbers, **more},
    )


def verdict(
    kept: KvProfile, memory: MemoryFacts = MEMORY, *, free: int = 79 * GIB, loaded: bool = False
) -> Reuse | Refuse:
    return may_reuse(kept, BASE, memory, free_bytes_now=known(free), loaded=loaded)


def refused(found: Reuse | Refuse) -> Refuse:
    assert isinstance(found, Refuse)
    return found


def test_b137_a_profile_taken_beside_a_neighbour_is_not_reused_on_a_clean_device() -> None:
    beside = replace(MEMORY, co_tenant_bytes=10 * GIB, co_tenants=1)
    kept = profile(beside)
    assert kept.fingerprint["kv.co_tenant_bytes"] == str(10 * GIB)
    found = refused(verdict(kept))
    assert found.kinds == ("fingerprint_mismatch",)
    assert any("kv.co_tenant_bytes: needed 0" in reason for reason in found.reasons)
    assert isinstance(verdict(kept, beside, free=69 * GIB), Reuse)
    wavers = replace(beside, co_tenant_bytes=10 * GIB + 3 * 2**20)
    assert isinstance(verdict(kept, wavers, free=69 * GIB), Reuse), "a driver's share wavers"


def test_b137_a_size_that_is_not_free_now_is_refused_and_measured_again() -> None:
    kept = profile()
    assert isinstance(verdict(kept), Reuse)
    found = refused(verdict(kept, free=60 * GIB))
    assert found.kinds == ("memory",)
    # With weights and graphs in place only the pool and its headroom have to fit.
    need = kept.parts.kv + kept.headroom_bytes
    assert isinstance(verdict(kept, free=need, loaded=True), Reuse)
    assert refused(verdict(kept, free=need - 1, loaded=True)).kinds == ("memory",)
    for free in (unknown("nvidia-smi timed out"), absent(), known("")):
        found = refused(may_reuse(kept, BASE, MEMORY, free_bytes_now=free, loaded=True))
        assert found.kinds == ("unknown",)


sizes = st.integers(1, 8 * GIB)


@given(sizes, sizes, sizes, sizes, st.integers(2**12, 2**24), st.sampled_from([0.5, 0.9, 0.95]))
def test_b140_a_stored_size_gives_the_blocks_again_and_the_parts_fit(
    weights: int, activations: int, graphs: int, other: int, block_bytes: int, share: float
) -> None:
    memory = replace(MEMORY, memory_share=share)
    parts = {"weights": weights, "activations": activations, "graphs": graphs, "other": other}
    kept = profile(memory, block_bytes=block_bytes, **parts)
    again = kv_profile_from(kept.encoded())
    assert again == kept
    assert abs(again.parts.kv // block_bytes - again.blocks) <= 1
    assert again.parts.total_bytes <= 80 * GIB * share
    # Graph memory is counted once: with as much more of it, exactly that is gone from the pool.
    more = profile(memory, **{**parts, "block_bytes": 1, "graphs": graphs + GIB})
    less = profile(memory, **{**parts, "block_bytes": 1})
    assert less.parts.kv - more.parts.kv == GIB
    found = verdict(kept, memory, free=80 * GIB)
    assert isinstance(found, Reuse) and found.blocks == kept.blocks


def test_b140_an_account_that_does_not_add_up_is_refused() -> None:
    kept = profile()
    assert refused(verdict(replace(kept, blocks=kept.blocks + 2))).kinds == ("wrong",)
    assert isinstance(verdict(replace(kept, blocks=kept.blocks + 1)), Reuse)
    twice = replace(kept, parts=replace(kept.parts, graphs=kept.parts.graphs + 20 * GIB))
    assert refused(verdict(twice, free=200 * GIB)).kinds == ("wrong",)


def test_b141_a_group_uses_the_fewest_blocks_of_its_ranks() -> None:
    block = 2**18
    ranks = [replace(profile(block_bytes=block), blocks=n) for n in (111_680, 111_488)]
    ranks = [replace(r, parts=replace(r.parts, kv=r.blocks * block)) for r in ranks]
    ranks[1] = replace(ranks[1], fingerprint={**ranks[1].fingerprint, "rank": "1"})
    found = group_profile(ranks)
    assert isinstance(found, KvProfile)
    assert found.blocks == 111_488
    assert found == group_profile(ranks[::-1])
    other = replace(ranks[0], fingerprint={**ranks[0].fingerprint, "driver": "570"})
    refusal = group_profile([other, ranks[1]])
    assert isinstance(refusal, Refuse) and "driver" in refusal.reasons[0]
    # A pair may have different numbers of blocks: what it must share says nothing of them.
    assert "blocks" not in " ".join(f.name for f in fields(KvFormat))


def test_b143_a_profile_of_another_capacity_is_a_fingerprint_mismatch() -> None:
    small = profile(replace(MEMORY, device_total_bytes=40 * GIB))
    large = replace(MEMORY, device_total_bytes=80 * GIB)
    assert small.capacity_tokens < profile(large).capacity_tokens
    found = refused(verdict(small, large))
    assert found.kinds == ("fingerprint_mismatch",)
    assert "kv.device_total_bytes" in found.reasons[0]
    # What is in use is a share of what was profiled.
    assert small.capacity_tokens == small.blocks * 16


facts = st.sampled_from([f.name for f in fields(MemoryFacts)])


@given(facts)
def test_each_fact_of_the_memory_alone_changes_the_fingerprint(name: str) -> None:
    value = getattr(MEMORY, name)
    changed_to: Any = {str: "other", int: 999 * GIB, float: 0.5}[type(value)]
    found = refused(verdict(profile(), replace(MEMORY, **{name: changed_to}), free=200 * GIB))
    assert [r for r in found.reasons if f"kv.{name}" in r]
    hidden = refused(verdict(profile(), replace(MEMORY, **{name: None})))
    assert f"unknown: kv.{name}: not known" in hidden.reasons


def test_a_plan_that_failed_is_not_tried_again_unchanged() -> None:
    kept = profile()
    again = may_reuse(
        profile(),
        BASE,
        MEMORY,
        free_bytes_now=known(79 * GIB),
        loaded=False,
        failed=frozenset({kept.plan_digest}),
    )
    assert refused(again).kinds == ("failed",)
    smaller = replace(kept, parts=replace(kept.parts, kv=kept.parts.kv - 4 * 2**20))
    assert smaller.plan_digest != kept.plan_digest, "another size is another plan"


def test_a_profile_that_is_no_document_of_ours_is_refused() -> None:
    good = profile().document()
    for name, value in (("blocks", -1), ("blocks", True), ("schema", "x"), ("parts", {})):
        with pytest.raises(InvalidField, match="kv_profile"):
            kv_profile_from(canonical({**good, name: value}))
    with pytest.raises(InvalidField, match="leave room"):
        profile(weights=80 * GIB)
