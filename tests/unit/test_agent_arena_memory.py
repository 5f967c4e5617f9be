"""The memory of an arena: where it is mapped, so that huge pages fit."""

import errno
import fcntl
import mmap
import random

import pytest

from readyplane.core.errors import Unavailable
from readyplane_agent import arena_memory
from readyplane_agent.arena_memory import ArenaMemory

MIB = 2**20


def test_an_arena_is_aligned_for_huge_pages_in_a_process_with_gaps_of_every_size() -> None:
    rng = random.Random(7)
    others: list[mmap.mmap] = []
    for _ in range(60):
        others += [mmap.mmap(-1, rng.randint(1, 24 * MIB)) for _ in range(3)]
        others.pop(rng.randrange(len(others))).close()
        memory = ArenaMemory(rng.randint(3 * MIB, 30 * MIB))
        assert memory.prefault(0, 2 * MIB)
        assert "multiple of 2 MiB" not in memory.faulted.why_small
        memory.close()
    for other in others:
        other.close()


def test_a_seal_waits_for_a_page_that_the_kernel_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = [OSError(errno.EBUSY, "busy")] * 3
    really = fcntl.fcntl

    def now_and_then(fd: int, command: int, given: int) -> int:
        if busy:
            raise busy.pop()
        return really(fd, command, given)

    monkeypatch.setattr(arena_memory, "_SEAL_PAUSE_S", 0.0)
    monkeypatch.setattr(fcntl, "fcntl", now_and_then)
    memory = ArenaMemory(MIB)
    memory.seal()
    assert memory.sealed
    assert busy == []
    assert really(memory.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE
    memory.close()


def test_memory_that_somebody_can_write_to_is_not_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_memory, "_SEAL_PAUSE_S", 0.0)
    memory = ArenaMemory(MIB)
    other = mmap.mmap(memory.fd, MIB)
    with pytest.raises(Unavailable, match="keep no writable map"):
        memory.seal()
    other.close()
