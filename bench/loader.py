"""`make bench-loader`: the agent's loader against raw reads and against other loaders.

Prints at the end

    bench-loader warm_ratio= cold_ratio= peer_warm_ratio= peer_cold_ratio= extra_mib= cpu_ratio=
        mapped_warm_ratio= mapped_cold_ratio=

`warm_ratio`, `cold_ratio`: ours (read, verified, placed) over the best raw, unverified read of the
same files into the same memory, over numbers of threads, sizes of chunk, and direct or buffered.
`peer_*`: ours over the best of safetensors, runai-model-streamer, fastsafetensors and tensorizer,
none of which verifies, each the way it is meant and copied into memory that was there before.
`extra_mib`: resident memory beyond the final place. `cpu_ratio`: CPU seconds over those of the best
peer, the worse of warm and cold.

Each ratio is the median over rounds of ours over the other's run in the same round, run in random
order; cold means that every file is taken out of the page cache before each run. `safetensors-touch`
maps the page cache and copies nothing, so it is compared with ours that does the same and verifies
(`--weights-memory map`, then adopted and touched by an engine): `mapped_*` are ours so over the best
of all peers, this one among them. Without `.venv-loader-peers` the peers' ratios say `nan`, and why.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.loader_data import checkpoint, drop, warm

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".venv-loader-peers" / "bin" / "python"
PLACING = (
    "safetensors+arena",
    "runai",
    "runai+arena",
    "fastsafetensors",
    "fastsafetensors+arena",
    "tensorizer",
    "tensorizer+arena",
)
MAPPING = "safetensors-touch"
OURS, FRESH, MAPPED = "ours", "ours-fresh", "ours-mapped"
RAW_KEPT = 3
FIRST = -15
MIB = 2**20


class Process:
    """One side: a line of JSON there, a line back."""

    def __init__(self, *words: str | Path, undisturbed: bool) -> None:
        self._process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        if undisturbed:
            # A session is a group of its own to the scheduler: niceness within one says nothing.
            Path(f"/proc/{self._process.pid}/autogroup").write_text(str(FIRST))
            os.setpriority(os.PRIO_PROCESS, self._process.pid, FIRST)
        self.greeting = self._answer()

    def ask(self, **question: Any) -> dict[str, Any]:
        """One command.

        Raises:
            RuntimeError: the side has ended.
        """
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a side ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.wait()


@dataclass(slots=True)
class Runs:
    """All runs of one way of loading, in the order of the rounds."""

    name: str
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    extra_bytes: int = 0

    def add(self, answer: dict[str, Any]) -> None:
        """One more run."""
        self.wall_s.append(answer["wall_s"])
        self.cpu_s.append(answer["cpu_s"])
        self.extra_bytes = max(self.extra_bytes, answer["extra_bytes"])

    def over(self, other: Runs) -> float:
        """Median of the ratios of the runs of each round."""
        return statistics.median(
            mine / theirs for mine, theirs in zip(self.wall_s, other.wall_s, strict=True)
        )

    def text(self, size_bytes: int) -> str:
        """Its figures."""
        middle = statistics.median(self.wall_s)
        return (
            f"  {self.name:24} {middle:7.3f} s ({min(self.wall_s):.3f} to {max(self.wall_s):.3f})"
            f" {size_bytes / middle / 1e9:6.2f} GB/s {statistics.median(self.cpu_s):6.2f} CPU s"
            f" {self.extra_bytes / MIB:8.1f} MiB more"
        )


class Bench:
    """Both sides on one checkpoint."""

    def __init__(self, folder: Path, shards: int, seed: int, *, undisturbed: bool) -> None:
        self.folder = folder
        self.manifest = checkpoint(folder, shards=shards)
        self._random = random.Random(seed)
        ours = (sys.executable, "-m", "bench.loader_ours", folder)
        self._ours = Process(*ours, undisturbed=undisturbed)
        print(f"{self.manifest.size_bytes / 1e9:.2f} GB, arena: {self._ours.greeting['pages']}")
        self._peers = None
        if PEER.exists():
            self._peers = Process(PEER, "bench/loader_peers.py", folder, undisturbed=undisturbed)
            print(f"peers in .venv-loader-peers, torch {self._peers.greeting['torch']}")
        else:
            print("peers not run: there is no .venv-loader-peers (make bench-loader makes it)")

    def end(self) -> None:
        """Stop both."""
        for side in (self._ours, self._peers):
            if side is not None:
                side.end()

    def check(self) -> None:
        """Both sides place the right bytes, warm and cold.

        Raises:
            AssertionError: they do not.
        """
        for cold in (False, True):
            self._ours.ask(do="wipe")
            self._ready("safetensors", cold=cold)
            assert self._ours.ask(do="load", check=True)["right"], "ours placed a wrong byte"
        for name in PLACING:
            if self._peers is not None and name.endswith("+arena"):
                self._peers.ask(do="run", name=name)
                assert self._peers.ask(do="right")["right"], f"{name} placed a wrong byte"
        print("every way of placing was checked byte by byte")

    def _ready(self, kind: str, *, cold: bool) -> None:
        if cold:
            drop(self.folder)
        else:
            warm(self.folder, kind)

    def run(self, name: str, *, cold: bool) -> dict[str, Any]:
        """One run of anything."""
        self._ready("tensors" if name.startswith("tensorizer") else "safetensors", cold=cold)
        if name == OURS:
            return self._ours.ask(do="load")
        if name == MAPPED:
            found = self._ours.ask(do="mapped")
            assert found["mapped"] or cold, "a warm cache was not mapped"
            return found
        if name == FRESH:
            return self._ours.ask(do="fresh")
        if name.startswith("raw"):
            _, threads, chunk, way = name.split()
            return self._ours.ask(
                do="raw", threads=int(threads), chunk=int(chunk) * MIB, direct=way == "direct"
            )
        assert self._peers is not None
        return self._peers.ask(do="run", name=name)

    def best_raw(self, *, cold: bool) -> list[str]:
        """The fastest ways to read raw; the best of these is taken by the rounds that follow."""
        ways = [
            f"raw {threads} {chunk} {way}"
            for threads in (1, 2, 4, 8)
            for chunk in (1, 4, 8, 16)
            for way in (("buffered", "direct") if cold else ("buffered",))
        ]
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(2):
            self._random.shuffle(ways)
            for way in ways:
                took[way].append(self.run(way, cold=cold)["wall_s"])
        return sorted(took, key=lambda way: min(took[way]))[:RAW_KEPT]

    def rounds(self, count: int, *, cold: bool) -> dict[str, Runs]:
        """Every way once a round, in random order."""
        drop(self.folder)  # else what is warm depends on who read it before, and in which pieces
        raws = self.best_raw(cold=cold)
        names = [OURS, FRESH, MAPPED, *raws]
        if self._peers is not None:
            names += [*PLACING, MAPPING]
        found = {name: Runs(name) for name in names}
        for _ in range(count):
            self._random.shuffle(names)
            for name in names:
                found[name].add(self.run(name, cold=cold))
        return found


def fastest(runs: Iterable[Runs]) -> Runs | None:
    """The one with the smallest median, None of nothing."""
    return min(runs, key=lambda r: statistics.median(r.wall_s), default=None)


def mapped(found: dict[str, Runs]) -> float:
    """Ours that maps the page cache over the best of all peers; nan where they did not run."""
    peer = fastest(found[name] for name in (*PLACING, MAPPING) if name in found)
    return math.nan if peer is None else found[MAPPED].over(peer)


def judge(found: dict[str, Runs], size_bytes: int, title: str) -> tuple[float, float, float]:
    """Print one state of the cache; returns (over the best raw, over the best peer, CPU ratio)."""
    print(f"{title}:")
    for runs in sorted(found.values(), key=lambda r: statistics.median(r.wall_s)):
        print(runs.text(size_bytes))
    ours = found[OURS]
    raw = fastest(r for n, r in found.items() if n.startswith("raw"))
    assert raw is not None
    print(f"  over {raw.name}: {ours.over(raw):.3f} by rounds, ", end="")
    print(f"{min(ours.wall_s) / min(raw.wall_s):.3f} at their best")
    for name, runs in found.items():
        if name in PLACING or name == MAPPING:
            remark = " (copies nothing, places nothing)" if name == MAPPING else ""
            print(
                f"  over {name}: {ours.over(runs):.3f}; into fresh memory "
                f"{found[FRESH].over(runs):.3f}; mapped {found[MAPPED].over(runs):.3f}{remark}"
            )
    peer = fastest(found[name] for name in PLACING if name in found)
    if peer is None:
        return ours.over(raw), math.nan, math.nan
    cpu = statistics.median(ours.cpu_s) / statistics.median(peer.cpu_s)
    return ours.over(raw), ours.over(peer), cpu


def main() -> None:
    """Print the line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=5, help="of 436 MB each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench-loader")
    parser.add_argument(
        "--undisturbed", action="store_true", help="all sides go before other work (root)"
    )
    given = parser.parse_args()
    folder = given.folder / str(given.shards)
    bench = Bench(folder, given.shards, given.seed, undisturbed=given.undisturbed)
    try:
        bench.check()
        size_bytes = bench.manifest.size_bytes
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        hot = bench.rounds(given.rounds, cold=False)
        warm_ratio, peer_warm, warm_cpu = judge(hot, size_bytes, "warm")
        cold = bench.rounds(given.rounds, cold=True)
        cold_ratio, peer_cold, cold_cpu = judge(cold, size_bytes, "cold")
        print(f"load average {os.getloadavg()[0]:.1f}")
    finally:
        bench.end()
    extra_mib = max(hot[OURS].extra_bytes, cold[OURS].extra_bytes) / MIB
    print(
        f"bench-loader warm_ratio={warm_ratio:.3f} cold_ratio={cold_ratio:.3f}"
        f" peer_warm_ratio={peer_warm:.3f} peer_cold_ratio={peer_cold:.3f}"
        f" extra_mib={extra_mib:.1f} cpu_ratio={max(warm_cpu, cold_cpu):.3f}"
        f" mapped_warm_ratio={mapped(hot):.3f} mapped_cold_ratio={mapped(cold):.3f}"
    )


if __name__ == "__main__":
    main()
