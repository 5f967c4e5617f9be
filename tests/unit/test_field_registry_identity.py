"""Field reports of the registry's identities: what a name is bound to, and what makes two things one."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.canonical import canonical, digest_of, parse
from readyplane.core.errors import Conflict, IdentityMismatch, InvalidField, NotFound, Refused
from readyplane.core.identity import KvFormat, Manifest, compatible
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import SystemClock
from readyplane.ports import Source
from readyplane_registry.blob_files import FileBlobs
from readyplane_registry.catalog import read_document
from readyplane_registry.checkpoint import read_checkpoint
from readyplane_registry.ingest import Published, build_manifest, publish_directory
from readyplane_registry.live import MemoryLive
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from tests.registry_data import SCALES, document, model_folder, sha256

COMMIT, NEXT = "1" * 40, "2" * 40


class World:
    """A registry over memory and a real folder of bytes."""

    def __init__(self, root: Path) -> None:
        clock = SystemClock()
        self.catalog, self.live = MemoryCatalog(), MemoryLive(clock, weight=0.3)
        self.blobs = FileBlobs(root / "blobs")
        self.registry = RegistryService(
            store=self.catalog,
            live=self.live,
            blobs=self.blobs,
            clock=clock,
            make_id=lambda: "t",
            storage_url=lambda: "http://127.0.0.1:1/v1/blobs",
        )

    async def publish(self, folder: Path, **more: Any) -> Published:
        return await publish_directory(
            folder, model="m", registry=self.registry, sink=self.blobs, **more
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def hub_cache(root: Path, *commits: str) -> Path:
    """A hub's cache as its client leaves it: contents by digest, snapshots of links, refs."""
    cache = root / "models--org--llama"
    for salt, commit in enumerate(commits):
        real = model_folder(root / f"real-{salt}", salt=salt)
        snapshot = cache / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (cache / "blobs").mkdir(exist_ok=True)
        for path in real.iterdir():
            content = cache / "blobs" / sha256(path.read_bytes()).removeprefix("sha256:")
            content.write_bytes(path.read_bytes())
            (snapshot / path.name).symlink_to(Path("../../blobs") / content.name)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(commits[0])
    return cache


def downloaded(root: Path, commit: str = COMMIT, **odd: str) -> Path:
    """A folder that a hub's client downloaded into, with its notes; `odd` files are of another one."""
    folder = model_folder(root / "downloaded")
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for path in folder.glob("[!.]*"):
        told = odd.get(path.name.partition(".")[0], commit)
        etag = sha256(path.read_bytes()).removeprefix("sha256:")
        (notes / f"{path.name}.metadata").write_text(f"{told}\n{etag}\n1700000000.0\n")
    return folder


async def test_b106_a_branch_is_resolved_once_and_only_digests_go_further(
    world: World, tmp_path: Path
) -> None:
    cache = hub_cache(tmp_path, COMMIT, NEXT)
    first = await world.publish(cache, revision="main", tag="m:prod")
    assert first.origin.fields() == {"repository": "org/llama", "ref": "main", "commit": COMMIT}
    assert (await world.registry.trail(first.digest)).origin == first.origin.fields()
    (cache / "refs" / "main").write_text(NEXT)
    second = await world.publish(cache, revision="main")
    assert second.origin.commit == NEXT and second.digest != first.digest
    assert (await world.registry.resolve("m:prod")).digest == first.digest
    held, other = KvFormat(first.digest), KvFormat(second.digest)
    assert [d.field for d in compatible(held, other)] == ["model_digest"], "P and D never pair"
    again = await world.publish(cache / "snapshots" / COMMIT)
    assert again.digest == first.digest, "the revision is told beside the artifact, not in it"


async def test_b106_files_of_two_revisions_are_no_artifact(world: World, tmp_path: Path) -> None:
    folder = downloaded(tmp_path, config=NEXT)
    with pytest.raises(IdentityMismatch) as caught:
        await world.publish(folder)
    assert COMMIT in str(caught.value) and f"config.json: commit {NEXT}" in str(caught.value)
    assert list(world.blobs.root.glob("sha256/*/*")) == []


@pytest.mark.parametrize("revision", ["gone", "../../x", NEXT, "/etc"])
def test_b106_a_revision_that_is_not_there_is_refused(tmp_path: Path, revision: str) -> None:
    with pytest.raises(InvalidField, match="revision"):
        read_checkpoint(hub_cache(tmp_path, COMMIT), revision=revision)
    with pytest.raises(InvalidField, match="revision"):
        read_checkpoint(downloaded(tmp_path), revision=revision)


async def test_b107_other_bytes_than_the_hub_promised_are_not_published(
    world: World, tmp_path: Path
) -> None:
    """The branch moved between asking and fetching: right name, right commit, other bytes."""
    folder = downloaded(tmp_path)
    assert (await world.publish(folder)).origin.commit == COMMIT
    stored = sorted(world.blobs.root.glob("sha256/*/*"))
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    with pytest.raises(IdentityMismatch, match="model-00001-of-00002"):
        await world.publish(folder)
    assert sorted(world.blobs.root.glob("sha256/*/*")) == stored
    assert len(await world.registry.list_manifests()) == 1
    cache = hub_cache(tmp_path / "hub", COMMIT)
    content = next((cache / "blobs").iterdir())
    content.write_bytes(b"{}" + content.read_bytes()[2:])
    with pytest.raises((IdentityMismatch, InvalidField)):
        await world.publish(cache)


async def test_b108_equal_files_of_another_form_are_another_artifact_and_no_source_for_it(
    world: World, tmp_path: Path
) -> None:
    """The registry's half: what a worker holds in another form has another identity."""
    base = document()
    variants = [
        base,
        {**base, "parallel": {"tp": 2}},
        {**base, "loader_version": "2"},
        {**base, "layout": "packed/2"},
        {**base, "capability": "sm90"},
        {**base, "schema": "readyplane/manifest/2", "quantisation": "fp8", "scales": SCALES},
        {
            **base,
            "schema": "readyplane/manifest/2",
            "quantisation": "fp8",
            "scales": {**SCALES, "granularity": "channel"},
        },
    ]
    digests = [
        (await world.registry.publish_manifest(one, bytes_elsewhere=True))[0] for one in variants
    ]
    assert len(set(digests)) == len(variants)
    for n, digest in enumerate(digests):
        source = Source(f"w{n}", digest, WeightTier.L1_HOST, f"http://w{n}/x", f"w{n}", f"w{n}-1")
        await world.registry.announce_source(source)
    for n, digest in enumerate(digests):
        plan = await world.registry.plan_fetch(digest, worker_id="me", incarnation="me-1", node="n")
        assert [r.source.source_id for r in plan.sources] == [f"w{n}"]


async def test_b109_b112_equal_names_and_sizes_with_new_bytes_get_a_new_identity(
    world: World, tmp_path: Path
) -> None:
    """B109, B112: the same place, fresh content; the old artifact stays what it was."""
    old = await world.publish(model_folder(tmp_path / "here"))
    new = await world.publish(model_folder(tmp_path / "here", salt=1))
    assert [(f.path, f.size_bytes) for f in old.manifest.files] == [
        (f.path, f.size_bytes) for f in new.manifest.files
    ]
    assert old.digest != new.digest
    assert await world.registry.get_manifest(old.digest) == old.manifest
    assert await world.blobs.missing(old.manifest.files) == ()


def test_b111_equal_meaning_is_one_digest_and_doubt_is_refused() -> None:
    """B111; `test_core_canonical` has the golden vectors and the second implementation."""
    one = '{"b":1e-7,"a":1.0,"\U0001f600":"e\u0301"}'
    two = '{"\U0001f600":"\u00e9","a":1,"b":0.0000001}'
    assert digest_of(parse(one)) == digest_of(parse(two))
    assert canonical(parse(one)) == '{"a":1,"b":1e-07,"\U0001f600":"\u00e9"}'.encode()
    for doubt in ('{"a":1,"a":1}', '{"a":NaN}', '{"a":1e999}', '{"a":-Infinity}'):
        with pytest.raises(InvalidField):
            parse(doubt)
    with pytest.raises(InvalidField, match="duplicate"):
        canonical({"\u00e9": 1, "e\u0301": 1})


def test_b111_files_named_in_another_unicode_form_are_one_manifest() -> None:
    """Sorting before normalising would give one manifest two digests."""
    made = document()
    made["files"] += [
        {"path": name, "size_bytes": 0, "sha256": sha256(b""), "chunks": [], "purpose": "other"}
        for name in ("\u00e9.txt", "f.txt", "ez.txt")
    ]
    other = json.loads(json.dumps(made))
    other["files"][1]["path"] = "e\u0301.txt"
    assert Manifest.from_document(made).digest == Manifest.from_document(other).digest
    manifest, data = read_document(other)
    assert manifest.digest == sha256(data)


async def test_b113_fifty_registrations_at_once_are_one_artifact(world: World) -> None:
    made = document()
    answers = await asyncio.gather(
        *(world.registry.publish_manifest(made, bytes_elsewhere=True) for _ in range(50))
    )
    assert {digest for digest, _created in answers} == {Manifest.from_document(made).digest}
    assert sum(created for _digest, created in answers) == 1
    other, _ = await world.registry.publish_manifest(document(salt="x"), bytes_elsewhere=True)
    await world.registry.set_tag("same/name", answers[0][0])
    with pytest.raises(Conflict):
        await world.registry.set_tag("same/name", other)


async def test_b114_a_name_is_not_reused_behind_anybodys_back_and_rollback_downloads_nothing(
    world: World, tmp_path: Path
) -> None:
    one = await world.publish(model_folder(tmp_path / "a"), tag="m:v1")
    two = await world.publish(model_folder(tmp_path / "b", salt=1), tag="m:v2")
    with pytest.raises(Conflict):
        await world.registry.set_tag("m:v1", two.digest)
    await world.registry.set_tag("m:v1", two.digest, expected_digest=one.digest)
    assert [t.digest for t in await world.registry.list_tags("m:v1")] == [two.digest, one.digest]
    assert await world.blobs.missing(one.manifest.files) == (), "both coexist"
    back = await world.publish(model_folder(tmp_path / "a"), tag="m:v1")
    assert back.digest == one.digest and back.uploaded_bytes == 0 and not back.created


# ----------------------------------------------------------------------------- folders of a hub


def spoiled(folder: Path, **index: Any) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": json.loads(path.read_text())["weight_map"], **index}))
    return folder


def test_a_shard_that_the_index_names_and_nobody_has_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InvalidField) as caught:
        build_manifest(folder, model="m")
    assert "shard 'model-00002-of-00002.safetensors'" in str(caught.value)
    assert "missing" in str(caught.value) and "3 tensors" in str(caught.value)


@pytest.mark.parametrize("index", [{"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": 1}])
def test_an_index_of_another_form_is_refused(tmp_path: Path, index: dict[str, Any]) -> None:
    folder = spoiled(model_folder(tmp_path / "m"), **index)
    with pytest.raises(InvalidField, match="weight_map"):
        build_manifest(folder, model="m")


def test_a_link_out_of_the_hubs_own_contents_is_refused(tmp_path: Path) -> None:
    cache = hub_cache(tmp_path, COMMIT)
    (cache / "snapshots" / COMMIT / "extra.json").symlink_to("/etc/hostname")
    with pytest.raises(InvalidField, match="extra"):
        read_checkpoint(cache)


async def test_a_publication_that_was_cut_off_leaves_no_name_and_sends_the_rest_only(
    world: World, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "m")

    class Cut(FileBlobs):
        left = 3

        async def put_file(self, sha256: str, path: Path, *, progress: Any = None) -> bool:
            self.left -= 1
            if self.left < 0:
                raise asyncio.CancelledError  # as a process that is killed: nothing is tidied up
            return await super().put_file(sha256, path, progress=progress)

    with pytest.raises(asyncio.CancelledError):
        await publish_directory(
            folder, model="m", registry=world.registry, sink=Cut(world.blobs.root), tag="m:1"
        )
    with pytest.raises(NotFound):
        await world.registry.resolve("m")
    with pytest.raises(NotFound):
        await world.registry.list_tags("m:1")
    whole = sum(path.stat().st_size for path in folder.iterdir())
    done = await world.publish(folder, tag="m:1")
    assert 0 < done.uploaded_bytes < whole
    assert (await world.registry.verify(done.digest)).ok


async def test_a_manifest_without_its_bytes_is_refused(world: World) -> None:
    with pytest.raises(Refused, match="no bytes of"):
        await world.registry.publish_manifest(document(data=b"never brought"))
