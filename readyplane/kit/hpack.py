"""Header compression of HTTP/2 (RFC 7541): what the lean gRPC server needs of it.

Owns a decoder with its table, one a connection, and literals that need no table of the reader's.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

TABLE_BYTES = 4_096
ENTRY_BYTES = 32
STRING_BYTES_MAX = 16_384
# The table that every connection begins with (appendix A); `~` stands for a space.
STATIC_TEXT = """
:authority :method=GET :method=POST :path=/ :path=/index.html :scheme=http :scheme=https
:status=200 :status=204 :status=206 :status=304 :status=400 :status=404 :status=500
accept-charset accept-encoding=gzip,~deflate accept-language accept-ranges accept
access-control-allow-origin age allow authorization cache-control content-disposition
content-encoding content-language content-length content-location content-range
content-type cookie date etag expect expires from host if-match if-modified-since
if-none-match if-range if-unmodified-since last-modified link location max-forwards
proxy-authenticate proxy-authorization range referer refresh retry-after server
set-cookie strict-transport-security transfer-encoding user-agent vary via
www-authenticate
"""
STATIC = tuple(
    (name.encode(), value.replace("~", " ").encode())
    for name, _, value in (entry.partition("=") for entry in STATIC_TEXT.split())
)
# Bits of each symbol's code, a letter each, `a` for 5; the last is the end of a string. The codes
# follow: shorter ones first, by symbol within a length (appendix B of the RFC).
HUFFMAN_BITS = (
    "isxxxxxxxtzxxzxxxxxxxxzxxxxxxxxxbffhibdgffdgdbbbaaabbbbbbbcdkbhfibcccccccccccccc"
    "ccccccccdcdioijbkabababbbaccbbbabcbaabccccckgjixprpprrrsrssssststtrstssssqrsrsst"
    "rqprrssqsrrtqrssqqrqsrssprrrsrrsvvporsruvvvwwvtuoqvwwvwtqqvvxwwwptpqrqqsrruuttvs"
    "vwvvwwwwwxwwwwwvz"
)
END_OF_STRING = 256

Header = tuple[bytes, bytes]


class HpackError(Exception):
    """The block cannot be read: the connection is lost, as both tables are."""


class Decoder:
    """Headers of one connection, in the order in which their blocks came."""

    def __init__(self) -> None:
        """An empty table."""
        self._table: deque[Header] = deque()
        self._bytes = 0
        self._bytes_max = TABLE_BYTES

    def decode(self, block: bytes) -> list[Header]:
        """The headers of a block.

        Raises:
            HpackError: it is malformed.
        """
        out: list[Header] = []
        at, end = 0, len(block)
        try:
            while at < end:
                byte = block[at]
                if byte & 0x80:
                    index, at = (byte & 0x7F, at + 1) if byte != 0xFF else _integer(block, at, 7)
                    out.append(self._entry(index))
                elif byte & 0x40:
                    header, at = self._literal(block, at, 6)
                    out.append(header)
                    self._add(header)
                elif byte & 0x20:
                    size, at = _integer(block, at, 5)
                    if size > TABLE_BYTES or out:
                        raise HpackError("a table size that was not offered, or out of place")
                    self._bytes_max = size
                    self._shrink()
                else:
                    header, at = self._literal(block, at, 4)
                    out.append(header)
        except IndexError:
            raise HpackError("a block ends within a header") from None
        return out

    def _literal(self, block: bytes, at: int, bits: int) -> tuple[Header, int]:
        index, at = _integer(block, at, bits)
        if index:
            name = self._entry(index)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        return (name, value), at

    def _entry(self, index: int) -> Header:
        if 1 <= index <= len(STATIC):
            return STATIC[index - 1]
        place = index - len(STATIC) - 1
        if not 0 <= place < len(self._table):
            raise HpackError(f"there is no entry {index}")
        return self._table[place]

    def _add(self, header: Header) -> None:
        self._table.appendleft(header)
        self._bytes += ENTRY_BYTES + len(header[0]) + len(header[1])
        self._shrink()

    def _shrink(self) -> None:
        while self._bytes > self._bytes_max:
            name, value = self._table.pop()
            self._bytes -= ENTRY_BYTES + len(name) + len(value)


def literal(name: bytes, value: bytes) -> bytes:
    """A header that neither side remembers."""
    return b"\0" + _length(len(name)) + name + _length(len(value)) + value


def _length(size: int) -> bytes:
    if size < 0x7F:
        return bytes((size,))
    out, size = bytearray((0x7F,)), size - 0x7F
    while size > 0x7F:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    out.append(size)
    return bytes(out)


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in (0, 7, 14, 21):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise HpackError("a number is too large")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    squeezed = block[at] & 0x80
    size, at = _integer(block, at, 7)
    end = at + size
    if size > STRING_BYTES_MAX or end > len(block):
        raise HpackError("a text is too long")
    text = block[at:end]
    return (unsqueezed(text) if squeezed else text), end


@lru_cache(maxsize=1)
def _codes() -> dict[tuple[int, int], int]:
    """Symbols by (bits, code)."""
    lengths = sorted((ord(letter) - ord("a") + 5, n) for n, letter in enumerate(HUFFMAN_BITS))
    out: dict[tuple[int, int], int] = {}
    code, before = 0, 0
    for bits, symbol in lengths:
        code <<= bits - before
        before = bits
        out[bits, code] = symbol
        code += 1
    return out


@lru_cache(maxsize=256)
def unsqueezed(text: bytes) -> bytes:
    """A text in Huffman code as it was; few different ones come.

    Raises:
        HpackError: it is not such a text.
    """
    codes, out = _codes(), bytearray()
    code = bits = 0
    for byte in text:
        for shift in range(7, -1, -1):
            code, bits = code << 1 | (byte >> shift & 1), bits + 1
            symbol = codes.get((bits, code))
            if symbol is None:
                continue
            if symbol == END_OF_STRING:
                raise HpackError("a text ends before its end")
            out.append(symbol)
            code = bits = 0
    if bits > 7 or code != (1 << bits) - 1:
        raise HpackError("a text is filled up with something")
    return bytes(out)
