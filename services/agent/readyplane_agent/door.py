"""Who stands at the agent's door: bounded connections, of which idle ones make room. No I/O.

Owns the account of connections: since when each waits for a request, and which have shown a right
to weights. Where all places are taken the one that has idled longest goes, those without a right
first, so that nobody keeps peers and health checks out by holding connections open. Handed to
`transfer`, which reads and answers.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

log = logging.getLogger("agent.transfer")

CLOSE_WAIT_S = 2.0


@dataclass(slots=True)
class Doorway:
    """The connections of one server.

    Attributes:
        connections_max: at once. made_room: connections that were closed for another one.
    """

    connections_max: int
    made_room: int = 0
    _closed: bool = False
    _came: dict[asyncio.Task[None], float] = field(default_factory=dict)
    _idle: dict[asyncio.Task[None], float] = field(default_factory=dict)
    _trusted: set[asyncio.Task[None]] = field(default_factory=set)

    def enter(self, task: asyncio.Task[None], *, now_s: float) -> bool:
        """Let a connection in; False when all are taken by readers that are being answered, and for
        one that was accepted just before the end.
        """
        if self._closed:
            return False
        if len(self._came) >= self.connections_max:
            victim = self._victim()
            if victim is None:
                return False
            self.leave(victim)
            victim.cancel()
            self.made_room += 1
            if self.made_room & (self.made_room - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
                log.warning(
                    "all %d connections are taken: idle ones are closed for others, %d so far",
                    self.connections_max,
                    self.made_room,
                )
        self._came[task] = now_s
        return True

    def _victim(self) -> asyncio.Task[None] | None:
        """Idle without a right, then answered without a right, then idle: the longest first."""
        strangers = {t: s for t, s in self._came.items() if t not in self._trusted}
        idle = {t: s for t, s in self._idle.items() if t in strangers}
        for some in (idle, strangers, self._idle):
            if some:
                return min(some, key=lambda t: some[t])
        return None

    def waits(self, task: asyncio.Task[None], *, now_s: float) -> None:
        """It waits for a request from now on."""
        if task in self._came:
            self._idle[task] = now_s

    def asked(self, task: asyncio.Task[None]) -> None:
        """A request has come, and is being answered."""
        self._idle.pop(task, None)

    def trust(self, task: asyncio.Task[None]) -> None:
        """It has shown the right to weights."""
        if task in self._came:
            self._trusted.add(task)

    def trusts(self, task: asyncio.Task[None]) -> bool:
        """Whether it has."""
        return task in self._trusted

    def leave(self, task: asyncio.Task[None]) -> None:
        """The connection has ended."""
        self._came.pop(task, None)
        self._idle.pop(task, None)
        self._trusted.discard(task)

    async def close(self) -> None:
        """End all of them, waiting for a bounded time."""
        self._closed = True
        tasks = list(self._came)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_WAIT_S)
