"""Noise as manifests, headers, envelopes and folders: refused in words, never a crash, never a large buffer."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField, ReadyplaneError, Refused
from readyplane.core.identity import Manifest
from readyplane_registry.catalog import object_document, read_document
from readyplane_registry.ingest import build_manifest
from readyplane_registry.safetensors import HEADER_BYTES_MAX, header_bytes, tensors_of
from tests.registry_data import SCALES, document, raw_safetensors

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["weights", "sha256:" + "a" * 64, "\ud800", "..", "F32", "readyplane/manifest/1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def paths_of(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [at, *(path for key, item in inner for path in paths_of(item, (*at, key)))]


WHOLE = document(
    "fuzz",
    quantisation="fp8",
    scales={**SCALES, "tensors": []},
    canary={"prompt_token_ids": [1], "golden_token_ids": [2]},
    parallel={"tp": 1},
    key={"a": "b"},
)
PLACES = [path for path in paths_of(WHOLE) if path]


@settings(max_examples=300)
@given(st.sampled_from(PLACES), anything, st.sampled_from(["put", "drop", "add"]))
def test_a_manifest_with_anything_anywhere_is_read_or_refused(
    path: tuple[Any, ...], value: Any, how: str
) -> None:
    made = json.loads(json.dumps(WHOLE))
    at: Any = made
    for key in path[:-1]:
        at = at[key]
    if how == "put":
        at[path[-1]] = value
    elif how == "drop":
        del at[path[-1]]
    elif isinstance(at, dict):
        at["zz" if not isinstance(value, str) else value] = value
    try:
        manifest, data = read_document(made)
    except (InvalidField, Refused):
        return
    assert read_document(json.loads(data)) == (manifest, data), "what is stored reads the same"


@settings(max_examples=200)
@given(anything)
def test_anything_at_all_is_no_manifest_and_says_so(value: Any) -> None:
    with pytest.raises(ReadyplaneError):
        Manifest.from_document(value)


@settings(max_examples=200)
@given(st.binary(max_size=200) | st.text(max_size=200))
def test_any_bytes_as_json_are_refused_in_words(data: bytes | str) -> None:
    try:
        found = object_document(data)
    except InvalidField:
        return
    assert isinstance(found, dict)


# ------------------------------------------------------------------------------- safetensors


@settings(max_examples=200)
@given(st.binary(min_size=8, max_size=8), st.integers(0, 2**50))
def test_a_header_is_never_longer_than_its_file_or_the_bound(prefix: bytes, size: int) -> None:
    try:
        length = header_bytes(prefix, size_bytes=size, file="f")
    except InvalidField:
        return
    assert 2 <= length <= min(HEADER_BYTES_MAX, size - 8)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**18, 10**9, HEADER_BYTES_MAX + 1])
def test_b128_nothing_is_allocated_by_the_length_a_header_claims(
    tmp_path: Path, length: int
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1, "vocab_size": 1}')
    (tmp_path / "m.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}" + b"\0" * 100)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidField, match="header length"):
            build_manifest(tmp_path, model="m")
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


tensor = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "BF16", "F4", "", "u8"]) | anything,
        "shape": st.lists(st.integers(-1, 2**40) | st.integers(0, 4), max_size=4) | anything,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=1, max_size=3) | anything,
    }
)
headers = st.dictionaries(
    st.sampled_from(["a", "b", "__metadata__", "e\u0301", ""]), tensor | anything, max_size=4
)


@settings(max_examples=300)
@given(headers, st.integers(0, 40))
def test_b128_b133_any_header_gives_tensors_inside_the_file_or_words(
    header: dict[str, Any], data_bytes: int
) -> None:
    try:
        text = json.dumps(header).encode()
    except UnicodeEncodeError:
        return
    size = 8 + len(text) + data_bytes
    told = ""
    try:
        found = tensors_of(text, size_bytes=size, file="x.safetensors")
    except InvalidField as error:
        found, told = (), str(error)
    if told:
        assert "x.safetensors" in told
        return
    at = 8 + len(text)
    for one in found:
        assert one.offset_bytes == at, "tensors tile the data"
        at += one.size_bytes
    assert at == size


@pytest.mark.parametrize(
    ("header", "data", "told"),
    [
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}}, 4, "begin <= end"),
        ({"a": {"dtype": "U8", "shape": [9], "data_offsets": [0, 9]}}, 4, "begin <= end <= 4"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, 4, "gap"),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, 4, "end the file at"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 4]}}, 4, "span 12 bytes"),
        ({"a": {"dtype": "F128", "shape": [1], "data_offsets": [0, 4]}}, 4, "dtype"),
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":1}', 4, "duplicate"),
        ({"a": {"dtype": "U8", "shape": [2**62, 0], "data_offsets": [0, 4]}}, 4, "span 0 bytes"),
        ({"__metadata__": {"k": 1}, "a": {}}, 0, "__metadata__.k"),
        ({"__metadata__": "x"}, 0, "__metadata__"),
        ({"__metadata__": {}}, 0, "at least one tensor"),
    ],
)
def test_b128_b133_b134_hostile_headers_name_file_and_tensor(
    tmp_path: Path, header: Any, data: int, told: str
) -> None:
    (tmp_path / "h.safetensors").write_bytes(raw_safetensors(header, b"\1" * data))
    with pytest.raises(InvalidField) as caught:
        build_manifest(tmp_path, model="m")
    assert "h.safetensors" in str(caught.value) and told in str(caught.value)
