"""What may be published, tag names, and the choice of an artifact: tables."""

import json
from typing import Any

import pytest

from readyplane.core.errors import InvalidField, Refused, UnknownField
from readyplane.core.identity import Manifest
from readyplane_registry.catalog import (
    check_kind,
    check_reference,
    check_tag_name,
    choose,
    differing,
    need_value,
    object_document,
    read_document,
)
from tests.registry_data import CONFIG, document, file_entry


def manifest(**fields: Any) -> Manifest:
    return read_document(document(**fields))[0]


def test_the_stored_bytes_have_the_digest_of_the_manifest() -> None:
    found, data = read_document(document())
    again, data_again = read_document(json.loads(data))
    assert found == again and data == data_again
    shuffled = dict(reversed(document().items()))
    assert read_document(shuffled)[1] == data, "B111: key order is no difference"


def tensor(**fields: Any) -> dict[str, Any]:
    return {**document()["tensors"][0], **fields}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model": " demo"}, "model: ' demo'"),
        ({"model": "a\nb"}, "must be printable"),
        ({"model": "sha256:abc"}, "looks like a digest"),
        ({"config": {**CONFIG, "vocab_size": 0}}, "config.vocab_size: 0"),
        ({"config": {**CONFIG, "vocab_size": True}}, "config.vocab_size: True"),
        ({"config": {"vocab_size": 5}}, "config.max_model_len: None"),
        ({"config": {**CONFIG, "max_model_len": 1e308}}, "config.max_model_len"),
        ({"config": {**CONFIG, "max_model_len": -1}}, "config.max_model_len: -1"),
        ({"config": {**CONFIG, "eos_token_id": 512}}, "config.eos_token_id: 512"),
        ({"config": {**CONFIG, "eos_token_id": [2, -1]}}, "config.eos_token_id: -1"),
        (
            {"canary": {"prompt_token_ids": [1], "golden_token_ids": [512]}},
            "canary.golden_token_ids: 512",
        ),
        ({"tensors": [tensor(ranks=[1])]}, "1 of a world of 1"),
        ({"tensors": [tensor(ranks=[0])], "parallel": {"tp": 2}}, "no tensor belongs to rank 1"),
        (
            {"files": [file_entry("weights.raw", b"\1" * 100), file_entry("b", b"x")]},
            "files[b]: a weights file that no tensor lies in",
        ),
        ({"files": [file_entry("weights.raw", b"\1" * 100, "secret")]}, "'secret' is none of"),
        ({"kind": "compile", "tensors": [], "key": {}}, "key: a compile artifact needs"),
        (
            {
                "files": [
                    file_entry("weights.raw", b"\1" * 100),
                    file_entry("weights.raw/x", b"y", "other"),
                ]
            },
            "weights.raw is a file and a folder",
        ),
    ],
)
def test_what_could_never_be_served_is_refused_with_the_field(
    fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(Refused) as caught:
        read_document({**document(), **fields})
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"schema": "x"}, "manifest.schema"),
        ({"files": []}, "manifest.files"),
        ({"surprise": 1}, "manifest.surprise"),
        ({"files": [{**file_entry("a", b"x"), "path": "../a"}]}, "manifest.files[0].path"),
        ({"files": [{**file_entry("a", b"x"), "path": "/etc/passwd"}]}, "manifest.files[0].path"),
        ({"files": [{**file_entry("a", b"x"), "size_bytes": -1}]}, "manifest.files[0].size_bytes"),
        ({"files": [{**file_entry("a", b"x"), "size_bytes": 2**70}]}, "manifest.files[0].size_b"),
        ({"config": {**CONFIG, "x": float("nan")}}, "manifest.config.x"),
        ({"config": {**CONFIG, "x": "\ud800"}}, "manifest"),
        (
            {"files": [file_entry("e\u0301", b"x"), file_entry("\u00e9", b"y")], "tensors": []},
            "manifest",
        ),
    ],
)
def test_a_malformed_manifest_is_refused_with_the_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read_document({**document(), **fields})
    assert caught.value.field.startswith(field)


def test_names_that_differ_in_unicode_form_only_are_one_name() -> None:
    files = [file_entry("weights.raw", b"\1" * 100)]
    files += [file_entry(name, b"x", "other") for name in ("e\u0301.txt", "\u00e9.txt")]
    with pytest.raises(InvalidField, match="list each name once"):
        read_document(document(files=files))


def test_a_bottomless_document_is_refused() -> None:
    deep: Any = []
    for _ in range(600):
        deep = [deep]
    with pytest.raises(InvalidField, match="levels"):
        read_document(document(config={**CONFIG, "deep": deep}))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", '{"a":1,"a":2}', '{"a":NaN}', b"\xff", "[" * 10**5, '{"a":"\\ud800"}'],
)
def test_only_a_json_object_is_a_manifest(text: str | bytes) -> None:
    with pytest.raises(InvalidField):
        object_document(text)


@pytest.mark.parametrize("name", ["a", "prod", "llama-3.1:8b", "team/model/v2", "A" * 128])
def test_good_tag_names(name: str) -> None:
    assert check_tag_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-a",
        ".a",
        "a b",
        "a/../b",
        "a//b",
        "a/",
        "/a",
        "sha256:abc",
        "ä",
        "a\0",
        "a\n",
        "A" * 129,
    ],
)
def test_bad_tag_names(name: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_tag_name(name)
    assert caught.value.field == "tag"


@pytest.mark.parametrize("reference", ["", "sha256:12", "SHA256:\0", "a\nb", "x" * 201])
def test_bad_references(reference: str) -> None:
    with pytest.raises(InvalidField):
        check_reference(reference)


def test_kinds() -> None:
    assert check_kind("weights") == "weights" and check_kind("", optional=True) == ""
    for kind in ("", "weight"):
        with pytest.raises(InvalidField):
            check_kind(kind)


def test_the_fields_of_a_need() -> None:
    one = manifest(salt="x", quantisation="fp8", parallel={"tp": 2})
    assert need_value(one, "quantisation") == "fp8"
    assert need_value(one, "tp") == need_value(one, "parallel.tp") == "2"
    assert need_value(one, "config.max_model_len") == "4096"
    assert need_value(one, "config.salt") == "x"
    assert need_value(one, "config.absent") is None
    for name in ("colour", "config.", "key", "files"):
        with pytest.raises(UnknownField):
            need_value(one, name)


def test_every_differing_field_is_named_with_both_sides() -> None:
    one = manifest(layout="engine/7")
    fields = differing(one, {"layout": "safetensors/1", "tp": "2", "model": "demo", "key.cc": "90"})
    assert [str(f) for f in fields] == [
        "key.cc: 90 != nothing",
        "layout: safetensors/1 != engine/7",
        "tp: 2 != 1",
    ]


def test_the_first_candidate_that_meets_the_need_is_chosen() -> None:
    """R10.3: a checkpoint and a converted engine never match."""
    checkpoint, engine = (
        manifest(salt="a"),
        manifest(salt="b", layout="engine/7", quantisation="fp8"),
    )
    both = [engine, checkpoint]
    assert choose(both, need={}).manifest == engine
    assert choose(both, need={"layout": "safetensors/1"}).manifest == checkpoint
    none = choose(both, need={"layout": "safetensors/1", "quantisation": "fp8"})
    assert none.manifest is None
    assert [reason.partition(": ")[2] for reason in none.reasons] == [
        "layout: needed safetensors/1, has engine/7",
        "quantisation: needed fp8, has none",
    ]


def test_the_nearest_candidates_are_named_and_the_rest_counted() -> None:
    many = [manifest(salt=str(i)) for i in range(8)] + [manifest(salt="n", layout="x/1")]
    none = choose(many, need={"layout": "x/1", "quantisation": "fp8"})
    assert len(none.reasons) == 6 and "and 4 more" in none.reasons[-1]
    assert none.reasons[0].endswith(": quantisation: needed fp8, has none")
