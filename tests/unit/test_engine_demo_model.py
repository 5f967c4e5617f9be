"""The demo model: equal arguments give equal bytes, and its files are what a registry expects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from readyplane.core.errors import InvalidField
from readyplane.core.identity import Manifest
from readyplane_agent.engines.modelled import answer
from readyplane_agent.engines.modelled.startup import Weights
from readyplane_agent.engines.port import arena_layout, read_tensor_table, tensor_table_document
from readyplane_lab.up.demo_model import make_demo_model
from readyplane_registry.ingest import Facts, build_manifest

SIZE = 14 * 2**20


def manifest_of(folder: Path, **options: int) -> tuple[Manifest, int]:
    demo = make_demo_model(folder, size_bytes=SIZE, shards=3, **options)
    facts = Facts(config=demo.config, canary=demo.canary)
    manifest, *_ = build_manifest(demo.folder, model="demo", facts=facts)
    assert {f.path: f.purpose for f in manifest.files if f.purpose == "weights"} == {
        name: "weights" for name, purpose in demo.purposes.items() if purpose == "weights"
    }
    assert {f.path for f in manifest.files} == set(demo.purposes)
    assert manifest.size_bytes == demo.size_bytes == pytest.approx(SIZE, rel=0.02)
    return manifest, demo.fingerprint


@pytest.mark.parametrize("size_mb", [13.0, 14.0, 16.5, 41.0])
def test_the_weights_are_as_large_as_was_asked_for(tmp_path: Path, size_mb: float) -> None:
    demo = make_demo_model(tmp_path / "m", size_bytes=round(size_mb * 1e6))
    manifest, *_ = build_manifest(demo.folder, model="demo")
    told = sum(t.size_bytes for t in manifest.tensors)
    assert abs(told / 1e6 - size_mb) <= 0.07
    assert demo.size_bytes == pytest.approx(told, rel=0.001)
    assert all(t.shape[0] % 64 == 0 and t.shape[1] == 1024 for t in manifest.tensors)
    assert {t.file for t in manifest.tensors} == {
        n for n, p in demo.purposes.items() if p == "weights"
    }


def test_equal_arguments_give_the_same_artifact(tmp_path: Path) -> None:
    one, fingerprint = manifest_of(tmp_path / "a")
    again, same = manifest_of(tmp_path / "b")
    other, different = manifest_of(tmp_path / "c", seed=2)
    assert (one.digest, fingerprint) == (again.digest, same)
    assert other.digest != one.digest and different != fingerprint
    assert one.canary is not None and other.canary is not None
    assert one.canary.golden_token_ids != other.canary.golden_token_ids


def test_the_engine_reads_the_fingerprint_that_was_published(tmp_path: Path) -> None:
    manifest, fingerprint = manifest_of(tmp_path / "m")
    layout = arena_layout(manifest)
    with (tmp_path / "arena").open("wb") as arena:
        arena.truncate(layout.size_bytes)
        for path, offset in layout.file_offsets.items():
            arena.seek(offset)
            arena.write((tmp_path / "m" / path).read_bytes())
    document = tensor_table_document(layout, manifest_digest=manifest.digest)
    (tmp_path / "table").write_text(json.dumps(document))
    weights = Weights(tmp_path / "arena", tmp_path / "table")
    assert weights.fingerprint == fingerprint
    assert weights.tensor_count == len(manifest.tensors)
    canary = manifest.canary
    assert canary is not None
    got = answer.golden_answer(fingerprint, canary.prompt_token_ids, len(canary.golden_token_ids))
    assert got == canary.golden_token_ids


def test_a_size_or_count_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="shards"):
        make_demo_model(tmp_path, shards=0)
    with pytest.raises(InvalidField, match="size_bytes"):
        make_demo_model(tmp_path, size_bytes=10**6)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change, text",
    [
        ({"schema": "x"}, "schema"),
        ({"arena_bytes": 10}, "within 10 B"),
        ({"tensors": [["a"]]}, "readyplane/tensor-table/1"),
        ({"tensors": 5}, "readyplane/tensor-table/1"),
    ],
)
def test_a_tensor_table_is_checked(tmp_path: Path, change: dict[str, object], text: str) -> None:
    manifest, _ = manifest_of(tmp_path / "m")
    document = tensor_table_document(arena_layout(manifest), manifest_digest=manifest.digest)
    slots, size = read_tensor_table(json.dumps(document))
    assert slots == arena_layout(manifest).tensors and size == document["arena_bytes"]
    with pytest.raises(InvalidField, match=text):
        read_tensor_table(json.dumps({**document, **change}))
