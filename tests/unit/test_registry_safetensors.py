"""B128, B130, B133, B134: headers are hostile until proved otherwise, before anything is allocated."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField
from readyplane_registry.safetensors import header_bytes, tensors_of
from tests.registry_data import raw_safetensors, safetensors


def read(data: bytes) -> list[tuple[str, tuple[int, ...], int, int]]:
    length = header_bytes(data[:8], size_bytes=len(data), file="m.safetensors")
    found = tensors_of(data[8 : 8 + length], size_bytes=len(data), file="m.safetensors")
    return [(t.name, t.shape, t.offset_bytes, t.size_bytes) for t in found]


def entry(
    begin: int, end: int, dtype: str = "U8", shape: list[Any] | None = None
) -> dict[str, Any]:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_good_file_is_read() -> None:
    data = safetensors({"a": b"12345", "b": b"", "c": b"678"})
    begin = len(data) - 8
    assert read(data) == [
        ("a", (5,), begin, 5),
        ("b", (0,), begin + 5, 0),
        ("c", (3,), begin + 5, 3),
    ]


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}])
def test_metadata_may_be_absent_empty_or_filled(metadata: Any) -> None:
    header: dict[str, Any] = {"a": entry(0, 4)}
    if metadata is not None:
        header["__metadata__"] = metadata
    assert [name for name, *_ in read(raw_safetensors(header, b"1234"))] == ["a"]


def test_shapes_of_every_kind() -> None:
    header = {
        "scalar": entry(0, 4, "F32", []),
        "none": entry(4, 4, "F32", [0, 7]),
        "one": entry(4, 6, "BF16", [1]),
    }
    assert len(read(raw_safetensors(header, b"\0" * 6))) == 3


HOSTILE: list[tuple[str, Any, bytes, str]] = [
    ("unknown type", {"a": entry(0, 4, "Q4")}, b"1234", "tensor 'a'.dtype"),
    ("type is no text", {"a": entry(0, 4) | {"dtype": 7}}, b"1234", "tensor 'a'.dtype"),
    ("reversed", {"a": entry(4, 0, shape=[4])}, b"1234", "tensor 'a'.data_offsets"),
    ("negative", {"a": entry(-4, 0)}, b"1234", "tensor 'a'.data_offsets"),
    ("outside", {"a": entry(0, 5)}, b"1234", "tensor 'a'.data_offsets"),
    ("huge", {"a": entry(0, 2**62)}, b"1234", "tensor 'a'.data_offsets"),
    ("not the shape", {"a": entry(0, 4, "F32", [2])}, b"1234", "tensor 'a'.data_offsets"),
    ("overflow", {"a": entry(0, 4, "U8", [2**62, 2**62])}, b"1234", "tensor 'a'.data_offsets"),
    ("negative shape", {"a": entry(0, 4, "U8", [-2, -2])}, b"1234", "tensor 'a'.shape"),
    ("broken shape", {"a": entry(0, 4, "U8", [4.0])}, b"1234", "tensor 'a'.shape"),
    ("true as a number", {"a": entry(0, 1, "U8", [True])}, b"1", "tensor 'a'.shape"),
    ("many dimensions", {"a": entry(0, 1, "U8", [1] * 33)}, b"1", "tensor 'a'.shape"),
    ("three offsets", {"a": entry(0, 4) | {"data_offsets": [0, 2, 4]}}, b"1234", "data_offsets"),
    ("no offsets", {"a": {"dtype": "U8", "shape": [4]}}, b"1234", "tensor 'a'"),
    ("a field more", {"a": entry(0, 4) | {"x": 1}}, b"1234", "tensor 'a'"),
    ("no object", {"a": [1]}, b"1234", "tensor 'a'"),
    ("overlap", {"a": entry(0, 4), "b": entry(2, 6)}, b"123456", "tensor 'b'.data_offsets"),
    ("same place", {"a": entry(0, 4), "b": entry(0, 4)}, b"1234", "tensor 'b'.data_offsets"),
    ("gap", {"a": entry(0, 2), "b": entry(4, 6)}, b"123456", "tensor 'b'.data_offsets"),
    ("late start", {"a": entry(2, 4)}, b"1234", "tensor 'a'.data_offsets"),
    ("left over", {"a": entry(0, 2)}, b"1234", "data"),
    ("nameless", {"": entry(0, 4)}, b"1234", "tensor ''"),
    ("not NFC", {"e\u0301": entry(0, 4)}, b"1234", "NFC"),
    ("empty", {}, b"", "header"),
    ("only metadata", {"__metadata__": {}}, b"", "header"),
    ("metadata of numbers", {"__metadata__": {"x": 1}}, b"", "header.__metadata__.x"),
    ("metadata is a list", {"__metadata__": []}, b"", "header.__metadata__"),
    ("no JSON", b"{nonsense", b"", "header"),
    ("a list", b"[1,2,3]", b"", "header"),
    ("blank first", b' {"a":1}', b"", "header"),
    ("not a number", b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', b"1234", "header"),
    ("duplicate", b'{"a":1,"a":2}', b"", "header.a"),
    ("no UTF-8", b'{"\xff":1}', b"", "header"),
]


@pytest.mark.parametrize(("why", "header", "data", "field"), HOSTILE, ids=[h[0] for h in HOSTILE])
def test_a_hostile_header_is_refused_naming_file_and_tensor(
    why: str, header: Any, data: bytes, field: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        read(raw_safetensors(header, data))
    assert "m.safetensors" in str(caught.value) and field in str(caught.value)


def test_a_duplicate_key_is_called_one() -> None:
    with pytest.raises(InvalidField, match="remove the duplicate key"):
        read(raw_safetensors(b'{"w":1,"w":2}'))


def test_a_number_that_is_too_large_is_told_the_bound() -> None:
    header = {"a": entry(0, 4, "U8", [0, 2**70])}
    with pytest.raises(InvalidField, match=f"whole numbers from 0 to {2**63 - 1}"):
        read(raw_safetensors(header, b"1234"))


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", b"\xff" * 8 + b"{}", b"\0" * 8 + b"{}", (3).to_bytes(8, "little") + b"{}"],
)
def test_a_header_longer_than_its_file_is_refused_before_reading(data: bytes) -> None:
    with pytest.raises(InvalidField):
        read(data)


def test_a_header_over_the_limit_is_refused_without_reading_it() -> None:
    with pytest.raises(InvalidField, match="header length"):
        header_bytes((200_000_000).to_bytes(8, "little"), size_bytes=10**9, file="m")


@given(st.data())
def test_one_changed_byte_never_gives_tensors_outside_the_file(data: st.DataObject) -> None:
    whole = bytearray(safetensors({"a": b"x" * 40, "b": b"y" * 24}))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read(bytes(whole))
    except InvalidField:
        return
    ends = 0
    for _name, _shape, offset, size in found:
        assert offset >= 8 and offset + size <= len(whole)
        ends = max(ends, offset + size)
    assert ends == len(whole) and sum(size for *_, size in found) == 64


@given(st.dictionaries(st.sampled_from("abcdef"), st.binary(max_size=64), min_size=1))
def test_what_is_written_is_read_back(tensors: dict[str, bytes]) -> None:
    data = safetensors(tensors)
    found = {name: data[at : at + size] for name, _shape, at, size in read(data)}
    assert found == tensors
    assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
