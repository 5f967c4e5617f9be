"""The product's side of `make bench-loader`, in a process of its own: `python -m bench.loader_ours FOLDER`.

Owns one arena, faulted in before anything is timed. A line on standard input asks for a load by the
product's `Loader` out of the node's cache, or for a raw read of the same files into the same
memory; a line of JSON answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from bench.loader_memory import Growth
from readyplane.core.identity import Manifest, chunk_hash
from readyplane.kit.clock import SystemClock
from readyplane.ports import Registry
from readyplane_agent.adopt import AdoptedArena, adopt
from readyplane_agent.arena import Arena, prefault
from readyplane_agent.cache import WeightCache
from readyplane_agent.loader import Loader
from readyplane_agent.mapped_memory import files_of, mapped_arena
from readyplane_agent.reading import Reader
from readyplane_agent.trace import StartTrace


class Side:
    """What can be asked for."""

    def __init__(self, folder: Path) -> None:
        document = json.loads((folder / "manifest.json").read_text())
        self.folder, self.manifest = folder, Manifest.from_document(document)
        self.cache = WeightCache(folder / "cache", bytes_max=2**40)
        self.arena = Arena(self.manifest)
        self.arena.prefault()
        self.touched = 0

    def loader(self, arena: Arena) -> tuple[Loader, StartTrace]:
        """The product's own, that will read from the node's cache: nobody has to be asked."""
        clock = SystemClock()
        trace = StartTrace(clock, process_start_s=clock.monotonic_s())
        nobody = cast("Registry", None)
        reader = Reader("bench", "bench-1", "here")
        load = Loader(
            arena, registry=nobody, clock=clock, reader=reader, trace=trace, cache=self.cache
        )
        return load, trace

    def load(self, **more: Any) -> dict[str, Any]:
        """Read, verify and place everything into the memory that is there."""
        arena = Arena(self.manifest, self.arena.memory)
        told: dict[str, Any] = {}

        async def run() -> None:
            load, trace = self.loader(arena)
            told.update(await timed(lambda: load.run([])))
            told["staging_bytes"] = load.fetched.staging_peak_bytes
            told["detail"] = trace.segments()[-1].detail

        asyncio.run(run())
        if more.get("check"):
            told["right"] = self.right(arena)
        return told

    def fresh(self) -> dict[str, Any]:
        """The same into memory that does not exist yet, faulted in beside it as in a start."""

        async def run() -> dict[str, Any]:
            async def whole() -> None:
                arena = Arena(self.manifest)
                load, _ = self.loader(arena)
                faulting = asyncio.create_task(prefault(arena, stop=lambda: arena.complete))
                await load.run([])
                await faulting
                arena.seal()
                arena.close()

            return await timed(whole)

        return asyncio.run(run())

    def mapped(self) -> dict[str, Any]:
        """The cache's own files, verified where they lie, then adopted and touched by an engine.

        What is not in the page cache is loaded into the memory that is there, as a start does it.
        """
        how = {"mapped": False}
        kept: list[AdoptedArena | Arena] = []

        async def run() -> None:
            clock = SystemClock()
            trace = StartTrace(clock, process_start_s=clock.monotonic_s())
            arena = await mapped_arena(
                self.manifest, self.cache, node="here", clock=clock, trace=trace
            )
            if isinstance(arena, str):
                load, _ = self.loader(Arena(self.manifest, self.arena.memory))
                await load.run([])
                return
            assert arena.complete
            how["mapped"] = True
            (table,) = arena.tables()
            table.update(files_of(arena, table["arena_bytes"]))
            engine = adopt(arena.path, json.dumps(table))
            self.touched = sum(int(engine[n].reshape(-1).view("u1")[::4096].sum()) for n in engine)
            kept.extend((engine, arena))

        answer = {**asyncio.run(timed(run)), **how}
        for each in kept:  # neither do the peers give theirs back before the clock is read
            each.close()
        return answer

    def raw(self, *, threads: int, chunk: int, direct: bool) -> dict[str, Any]:
        """Bytes into the same memory, unverified, with nothing around them."""
        return asyncio.run(timed(lambda: asyncio.to_thread(self._raw, threads, chunk, direct)))

    def _raw(self, threads: int, chunk: int, direct: bool) -> None:
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        todo = deque(
            (entry, at) for entry in self.manifest.files for at in range(0, entry.size_bytes, chunk)
        )
        view, offsets = self.arena.memory.view, self.arena.offsets

        def work() -> None:
            files = {e.path: os.open(self.folder / e.path, flags) for e in self.manifest.files}
            while todo:
                try:
                    entry, at = todo.popleft()
                except IndexError:
                    break
                size = min(chunk, entry.size_bytes - at)
                # A direct read of the last block asks for all of it and gets what is there.
                size = -(-size // 4096) * 4096 if direct else size
                begin = offsets[entry.path] + at
                done = 0
                while done < min(size, entry.size_bytes - at):
                    into = view[begin + done : begin + size]
                    done += os.preadv(files[entry.path], [into], at + done)
            for fd in files.values():
                os.close(fd)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def right(self, arena: Arena) -> bool:
        """Whether every byte is the manifest's, found out by a second way."""
        step = self.manifest.chunk_bytes
        return arena.complete and all(
            chunk_hash(arena.view(entry.path)[i * step : (i + 1) * step]) == wanted
            for entry in self.manifest.files
            for i, wanted in enumerate(entry.chunks)
        )

    def wipe(self) -> dict[str, Any]:
        """Forget every byte, so that a load that does nothing is noticed."""
        view = self.arena.memory.view
        nothing = bytes(2**20)
        for at in range(0, len(view), 2**20):
            view[at : at + 2**20] = nothing[: len(view) - at]
        return {}


async def timed(work: Callable[[], Any]) -> dict[str, Any]:
    """Wall and CPU seconds of all threads, and what memory grew by at its peak."""
    growth = Growth()
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    await work()
    wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
    return {"wall_s": wall_s, "cpu_s": cpu_s, "extra_bytes": growth.peak_bytes()}


def main() -> None:
    """Answer line by line."""
    side = Side(Path(sys.argv[1]))
    print(json.dumps({"pages": side.arena.memory.faulted.text()}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(side, asked.pop("do"))(**asked)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
