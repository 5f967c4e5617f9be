"""What a client sent, read as a message, or an error that says what is wrong with it.

Shared by both gRPC ports, so that bytes that nobody can read get the same answer on each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from readyplane.core.errors import InvalidField, Unsupported

_PREFIX = struct.Struct("!BI")


def read(parse: Callable[[bytes], Any], body: bytes) -> Any:
    """The message of `body`.

    Raises:
        InvalidField: its bytes are none of this type.
    """
    try:
        return parse(body)
    except DecodeError as error:
        remedy = "send a protobuf message of the method's request type"
        raise InvalidField("message", f"{len(body)} bytes", remedy) from error


def body_of(parts: Sequence[bytes]) -> bytes:
    """The one message of a call, without its prefix.

    Raises:
        Unsupported: it is compressed. InvalidField: it is not one message.
    """
    if len(parts) > 1 and len(parts[0]) < _PREFIX.size:
        parts = [b"".join(parts)]
    first = parts[0] if parts else b""
    if len(first) < _PREFIX.size:
        raise InvalidField("message", len(first), "send one message a call")
    compressed, size = _PREFIX.unpack_from(first)
    if compressed:
        raise Unsupported("a compressed message", "send it as it is")
    body = b"".join((first[_PREFIX.size :], *parts[1:]))  # put together once: it may be large
    if size != len(body):
        raise InvalidField("message", size, "send one message a call, and all of it")
    return body
