"""The memory of several ranks: cut by the rules, read once, whole together (R10.3, R17)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core import gate_checks as gc
from readyplane.core.errors import IdentityMismatch, InvalidField
from readyplane.core.identity import Manifest
from readyplane_agent import probes
from readyplane_agent.cache import WeightCache
from readyplane_agent.group_arena import GroupArena
from readyplane_agent.group_plan import plan_group, uncovered
from readyplane_agent.rank_plan import plan_rank
from tests.unit.test_agent_rank import CHUNK, Tensors, published

ROWS, COLUMNS, WHOLE = "l0.mlp.up_proj.weight", "l0.mlp.down_proj.weight", "l0.norm.weight"


def tensors(hidden: int, layers: int, seed: int = 0) -> Tensors:
    rng = np.random.default_rng(seed)
    made: Tensors = {"model.embed_tokens.weight": rng.random((hidden * 2, hidden), np.float32)}
    for n in range(layers):
        made[f"l{n}.mlp.up_proj.weight"] = rng.random((hidden * 3, hidden), np.float32)
        made[f"l{n}.mlp.down_proj.weight"] = rng.random((hidden, hidden * 3), np.float32)
        made[f"l{n}.norm.weight"] = rng.random((hidden + 1,), np.float32)
    return made


def filled(manifest: Manifest, files: dict[str, bytes], tp: int) -> tuple[GroupArena, int]:
    """An arena that was given every chunk it asked for, and how many bytes that took."""
    arena = GroupArena(manifest, plan_group(manifest, tp=tp), poison=True)
    read = 0
    for path, index in arena.missing():
        start, size = arena.span(path, index)
        with arena.window(path, index) as window:
            window[:] = files[path][start : start + size]
        arena.mark(path, index)
        read += size
    return arena, read


def part(arena: GroupArena, rank: int, name: str) -> np.ndarray[Any, Any]:
    own = arena.ranks[rank]
    (placed,) = [p for p in own.plan.placements if p.tensor.name == name]
    held = own.memory.view[placed.offset_bytes :][: placed.size_bytes]
    return np.frombuffer(bytes(held), np.float32).reshape(placed.shape)


@settings(max_examples=25, deadline=None)
@given(
    hidden=st.sampled_from([4, 12, 64]),
    layers=st.integers(1, 3),
    tp=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_every_rank_has_its_parts_and_a_chunk_is_read_once(
    hidden: int, layers: int, tp: int, seed: int
) -> None:
    wanted = tensors(hidden, layers, seed)
    manifest, files = published(wanted)
    arena, read = filled(manifest, files, tp)
    assert read == manifest.size_bytes
    arena.seal()
    for rank in range(tp):
        for name, value in wanted.items():
            axis = 1 if "down" in name else None if "norm" in name else 0
            cut = value if axis is None else np.split(value, tp, axis)[rank]
            assert np.array_equal(part(arena, rank, name), cut), (rank, name)
        assert arena.ranks[rank].placed_bytes == sum(
            p.size_bytes for p in arena.ranks[rank].plan.placements
        )
    for path, content in files.items():
        assert b"".join(arena.pieces(path, CHUNK // 3)) == content
    assert bytes(arena.view("tokenizer.json")) == b"{}"
    checks = {c.name: c for c in probes.loaded_checks(arena, tokenizer_digest="", ranks=tp)}
    coverage = checks[gc.SHARD_COVERAGE]
    assert coverage.passed and coverage.evidence["ranks"] == tp
    assert coverage.evidence["rank_tensors"] == [len(wanted)] * tp
    assert checks[gc.TENSOR_CHECKSUMS].passed
    arena.close()


def test_ranks_that_are_cut_hold_about_their_share() -> None:
    manifest, files = published(tensors(64, 2))
    arena, _ = filled(manifest, files, 4)
    sizes = [rank.plan.placed_bytes for rank in arena.ranks]
    assert max(sizes) < manifest.size_bytes / 4 * 1.05
    arena.close()


def test_a_cache_gets_the_files_as_they_were_published(tmp_path: Path) -> None:
    """What the ranks hold in parts is put together again, so that the next start is a warm one."""
    manifest, files = published(tensors(12, 2))
    arena, _ = filled(manifest, files, 2)
    arena.seal()
    cache = WeightCache(tmp_path, bytes_max=10**9)
    assert cache.store(arena) == manifest.size_bytes
    assert cache.holds(manifest)
    for entry in manifest.files:
        assert cache.locate(entry).read_bytes() == files[entry.path]
    arena.close()


def test_parts_that_are_not_what_was_loaded_do_not_get_into_the_cache(tmp_path: Path) -> None:
    manifest, files = published(tensors(12, 1))
    arena, _ = filled(manifest, files, 2)
    arena.ranks[1].memory.view[5] ^= 1
    with pytest.raises(IdentityMismatch, match="not the chunk that was loaded"):
        WeightCache(tmp_path, bytes_max=10**9).store(arena)
    assert [p for p in tmp_path.iterdir() if not p.name.endswith(".lock")] == []
    arena.close()


def test_a_swapped_part_is_named_by_the_coverage() -> None:
    """Rank 1 holding rank 0's part: nobody has the rest of that tensor."""
    manifest, _ = published(tensors(12, 1))
    plans = plan_group(manifest, tp=2).ranks
    doubled = [plans[0], replace(plans[1], placements=plans[0].placements)]
    wrong = uncovered(manifest, doubled)
    assert any(ROWS in text and "twice" in text for text in wrong), wrong
    assert not any(WHOLE in text for text in wrong)
    gone = replace(plans[1], placements=plans[1].placements[1:])
    assert any("parts [(0, " in text for text in uncovered(manifest, [plans[0], gone]))


def split_manifest(*, owners: dict[str, tuple[int, ...]], tp: int) -> tuple[Manifest, Any]:
    """An artifact that was placed for ranks when it was published."""
    made = {name: np.ones((4, 8), np.float32) for name in owners}
    manifest, files = published(made)
    placed = tuple(replace(t, ranks=owners[t.name]) for t in manifest.tensors)
    return replace(manifest, tensors=placed, tp=tp), files


def test_an_artifact_placed_for_ranks_is_taken_as_placed() -> None:
    owners = {"r0.up_proj.weight": (0,), "r1.up_proj.weight": (1,), "norm.weight": ()}
    manifest, files = split_manifest(owners=owners, tp=2)
    arena, _ = filled(manifest, files, 2)
    arena.seal()
    names = [{p.tensor.name for p in rank.plan.placements} for rank in arena.ranks]
    assert names == [{"r0.up_proj.weight", "norm.weight"}, {"r1.up_proj.weight", "norm.weight"}]
    # Not cut a second time: what is named like a column-parallel layer is whole.
    assert part(arena, 0, "r0.up_proj.weight").shape == (4, 8)
    assert probes.missing_tensors(arena, ranks=2) == []
    assert any(
        "2 ranks have memory, 4 are started" in w for w in probes.missing_tensors(arena, ranks=4)
    )
    arena.close()


@pytest.mark.parametrize("tp", [1, 4])
def test_a_placed_artifact_is_refused_by_another_number_of_ranks(tp: int) -> None:
    manifest, _ = split_manifest(owners={"a": (0,), "b": (1,)}, tp=2)
    with pytest.raises(IdentityMismatch, match=f"placed for 2 .*the worker has {tp}"):
        plan_group(manifest, tp=tp)


def test_a_tensor_whose_owner_does_not_exist_is_named() -> None:
    manifest, _ = split_manifest(owners={"a": (0,), "b": (7,)}, tp=2)
    with pytest.raises(IdentityMismatch, match=r"b \(no rank holds it"):
        plan_group(manifest, tp=2)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    manifest, _ = published({ROWS: np.ones((3, 4), np.float32)})
    with pytest.raises(InvalidField, match=r"up_proj\.weight.*multiple of 2"):
        plan_group(manifest, tp=2)
    with pytest.raises(InvalidField, match="--tp"):
        plan_group(manifest, tp=0)


def test_the_parts_of_one_rank_are_those_of_its_own_plan() -> None:
    """The plan of an adapter that loads one rank alone and that of a group are one."""
    manifest, _ = published(tensors(12, 1))
    from readyplane_agent.group_plan import TP_RULES

    for rank, plan in enumerate(plan_group(manifest, tp=2).ranks):
        alone = plan_rank(manifest, rank=rank, tp=2, rules=TP_RULES)
        assert alone.placements == plan.placements
