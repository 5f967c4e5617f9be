"""HTTP/2 as the lean gRPC server speaks it: kinds, flags, error codes and bounds of frames.

Owned by `readyplane.kit.lean_rpc`. Nothing here knows of calls.
"""

from __future__ import annotations

import struct

from readyplane.kit.hpack import literal

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY = range(8)
WINDOW_UPDATE, CONTINUATION = 8, 9
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, WITH_PRIORITY = 0x4, 0x8, 0x20
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR = 0, 1, 3, 6
REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 7, 8, 9, 11
SETTING_STREAMS, SETTING_WINDOW, SETTING_FRAME = 3, 4, 5

HEAD_BYTES = 9
FRAME_BYTES_MAX = 16_384
WINDOW_FIRST = 65_535
WINDOW_MOST = (1 << 31) - 1
WINDOW_BYTES = 16 * 1024 * 1024

HEAD = struct.Struct("!BHBBI")
PREFIX = struct.Struct("!BI")
SETTING = struct.Struct("!HI")
NUMBER = struct.Struct("!I")
LAST = struct.Struct("!II")
OK_HEADERS = b"\x88" + literal(b"content-type", b"application/grpc")
OK_TRAILERS = literal(b"grpc-status", b"0")


class Broken(Exception):
    """The connection cannot go on."""

    def __init__(self, code: int, why: str) -> None:
        """`code`: of HTTP/2, told to the client with `why`."""
        self.code, self.why = code, why
        super().__init__(why)


def frame(kind: int, flags: int, number: int, body: bytes) -> bytes:
    """One frame."""
    size = len(body)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, number) + body


def goaway(newest: int, code: int, why: str = "") -> bytes:
    """The last frame to a client: which stream was heard last, and what was wrong."""
    return frame(GOAWAY, 0, 0, LAST.pack(newest, code) + why.encode())


def unpadded(body: bytes) -> bytes:
    """What a padded frame carries.

    Raises:
        Broken: more padding than there is.
    """
    if not body or body[0] >= len(body):
        raise Broken(PROTOCOL_ERROR, "more padding than there is")
    return body[1 : len(body) - body[0]]
