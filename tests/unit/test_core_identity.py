"""Identity is content: equal meaning, equal digest; another content, another digest, and says where."""

import dataclasses
import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField
from readyplane.core.identity import (
    Canary,
    KvFormat,
    Manifest,
    canonical,
    check_digest,
    chunk_hash,
    compatible,
    digest_of,
    digest_of_bytes,
    parse,
)


def test_canonical_form() -> None:
    assert canonical({}) == b"{}"
    assert canonical({"b": [1, 2.5, None, True], "a": "é"}) == (
        '{"a":"é","b":[1,2.5,null,true]}'.encode()
    )
    assert canonical({"n": 2**70, "x": -0.0, "y": 1e21}) == (
        b'{"n":1180591620717411303424,"x":0,"y":1000000000000000000000}'
    )
    assert canonical('a"\\\n\u2028') == '"a\\"\\\\\\n\u2028"'.encode()


leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    leaves | numbers,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def nfc_keys_distinct(value: Any) -> bool:
    if isinstance(value, dict):
        names = {unicodedata.normalize("NFC", key) for key in value}
        return len(names) == len(value) and all(map(nfc_keys_distinct, value.values()))
    if isinstance(value, list):
        return all(map(nfc_keys_distinct, value))
    return True


def shuffled(value: Any) -> Any:
    """The same meaning written otherwise: keys reversed, integers as floats, tuples, NFD text."""
    if isinstance(value, dict):
        pairs = reversed(value.items())
        return {unicodedata.normalize("NFD", key): shuffled(item) for key, item in pairs}
    if isinstance(value, list):
        return tuple(shuffled(item) for item in value)
    if isinstance(value, str):
        return unicodedata.normalize("NFD", value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    return value


@settings(max_examples=60)
@given(values)
def test_equal_meaning_gives_equal_bytes(value: Any) -> None:
    assume(nfc_keys_distinct(value))
    text = canonical(value)
    assert canonical(shuffled(value)) == text
    assert canonical(json.loads(text)) == text
    assert canonical(parse(text)) == text


@given(values, values)
def test_other_meaning_gives_other_bytes(left: Any, right: Any) -> None:
    assume(nfc_keys_distinct(left) and nfc_keys_distinct(right))

    def plain(value: Any) -> Any:  # what JSON itself tells apart; True is not 1, but 1.0 is
        if isinstance(value, bool) or value is None:
            return repr(value)
        if isinstance(value, str):
            return ("text", unicodedata.normalize("NFC", value))
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, dict):
            return {unicodedata.normalize("NFC", k): plain(v) for k, v in value.items()}
        return value

    assert (canonical(left) == canonical(right)) == (plain(left) == plain(right))


@pytest.mark.parametrize(
    "value, words",
    [
        (float("nan"), "finite"),
        ({"a": [float("inf")]}, "finite"),
        ({1: 2}, "text as key"),
        ({"é": 1, "e\u0301": 2}, "duplicate"),
        ({"a": b"x"}, "use null"),
        ({"a": {1, 2}}, "use null"),
        (object(), "use null"),
    ],
)
def test_what_has_no_canonical_form(value: Any, words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        canonical(value)


def test_the_place_of_a_fault_is_named() -> None:
    with pytest.raises(InvalidField) as caught:
        canonical({"a": [1, {"b": float("nan")}]}, where="policy")
    assert caught.value.field == "policy.a[1].b"


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"a":1,"a":2}', "duplicate"),
        ('{"a":{"b":1,"b":1}}', "duplicate"),
        ("NaN", "finite"),
        ("[1,-Infinity]", "finite"),
        ("{", "valid JSON"),
        (b"\xff", "valid JSON"),
        ("[" * 100_000, "valid JSON"),
    ],
)
def test_json_is_parsed_strictly(text: str | bytes, words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        parse(text)


@pytest.mark.parametrize(
    "digest", ["", "sha256:", "sha256:" + "0" * 63, "sha256:" + "A" * 64, "md5:" + "0" * 64,
               "0" * 64, "sha256:" + "0" * 65, "sha256:" + "g" * 64, " sha256:" + "0" * 64],
)  # fmt: skip
def test_what_is_no_digest(digest: str) -> None:
    with pytest.raises(InvalidField, match="64 lower-case hex"):
        check_digest(digest)


def test_known_digests() -> None:
    assert digest_of({}) == (
        "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    )
    assert digest_of_bytes(b"abc") == (
        "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    assert check_digest(digest_of_bytes(b"")) == digest_of_bytes(b"")
    assert chunk_hash(b"") == "99aa06d3014798d86001c324468d497f"
    assert chunk_hash(b"abc") == "06b05ab6733a618578af5f94892f3950"


# --------------------------------------------------------------------------- manifests


def document() -> dict[str, Any]:
    sha = "sha256:" + "a" * 64
    return {
        "schema": "readyplane/manifest/1",
        "kind": "weights",
        "model": "demo",
        "files": [
            {"path": "model-2.safetensors", "size_bytes": 5000, "sha256": sha,
             "chunks": ["1" * 32, "2" * 32], "purpose": "weights"},
            {"path": "tokenizer.json", "size_bytes": 0, "sha256": sha, "chunks": [],
             "purpose": "tokenizer"},
        ],
        "tensors": [
            {"name": "b", "dtype": "BF16", "shape": [2, 500], "file": "model-2.safetensors",
             "offset_bytes": 2000, "size_bytes": 2000, "ranks": [0]},
            {"name": "a", "dtype": "F32", "shape": [500], "file": "model-2.safetensors",
             "offset_bytes": 0, "size_bytes": 2000},
        ],
        "chunk_bytes": 4096,
        "config": {"max_model_len": 8192},
        "canary": {"prompt_token_ids": [1, 2], "golden_token_ids": [3]},
    }  # fmt: skip


def test_a_manifest_comes_back_as_it_was() -> None:
    found = Manifest.from_document(document())
    assert [t.name for t in found.tensors] == ["a", "b"]
    assert found.size_bytes == 5000
    assert found.canary == Canary((1, 2), (3,))
    again = Manifest.from_document(parse(canonical(found.document())))
    assert again == found and again.digest == found.digest


# Written down once: if it changes, so does the identity of every published artifact.
DIGEST = "sha256:5bd7473fb59811f91e060d5642ed9356fc11102e08ce74919befea7fc1c07217"


def test_the_digest_of_a_manifest_is_golden() -> None:
    assert Manifest.from_document(document()).digest == DIGEST


def test_a_changed_copy_of_a_manifest_has_a_digest_of_its_own() -> None:
    found = Manifest.from_document(document())
    assert found.digest == DIGEST  # known by now, and kept
    other = dataclasses.replace(found, model="another")
    assert other.digest not in {"", DIGEST}
    assert found == Manifest.from_document(document())
    assert dataclasses.replace(other, model=found.model).digest == DIGEST


def test_order_and_defaults_do_not_change_identity() -> None:
    wanted = Manifest.from_document(document()).digest
    doc = dict(reversed(document().items()))
    doc["files"] = doc["files"][::-1]
    doc["tensors"] = [dict(reversed(t.items())) for t in doc["tensors"][::-1]]
    doc |= {"quantisation": "none", "parallel": {"tp": 1, "pp": 1, "ep": 1}, "key": {}}
    assert Manifest.from_document(doc).digest == wanted


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "model": lambda d: d.update(model="other"),
    "kind": lambda d: d.update(kind="engine"),
    "content": lambda d: d["files"][0].update(sha256="sha256:" + "b" * 64),
    "chunk": lambda d: d["files"][0].update(chunks=["1" * 32, "3" * 32]),
    "path": lambda d: d["files"][1].update(path="other.json"),
    "purpose": lambda d: d["files"][1].update(purpose="config"),
    "tensor name": lambda d: d["tensors"][0].update(name="c"),
    "dtype": lambda d: d["tensors"][0].update(dtype="F16"),
    "shape": lambda d: d["tensors"][0].update(shape=[1000]),
    "offset": lambda d: d["tensors"][0].update(offset_bytes=3000),
    "ranks": lambda d: d["tensors"][0].update(ranks=[1]),
    "quantisation": lambda d: d.update(quantisation="fp8"),
    "layout": lambda d: d.update(layout="trtllm/2"),
    "loader": lambda d: d.update(loader_version="2"),
    "tp": lambda d: d.update(parallel={"tp": 2}),
    "pp": lambda d: d.update(parallel={"pp": 2}),
    "ep": lambda d: d.update(parallel={"ep": 2}),
    "capability": lambda d: d.update(capability="sm90"),
    "config": lambda d: d.update(config={"max_model_len": 8193}),
    "canary": lambda d: d["canary"].update(golden_token_ids=[4]),
    "key": lambda d: d.update(key={"cuda": "12.8"}),
}


def test_every_field_is_part_of_the_identity() -> None:
    digests = {Manifest.from_document(document()).digest}
    for change in CHANGES.values():
        doc = document()
        change(doc)
        digests.add(Manifest.from_document(doc).digest)
    assert len(digests) == len(CHANGES) + 1


BREAKS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("schema"), "manifest.schema"),
    (lambda d: d.update(schema="readyplane/manifest/2"), "manifest.schema"),
    (lambda d: d.pop("kind"), "manifest.kind"),
    (lambda d: d.update(kind="weigths"), "manifest.kind"),
    (lambda d: d.update(model=""), "manifest.model"),
    (lambda d: d.update(modle="x"), "manifest.modle"),
    (lambda d: d.update(files=[]), "manifest.files"),
    (lambda d: d.update(files={}), "manifest.files"),
    (lambda d: d.update(tensors=[]), "manifest.tensors"),
    (lambda d: d.update(chunk_bytes=4095), "manifest.chunk_bytes"),
    (lambda d: d.update(chunk_bytes=True), "manifest.chunk_bytes"),
    (lambda d: d.update(chunk_bytes=2**40), "manifest.chunk_bytes"),
    (lambda d: d.update(parallel={"tp": 0}), "manifest.parallel.tp"),
    (lambda d: d.update(parallel=[1]), "manifest.parallel"),
    (lambda d: d.update(quantisation=None), "manifest.quantisation"),
    (lambda d: d.update(layout=""), "manifest.layout"),
    (lambda d: d.update(loader_version=1), "manifest.loader_version"),
    (lambda d: d.update(config=[]), "manifest.config"),
    (lambda d: d.update(key={"cuda": 12}), "manifest.key.cuda"),
    (lambda d: d["canary"].update(golden_token_ids=[]), "manifest.canary.golden_token_ids"),
    (lambda d: d["canary"].update(prompt_token_ids=[-1]), "manifest.canary.prompt_token_ids"),
    (lambda d: d["files"].append(dict(d["files"][0])), "manifest.files[].path"),
    (lambda d: d["files"][0].update(size_bytes=-1), "manifest.files[0].size_bytes"),
    (lambda d: d["files"][0].update(size_bytes=1.5), "manifest.files[0].size_bytes"),
    (lambda d: d["files"][0].update(chunks=["1" * 32]), "manifest.files[0].chunks"),
    (lambda d: d["files"][0].update(chunks=["1" * 32, "X" * 32]), "manifest.files[0].chunks[1]"),
    (lambda d: d["files"][0].update(sha256="sha256:1"), "manifest.files[0].sha256"),
    (lambda d: d["files"][0].pop("sha256"), "manifest.files[0].sha256"),
    (lambda d: d["tensors"].append(dict(d["tensors"][1], offset_bytes=4000, size_bytes=0, shape=[0])),
     "manifest.tensors[].name"),
    (lambda d: d["tensors"][0].update(dtype="BF17"), "manifest.tensors[0].dtype"),
    (lambda d: d["tensors"][0].update(shape=[2, 501]), "manifest.tensors[0].size_bytes"),
    (lambda d: d["tensors"][0].update(shape=[-1]), "manifest.tensors[0].shape"),
    (lambda d: d["tensors"][0].update(file="gone"), "manifest.tensors[0].file"),
    (lambda d: d["tensors"][0].update(offset_bytes=3001), "manifest.tensors[0].offset_bytes"),
    (lambda d: d["tensors"][0].update(offset_bytes=1999), "manifest.tensors"),
    (lambda d: d["tensors"][0].update(ranks=["0"]), "manifest.tensors[0].ranks"),
]  # fmt: skip


@pytest.mark.parametrize(
    "change, field", BREAKS, ids=[f"{i}-{f}" for i, (_, f) in enumerate(BREAKS)]
)
def test_a_broken_manifest_names_its_field(
    change: Callable[[dict[str, Any]], Any], field: str
) -> None:
    doc = document()
    change(doc)
    with pytest.raises(InvalidField) as caught:
        Manifest.from_document(doc)
    assert caught.value.field == field
    assert caught.value.remedy


PATHS = [
    "/etc/passwd",
    "../x",
    "a/../b",
    "a//b",
    "a/./b",
    "",
    ".",
    "a\\b",
    "a\0b",
    "a/",
    "a\nb",
    "a\x7f",
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_never_leaves_the_artifact(path: str) -> None:
    doc = document()
    doc["files"][1]["path"] = path
    with pytest.raises(InvalidField, match="path"):
        Manifest.from_document(doc)


@pytest.mark.parametrize("doc", [None, [], "x", 3, {}, {"schema": "readyplane/manifest/1"}])
def test_what_is_no_manifest(doc: Any) -> None:
    with pytest.raises(InvalidField, match="manifest"):
        Manifest.from_document(doc)


def test_kv_formats_differ_by_named_fields() -> None:
    one = KvFormat("sha256:a")
    assert compatible(one, one) == ()
    other = KvFormat("sha256:b", dtype="bf16", block_size=32, layout="NHD", tp=2, positions="alibi",
                     connector="nixl/2", hash_scheme="x", engine_version="vllm/0.11")  # fmt: skip
    found = compatible(one, other)
    assert [d.field for d in found] == list(KvFormat.__dataclass_fields__)
    assert str(found[2]) == "block_size: 16 != 32"
    assert [(d.left, d.right) for d in compatible(other, one)] == [(d.right, d.left) for d in found]
