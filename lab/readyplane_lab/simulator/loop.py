"""An asyncio event loop on virtual time: sleeping costs nothing and nothing ever waits for real.

Owns the clock of the simulator. Time moves only when nothing is left to run at the present instant,
and then straight to the next timer, so a run is deterministic: the order of events depends on the
program alone. Real I/O is refused, because it would bring real time in.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from readyplane.core.errors import Unsupported

Result = TypeVar("Result")
WALL_START_S = 1_700_000_000.0


class Deadlock(RuntimeError):
    """Everything waits, no timer is set: the simulated world can never go on."""


class _NoIo(selectors.BaseSelector):
    """A selector that never waits: it moves the virtual clock to the next timer instead."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        # the loop registers its own wake-up pipe once; nothing else may
        if self._keys:
            raise Unsupported("I/O in the simulator", "use the in-process ports and memory stores")
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("every task waits and no timer is set")
        if timeout > 0:
            self.now_s += timeout
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time()` is virtual and starts at 0."""

    def __init__(self) -> None:
        self._virtual = _NoIo()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds since the loop began."""
        return self._virtual.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        """Threads live on real time."""
        raise Unsupported("a thread in the simulator", "call the function directly")


class VirtualClock:
    """`readyplane.kit.clock.Clock` on a virtual loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def monotonic_s(self) -> float:
        """Virtual seconds."""
        return self._loop.time()

    def wall_s(self) -> float:
        """A fixed day plus the virtual seconds, so that records are equal in every run."""
        return WALL_START_S + self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """Wait in virtual time."""
        await asyncio.sleep(max(0.0, seconds))


def run_virtual(main: Coroutine[Any, Any, Result], *, loop: VirtualLoop) -> Result:
    """Run a coroutine to its end on virtual time, then cancel what it left and close the loop.

    Raises:
        Deadlock: nothing can ever happen any more. Whatever `main` raises.
    """
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()
