"""A need and its answer: the whole key, the nearest candidate, and what was withdrawn."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.compile_key import key_digest
from readyplane.core.errors import InvalidField, NotFound
from readyplane.core.identity import ArtifactKind, Manifest
from readyplane.core.resolution import withdrawn_tag
from readyplane.kit.clock import SystemClock
from readyplane_registry.blobs import MemoryBlobs
from readyplane_registry.catalog import choose, differing
from readyplane_registry.live import MemoryLive
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from tests.registry_data import file_entry

KEY = {"driver": "560", "tp": "1", "dtype": "bf16"}


def compiled(key: Mapping[str, str], data: bytes = b"x") -> dict[str, Any]:
    return {
        "schema": "readyplane/manifest/1",
        "kind": "compile",
        "model": "m",
        "files": [file_entry("archive.tar.zst", data, "other")],
        "chunk_bytes": 4096,
        "layout": "compile-archive/1",
        "loader_version": "modelled/1",
        "capability": "cpu",
        "key": dict(key),
    }


def manifest(key: Mapping[str, str]) -> Manifest:
    return Manifest.from_document(compiled(key))


def need(key: Mapping[str, str]) -> dict[str, str]:
    return {**{f"key.{k}": v for k, v in key.items()}, "key_digest": key_digest(key)}


factors = st.dictionaries(
    st.sampled_from("abcdefgh"), st.text("xyz", min_size=1, max_size=3), min_size=1
)


@given(factors, factors)
def test_a_whole_key_matches_itself_and_names_every_difference(
    wanted: dict[str, str], found: dict[str, str]
) -> None:
    fields = differing(manifest(found), need(wanted))
    assert {f.field.removeprefix("key.") for f in fields} == {
        name for name in {*wanted, *found} if wanted.get(name) != found.get(name)
    }
    for field in fields:
        name = field.field.removeprefix("key.")
        assert (field.left, field.right) == (
            wanted.get(name, "nothing"),
            found.get(name, "nothing"),
        )


def test_a_key_that_only_has_more_does_not_match() -> None:
    found = choose([manifest({**KEY, "env.VLLM_X": "1"})], need=need(KEY))
    assert found.manifest is None
    assert [str(f) for f in found.candidates[0].differing] == ["key.env.VLLM_X: nothing != 1"]


def test_the_nearest_comes_first() -> None:
    far, near = manifest({"driver": "1", "tp": "2", "dtype": "bf16"}), manifest({**KEY, "tp": "2"})
    found = choose([far, near], need=need(KEY), shown_max=1)
    assert [c.digest for c in found.candidates] == [near.digest]
    assert found.left_off == 1


async def registry() -> tuple[RegistryService, MemoryBlobs]:
    blobs = MemoryBlobs()
    clock = SystemClock()
    live = MemoryLive(clock, weight=0.3)
    service = RegistryService(
        store=MemoryCatalog(), live=live, blobs=blobs, clock=clock, make_id=lambda: "t"
    )
    return service, blobs


async def publish(service: RegistryService, blobs: MemoryBlobs, document: dict[str, Any]) -> str:
    blobs.put(Manifest.from_document(document).files)
    return (await service.publish_manifest(document))[0]


async def test_a_need_is_answered_with_the_artifact_or_with_candidates() -> None:
    service, blobs = await registry()
    digest = await publish(service, blobs, compiled(KEY))
    found = await service.resolve_need("m", kind="compile", need=need(KEY))
    assert found.manifest is not None
    assert found.manifest.digest == digest
    missed = await service.resolve_need("m", kind="compile", need=need({**KEY, "driver": "570"}))
    assert missed.manifest is None
    assert str(missed.candidates[0]) == f"{digest}: key.driver: needed 570, has 560"
    with pytest.raises(NotFound):
        await service.resolve_need("other", kind="compile", need=need(KEY))
    with pytest.raises(InvalidField, match="candidates_max"):
        await service.resolve_need("m", kind="compile", need={}, candidates_max=0)


async def test_what_is_withdrawn_is_not_resolved_to_any_more() -> None:
    service, blobs = await registry()
    digest = await publish(service, blobs, compiled(KEY))
    other = await publish(service, blobs, compiled({**KEY, "tp": "2"}, b"y"))
    await service.set_tag("compile/one", digest)
    await service.set_tag(withdrawn_tag(digest), digest)
    missed = await service.resolve_need("m", kind="compile", need=need(KEY))
    assert missed.manifest is None
    assert [c.digest for c in missed.candidates] == [other]
    with pytest.raises(NotFound, match="withdrawn"):
        await service.resolve("compile/one", kind="compile")
    assert (await service.resolve(digest, kind="compile")).kind is ArtifactKind.COMPILE


async def test_a_tag_called_so_withdraws_only_what_it_is_named_for() -> None:
    service, blobs = await registry()
    digest = await publish(service, blobs, compiled(KEY))
    await service.set_tag(withdrawn_tag("sha256:" + "0" * 64), digest)
    assert (await service.resolve_need("m", kind="compile", need=need(KEY))).manifest is not None
