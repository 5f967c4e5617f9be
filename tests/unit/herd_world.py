"""Starters that begin at once on one store, each with a door of its own, under the real registry's
use-cases over memory stores: what tests of R8.4 share."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count

from readyplane.core.startup import WeightTier
from readyplane.kit.clock import SystemClock
from readyplane.ports import Source
from readyplane_agent.arena import Arena
from readyplane_agent.giving import held
from readyplane_agent.loader import Loader
from readyplane_agent.reading import Reader
from readyplane_agent.source_use import Fetched
from readyplane_agent.trace import StartTrace
from readyplane_agent.transfer import TransferServer
from readyplane_registry.blobs import MemoryBlobs
from readyplane_registry.fetching import RegistryPolicy
from readyplane_registry.live import MemoryLive
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from tests.unit.agent_twins import Artifact, ByteServer

CLOCK = SystemClock()
ANNOUNCE_S = 0.1


async def registry_of(art: Artifact, store_url: str, *, places: int = 8) -> RegistryService:
    """A registry that knows the artifact and the store; `places` for readers at the store."""
    ids, blobs = count(), MemoryBlobs()
    blobs.put(art.manifest.files)
    made = RegistryService(
        store=MemoryCatalog(),
        live=MemoryLive(CLOCK, weight=0.3),
        blobs=blobs,
        clock=CLOCK,
        make_id=lambda: f"transfer-{next(ids)}",
        storage_url=lambda: store_url.rpartition("/")[0],
        policy=RegistryPolicy(storage_readers_max=places, transfer_ttl_s=1.0),
    )
    await made.publish_manifest(art.manifest.document())
    return made


class Starter:
    """One that loads, and gives what it has while it loads unless `gives` is false."""

    def __init__(
        self, name: str, art: Artifact, registry: RegistryService, *, gives: bool = True
    ) -> None:
        self.name, self.art, self.registry, self.gives = name, art, registry, gives
        self.arena = Arena(art.manifest)
        self.server = TransferServer(incarnation=f"{name}-x", clock=CLOCK)
        self.load = Loader(
            self.arena,
            registry=registry,
            clock=CLOCK,
            reader=Reader(name, f"{name}-x", "n"),
            trace=StartTrace(CLOCK, process_start_s=CLOCK.monotonic_s()),
            limit_s=30.0,
        )

    async def begin(self) -> None:
        """Open the door and be known, as an agent is before it plans."""
        await self.server.start()
        self.server.offer(self.arena)
        self.arena.tell_whole = self._announce
        await self._announce()

    async def run(self) -> Fetched:
        """The whole load; what was verified is announced meanwhile and after it."""
        telling = asyncio.create_task(self._tell())
        try:
            plan = await self.registry.plan_fetch(
                self.art.manifest.digest, worker_id=self.name, incarnation=f"{self.name}-x",
                node="n",
            )  # fmt: skip
            return await self.load.run(plan.sources)
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await telling

    async def end(self) -> None:
        """Close everything."""
        self.load.stop()
        await self.server.stop()
        self.arena.close()

    @property
    def whole(self) -> bool:
        """Whether every byte is here as it was published."""
        return all(bytes(self.arena.view(p)) == d for p, d in self.art.files.items())

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_S)
            await self._announce()

    async def _announce(self) -> None:
        if not self.gives:
            return
        whole = self.arena.complete
        await self.registry.announce_source(
            Source(
                source_id=f"peer:{self.name}:{self.name}-x",
                digest=self.art.manifest.digest,
                tier=WeightTier.L1_HOST,
                url=f"{self.server.url}/v1/chunks/{self.art.manifest.digest}",
                worker_id=self.name,
                incarnation=f"{self.name}-x",
                readers_max=2,
                partial=not whole,
                held=() if whole else held(self.arena),
            )
        )


@asynccontextmanager
async def starters(
    number: int, art: Artifact, registry: RegistryService, *, gives: bool = True
) -> AsyncIterator[Sequence[Starter]]:
    """So many starters, all known to the registry, none of them planned yet."""
    made = [Starter(f"w{n}", art, registry, gives=gives) for n in range(number)]
    try:
        for each in made:
            await each.begin()
        yield made
    finally:
        for each in made:
            await each.end()


def given(store: ByteServer) -> int:
    """Bytes that were asked of the store."""
    with store.lock:
        return sum(end - start for _, start, end in store.asked)


class Turns:
    """Says how many requests the store answered side by side at most, each taking `took_s`."""

    def __init__(self, took_s: float) -> None:
        self.took_s, self.most, self._now = took_s, 0, 0
        self._lock, self._never = threading.Lock(), threading.Event()

    def __call__(self, path: str, start: int, count: int, data: bytes) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._never.wait(self.took_s)
        with self._lock:
            self._now -= 1
