"""Shared memory of vLLM processes that are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from readyplane_agent.engines.vllm_shared import remove, shared_by

# Makes shared memory and waits; whatever would remove it later is told to leave it.
MAKES = """
import sys
from multiprocessing import resource_tracker, shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")
print(memory.name, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_shared_is_found_before_and_removed_after() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MAKES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = Path("/dev/shm", process.stdout.readline().strip())
        found = shared_by([process.pid, 2**22 + 1])
        process.kill()
    assert found == {path}
    assert path.exists(), "it was killed"
    remove(found)
    assert not path.exists()
    remove(found)  # its owner was quicker


def test_other_files_that_are_mapped_are_nobodys_to_remove() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    ) as process:
        assert shared_by([process.pid]) == frozenset()
        process.kill()
