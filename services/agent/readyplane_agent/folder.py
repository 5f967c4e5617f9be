"""The folder of one agent's own files: made, marked as an agent's, and removed.

Owns the mark by which a folder is known to be an agent's; nothing without it is ever emptied or
removed. The agent removes its folder at the end of its life; whoever started it removes what an
agent that was killed has left (`remove_left_behind`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from readyplane.core.errors import InvalidField

MARK = ".readyplane-agent"


def work_folder(path: Path) -> None:
    """Make an empty folder of our own.

    Raises:
        InvalidField: it cannot be written, or holds files that no agent has left there.
    """
    remedy = "give a folder that can be written"
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        left = [item for item in path.iterdir() if item.name != MARK]
        if left and not (path / MARK).exists():
            remedy = f"give an empty folder: {left[0].name} in it is not an agent's"
            raise InvalidField("--work-dir", str(path), remedy)
        (path / MARK).touch()
        for item in left:
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink()
    except OSError as error:
        raise InvalidField("--work-dir", str(path), f"{remedy} ({error.strerror})") from error


def remove_left_behind(path: Path, *, within: Path) -> bool:
    """Remove the folder of an agent that has ended; False when there is none of its kind.

    Only a folder that lies directly in `within`, is no link, and carries the mark is removed. The
    mark goes last, so that a removal that was cut short can be repeated.

    Raises:
        OSError: it could not be removed, or somebody still writes into it.
    """
    if path.parent != within or path.name in ("", ".", "..") or path.is_symlink():
        return False
    mark = path / MARK
    if not mark.is_file():
        return False
    for item in path.iterdir():
        if item == mark:
            continue
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        else:
            item.unlink()
    mark.unlink()
    path.rmdir()
    return True
