"""The last chunks of a load: a slow source does not hold it up to its limit, and nothing is mixed up."""

import asyncio
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.identity import FileEntry
from readyplane.core.startup import WeightTier
from readyplane_agent import loader as loader_module
from readyplane_agent.arena import Arena
from readyplane_agent.chunk_order import COMING, MISSING, VERIFIED, Held
from readyplane_agent.endgame import (
    ENDGAME_CHUNKS_MAX,
    STORE_SILENT_S,
    Lent,
    in_vain,
    quiet_s,
    second,
    slow,
    stalled_s,
)
from readyplane_agent.fanout import Fanout
from readyplane_agent.pipeline import Pipeline
from readyplane_agent.ranges import Fault, HttpReader
from readyplane_agent.source_use import SourceUse
from tests.unit.agent_twins import Artifact, TwinRegistry, artifact, serving, source
from tests.unit.peer_world import CLOCK, given_by, make

# ---------------------------------------------------------------------------- the verdict


def test_nothing_is_doubled_before_the_end_and_never_too_much() -> None:
    lent = [Lent(0, "a", 0.0), Lent(1, "a", 1.0), Lent(2, "b", 9.9)]
    ours = bytes([COMING, COMING, COMING, VERIFIED])
    assert slow(lent, ours, now_s=10.0, usual_s=0.1) == lent[:2]
    assert slow(lent, ours, now_s=10.0, usual_s=3.0) == []
    assert slow(lent, ours, now_s=0.9, usual_s=0.0) == []
    assert slow(lent, bytes([COMING, MISSING]), now_s=10.0, usual_s=0.1) == []
    assert slow(lent, bytes([COMING] * (ENDGAME_CHUNKS_MAX + 1)), now_s=10.0, usual_s=0.1) == []
    late = lent[:2]
    assert second(late, source_id="b", held=Held(), doubled=(), done=0) == 0
    assert second(late, source_id="b", held=Held(), doubled={0}, done=1) == 1
    assert second(late, source_id="a", held=Held(), doubled=(), done=0) is None
    assert second(late, source_id="b", held=Held(), doubled=(), done=ENDGAME_CHUNKS_MAX) is None
    partial = Held(bytes([MISSING, VERIFIED, MISSING, MISSING]))
    assert second(late, source_id="b", held=partial, doubled=(), done=0) == 1


@given(
    ages=st.lists(st.floats(0, 100), max_size=12),
    usual_s=st.floats(0, 10),
    doubled=st.sets(st.integers(0, 11)),
)
@settings(max_examples=50, deadline=None)
def test_what_is_doubled_is_slow_and_of_another_source(
    ages: list[float], usual_s: float, doubled: set[int]
) -> None:
    lent = [Lent(n, "ab"[n % 2], 100.0 - age) for n, age in enumerate(ages)]
    late = slow(lent, bytes([COMING] * len(lent)), now_s=100.0, usual_s=usual_s)
    found = second(late, source_id="a", held=Held(), doubled=doubled, done=len(doubled))
    if found is not None:
        assert found % 2 == 1 and found not in doubled
        assert ages[found] > max(1.0, 4 * usual_s) - 1e-6
        assert len(ages) <= ENDGAME_CHUNKS_MAX


@given(
    ages=st.lists(st.floats(0, 100), max_size=12),
    usual_s=st.floats(0, 10),
)
@settings(max_examples=50, deadline=None)
def test_a_load_is_stalled_when_even_the_newest_of_its_chunks_is_late(
    ages: list[float], usual_s: float
) -> None:
    lent = [Lent(n, "a", 100.0 - age) for n, age in enumerate(ages)]
    found = stalled_s(lent, now_s=100.0, usual_s=usual_s)
    limit_s = max(2.0, 4 * usual_s)
    if found:
        assert found == pytest.approx(min(ages)) and found > limit_s
    else:
        assert not ages or min(ages) <= limit_s + 1e-6


@given(
    ages=st.lists(st.floats(0, 100), max_size=12),
    gave=st.floats(0, 100),
    joined=st.lists(st.floats(0, 100), max_size=6),
    usual_s=st.floats(0, 10),
)
@settings(max_examples=50, deadline=None)
def test_a_load_is_quiet_since_it_got_something_whoever_is_asked_in_addition(
    ages: list[float], gave: float, joined: list[float], usual_s: float
) -> None:
    def quiet(of: list[float]) -> float:
        lent = [Lent(n, "ab"[n % 2], 100.0 - age) for n, age in enumerate(of)]
        return quiet_s(lent, gave_s=100.0 - gave, now_s=100.0, usual_s=usual_s)

    found = quiet(ages)
    if found:
        assert found == pytest.approx(min(gave, max(ages)))
        assert found > max(2.0, 4 * usual_s)
        younger = [age for age in joined if age <= max(ages)]
        assert quiet([*ages, *younger]) == found
    else:
        assert not ages or min(gave, max(ages)) <= max(2.0, 4 * usual_s) + 1e-6


# ---------------------------------------------------------------------------- virtual time


@dataclass
class Hands:
    """A clock that is moved by hand; only threads of a load read it."""

    now_s: float = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


@dataclass
class Scripted(HttpReader):
    """A source that stops inside its `stuck` chunks until it is let go, or cut."""

    art: Artifact
    stuck: set[int] = field(default_factory=set)
    half: bool = True
    spoilt: bool = False

    def __post_init__(self) -> None:
        super().__init__("http://127.0.0.1:1/x", clock=Hands())
        self.held, self.go, self.read = threading.Event(), threading.Event(), 0

    def read_into(self, entry: FileEntry, start: int, into: memoryview) -> Fault | None:
        data = self.art.files[entry.path][start : start + len(into)]
        number = self.read
        self.read += 1
        if number in self.stuck:
            into[: len(into) // 2] = b"\xff" * (len(into) // 2)
            self.held.set()
            while not (self.go.is_set() or self._cut.is_set() or self._closed.is_set()):
                self.go.wait(0.005)
            if not self.go.is_set():
                return Fault("dead", "cut")
        into[:] = bytes(len(data)) if self.spoilt else data
        return None


class Load:
    """One load from a slow source, and a second one beside it, on a clock moved by hand."""

    def __init__(self, slow_one: Scripted, other: Scripted) -> None:
        self.clock, self.stop = Hands(), threading.Event()
        self.arena = Arena(slow_one.art.manifest)
        self.fanout = Fanout(self.arena, clock=self.clock, incarnation="w", stop=self.stop)
        self.pipeline = Pipeline(self.arena, clock=self.clock, staging_bytes=2**24, connections=1)
        self.uses = {n: SourceUse(n, WeightTier.L1_HOST) for n in ("slow", "other")}
        self.readers = {"slow": slow_one, "other": other}

    def begin(self, name: str) -> asyncio.Task[None]:
        gone = threading.Event()
        side = self.fanout.join(name, gone=gone, whole=True)
        return asyncio.create_task(
            self.pipeline.fill(
                lambda: self.readers[name], self.uses[name], gone=gone, stop=self.stop, todo=side
            )
        )

    async def until_stuck(self) -> asyncio.Task[None]:
        """The slow source is inside a chunk, and all others have been brought."""
        first = self.begin("slow")
        while not self.readers["slow"].held.is_set():
            await asyncio.sleep(0.002)
        return first


ART = artifact(shards=1, floats=20_000)
LAST = sum(len(entry.chunks) for entry in ART.manifest.files) - 1


async def test_an_idle_reader_brings_the_last_chunk_beside_a_slow_source() -> None:
    load = Load(Scripted(ART, {LAST}), Scripted(ART))
    first = await load.until_stuck()
    second_one = load.begin("other")
    await asyncio.sleep(0.15)
    assert load.readers["other"].read == 0, "not yet: a chunk may take its time"
    load.clock.now_s = 1.5
    async with asyncio.timeout(5):
        await asyncio.gather(first, second_one)
    assert load.arena.complete and bytes(load.arena.view("config.json")) == b"{}"
    assert all(bytes(load.arena.view(p)) == d for p, d in ART.files.items())
    size = load.arena.span(*load.arena.chunks[LAST])[1]
    assert load.uses["other"].bytes_read == load.uses["other"].again_bytes > 0
    assert load.uses["other"].again_bytes <= max(size, ART.manifest.chunk_bytes)
    assert load.uses["slow"].fault is None, "it is not told of as a liar or as dead"
    assert load.fanout.doubles == 1
    load.arena.close()


async def test_the_slow_source_may_still_win() -> None:
    """Both have it in the end: what was verified first stays, nothing is counted for the other."""
    load = Load(Scripted(ART, {LAST}), Scripted(ART, {0}))
    first = await load.until_stuck()
    second_one = load.begin("other")
    load.clock.now_s = 1.5
    while not load.readers["other"].held.is_set():
        await asyncio.sleep(0.002)
    load.readers["slow"].go.set()
    async with asyncio.timeout(5):
        await asyncio.gather(first, second_one)
    assert load.uses["slow"].bytes_read == ART.manifest.size_bytes
    assert load.uses["other"].bytes_read == load.uses["other"].again_bytes == 0
    assert load.uses["other"].fault is None
    assert all(bytes(load.arena.view(p)) == d for p, d in ART.files.items())
    load.arena.close()


async def test_wrong_bytes_of_the_second_never_reach_the_arena() -> None:
    load = Load(Scripted(ART, {LAST}), Scripted(ART, spoilt=True))
    first = await load.until_stuck()
    second_one = load.begin("other")
    load.clock.now_s = 1.5
    async with asyncio.timeout(5):
        await second_one
    assert load.uses["other"].fault is not None and load.uses["other"].fault.kind == "corrupt"
    assert not load.arena.complete
    load.readers["slow"].go.set()
    async with asyncio.timeout(5):
        await first
    assert load.arena.complete
    assert all(bytes(load.arena.view(p)) == d for p, d in ART.files.items())
    load.arena.close()


# ---------------------------------------------------------------------------- real connections


async def test_a_dribbling_peer_is_not_waited_for_to_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a second source in its plan beside it, a load joins one for the end only."""
    monkeypatch.setattr(loader_module, "PLAN_EVERY_S", 0.1)
    monkeypatch.setattr("readyplane_agent.endgame.ENDGAME_AFTER_S", 0.3)
    hold = threading.Event()

    def spoil(path: str, start: int, count: int, data: bytes) -> None:
        if count == 3:
            hold.wait(30)

    art = artifact()
    with serving(art.files, spoil) as peer, serving(art.files) as store:
        told = source(peer.url, "peer:w1", WeightTier.L1_HOST, worker_id="w1")
        load, arena, plan = make(art, TwinRegistry(), told, source(store.url))
        begun_s = time.monotonic()
        fetched = await load.run(plan)
        took_s = time.monotonic() - begun_s
        hold.set()
    assert took_s < 5, "the limit of a silent source is 8 s"
    assert all(bytes(arena.view(p)) == d for p, d in art.files.items())
    assert 0 < fetched.again_bytes <= art.manifest.chunk_bytes
    assert sum(given_by(fetched).values()) == art.manifest.size_bytes
    assert len(store.asked) == 1
    arena.close()


@pytest.mark.parametrize("beside", ["another worker", "the store"])
async def test_a_source_that_stops_in_the_middle_holds_a_load_up_for_moments(
    monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    """It was stopped with most of the load before it; what it was asked for is brought by others."""
    monkeypatch.setattr(loader_module, "PLAN_EVERY_S", 0.1)
    monkeypatch.setattr(loader_module, "STORE_LATE_S", 1.0)
    monkeypatch.setattr("readyplane_agent.endgame.STALLED_AFTER_S", 0.5)
    hold = threading.Event()

    def spoil(path: str, start: int, count: int, data: bytes) -> None:
        if count >= 3:
            hold.wait(30)

    art = artifact(floats=400_000)
    worker = beside == "another worker"
    with serving(art.files, spoil) as peer, serving(art.files) as other:
        told = source(peer.url, "peer:w1", WeightTier.L1_HOST, worker_id="w1", readers=1)
        second = (
            source(other.url, "peer:w2", WeightTier.L1_HOST, worker_id="w2", readers=1)
            if worker
            else source(other.url)
        )
        load, arena, plan = make(art, TwinRegistry(), told, second)
        begun_s = time.monotonic()
        fetched = await load.run(plan)
        took_s = time.monotonic() - begun_s
        hold.set()
    assert took_s < 6, "a silent source is left after 8 s"
    assert all(bytes(arena.view(p)) == d for p, d in art.files.items())
    given = given_by(fetched)
    assert given["peer:w2" if worker else "storage:1"] > art.manifest.size_bytes / 2
    arena.close()


@pytest.mark.parametrize("frozen", [1, 3, 4, 6])
async def test_peers_that_hang_together_do_not_keep_a_load_from_the_store(
    monkeypatch: pytest.MonkeyPatch, frozen: int
) -> None:
    """However many hang: the store is asked after its time, and brings what they were asked for."""
    monkeypatch.setattr(loader_module, "PLAN_EVERY_S", 0.1)
    monkeypatch.setattr(loader_module, "STORE_LATE_S", 0.6)
    monkeypatch.setattr("readyplane_agent.endgame.STALLED_AFTER_S", 0.3)
    monkeypatch.setattr("readyplane_agent.endgame.ENDGAME_AFTER_S", 0.3)
    hold = threading.Event()

    def stop(path: str, start: int, count: int, data: bytes) -> None:
        hold.wait(30)

    art = artifact(floats=400_000)
    with ExitStack() as rooms:
        peers = [rooms.enter_context(serving(art.files, stop)) for _ in range(frozen)]
        store = rooms.enter_context(serving(art.files))
        told = [
            source(peer.url, f"peer:w{n}", WeightTier.L1_HOST, worker_id=f"w{n}", readers=1)
            for n, peer in enumerate(peers)
        ]
        load, arena, plan = make(art, TwinRegistry(), *told, source(store.url))
        begun_s = time.monotonic()
        fetched = await load.run(plan)
        took_s = time.monotonic() - begun_s
        hold.set()
    assert took_s < 7, "a silent source is left after 8 s"
    assert all(bytes(arena.view(p)) == d for p, d in art.files.items())
    given = given_by(fetched)
    assert given["storage:1"] == art.manifest.size_bytes
    assert fetched.again_bytes <= ENDGAME_CHUNKS_MAX * art.manifest.chunk_bytes
    arena.close()


# ---------------------------------------------------------------------------- room in the budget


@pytest.mark.parametrize("chunks_of_room", [4, 1])
@pytest.mark.parametrize("then", ["stay frozen", "thaw", "thaw and lie"])
async def test_peers_that_hang_together_do_not_keep_their_room_in_the_budget(
    monkeypatch: pytest.MonkeyPatch, then: str, chunks_of_room: int
) -> None:
    """What three were asked for fills the budget: the store that is asked beside them gets room."""
    monkeypatch.setattr(loader_module, "PLAN_EVERY_S", 0.1)
    monkeypatch.setattr(loader_module, "STORE_LATE_S", 0.6)
    monkeypatch.setattr("readyplane_agent.endgame.STALLED_AFTER_S", 0.3)
    monkeypatch.setattr("readyplane_agent.endgame.ENDGAME_AFTER_S", 0.3)
    hold, asked = threading.Event(), threading.Event()

    def stop(path: str, start: int, count: int, data: bytes) -> bytes | None:
        if count <= 2:
            return None
        (hold if then == "stay frozen" else asked).wait(30)
        return bytes(len(data)) if then == "thaw and lie" else None

    def tell(path: str, start: int, count: int, data: bytes) -> None:
        if count >= 8:  # the room that is left would do for a short chunk or two
            asked.set()

    art = artifact(floats=400_000)
    with ExitStack() as rooms:
        peers = [rooms.enter_context(serving(art.files, stop)) for _ in range(3)]
        store = rooms.enter_context(serving(art.files, tell))
        told = [
            source(peer.url, f"peer:w{n}", WeightTier.L1_HOST, worker_id=f"w{n}")
            for n, peer in enumerate(peers)
        ]
        limit_bytes = chunks_of_room * art.manifest.chunk_bytes
        load, arena, plan = make(
            art, TwinRegistry(), *told, source(store.url), staging_bytes=limit_bytes
        )
        begun_s = time.monotonic()
        fetched = await load.run(plan)
        took_s = time.monotonic() - begun_s
        hold.set()
    assert took_s < 20, "these sources may be silent for 60 s"
    assert all(bytes(arena.view(p)) == d for p, d in art.files.items())
    assert sum(given_by(fetched).values()) == art.manifest.size_bytes, "nothing is placed twice"
    assert 0 < fetched.staging_peak_bytes <= limit_bytes
    left = [use for use in fetched.uses if use.fault and "others need its room" in str(use.fault)]
    assert left and all(use.source_id != "storage:1" for use in left)
    arena.close()


@given(
    silent=st.dictionaries(st.sampled_from("abcs"), st.lists(st.floats(0, 100), max_size=4)),
    usual_s=st.floats(0, 10),
)
@settings(max_examples=80, deadline=None)
def test_room_is_taken_only_from_who_is_silent_on_every_connection(
    silent: dict[str, list[float]], usual_s: float
) -> None:
    limit_s = max(2.0, 4 * usual_s)
    found = in_vain(silent, asks="a", stores=["s"], usual_s=usual_s)
    if found is not None:
        assert found != "a" and silent[found]
        assert min(silent[found]) > (max(limit_s, STORE_SILENT_S) if found == "s" else limit_s)
        assert all(seconds <= limit_s for seconds in silent.get("a", ()))
    elif all(seconds <= limit_s for seconds in silent.get("a", ())):
        assert all(not of or min(of) <= limit_s for name, of in silent.items() if name in "bc")


class Silent(HttpReader):
    """A connection that reads, of which the last byte came so long ago."""

    reads = True

    def __init__(self, seconds: float) -> None:
        super().__init__("http://127.0.0.1:1/x", clock=Hands())
        self.seconds, self.ended = seconds, False

    def silent_s(self) -> float:
        return self.seconds

    def close(self) -> None:
        self.ended = True


def starved(*silent_s: float, now_s: float = 3.0) -> tuple[Fanout, list[Silent], bool]:
    """A source with so many chunks on its way, another that has no room; whether the first is left."""
    clock, arena = Hands(), Arena(ART.manifest)
    fanout = Fanout(arena, clock=clock, incarnation="w", stop=threading.Event())
    first = fanout.join("first", gone=threading.Event(), whole=True)
    readers = [Silent(seconds) for seconds in silent_s]
    assert all(fanout.take(first, reader) for reader in readers)
    clock.now_s = now_s
    other = fanout.join("other", gone=threading.Event(), whole=True)
    chunk = fanout.take(other, HttpReader("http://127.0.0.1:1/x", clock=clock))
    assert chunk is not None and fanout.short(other, chunk), "it waits on"
    assert first.gone.is_set() == fanout.hung("first") == bool(first.hung)
    return fanout, readers, first.gone.is_set()


def test_a_source_that_moves_keeps_its_room_however_slow_it_is() -> None:
    for silent_s, now_s in (((3.0, 0.4, 3.0), 3.0), ((1.5, 1.5), 3.0), ((1.5,), 1.5)):
        _, readers, left = starved(*silent_s, now_s=now_s)
        assert not left and not any(reader.ended for reader in readers)


def test_who_was_left_for_his_silence_has_one_chunk_to_prove_himself() -> None:
    fanout, readers, left = starved(3.0, 2.5)
    assert left and all(reader.ended for reader in readers)
    for number in [n for n, (one, _) in fanout._lent.items() if one.source_id == "first"]:
        side = fanout._sides["first"]
        assert not fanout._gives(side)
        fanout.done(side, fanout._arena.chunks[number], Fault("dead", "closed"))
    fanout.leave("first")
    again = fanout.join("first", gone=threading.Event(), whole=True)
    chunk = fanout.take(again, Silent(0.0))
    assert chunk is not None and fanout.take(again, Silent(0.0)) is None
    fanout._arena.mark(*chunk)
    fanout.done(again, chunk, None)
    assert not fanout.hung("first")
    assert fanout.take(again, Silent(0.0)) and fanout.take(again, Silent(0.0))


async def test_a_chunk_that_waits_for_room_is_handed_over_to_who_has_brought_it() -> None:
    """Room for one: who brought the last chunk beside holds it, and the first waits for just that."""
    slow_one, other = Scripted(ART), Scripted(ART)
    load = Load(slow_one, other)
    size = max(load.arena.span(*chunk)[1] for chunk in load.arena.chunks)
    load.pipeline.budget.limit_bytes = size
    held = load.arena.missing()[:-1]
    for path, index in held:
        start, length = load.arena.span(path, index)
        with load.arena.window(path, index) as window:
            window[:] = ART.files[path][start : start + length]
        load.arena.mark(path, index)
    assert load.pipeline.budget.take(size, stop=load.stop)
    first = load.begin("slow")
    while not load.fanout._lent:
        await asyncio.sleep(0.002)
    load.clock.now_s = 1.5
    second_one = load.begin("other")
    while not load.fanout._doubled:
        await asyncio.sleep(0.002)
    number = next(iter(load.fanout._doubled))
    with load.fanout._changed:
        load.fanout._claimed.add(number)  # as if its bytes were here: the first lets go
    async with asyncio.timeout(10):
        while number in load.fanout._lent:
            await asyncio.sleep(0.002)
    load.pipeline.budget.give(size)
    async with asyncio.timeout(10):
        await asyncio.gather(first, second_one)
    assert load.arena.complete
    assert all(bytes(load.arena.view(p)) == d for p, d in ART.files.items())
    load.arena.close()


def test_how_long_a_connection_is_silent_is_seen_from_another_thread() -> None:
    """One call receives the whole chunk; what the kernel has seen of it meanwhile counts."""
    moves, ends = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as door:

        def dribble() -> None:
            peer, _ = door.accept()
            with peer:
                peer.recv(4096)
                size = len(next(iter(ART.files.values())))
                peer.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
                moves.wait(20)
                while not ends.wait(0.02):
                    peer.sendall(b"x")

        path, data = next(iter(ART.files.items()))
        entry = next(one for one in ART.manifest.files if one.path == path)
        reader = HttpReader(f"http://127.0.0.1:{door.getsockname()[1]}/x", clock=CLOCK)
        assert reader.silent_s() is None and not reader.reads
        giving = threading.Thread(target=dribble)
        reading = threading.Thread(
            target=reader.read_into, args=(entry, 0, memoryview(bytearray(len(data))))
        )
        giving.start()
        reading.start()

        def until(low: float, high: float) -> None:
            limit_s = time.monotonic() + 20
            while not low < (reader.silent_s() or 0.0) < high:
                assert time.monotonic() < limit_s, reader.silent_s()
                time.sleep(0.01)

        until(0.4, 20)
        moves.set()
        until(0.0, 0.3)
        assert reader.reads
        ends.set()
        reader.close()
        giving.join(20)
        reading.join(20)
        assert not reader.reads


def test_a_chunk_that_somebody_brought_while_it_waited_for_room_is_not_asked_for() -> None:
    path, data = next(iter(ART.files.items()))
    entry = next(one for one in ART.manifest.files if one.path == path)
    with serving(ART.files) as peer:
        reader = HttpReader(peer.url, clock=CLOCK)
        reader.cut()
        into = memoryview(bytearray(min(len(data), ART.manifest.chunk_bytes)))
        fault = reader.read_into(entry, 0, into)
        assert fault is not None and fault.kind == "dead" and not peer.asked
        reader.resume()
        assert reader.read_into(entry, 0, into) is None and bytes(into) == data[: len(into)]
        reader.close()
