"""Tokenizers kept in the gateway: a prompt's tokens without asking an engine, where both agree.

Owns reading them from a folder and the trust in them. A tokenizer is known by its content: it counts
for workers that loaded the same files, and for attached ones, whose files nobody knows, by the
model's name. Either way an engine has to give the same tokens first, and now and then again; one
difference ends it, loudly, and the engines are asked from then on.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from readyplane.core.errors import InvalidField
from readyplane.core.identity import digest_of
from readyplane_gateway.metrics import Meters

EQUAL_FIRST = 3
CHECK_EVERY = 1024
FILE_BYTES_MAX = 64 * 1024 * 1024

log = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """Text to token ids."""

    def __call__(self, text: str, *, special: bool) -> tuple[int, ...]:
        """`special`: with the tokens that the model wants around a prompt."""
        ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """Each UTF-8 byte plus `offset`: the modelled engine's."""

    offset: int

    def __call__(self, text: str, *, special: bool) -> tuple[int, ...]:
        del special  # there are none
        offset = self.offset
        return tuple([byte + offset for byte in text.encode("utf-8", "surrogatepass")])


@dataclass(frozen=True, slots=True)
class Pieces:
    """A `tokenizer.json` of Hugging Face, by their library where it is installed."""

    made: Any

    def __call__(self, text: str, *, special: bool) -> tuple[int, ...]:
        return tuple(self.made.encode(text, add_special_tokens=special).ids)


@dataclass(slots=True, eq=False)
class Local:
    """One tokenizer and how far it is trusted. Asked `asked` times, `equal` of them compared."""

    name: str
    encode: Tokenizer
    asked: int = 0
    equal: int = 0
    differs: bool = False

    @property
    def trusted(self) -> bool:
        """Whether its tokens may be used without an engine's."""
        return self.equal >= EQUAL_FIRST and not self.differs

    @property
    def due(self) -> bool:
        """Whether it is time to compare once more."""
        return self.asked % CHECK_EVERY == 0


class LocalTokens:
    """All tokenizers of a folder."""

    def __init__(
        self, by_digest: Mapping[str, Local], by_model: Mapping[str, Local], meters: Meters
    ) -> None:
        """By the digest of their files, and by the name of their model."""
        self._by_digest, self._by_model = dict(by_digest), dict(by_model)
        self._meters = meters

    @classmethod
    def none(cls, meters: Meters) -> LocalTokens:
        """None kept."""
        return cls({}, {}, meters)

    @classmethod
    def read(cls, folder: Path, meters: Meters) -> LocalTokens:
        """A folder of folders: one for each model (its name, `--` for `/`), with the tokenizer files
        as its artifact has them.

        Raises:
            InvalidField: the folder, or a tokenizer in it that cannot be used.
        """
        if not folder.is_dir():
            raise InvalidField("tokenizers_dir", str(folder), "give a folder of folders")
        by_digest: dict[str, Local] = {}
        by_model: dict[str, Local] = {}
        for place in sorted(p for p in folder.iterdir() if p.is_dir()):
            found = Local(place.name, _read(place / "tokenizer.json"))
            by_model[place.name.replace("--", "/")] = found
            by_digest[_digest(place)] = found
        return cls(by_digest, by_model, meters)

    def of(self, model: str, digest: str) -> Local | None:
        """The tokenizer of a model's workers, None without one that may be theirs."""
        found = self._by_digest.get(digest) if digest else self._by_model.get(model)
        return None if found is None or found.differs else found

    def compare(self, local: Local, text: str, engine: tuple[int, ...], *, special: bool) -> None:
        """An engine has told what it makes of a text."""
        same = local.encode(text, special=special) == engine
        self._meters.parity.labels("equal" if same else "differs").inc()
        if same:
            local.equal += 1
            return
        local.differs = True
        log.error(
            "the tokenizer kept here is not the engines': they are asked from now on",
            extra={"tokenizer": local.name, "characters": len(text)},
        )


def _read(path: Path) -> Tokenizer:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise InvalidField("tokenizers_dir", str(path), f"use files of {FILE_BYTES_MAX} bytes")
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidField(
            "tokenizers_dir", str(path), f"give a tokenizer.json ({error})"
        ) from None
    if isinstance(document, dict) and document.get("type") == "bytes":
        offset = document.get("offset")
        if type(offset) is not int or not 0 <= offset < 2**31:
            raise InvalidField("tokenizers_dir", str(path), "give offset as a whole number")
        return Bytes(offset)
    try:
        tokenizers = importlib.import_module(
            "tokenizers"
        )  # no dependency: who wants it installs it
    except ImportError:
        remedy = "install the package `tokenizers`, or leave this model out: its engines are asked"
        raise InvalidField("tokenizers_dir", str(path), remedy) from None
    return Pieces(tokenizers.Tokenizer.from_file(str(path)))


def _digest(folder: Path) -> str:
    """As a manifest has it of its tokenizer files (`Manifest.tokenizer_digest`)."""
    files = sorted(p for p in folder.iterdir() if p.is_file())
    return digest_of(
        [[p.name, f"sha256:{hashlib.sha256(p.read_bytes()).hexdigest()}"] for p in files]
    )
