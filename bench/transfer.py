"""`make bench-transfer`: weights from agent to agent, against a plain stream and against serving.

Prints `bench-transfer tcp_ratio= fanout_ratio= interference_ratio=` at the end.

tcp_ratio: throughput of one load from one peer (`Loader`, `TransferServer`, chunks hashed by the
receiver) over that of one plain TCP stream of the same bytes that hashes alike, both into memory
faulted in before; median over rounds in turns. Against four plain streams, as many as a load has, it
is printed above.
fanout_ratio: seconds until eight starters have everything from one source over seconds of one, every
agent's egress capped equally. interference_ratio: the source's time per output token, and the P99 of
its KV transfers, with a push over without; the worse of the two (`bench.transfer_serving`). Who pulls
stands for another machine: it asks at the source's door as a load does, and drops the bytes in the
kernel (`--reader puller` is a whole load on the same processors instead).

A figure that could not be taken is printed as nan, with the reason above it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from bench.transfer_arms import (
    Window,
    kv_quantile_s,
    kv_ratio,
    pushed_bytes_per_s,
    tpot_ratio,
    tpot_s,
)
from bench.transfer_serving import served, window
from readyplane.core.identity import (
    CHUNK_BYTES_DEFAULT,
    ArtifactKind,
    FileEntry,
    Manifest,
    TensorEntry,
    chunk_hash,
    digest_of_bytes,
)
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.rpc import Guard
from readyplane_registry import rpc
from readyplane_registry.blobs import MemoryBlobs
from readyplane_registry.fetching import RegistryPolicy
from readyplane_registry.live import MemoryLive
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog

ANSWER_LIMIT_S = 180.0
WINDOWS_MIN = 2
KV_QUANTILES = (0.5, 0.9, 0.99)
READERS = {
    "far": "a stand-in for another machine, which drops the bytes in the kernel",
    "puller": "a whole load on the same processors",
}
# A push comes first as often as last, so that a drift of the machine counts for neither.
TURNS = (("push", "without"), ("again", "push"), ("push", "again"), ("without", "push"))


def make_artifact(folder: Path, *, size_bytes: int, chunk_bytes: int) -> Manifest:
    """Random bytes in one file with one tensor, and the manifest of it beside them."""
    data = np.random.default_rng(7).integers(0, 256, size_bytes, dtype=np.uint8).tobytes()
    (folder / "weights.bin").write_bytes(data)
    entry = FileEntry(
        path="weights.bin",
        size_bytes=size_bytes,
        sha256=digest_of_bytes(data),
        chunks=tuple(
            chunk_hash(data[at : at + chunk_bytes]) for at in range(0, size_bytes, chunk_bytes)
        ),
    )
    tensor = TensorEntry("w", "U8", (size_bytes,), "weights.bin", 0, size_bytes)
    manifest = Manifest(
        ArtifactKind.WEIGHTS,
        "bench",
        (entry,),
        (tensor,),
        chunk_bytes=chunk_bytes,
        config={"max_model_len": 4096, "vocab_size": 512, "eos_token_id": 2},
    )
    (folder / "manifest.json").write_text(json.dumps(manifest.document()))
    return manifest


@asynccontextmanager
async def registry(manifest: Manifest) -> AsyncIterator[str]:
    """A registry over gRPC with memory stores that knows the artifact; its address."""
    ids = itertools.count()
    clock = SystemClock()
    policy = RegistryPolicy()
    service = RegistryService(
        store=MemoryCatalog(),
        live=MemoryLive(clock, weight=policy.ranking.weight),
        blobs=MemoryBlobs(),
        clock=clock,
        make_id=lambda: f"transfer-{next(ids)}",
        storage_url=lambda: "",
        policy=policy,
    )
    await service.publish_manifest(manifest.document(), bytes_elsewhere=True)
    server = grpc.aio.server(interceptors=(Guard(TokenCheck("")),))
    rpc.register(server, service)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


class Child:
    """One process of `bench.transfer_sides`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def answer(self) -> dict[str, Any]:
        """Its next line."""
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_LIMIT_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process of the bench ended early; see what it wrote above")
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, line: str) -> None:
        """Give it an order."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())


@asynccontextmanager
async def child(
    kind: str,
    name: str,
    folder: Path,
    address: str,
    *,
    rate: float = 0.0,
    readers: int = 2,
    engine_url: str = "",
) -> AsyncIterator[Child]:
    """A child that ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.transfer_sides", kind),
        *("--name", name, "--folder", str(folder), "--registry", address),
        *("--rate", str(rate), "--readers", str(readers), "--engine-url", engine_url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    try:
        yield Child(process)
    finally:
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(5.0):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def against_plain(folder: Path, *, size_bytes: int, rounds: int) -> float:
    """Our throughput over that of one plain stream, median over rounds."""
    manifest = make_artifact(folder, size_bytes=size_bytes, chunk_bytes=CHUNK_BYTES_DEFAULT)
    async with (
        registry(manifest) as address,
        child("source", "s0", folder, address) as source,
        child("versus", "r0", folder, address) as reader,
    ):
        told = await source.answer()
        await reader.answer()
        ratios: dict[str, list[float]] = {"plain1": [], "plain4": []}
        for number in range(rounds + 1):
            reader.tell(f"round {told['plain']}")
            seen = await reader.answer()
            ours = seen["ours"]["seconds"]
            assert sum(seen["ours"]["given"].values()) == size_bytes
            print(
                f"  round {number}: ours {size_bytes / ours / 1e9:.2f} GB/s, plain streams "
                f"{size_bytes / seen['plain1'] / 1e9:.2f} (1) and "
                f"{size_bytes / seen['plain4'] / 1e9:.2f} (4)"
                + ("" if number else " (to warm up, not counted)")
            )
            for kind, found in ratios.items():
                if number:
                    found.append(seen[kind] / ours)
        medians = {kind: statistics.median(found) for kind, found in ratios.items()}
        print(f"  of one stream {medians['plain1']:.3f}, of four {medians['plain4']:.3f}")
        return medians["plain1"]


async def fan_out(
    folder: Path, *, size_bytes: int, chunk_bytes: int, rate: float, starters: int, readers: int
) -> float:
    """Seconds until all of `starters` have everything, from one source that holds it."""
    manifest = make_artifact(folder, size_bytes=size_bytes, chunk_bytes=chunk_bytes)
    async with registry(manifest) as address, AsyncExitStack() as stack:
        source = await stack.enter_async_context(
            child("source", "s0", folder, address, rate=rate, readers=readers)
        )
        await source.answer()
        children = [
            await stack.enter_async_context(
                child("starter", f"w{n}", folder, address, rate=rate, readers=readers)
            )
            for n in range(starters)
        ]
        for each in children:
            await each.answer()
        for each in children:
            each.tell("go")
        results = [await each.answer() for each in children]
        begun_s, ended_s = min(r["begun_s"] for r in results), max(r["at_s"] for r in results)
        for n, result in enumerate(results):
            given = {k.split(":")[1]: round(v / size_bytes, 2) for k, v in result["given"].items()}
            faults = f", {len(result['faults'])} faults" if result["faults"] else ""
            print(f"  w{n}: {result['seconds']:.2f} s, shares {given}{faults}")
        return float(ended_s - begun_s)


async def beside_serving(
    folder: Path, *, size_bytes: int, rate: float, windows: int, window_s: float, reader: str
) -> float:
    """The worse of TPOT and KV-transfer P99 of a source, with a push over without.

    Every other window without a push counts as `again`: what it shows over the rest is chance.
    """
    manifest = make_artifact(folder, size_bytes=size_bytes, chunk_bytes=2**20)
    arms: dict[str, list[Window]] = {"without": [], "again": [], "push": []}
    async with (
        served(folder) as (load, decode),
        registry(manifest) as address,
        child("source", "s0", folder, address, rate=rate, engine_url=decode.url) as source,
        child(reader, "r0", folder, address) as pulls,
    ):
        told = await source.answer()
        await pulls.answer()
        for number in range(windows):
            for arm in TURNS[number % len(TURNS)]:
                source.tell("?")
                before = await source.answer()
                if arm == "push":
                    pulls.tell(f"on {told['url']} {told['query']}")
                seen = await window(load, decode, window_s)
                source.tell("?")
                after = await source.answer()
                seen.pushed_bytes = after["served"] - before["served"]
                arms[arm].append(seen)
                if arm == "push":
                    pulls.tell("off")
                    await pulls.answer()
                    rate_now = "no" if after["rate"] is None else f"{after['rate'] / 1e6:.0f} MB/s"
                    print(f"  turn {number}: {rate_now} bound at its end, {after['why']}")
    return compared(arms, READERS[reader])


def compared(arms: Mapping[str, list[Window]], pulled_by: str) -> float:
    """The worse of TPOT and KV-transfer P99 of `push` over the windows without; prints what it saw."""
    for arm, found in arms.items():
        quantiles = ", ".join(
            f"P{100 * q:.0f} {kv_quantile_s(found, q) * 1e3:.2f}" for q in KV_QUANTILES
        )
        print(
            f"  {arm}: TPOT {tpot_s(found) * 1e3:.2f} ms, KV transfer {quantiles} ms of "
            f"{sum(len(w.kv_s) for w in found)}, {pushed_bytes_per_s(found) / 1e6:.1f} MB/s given"
        )
    plain = arms["without"] + arms["again"]
    print(f"  pulled by {pulled_by}; intervals hold 9 of 10 resamples")
    for what, one, other in (
        ("again over without (chance)", arms["again"], arms["without"]),
        ("push over both", arms["push"], plain),
    ):
        ratios = ", ".join(f"P{100 * q:.0f} {kv_ratio(one, other, q)}" for q in KV_QUANTILES)
        print(f"  {what}: TPOT {tpot_ratio(one, other)}, KV transfer {ratios}")
    push = arms["push"]
    return max(tpot_ratio(push, plain).value, kv_ratio(push, plain, 0.99).value)


async def measure(options: argparse.Namespace) -> dict[str, float]:
    """All figures that were asked for."""
    found = dict.fromkeys(("tcp_ratio", "fanout_ratio", "interference_ratio"), math.nan)
    shm = Path("/dev/shm")
    where = shm if shm.is_dir() else None
    if "tcp" in options.only:
        with tempfile.TemporaryDirectory(dir=where) as folder:
            found["tcp_ratio"] = await against_plain(
                Path(folder), size_bytes=options.mib * 2**20, rounds=options.rounds
            )
    if "fanout" in options.only:
        size = {"size_bytes": options.fanout_mib * 2**20, "chunk_bytes": 256 * 2**10}
        rate = options.rate_mb_per_s * 1e6
        took = []
        for count in (1, options.starters):
            with tempfile.TemporaryDirectory(dir=where) as folder:
                took.append(
                    await fan_out(
                        Path(folder), **size, rate=rate, starters=count, readers=options.readers
                    )
                )
            print(f"  {count} starters: {took[-1]:.2f} s at {options.rate_mb_per_s:g} MB/s each")
        found["fanout_ratio"] = took[1] / took[0]
    if "serving" in options.only:
        with tempfile.TemporaryDirectory(dir=where) as folder:
            found["interference_ratio"] = await beside_serving(
                Path(folder),
                size_bytes=256 * 2**20,
                rate=options.push_mb_per_s * 1e6,
                windows=options.windows,
                window_s=options.window_s,
                reader=options.reader,
            )
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", default=["tcp", "fanout", "serving"])
    parser.add_argument("--mib", type=int, default=512, help="size of the load from one peer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fanout-mib", type=int, default=32)
    parser.add_argument("--rate-mb-per-s", type=float, default=8.0, help="every agent's egress")
    parser.add_argument("--starters", type=int, default=8)
    parser.add_argument("--readers", type=int, default=2, help="readers' places of each agent")
    parser.add_argument("--push-mb-per-s", type=float, default=100.0, help="most beside serving")
    parser.add_argument("--windows", type=int, default=26, help="with a push, and without")
    parser.add_argument("--window-s", type=float, default=3.0)
    parser.add_argument(
        "--reader",
        choices=tuple(READERS),
        default="far",
        help="who pulls beside serving: a stand-in for another machine, or a whole load here",
    )
    options = parser.parse_args()
    if options.windows < WINDOWS_MIN:
        parser.error(f"--windows: at least {WINDOWS_MIN}, so that chance is seen as well")
    found = asyncio.run(measure(options))
    print("bench-transfer " + " ".join(f"{name}={value:.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
