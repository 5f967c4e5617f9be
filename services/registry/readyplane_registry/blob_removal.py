"""The folder of the byte store as collection needs it: what is there, and taking a blob away.

Owns listing and deleting below `FileBlobs.root`; no link is followed. Handed to `collecting`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from readyplane.core.errors import Unavailable
from readyplane.core.identity import check_digest
from readyplane.kit.clock import Clock
from readyplane_registry.collecting import StoredBlob

HEX = set("0123456789abcdef")
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class FolderRemoval:
    """See `readyplane_registry.collecting.ByteRemoval`.

    Args:
        root: of the byte store. clock: of the machine that stamps its files.
    """

    def __init__(self, root: Path, clock: Clock) -> None:
        self._root, self._clock = Path(os.path.realpath(root)), clock

    async def stored(self) -> Sequence[StoredBlob]:
        """See `ByteRemoval`."""
        return await asyncio.to_thread(self._stored)

    def _stored(self) -> list[StoredBlob]:
        found: list[StoredBlob] = []
        now_s = self._clock.wall_s()
        with os.scandir(self._root / "sha256") as shards:
            for shard in shards:
                if not shard.is_dir(follow_symlinks=False):
                    continue
                with os.scandir(shard) as files:
                    for file in files:
                        facts = file.stat(follow_symlinks=False)
                        named = len(file.name) == 64 and not set(file.name) - HEX
                        if named and stat.S_ISREG(facts.st_mode):
                            age_s = max(0.0, now_s - facts.st_mtime)
                            found.append(StoredBlob(f"sha256:{file.name}", facts.st_size, age_s))
        return found

    async def remove(self, sha256: str) -> int:
        """See `ByteRemoval`. Open readers go on reading; the space comes back when they end."""
        return await asyncio.to_thread(self._remove, sha256)

    def _remove(self, sha256: str) -> int:
        name = check_digest(sha256, where="sha256").removeprefix("sha256:")
        try:
            shards = os.open(self._root / "sha256", FOLDER_FLAGS)
            try:
                shard = os.open(name[:2], FOLDER_FLAGS, dir_fd=shards)
            finally:
                os.close(shards)
            try:
                size = os.stat(name, dir_fd=shard, follow_symlinks=False).st_size
                os.unlink(name, dir_fd=shard)
                os.fsync(shard)
            finally:
                os.close(shard)
        except FileNotFoundError:
            return 0
        except OSError as error:
            what = "is in use" if error.errno == errno.EBUSY else f"failed: {error.strerror}"
            raise Unavailable(
                f"deletion of blob {sha256} {what}", "look at the store's folder; it is tried again"
            ) from error
        return size
