"""Sets of chunks as ranges: the arithmetic against plain sets, and bytes against the manifest."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.chunks import (
    RANGES_MAX,
    ChunkTable,
    check_ranges,
    common,
    count,
    ranges_of,
    union,
    without,
)
from readyplane.core.errors import InvalidField
from readyplane.core.identity import Manifest
from tests.registry_data import CHUNK_BYTES, document, file_entry

chunk_sets = st.frozensets(st.integers(0, 40))


def plain(ranges: tuple[tuple[int, int], ...]) -> set[int]:
    return {chunk for begin, end in ranges for chunk in range(begin, end)}


@given(chunk_sets, chunk_sets)
def test_ranges_do_what_sets_do(left: frozenset[int], right: frozenset[int]) -> None:
    a, b = ranges_of(left), ranges_of(right)
    assert plain(a) == left and count(a) == len(left)
    for found, wanted in [
        (union(a, b), left | right),
        (common(a, b), left & right),
        (without(a, b), left - right),
    ]:
        assert plain(found) == wanted
        assert found == ranges_of(wanted), "in its shortest form"


@pytest.mark.parametrize("bad", [(-1, 2), (3, 3), (4, 2), (0, 2**41)])
def test_a_range_from_outside_that_is_none_is_refused_by_name(bad: tuple[int, int]) -> None:
    with pytest.raises(InvalidField, match=r"source\.held"):
        check_ranges([(0, 1), bad], where="source.held")
    with pytest.raises(InvalidField, match="at most"):
        check_ranges([(0, 1)] * (RANGES_MAX + 1), where="source.held")
    assert check_ranges([(5, 7), (0, 2), (2, 5)], where="x") == ((0, 7),)


def test_chunks_are_numbered_through_the_files_and_weigh_what_they_hold() -> None:
    sizes = {"a": 2 * CHUNK_BYTES + 5, "b": 0, "c": 7, "d": 2 * CHUNK_BYTES}
    files = [file_entry(path, b"x" * size) for path, size in sizes.items()]
    shape: dict[str, Any] = {"dtype": "U8", "offset_bytes": 0}
    tensors = [
        {"name": name, "file": name, "shape": [size], "size_bytes": size, **shape}
        for name, size in sizes.items()
    ]
    table = ChunkTable(Manifest.from_document(document("m", files=files, tensors=tensors)))
    assert table.total == 6 and table.whole == ((0, 6),)
    assert [table.number(*at) for at in [("a", 0), ("a", 2), ("c", 0), ("d", 1)]] == [0, 2, 3, 5]
    assert table.size_bytes(table.whole) == sum(sizes.values())
    assert table.size_bytes(((2, 4),)) == 5 + 7
    assert table.size_bytes(((0, 1), (5, 9))) == 2 * CHUNK_BYTES
    assert table.size_bytes(()) == 0
    for wrong in [("a", 3), ("b", 0), ("e", 0), ("a", -1)]:
        with pytest.raises(InvalidField, match="chunk"):
            table.number(*wrong)
