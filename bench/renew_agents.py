"""Agents for the renewal bench, in a process of their own: lean, so that the router is measured.

`python -m bench.renew_agents --router HOST:PORT --sessions HOST:PORT --workers N --ready-file FILE`. Each worker passes
the gate as an attached one, then renews once a second over a stream and a connection of its own,
with a load report that changes. Prints `renewed N` every second.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from pathlib import Path

import grpc.aio

from readyplane import profiles, wire
from readyplane.client import RouterClient
from readyplane.core.identity import KvFormat
from readyplane.core.worker import LoadReport, Role, Serving, WorkerOffer
from readyplane.ports import RankReport, Renewal
from readyplane_lab.simulator.evidence import checks_of
from readyplane_router.group import STEPS

PROFILE = profiles.load("h200-llama8b-fp8")
BLOCKS = 10_000
DIGEST = "sha256:" + "0" * 64
ADMITTING_MAX = 16
EVERY_S = 1.0
SPREAD_S = 10.0
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))


class Renewed:
    """Renewals that were answered."""

    count = 0
    failed = 0


async def join(router: RouterClient, number: int, ranks: tuple[str, ...]) -> tuple[str, int]:
    """Through the gate; returns worker id and epoch."""
    role = Role.PREFILL if number % 3 == 0 else Role.DECODE
    name = f"w{number}"
    offer = WorkerOffer(name, f"{name}-1", role, "demo", PROFILE.worker_class, attached=True)
    lease = await router.register(offer)
    group_epoch = 0
    for step in ranks:
        status = await router.report_rank(
            RankReport(name, offer.incarnation, lease.epoch, 0, step, DIGEST)
        )
        group_epoch = status.group_epoch
    serving = Serving(
        engine_url=f"http://127.0.0.1:{1024 + number}",
        kv=KvFormat(DIGEST, block_size=64),
        kv_total_blocks=BLOCKS,
        block_size=64,
        max_model_len=32_768,
        profile=PROFILE.name,
        max_num_seqs=256,
    )
    verdict = await router.admit(
        name,
        offer.incarnation,
        lease.epoch,
        serving=serving,
        checks=checks_of(
            None, blocks=BLOCKS, profile=PROFILE, epoch=lease.epoch, group_epoch=group_epoch
        ),
    )
    if not verdict.admitted:
        raise SystemExit(f"{name} was not admitted: {verdict.reasons}")
    return name, lease.epoch


async def keep(address: str, name: str, epoch: int, phase_s: float, renewed: Renewed) -> None:
    """Renew for ever; messages are bytes, so that this process stays cheap."""
    await asyncio.sleep(phase_s)
    loop = asyncio.get_running_loop()
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
        stream = channel.stream_stream("/readyplane.v1.Router/Session")()  # type: ignore[var-annotated]
        due_s = loop.time()
        for iteration in itertools.count(1):
            load = LoadReport(
                running=8,
                waiting=0,
                waiting_prefill_tokens=100,
                kv_used_blocks=500 + iteration % 7,
                kv_total_blocks=BLOCKS,
                prefill_tokens_total=1_000 * iteration,
                decode_tokens_total=400 * iteration,
                cached_tokens_total=0,
                preemptions_total=0,
                iterations_total=50 * iteration,
                age_s=0.05,
            )
            # As an agent does at this pace: an answer is new enough for one more renewal.
            quiet = iteration % 2 == 0
            renewal = Renewal(name, f"{name}-1", epoch, load=load, quiet=quiet)
            message = wire.renewal_to_proto(renewal, number=iteration)
            await stream.write(message.SerializeToString())
            if not quiet and await stream.read() is grpc.aio.EOF:
                renewed.failed += 1
                print(f"{name}: {await stream.code()} {await stream.details()}", flush=True)
                return
            renewed.count += 1
            due_s = max(due_s + EVERY_S, loop.time() - EVERY_S)
            await asyncio.sleep(max(0.0, due_s - loop.time()))


async def _serve(address: str, sessions: str, workers: int, ready: Path) -> None:
    router, renewed = RouterClient(address, timeout_s=60.0), Renewed()
    turn = asyncio.Semaphore(ADMITTING_MAX)
    joined: list[tuple[str, int]] = []

    async def one(number: int) -> None:
        async with turn:
            joined.append(await join(router, number, STEPS))

    await asyncio.gather(*(one(number) for number in range(workers)))
    keeping = [
        asyncio.create_task(keep(sessions, *worker, n / workers * SPREAD_S, renewed))
        for n, worker in enumerate(joined)
    ]
    while renewed.count < 2 * workers and not any(task.done() for task in keeping):
        await asyncio.sleep(EVERY_S)
    ready.write_text("ready")
    while True:
        print(f"renewed {renewed.count} failed {renewed.failed}", flush=True)
        await asyncio.sleep(1.0)


def main() -> int:
    """Until killed."""
    parser = argparse.ArgumentParser(description="workers that renew")
    parser.add_argument("--router", required=True)
    parser.add_argument("--sessions", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    given = parser.parse_args()
    asyncio.run(_serve(given.router, given.sessions, given.workers, given.ready_file))
    return 0


if __name__ == "__main__":
    sys.exit(main())
