"""A group of two real rank processes, killed at each step: nothing partial is ever routable (R17)."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane.ports import GroupStatus, RankReport
from readyplane_agent.engines.layout import arena_layout, tensor_table_document
from readyplane_lab.up.demo_model import make_demo_model
from readyplane_registry.ingest import Facts, build_manifest
from readyplane_router.epochs import MemoryEpochs
from readyplane_router.group import STEPS
from readyplane_router.service import RouterService
from readyplane_router.store import MemoryStore
from tests.router_world import PROFILE, FakeWorker, Registry, offer

WORLD = 2
LIMIT_S = 30.0


class Ranks:
    """Two ranks and the router that hears of them."""

    def __init__(self, folder: Path) -> None:
        demo = make_demo_model(folder / "m", size_bytes=8 * 2**20, shards=2, max_model_len=4096)
        facts = Facts(config=demo.config, canary=demo.canary)
        self.manifest, *_ = build_manifest(demo.folder, model="demo", facts=facts)
        layout = arena_layout(self.manifest)
        self.arena, self.table = folder / "arena", folder / "tensors.json"
        data = bytearray(layout.size_bytes)
        for path, at in layout.file_offsets.items():
            content = (demo.folder / path).read_bytes()
            data[at : at + len(content)] = content
        self.arena.write_bytes(data)
        document = tensor_table_document(layout, manifest_digest=self.manifest.digest)
        self.table.write_text(json.dumps(document))
        clock = SystemClock()
        self.router = RouterService(
            store=MemoryStore(clock),
            epochs=MemoryEpochs(),
            clock=clock,
            registry=Registry(self.manifest),
            profiles={PROFILE.name: PROFILE},
            incarnation="router-1",
        )
        self.processes: list[asyncio.subprocess.Process] = []
        self.seen: list[tuple[int, str]] = []
        self.status = GroupStatus("forming")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    async def begin(self, *, wait_at: dict[int, str]) -> FakeWorker:
        await self.router.start()
        made = offer("g", Role.PREFILL, ranks=WORLD, manifest_digest=self.manifest.digest)
        worker = FakeWorker(self.router, made)
        await worker.register()
        canary = self.manifest.canary
        assert canary is not None
        for rank in range(WORLD):
            words = {
                "rank": rank,
                "world": WORLD,
                "life": 0,
                "communicator": 0,
                "rendezvous": self.port,
                "arena": self.arena,
                "table": self.table,
                "manifest-digest": self.manifest.digest,
                "prompt": ",".join(map(str, canary.prompt_token_ids)),
                "golden": ",".join(map(str, canary.golden_token_ids)),
                "wait-at": wait_at.get(rank, ""),
            }
            flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
            self.processes.append(
                await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "readyplane_agent.engines.modelled.rank", *flags),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
            )
        return worker

    async def forward(self, worker: FakeWorker, rank: int) -> None:
        """What one rank says goes to the router; that it is gone is told as well."""
        process = self.processes[rank]
        assert process.stdout is not None
        while line := await process.stdout.readline():
            told: dict[str, Any] = json.loads(line)
            await self._report(worker, told)
            self.seen.append((rank, told["step"]))
        code = await process.wait()
        if code:
            await self._report(worker, {"rank": rank, "step": "failed", "detail": f"exit {code}"})
            self.seen.append((rank, "gone"))

    async def _report(self, worker: FakeWorker, told: dict[str, Any]) -> None:
        who = worker.offer
        report = RankReport(who.worker_id, who.incarnation, worker.lease.epoch, **told)
        self.status = await self.router.report_rank(report)

    async def until(self, rank: int, step: str) -> None:
        async with asyncio.timeout(LIMIT_S):
            while (rank, step) not in self.seen:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def ranks(
    folder: Path, wait_at: dict[int, str]
) -> AsyncIterator[tuple[Ranks, FakeWorker, list[asyncio.Task[None]]]]:
    made = Ranks(folder)
    worker = await made.begin(wait_at=wait_at)
    hearing = [asyncio.create_task(made.forward(worker, rank)) for rank in range(WORLD)]
    try:
        yield made, worker, hearing
    finally:
        for process in made.processes:
            if process.returncode is None:
                process.kill()
        await asyncio.wait(hearing, timeout=LIMIT_S)


async def test_two_ranks_read_their_own_halves_and_answer_as_one(tmp_path: Path) -> None:
    async with ranks(tmp_path, {}) as (group, worker, _):
        for rank in range(WORLD):
            await group.until(rank, "canary_passed")
        assert group.status.state == "published" and group.status.group_epoch > 0
        group.processes[1].kill()  # after the barrier: the generation is over as a whole
        await group.until(1, "gone")
        assert group.status.state == "failed"
        assert "the group is failed" in "; ".join(await worker.admit())


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("victim", range(WORLD))
async def test_a_rank_killed_at_a_step_fails_the_generation_and_frees_the_other(
    tmp_path: Path, step: str, victim: int
) -> None:
    wait_at = {victim: step} if step != STEPS[-1] else {0: STEPS[-2], 1: STEPS[-2]}
    async with ranks(tmp_path, wait_at) as (group, worker, hearing):
        for rank, at in wait_at.items():
            await group.until(rank, at)
        assert group.status.state == "forming"
        group.processes[victim].kill()
        await group.until(victim, "gone")
        assert group.status.state == "failed" and group.status.group_epoch == 0
        assert "the group is failed" in "; ".join(await worker.admit())
        (directive,) = (await worker.renew()).directives
        assert directive.kind == "stop" and "its group failed: rank" in directive.reason
        # What the other one is told to do: it ends, and nothing it says brings the group back.
        other = group.processes[1 - victim]
        assert other.stdin is not None
        other.stdin.close()
        if step != STEPS[-2]:
            other.terminate()
        await asyncio.wait(hearing, timeout=LIMIT_S)
        assert all(process.returncode is not None for process in group.processes)
        assert group.status.state == "failed" and group.status.group_epoch == 0
