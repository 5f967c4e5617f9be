"""Weights into the arena: streaming, verified chunk by chunk, within a byte budget (R10.3, R11).

Owns the order of sources of one load and the rounds. The registry's first source is the parent in
the fan-out and may still be loading itself; idle peers that hold everything help beside it, and
storage is asked only for what no peer can give (R8.4, R9.2, B125). A source that is dead, slow, busy,
leaving or lying leads to others, which are asked for the missing chunks only. `reading` holds the leases, `fanout` says who
gives what, `pipeline` brings and verifies it. Hands the filled arena to the engine, `transfer` and
`cache`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from readyplane.core.chunks import ChunkRanges, ranges_of
from readyplane.core.errors import IdentityMismatch, NoPair, ReadyplaneError, Unavailable
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import Clock
from readyplane.ports import RankedSource, Registry, Source
from readyplane_agent import endgame
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.chunk_order import VERIFIED
from readyplane_agent.fanout import Fanout
from readyplane_agent.nixl_way import Transport
from readyplane_agent.no_source import BytesNowhere, Waiting, bounded, hopeless
from readyplane_agent.pipeline import Pipeline
from readyplane_agent.reading import Reader, Reading
from readyplane_agent.source_use import Fetched, SourceUse
from readyplane_agent.trace import StartTrace

log = logging.getLogger("agent.loader")

# A source that was dead or busy may be asked again in a later round; a lying one never.
ROUND_WAIT_S = 0.25
ROUND_WAIT_MAX_S = 5.0
# So long a load still waits when its bytes are wrong or missing wherever they are offered.
HOPELESS_S = 10.0
# Sources that are read from at once, and connections to each of them then.
SOURCES_MAX = 4
CONNECTIONS_EACH = 2
# While it reads, a load looks for further sources: so often at first, and ever less often.
PLAN_EVERY_S = 0.5
PLAN_EVERY_MAX_S = 5.0
# A source that failed or had nothing is not asked again for so long, doubled each time.
REST_S = 0.5
REST_MAX_S = 8.0
# One that was left because it held room and gave nothing rests at least so long: others are asked.
REST_HUNG_S = 4.0
# So long a load waits for a place at peers that are full before it asks storage.
PLACE_WAIT_S = 2.0
PLACE_TURN_S = 0.05
# Whom the store's own places turn away asks again, ever less often: others came first, and by the
# next plan one may read behind them.
STORE_TURN_MAX_S = 1.0
# So long nothing may come from peers that still load before one more of those behind them reads
# from the store beside its readers. Each newcomer there is given as long, so often at most.
STORE_LATE_S = 4.0
STORE_PATIENCE_S = 4.0
STORE_PATIENCES_MAX = 8


class Loader:
    """One load of one manifest.

    Args:
        arena: filled and marked here. registry: plans and transfer leases. clock: time.
        reader: who we are. trace: gets a segment per source. cache: node's cache, None without.
        staging_bytes: budget of unverified bytes. connections: to one source at once.
        limit_s: give up after this long. token: bearer token for HTTP sources.
        transport: how bytes of peers come; over TCP without.

    Raises:
        InvalidField: a chunk does not fit in the budget.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        registry: Registry,
        clock: Clock,
        reader: Reader,
        trace: StartTrace,
        cache: WeightCache | None = None,
        staging_bytes: int = 64 * 2**20,
        connections: int = 4,
        limit_s: float = 1800.0,
        token: str = "",
        transport: Transport | None = None,
    ) -> None:
        self._arena, self._registry, self._clock = arena, registry, clock
        self._reader, self._cache, self._limit_s = reader, cache, limit_s
        pipeline = Pipeline(
            arena, clock=clock, staging_bytes=staging_bytes, connections=connections, cache=cache
        )
        self._stop = threading.Event()
        self._lying: set[str] = set()
        self._lacking: set[str] = set()  # stores that lack a file
        self._excluded: tuple[str, ...] = ()  # by the latest plan
        self._waiting = Waiting(trace, clock)
        self._busy_s: float | None = None
        self._until_s = math.inf
        self.budget = pipeline.budget
        self.fetched = Fetched()
        self._fanout = Fanout(arena, clock=clock, incarnation=reader.incarnation, stop=self._stop)
        self._reading = Reading(
            arena,
            registry=registry,
            clock=clock,
            reader=reader,
            trace=trace,
            cache=cache,
            token=token,
            pipeline=pipeline,
            fanout=self._fanout,
            fetched=self.fetched,
            stop=self._stop,
            transport=transport or Transport(),
        )

    def stop(self) -> None:
        """Let reading threads end after their chunk; the load then raises Unavailable."""
        self._stop.set()

    async def run(self, plan: Sequence[RankedSource], *, excluded: Sequence[str] = ()) -> Fetched:
        """Fill the arena from the planned sources, planning anew when all of them failed.

        It waits for a source as long as the load may last, and says what for; not when the bytes
        are wrong or missing wherever they are offered. `excluded`: who is not in the plan, and why.

        Raises:
            Unavailable: no source could give every chunk; what each of them did is in the text.
            IdentityMismatch: every source that answered gave other bytes than the manifest says.
        """
        self._excluded = bounded(excluded)
        try:
            return await self._run(plan)
        finally:
            self._waiting.end()
            await self._reading.settle()

    async def _run(self, plan: Sequence[RankedSource]) -> Fetched:
        start_s = self._clock.monotonic_s()
        self._until_s = start_s + self._limit_s
        sources = self._ordered(plan)
        attempt, hopeless_s = 0, None
        while True:
            missing, uses = len(self._arena.missing()), self.fetched.uses[-1:]
            await self._round(sources)
            if self._arena.complete:
                self.fetched.elapsed_s = self._clock.monotonic_s() - start_s
                self.fetched.staging_peak_bytes = self.budget.peak_bytes
                return self.fetched
            moved = len(self._arena.missing()) < missing
            attempt = 0 if moved else attempt + 1
            wait_s = min(ROUND_WAIT_MAX_S, ROUND_WAIT_S * 2 ** min(attempt, 10))
            now_s = self._clock.monotonic_s()
            elapsed_s = now_s - start_s
            if moved or not self._hopeless(sources):
                hopeless_s = None
            elif hopeless_s is None:
                hopeless_s = now_s
            elif now_s - hopeless_s >= HOPELESS_S:
                break
            if self._stop.is_set() or elapsed_s + wait_s > self._limit_s:
                break
            if sources and all(s.source_id in self._lying for s in sources):
                break
            self._waiting.end(moved=moved)
            self._waiting.tell((*self._faults_since(uses), *self._excluded))
            await self._clock.sleep(wait_s)
            sources = self._ordered(await self._plan())
        raise self._given_up(vain=hopeless_s is not None)

    def _hopeless(self, sources: Sequence[Source]) -> bool:
        wrong = self._lying | self._lacking
        return hopeless(sources, wrong=wrong, excluded=self._excluded)

    def _faults_since(self, last: Sequence[SourceUse]) -> list[str]:
        """What went wrong in the uses after the one that was the last."""
        uses = self.fetched.uses
        at = next((n for n, use in enumerate(uses, 1) if last and use is last[0]), 0)
        return [f"{use.source_id}: {use.fault}" for use in uses[at:] if use.fault is not None]

    def _given_up(self, *, vain: bool) -> ReadyplaneError:
        left = len(self._arena.missing())
        reasons = (*bounded(self.fetched.faults), *self._excluded)
        reasons = reasons or ("no source holds this artifact",)
        if self._lying and all(
            use.source_id in self._lying for use in self.fetched.uses if use.fault is not None
        ):
            return IdentityMismatch(
                "weights", reasons, f"publish the artifact again; {left} chunks are not verified"
            )
        what = f"{left} chunks of {self._arena.manifest.digest} could not be fetched"
        if vain:
            return BytesNowhere(
                f"{what}, their bytes are wrong or missing wherever they are offered: "
                + "; ".join(reasons),
                "publish the artifact again; waiting does not help",
            )
        return Unavailable(
            f"{what}: " + "; ".join(reasons),
            "check the registry's byte store and the network to it",
        )

    async def _plan(self) -> tuple[RankedSource, ...]:
        me = self._reader
        try:
            found = await self._registry.plan_fetch(
                self._arena.manifest.digest,
                worker_id=me.worker_id,
                incarnation=me.incarnation,
                node=me.node,
                missing=self._missing(),
            )
        except (Unavailable, NoPair) as error:
            log.warning("planning again failed: %s", error)
            self._excluded = bounded([f"no plan: {error}"])
            return ()
        self._excluded = bounded(found.excluded)
        return found.sources

    def _missing(self) -> ChunkRanges:
        progress = bytes(self._arena.progress)
        return ranges_of(n for n, state in enumerate(progress) if state != VERIFIED)

    def _ordered(self, plan: Sequence[RankedSource]) -> list[Source]:
        """Planned order without ourselves and without liars; the node's own files join it."""
        me = self._reader
        sources = [
            ranked.source
            for ranked in plan
            if not (ranked.source.worker_id and ranked.source.worker_id == me.worker_id)
        ]
        cached = self._cache is not None and self._cache.holds(self._arena.manifest)
        here = [s for s in sources if s.tier is WeightTier.L2_NVME and s.node == me.node]
        sources = [s for s in sources if s.tier is not WeightTier.L2_NVME or (cached and s in here)]
        if cached and not here and self._cache is not None:
            # Not announced (nobody of this node lives any more): bytes that are here already cost
            # no peer and no network anything, so they come first.
            own = cache_source(self._cache, self._arena.manifest.digest, me.node)
            sources.insert(0, own)
        return [s for s in sources if s.source_id not in self._lying]

    async def _round(self, sources: Sequence[Source]) -> None:
        """Every source once: files of this machine in their turn, all others together at theirs."""
        gathered = False
        for source in sources:
            if self._over:
                return
            if source.url.startswith("file:"):
                await self._alone(source)
            elif not gathered:
                gathered = True
                await self._gather([s for s in sources if not s.url.startswith("file:")])

    @property
    def _over(self) -> bool:
        return self._arena.complete or self._stop.is_set()

    async def _alone(self, source: Source) -> None:
        self._waiting.end()
        use = await self._reading.use(source, threading.Event())
        if use.fault is not None and use.fault.kind == "corrupt":
            self._lying.add(source.source_id)
        self._lacks(source, use)

    def _lacks(self, source: Source, use: SourceUse) -> None:
        """Remember stores that lack a file; a peer may get it, and one that gives has it."""
        lasts = use.fault is not None and use.fault.lasts and not source.worker_id
        change = self._lacking.add if lasts else self._lacking.discard
        change(source.source_id)

    # ----------------------------------------------------------------- several sources at once

    async def _gather(self, sources: Sequence[Source]) -> None:
        """Read from several sources at once, until all is there or none of them is left.

        While it goes on the registry is asked for others, so that one that starts later, or has
        become free, is found; who has just failed rests for a while.
        """
        crowd = Crowd(list(sources))
        every_s, planned_s = PLAN_EVERY_S, self._clock.monotonic_s()
        try:
            while not self._over:
                self._join_more(crowd)
                if not crowd.running:
                    if not await self._place_may_come(crowd):
                        return
                else:
                    await asyncio.wait(
                        crowd.running, timeout=PLAN_EVERY_S, return_when=asyncio.FIRST_COMPLETED
                    )
                    self._take_in(crowd)
                    if crowd.running:
                        self._waiting.end()
                now_s = self._clock.monotonic_s()
                wait_s = 0.0 if not crowd.running else every_s
                if self._fanout.draining:
                    wait_s = min(wait_s, PLAN_EVERY_S)
                if now_s - planned_s < wait_s:
                    continue
                planned_s, every_s = now_s, min(PLAN_EVERY_MAX_S, every_s * 1.5)
                found = await self._plan()
                if found:
                    crowd.known = [s for s in self._ordered(found) if not s.url.startswith("file:")]
        finally:
            if not self._arena.complete:
                for _, gone in crowd.running.values():
                    gone.set()
            if crowd.running:
                await asyncio.wait(crowd.running)
                self._take_in(crowd)

    def _join_more(self, crowd: Crowd) -> None:
        """Begin to read from the first source of the plan that may be asked, if nobody gives.

        Beside it from peers that hold everything and give to nobody: who is read from already has
        a chain behind it, in which a newcomer's place is at the end (R8.4).
        """
        now_s = self._clock.monotonic_s()
        for source in crowd.known:
            reading = {s.source_id for s, _ in crowd.running.values()}
            rests = crowd.rests.get(source.source_id, (0.0, 0.0))[0] > now_s
            lies = source.source_id in self._lying
            # The last chunks hang at one source: another worker may bring them as well. The store
            # is spared (B125) until it is plain that this is no peer with a bound on its rate.
            after_s = 0.0 if source.worker_id else STORE_LATE_S
            late = len(reading) == 1 and self._fanout.late_s > after_s
            stalled = self._stalled(source, crowd, len(reading))
            late = late or stalled
            if source.source_id in reading or rests or lies:
                continue
            if not late and self._spared(source, crowd):
                continue
            stay = [name for name in reading if not late and self._fanout.stays(name)]
            idle = bool(source.worker_id) and not source.partial and source.readers == 0
            if stay and (not idle or len(stay) >= SOURCES_MAX):
                continue
            gone = threading.Event()
            connections = CONNECTIONS_EACH if stay else 0
            task = asyncio.ensure_future(self._reading.use(source, gone, connections=connections))
            crowd.running[task] = source, gone
            if stalled:
                crowd.helped_s = now_s

    def _stalled(self, source: Source, crowd: Crowd, reading: int) -> bool:
        """Whether nobody who is read from has given anything for so long that this one is asked too.

        Peers one after another, each with `STALLED_AFTER_S` to give something. The store once it is
        plain that nobody does, however many peers hang.
        """
        quiet_s = self._fanout.stalled_s
        if not source.worker_id:
            return quiet_s > STORE_LATE_S and reading <= SOURCES_MAX
        alone_s = self._clock.monotonic_s() - crowd.helped_s
        return quiet_s > 0 and reading < SOURCES_MAX and alone_s >= endgame.STALLED_AFTER_S

    def _spared(self, source: Source, crowd: Crowd) -> bool:
        """Whether storage is not to be asked: a peer that holds everything gives, or soon may."""
        if source.worker_id:
            return False
        whole = any(s.worker_id and not s.partial for s, _ in crowd.running.values())
        waits = self._busy_s is not None and (
            self._clock.monotonic_s() - self._busy_s < PLACE_WAIT_S
        )
        return whole or self._fanout.whole_peer or waits or self._follows(source, crowd)

    def _follows(self, storage: Source, crowd: Crowd) -> bool:
        """Whether others read from the store already, and peers that still load pass it on.

        Without this everybody in a chain would leave it for the store at once when its first
        member is slow. Now one more goes there, and the others read behind that one.
        """
        now_s = self._clock.monotonic_s()
        if storage.readers > crowd.store_readers and crowd.patiences < STORE_PATIENCES_MAX:
            crowd.patient_s, crowd.patiences = now_s, crowd.patiences + 1
        crowd.store_readers = storage.readers
        loading = any(s.worker_id and s.partial for s in crowd.known)
        crowd.follows = (
            storage.readers > 0 and loading and now_s - crowd.patient_s < STORE_PATIENCE_S
        )
        return crowd.follows

    async def _place_may_come(self, crowd: Crowd) -> bool:
        """Nobody gives now; True after a moment if there may soon be a place, or somebody to follow.

        Peers that are full are waited for a little, since the store can give. The store's own
        places are waited for as long as a load may last: behind it there is nothing.
        """
        now_s = self._clock.monotonic_s()
        if crowd.turned_away or crowd.follows:
            if now_s >= self._until_s:
                return False
            if crowd.turned_away:
                self._waiting.tell(self.fetched.faults[-1:], aloud=False)
            await self._clock.sleep(crowd.turn_s)
            crowd.turn_s = min(STORE_TURN_MAX_S, crowd.turn_s * 2)
            return True
        if self._busy_s is None or now_s - self._busy_s >= PLACE_WAIT_S:
            return False
        await self._clock.sleep(PLACE_TURN_S)
        return True

    def _take_in(self, crowd: Crowd) -> None:
        """What the sources that have ended did, and whether they may be asked again."""
        now_s = self._clock.monotonic_s()
        for task in [task for task in crowd.running if task.done()]:
            source, _ = crowd.running.pop(task)
            use = task.result()
            kind = "" if use.fault is None else use.fault.kind
            self._lacks(source, use)
            if kind in {"corrupt", "unfit"}:
                self._lying.add(source.source_id)
            if kind == "busy" and source.worker_id:
                self._busy_s = now_s if self._busy_s is None else self._busy_s
            elif use.bytes_read:
                self._busy_s = None
            rest_s = crowd.rests.get(source.source_id, (0.0, 0.0))[1]
            stalled = source.partial and use.fault is None  # it may go on any time
            rest_s = (
                REST_S if use.bytes_read or stalled else min(REST_MAX_S, max(REST_S, rest_s * 2))
            )
            if self._fanout.hung(source.source_id):
                rest_s = max(REST_HUNG_S, rest_s)
            if kind == "busy":
                rest_s = PLACE_TURN_S  # others have come first: the next plan says whom to ask
            crowd.turned_away = use.turned_away and not source.worker_id
            if not crowd.turned_away:
                crowd.turn_s = PLACE_TURN_S
            if use.times:
                crowd.patient_s, crowd.patiences = max(crowd.patient_s, use.times[-1][0]), 0
            crowd.rests[source.source_id] = now_s + rest_s, rest_s


@dataclass(slots=True)
class Crowd:
    """The sources of one gathering.

    Attributes:
        known: as planned last. running: each that is read from, with what ends it.
        rests: source -> until when it is left alone, and for how long that was.
        turned_away: the store had no place for us when it was asked last. turn_s: how long to wait.
        follows: the store is left to others. store_readers: how many it had when that was judged.
        patient_s: when something came last, or one more went to the store; `patiences` times since.
        helped_s: when one more was asked because the others gave nothing.
    """

    known: list[Source]
    running: dict[asyncio.Task[SourceUse], tuple[Source, threading.Event]] = field(
        default_factory=dict
    )
    rests: dict[str, tuple[float, float]] = field(default_factory=dict)
    turned_away: bool = False
    turn_s: float = PLACE_TURN_S
    follows: bool = False
    store_readers: int = 0
    patient_s: float = -math.inf
    patiences: int = 0
    helped_s: float = -math.inf


def cache_source(cache: WeightCache, digest: str, node: str) -> Source:
    """The node's cache as a source of an artifact."""
    return Source(
        source_id=f"cache:{node}:{digest.removeprefix('sha256:')[:16]}",
        digest=digest,
        tier=WeightTier.L2_NVME,
        url=f"file://{node}{cache.folder}",
        node=node,
        readers_max=64,
    )
