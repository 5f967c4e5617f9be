"""Field reports of model folders: what a broken download or a foreign name looks like (B117, B133)."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.canonical import parse
from readyplane.core.errors import InvalidField, Refused
from readyplane.core.identity import Manifest
from readyplane.core.safetensors import header_bytes, tensors_of
from readyplane_registry.catalog import read_document
from readyplane_registry.ingest import Facts, build_manifest, publish_directory
from tests.registry_data import document, model_folder, raw_safetensors, safetensors

INDEX = "model.safetensors.index.json"


def shard_gone(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()


def shard_too_many(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "model-00003-of-00002.safetensors").write_bytes(safetensors({"c": b"1"}))


def total_wrong(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "metadata": {"total_size": 5}}))


def total_no_number(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "metadata": {"total_size": "many"}}))


def pointer(folder: Path) -> None:
    (folder / "z.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 12\n")


def page(folder: Path) -> None:
    (folder / "z.safetensors").write_text("<!DOCTYPE html><html>404</html>")


def not_utf8(folder: Path) -> None:
    Path(str(folder) + "/bad\udcff.txt").write_text("x")


def control(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")

    return spoil


def two_forms(folder: Path) -> None:
    for form in ("NFC", "NFD"):
        (folder / unicodedata.normalize(form, "é.txt")).write_text(form)


def tensor_name(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
        (folder / "z.safetensors").write_bytes(raw_safetensors(header, b"1"))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (shard_gone, "model-00002-of-00002.safetensors"),
        (shard_too_many, "too many"),
        (total_wrong, f"{INDEX}: metadata.total_size: 5"),
        (total_no_number, f"{INDEX}: metadata.total_size: 'many'"),
        (pointer, "z.safetensors: 'a git-lfs pointer"),
        (page, "z.safetensors: 'an HTML page"),
        (not_utf8, "bad\\udcff.txt"),
        (control("two\nlines.txt"), r"two\nlines.txt: 'two\nlines.txt' is not valid; rename it"),
        (control("back\x1b[2J.txt"), "rename it: leave the character U+001B out"),
        (control("next\x85.txt"), "U+0085"),
        (control("li\u2028ne/é.txt"), "li\\u2028ne/é.txt: 'li\\u2028ne/é.txt'"),
        (two_forms, "Unicode form"),
        (tensor_name("a\0b"), "z.safetensors: tensor 'a\\x00b'"),
        (tensor_name("a\ud800"), "z.safetensors: tensor 'a\\ud800'"),
    ],
)
def test_b117_what_a_broken_download_left_is_refused_and_named(
    tmp_path: Path, spoil: Callable[[Path], None], told: str
) -> None:
    folder = model_folder(tmp_path / "m")
    spoil(folder)
    with pytest.raises(InvalidField) as caught:
        build_manifest(folder, model="m")
    assert told in str(caught.value)
    str(caught.value).encode()
    assert str(caught.value).isprintable(), "on one line, as it is"


@pytest.mark.parametrize("counts", ["tensors", "files"])
def test_b117_a_total_that_is_right_is_taken(tmp_path: Path, counts: str) -> None:
    folder = model_folder(tmp_path / "m")
    manifest, _, _ = build_manifest(folder, model="m")
    weights = [f for f in manifest.files if f.purpose == "weights"]
    total = sum(t.size_bytes for t in (manifest.tensors if counts == "tensors" else weights))
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, "metadata": {"total_size": total}}))
    assert build_manifest(folder, model="m")[0].tensors == manifest.tensors


def test_b111_a_weight_file_in_another_unicode_form_is_published_under_one_name(
    tmp_path: Path,
) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / INDEX).unlink()
    name = "modèle.safetensors"
    on_disk = folder / unicodedata.normalize("NFD", name)
    on_disk.write_bytes(safetensors({"extra": b"123"}))
    manifest, paths, _ = build_manifest(folder, model="m")
    assert paths[name] == on_disk and name in {f.path for f in manifest.files}


def test_weights_without_an_element_are_refused() -> None:
    with pytest.raises(Refused, match="not one of them has an element"):
        read_document(document(data=b""))


def put(path: str, value: Any) -> dict[str, Any]:
    found = document()
    *folders, last = path.split("/")
    at: Any = found
    for part in folders:
        at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
    at[last] = value
    return found


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("model", "a\0", "manifest.model"),
        ("loader_version", "1\0", "manifest.loader_version"),
        ("tensors/0/name", "t\0", "manifest.tensors[0].name"),
        ("files/0/purpose", "w\0", "manifest.files[0].purpose"),
        ("config/x", "a\0b", "manifest.config.x"),
        ("config/x", [{"y": "a\0b"}], "manifest.config.x[0].y"),
        ("config/x", {"y\0": 1}, "manifest.config.x.y\\x00"),
        ("key/x", "a\0", "manifest.key.x"),
        ("key/x\0", "a", "manifest.key"),
    ],
)
def test_b117_a_text_that_no_store_can_hold_is_refused_by_field(
    path: str, value: Any, field: str
) -> None:
    with pytest.raises(InvalidField, match=r"U\+0000") as caught:
        Manifest.from_document(put(path, value))
    assert caught.value.field == field


def test_a_number_without_end_is_refused_in_our_own_words() -> None:
    with pytest.raises(InvalidField, match="4300 digits") as caught:
        parse(b'{"a":' + b"9" * 6000 + b"}", where="x.safetensors: header")
    assert "set_int_max" not in str(caught.value)
    deep = b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    with pytest.raises(InvalidField, match="nested too deeply"):
        tensors_of(deep, size_bytes=len(deep) + 8, file="x.safetensors")
    with pytest.raises(InvalidField, match="git lfs pull"):
        header_bytes(b"version ", size_bytes=130, file="x.safetensors")


class Untouched:
    """A registry and a byte store that must not be asked for anything."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(name)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"vocab_size": 512}, "config.json: max_model_len or max_position_embeddings"),
        (
            {"vocab_size": 512, "max_position_embeddings": -5},
            "config.json: max_position_embeddings: -5",
        ),
        ({"max_position_embeddings": 9}, "config.json: vocab_size: None"),
        (
            {"max_position_embeddings": 9, "text_config": {"vocab_size": "many"}},
            "config.json: text_config.vocab_size: 'many'",
        ),
        (
            {"max_position_embeddings": 9, "vocab_size": 10, "eos_token_id": [1, 10]},
            "config.json: eos_token_id: 10",
        ),
    ],
)
async def test_what_the_registry_would_refuse_is_refused_before_a_byte_is_sent(
    tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(config))
    nobody: Any = Untouched()
    with pytest.raises(InvalidField) as caught:
        await publish_directory(folder, model="m", registry=nobody, sink=nobody)
    assert told in str(caught.value)


async def test_what_any_kind_of_artifact_must_not_be_is_refused_before_a_byte_is_sent(
    tmp_path: Path,
) -> None:
    nobody: Any = Untouched()
    folder = model_folder(tmp_path / "m")
    with pytest.raises(Refused, match="names no version"):
        await publish_directory(
            folder, model="m", registry=nobody, sink=nobody, facts=Facts(layout="plain")
        )
    given = Facts(config={"vocab_size": 5, "eos_token_id": 1, "max_model_len": 7})
    assert build_manifest(folder, model="m", facts=given)[0].config["vocab_size"] == 5
