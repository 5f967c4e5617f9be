"""What text may come from outside. Pure; used wherever JSON of a client is read."""

from __future__ import annotations

from readyplane.core.errors import InvalidField


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
