"""A file that a reader sees whole or not at all, whoever else writes it at the same time."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write beside it, then put it in its place; two proofs may share a folder."""
    part = file.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
