"""Starts on the fluid's time: the same segments, draws and sources of weights as the event mode.

Owns the course of each start between order and ready: a start is a handful of timed steps, so it
is played exactly, with its readers contending for the store and for peers.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from readyplane.core.startup import SegmentName, WeightTier
from readyplane_lab.simulator.fluid.fleet import FluidWorker
from readyplane_lab.simulator.startup import MARKS, Draws, StartUpModel

SEGMENTS_BEFORE = (SegmentName.RUNTIME_IMPORT, SegmentName.ARTIFACT_DISCOVERY)


class Starts:
    """All starts under way.

    Args:
        on_ready: told each worker with the second at which it serves.
    """

    def __init__(
        self, model: StartUpModel, draws: Draws, *, on_ready: Callable[[FluidWorker, float], None]
    ) -> None:
        self._model = model
        self._draws = draws
        self._on_ready = on_ready
        self._due: list[tuple[float, int, FluidWorker, Callable[[FluidWorker, float], None]]] = []
        self._ties = 0
        self._peers: dict[str, int] = {}
        self._store_readers = 0

    def begin(self, worker: FluidWorker, now_s: float) -> None:
        """Order one."""
        worker.provisioned_s = now_s + self._seconds(worker, SegmentName.SCHEDULE)
        before_s = sum(self._seconds(worker, name) for name in SEGMENTS_BEFORE)
        self._at(worker.provisioned_s + before_s, worker, self._fetch)

    def alone_s(self, pool: str, ordinal: int) -> float:
        """A lone cold start of that draw, for workers that were there before the run."""
        names = (SegmentName.SCHEDULE, *self._model.segments)
        seconds = sum(self._model.seconds(n, self._draws, pool, ordinal) for n in names)
        return seconds + self._model.weight_bytes / self._model.store_bytes_per_s

    def advance(self, until_s: float) -> None:
        """Play everything up to and with that second, in order."""
        while self._due and self._due[0][0] <= until_s:
            at_s, _, worker, step = heappop(self._due)
            if worker.released_s is None:
                step(worker, at_s)
            else:
                self._let_go(worker)

    def add_peer(self, worker_id: str) -> None:
        """A ready worker gives its weights from now on."""
        self._peers.setdefault(worker_id, 0)

    def remove_peer(self, worker_id: str) -> None:
        """It gives no more."""
        self._peers.pop(worker_id, None)

    def _at(
        self, at_s: float, worker: FluidWorker, step: Callable[[FluidWorker, float], None]
    ) -> None:
        self._ties += 1
        heappush(self._due, (at_s, self._ties, worker, step))

    def _seconds(self, worker: FluidWorker, name: SegmentName) -> float:
        return self._model.seconds(name, self._draws, worker.pool, worker.ordinal)

    def _fetch(self, worker: FluidWorker, at_s: float) -> None:
        """Choose a source: the peer with the fewest readers that has room, else the store."""
        worker.bytes_left = self._model.weight_bytes
        free = [(n, w) for w, n in self._peers.items() if n < self._model.peer_readers_max]
        if free:
            worker.source = min(free)[1]
            self._peers[worker.source] += 1
        else:
            worker.source = ""
            self._store_readers += 1
        self._piece(worker, at_s)

    def _piece(self, worker: FluidWorker, at_s: float) -> None:
        """One piece at the rate that its readers leave each other now."""
        model = self._model
        if worker.source and worker.source not in self._peers:
            worker.source = ""
            self._store_readers += 1
        if worker.source:
            rate = model.peer_bytes_per_s / self._peers[worker.source]
        else:
            rate = model.store_bytes_per_s / self._store_readers
        size = model.weight_bytes / MARKS
        worker.bytes_left -= size
        last = worker.bytes_left < size / 2
        self._at(at_s + size / rate, worker, self._fetched if last else self._piece)

    def _fetched(self, worker: FluidWorker, at_s: float) -> None:
        worker.tier = WeightTier.L1_HOST if worker.source else WeightTier.L4_OBJECT
        self._let_go(worker)
        names = list(self._model.segments)[2:]
        self._at(at_s + sum(self._seconds(worker, n) for n in names), worker, self._on_ready)

    def _let_go(self, worker: FluidWorker) -> None:
        """Stop reading; once, whatever the start was at."""
        if worker.source is None:
            return
        if not worker.source:
            self._store_readers -= 1
        elif worker.source in self._peers:
            self._peers[worker.source] -= 1
        worker.source = None
