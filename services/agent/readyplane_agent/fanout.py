"""One load from several sources at once: who gives which chunk, while starters help each other.

Owns the account of one load (what is missing, what is on its way, what each source was last known
to hold) and tells the threads of `pipeline` their next chunk; the choice itself is `chunk_order`'s.
A chunk is asked of one source at a time, so that no two threads ever write the same memory; one of
the last few may be brought by a second one beside it (`endgame`), which takes the place over once
its bytes are right and the first has let go. A source that drains is left as soon as somebody else has what it was to give (R22.3).
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

from readyplane.kit.clock import Clock
from readyplane_agent.arena import Arena
from readyplane_agent.chunk_order import (
    COMING,
    MISSING,
    VERIFIED,
    Held,
    begin_at,
    next_chunk,
    own_order,
)
from readyplane_agent.endgame import (
    Lent,
    in_vain,
    quiet_s,
    second,
    slow,
    slow_after_s,
    stalled_s,
)
from readyplane_agent.ranges import Fault, HttpReader, RangeReader

HOLDINGS_EVERY_S = 0.25
HOLDINGS_IDLE_S = 0.05
WAIT_S = 0.05
# A peer that still loads and has had nothing for us for so long is left for another.
STALL_S = 2.0
COMPACT_EVERY = 64
# A source that was cut lets go of its chunk at once; one that does not keeps it.
CLAIM_LIMIT_S = 5.0
USUAL_WEIGHT = 0.2


class Fanout:
    """The account of one load.

    Args:
        arena: filled. clock: time. incarnation: ours; it says where we begin.
        stop: set when the load is to end.
    """

    def __init__(
        self, arena: Arena, *, clock: Clock, incarnation: str, stop: threading.Event
    ) -> None:
        self._arena, self._clock, self._stop = arena, clock, stop
        number = {chunk: n for n, chunk in enumerate(arena.chunks)}
        missing = arena.missing()
        small = [number[c] for c in missing if arena.purpose(c[0]) != "weights"]
        total = len(arena.chunks)
        self._order = own_order(
            sorted(number[c] for c in missing), small, begin_at(incarnation, total)
        )
        self._number = number
        self._changed = threading.Condition()
        self._sides: dict[str, Side] = {}
        self._taken = 0
        self._lent: dict[int, tuple[Lent, RangeReader | None]] = {}
        self._doubled: dict[int, Beside] = {}
        self._claimed: set[int] = set()
        self._hung: set[str] = set()
        self._usual_s = 0.0
        self._gave_s = -math.inf
        self.doubles = 0

    def join(
        self, source_id: str, *, gone: threading.Event, whole: bool, storage: bool = False
    ) -> Side:
        """Read from one more source.

        Args:
            gone: set when it is to be left. whole: it holds everything. storage: a byte store.
        """
        progress = None if whole else bytes(len(self._arena.chunks))
        side = Side(self, source_id, gone, Held(progress, storage), self.now_s())
        with self._changed:
            self._sides[source_id] = side
        return side

    def leave(self, source_id: str) -> None:
        """No more is read from this source."""
        with self._changed:
            self._sides.pop(source_id, None)
            self._changed.notify_all()

    @property
    def whole_peer(self) -> bool:
        """Whether a peer that holds everything, and stays, is being read from."""
        return any(
            s.held.progress is None and not s.held.storage and not s.draining
            for s in list(self._sides.values())
        )

    def stays(self, source_id: str) -> bool:
        """Whether a source has not said that it leaves."""
        side = self._sides.get(source_id)
        return side is None or not side.draining

    @property
    def draining(self) -> bool:
        """Whether somebody who is read from has said that he leaves."""
        return any(side.draining for side in list(self._sides.values()))

    def take(self, side: Side, reader: RangeReader | None = None) -> tuple[str, int] | None:
        """The next chunk for a source; waits at most `WAIT_S`. `Side` knows how to ask again."""
        arena = self._arena
        with self._changed:
            others = [s.held for s in self._sides.values() if s is not side and self._gives(s)]
            order = self._order if side.held.progress is None else side.ready
            if self._on_trial(side):
                self._changed.wait(WAIT_S)
                return None
            found = next_chunk(order, arena.progress, side.held, others)
            if found is None:
                found = self._second(side, reader)
                if found is None:
                    self._changed.wait(WAIT_S)
                    return None
                side.pay(arena.span(*arena.chunks[found])[1])
                return arena.chunks[found]
            arena.progress[found] = COMING
            self._lent[found] = Lent(found, side.source_id, self.now_s()), reader
            side.pay(arena.span(*arena.chunks[found])[1])
            self._taken += 1
            if self._taken % COMPACT_EVERY == 0:
                self._order = [n for n in self._order if arena.progress[n] != VERIFIED]
                side.ready = [n for n in side.ready if arena.progress[n] != VERIFIED]
            return arena.chunks[found]

    def done(self, side: Side, chunk: tuple[str, int], fault: Fault | None) -> bool:
        """What became of a chunk that was taken; False when another source had brought it."""
        number = self._number[chunk]
        with self._changed:
            if fault is None:
                self._gave_s = self.now_s()
                self._hung.discard(side.source_id)
            beside = self._doubled.get(number)
            if beside is not None and beside.side is side:
                del self._doubled[number]
                side.vain = side.vain and fault is not None
                self._claimed.discard(number)
                lent = self._lent.get(number)
                if lent is not None and lent[0].source_id == side.source_id:
                    self._back(number, fault)
                self._changed.notify_all()
                return self._arena.progress[number] != VERIFIED
            if number in self._claimed:
                self._lent.pop(number, None)
                self._changed.notify_all()
                return False
            begun = self._lent.get(number)
            self._back(number, fault)
            if fault is None:
                side.useful_s, side.vain = self.now_s(), False
                if begun is not None:
                    self._learn_usual(side.useful_s - begun[0].since_s)
                if beside is not None and isinstance(beside.reader, HttpReader):
                    beside.reader.cut()
            elif side.held.progress is not None:
                known = bytearray(side.held.progress)
                known[number] = MISSING
                side.held = Held(bytes(known), side.held.storage)
            self._changed.notify_all()
            return True

    def _back(self, number: int, fault: Fault | None) -> None:
        self._lent.pop(number, None)
        if fault is not None and self._arena.progress[number] != VERIFIED:
            self._arena.progress[number] = MISSING

    def _learn_usual(self, took_s: float) -> None:
        known = self._usual_s
        self._usual_s = known + USUAL_WEIGHT * (took_s - known) if known else took_s

    # ------------------------------------------------------------------- the end of the load

    @property
    def late_s(self) -> float:
        """How long the slowest of the last chunks has been asked for, 0 while none is slow."""
        with self._changed:
            return max((self.now_s() - one.since_s for one in self._slow()), default=0.0)

    @property
    def stalled_s(self) -> float:
        """How long nobody who is read from has given anything, 0 while that is not long."""
        with self._changed:
            return self._quiet_s()

    def _quiet_s(self) -> float:
        lent = [one for one, _ in self._lent.values()]
        return quiet_s(lent, gave_s=self._gave_s, now_s=self.now_s(), usual_s=self._usual_s)

    def _gives(self, side: Side) -> bool:
        """Whether chunks may be left to this source: it stays, and does not hang."""
        lent = [one for one, _ in self._lent.values() if one.source_id == side.source_id]
        hangs = stalled_s(lent, now_s=self.now_s(), usual_s=self._usual_s)
        left = side.gone.is_set() or side.source_id in self._hung
        return not (side.draining or hangs or left)

    # ------------------------------------------------------------------- room in the byte budget

    def short(self, side: Side, chunk: tuple[str, int]) -> bool:
        """A chunk of this source finds no room: one that holds room and gives nothing is left.

        Only while the whole load gets nothing. Its connections are closed, so that its threads
        give their room back and its chunks are missing again; one source at a time.

        Returns:
            False when somebody else has brought the chunk: whoever waits for room lets go of it.
        """
        number = self._number[chunk]
        with self._changed:
            beside = self._doubled.get(number)
            claimed = number in self._claimed and beside is not None and beside.side is not side
            if claimed or self._arena.progress[number] == VERIFIED:
                return False
            found = self._in_vain(side)
        for reader in found:
            reader.close()
        return True

    def _in_vain(self, side: Side) -> list[HttpReader]:
        """The connections that are to be closed so that this source gets room."""
        me = side.source_id
        if me in self._hung or not self._quiet_s():
            return []
        reads = self._reads()
        silent = {
            name: [s for r in of if (s := r.silent_s()) is not None and (r.reads or name != me)]
            for name, of in reads.items()
        }
        stores = [name for name, one in self._sides.items() if one.held.storage]
        found = in_vain(silent, asks=me, stores=stores, usual_s=self._usual_s)
        hung = self._sides.get(found or "")
        if found is None or hung is None:
            return []
        hung.hung = f"not a byte for {min(silent[found]):.0f} s, and others need its room"
        hung.gone.set()
        self._hung.add(found)
        return reads[found]

    def hung(self, source_id: str) -> bool:
        """Whether it was left because it gave nothing and held room, and has given nothing since."""
        with self._changed:
            return source_id in self._hung

    def _reads(self) -> dict[str, list[HttpReader]]:
        """Source -> its connections that have a chunk to bring, of those where one reads now."""
        found: dict[str, list[HttpReader]] = {}
        lent = [(one.source_id, reader) for one, reader in self._lent.values()]
        beside = [(one.side.source_id, one.reader) for one in self._doubled.values()]
        for source_id, reader in (*lent, *beside):
            if isinstance(reader, HttpReader):
                found.setdefault(source_id, []).append(reader)
        return {name: of for name, of in found.items() if any(reader.reads for reader in of)}

    def _on_trial(self, side: Side) -> bool:
        """Whether this source hung in this load and still owes the one chunk it was asked for."""
        return side.source_id in self._hung and any(
            one.source_id == side.source_id for one, _ in self._lent.values()
        )

    def beside(self, side: Side, chunk: tuple[str, int]) -> bool:
        """Whether a chunk that was taken is to be brought beside another source; it has room now."""
        found = self._doubled.get(self._number[chunk])
        if found is None or found.side is not side:
            return False
        found.since_s = self.now_s()  # the wait for room was not its fault
        return True

    def claim(self, side: Side, chunk: tuple[str, int]) -> bool:
        """The right bytes of such a chunk are here: whether its place is ours to write now.

        The first source is cut, and what it still receives is over before this returns.
        """
        number, until_s = self._number[chunk], self.now_s() + CLAIM_LIMIT_S
        with self._changed:
            self._claimed.add(number)
            while number in self._lent and self._arena.progress[number] != VERIFIED:
                reader = self._lent[number][1]
                if not isinstance(reader, HttpReader) or self.now_s() > until_s:
                    self._claimed.discard(number)
                    return False
                reader.cut()
                self._changed.wait(WAIT_S)
            if self._arena.progress[number] == VERIFIED:
                self._claimed.discard(number)
                return False
            self._arena.progress[number] = COMING
            self._lent[number] = Lent(number, side.source_id, self.now_s()), None
            return True

    def _slow(self) -> list[Lent]:
        lent = [one for one, _ in self._lent.values()]
        return slow(lent, self._arena.progress, now_s=self.now_s(), usual_s=self._usual_s)

    def _second(self, side: Side, reader: RangeReader | None) -> int | None:
        if side.vain or side.source_id in self._hung:
            return None
        self._leave_vain(side)
        found = second(
            self._slow(),
            source_id=side.source_id,
            held=side.held,
            doubled=self._doubled,
            done=self.doubles,
        )
        if found is not None:
            self._doubled[found] = Beside(side, reader, self.now_s())
            self.doubles += 1
        return found

    def _leave_vain(self, side: Side) -> None:
        """Whoever brings one of the last chunks beside a slow source, and is slow himself, is cut.

        It is `side` that can bring it instead; the other gets none of the last again until he has
        given something.
        """
        limit_s = slow_after_s(self._usual_s)
        for number, beside in self._doubled.items():
            late = self.now_s() - beside.since_s > limit_s
            if not late or beside.side is side or beside.left or number in self._claimed:
                continue
            if isinstance(beside.reader, HttpReader):
                beside.left = beside.side.vain = True
                beside.reader.cut()
                self.doubles -= 1

    def learn(self, side: Side, progress: bytes) -> None:
        """What a source that still loads holds by now."""
        with self._changed:
            before = side.held.progress
            if before is None or progress.count(VERIFIED) == len(progress):
                side.held = Held(None, side.held.storage)
                return
            ours = self._arena.progress
            side.ready += [
                n
                for n, (old, new) in enumerate(zip(before, progress, strict=True))
                if new != old and new == VERIFIED and ours[n] != VERIFIED
            ]
            side.held = Held(progress, side.held.storage)

    def others_hold(self, side: Side) -> bool:
        """Whether everything that is missing can be had from somebody else who stays."""
        with self._changed:
            others = [s.held for s in self._sides.values() if s is not side and not s.draining]
            if any(held.progress is None for held in others):
                return True
            return all(
                any(held.has(n) for held in others)
                for n in self._order
                if self._arena.progress[n] == MISSING
            )

    @property
    def over(self) -> bool:
        """Whether nothing is missing any more, or the load is to end."""
        return self._arena.complete or self._stop.is_set()

    def now_s(self) -> float:
        """The load's clock."""
        return self._clock.monotonic_s()


@dataclass(slots=True)
class Beside:
    """Who brings a chunk beside the source that was asked for it first, and since when.

    Attributes:
        left: he was too slow as well, and is cut.
    """

    side: Side
    reader: RangeReader | None
    since_s: float
    left: bool = False


@dataclass(slots=True, eq=False)
class Side:
    """`Todo` of one of several sources.

    Attributes:
        held: what it was last known to hold. useful_s: when it last gave something.
        ready: of a source that still loads, what it has verified and we had not, as it came.
        vain: it was asked for one of the last chunks beside another, and gave nothing.
        hung: why it was left with its room in the byte budget, empty while it is not.
        lost: it does not say any more what it holds. draining: it has said that it leaves. bytes_per_s: how fast it may be read, 0 for no bound.
    """

    fanout: Fanout
    source_id: str
    gone: threading.Event
    held: Held
    useful_s: float
    draining: bool = False
    lost: bool = False
    vain: bool = False
    hung: str = ""
    bytes_per_s: float = 0.0
    paid_until_s: float = 0.0
    asked_s: float = -1e9
    asking: threading.Lock = field(default_factory=threading.Lock)
    ready: list[int] = field(default_factory=list)

    def take(self, reader: RangeReader) -> tuple[str, int] | None:
        """The next chunk; None when it has nothing more to give, stalls, or hands over."""
        while not (self.gone.is_set() or self.fanout.over):
            if isinstance(reader, HttpReader) and reader.draining:
                self.draining = True
            if self.draining and self.fanout.others_hold(self):
                return None
            idle = self.now_s() - self.useful_s
            self._refresh(reader, HOLDINGS_IDLE_S if idle > HOLDINGS_IDLE_S else HOLDINGS_EVERY_S)
            if self.lost:
                return None
            if self._paid():
                if isinstance(reader, HttpReader):
                    reader.resume()
                chunk = self.fanout.take(self, reader)
                if chunk is not None:
                    return chunk
            if self.held.progress is not None and idle > STALL_S:
                return None
        return None

    def done(self, chunk: tuple[str, int], fault: Fault | None) -> bool:
        """See `Todo`. A chunk that came too early is asked of somebody else, or later."""
        ours = self.fanout.done(self, chunk, fault)
        return fault is None or fault.kind == "early" or not ours

    def beside(self, chunk: tuple[str, int]) -> bool:
        """See `Todo`."""
        return self.fanout.beside(self, chunk)

    def claim(self, chunk: tuple[str, int]) -> bool:
        """See `Todo`."""
        return self.fanout.claim(self, chunk)

    def short(self, chunk: tuple[str, int]) -> bool:
        """See `Todo`."""
        return self.fanout.short(self, chunk)

    def now_s(self) -> float:
        """The load's clock."""
        return self.fanout.now_s()

    def _paid(self) -> bool:
        """Whether the source may be asked now; waits a little where it may not."""
        ahead_s = self.paid_until_s - self.now_s()
        if self.bytes_per_s <= 0 or ahead_s <= 0:
            return True
        self.gone.wait(min(WAIT_S, ahead_s))
        return False

    def pay(self, size_bytes: int) -> None:
        """Bytes were asked of the source."""
        if self.bytes_per_s > 0:
            begin_s = max(self.now_s(), self.paid_until_s)
            self.paid_until_s = begin_s + size_bytes / self.bytes_per_s

    def _refresh(self, reader: RangeReader, every_s: float) -> None:
        """Ask a peer that still loads what it holds by now; one thread at a time."""
        if self.held.progress is None or not isinstance(reader, HttpReader):
            return
        if self.now_s() - self.asked_s < every_s or not self.asking.acquire(blocking=False):
            return
        try:
            into = bytearray(len(self.held.progress))
            fault = reader.holdings(memoryview(into))
            if fault is None:
                self.fanout.learn(self, bytes(into))
            elif fault.kind in {"dead", "unfit"}:
                self.lost = True
            self.asked_s = self.now_s()
        finally:
            self.asking.release()
