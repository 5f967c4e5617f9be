"""A pair that has been chosen and is still being reserved: its legs need not wait for that.

Owns the time between choice and reservation, where who chooses pairs is in this process. The legs
begin on the choice; should the store refuse it (another router was first) they are cut off and
another pair takes its place, so that nothing is told or answered on half a reservation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self

from readyplane.core.work import RequestShape
from readyplane.ports import Pair


class RouteAhead(Protocol):
    """`Router.route` of a router in this process."""

    async def __call__(
        self,
        shape: RequestShape,
        *,
        replaces: str = "",
        avoid: Sequence[str] = (),
        chosen: _Hear | None = None,
    ) -> Pair:
        """As the port's; `chosen` hears of the pair before it is reserved."""
        ...


class _Hear(Protocol):
    def __call__(self, pair: Pair, /) -> None: ...


class Refused(Exception):
    """The pair under a leg was not reserved; ask what was reserved instead."""


class Unconfirmed:
    """A pair and the call that reserves it. As a context it guards a leg that has begun."""

    __slots__ = ("_cancelling", "_cut", "_task", "asking", "pair")

    def __init__(self, pair: Pair, asking: asyncio.Future[Pair]) -> None:
        self.pair, self.asking = pair, asking
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._cut = False

    async def confirmed(self) -> Pair:
        """What was reserved, mostly `pair` itself. Raises what the router says."""
        return await asyncio.shield(self.asking)

    def served(self) -> None:
        """The answer is complete: whatever comes of the reservation cuts nothing any more."""
        self.asking.remove_done_callback(self._look)

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        self.asking.add_done_callback(self._look)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.asking.remove_done_callback(self._look)
        task, self._task = self._task, None
        if not self._cut or task is None:
            return
        # As asyncio.timeout does it: whoever else has cancelled this task is obeyed.
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise Refused from error

    def _look(self, asking: asyncio.Future[Pair]) -> None:
        failed = asking.cancelled() or asking.exception() is not None
        if (failed or asking.result() is not self.pair) and self._task is not None:
            self._cut = True
            self._task.cancel()


def choose(
    route: RouteAhead, shape: RequestShape, replaces: str, avoid: Sequence[str]
) -> tuple[asyncio.Future[Pair], asyncio.Future[Pair | None]]:
    """Begin to ask: the call, and a future that has its first choice, None when it ended first."""
    first: asyncio.Future[Pair | None] = asyncio.get_running_loop().create_future()

    def chosen(pair: Pair | None) -> None:
        if not first.done():
            first.set_result(pair)

    asking = asyncio.ensure_future(route(shape, replaces=replaces, avoid=avoid, chosen=chosen))
    asking.add_done_callback(lambda _: chosen(None))
    return asking, first
