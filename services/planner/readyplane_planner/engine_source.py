"""Reads engines themselves: `/metrics` of vLLM and SGLang, and forward-pass documents over ZMQ.

Owns targets, the parallel reading of them within one bound, and the fleet that they are where no
router tells of one. A target that hangs is named and holds nobody up (B06); what is read is joined
with the fleet by worker and incarnation (B08). What the numbers mean is said by `signals`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from readyplane.core.worker import Role, Worker, WorkerOffer, WorkerState
from readyplane.kit.clock import Clock
from readyplane_planner.prometheus_source import read_bounded
from readyplane_planner.signals import engines, forward_pass
from readyplane_planner.signals.forward_pass import ForwardPass
from readyplane_planner.signals.outside import EngineLoad, EngineSample, Silent

log = logging.getLogger(__name__)

BODY_MAX = 4 << 20
AT_ONCE = 128
RANKS_MAX = 4096
DOCUMENT_MAX = 1 << 16
HIGH_WATER = 1000
STREAMED = "fpm"


@dataclass(frozen=True, slots=True)
class Target:
    """One engine to be read.

    Attributes:
        worker_id: empty for a forward-pass stream that names its workers itself.
        engine: `vllm`, `sglang` or `fpm`. role, worker_class: where no router tells of them.
    """

    url: str
    engine: str
    worker_id: str = ""
    role: Role = Role.BOTH
    worker_class: str = ""


@dataclass(frozen=True, slots=True)
class Engines:
    """One look at all of them."""

    samples: tuple[EngineSample, ...] = ()
    silent: tuple[Silent, ...] = ()


class EngineSource:
    """Targets that were given, and with `discover` every ready worker of the router's fleet.

    Args:
        discover: the engine that discovered workers run, empty to discover none.
        stale_after_s: a stream that was busy and then silent for that long is not known.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        clock: Clock,
        discover: str = "",
        stale_after_s: float = 10.0,
    ) -> None:
        self._targets = tuple(targets)
        self._discover = discover
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._streams = [t for t in self._targets if t.engine == STREAMED]
        self._passes = _Passes(clock)
        self._session: aiohttp.ClientSession | None = None
        self._seen: dict[str, tuple[str, float, float]] = {}

    async def read(self, workers: Sequence[Worker], *, within_s: float) -> Engines:
        """Every target at once, nobody longer than `within_s`.

        Args:
            workers: the fleet as last known; a reading belongs to the life that is in it now.
        """
        self._passes.listen(self._streams)
        lives = {w.offer.worker_id: w.offer.incarnation for w in workers}
        targets = [*(t for t in self._targets if t.engine != STREAMED), *self._found(workers)]
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE))
        session = self._session
        told = await asyncio.gather(*(self._one(session, t, lives, within_s) for t in targets))
        samples = [found for found in told if isinstance(found, EngineSample)]
        silent = [found for found in told if isinstance(found, Silent)]
        heard, unheard = self._heard(lives)
        return Engines((*samples, *heard), (*silent, *unheard))

    def fleet(self, read: Engines, model: str) -> tuple[Worker, ...]:
        """The workers that the targets are, where no router tells: ready while they are read.

        One that has just missed a reading is what it was; after `stale_after_s` it is stalled.
        """
        now_s = self._clock.monotonic_s()
        told = {s.worker_id: s for s in read.samples}
        out = []
        for target in self._targets:
            sample, known = told.get(target.worker_id), self._seen.get(target.worker_id)
            if sample is not None:
                life = sample.incarnation
                since_s = known[1] if known is not None and known[0] == life else now_s
                known = self._seen[target.worker_id] = (life, since_s, now_s)
            if known is None:
                continue
            life, since_s, read_s = known
            fresh = now_s - read_s <= self._stale_after_s
            offer = WorkerOffer(
                target.worker_id, life, target.role, model, target.worker_class, attached=True
            )
            state = WorkerState.READY if fresh else WorkerState.STALLED
            out.append(Worker(offer, 0, state, ready_s=since_s, renewed_s=now_s))
        return tuple(out)

    async def aclose(self) -> None:
        """Stop listening and close the connections."""
        await self._passes.aclose()
        if self._session is not None:
            await self._session.close()

    def _found(self, workers: Sequence[Worker]) -> list[Target]:
        if not self._discover:
            return []
        given = {t.worker_id for t in self._targets}
        return [
            Target(f"{w.serving.engine_url.rstrip('/')}/metrics", self._discover, w.offer.worker_id)
            for w in workers
            if w.serving is not None
            and w.serving.engine_url
            and w.state in (WorkerState.READY, WorkerState.DRAINING)
            and w.offer.worker_id not in given
        ]

    async def _one(
        self,
        session: aiohttp.ClientSession,
        target: Target,
        lives: dict[str, str],
        within_s: float,
    ) -> EngineSample | Silent:
        asked_s = self._clock.monotonic_s()
        try:
            async with (
                asyncio.timeout(within_s),
                session.get(target.url, allow_redirects=False) as found,
            ):
                if found.status != 200:
                    return Silent(target.worker_id, f"its metrics answer {found.status}")
                text = (await read_bounded(found, BODY_MAX)).decode("utf-8", "replace")
        except TimeoutError:
            return Silent(target.worker_id, f"no metrics within {within_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Silent(target.worker_id, f"its metrics are not read: {type(error).__name__}")
        load, life, bad = engines.read(text, target.engine)
        if load == EngineLoad():
            # Another page than an engine's, or another engine than was said: nothing is known.
            return Silent(target.worker_id, f"no metric of {target.engine} on its page")
        whose = lives.get(target.worker_id, life or "unknown")
        return EngineSample(target.worker_id, whose, life, asked_s, load, bad)

    def _heard(self, lives: dict[str, str]) -> tuple[list[EngineSample], list[Silent]]:
        now_s = self._clock.monotonic_s()
        samples: list[EngineSample] = []
        silent: list[Silent] = []
        for worker_id, ranks in self._passes.by_worker().items():
            age_s = now_s - min(at_s for at_s, _ in ranks)
            passes = [found for _, found in ranks]
            if age_s > self._stale_after_s and not all(p.idle for p in passes):
                silent.append(Silent(worker_id, f"no forward pass for {age_s:.1f} s, and not idle"))
                continue
            bad = tuple(name for p in passes for name in p.bad)
            read_s = max(at_s for at_s, _ in ranks)
            whose = lives.get(worker_id, "unknown")
            load = forward_pass.load(passes)
            samples.append(EngineSample(worker_id, whose, "", read_s, load, bad))
        known = {worker_id for worker_id, _ in self._passes.by_worker().items()}
        silent.extend(
            Silent(t.worker_id or t.url, "no forward pass was heard yet")
            for t in self._streams
            if (t.worker_id and t.worker_id not in known) or not known
        )
        return samples, silent


class _Passes:
    """The newest document of each rank, as they come in; stamped on receipt (B155)."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._newest: dict[tuple[str, int], tuple[float, ForwardPass]] = {}
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def listen(self, streams: Sequence[Target]) -> None:
        """Subscribe once to every stream."""
        if self._tasks or not streams:
            return
        self._context = zmq.asyncio.Context()
        for target in streams:
            socket = self._context.socket(zmq.SUB)
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, DOCUMENT_MAX)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(target.url)
            task = asyncio.get_running_loop().create_task(self._follow(socket, target))
            self._tasks.append(task)

    def by_worker(self) -> dict[str, list[tuple[float, ForwardPass]]]:
        """(received, document) of every rank, by worker."""
        out: dict[str, list[tuple[float, ForwardPass]]] = {}
        for (worker_id, _rank), item in sorted(self._newest.items(), key=lambda item: item[0]):
            out.setdefault(worker_id, []).append(item)
        return out

    async def aclose(self) -> None:
        """Stop."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _follow(self, socket: zmq.asyncio.Socket, target: Target) -> None:
        with contextlib.closing(socket):
            while True:
                frames = await socket.recv_multipart()
                self._take(bytes(frames[-1]), target)

    def _take(self, payload: bytes, target: Target) -> None:
        try:
            document = msgspec.msgpack.decode(payload)
        except msgspec.DecodeError as error:
            log.warning("a forward-pass document of %s is no msgpack: %s", target.url, error)
            return
        found, why = forward_pass.read(document)
        if found is None:
            log.warning("a forward-pass document of %s is not read: %s", target.url, why)
            return
        key = (target.worker_id or found.worker_id, found.dp_rank)
        if key in self._newest or len(self._newest) < RANKS_MAX:
            self._newest[key] = (self._clock.monotonic_s(), found)
