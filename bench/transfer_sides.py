"""The processes of `bench.transfer`: a source, a starter, and a plain TCP stream beside them.

Owns what runs in the children: the agents' own `TransferServer`, `Giving` and `Loader`, and for
comparison a bare sender and a bare receiver that hash alike. A child is told by lines on its
standard input and answers by lines of JSON. Hands seconds and bytes to `bench.transfer`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from readyplane.client import RegistryClient
from readyplane.core.identity import Manifest, chunk_hash
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane_agent.arena import Arena, prefault
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.giving import Giving
from readyplane_agent.interference import Watch
from readyplane_agent.loader import Loader
from readyplane_agent.ranges import PAUSED_TURN_S
from readyplane_agent.reading import Reader
from readyplane_agent.settings import AgentSettings
from readyplane_agent.trace import StartTrace
from readyplane_agent.transfer import TransferServer

CLOCK = SystemClock()
HEADER = 16
FAR_CONNECTIONS = 4


def filled(manifest: Manifest, folder: Path) -> Arena:
    """An arena with the files of `folder`, verified and sealed."""
    arena = Arena(manifest)
    for path, index in arena.chunks:
        start, size = arena.span(path, index)
        with (folder / path).open("rb") as file, arena.window(path, index) as window:
            file.seek(start)
            assert file.readinto(window) == size
            entry = arena.entry(path)
            assert entry is not None
            assert chunk_hash(window) == entry.chunks[index]
        arena.mark(path, index)
    arena.seal()
    return arena


# ---------------------------------------------------------------------------- a plain TCP stream


def plain_server(arena: Arena, path: str) -> int:
    """Send what is asked for (16 bytes: offset and size) by sendfile, until the connection ends."""
    door = socket.create_server(("127.0.0.1", 0), backlog=64)

    def give(connection: socket.socket) -> None:
        with connection, os.fdopen(os.dup(arena.fd), "rb", buffering=0) as file:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while len(ask := connection.recv(HEADER, socket.MSG_WAITALL)) == HEADER:
                at, left = int.from_bytes(ask[:8], "big"), int.from_bytes(ask[8:], "big")
                at += arena.offsets[path]
                while left:
                    sent = os.sendfile(connection.fileno(), file.fileno(), at, left)
                    at, left = at + sent, left - sent

    def accept() -> None:
        while True:
            connection, _ = door.accept()
            threading.Thread(target=give, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    port: int = door.getsockname()[1]
    return port


def plain_load(arena: Arena, port: int, path: str, connections: int) -> float:
    """Seconds to receive and hash a file over so many streams; each asks once for its share."""
    entry = arena.entry(path)
    assert entry is not None
    count = len(entry.chunks)
    shares = [
        (count * n // connections, count * (n + 1) // connections) for n in range(connections)
    ]

    def take(first: int, end: int) -> None:
        begin = first * arena.manifest.chunk_bytes
        size = min(entry.size_bytes, end * arena.manifest.chunk_bytes) - begin
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(begin.to_bytes(8, "big") + size.to_bytes(8, "big"))
            for index in range(first, end):
                with arena.window(path, index) as window:
                    got = connection.recv_into(window, 0, socket.MSG_WAITALL)
                    assert got == len(window)
                    assert chunk_hash(window) == entry.chunks[index]

    begun_s = CLOCK.monotonic_s()
    with ThreadPoolExecutor(connections) as pool:
        for work in [pool.submit(take, *share) for share in shares]:
            work.result()
    return CLOCK.monotonic_s() - begun_s


# ---------------------------------------------------------------------------- one agent's weights


class Agent:
    """The parts of an agent that give and take weights."""

    lives = 0

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        manifest: Manifest,
        registry: RegistryClient | None = None,
    ) -> None:
        Agent.lives += 1
        self.name, self.manifest = name, manifest
        self.registry = registry or RegistryClient(options.registry)
        self.settings = AgentSettings(
            worker_id=name,
            role=Role.DECODE,
            model=manifest.model,
            router="",
            work_dir=Path(options.folder),
            node=name,
            transfer_readers_max=options.readers,
            transfer_bytes_per_s=options.rate,
            serving_tpot_s=0.0,
        )
        self.incarnation = f"{name}-{os.getpid()}-{Agent.lives}"
        self.server = TransferServer(
            incarnation=self.incarnation,
            clock=CLOCK,
            readers_max=options.readers,
            bytes_per_s=options.rate,
        )
        self.giving = Giving(
            self.settings,
            incarnation=self.incarnation,
            registry=self.registry,
            transfer=self.server,
            cache=None,
            clock=CLOCK,
        )

    async def give(self, arena: Arena) -> asyncio.Task[None]:
        """Serve and announce from now on."""
        await self.server.start()
        await self.giving.begin(arena)
        return asyncio.create_task(self.giving.keep())

    async def load(self, arena: Arena) -> dict[str, object]:
        """Fetch everything; seconds, and bytes by source."""
        begun_s = CLOCK.monotonic_s()
        loader = Loader(
            arena,
            registry=self.registry,
            clock=CLOCK,
            reader=Reader(self.name, self.incarnation, self.name),
            trace=StartTrace(CLOCK, process_start_s=begun_s),
        )
        plan = await self.registry.plan_fetch(
            self.manifest.digest,
            worker_id=self.name,
            incarnation=self.incarnation,
            node=self.name,
        )
        fetched = await loader.run(plan.sources)
        given: dict[str, int] = {}
        for use in fetched.uses:
            given[use.source_id] = given.get(use.source_id, 0) + use.bytes_read
        return {
            "seconds": CLOCK.monotonic_s() - begun_s,
            "given": given,
            "reading": fetched.uses[-1].elapsed_s,
            "faults": list(fetched.faults),
        }


async def read_line() -> str:
    """The next order."""
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


def say(**what: object) -> None:
    """One answer."""
    print(json.dumps(what), flush=True)


async def source(options: argparse.Namespace, manifest: Manifest) -> None:
    """Hold everything and give it, until standard input ends."""
    arena = filled(manifest, Path(options.folder))
    agent = Agent(options.name, options, manifest)
    keeping = [await agent.give(arena)]
    if options.engine_url:
        engine = OpenAiEngine(options.engine_url, model="")
        watch = Watch(engine.serving_times, agent.server, CLOCK)
        keeping.append(asyncio.create_task(watch.keep()))
    big = max(manifest.files, key=lambda f: f.size_bytes).path
    at = f"{agent.server.url}/v1/chunks/{manifest.digest}"
    say(plain=plain_server(arena, big), url=at, query=f"incarnation={agent.incarnation}")
    while await read_line():
        pace = agent.server.pace
        rate = None if math.isinf(pace.bytes_per_s) else pace.bytes_per_s
        say(served=agent.server.bytes_served, rate=rate, why=pace.why)
    for task in keeping:
        task.cancel()
    await agent.server.stop()


async def puller(options: argparse.Namespace, manifest: Manifest) -> None:
    """Load again and again between `on` and `off`: a whole starter on the same processors.

    Receiving and hashing take only the processor time that nobody here wants, which the scheduler
    keeps to within a session, and all of this bench are one. Inside the kernel it does not: a
    thread that copies into fresh pages there is not preempted for milliseconds.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    say(ready=True)
    while (await read_line()).startswith("on"):
        off = asyncio.create_task(read_line())
        while not off.done():
            arena = Arena(manifest)
            loading = asyncio.create_task(Agent(options.name, options, manifest).load(arena))
            await asyncio.wait({loading, off}, return_when=asyncio.FIRST_COMPLETED)
            if not loading.done():
                loading.cancel()
                await asyncio.wait({loading})
            arena.close()
        say(off=True)


async def far(_: argparse.Namespace, manifest: Manifest) -> None:
    """Ask a source for chunks between `on URL QUERY` and `off`, as a starter elsewhere would.

    As many connections as a load has, a chunk of the manifest at a time; the bytes are dropped in
    the kernel, since the machine that would copy and hash them is another one.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    say(ready=True)
    while (order := await read_line()).startswith("on"):
        url, query = order.split()[1:]
        off = threading.Event()
        drops = [
            asyncio.create_task(asyncio.to_thread(drop, manifest, url, query, n, off))
            for n in range(FAR_CONNECTIONS)
        ]
        await read_line()
        off.set()
        await asyncio.gather(*drops)
        say(off=True)


def drop(manifest: Manifest, url: str, query: str, first: int, off: threading.Event) -> None:
    """Ask for every `FAR_CONNECTIONS`-th chunk over one connection, and drop it, until `off`."""
    parts = urlsplit(url)
    entry = max(manifest.files, key=lambda f: f.size_bytes)
    scratch, index = bytearray(manifest.chunk_bytes), first
    with socket.create_connection((parts.hostname or "", parts.port or 80)) as door:
        while not off.is_set():
            begin = index * manifest.chunk_bytes
            last = min(entry.size_bytes, begin + manifest.chunk_bytes) - 1
            ask = f"GET {parts.path}/{entry.path}?{query} HTTP/1.1\r\nRange: bytes={begin}-{last}"
            door.sendall(f"{ask}\r\nHost: {parts.netloc}\r\n\r\n".encode())
            status = dropped(door, scratch)
            if status == "503":  # paused: asked for again, as a reader does
                off.wait(PAUSED_TURN_S)
                continue
            assert status == "206", status
            index = (index + FAR_CONNECTIONS) % len(entry.chunks)


def dropped(door: socket.socket, scratch: bytearray) -> str:
    """The status of one answer, whose body is thrown away where it lies in the kernel."""
    head = b""
    while b"\r\n\r\n" not in head:
        part = door.recv(4096)
        assert part, "the source closed the connection"
        head += part
    head, _, body = head.partition(b"\r\n\r\n")
    fields = head.decode("latin-1").lower().split("\r\n")
    length = next(f for f in fields if f.startswith("content-length:"))
    left = int(length.partition(":")[2]) - len(body)
    while left > 0:
        got = door.recv_into(scratch, min(left, len(scratch)), socket.MSG_TRUNC)
        assert got, "the source closed the connection"
        left -= got
    return fields[0].split()[1]


async def starter(options: argparse.Namespace, manifest: Manifest) -> None:
    """Load once when told to, giving on meanwhile and afterwards."""
    agent = Agent(options.name, options, manifest)
    arena = Arena(manifest)
    await prefault(arena)
    await agent.server.start()
    say(ready=True)
    await read_line()
    begun_s = CLOCK.monotonic_s()
    await agent.giving.begin(arena)
    keeping = asyncio.create_task(agent.giving.keep())
    result = await agent.load(arena)
    agent.giving.poke()
    say(**result, at_s=CLOCK.monotonic_s(), begun_s=begun_s)
    await read_line()
    keeping.cancel()
    await agent.server.stop()


async def versus(options: argparse.Namespace, manifest: Manifest) -> None:
    """Rounds of our way and of plain streams, in turns, each into memory faulted in before."""
    big = max(manifest.files, key=lambda f: f.size_bytes).path
    client = RegistryClient(options.registry)  # an agent has one long before it loads
    await client.get_manifest(manifest.digest)
    say(ready=True)
    while (order := await read_line()).startswith("round"):
        port = int(order.split()[1])
        result: dict[str, object] = {}
        for kind in ("ours", "plain1", "plain4"):
            arena = Arena(manifest)
            await prefault(arena)
            if kind == "ours":
                agent = Agent(options.name, options, manifest, client)
                result["ours"] = await agent.load(arena)
                assert arena.complete
            else:
                streams = int(kind.removeprefix("plain"))
                result[kind] = await asyncio.to_thread(plain_load, arena, port, big, streams)
            arena.close()
        say(**result)


KINDS = {"source": source, "starter": starter, "versus": versus, "puller": puller, "far": far}


def main() -> None:
    """One child."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--name", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--engine-url", default="", help="of the engine that is served beside")
    parser.add_argument("--readers", type=int, default=2)
    options = parser.parse_args()
    document = json.loads((Path(options.folder) / "manifest.json").read_text())
    manifest = Manifest.from_document(document)
    asyncio.run(KINDS[options.kind](options, manifest))


if __name__ == "__main__":
    main()
