"""`make bench-kv`: the KV index against Dynamo's RadixTree, fed with the same events.

Prints at the end

    bench-kv lookup_ratio= apply_cpu_ratio= memory_ratio=

each ours over theirs: median time of a lookup of 128 blocks, CPU of all threads for each block
applied from wire bytes, resident memory of what is known at the end. 64 workers, 1,000,000 blocks
announced, each on 4 workers, a quarter of them pushed out again; the sides take turns part by part
in processes of their own, and every answer is compared. Without `.venv-peers` it says `not run`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.kv_workload import make, write

ROOT = Path(__file__).resolve().parents[1]
SIDE = ROOT / "bench" / "kv_side.py"
PEER = ROOT / ".venv-peers" / "bin" / "python"


@dataclass(slots=True)
class Side:
    """One process and what it said."""

    name: str
    process: subprocess.Popen[str]
    cpu_s: float = 0.0
    look_s: list[float] = field(default_factory=list)
    memory: int = 0

    def ask(self, what: object) -> Any:
        """One line there, one line back."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def play(self, part: Path) -> list[Any]:
        """Apply one part; returns what its lookups found."""
        answer = self.ask(part)
        self.cpu_s += answer["cpu_s"]
        self.look_s += answer["look_s"]
        self.memory = answer["memory"]
        return list(answer["found"])

    def text(self, told: int) -> str:
        """Its figures."""
        looks = sorted(self.look_s)
        p50, p99 = (1e6 * looks[int(q * (len(looks) - 1))] for q in (0.5, 0.99))
        return (
            f"{self.name:>6}: lookup p50 {p50:.1f} us, p99 {p99:.1f} us; "
            f"{1e6 * self.cpu_s / told:.3f} us CPU a block; {self.memory / 2**20:.1f} MiB"
        )


def start(name: str, python: Path) -> Side:
    """Start one side."""
    process = subprocess.Popen(
        [python, SIDE, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    return Side(name, process)


def run(announcements: int, seed: int) -> dict[str, float]:
    """The ratios of one interleaved run.

    Raises:
        AssertionError: the sides answered differently.
    """
    blocks, steps = make(announcements, seed)
    with tempfile.TemporaryDirectory() as folder:
        parts, told = write(blocks, steps, Path(folder))
        del blocks, steps
        ours, theirs = start("ours", Path(sys.executable)), start("theirs", PEER)
        try:
            for number, (mine, other) in enumerate(parts):
                turns = [(ours, mine), (theirs, other)]
                first, second = turns if number % 2 else turns[::-1]
                found = first[0].play(first[1]), second[0].play(second[1])
                assert found[0] == found[1], f"part {number}: the answers differ"
            rebuilt = ours.ask("rebuild")
        finally:
            for side in (ours, theirs):
                side.process.kill()
                side.process.wait()
    print(f"{told} blocks stored or removed, {len(ours.look_s)} lookups, the same answers")
    for side in (ours, theirs):
        print(side.text(told))
    size, blocks = rebuilt["bytes"], rebuilt["blocks"]
    print(f"  ours: {blocks} blocks rebuilt from snapshots ({size / blocks:.1f} B each)", end="")
    print(f" in {rebuilt['cpu_s']:.2f} s CPU")
    return {
        "lookup_ratio": statistics.median(ours.look_s) / statistics.median(theirs.look_s),
        "apply_cpu_ratio": ours.cpu_s / theirs.cpu_s,
        "memory_ratio": ours.memory / theirs.memory,
    }


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--announcements", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if not PEER.exists():
        print("bench-kv not run: there is no .venv-peers (make bench-kv makes it)")
        return
    ratios = run(given.announcements, given.seed)
    print("bench-kv " + " ".join(f"{name}={value:.3f}" for name, value in ratios.items()))


if __name__ == "__main__":
    main()
