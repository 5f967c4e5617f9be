"""Virtual time moves only when nothing is left to do, and never by real waiting."""

from __future__ import annotations

import asyncio
import time

import pytest

from readyplane.core.errors import Unsupported
from readyplane_lab.simulator.loop import Deadlock, VirtualClock, VirtualLoop, run_virtual


def test_an_hour_takes_no_time() -> None:
    loop = VirtualLoop()
    clock = VirtualClock(loop)
    seen: list[tuple[str, float]] = []

    async def worker(name: str, every_s: float) -> None:
        while True:
            await clock.sleep(every_s)
            seen.append((name, clock.monotonic_s()))

    async def main() -> float:
        async with asyncio.timeout(3600.5):
            try:
                await asyncio.gather(worker("a", 60.0), worker("b", 90.0))
            except asyncio.CancelledError:
                assert clock.monotonic_s() == pytest.approx(3600.5)
                raise
        return clock.monotonic_s()

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        run_virtual(main(), loop=loop)
    assert time.monotonic() - began < 2.0
    assert len([s for s in seen if s[0] == "a"]) == 60
    assert seen == sorted(seen, key=lambda s: s[1])


def test_events_and_queues_work_across_tasks() -> None:
    loop = VirtualLoop()
    clock = VirtualClock(loop)

    async def main() -> list[float]:
        queue: asyncio.Queue[float] = asyncio.Queue()

        async def produce() -> None:
            for _ in range(3):
                await clock.sleep(2.0)
                await queue.put(clock.monotonic_s())

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            return [await queue.get() for _ in range(3)]

    assert run_virtual(main(), loop=loop) == pytest.approx([2.0, 4.0, 6.0])


def test_waiting_for_nothing_is_said_not_endured() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtual(main(), loop=VirtualLoop())


def test_real_io_and_threads_are_refused() -> None:
    async def connect() -> None:
        await asyncio.open_connection("127.0.0.1", 9)

    async def thread() -> None:
        await asyncio.to_thread(time.sleep, 0)

    for main in (connect, thread):
        with pytest.raises(Unsupported):
            run_virtual(main(), loop=VirtualLoop())


def test_what_was_left_is_cancelled() -> None:
    ended: list[str] = []

    async def background() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        main.task = asyncio.create_task(background())  # type: ignore[attr-defined]
        await asyncio.sleep(1.0)

    run_virtual(main(), loop=VirtualLoop())
    assert ended == ["cancelled"]
