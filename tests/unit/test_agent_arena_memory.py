"""The memory of an arena: where it is mapped, so that huge pages fit."""

import mmap
import random

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
