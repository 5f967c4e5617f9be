"""The canonical form of a JSON value, and digests over it: equal meaning gives equal bytes.

Owns what two documents must share to be one, and how JSON is read so that nothing is lost on the
way (`parse`). Handed to `identity`, and to whoever signs or journals a document.

The form: UTF-8; text and keys in Unicode form NFC, case kept; keys sorted by code point, each once;
no blanks; the escapes of JSON and no others; integers exact, whatever their size; a number with an
integral value is written as that integer (1.0 and 1 are one number, -0.0 is 0), any other one as
the shortest decimal that reads back as the same double. NaN and infinities have no form.
"""

from __future__ import annotations

import hashlib
import json
import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from readyplane.core.errors import InvalidField

DIGITS_MAX = 4300
"""Most digits of an integer: what Python itself reads and writes without a fight."""


def canonical(value: object, *, where: str = "document") -> bytes:
    """Canonical UTF-8 form of a JSON value.

    Raises:
        InvalidField: NaN, infinity, a key that is no text or stands twice, half a character, an
            integer of over `DIGITS_MAX` digits, bottomless nesting, or a type JSON does not have.
    """
    try:
        return _canonical(value, where).encode()
    except RecursionError as error:
        raise InvalidField(where, "nested too deeply", "use fewer levels") from error
    except UnicodeEncodeError as error:
        remedy = "write whole characters: a surrogate needs its other half"
        raise InvalidField(where, error.object[error.start : error.end], remedy) from error


def _canonical(value: object, where: str) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(nfc(value), ensure_ascii=False)
    if isinstance(value, int):
        return _integer(value, where)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise InvalidField(where, value, "use a finite number")
        return str(int(value)) if value.is_integer() else repr(float(value))
    if isinstance(value, Mapping):
        return _object(value, where)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return (
            "[" + ",".join(_canonical(item, f"{where}[{i}]") for i, item in enumerate(value)) + "]"
        )
    raise InvalidField(where, value, "use null, true, false, a number, text, a list or an object")


def _object(value: Mapping[Any, Any], where: str) -> str:
    pairs: dict[str, str] = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidField(where, key, "use text as key")
        name = nfc(key)
        if name in pairs:
            raise InvalidField(where, key, "remove the duplicate key")
        pairs[name] = _canonical(item, f"{where}.{name}")
    body = ",".join(
        f"{json.dumps(name, ensure_ascii=False)}:{pairs[name]}" for name in sorted(pairs)
    )
    return "{" + body + "}"


def _integer(value: int, where: str) -> str:
    # 3 bits a digit at least: what is shorter need not be compared.
    if value.bit_length() > 3 * DIGITS_MAX and abs(value) >= 10**DIGITS_MAX:
        raise InvalidField(where, f"{value.bit_length()} bits", f"use {DIGITS_MAX} digits at most")
    return str(int(value))


def nfc(text: str) -> str:
    """The text in Unicode form NFC."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def control_in(name: str) -> str:
    """The first character of a name that breaks the line it stands in, as `U+000A`; empty: none does.

    Control characters and line separators: whoever lists names would show another name, or two.
    """
    if name.isprintable():
        return ""
    found = (c for c in name if unicodedata.category(c) in {"Cc", "Zl", "Zp"})
    return next((f"U+{ord(c):04X}" for c in found), "")


def parse(data: bytes | str, *, where: str = "document") -> Any:
    """Parse JSON strictly: duplicate keys, NaN and infinities are refused, integers stay exact.

    What is written with a point or an exponent is a double, everything else an exact integer.

    Raises:
        InvalidField: not JSON, or JSON with a duplicate key or a number beyond a double's range.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, item in items:
            if key in out:
                raise InvalidField(f"{where}.{key}", item, "remove the duplicate key")
            out[key] = item
        return out

    def constant(text: str) -> float:
        raise InvalidField(where, text, "use a finite number")

    try:
        return json.loads(
            data,
            object_pairs_hook=pairs,
            parse_constant=constant,
            parse_float=lambda text: _number(text, where),
        )
    except RecursionError as error:
        raise InvalidField(where, "nested too deeply", "send valid JSON of fewer levels") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidField(where, str(data[:60]), f"send valid JSON ({error})") from error
    except ValueError as error:  # the one thing more that is refused: an integer without end
        remedy = f"use {DIGITS_MAX} digits at most for a number"
        raise InvalidField(where, str(data[:60]), remedy) from error


def _number(text: str, where: str) -> float:
    """A number with a point or an exponent: a double, as whoever wrote its shortest form meant."""
    value = float(text)
    if not math.isfinite(value):
        raise InvalidField(where, text[:60], "use a finite number")
    if len(text) > DIGITS_MAX:
        raise InvalidField(where, text[:60], f"use {DIGITS_MAX} characters for a number at most")
    return value


def digest_of(value: object) -> str:
    """`sha256:<64 hex>` over the canonical form."""
    return "sha256:" + hashlib.sha256(canonical(value)).hexdigest()


def digest_of_bytes(data: bytes | bytearray | memoryview) -> str:
    """`sha256:<64 hex>` over raw bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def check_digest(digest: str, *, where: str = "digest") -> str:
    """Return the digest if it is well formed.

    Raises:
        InvalidField: anything but `sha256:` and 64 lower-case hex digits.
    """
    body = digest.removeprefix("sha256:")
    if not digest.startswith("sha256:") or len(body) != 64 or set(body) - set("0123456789abcdef"):
        raise InvalidField(where, digest, "write sha256: followed by 64 lower-case hex digits")
    return digest
