"""Text of others made harmless for a terminal: what steers one is shown instead of obeyed.

Names of models, files, tensors and tags, reasons and messages come from whoever published or
answered. An escape sequence among them could recolour, overwrite or retitle the reader's terminal,
and a direction mark (U+202E) could show `gpj.exe` for `exe.jpg`. Owns which characters those are;
`output` and `faults` pass everything that they print through it.
"""

from __future__ import annotations

import re
import sys
import unicodedata

STEERING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Controls, formats (bidi marks, joiners, tags), lone surrogates, line and paragraph separators."""


def legible(text: str, *, keep: str = "") -> str:
    r"""The text with each steering character as `\x1b`, `\u202e` or `\U000e0001`; `keep` stays."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        _code(char) if char not in keep and unicodedata.category(char) in STEERING else char
        for char in text
    )


def _code(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def legible_json(text: str) -> str:
    """A JSON document with the same meaning, whose steering characters are JSON's own escapes."""
    if text.isascii():  # json.dumps has escaped what is below U+0020 already
        return text.replace("\x7f", "\\u007f")
    return "".join(
        _json_code(char) if char != "\n" and unicodedata.category(char) in STEERING else char
        for char in text
    )


def _json_code(char: str) -> str:
    pair = char.encode("utf-16-be", "surrogatepass")
    return re.sub("(....)", r"\\u\1", pair.hex())


def say(
    text: str, *, end: str = "\n", flush: bool = False, stderr: bool = False, lines: bool = False
) -> None:
    """Print one line for people, or `lines`; nothing else in it steers."""
    stream = sys.stderr if stderr else sys.stdout
    print(legible(text, keep="\n\t" if lines else "\t"), end=end, flush=flush, file=stream)
