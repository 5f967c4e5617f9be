"""The modelled answer: a function of every tensor and every token, and of nothing else."""

from __future__ import annotations

from statistics import fmean, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.work import pack_tokens
from readyplane_agent.engines.modelled import answer

TENSORS = [
    ("a", "BF16", (2, 2), b"\x01\x02\x03\x04\x05\x06\x07\x08"),
    ("b", "BF16", (2, 2), b"\x08\x07\x06\x05\x04\x03\x02\x01"),
    ("c", "F32", (1,), b"\x00\x00\x80\x3f"),
]


def weights(tensors: list[tuple[str, str, tuple[int, ...], bytes]]) -> int:
    return answer.fingerprint(answer.tensor_digest(*t) for t in tensors)


@pytest.mark.parametrize(
    "altered",
    [
        TENSORS[:2],
        [("a", *TENSORS[1][1:]), ("b", *TENSORS[0][1:]), TENSORS[2]],  # bytes swapped
        [("a", "F16", (2, 2), TENSORS[0][3]), *TENSORS[1:]],
        [("a", "BF16", (4, 1), TENSORS[0][3]), *TENSORS[1:]],
        [("a2", *TENSORS[0][1:]), *TENSORS[1:]],
        [(*TENSORS[0][:3], b"\x01\x02\x03\x04\x05\x06\x07\x09"), *TENSORS[1:]],
        [*TENSORS, TENSORS[0]],
    ],
    ids=["missing", "swapped", "dtype", "shape", "name", "one bit", "twice"],
)
def test_whatever_changes_in_the_tensors_changes_the_answer(
    altered: list[tuple[str, str, tuple[int, ...], bytes]],
) -> None:
    prompt = answer.encode("is it you?")
    right = answer.golden_answer(weights(TENSORS), prompt, 12)
    assert answer.golden_answer(weights(altered), prompt, 12) != right


def test_the_order_in_which_tensors_are_read_does_not_matter() -> None:
    assert weights(TENSORS) == weights(TENSORS[::-1])


@given(st.lists(st.integers(0, 511), min_size=1, max_size=60), st.integers(0, 40))
def test_an_answer_goes_on_from_its_own_beginning(prompt: list[int], cut: int) -> None:
    whole = answer.golden_answer(7, prompt, 40)
    rest = answer.golden_answer(7, [*prompt, *whole[:cut]], 40 - cut)
    assert rest == whole[cut:]
    assert answer.decode(whole).isascii() and answer.decode(whole).isprintable()


@given(st.lists(st.integers(0, 511), min_size=2, max_size=30), st.data())
def test_every_token_of_the_prompt_matters(prompt: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(prompt) - 1))
    other = [*prompt[:at], (prompt[at] + 1) % 512, *prompt[at + 1 :]]
    assert answer.golden_answer(7, prompt, 24) != answer.golden_answer(7, other, 24)


def test_kv_of_other_weights_or_tokens_shows_in_the_answer() -> None:
    mine, other = pack_tokens([5, 6, 7, 8]), pack_tokens([5, 6, 7, 9])
    right = answer.Answer(1, mine).take(16)
    assert answer.Answer(1, mine, kv=answer.kv_digest(1, mine)).take(16) == right
    assert answer.Answer(1, mine, kv=answer.kv_digest(2, mine)).take(16) != right
    assert answer.Answer(1, mine, kv=answer.kv_digest(1, other)).take(16) != right


def test_taking_in_pieces_is_taking_at_once() -> None:
    whole = answer.Answer(3, b"").take(20)
    pieces = answer.Answer(3, b"")
    assert pieces.take(1) + pieces.take(0) + pieces.take(19) == whole


def test_lengths_follow_the_prompt_and_look_like_conversation() -> None:
    lengths = [answer.answer_length(pack_tokens([i, i + 1])) for i in range(4000)]
    assert lengths == [answer.answer_length(pack_tokens([i, i + 1])) for i in range(4000)]
    assert fmean(lengths) == pytest.approx(211, rel=0.05)
    assert quantiles(lengths, n=2)[0] == pytest.approx(150, rel=0.08)
    assert min(lengths) >= 1 and max(lengths) <= answer.LENGTH_MAX_TOKENS


@given(st.text(max_size=80))
def test_text_survives_the_tokenizer(text: str) -> None:
    tokens = answer.encode(text)
    assert all(3 <= t < 259 for t in tokens)
    assert answer.decode(tokens) == text.encode("utf-8", "replace").decode()


def test_tokens_beyond_the_bytes_show_and_special_ones_do_not() -> None:
    assert answer.decode([1, *answer.encode("a"), 300, *answer.encode("b"), 2]) == "a�b"
