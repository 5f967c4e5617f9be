"""The node's pool of arenas (tier L1): memory that outlives its engine and its agent.

Owns the files of one folder in shared memory: a slot is its bytes, a record of its state, and a
lock that ends with its owner. A worker that starts again finds its weights there, and verifies them
at the speed of memory; another model gets the memory only zeroed and read back as zero, with its
pages in place, which is most of what a load costs. `pool_slots` says which step may follow which.

A file with a name cannot be sealed by the kernel as a nameless one can. What guards it is its mode
(0400 once whole), its owner's lock, and that it is verified whenever it is lent again.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from readyplane.core.errors import ReadyplaneError, Unavailable
from readyplane.core.identity import chunk_hash
from readyplane_agent.arena_memory import ArenaMemory
from readyplane_agent.pool_slots import Event, Slot, State, left_alone, step

log = logging.getLogger("agent.pool")

PIECE_BYTES = 8 * 2**20
SLOTS_MAX = 256
_NOTHING = {size: chunk_hash(bytes(size)) for size in (PIECE_BYTES,)}


class PooledMemory(ArenaMemory):
    """An arena's memory that goes back to its pool when it is closed.

    Attributes:
        held: whether it still has the content that is wanted (unverified).
    """

    def __init__(self, pool: ArenaPool, slot: Slot, lock: int, *, held: bool) -> None:
        self._pool, self._slot, self._lock, self.held = pool, slot, lock, held
        pool.path(slot.name).chmod(0o600)
        fd = os.open(pool.path(slot.name), os.O_RDWR | os.O_CLOEXEC)
        super().__init__(slot.size_bytes, fd=fd)
        self._move(Event.FILL)

    @property
    def path(self) -> Path:
        """Where an engine opens it."""
        return self._pool.path(self._slot.name)

    def _protect(self) -> None:
        os.fchmod(self.fd, 0o400)
        reading = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        os.close(self.fd)
        self.fd = reading
        self._move(Event.SEAL)
        self._move(Event.ADOPT)

    def close(self) -> None:
        """Give it back: with its content if that is whole, to be zeroed if it is not."""
        if self.fd < 0:
            return
        super().close()
        self._move(Event.RELEASE if self._slot.state is State.ADOPTED else Event.ROLL_BACK)
        os.close(self._lock)

    def _move(self, event: Event) -> None:
        self._slot = self._pool.write(step(self._slot, event))


class ArenaPool:
    """Arenas in one folder, shared by all agents of a node.

    Args:
        folder: in shared memory (tmpfs); made when missing.
        bytes_max: most bytes of all arenas together, in use or not.
    """

    def __init__(self, folder: Path, *, bytes_max: int) -> None:
        self.folder, self._bytes_max = folder, bytes_max
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, name: str) -> Path:
        """The bytes of a slot."""
        return self.folder / f"{name}.arena"

    def lend(self, size_bytes: int, *, content: str, owner: str) -> PooledMemory | None:
        """Memory for a content: what holds it already, else zeroed; None when the pool is full.

        Blocking (zeroing runs at the speed of memory): call it in a thread.

        Raises:
            Unavailable: the machine has not that much memory.
        """
        with self._alone():
            return self._lent(size_bytes, content, owner)

    def _lent(self, size_bytes: int, content: str, owner: str) -> PooledMemory | None:
        found = list(self._unowned())
        try:
            slot_lock = self._choose(found, size_bytes, content, owner)
            if slot_lock is None:
                return None
            slot, lock, held = slot_lock
            found = [item for item in found if item[1] != lock]
        finally:
            for _, lock in found:
                os.close(lock)
        try:
            reserved = self.write(step(slot, Event.RESERVE, owner=owner, content=content))
            return PooledMemory(self, reserved, lock, held=held)
        except BaseException:
            os.close(lock)
            raise

    def slots(self) -> list[Slot]:
        """Every slot as it is recorded, in use or not."""
        return [slot for name in self._names() if (slot := self._read(name)) is not None]

    def write(self, slot: Slot) -> Slot:
        """Record a state, whole or not at all; call it under the slot's lock."""
        path = self.folder / f"{slot.name}.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(slot)))
        part.replace(path)
        return slot

    # ------------------------------------------------------------------- choosing

    def _choose(
        self, found: list[tuple[Slot, int]], size_bytes: int, content: str, owner: str
    ) -> tuple[Slot, int, bool] | None:
        """(slot that may be reserved, its lock, whether it holds the content)."""
        wanted = (State.RELEASED, content, size_bytes)
        for slot, lock in found:
            if (slot.state, slot.content, slot.size_bytes) == wanted:
                return slot, lock, True
        order = (State.FREE, State.DIRTY, State.RELEASED)
        for slot, lock in sorted(found, key=lambda f: order.index(f[0].state)):
            if self._room(without=slot.name) < size_bytes:
                continue
            zeroed = self._zeroed(slot, size_bytes, owner)
            if zeroed is not None:
                return zeroed, lock, False
        return self._made(found, size_bytes, owner)

    def _made(
        self, found: list[tuple[Slot, int]], size_bytes: int, owner: str
    ) -> tuple[Slot, int, bool] | None:
        """A new slot, for which unused ones go if need be."""
        for slot, _ in sorted(found, key=lambda f: f[0].state is State.RELEASED):
            if self._room() >= size_bytes:
                break
            self._remove(slot.name)
        if self._room() < size_bytes or len(self._names()) >= SLOTS_MAX:
            return None
        name = secrets.token_hex(8)
        lock = self._lock(name)
        assert lock is not None
        made = None
        try:
            self.path(name).touch(0o600)
            made = self._zeroed(Slot(name, State.DIRTY, 0), size_bytes, owner)
        finally:
            if made is None:
                self._remove(name)
                os.close(lock)
        return (made, lock, False) if made else None

    def _room(self, *, without: str = "") -> int:
        used = sum(slot.size_bytes for slot in self.slots() if slot.name != without)
        return self._bytes_max - used

    # ------------------------------------------------------------------- zeroing

    def _zeroed(self, slot: Slot, size_bytes: int, owner: str) -> Slot | None:
        """The slot, of this size, zeroed and read back; None when it could not be.

        Also a slot that was proved before is read again: the proof counts in the moment in which
        the memory changes hands.
        """
        if slot.state is State.RELEASED:
            slot = self.write(step(slot, Event.EVICT))
        if slot.state is State.FREE:
            slot = self.write(step(slot, Event.DISPROVED))
        slot = self.write(step(replace(slot, size_bytes=size_bytes), Event.ZERO, owner=owner))
        path = self.path(slot.name)
        try:
            path.chmod(0o600)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            memory = ArenaMemory(size_bytes, fd=fd)
            try:
                proved_bytes = zero(memory)
            finally:
                memory.close()
            return self.write(step(slot, Event.PROVED, proved_bytes=proved_bytes))
        except (OSError, ReadyplaneError) as error:
            log.warning("pool: %s could not be zeroed: %s", slot.name, error)
            self.write(step(slot, Event.DISPROVED))
            if isinstance(error, Unavailable):
                raise
            return None

    # ------------------------------------------------------------------- files

    def _names(self) -> list[str]:
        found = (p for p in self.folder.iterdir() if p.suffix in (".arena", ".json"))
        return sorted({path.stem for path in found})

    def _read(self, name: str) -> Slot | None:
        try:
            found = json.loads((self.folder / f"{name}.json").read_text())
            return Slot(**{**found, "state": State(found["state"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _unowned(self) -> Iterator[tuple[Slot, int]]:
        """Slots that nobody has, each under our lock now."""
        for name in self._names():
            lock = self._lock(name)
            if lock is None:
                continue
            slot = self._read(name)
            if slot is None or not self.path(name).exists():
                self._remove(name)
                os.close(lock)
                continue
            if self._mapped(name):
                os.close(lock)
                continue
            yield self.write(left_alone(slot)), lock

    def _mapped(self, name: str) -> bool:
        """Whether an engine has adopted it, which may outlive the agent (see `adopt`)."""
        fd = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One agent of the node chooses at a time: two would count the same room."""
        fd = os.open(self.folder / "choosing", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _lock(self, name: str) -> int | None:
        fd = os.open(self.folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        return fd

    def _remove(self, name: str) -> None:
        """Give a slot's memory back to the kernel, which clears it; call it under its lock."""
        for ending in ("arena", "json", "lock"):
            with suppress(FileNotFoundError):
                (self.folder / f"{name}.{ending}").unlink()


def zero(memory: ArenaMemory) -> int:
    """Overwrite all of it and read it back; returns how many bytes, from the first, are zero."""
    memory.prefault(0, memory.size_bytes)
    proved = 0
    for at in range(0, memory.size_bytes, PIECE_BYTES):
        piece = memory.view[at : at + PIECE_BYTES]
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(piece)), 0, len(piece))
    for at in range(0, memory.size_bytes, PIECE_BYTES):
        piece = memory.view[at : at + PIECE_BYTES]
        wanted = _NOTHING.get(len(piece)) or chunk_hash(bytes(len(piece)))
        if chunk_hash(piece) != wanted:
            break
        proved += len(piece)
    return proved
