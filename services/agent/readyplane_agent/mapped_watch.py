"""A mapped arena rests on files that others could change: whether they are what was verified.

Owns the look at them, every `WATCH_EVERY_S` and whenever an engine has died, and what follows from a
change: the files leave the cache, nothing more is given from them, and the worker ends by the name
of the file. A drain would be wrong: what it still answers may be wrong already.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from readyplane.kit.clock import Clock
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.lifecycle import Event
from readyplane_agent.mapped_memory import MappedMemory
from readyplane_agent.starting import Started
from readyplane_agent.transfer import TransferServer

log = logging.getLogger("agent.mapped")

WATCH_EVERY_S = 2.0


class MappedWatch:
    """The watch of one worker.

    Args:
        started: with the worker's arena, once there is one. cache: the node's, None without one.
        transfer: what gives from it. end: ends the life with an event and a reason.
    """

    def __init__(
        self,
        started: Started,
        cache: WeightCache | None,
        transfer: TransferServer,
        clock: Clock,
        *,
        end: Callable[[Event, str], None],
    ) -> None:
        self._started, self._cache, self._transfer = started, cache, transfer
        self._clock, self._end = clock, end
        self._why = ""

    async def keep(self) -> None:
        """Look until something has changed, which ends the worker."""
        while not self.look():
            await self._clock.sleep(WATCH_EVERY_S)
        self._end(Event.ENGINE_DIED, self._why)

    def explained(self, failure: str) -> str:
        """A failure of the engine, behind the file that may have caused it."""
        why = self.look()
        return f"{why}; {failure}" if why else failure

    def look(self) -> str:
        """What has changed and what is wrong with it, empty while nothing has.

        The change is acted upon when it is first seen.
        """
        arena = self._started.arena
        if self._why or arena is None or not isinstance(arena.memory, MappedMemory):
            return self._why
        changed = arena.memory.changed()
        if changed:
            named = {self._name_of(arena, name): what for name, what in changed.items()}
            told = ", ".join(f"{name} ({what})" for name, what in sorted(named.items())[:4])
            self._why = f"mapped weights are no longer what was verified: {told}"
            log.error("%s; taken out of the cache", self._why)
            self._transfer.withhold()
            arena.memory.forsake()
            self._discard(arena, set(changed))
        return self._why

    def _discard(self, arena: Arena, names: set[str]) -> None:
        """Out of the cache, unless somebody has put a right file there meanwhile."""
        assert isinstance(arena.memory, MappedMemory)
        if self._cache is None:
            return
        for entry in arena.manifest.files:
            path = self._cache.locate(entry)
            if path.name in names and arena.memory.is_file(path):
                try:
                    self._cache.discard(entry)
                except OSError as error:
                    log.warning("weight cache: %s stays (%s)", path.name, error)

    def _name_of(self, arena: Arena, name: str) -> str:
        """A file of the cache as people know it: its path in the artifact, and its name here."""
        if self._cache is None:
            return name
        paths = [e.path for e in arena.manifest.files if self._cache.locate(e).name == name]
        return f"{paths[0]} = {name}" if paths else name
