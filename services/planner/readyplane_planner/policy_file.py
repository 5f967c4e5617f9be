"""A policy file that is watched: whoever edits it has the new policy in force within seconds.

Owns reading such a file so that no path holds the planner up, noticing a change by content, and
keeping the last good policy when a new one is wrong. Hands what it reads to the service, which
stores it as the next version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread

from readyplane.core.errors import Conflict, InvalidField, ReadyplaneError, Unavailable
from readyplane.core.identity import digest_of_bytes, parse
from readyplane.kit.clock import Clock
from readyplane_planner.policy import Policy, read_policy
from readyplane_planner.yaml_text import read_yaml

log = logging.getLogger(__name__)

BYTES_MAX = 1_000_000
READ_S_MAX = 5.0


class PolicyFile:
    """Watches one file by reading it: editors, mounts and symbolic links tell of changes in too many
    ways to rely on any of them.

    Args:
        adopt: stores a policy as the next version unless it is the one in force.
        tell: is given what is wrong with the file, and an empty text once it is right again.
        loaded: the content that is in force already is not adopted again.
        read_s_max: how long a look waits for the file.
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
        read_s_max: float = READ_S_MAX,
    ) -> None:
        self._path = path
        self._adopt = adopt
        self._tell = tell
        self._clock = clock
        self._every_s = every_s
        self._read_s_max = read_s_max
        self._reading: asyncio.Future[bytes | InvalidField] | None = None
        self._seen = _mark(_read(path)) if loaded else None

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self._clock.sleep(self._every_s)
            await self.check()

    async def check(self) -> bool:
        """Look once; True when a new policy was handed on. Nothing that is wrong with it raises."""
        found = await self._content()
        mark = _mark(found)
        if mark == self._seen:
            return False
        try:
            if isinstance(found, InvalidField):
                raise found
            await self._adopt(_policy_of(self._path, found))
        except ReadyplaneError as error:
            self._fail(error)
            # What is wrong with the file stays so until it changes; a store may be back before.
            self._seen = self._seen if isinstance(error, Unavailable | Conflict) else mark
            return False
        self._seen = mark
        self._tell("")
        log.info("policy of %s is in force", self._path)
        return True

    async def _content(self) -> bytes | InvalidField:
        """What the file holds; a look that got no answer is waited for again by the next one."""
        if self._reading is None:
            self._reading = _begin_reading(self._path)
        done, _waiting = await asyncio.wait({self._reading}, timeout=self._read_s_max)
        if not done:
            remedy = f"it did not answer within {self._read_s_max:g} s; look at its mount"
            return InvalidField("--policy", str(self._path), remedy)
        found, self._reading = self._reading.result(), None
        return found

    def _fail(self, error: ReadyplaneError) -> None:
        text = f"policy file {self._path}: {error}; the last good policy stays in force"
        self._tell(text)
        log.error(text)


def load_policy(path: Path) -> Policy:
    """A policy from a YAML or JSON file.

    Raises:
        InvalidField: not readable, not a regular file, too long, not an object, or a wrong field.
        UnknownField.
    """
    found = _read(path)
    if isinstance(found, InvalidField):
        raise found
    return _policy_of(path, found)


def _policy_of(path: Path, content: bytes) -> Policy:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidField("--policy", str(path), f"give a readable file ({error})") from error
    if path.suffix == ".json":
        return read_policy(parse(text, where=str(path)))
    return read_policy(read_yaml(text, field="--policy", value=str(path)))


def _begin_reading(path: Path) -> asyncio.Future[bytes | InvalidField]:
    """Read in a thread of its own, which the end of the process does not wait for: a mount that
    hangs holds its readers for as long as it likes.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[bytes | InvalidField] = loop.create_future()

    def read() -> None:
        found = _read(path)
        with suppress(RuntimeError):  # the planner has ended meanwhile
            loop.call_soon_threadsafe(done.set_result, found)

    Thread(target=read, name="policy-file", daemon=True).start()
    return done


def _read(path: Path) -> bytes | InvalidField:
    """Content of a regular file of bounded size, or what is wrong with it; a pipe is not opened."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return InvalidField("--policy", str(path), "give a regular file")
        # It may have become a pipe in between, whose opening would wait for a writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return InvalidField("--policy", str(path), "give a regular file")
            content = file.read(BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        return InvalidField("--policy", str(path), f"give a readable file ({error})")
    if len(content) > BYTES_MAX:
        return InvalidField("--policy", str(path), f"give a file of at most {BYTES_MAX} bytes")
    return content


def _mark(found: bytes | InvalidField) -> str:
    """What tells one content from another; what is wrong with a file is one like any other."""
    return str(found) if isinstance(found, InvalidField) else digest_of_bytes(found)
