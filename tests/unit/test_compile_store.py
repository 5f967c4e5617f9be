"""Archives of compiled code and the node's store of them."""

import hashlib
import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.compile_key import key_digest
from readyplane.core.errors import BytesMissing, IdentityMismatch, InvalidField, Unavailable
from readyplane.core.identity import ArtifactKind, Manifest, canonical
from readyplane.kit.clock import SystemClock
from readyplane_agent import compile_publish
from readyplane_agent.compile_archive import Index, Listed, pack, read_index, unpack
from readyplane_agent.compile_store import CompileStore
from readyplane_agent.reading import Reader

KEY = {"driver": "560", "tp": "1"}
FILES = {"a/kernel.cubin": b"\1" * 3000, "a/b/meta.json": b"{}", "top": b"x" * 100}


def folder(path: Path, files: dict[str, bytes] | None = None) -> Path:
    for name, data in (FILES if files is None else files).items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {f.relative_to(path).as_posix(): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def packed(tmp_path: Path, files: dict[str, bytes] | None = None) -> tuple[bytes, Index]:
    archive = tmp_path / f"archive-{len(list(tmp_path.iterdir()))}"
    source = tmp_path / f"{archive.name}-source"
    index = pack(folder(source, files), archive, factors=KEY)
    return archive.read_bytes(), index


def store(path: Path, *, bytes_max: int = 2**30) -> CompileStore:
    ids = itertools.count()
    return CompileStore(path, bytes_max=bytes_max, make_id=lambda: f"{os.getpid()}-{next(ids)}")


def test_the_same_contents_are_the_same_bytes(tmp_path: Path) -> None:
    one, index = packed(tmp_path)
    other, again = packed(tmp_path)
    assert one == other
    assert index == again == read_index(index.document())
    assert index.document() == again.document()


@settings(max_examples=25)  # each writes to the disk and waits for it
@given(
    st.dictionaries(
        st.text("abc/", min_size=1, max_size=6).filter(
            lambda p: not set(p.split("/")) & {"", ".", ".."}
        ),
        st.binary(min_size=1, max_size=50),
        min_size=1,
        max_size=5,
    )
)
def test_what_is_packed_comes_out(files: dict[str, bytes]) -> None:
    import tempfile

    names = set(files)
    if any(a.startswith(f"{b}/") for a in names for b in names):
        return  # no folder can hold these
    with tempfile.TemporaryDirectory() as name:
        data, index = packed(Path(name), files)
        unpack(data, index, Path(name) / "out")
        assert contents(Path(name) / "out") == files


def test_what_is_no_finished_file_is_left_out_and_told(tmp_path: Path) -> None:
    source = folder(tmp_path / "s", {"good": b"1", "x.lock": b"1", "half.tmp": b"1", "zero": b""})
    (source / "link").symlink_to("good")
    (source / "dir").symlink_to(tmp_path)
    os.mkfifo(source / "pipe")
    index = pack(source, tmp_path / "archive", factors=KEY)
    assert [e.path for e in index.files] == ["good"]
    assert sorted(text.partition(":")[0] for text in index.left_out) == [
        *("dir", "half.tmp", "link", "pipe", "x.lock", "zero")
    ]


def test_an_empty_folder_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with pytest.raises(InvalidField, match="0 files"):
        pack(tmp_path / "s", tmp_path / "archive", factors=KEY)


@pytest.mark.parametrize(
    "path",
    ["../x", "/x", "a/../x", "a//x", "", ".", "a/.", "a\\b", "a\0b", "x" * 300, "a\nb"],
)
def test_a_path_that_leaves_the_folder_is_refused(path: str) -> None:
    index = Index(KEY, (Listed(path, 1, "sha256:" + "0" * 64),))
    with pytest.raises(InvalidField, match="path"):
        read_index(index.document())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"schema": "x"}, "schema"),
        ({"files": []}, "files"),
        ({"files": [{"path": "x", "size_bytes": -1, "sha256": "sha256:" + "0" * 64}]}, "size"),
        ({"files": [{"path": "x", "size_bytes": 2**60, "sha256": "sha256:" + "0" * 64}]}, "size"),
        ({"files": [{"path": "x", "size_bytes": 1, "sha256": "md5"}]}, "sha256"),
        ({"files": [{"path": "x", "link": "/etc/passwd"}]}, "give path"),
        ({"factors": {"a": 1}}, "factors"),
    ],
)
def test_an_index_that_lies_is_refused(change: dict[str, object], what: str) -> None:
    good = Index(KEY, (Listed("x", 1, "sha256:" + "0" * 64),))
    document: dict[str, object] = {"schema": "readyplane/compile-archive/1", "factors": KEY}
    document |= {
        "files": [{"path": e.path, "size_bytes": 1, "sha256": e.sha256} for e in good.files]
    }
    assert read_index(canonical(document)) == good
    with pytest.raises(InvalidField, match=what):
        read_index(canonical({**document, **change}))


def test_a_file_that_is_a_folder_too_is_refused() -> None:
    none = "sha256:" + "0" * 64
    with pytest.raises(InvalidField, match="folder"):
        read_index(Index(KEY, (Listed("a", 1, none), Listed("a/b", 1, none))).document())
    with pytest.raises(InvalidField, match="once"):
        read_index(Index(KEY, (Listed("a", 1, none), Listed("a", 1, none))).document())


def spoil(data: bytes, index: Index, how: str) -> tuple[bytes, Index]:
    first = index.files[0]
    plain = zstandard.ZstdDecompressor().stream_reader(data).read()
    if how == "longer":
        files = (replace(first, size_bytes=first.size_bytes + 10_000), *index.files[1:])
        return data, replace(index, files=files)
    if how == "shorter":
        files = (replace(first, size_bytes=first.size_bytes - 1), *index.files[1:])
        return data, replace(index, files=files)
    if how == "more":
        return zstandard.compress(plain + b"extra"), index
    if how == "flipped":
        return zstandard.compress(bytes([plain[0] ^ 1]) + plain[1:]), index
    if how == "truncated":
        return data[: len(data) // 2], index
    return b"no archive", index


@pytest.mark.parametrize("how", ["longer", "shorter", "more", "flipped", "truncated", "rubbish"])
def test_an_archive_that_lies_leaves_nothing(tmp_path: Path, how: str) -> None:
    shelf = store(tmp_path / "store")
    data, index = spoil(*packed(tmp_path), how)
    with pytest.raises(IdentityMismatch):
        shelf.install(data, index, wanted=KEY)
    assert contents(tmp_path / "store") == {}
    assert shelf.take(KEY, tmp_path / "engine").miss == "absent"


def test_a_hit_is_a_copy_of_its_own(tmp_path: Path) -> None:
    shelf = store(tmp_path / "store")
    data, index = packed(tmp_path)
    assert shelf.install(data, index, wanted=KEY)
    assert not shelf.install(data, index, wanted=KEY), "the second finds it there"
    taken = shelf.take(KEY, tmp_path / "one")
    assert (taken.files, taken.miss) == (len(FILES), "")
    assert contents(tmp_path / "one") == FILES
    (tmp_path / "one" / "top").write_bytes(b"an engine writes into its cache")
    shelf.take(KEY, tmp_path / "two")
    assert contents(tmp_path / "two") == FILES


def test_another_key_is_never_installed(tmp_path: Path) -> None:
    shelf = store(tmp_path / "store")
    with pytest.raises(IdentityMismatch, match="driver: 570 != 560"):
        shelf.install(*packed(tmp_path), wanted={**KEY, "driver": "570"})
    assert shelf.take(KEY, tmp_path / "engine").miss == "absent"


def test_an_entry_under_a_wrong_name_is_no_hit(tmp_path: Path) -> None:
    shelf = store(tmp_path / "store")
    shelf.install(*packed(tmp_path), wanted=KEY)
    other = {**KEY, "driver": "570"}
    shelf.entry(key_digest(KEY)).rename(shelf.entry(key_digest(other)))
    taken = shelf.take(other, tmp_path / "engine")
    assert (taken.miss, taken.detail) == ("differs", "driver: 570 != 560")
    assert not (tmp_path / "engine").exists()


@pytest.mark.parametrize("how", ["flip", "link", "index", "cut", "fifo"])
def test_a_spoilt_entry_is_a_miss_and_goes_to_quarantine(tmp_path: Path, how: str) -> None:
    shelf = store(tmp_path / "store")
    data, index = packed(tmp_path)
    shelf.install(data, index, wanted=KEY)
    entry = shelf.entry(key_digest(KEY))
    victim = entry / "files" / "top"
    if how == "flip":
        victim.write_bytes(b"y" * 100)
    elif how == "cut":
        victim.write_bytes(b"x" * 99)
    elif how == "index":
        (entry / "index.json").write_bytes(b"{")
    else:
        victim.unlink()
        if how == "link":
            victim.symlink_to(folder(tmp_path / "s", {"top": b"x" * 100}) / "top")
        else:
            os.mkfifo(victim)
    assert shelf.take(KEY, tmp_path / "engine").miss == "corrupt"
    assert not (tmp_path / "engine").exists()
    assert shelf.take(KEY, tmp_path / "engine").miss == "absent", "it was taken out"
    assert len(list((tmp_path / "store" / "quarantine").iterdir())) == 1
    shelf.install(data, index, wanted=KEY)
    assert shelf.take(KEY, tmp_path / "engine").miss == ""


def test_the_least_used_goes_first(tmp_path: Path) -> None:
    data, index = packed(tmp_path)
    shelf = store(tmp_path / "store", bytes_max=3 * index.size_bytes)
    keys = [{**KEY, "tp": str(i)} for i in range(3)]
    for age, key in enumerate(keys):
        shelf.install(data, replace(index, factors=key), wanted=key)
        os.utime(shelf.entry(key_digest(key)), (age + 1, age + 1))
        if age == 1:
            shelf.take(keys[0], tmp_path / "engine")  # used: it stays
    held = [key for key in keys if shelf.entry(key_digest(key)).exists()]
    assert held == [keys[0], keys[2]]
    with pytest.raises(Unavailable, match="cache-bytes-max"):
        store(tmp_path / "small", bytes_max=10).install(data, index, wanted=KEY)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = store(tmp_path / "store")
    data, index = packed(tmp_path)

    def full(fd: int, piece: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Unavailable, match="No space"):
        shelf.install(data, index, wanted=KEY)
    assert contents(tmp_path / "store") == {}


def test_a_hash_is_of_the_whole_file(tmp_path: Path) -> None:
    _, index = packed(tmp_path)
    for entry in index.files:
        assert entry.sha256 == "sha256:" + hashlib.sha256(FILES[entry.path]).hexdigest()


class RottenRegistry:
    """Says at the first publications that what was stored had rotted."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.published = 0

    async def publish_manifest(self, document: object) -> tuple[str, bool]:
        self.published += 1
        if self.published <= self.times:
            raise BytesMissing("code.tar", ["were wrong and are taken out"], "upload them again")
        return "sha256:" + "1" * 64, True

    async def set_tag(self, name: str, digest: str, *, expected_digest: str = "") -> None:
        self.tagged = (name, digest)


@pytest.mark.parametrize("times", [0, 1, 2])
async def test_bytes_that_had_rotted_are_sent_once_more(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a person's publish does; once, and then it is said."""
    sent: list[str] = []
    monkeypatch.setattr(compile_publish, "put", lambda _u, entry, _p, _t: sent.append(entry.path))
    (tmp_path / "code.tar").write_bytes(b"x" * 100)
    entry = compile_publish.file_entry("code.tar", tmp_path / "code.tar")
    manifest = Manifest(ArtifactKind.COMPILE, "demo", (entry,))
    registry = RottenRegistry(times)
    publisher = compile_publish.CompileBytes(
        store(tmp_path / "s"),
        registry=registry,  # type: ignore[arg-type]  # what a publication needs of it
        clock=SystemClock(),
        reader=Reader("w", "w-1", "n"),
        upload="http://127.0.0.1:1/v1/blobs/sha256",
        vouch=None,  # type: ignore[arg-type]  # nothing is fetched
    )
    paths = {"code.tar": tmp_path / "code.tar"}
    if times < compile_publish.PUBLISH_TRIES:
        assert await publisher.offer("compile/x", manifest, paths) == (
            "published",
            "sha256:" + "1" * 64,
        )
    else:
        with pytest.raises(BytesMissing):
            await publisher.offer("compile/x", manifest, paths)
    assert len(sent) == registry.published == min(times + 1, compile_publish.PUBLISH_TRIES)
