"""Measured class profiles that ship with the product, as JSON with their sources.

Owns finding a profile by name or file. A profile file is either a whole document
(`readyplane.core.profile.ClassProfile`) or `{"extends": NAME, ...}` with the fields that differ.
`unknown` is measured of nothing and stands for any class until its own profile is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from readyplane.core.errors import InvalidField, NotFound
from readyplane.core.identity import parse
from readyplane.core.profile import ClassProfile
from readyplane.core.profile_default import UNKNOWN_CLASS

EXTENDS_MAX = 4
FOLDER = Path(__file__).parent  # not importlib.resources, whose import costs a start more


def names() -> tuple[str, ...]:
    """Names of the profiles that ship with the product."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.json")))


def load(name_or_path: str, *, worker_class: str = "") -> ClassProfile:
    """A profile by name, or from a file when the text ends in `.json` or holds a `/`.

    Args:
        worker_class: whose profile `unknown` becomes, under a name of its own.

    Raises:
        NotFound: no such name or file. InvalidField: a field is wrong.
    """
    profile = ClassProfile.from_document(_document(name_or_path, depth=0))
    if profile.worker_class == UNKNOWN_CLASS and worker_class not in {"", UNKNOWN_CLASS}:
        name = f"{profile.name}-{worker_class}"
        return replace(profile, name=name, worker_class=worker_class)
    return profile


def _document(name_or_path: str, *, depth: int) -> Mapping[str, object]:
    if depth > EXTENDS_MAX:
        raise InvalidField("profile.extends", name_or_path, f"nest at most {EXTENDS_MAX} deep")
    text = _text(name_or_path)
    doc = parse(text, where=f"profile {name_or_path}")
    if not isinstance(doc, dict):
        raise InvalidField("profile", name_or_path, "write a JSON object")
    below = doc.pop("extends", None)
    if below is None:
        return doc
    return {**_document(str(below), depth=depth + 1), **doc}


def _text(name_or_path: str) -> str:
    if name_or_path.endswith(".json") or "/" in name_or_path:
        try:
            return Path(name_or_path).read_text()
        except OSError as error:
            raise NotFound("profile", name_or_path, f"give a readable file ({error})") from error
    if name_or_path not in names():
        remedy = f"use one of {', '.join(names())}, or a file of `readyplane profile measure`"
        raise NotFound("profile", name_or_path, remedy)
    return (FOLDER / f"{name_or_path}.json").read_text()
