"""An asyncio event loop on virtual time: sleeping costs nothing and nothing ever waits for real.

Owns the clock of the simulator. Time moves only when nothing is left to run at the present instant,
and then straight to the next timer, so a run is deterministic: the order of events depends on the
program alone. Real I/O is refused, because it would bring real time in.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar

from readyplane.core.errors import Unsupported

Result = TypeVar("Result")
WALL_START_S = 1_700_000_000.0
RESOLUTION_S = 1e-9
CANCELLED_TIMERS_MIN = 100
# A simulated world keeps what it makes and leaves few cycles: looking for them as often as usual
# would cost a twentieth of a run.
COLLECT_EVERY = 100_000


class Deadlock(RuntimeError):
    """Everything waits, no timer is set: the simulated world can never go on."""


class _NoIo(selectors.BaseSelector):
    """A selector that never waits and takes nothing but the loop's own wake-up pipe."""

    def __init__(self) -> None:
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

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:  # noqa: ARG002 - a selector's signature
        raise Unsupported("waiting for I/O in the simulator", "use virtual timers")

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class _Call:
    """Something to be called soon; what `call_soon` returns."""

    __slots__ = ("args", "callback", "context")

    def __init__(
        self, callback: Callable[..., Any] | None, args: tuple[Any, ...], context: Context
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context

    def cancel(self) -> None:
        """Never call it."""
        self.callback = None

    def cancelled(self) -> bool:
        """Whether it will never be called."""
        return self.callback is None


class _Timer(float):
    """A call at a time; it is its time, so that the heap compares numbers."""

    __slots__ = ("args", "callback", "context", "loop", "waiting")
    args: tuple[Any, ...]
    callback: Callable[..., Any] | None
    context: Context
    loop: VirtualLoop
    waiting: bool

    def when(self) -> float:
        """Virtual seconds."""
        return float(self)

    def cancel(self) -> None:
        """Never call it."""
        if self.callback is not None:
            self.callback = None
            self.args = ()
            if self.waiting:
                self.loop.cancelled += 1

    def cancelled(self) -> bool:
        """Whether it will never be called."""
        return self.callback is None


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop whose `time()` is virtual and starts at 0.

    Scheduling is its own, because the simulator spends much of its time there: no debug mode, no
    threads, no waiting. Tasks and futures are asyncio's.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._soon: deque[_Call | _Timer] = deque()
        self._timers: list[_Timer] = []
        self._over = False
        self.cancelled = 0
        super().__init__(_NoIo())

    def time(self) -> float:
        """Virtual seconds since the loop began."""
        return self._now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> _Call:
        """As `asyncio`."""
        call = _Call(callback, args, copy_context() if context is None else context)
        self._soon.append(call)
        return call

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> _Call:
        """There is one thread; asyncio asks so when a generator was dropped half-way."""
        return self.call_soon(callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> _Timer:
        """As `asyncio`."""
        timer = _Timer(when)
        timer.callback = callback
        timer.args = args
        timer.context = copy_context() if context is None else context
        timer.loop = self
        timer.waiting = True
        heappush(self._timers, timer)
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> _Timer:
        """As `asyncio`."""
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def stop(self) -> None:
        """End `run_forever` after what is due now."""
        self._over = True
        super().stop()

    def _run_once(self) -> None:
        """Run what is due, instant after instant, until the loop is to stop."""
        soon = self._soon
        while True:
            self._gather()
            for _ in range(len(soon)):
                call = soon.popleft()
                callback = call.callback
                if callback is None:
                    continue
                try:
                    call.context.run(callback, *call.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001 - as asyncio's own loop does
                    self.call_exception_handler(
                        {"message": f"Exception in callback {callback}", "exception": error}
                    )
            if self._over:
                self._over = False
                return

    def _gather(self) -> None:
        """Put the timers of this instant behind what is due already; else go to the next timer."""
        timers, soon = self._timers, self._soon
        if self.cancelled > CANCELLED_TIMERS_MIN and self.cancelled > len(timers) / 2:
            self._timers = timers = [timer for timer in timers if timer.callback is not None]
            heapify(timers)
            self.cancelled = 0
        while timers and timers[0].callback is None:
            heappop(timers).waiting = False
            self.cancelled -= 1
        if not soon and not self._over:
            if not timers:
                raise Deadlock("every task waits and no timer is set")
            if timers[0] > self._now_s:
                self._now_s += timers[0] - self._now_s
        end_s = self._now_s + RESOLUTION_S
        while timers and timers[0] < end_s:
            timer = heappop(timers)
            timer.waiting = False
            soon.append(timer)

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
        if seconds <= 0.0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = self._loop.create_future()
        timer = self._loop.call_later(seconds, _wake, future)
        try:
            await future
        except BaseException:
            timer.cancel()
            raise


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def run_virtual(main: Coroutine[Any, Any, Result], *, loop: VirtualLoop) -> Result:
    """Run a coroutine to its end on virtual time, then cancel what it left and close the loop.

    Raises:
        Deadlock: nothing can ever happen any more. Whatever `main` raises.
    """
    asyncio.set_event_loop(loop)
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECT_EVERY, *thresholds[1:])
    try:
        return loop.run_until_complete(main)
    finally:
        gc.set_threshold(*thresholds)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()
