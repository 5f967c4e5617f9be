"""A policy file that is watched: whoever edits it has the new policy in force within seconds.

Owns noticing a change by content, and keeping the last good policy when a new one is wrong. Hands
what it reads to the service, which stores it as the next version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from readyplane.core.errors import Conflict, ReadyplaneError, Unavailable
from readyplane.core.identity import digest_of_bytes
from readyplane.kit.clock import Clock
from readyplane_planner.policy import Policy, load_policy

log = logging.getLogger(__name__)


class PolicyFile:
    """Watches one file by reading it: editors, mounts and symbolic links tell of changes in too many
    ways to rely on any of them.

    Args:
        adopt: stores a policy as the next version unless it is the one in force.
        tell: is given what is wrong with the file, and an empty text once it is right again.
        loaded: the content that is in force already is not adopted again.
    """

    def __init__(
        self,
        path: Path,
        *,
        adopt: Callable[[Policy], Awaitable[None]],
        tell: Callable[[str], None],
        clock: Clock,
        every_s: float,
        loaded: bool = True,
    ) -> None:
        self._path = path
        self._adopt = adopt
        self._tell = tell
        self._clock = clock
        self._every_s = every_s
        self._seen = _content(path) if loaded else None

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self._clock.sleep(self._every_s)
            await self.check()

    async def check(self) -> bool:
        """Look once; True when a new policy was handed on. Nothing that is wrong with it raises."""
        content = await asyncio.to_thread(_content, self._path)
        if content == self._seen:
            return False
        try:
            await self._adopt(load_policy(self._path))
        except ReadyplaneError as error:
            self._fail(error)
            # What is wrong with the file stays so until it changes; a store may be back before.
            self._seen = self._seen if isinstance(error, Unavailable | Conflict) else content
            return False
        self._seen = content
        self._tell("")
        log.info("policy of %s is in force", self._path)
        return True

    def _fail(self, error: ReadyplaneError) -> None:
        text = f"policy file {self._path}: {error}; the last good policy stays in force"
        self._tell(text)
        log.error(text)


def _content(path: Path) -> str:
    """Its digest; empty when it cannot be read, which is a change like any other."""
    try:
        return digest_of_bytes(path.read_bytes())
    except OSError:
        return ""
