"""Field reports about loaders, by number (B126 to B134)."""

import asyncio
import hashlib
import json
import os
import random
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.errors import (
    BytesMissing,
    IdentityMismatch,
    InvalidField,
    Refused,
    Unavailable,
    Unsupported,
)
from readyplane.core.identity import FileEntry, Manifest
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import SystemClock
from readyplane.ports import RankedSource
from readyplane_agent import loader as loader_module
from readyplane_agent import probes
from readyplane_agent.adopt import adopt
from readyplane_agent.arena import Arena
from readyplane_agent.dead_end import dead_end
from readyplane_agent.engines.layout import arena_layout, tensor_table_document
from readyplane_agent.engines.offers import NotOffered
from readyplane_agent.files import FileReader
from readyplane_agent.loader import Loader
from readyplane_agent.no_source import BytesNowhere
from readyplane_agent.pipeline import Pipeline, StagingBudget, staging_share
from readyplane_agent.ranges import Fault
from readyplane_agent.rank_arena import RankArena
from readyplane_agent.rank_plan import plan_rank
from readyplane_agent.reading import Reader
from readyplane_agent.settings import AgentSettings
from readyplane_agent.source_use import SourceUse
from readyplane_agent.trace import StartTrace
from tests.unit.agent_twins import (
    CHUNK,
    Artifact,
    TwinRegistry,
    artifact,
    entry,
    safetensors,
    serving,
    source,
)


def digests(art: Artifact) -> dict[str, str]:
    """By tensor: sha256 of its bytes in the published file."""
    found = {}
    for tensor in art.manifest.tensors:
        begin, end = tensor.offset_bytes, tensor.offset_bytes + tensor.size_bytes
        found[tensor.name] = hashlib.sha256(art.files[tensor.file][begin:end]).hexdigest()
    return found


def make(art: Artifact, registry: TwinRegistry | None = None, **more: Any) -> tuple[Loader, Arena]:
    clock = SystemClock()
    arena = Arena(art.manifest)
    load = Loader(
        arena,
        registry=registry or TwinRegistry(),  # type: ignore[arg-type]
        clock=clock,
        reader=Reader("w1", "w1-abc", "local"),
        trace=StartTrace(clock, process_start_s=clock.monotonic_s()),
        limit_s=20.0,
        **more,
    )
    return load, arena


async def test_b126_a_tensor_that_is_kept_never_changes() -> None:
    """B126: kept from the first moment on, while the rest comes in after random delays."""
    art = artifact(shards=3, floats=60_000)
    load, arena = make(art, connections=4)
    rng = random.Random(1)

    def late(path: str, start: int, count: int, data: bytes) -> None:
        time.sleep(rng.random() * 0.004)

    kept: list[tuple[str, memoryview, str]] = []

    async def keep() -> None:
        """Take each tensor as soon as all of it is verified, and what it was then."""
        seen: set[str] = set()
        while len(seen) < len(art.manifest.tensors):
            for tensor in art.manifest.tensors:
                whole = arena.verified(tensor.file, tensor.offset_bytes, tensor.size_bytes)
                if tensor.name not in seen and whole:
                    seen.add(tensor.name)
                    view = arena.view(tensor.file)
                    part = view[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
                    kept.append((tensor.name, part, hashlib.sha256(part).hexdigest()))
            await asyncio.sleep(0.001)

    with serving(art.files, late) as store:
        await asyncio.gather(load.run([RankedSource(source(store.url), 1.0, "")]), keep())
    wanted = digests(art)
    for name, part, then in kept:
        assert then == wanted[name] == hashlib.sha256(part).hexdigest(), name
        part.release()
    arena.seal()
    table = tensor_table_document(arena_layout(art.manifest), manifest_digest=art.manifest.digest)
    engine = adopt(arena.path, json.dumps(table))
    arena.close()
    for name, digest in wanted.items():
        assert hashlib.sha256(engine[name].tobytes()).hexdigest() == digest
        assert not engine[name].flags.writeable
    with pytest.raises(OSError, match="not permitted"):
        os.pwrite(
            os.open(f"/proc/self/fd/{next(iter(engine._mapped.files.values()))}", os.O_RDWR),
            b"x",
            0,
        )
    engine.close()


async def test_b126_buffers_that_are_used_again_are_seen_by_nobody(tmp_path: Path) -> None:
    """B126: each buffer is poisoned when it is done with; every tensor is right all the same."""
    art = artifact(floats=80_000)
    art.write(tmp_path)
    plan = plan_rank(art.manifest, rank=0, tp=1)
    arena = RankArena(art.manifest, plan, poison=True)
    pipeline = Pipeline(arena, clock=SystemClock(), staging_bytes=2 * CHUNK, connections=2)
    await pipeline.fill(
        lambda: FileReader(lambda e: tmp_path / e.path),
        SourceUse("rack", WeightTier.L3_RACK),
        gone=threading.Event(),
        stop=threading.Event(),
    )
    arena.seal()
    wanted = digests(art)
    for placed in plan.placements:
        part = arena.memory.view[placed.offset_bytes :][: placed.size_bytes]
        assert hashlib.sha256(part).hexdigest() == wanted[placed.tensor.name]
        part.release()
    arena.close()


HEADER = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
BAD_HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "reversed": ({"a": {**HEADER["a"], "data_offsets": [16, 0]}}, "data_offsets"),
    "out of the file": ({"a": {**HEADER["a"], "data_offsets": [16, 32]}}, "data_offsets"),
    "shape": ({"a": {**HEADER["a"], "shape": [2, 3]}}, "span 24 bytes"),
    "dtype": ({"a": {**HEADER["a"], "dtype": "F31"}}, "dtype"),
    "negative": ({"a": {**HEADER["a"], "shape": [-2, -2]}}, "shape"),
    "gap": ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}, "gap"),
    "overlap": (
        {
            "a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
            "b": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]},
        },
        "overlaps",
    ),
}


def file_of(header: bytes, data: bytes = bytes(16)) -> memoryview:
    return memoryview(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_b128_a_header_is_not_trusted(case: str) -> None:
    """B128: the error names file and tensor; a manifest that says the same is refused before
    there is an arena for it."""
    document, wanted = BAD_HEADERS[case]
    with pytest.raises(InvalidField, match=wanted) as caught:
        probes.safetensors_table(file_of(json.dumps(document).encode()), file="m.safetensors")
    assert "m.safetensors" in str(caught.value) and "'a'" in str(caught.value).replace("'b'", "'a'")
    if case == "gap":
        return  # a manifest may name less than all; its file's header is compared with it
    data = bytes(file_of(json.dumps(HEADER).encode()))
    listed = [
        {
            "name": name,
            "dtype": item["dtype"],
            "shape": item["shape"],
            "file": "m.safetensors",
            "offset_bytes": len(data) - 16 + item["data_offsets"][0],
            "size_bytes": item["data_offsets"][1] - item["data_offsets"][0],
        }
        for name, item in document.items()
    ]
    with pytest.raises(InvalidField, match=r"manifest\.tensors"):
        Manifest.from_document(
            {
                "schema": "readyplane/manifest/1",
                "kind": "weights",
                "model": "m",
                "files": [entry("m.safetensors", data, 2**23)],
                "tensors": listed,
            }
        )


@given(length=st.integers(0, 2**64 - 1), rest=st.binary(max_size=300))
def test_b128_any_bytes_are_read_or_refused(length: int, rest: bytes) -> None:
    """B128: among them a header as long as the address space."""
    try:
        table = probes.safetensors_table(memoryview(struct.pack("<Q", length) + rest), file="f")
    except InvalidField:
        return
    assert sum(size for *_, size in table.values()) <= len(rest)


async def test_b130_tensors_without_elements_load(tmp_path: Path) -> None:
    """B130: shapes [0], [] and [1], and a file without a byte."""
    values: dict[str, np.ndarray[Any, Any]] = {
        "none": np.zeros((0,), np.float32),
        "scalar": np.full((), 7, np.float32),
        "one": np.ones((1,), np.float32),
    }
    files = {"m.safetensors": safetensors(values), "empty.txt": b""}
    begin = 8 + int.from_bytes(files["m.safetensors"][:8], "little")
    listed, at = [], begin
    for name, value in values.items():
        where = {"file": "m.safetensors", "offset_bytes": at, "size_bytes": value.nbytes}
        listed.append({"name": name, "dtype": "F32", "shape": list(value.shape), **where})
        at += value.nbytes
    document = {
        "schema": "readyplane/manifest/1",
        "kind": "weights",
        "model": "m",
        "files": [entry(path, data, CHUNK) for path, data in files.items()],
        "tensors": listed,
    }
    art = Artifact(Manifest.from_document(document), files)
    art.write(tmp_path)
    load, arena = make(art)
    rack = source(f"file://{tmp_path}", "rack:1", WeightTier.L3_RACK)
    async with asyncio.timeout(10):
        await load.run([RankedSource(rack, 1.0, "")])
    arena.seal()
    assert not probes.missing_tensors(arena, ranks=1)
    table = tensor_table_document(arena_layout(art.manifest), manifest_digest=art.manifest.digest)
    engine = adopt(arena.path, json.dumps(table))
    assert engine["none"].shape == (0,) and engine["scalar"] == 7 and engine["one"][0] == 1
    engine.close()
    arena.close()


class Hanging(FileReader):
    """A mount that stops answering in the middle."""

    def __init__(self, locate: Callable[[FileEntry], Path], freed: threading.Event) -> None:
        super().__init__(locate)
        self._freed = freed

    def read_hashed(self, entry: FileEntry, start: int, into: memoryview) -> Fault | str:
        if start:
            self._freed.wait(10)
        return super().read_hashed(entry, start, into)


async def test_b130_a_load_that_stalls_says_where(tmp_path: Path) -> None:
    """B130: the read is named; a thread that is stuck in the kernel ends the whole load, since it
    may still write to its chunk."""
    art = artifact(shards=1)
    art.write(tmp_path)
    arena = Arena(art.manifest)
    pipeline = Pipeline(arena, clock=SystemClock(), staging_bytes=2**20, connections=2, stall_s=0.2)
    freed, stop = threading.Event(), threading.Event()
    use = SourceUse("rack", WeightTier.L3_RACK)
    await pipeline.fill(
        lambda: Hanging(lambda e: tmp_path / e.path, freed), use, gone=threading.Event(), stop=stop
    )
    freed.set()
    assert use.fault is not None and use.fault.kind == "slow"
    assert "reading model-0.safetensors[" in use.fault.detail and " for " in use.fault.detail
    assert stop.is_set() and not arena.complete
    while any(t.name.startswith("load") for t in threading.enumerate()):
        await asyncio.sleep(0.01)
    arena.close()


def test_b131_all_ranks_of_a_node_stay_within_its_limit() -> None:
    """B131: eight ranks, 16 GiB: no buffer of one can take another's share."""
    gib, chunk = 2**30, 8 * 2**20
    share = staging_share(64 * gib, node_bytes=16 * gib, node_processes=8, chunk_bytes=chunk)
    budgets = [StagingBudget(share) for _ in range(8)]
    stop = threading.Event()
    stop.set()  # who would have to wait gives up
    for budget in budgets:
        while budget.take(chunk, stop=stop):
            pass
    assert sum(budget.peak_bytes for budget in budgets) <= 16 * gib
    with pytest.raises(InvalidField, match=r"staging-node-bytes.*at least one chunk each"):
        staging_share(64 * gib, node_bytes=16 * 2**20, node_processes=8, chunk_bytes=chunk)


def test_b131_unset_is_the_documented_default() -> None:
    """B131: 64 MiB a process, 2 GiB a node."""
    fields = AgentSettings.__dataclass_fields__
    found = {name: fields[name].default for name in ("staging_bytes", "staging_node_bytes")}
    assert found == {"staging_bytes": 64 * 2**20, "staging_node_bytes": 2 * 2**30}
    text = (Path(__file__).parents[2] / "docs/loader.md").read_text()
    assert "64 MiB a process" in text and "2 GiB a node" in text


async def test_b132_a_missing_file_ends_the_load_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B132: bounded attempts, then a terminal reason that says which file and why."""
    monkeypatch.setattr(loader_module, "ROUND_WAIT_S", 0.02)
    monkeypatch.setattr(loader_module, "HOPELESS_S", 0.1)
    art, registry = artifact(), TwinRegistry()
    art.write(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    registry.sources = [source(f"file://{tmp_path}", "rack:1", WeightTier.L3_RACK)]
    load, arena = make(art, registry)
    with pytest.raises(Unavailable, match=r"model-1\.safetensors: No such file") as caught:
        await load.run([RankedSource(s, 1.0, "") for s in registry.sources])
    assert "could not be fetched" in str(caught.value)
    assert "wrong or missing wherever they are offered" in str(caught.value)
    assert 1 < len(load.fetched.uses) <= 20
    arena.close()


@pytest.mark.parametrize(
    ("metadata", "fine"),
    [(None, True), ({}, True), ({"format": "pt"}, True), ({"n": 1}, False), ([], False)],
)
def test_b133_metadata_may_be_absent_empty_or_text(metadata: object, fine: bool) -> None:
    """B133: what is there is looked at, not whether it is true."""
    document: dict[str, Any] = dict(HEADER)
    if metadata is not None:
        document["__metadata__"] = metadata
    data = file_of(json.dumps(document).encode())
    if fine:
        assert set(probes.safetensors_table(data, file="m")) == {"a"}
    else:
        with pytest.raises(InvalidField, match="__metadata__"):
            probes.safetensors_table(data, file="m")


def test_b134_a_name_that_comes_twice_is_said_to() -> None:
    """B134: not an offset error, and with the name."""
    item = json.dumps(HEADER["a"])
    header = f'{{"layer.a":{item},"layer.a":{item}}}'.encode()
    with pytest.raises(InvalidField, match=r"layer\.a.*duplicate key"):
        probes.safetensors_table(file_of(header), file="m")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BytesNowhere("wrong everywhere", "publish again"), "bytes"),
        (BytesMissing("bytes", ["not stored"]), "bytes"),
        (IdentityMismatch("manifest", ["digest: a != b"]), "identity"),
        (Refused("trust", ["not signed"]), "trust"),
        (Refused("canary", ["sha256:… has no known answer"]), "canary_missing"),
        (Refused("start", ["canary: answered otherwise"]), ""),
        (NotOffered("a standby that sleeps by engine modelled", "start it without"), "not_offered"),
        (Unsupported("a compressed message", "send it as it is"), ""),
        (Unavailable("the store is away", "wait"), ""),
        (OSError("disk full"), ""),
    ],
)
def test_b132_only_what_every_start_would_meet_is_a_dead_end(error: Exception, kind: str) -> None:
    """B132: the class of the failure goes with it; what a node, a try or time may cure is none."""
    assert dead_end(error) == kind
