"""Where the public traces lie: beside the checkout, or where `READYPLANE_DATA` says.

They are data of others and not part of the repository, so everything that reads one must be able
to do without.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from readyplane.core.errors import InvalidField
from readyplane_lab.workload.trace import Trace, read_trace

DATA_VARIABLE = "READYPLANE_DATA"
_BESIDE = Path(__file__).resolve().parents[4] / "shared" / "data"


def public_file(name: str) -> Path:
    """A file of the public data, `name` relative to its folder.

    Raises:
        InvalidField: it is not there.
    """
    folder = Path(os.environ.get(DATA_VARIABLE) or _BESIDE)
    path = folder / name
    if not path.is_file():
        raise InvalidField(
            "public data", str(path), f"put the file there, or name its folder in {DATA_VARIABLE}"
        )
    return path


def public_trace(name: str, *, seed: int) -> Trace:
    """A public trace by its file name; `seed` is that of a jitter, where the trace needs one.

    Raises:
        InvalidField: it is not there, or not readable.
    """
    return _read(public_file(f"traces/{name}"), seed)


@lru_cache(maxsize=4)
def _read(path: Path, seed: int) -> Trace:
    return read_trace(path, seed=seed)
