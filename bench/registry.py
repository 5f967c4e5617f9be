"""The registry with 10,000 manifests on a real Postgres, and killed while it is written to.

`python -m bench.registry [--manifests N] [--calls N] [--kills N] [--seed N]`. Prints at the end:

    bench-registry manifests= publish_p50_ms= publish_p99_ms= plan_p50_ms= plan_p99_ms= kills=
                   accepted= half= resolve_p50_ms= resolve_p99_ms= lost=

publish_*: one manifest over gRPC with one caller, when the others are there. resolve_*: over gRPC,
one at a time, a mix of digest, tag, model name and model with a need. plan_*: PlanFetch for an
artifact with three live sources. lost: writes (manifests, tags, signatures, origins) that a
registry acknowledged before it was killed and that are not there afterwards; half: what is there
in part (a listed manifest without bytes, a hole in a tag's history, a blob that is not its name).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from bench.own_services import Own, own_services
from bench.registry_kills import Kills, kill_while_writing
from bench.registry_writers import document_of
from readyplane.client import RegistryClient
from readyplane.core.startup import WeightTier
from readyplane.ports import Source

VERSIONS = 100
"""Of one model, so that 10,000 manifests are of 100 models."""
PUBLISHERS = 16
SOURCES = 3


async def fill(client: RegistryClient, count: int) -> list[tuple[str, str, str]]:
    """(model, tag, digest) of what was published; each tag points at one version of a model."""
    made: list[tuple[str, str, str]] = []
    gate = asyncio.Semaphore(PUBLISHERS)

    async def one(n: int) -> None:
        model, version = f"model-{n // VERSIONS}", n % VERSIONS
        document = document_of(model, b"%d" % n, str(n))
        document["config"]["version"] = str(version)
        async with gate:
            digest, _created = await client.publish_manifest(document, bytes_elsewhere=True)
            tag = f"{model}/v{version}"
            if version % 10 == 0:
                await client.set_tag(tag, digest)
                made.append((model, tag, digest))

    await asyncio.gather(*(one(n) for n in range(count)))
    return made


async def timed_ms(calls: int, call: Callable[[int], Awaitable[object]]) -> list[float]:
    """Milliseconds of each call, one after the other; the first tenth warms up and is left out."""
    warm = max(1, calls // 10)
    took: list[float] = []
    for n in range(-warm, calls):
        began_s = time.perf_counter()
        await call(n)
        if n >= 0:
            took.append(1e3 * (time.perf_counter() - began_s))
    return took


def quantile(values: list[float], share: float) -> float:
    """The quantile of measured values."""
    return statistics.quantiles(values, n=1000, method="inclusive")[round(share * 1000) - 1]


async def measure(own: Own, folder: Path, count: int, calls: int, seed: int) -> dict[str, float]:
    """Publish, resolve and plan against a registry process."""
    registry = own.services.plan("registry", args=("--blob-dir", str(folder / "blobs")))
    await own.services.start(registry)
    client = RegistryClient(registry.grpc, timeout_s=30.0)
    rng = random.Random(seed)
    try:
        began_s = time.monotonic()
        made = await fill(client, count)
        print(f"{count} manifests published in {time.monotonic() - began_s:.1f} s", flush=True)
        published = await timed_ms(
            calls,
            lambda n: client.publish_manifest(
                document_of("one-more", b"%d" % n, os.urandom(8).hex()), bytes_elsewhere=True
            ),
        )

        def resolve(n: int) -> Awaitable[object]:
            model, tag, digest = rng.choice(made)
            need = {"config.version": str(rng.randrange(VERSIONS // 2, VERSIONS))}
            return [
                lambda: client.resolve(digest),
                lambda: client.resolve(tag),
                lambda: client.resolve(model),
                lambda: client.resolve(model, need=need),
            ][n % 4]()

        resolved = await timed_ms(calls, resolve)
        planned = await timed_ms(calls, await _planner(client, made, rng))
    finally:
        await client.aclose()
    for at, name in enumerate(("digest", "tag", "model", "model and need")):
        part = resolved[at::4]
        print(f"resolve by {name}: p50 {quantile(part, 0.5):.2f} p99 {quantile(part, 0.99):.2f} ms")
    figures = {"manifests": float(count)}
    for name, values in (("publish", published), ("plan", planned), ("resolve", resolved)):
        figures[f"{name}_p50_ms"] = quantile(values, 0.5)
        figures[f"{name}_p99_ms"] = quantile(values, 0.99)
    return figures


async def _planner(
    client: RegistryClient, made: list[tuple[str, str, str]], rng: random.Random
) -> Callable[[int], Awaitable[object]]:
    """A call of PlanFetch for one of a few artifacts that `SOURCES` workers hold."""
    held = [digest for _model, _tag, digest in rng.sample(made, min(50, len(made)))]
    for at, digest in enumerate(held):
        for n in range(SOURCES):
            worker = f"w{at}-{n}"
            await client.announce_source(
                Source(
                    source_id=worker,
                    digest=digest,
                    tier=WeightTier.L1_HOST,
                    url=f"http://127.0.0.1:9/{worker}",
                    worker_id=worker,
                    incarnation=f"{worker}-1",
                    node=f"n{at}",
                )
            )
    return lambda n: client.plan_fetch(
        held[n % len(held)], worker_id="reader", incarnation="reader-1", node="elsewhere"
    )


async def run(folder: Path, given: argparse.Namespace) -> tuple[dict[str, float], Kills]:
    """Both halves on the same stores."""
    async with own_services(folder) as own:
        figures = await measure(own, folder, given.manifests, given.calls, given.seed)
        return figures, await kill_while_writing(own, folder, given.kills, seed=given.seed)


def main() -> int:
    """Measure and print; 1 when anything was lost or is there in part."""
    parser = argparse.ArgumentParser(description="the registry, full and killed")
    parser.add_argument("--manifests", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=2_000, help="of each kind that is timed")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures, kills = asyncio.run(run(Path(folder) / "registry", given))
    for text in (*kills.findings.lost[:10], *kills.findings.half[:10]):
        print(f"WRONG {text}")
    print(f"{kills.kills} kills in {kills.seconds:.0f} s, {kills.unknown} calls cut off")
    lost, half = len(kills.findings.lost), len(kills.findings.half)
    resolve = {n: figures.pop(n) for n in ("resolve_p50_ms", "resolve_p99_ms")}
    told = " ".join(f"{name}={value:.4g}" for name, value in figures.items())
    told += f" kills={kills.kills} accepted={kills.accepted} half={half} "
    told += " ".join(f"{name}={value:.4g}" for name, value in resolve.items())
    print(f"bench-registry {told} lost={lost}")
    return 1 if lost or half else 0


if __name__ == "__main__":
    sys.exit(main())
