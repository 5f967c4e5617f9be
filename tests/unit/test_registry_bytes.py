"""The byte store on a disk, and folders that are published into it: whole, verified, contained."""

import asyncio
import fcntl
import json
import os
import stat
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import InvalidField, Refused, Unavailable
from readyplane.core.identity import Canary, Manifest, Scales
from readyplane_registry.blob_files import FileBlobs
from readyplane_registry.ingest import Facts, Progress, build_manifest, publish_directory
from tests.registry_data import document, file_entry, model_folder, safetensors, sha256

DATA = bytes(range(256)) * 50


@pytest.fixture
def blobs(tmp_path: Path) -> FileBlobs:
    return FileBlobs(tmp_path / "store")


def stored(blobs: FileBlobs) -> list[str]:
    return sorted(
        p.relative_to(blobs.root).as_posix() for p in blobs.root.rglob("*") if p.is_file()
    )


async def pieces(data: bytes, size: int = 1000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


def content(blobs: FileBlobs, digest: str) -> bytes | None:
    descriptor = blobs.open(digest)
    if descriptor is None:
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


async def test_a_blob_is_stored_once_under_its_digest_and_read_only(blobs: FileBlobs) -> None:
    digest = sha256(DATA)
    assert await blobs.put_stream(digest, pieces(DATA)) is True
    assert await blobs.put_stream(digest, pieces(DATA, 7)) is False
    assert content(blobs, digest) == DATA
    assert await blobs.has(digest, len(DATA)) and not await blobs.has(digest, 1)
    name = digest.removeprefix("sha256:")
    assert stored(blobs) == [f"sha256/{name[:2]}/{name}"]
    assert stat.S_IMODE((blobs.root / stored(blobs)[0]).stat().st_mode) == 0o444


async def test_the_empty_blob_is_a_blob(blobs: FileBlobs) -> None:
    assert await blobs.put_stream(sha256(b""), pieces(b"")) is True
    assert content(blobs, sha256(b"")) == b""


@pytest.mark.parametrize("sent", [DATA[:-1], DATA + b"x", b"", b"\7" + DATA[1:]])
async def test_of_other_bytes_nothing_is_kept(blobs: FileBlobs, sent: bytes) -> None:
    """B115, B122: truncated, longer, empty, one byte changed."""
    with pytest.raises(InvalidField) as caught:
        await blobs.put_stream(sha256(DATA), pieces(sent))
    assert sha256(sent) in str(caught.value)
    if not sent:
        assert "an empty body" in str(caught.value)
    assert stored(blobs) == []


async def test_a_stream_that_breaks_off_or_grows_too_long_leaves_nothing(blobs: FileBlobs) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield DATA[:5000]
        raise ConnectionResetError

    with pytest.raises(Unavailable):
        await blobs.put_stream(sha256(DATA), broken())
    with pytest.raises(InvalidField, match="at most"):
        await blobs.put_stream(sha256(DATA), pieces(DATA), size_max=len(DATA) - 1)
    assert stored(blobs) == []


async def test_ten_writers_of_one_blob_end_with_one_whole_file(blobs: FileBlobs) -> None:
    """B116."""
    digest = sha256(DATA)
    created = await asyncio.gather(*(blobs.put_stream(digest, pieces(DATA)) for _ in range(10)))
    assert any(created) and content(blobs, digest) == DATA and len(stored(blobs)) == 1


@pytest.mark.parametrize(
    "name",
    [
        "",
        "sha256:",
        "sha256:../../../etc/passwd",
        "sha256:" + "A" * 64,
        "../" * 10,
        "sha256:" + "a" * 63 + "/",
    ],
)
async def test_only_digests_name_blobs(blobs: FileBlobs, name: str) -> None:
    with pytest.raises(InvalidField):
        blobs.open(name)
    with pytest.raises(InvalidField):
        await blobs.put_stream(name, pieces(b""))


async def test_links_in_the_store_are_refused_on_read_and_write(
    blobs: FileBlobs, tmp_path: Path
) -> None:
    """B180: a file, a shard folder and the top folder as links to somewhere else."""
    outside = tmp_path / "outside"
    outside.mkdir()
    name = sha256(DATA).removeprefix("sha256:")
    (outside / name).write_bytes(DATA)
    shard = blobs.root / "sha256" / name[:2]
    shard.mkdir()
    (shard / name).symlink_to(outside / name)
    with pytest.raises(Refused, match="symbolic link"):
        blobs.open(sha256(DATA))
    assert await blobs.put_stream(sha256(DATA), pieces(DATA)) is True, "the link is replaced"
    assert not (shard / name).is_symlink() and content(blobs, sha256(DATA)) == DATA
    (shard / name).unlink()
    shard.rmdir()
    shard.symlink_to(outside, target_is_directory=True)
    with pytest.raises(Refused):
        blobs.open(sha256(DATA))
    with pytest.raises(Unavailable):
        await blobs.put_stream(sha256(DATA), pieces(DATA))
    assert [p.name for p in outside.iterdir()] == [name]


async def test_what_is_no_file_is_refused(blobs: FileBlobs) -> None:
    name = sha256(DATA).removeprefix("sha256:")
    shard = blobs.root / "sha256" / name[:2]
    shard.mkdir()
    os.mkfifo(shard / name)
    with pytest.raises(Refused, match="regular file"):
        blobs.open(sha256(DATA))


async def test_a_truncated_blob_is_not_taken_for_present_and_is_replaced(blobs: FileBlobs) -> None:
    """B121: after a power cut a name may be there without its bytes."""
    await blobs.put_stream(sha256(DATA), pieces(DATA))
    path = blobs.root / stored(blobs)[0]
    path.chmod(0o644)
    path.write_bytes(DATA[:100])
    entry = Manifest.from_document(
        document(files=[file_entry("weights.raw", DATA)], data=DATA)
    ).files[0]
    assert "100 bytes" in (await blobs.missing([entry]))[0]
    assert await blobs.put_stream(sha256(DATA), pieces(DATA)) is True
    assert await blobs.missing([entry]) == () and content(blobs, sha256(DATA)) == DATA


async def test_b153_what_killed_writers_left_is_swept_and_a_living_ones_is_not(
    tmp_path: Path,
) -> None:
    blobs = FileBlobs(tmp_path)
    dead, living = tmp_path / "tmp" / "dead.1", tmp_path / "tmp" / "living.2"
    dead.write_bytes(b"half")
    with living.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        FileBlobs(tmp_path)
        assert stored(blobs) == ["tmp/living.2"]


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(InvalidField) as caught:
        FileBlobs(file / "store")
    assert caught.value.field == "blob_dir"


# ------------------------------------------------------------------------------------- inspecting


async def published(blobs: FileBlobs, folder: Path) -> Manifest:
    manifest, paths, _skipped = build_manifest(folder, model="m")
    for entry in manifest.files:
        await blobs.put_file(entry.sha256, paths[entry.path])
    return manifest


async def problems(blobs: FileBlobs, manifest: Manifest, *, content: bool) -> dict[str, str]:
    return {c.path: c.problem for c in await blobs.inspect(manifest, content=content) if c.problem}


async def test_right_bytes_pass_both_checks(blobs: FileBlobs, tmp_path: Path) -> None:
    manifest = await published(blobs, model_folder(tmp_path / "m"))
    assert await problems(blobs, manifest, content=False) == {}
    assert await problems(blobs, manifest, content=True) == {}


async def test_one_flipped_byte_is_found_and_the_file_taken_out(
    blobs: FileBlobs, tmp_path: Path
) -> None:
    """B117, B138."""
    manifest = await published(blobs, model_folder(tmp_path / "m"))
    victim = next(f for f in manifest.files if f.purpose == "weights")
    name = victim.sha256.removeprefix("sha256:")
    path = blobs.root / "sha256" / name[:2] / name
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    found = await problems(blobs, manifest, content=False)
    assert list(found) == [victim.path] and "chunk 0" in found[victim.path]
    found = await problems(blobs, manifest, content=True)
    assert "taken out of the store" in found[victim.path]
    assert (blobs.root / "corrupt" / name).exists() and blobs.open(victim.sha256) is None
    assert (await problems(blobs, manifest, content=True))[victim.path] == "missing from the store"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"chunks": ["0" * 32]}, "chunk 0 (from byte 0)"),
        ({"tensor": {"name": "other"}}, "is not in the manifest"),
        ({"tensor": {"dtype": "I8"}}, "dtype is U8 in the file, I8 in the manifest"),
        ({"tensor": {"shape": [2, 10_000]}}, "shape is (20000,) in the file"),
        ({"drop": True}, "is not in the manifest"),
    ],
)
async def test_a_manifest_that_lies_about_its_bytes_is_found(
    blobs: FileBlobs, tmp_path: Path, change: dict[str, object], told: str
) -> None:
    manifest = await published(blobs, model_folder(tmp_path / "m"))
    doc = manifest.document()
    if "chunks" in change:
        doc["files"][0 if doc["files"][0]["purpose"] == "weights" else 1]["chunks"] = ["0" * 32]
    elif "drop" in change:
        doc["tensors"] = [t for t in doc["tensors"] if t["name"] != "layers.0.b"]
    else:
        lied = next(t for t in doc["tensors"] if t["name"] == "layers.0.w")
        lied.update(change["tensor"])
    found = await problems(blobs, Manifest.from_document(doc), content=False)
    assert any(told in text for text in found.values()), found


# --------------------------------------------------------------------------------------- ingesting


def test_a_folder_becomes_a_manifest_with_what_its_config_says(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / ".git").mkdir()
    (folder / ".git" / "x").write_text("hidden")
    (folder / ".DS_Store").write_text("hidden")
    (folder / "README.md").write_text("words")
    seen: list[Progress] = []
    manifest, paths, skipped = build_manifest(folder, model="m", progress=seen.append)
    assert {f.path: f.purpose for f in manifest.files} == {
        "README.md": "other",
        "config.json": "config",
        "model-00001-of-00002.safetensors": "weights",
        "model-00002-of-00002.safetensors": "weights",
        "model.safetensors.index.json": "config",
        "tokenizer.json": "tokenizer",
    }
    assert manifest.config == {"max_model_len": 4096, "vocab_size": 512, "eos_token_id": [2, 3]}
    assert len(manifest.tensors) == 6 and manifest.tokenizer_digest
    assert skipped == (".git/", ".DS_Store")
    assert seen[-1].done_bytes == seen[-1].total_bytes == manifest.size_bytes
    assert manifest.digest == build_manifest(folder, model="m")[0].digest
    moved = folder.rename(tmp_path / "elsewhere")
    assert build_manifest(moved, model="m")[0].digest == manifest.digest, "no path is identity"
    assert paths["config.json"] == folder / "config.json"


def test_equal_names_and_sizes_with_other_bytes_are_another_artifact(tmp_path: Path) -> None:
    """B109, B112."""
    one, _, _ = build_manifest(model_folder(tmp_path / "a"), model="m")
    two, _, _ = build_manifest(model_folder(tmp_path / "a", salt=1), model="m")
    assert [(f.path, f.size_bytes) for f in one.files] == [
        (f.path, f.size_bytes) for f in two.files
    ]
    assert one.digest != two.digest


@pytest.mark.parametrize(
    ("eos", "answer", "given", "told"),
    [
        (7, (3, 7), {}, True),
        ([5, 7], (3, 7), {}, True),
        (7, (7, 3), {}, None),
        (None, (9,), {}, None),
        (None, (9, 3), {}, True),  # as the folder says itself
        (7, (3, 7), {"canary_ends": False}, False),
    ],
)
def test_a_known_answer_that_ends_by_itself_is_said_to(
    tmp_path: Path, eos: Any, answer: tuple[int, ...], given: dict[str, Any], told: bool | None
) -> None:
    """Its last token is one that ends an answer, so an engine that goes on is told from others."""
    folder = model_folder(tmp_path / "m")
    config = {**given} if eos is None else {"eos_token_id": eos, **given}
    manifest, *_ = build_manifest(
        folder, model="m", facts=Facts(config=config, canary=Canary((1, 2), answer))
    )
    assert manifest.config.get("canary_ends") is told


def test_given_facts_win_and_the_canary_is_worked_out_last(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    asked: list[Manifest] = []

    def canary(manifest: Manifest) -> Canary:
        asked.append(manifest)
        return Canary((1, 2), (3,))

    facts = Facts(
        config={"max_model_len": 99, "kv_dtype": "fp8"},
        canary=canary,
        quantisation="fp8",
        scales=Scales("tensor", "F32"),
    )
    manifest, _, _ = build_manifest(folder, model="m", facts=facts)
    assert manifest.config["max_model_len"] == 99 and manifest.config["kv_dtype"] == "fp8"
    assert manifest.canary == Canary((1, 2), (3,)) and asked[0].canary is None
    assert manifest.quantisation == "fp8" and manifest.scales == Scales("tensor", "F32")


def spoil_nothing_there(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def spoil_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def spoil_link(folder: Path) -> None:
    (folder / "extra.json").symlink_to("/etc/hostname")


def spoil_linked_folder(folder: Path) -> None:
    (folder / "sub").symlink_to("/etc", target_is_directory=True)


def spoil_fifo(folder: Path) -> None:
    os.mkfifo(folder / "pipe.json")


def spoil_header(folder: Path) -> None:
    (folder / "z.safetensors").write_bytes(b"\xff" * 64)


def spoil_duplicate_tensor(folder: Path) -> None:
    (folder / "z.safetensors").write_bytes(safetensors({"layers.0.b": b"1"}))


def spoil_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["layers.9.w"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 512,')


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (spoil_nothing_there, "directory"),
        (spoil_pickle, "pytorch_model.bin"),
        (spoil_link, "extra.json"),
        (spoil_linked_folder, "sub"),
        (spoil_fifo, "pipe.json"),
        (spoil_header, "z.safetensors: header length"),
        (spoil_duplicate_tensor, "z.safetensors: tensor 'layers.0.b'"),
        (spoil_index, "tensor 'layers.9.w'"),
        (spoil_index, "it lies in no file of m"),
        (spoil_config, "config.json"),
    ],
)
def test_a_bad_folder_is_refused_naming_the_file(tmp_path: Path, spoil: object, told: str) -> None:
    folder = model_folder(tmp_path / "m")
    spoil(folder)  # type: ignore[operator]
    with pytest.raises(InvalidField) as caught:
        build_manifest(folder, model="m")
    assert told in str(caught.value)


def test_links_within_the_folder_are_followed_when_allowed(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "copy.json").symlink_to("config.json")
    (folder / "kept").mkdir()
    (folder / "kept" / "a.json").write_text("{}")
    (folder / "again").symlink_to("kept")
    manifest, paths, _ = build_manifest(folder, model="m", follow_links=True)
    assert {"copy.json", "again/a.json"} <= {file.path for file in manifest.files}
    assert not any(path.is_symlink() for path in paths.values()), "what is read is no link"


def link_out(folder: Path) -> str:
    (folder / "extra.json").symlink_to(folder.parent / "secret.json")
    return "extra.json"


def link_out_by_folder(folder: Path) -> str:
    (folder / "sub").symlink_to(folder.parent)
    return "sub"


def link_to_a_sibling_of_like_name(folder: Path) -> str:
    (folder.parent / (folder.name + "x")).mkdir()
    (folder.parent / (folder.name + "x") / "f.json").write_text("{}")
    (folder / "sub.json").symlink_to(folder.parent / (folder.name + "x") / "f.json")
    return "sub.json"


def link_to_foreign_blobs(folder: Path) -> str:
    (folder.parent / "blobs").mkdir()
    (folder.parent / "blobs" / "abc").write_text("{}")
    (folder / "extra.json").symlink_to(folder.parent / "blobs" / "abc")
    return "extra.json"


def link_in_circles(folder: Path) -> str:
    (folder / "one").mkdir()
    (folder / "one" / "round").symlink_to("..")
    return "round"


@pytest.mark.parametrize(
    "lead",
    [
        link_out,
        link_out_by_folder,
        link_to_a_sibling_of_like_name,
        link_to_foreign_blobs,
        link_in_circles,
    ],
)
def test_links_that_lead_out_are_refused_also_when_links_are_allowed(
    tmp_path: Path, lead: Callable[[Path], str]
) -> None:
    folder = model_folder(tmp_path / "m")
    (tmp_path / "secret.json").write_text("{}")
    name = lead(folder)
    for follow_links in (False, True):
        with pytest.raises(InvalidField) as caught:
            build_manifest(folder, model="m", follow_links=follow_links)
        assert name in caught.value.field
        assert "--follow-links" in caught.value.remedy or "circles" in caught.value.remedy


@pytest.mark.parametrize("follow_links", [False, True])
def test_a_snapshot_of_a_hub_may_link_to_its_own_contents_and_no_others(
    tmp_path: Path, *, follow_links: bool
) -> None:
    real = model_folder(tmp_path / "real")
    cache = tmp_path / "models--o--m"
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    for path in real.iterdir():
        (cache / "blobs" / path.name).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", path.name))
    manifest, _, _ = build_manifest(snapshot, model="m", follow_links=follow_links)
    assert manifest.digest == build_manifest(real, model="m")[0].digest
    (cache / "blobs").rename(tmp_path / "elsewhere")
    (cache / "blobs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidField, match="symbolic link"):
        build_manifest(snapshot, model="m", follow_links=follow_links)


async def test_a_file_that_changes_while_it_is_published_is_refused(
    blobs: FileBlobs, tmp_path: Path
) -> None:
    """B107: the bytes that are stored are those that were described."""
    folder = model_folder(tmp_path / "m")

    def meddle(progress: Progress) -> None:
        if progress.phase == "hash" and progress.done_bytes == progress.total_bytes:
            (folder / "README.md").write_text("after")

    (folder / "README.md").write_text("before")

    class Nobody:  # the registry must not be asked, but that it holds the bytes meanwhile
        async def hold_upload(self, *_hold: object, **_release: object) -> float:
            return 0.0

    nobody: Any = Nobody()
    with pytest.raises(InvalidField, match="changed while it was published"):
        await publish_directory(folder, model="m", registry=nobody, sink=blobs, progress=meddle)
