"""The scanner of a stream: however the bytes are cut, the client gets the same events."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane_gateway.sse import CARRY_BYTES_MAX, SseScan

TOKEN = b'data: {"id":"x","choices":[{"text":"%b","finish_reason":null}],"usage":null}\n\n'
SPACED = b'data: {"choices": [{"text": "c", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n'
USAGE = (
    b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
TRICKY = TOKEN % b'\\"usage\\":{ \\"finish_reason\\":null \\n\\n data: [DONE'


def scan(
    data: bytes, cuts: list[int], *, keep_last: bool = False, keep_each: bool = False
) -> tuple[bytes, SseScan]:
    scanner = SseScan(keep_last=keep_last, keep_each=keep_each)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    out = b"".join(scanner.feed(data[a:b]) for a, b in pairwise(edges))
    return out, scanner


@given(
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    texts=st.lists(
        st.sampled_from([TOKEN % b"a", TOKEN % b"bb", TRICKY, SPACED, LAST]), max_size=6
    ),
    comments=st.booleans(),
    crlf=st.booleans(),
    keep=st.booleans(),
)
def test_any_cut_gives_the_same(
    cuts: list[int], texts: list[bytes], comments: bool, crlf: bool, keep: bool
) -> None:
    data = b"".join((b": ping\n\n" if comments else b"") + text for text in texts) + USAGE + DONE
    sent = data.replace(b"\n", b"\r\n") if crlf else data
    out, scanner = scan(sent, cuts, keep_last=keep)
    assert out == b"".join(texts) + (USAGE if keep else b"") + DONE
    assert scanner.events == len(texts)
    assert scanner.done
    assert not scanner.error
    assert scanner.usage is not None
    assert (scanner.usage.completion_tokens, scanner.usage.cached_tokens) == (3, 4)


DETAILS = b',"prompt_tokens_details":{"cached_tokens":4}'


@pytest.mark.parametrize(
    ("with_usage", "without"),
    [
        (
            b'{"choices":[{"text":"}{","finish_reason":null}],"usage":{"completion_tokens":7}}',
            b'{"choices":[{"text":"}{","finish_reason":null}]}',
        ),
        (
            b'{"choices":[{"finish_reason":null}],"usage":{"completion_tokens":7%b},"z":1}'
            % DETAILS,
            b'{"choices":[{"finish_reason":null}],"z":1}',
        ),
        (
            b'{"choices":[{"finish_reason":"stop"}],"usage":{"completion_tokens":7}}',
            b'{"choices":[{"finish_reason":"stop"}]}',
        ),
        (
            b'{"usage": {"completion_tokens": 7}, "choices": [{"finish_reason": null}]}',
            b'{"choices":[{"finish_reason":null}]}',
        ),
    ],
)
def test_usage_in_each_chunk_is_counted_and_shown_to_those_who_ask(
    with_usage: bytes, without: bytes
) -> None:
    event = b"data: " + with_usage + b"\n\n"
    out, scanner = scan(event, [])
    assert out == b"data: " + without + b"\n\n"
    assert (scanner.events, scanner.tokens) == (1, 7)
    out, scanner = scan(event + USAGE, [], keep_each=True)
    assert out == event
    assert (scanner.events, scanner.tokens) == (1, 3)


def test_an_error_is_noticed() -> None:
    chunk = b'data: {"error":{"message":"boom"}}\n\n'
    out, scanner = scan(TOKEN % b"a" + chunk, [7])
    assert out.endswith(chunk)
    assert b"boom" in scanner.error
    assert scanner.events == 1


def test_an_error_that_is_null_is_none() -> None:
    _, scanner = scan(b'data: {"error":null,"choices":[{"text":"a"}]}\n\n', [])
    assert not scanner.error
    assert scanner.events == 1


def test_what_is_not_json_is_passed_on() -> None:
    chunk = b'data: "usage":{ nonsense\n\n'
    out, scanner = scan(chunk, [])
    assert (out, scanner.events, scanner.usage) == (chunk, 1, None)


def test_an_event_without_end_is_bounded() -> None:
    scanner = SseScan(keep_last=False)
    assert scanner.feed(b"x" * CARRY_BYTES_MAX) == b""
    with pytest.raises(ValueError, match="an event of over"):
        scanner.feed(b"x")
