"""KV hand-overs on virtual time: transfers that share a worker's link share its bandwidth.

Owns how fast each transfer goes. Every worker has one link of the class's bandwidth, and those
under way at it share it equally; a transfer goes as fast as the fuller of its two ends lets it.
Where machines have a link of their own class inside them, what stays within a machine goes over that.
Whoever joins or leaves changes the speed of the others from that moment on, so that no link ever
carries more than its bandwidth.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from readyplane.core.profile import LinkClass
from readyplane.kit.clock import Clock


@dataclass(slots=True, eq=False)
class _Transfer:
    """`left` bytes as of `since_s`, going at `bytes_per_s`; `timer` ends it."""

    ends: tuple[str, str]
    left: float
    done: asyncio.Future[None]
    link: LinkClass
    since_s: float = 0.0
    bytes_per_s: float = 0.0
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class SharedLinks:
    """The links of a fleet.

    Attributes:
        link: of every worker. near: within a machine, if it is another; node_of: a worker's machine.
    """

    link: LinkClass
    clock: Clock
    near: LinkClass | None = None
    node_of: Callable[[str], str] = str
    _open: dict[str, dict[_Transfer, None]] = field(default_factory=dict)

    async def move(self, ends: tuple[str, str], size_bytes: float) -> None:
        """Return when `size_bytes` have gone from one worker to the other."""
        link = self.link
        if self.near is not None and self.node_of(ends[0]) == self.node_of(ends[1]):
            link, ends = self.near, (f"{ends[0]} near", f"{ends[1]} near")
        await self.clock.sleep(link.setup_s)
        if size_bytes <= 0:
            return
        future = asyncio.get_running_loop().create_future()
        transfer = _Transfer(ends, size_bytes, future, link, self.clock.monotonic_s())
        for end in ends:
            self._open.setdefault(end, {})[transfer] = None
        self._share(ends)
        try:
            await future
        finally:
            if transfer.timer is not None:
                transfer.timer.cancel()
            for end in ends:
                del self._open[end][transfer]
                if not self._open[end]:
                    del self._open[end]
            self._share(ends)

    def _share(self, ends: tuple[str, str]) -> None:
        """Give everyone at these ends the speed that is theirs from now on."""
        now_s = self.clock.monotonic_s()
        for end in ends:
            for transfer in self._open.get(end, ()):
                fullest = max(len(self._open[e]) for e in transfer.ends)
                bytes_per_s = transfer.link.bandwidth_bytes_per_s / fullest
                if bytes_per_s == transfer.bytes_per_s:
                    continue
                transfer.left -= transfer.bytes_per_s * (now_s - transfer.since_s)
                transfer.since_s, transfer.bytes_per_s = now_s, bytes_per_s
                if transfer.timer is not None:
                    transfer.timer.cancel()
                due_s = now_s + max(0.0, transfer.left) / bytes_per_s
                loop = asyncio.get_running_loop()
                transfer.timer = loop.call_at(due_s, _end, transfer.done)


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
