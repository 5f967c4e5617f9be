"""A rank's part of an artifact: cut and cast while it streams, against numpy on whole tensors (R11)."""

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField
from readyplane.core.identity import Manifest
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import SystemClock
from readyplane_agent.adopt import adopt
from readyplane_agent.dtypes import CASTS, bf16_bits, bf16_values
from readyplane_agent.engines.layout import tensor_table_document
from readyplane_agent.files import FileReader
from readyplane_agent.pipeline import Pipeline
from readyplane_agent.rank_arena import RankArena, place
from readyplane_agent.rank_plan import SplitRule, plan_rank
from readyplane_agent.source_use import SourceUse
from tests.unit.agent_twins import entry, safetensors

CHUNK = 4096
RULES = (SplitRule("*.rows", 0), SplitRule("*.columns", 1), SplitRule("*.deep", 2))
Tensors = dict[str, np.ndarray[Any, Any]]


def published(tensors: Tensors, chunk_bytes: int = CHUNK) -> tuple[Manifest, dict[str, bytes]]:
    """One file of float32 tensors, and a tokenizer."""
    data = safetensors(tensors)
    begin = 8 + int.from_bytes(data[:8], "little")
    listed, at = [], begin
    for name, value in tensors.items():
        listed.append(
            {
                "name": name,
                "dtype": "F32",
                "shape": list(value.shape),
                "file": "model.safetensors",
                "offset_bytes": at,
                "size_bytes": value.nbytes,
            }
        )
        at += value.nbytes
    files = {"model.safetensors": data, "tokenizer.json": b"{}"}
    document = {
        "schema": "readyplane/manifest/1",
        "kind": "weights",
        "model": "m",
        "chunk_bytes": chunk_bytes,
        "files": [entry(path, item, chunk_bytes) for path, item in files.items()],
        "tensors": listed,
    }
    return Manifest.from_document(document), files


def load(arena: RankArena, files: dict[str, bytes]) -> int:
    """Give it exactly the chunks it asks for; returns their bytes."""
    read = 0
    for path, index in arena.missing():
        start, size = arena.span(path, index)
        with arena.window(path, index) as window:
            window[:] = files[path][start : start + size]
        arena.mark(path, index)
        read += size
    return read


def part(value: np.ndarray[Any, Any], name: str, rank: int, tp: int) -> np.ndarray[Any, Any]:
    axis = next((rule.axis for rule in RULES if name.endswith(rule.pattern[1:])), None)
    return value if axis is None else np.split(value, tp, axis)[rank]


SHAPES = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.sampled_from(["rows", "columns", "deep", "whole", "one"]),
)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=5),
    tp=st.sampled_from([1, 2, 4]),
    cast=st.sampled_from([None, "BF16", "F16"]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_a_rank_has_what_numpy_cuts_and_casts(
    shapes: list[tuple[list[int], str]], tp: int, cast: str | None, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for number, (shape, kind) in enumerate(shapes):
        full = [*shape, 3, 5][:3] if kind == "deep" else [*shape, 7][: max(2, len(shape))]
        axis = {"rows": 0, "columns": 1, "deep": 2}.get(kind)
        if axis is not None:
            full[axis] *= tp
        if kind == "one":
            full = []
        tensors[f"t{number}.{kind}"] = rng.standard_normal(full).astype(np.float32)
    manifest, files = published(tensors)
    rank = data.draw(st.integers(0, tp - 1))
    dtypes = {"F32": cast} if cast else {}
    plan = plan_rank(manifest, rank=rank, tp=tp, rules=RULES, dtypes=dtypes)
    arena = RankArena(manifest, plan, poison=True)
    assert load(arena, files) == plan.read_bytes
    arena.seal()
    table = tensor_table_document(plan.layout, manifest_digest=manifest.digest)
    import json

    engine = adopt(arena.path, json.dumps(table))
    for name, value in tensors.items():
        wanted = part(value, name, rank, tp)
        if cast:
            wanted = CASTS["F32", cast](np.ascontiguousarray(wanted)).reshape(wanted.shape)
        assert engine[name].shape == wanted.shape
        assert engine[name].tobytes() == wanted.tobytes(), name
    assert bytes(arena.view("tokenizer.json")) == b"{}"
    engine.close()
    arena.close()


def test_only_the_chunks_of_the_ranks_rows_are_read() -> None:
    rows = {"a.rows": np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)}  # 64 chunks
    manifest, _ = published(rows)
    plans = [plan_rank(manifest, rank=rank, tp=4, rules=RULES) for rank in range(4)]
    for plan in plans:
        assert plan.placed_bytes == 64 * 1024 + 2
        assert plan.read_bytes <= plan.placed_bytes + 2 * CHUNK
    # Columns are in every row: all of it is read, and that is said.
    manifest, _ = published({"a.columns": rows["a.rows"]})
    assert plan_rank(manifest, rank=0, tp=4, rules=RULES).read_bytes > manifest.size_bytes - CHUNK


def test_wide_rows_are_not_read_between_the_ranks_columns() -> None:
    """A row of four chunks: of each row only the chunks that hold the rank's columns."""
    manifest, files = published({"a.columns": np.ones((8, 4 * CHUNK), np.float32)})
    plan = plan_rank(manifest, rank=2, tp=16, rules=RULES)
    assert plan.read_bytes <= 8 * 2 * CHUNK + 2 * CHUNK < manifest.size_bytes / 4
    arena = RankArena(manifest, plan)
    load(arena, files)
    arena.close()


def test_what_cannot_be_cut_or_cast_is_refused_by_name() -> None:
    manifest, _ = published({"a.rows": np.ones((3, 4), np.float32)})
    with pytest.raises(InvalidField, match=r"a\.rows.*multiple of 2"):
        plan_rank(manifest, rank=0, tp=2, rules=RULES)
    with pytest.raises(InvalidField, match=r"a\.rows\.dtype"):
        plan_rank(manifest, rank=0, tp=1, dtypes={"F32": "I8"})
    with pytest.raises(InvalidField, match="rank"):
        plan_rank(manifest, rank=2, tp=2)
    odd, _ = published({"a.rows": np.ones((4, 4), np.float32)}, chunk_bytes=4098)
    with pytest.raises(InvalidField, match="inside an element"):
        plan_rank(odd, rank=0, tp=1, dtypes={"F32": "BF16"})


@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_bf16_rounds_to_nearest_even_and_keeps_nan(values: list[float]) -> None:
    exact = np.array(values, np.float32)
    back = bf16_values(bf16_bits(exact))
    assert np.array_equal(np.isnan(back), np.isnan(exact))
    for value, got in zip(exact.astype(np.float64), back.astype(np.float64), strict=True):
        if math.isfinite(value) and math.isfinite(got) and value:
            # Eight significant bits: half a unit in the last place at most.
            assert abs(got - value) <= max(abs(value) * 2**-8, 2.0**-134)
    assert np.array_equal(bf16_bits(back)[~np.isnan(back)], bf16_bits(exact)[~np.isnan(back)])


async def test_the_pipeline_converts_within_its_budget(tmp_path: Path) -> None:
    """R11.1: read, verify, cut and cast, release; a damaged chunk is placed by nobody."""
    rng = np.random.default_rng(1)
    tensors = {f"l{n}.rows": rng.standard_normal((64, 512)).astype(np.float32) for n in range(4)}
    manifest, files = published(tensors)
    bad = bytearray(files["model.safetensors"])
    bad[3 * CHUNK + 5] ^= 1
    plan = plan_rank(manifest, rank=1, tp=2, rules=RULES, dtypes={"F32": "BF16"})
    arena = RankArena(manifest, plan, poison=True)
    pipeline = Pipeline(arena, clock=SystemClock(), staging_bytes=3 * CHUNK, connections=4)
    for folder, data in (("bad", bytes(bad)), ("good", files["model.safetensors"])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_bytes(data)
        (tmp_path / folder / "tokenizer.json").write_bytes(b"{}")

        def located(entry: Any, where: Path = tmp_path / folder) -> Path:
            return where / str(entry.path)

        use = SourceUse(folder, WeightTier.L3_RACK)
        await pipeline.fill(
            lambda found=located: FileReader(found),  # type: ignore[misc]
            use,
            gone=threading.Event(),
            stop=threading.Event(),
        )
        if folder == "bad" and ("model.safetensors", 3) in plan.chunks:
            assert use.fault is not None and use.fault.kind == "corrupt"
    assert arena.complete and pipeline.budget.peak_bytes <= 3 * CHUNK
    for placed in plan.placements:
        wanted = bf16_bits(part(tensors[placed.tensor.name], placed.tensor.name, 1, 2))
        got = arena.memory.view[placed.offset_bytes :][: placed.size_bytes]
        assert bytes(got) == wanted.tobytes()
    arena.close()


def test_a_piece_outside_a_tensor_places_nothing() -> None:
    manifest, _ = published({"a.whole": np.ones(4, np.float32)})
    plan = plan_rank(manifest, rank=0, tp=1)
    arena = memoryview(bytearray(plan.size_bytes))
    place(plan.placements[0], 1_000_000, memoryview(bytearray(16)), arena)
    assert bytes(arena) == bytes(plan.size_bytes)
