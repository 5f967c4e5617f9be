"""Header compression, by the examples of the RFC."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.kit.hpack import STATIC, TABLE_BYTES, Decoder, HpackError, literal, unsqueezed

# RFC 7541, appendix C.3 and C.4: three requests on one connection, plain and in Huffman code.
PLAIN = (
    "828684410f7777772e6578616d706c652e636f6d",
    "828684be58086e6f2d6361636865",
    "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
)
SQUEEZED = (
    "828684418cf1e3c2e5f23a6ba0ab90f4ff",
    "828684be5886a8eb10649cbf",
    "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
)
REQUESTS = (
    ((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")),
    ((b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/")),
    ((b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/index.html")),
)
HOST = (b":authority", b"www.example.com")
MORE = ((), ((b"cache-control", b"no-cache"),), ((b"custom-key", b"custom-value"),))


@pytest.mark.parametrize("blocks", [PLAIN, SQUEEZED])
def test_the_requests_of_the_rfc(blocks: tuple[str, ...]) -> None:
    decoder = Decoder()
    for block, request, more in zip(blocks, REQUESTS, MORE, strict=True):
        assert decoder.decode(bytes.fromhex(block)) == [*request, HOST, *more]


def test_the_static_table_is_that_of_the_rfc() -> None:
    assert len(STATIC) == 61
    assert STATIC[15] == (b"accept-encoding", b"gzip, deflate")
    assert STATIC[60] == (b"www-authenticate", b"")


def test_long_texts_in_huffman_code() -> None:
    squeezed = bytes.fromhex(
        "94e7821dd7f2e6c7b335dfdfcd5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007"
    )
    assert unsqueezed(squeezed) == b"foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_a_literal_is_read_again(name: bytes, value: bytes) -> None:
    assert Decoder().decode(literal(name, value)) == [(name, value)]


@given(st.binary(max_size=60))
def test_nonsense_is_read_or_refused(block: bytes) -> None:
    with contextlib.suppress(HpackError):
        Decoder().decode(block)


def test_what_does_not_fit_into_the_table_is_forgotten() -> None:
    decoder = Decoder()
    long = b"x" * (TABLE_BYTES // 2 - 64)
    for name in (b"a", b"b", b"c"):
        decoder.decode(b"\x40\x01" + name + literal(b"", long)[2:])
    assert decoder.decode(b"\xbe\xbf") == [(b"c", long), (b"b", long)]
    with pytest.raises(HpackError, match="no entry"):
        decoder.decode(b"\xc0")
    decoder.decode(b"\x20")  # a table of no size
    with pytest.raises(HpackError, match="no entry"):
        decoder.decode(b"\xbe")


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (b"\x80", "no entry 0"),
        (b"\x40\x7f\xff\xff\xff\xff\xff", "too large"),
        (b"\x00\x7f\xff\xff\x01", "too long"),
        (b"\x40", "ends within"),
        (b"\x3f\xff\xff\x03", "not offered"),
        (b"\x00\x81\x00\x01a", "filled up"),
        (b"\x00\x84\xff\xff\xff\xff\x01a", "ends before|filled up"),
    ],
)
def test_malformed_blocks_are_refused(block: bytes, why: str) -> None:
    with pytest.raises(HpackError, match=why):
        Decoder().decode(block)
