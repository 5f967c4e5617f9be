"""Block hashes as Dynamo publishes them, and what is still to come of an answer."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField
from readyplane.core.work import (
    ISL_EDGES,
    OSL_EDGES,
    LengthStats,
    expected_remaining,
    hash_seed,
    pack_tokens,
    sequence_hashes,
)

# Dynamo, lib/tokens/src/lib.rs: block size 4, seed 1337.
BLOCK_1234 = 14643705804678351452
BLOCK_5678 = 16777012769546811212
SEQUENCE_8 = 4945711292740353085
BLOCK_9_12 = 483935686894639516
SEQUENCE_12 = 12583592247330656132


def hashes(first: int, last: int) -> tuple[int, ...]:
    return sequence_hashes(pack_tokens(range(first, last + 1)), 4)


def test_golden_vectors() -> None:
    assert hashes(1, 4) == (BLOCK_1234,)
    assert hashes(5, 8) == (BLOCK_5678,)
    assert hashes(9, 12) == (BLOCK_9_12,)
    assert hashes(1, 8) == (BLOCK_1234, SEQUENCE_8)
    assert hashes(1, 12) == (BLOCK_1234, SEQUENCE_8, SEQUENCE_12)


def test_a_partial_tail_is_not_hashed() -> None:
    assert hashes(1, 3) == ()
    assert hashes(1, 11) == hashes(1, 8)
    assert sequence_hashes(b"", 16) == ()


ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@given(ids, ids, st.sampled_from([1, 4, 16]))
def test_a_common_prefix_shares_its_hashes_and_nothing_more(
    left: list[int], right: list[int], size: int
) -> None:
    one, other = (sequence_hashes(pack_tokens(t), size) for t in (left, right))
    assert (len(one), len(other)) == (len(left) // size, len(right) // size)
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
        same = left[: (i + 1) * size] == right[: (i + 1) * size]
        assert (a == b) == same


def test_adapters_and_tenants_never_share_a_key() -> None:
    """B96: prefix caches leaked between tenants and adapters."""
    prompt = pack_tokens(range(8))
    found = {
        sequence_hashes(prompt, 4, lora=lora, cache_salt=salt)
        for lora in ("", "a", "b")
        for salt in ("", "a", "b")
    }
    assert len(found) == 9
    assert hash_seed() == 1337
    assert 0 <= hash_seed(lora="x" * 99, cache_salt="y" * 99) < 2**64


@pytest.mark.parametrize("tokens", [[-1], [2**32], [10**30], ["a"]])
def test_what_is_no_token_id(tokens: list[int]) -> None:
    with pytest.raises(InvalidField, match="token ids"):
        pack_tokens(tokens)


def test_tokens_are_packed_little_endian() -> None:
    assert pack_tokens([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"


def counts_of(*pairs: tuple[int, int]) -> tuple[tuple[float, ...], ...]:
    stats = LengthStats()
    for isl, osl in pairs:
        stats.add(isl, osl)
    return stats.snapshot()


EMPTY = counts_of()
emitted_tokens = st.integers(0, 20_000)
lengths = st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 6_000)), max_size=40)


def test_counts_fall_into_their_bins_and_fade() -> None:
    stats = LengthStats()
    stats.add(0, 0)
    stats.add(10**9, 10**9)
    stats.add(ISL_EDGES[2], OSL_EDGES[2] - 1)
    table = np.array(stats.snapshot())
    assert table.shape == (len(ISL_EDGES), len(OSL_EDGES))
    assert (table[0, 0], table[-1, -1], table[2, 1], table.sum()) == (1, 1, 1, 3)
    stats.age(0.5)
    assert np.array(stats.snapshot()).sum() == 1.5


@given(lengths, st.integers(0, 50_000), emitted_tokens, st.none() | st.integers(1, 20_000),
       st.none() | st.sampled_from([0.1, 0.5, 0.9, 0.99]))  # fmt: skip
def test_a_running_request_has_at_least_one_token_to_come_and_never_more_than_its_cap(
    pairs: list[tuple[int, int]], isl: int, emitted: int, cap: int | None, quantile: float | None
) -> None:
    left = expected_remaining(
        counts_of(*pairs), isl=isl, emitted=emitted, cap=cap, quantile=quantile
    )
    assert left >= 1.0
    assert np.isfinite(left)
    if cap is not None:
        assert left <= max(1.0, cap - emitted)


@given(emitted_tokens)
def test_what_is_not_known_is_the_prior_whatever_was_emitted(emitted: int) -> None:
    assert expected_remaining(EMPTY, isl=100, emitted=emitted, cap=None, prior_mean=300) == 300


def test_a_short_answer_that_goes_on_is_taken_for_a_long_one() -> None:
    """The mean is conditional: after 200 tokens only the long answers are left."""
    counts = counts_of(*[(500, 40)] * 90, *[(500, 900)] * 10)
    start = expected_remaining(counts, isl=500, emitted=0, cap=None)
    later = expected_remaining(counts, isl=500, emitted=200, cap=None)
    assert start < 200 < later
    assert later == pytest.approx(896 - 200, abs=10)


def test_it_shrinks_while_the_last_answers_run_out() -> None:
    counts = counts_of(*[(500, 600)] * 50)
    found = [expected_remaining(counts, isl=500, emitted=e, cap=None) for e in (0, 200, 400, 500)]
    assert found == sorted(found, reverse=True)


def test_an_answer_longer_than_any_seen_is_not_predicted_to_be_over() -> None:
    counts = counts_of(*[(500, 40)] * 50)
    assert expected_remaining(counts, isl=500, emitted=3_000, cap=None, prior_mean=256) == 256


def test_few_prompts_of_a_length_borrow_from_all_lengths() -> None:
    counts = counts_of(*[(100, 40)] * 50, *[(9_000, 900)] * 5)
    rare = expected_remaining(counts, isl=9_000, emitted=0, cap=None)
    plenty = expected_remaining(counts_of(*[(100, 40)] * 50, *[(9_000, 900)] * 50),
                                isl=9_000, emitted=0, cap=None)  # fmt: skip
    assert rare < 200 < plenty


@given(lengths, emitted_tokens)
def test_quantiles_are_in_order(pairs: list[tuple[int, int]], emitted: int) -> None:
    counts = counts_of(*pairs, *[(10, 100)] * 20)
    found = [
        expected_remaining(counts, isl=10, emitted=emitted, cap=None, quantile=q)
        for q in (0.1, 0.5, 0.9)
    ]
    assert found == sorted(found)
