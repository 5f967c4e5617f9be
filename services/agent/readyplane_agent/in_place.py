"""Chunks that lie in an arena before anything was read: hashed there, marked when they are right."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor

from readyplane.core.identity import chunk_hash
from readyplane.kit.clock import Clock
from readyplane_agent.arena import Arena
from readyplane_agent.source_use import SourceUse


def verify_in_place(arena: Arena, use: SourceUse, clock: Clock, *, threads_max: int) -> list[str]:
    """Hash every chunk that is not verified; returns the paths of files with a wrong one.

    Blocking, by as many threads. `use` gets what was right.
    """
    wrong: set[str] = set()
    left = deque(arena.missing())

    def check(path: str, index: int) -> None:
        entry = arena.entry(path)
        assert entry is not None
        start, size = arena.span(path, index)
        if chunk_hash(arena.view(path)[start : start + size]) == entry.chunks[index]:
            arena.mark(path, index)
            use.done(size, clock.monotonic_s())
        else:
            wrong.add(path)

    def drain() -> None:
        while True:
            try:
                chunk = left.popleft()
            except IndexError:
                return
            check(*chunk)

    with ThreadPoolExecutor(threads_max, thread_name_prefix="in-place") as threads:
        for work in [threads.submit(drain) for _ in range(threads_max)]:
            work.result()
    return sorted(wrong)
