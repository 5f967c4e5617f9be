"""What a client sent, read as a message, or an error that says what is wrong with it.

Shared by the ports, so that bytes that nobody can read get the same answer on each.
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


def check_text(document: object) -> None:
    """Refuse JSON with text that could not be passed on.

    Raises:
        InvalidField: a lone surrogate is in it.
    """
    found = _half_character(document)
    if found is not None:
        raise InvalidField(*found, "write whole characters: a surrogate needs its other half")


def _half_character(document: object) -> tuple[str, str] | None:
    """The dotted path and the text of a lone surrogate in JSON; None where all text is whole.

    JSON can spell it and Python can hold it, but nothing can send, store or log it.
    """
    left = [("", document)]
    while left:
        where, value = left.pop()
        if isinstance(value, str):
            if not _whole(value):
                return where or "body", value
        elif isinstance(value, list):
            left.extend((f"{where}.{at}".lstrip("."), item) for at, item in enumerate(value))
        elif isinstance(value, dict):
            for name, item in value.items():
                if not _whole(name):
                    return where or "body", name
                left.append((f"{where}.{name}".lstrip("."), item))
    return None


def _whole(text: str) -> bool:
    if text.isascii():
        return True
    return not any("\ud800" <= character <= "\udfff" for character in text)
