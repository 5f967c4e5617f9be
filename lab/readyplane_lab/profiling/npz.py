"""NPZ files as arrays of numbers and nothing else: an archive of somebody else's must not run code."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy

from readyplane.core.errors import InvalidField

MEMBER_BYTES_MAX = 64_000_000
MEMBERS_MAX = 64


def read_npz(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays by name.

    Raises:
        InvalidField: not an NPZ, too large, or an array that holds more than numbers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(".npy")]
            if len(members) > MEMBERS_MAX or any(m.file_size > MEMBER_BYTES_MAX for m in members):
                raise InvalidField(
                    "FILE",
                    str(path),
                    f"give at most {MEMBERS_MAX} arrays of {MEMBER_BYTES_MAX:,} bytes",
                )
            return {
                m.filename.removesuffix(".npy"): _array(archive, m.filename, path) for m in members
            }
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise InvalidField("FILE", str(path), f"give a readable .npz ({error})") from error


def _array(archive: zipfile.ZipFile, name: str, path: Path) -> np.ndarray[Any, Any]:
    with archive.open(name) as file:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, column_major, dtype = read(file)
        if dtype.kind not in "iuf":
            raise InvalidField("FILE", f"{path}: {name}", f"use numbers, not {dtype}")
        values = np.frombuffer(file.read(), dtype=dtype)
    return values.reshape(shape, order="F" if column_major else "C")
