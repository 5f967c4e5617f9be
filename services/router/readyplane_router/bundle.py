"""Takes and releases that are made at the same time share one call of the store's script.

Owns who waits for which answer. One call of a model is under way at a time; what comes meanwhile goes
with the next, so that an idle router waits for nobody and a busy one pays for a round trip once in
many picks. An operation for which nobody waits may be kept for a moment, so that it finds company.
Each one is compared and taken for itself, in the order in which it came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from readyplane.core.errors import Unavailable

BUNDLE_OPERATIONS_MAX = 256

Operation = tuple[Any, ...]
Send = Callable[[str, Sequence[Any]], Awaitable[Sequence[Any]]]


@dataclass(slots=True)
class _Line:
    waiting: deque[tuple[Operation, asyncio.Future[Any]]] = field(default_factory=deque)
    sending: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None


class Bundles:
    """Operations by model, sent together."""

    def __init__(self, send: Send) -> None:
        """`send`: a model and the arguments of its operations, to one answer for each."""
        self._send = send
        self._lines: dict[str, _Line] = {}

    def add(
        self, model: str, operation: Operation, *, within_s: float = 0.0
    ) -> asyncio.Future[Any]:
        """Its answer to come, or what the call that carried it raised. It is sent `within_s`, with
        the next one that is in more of a hurry.
        """
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = _Line()
        answer = asyncio.get_running_loop().create_future()
        line.waiting.append((operation, answer))
        if line.sending is None:
            if within_s > 0.0 and len(line.waiting) < BUNDLE_OPERATIONS_MAX:
                if line.timer is None:
                    later = asyncio.get_running_loop().call_later
                    line.timer = later(within_s, self._start, model, line)
            else:
                self._start(model, line)
        return answer

    def _start(self, model: str, line: _Line) -> None:
        timer, line.timer = line.timer, None
        if timer is not None:
            timer.cancel()
        if line.sending is None:
            line.sending = asyncio.ensure_future(self._send_all(model, line))

    async def aclose(self) -> None:
        """Give up what waits; its callers are told."""
        for line in self._lines.values():
            if line.timer is not None:
                line.timer.cancel()
            if line.sending is not None:
                line.sending.cancel()
                await asyncio.wait([line.sending])
            _fail(line.waiting, _closed())
        self._lines.clear()

    async def _send_all(self, model: str, line: _Line) -> None:
        waiting = line.waiting
        try:
            while waiting:
                some = [waiting.popleft() for _ in range(min(len(waiting), BUNDLE_OPERATIONS_MAX))]
                await self._send_some(model, [one for one in some if not one[1].done()])
        finally:
            line.sending = None

    async def _send_some(
        self, model: str, some: Sequence[tuple[Operation, asyncio.Future[Any]]]
    ) -> None:
        """Operations whose caller has left before they were sent are not made."""
        if not some:
            return
        arguments: list[Any] = []
        for operation, _ in some:
            arguments += operation
        try:
            answers = await self._send(model, arguments)
        except Exception as error:  # noqa: BLE001 - whoever waits is told
            _fail(some, error)
            # A store that hangs is waited for once, not again by each bundle that came meanwhile.
            waiting = self._lines[model].waiting
            _fail(waiting, error)
            waiting.clear()
            return
        except BaseException:
            _fail(some, _closed())
            raise
        for (_, answer), told in zip(some, answers, strict=True):
            if not answer.done():
                answer.set_result(told)


def _closed() -> Unavailable:
    """What callers are told whose operation may or may not have been made."""
    return Unavailable("the store was closed meanwhile", "ask another router")


def _fail(some: Iterable[tuple[Operation, asyncio.Future[Any]]], error: Exception) -> None:
    for _, answer in some:
        if not answer.done():
            answer.set_exception(error)
