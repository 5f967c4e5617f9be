"""Whom an engine that answers with another one only is proved with."""

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import asdict, replace
from typing import Any

import pytest

from readyplane.core.errors import Unavailable
from readyplane.core.identity import KvFormat
from readyplane.core.worker import Fleet, Role, Serving, Worker, WorkerOffer, WorkerState
from readyplane.kit.clock import SystemClock
from readyplane_agent import meeting
from readyplane_agent.engines.sglang_client import Partner
from readyplane_agent.transfer import TransferServer
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop, run_virtual

KV = KvFormat("sha256:" + "1" * 64, connector="sglang/nixl")
MINE = Serving("http://10.0.0.1:1", KV, 10, 16, 4096, "h", kv_side_channel="10.0.0.1:8998")
THEIRS = replace(MINE, engine_url="http://10.0.0.2:1", kv_side_channel="")
READY, STARTS = WorkerState.READY, WorkerState.PROVISIONED


def worker(
    name: str, role: Role, state: WorkerState, serves: Serving | None = None, url: str = ""
) -> Worker:
    offer = WorkerOffer(name, f"{name}-1", role, "demo", "h", agent_url=url)
    return Worker(offer, 1, state, serves)


def found(workers: list[Worker], limit_s: float = 5.0) -> Partner:
    """Whom a prefill worker is proved with."""

    async def story(clock: Any) -> Partner:
        async def listed() -> Fleet:
            return Fleet(1, {w.worker_id: w for w in workers})

        return await meeting.partner_for(
            listed, worker_id="p0", role=Role.PREFILL, serving=MINE, clock=clock, limit_s=limit_s
        )

    loop = VirtualLoop()
    return run_virtual(story(VirtualClock(loop)), loop=loop)


def test_one_that_serves_and_fits_is_taken() -> None:
    others = [
        worker("p0", Role.PREFILL, STARTS, MINE),
        worker("p1", Role.PREFILL, READY, MINE),
        worker("d0", Role.DECODE, WorkerState.GONE, THEIRS),
        worker("d1", Role.DECODE, READY, replace(THEIRS, kv=replace(KV, tp=2))),
        worker("d2", Role.DECODE, READY, THEIRS),
    ]
    assert found(others) == Partner("http://10.0.0.2:1", "10.0.0.1:8998", "d2")


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ([], "there is none"),
        ([worker("d1", Role.DECODE, STARTS)], "d1 is not up"),
        ([worker("d1", Role.DECODE, READY, replace(THEIRS, kv=replace(KV, tp=2)))], "tp: 1 != 2"),
    ],
)
def test_nobody_within_the_bound_is_said_with_the_nearest_reason(
    others: list[Worker], words: str
) -> None:
    with pytest.raises(Unavailable, match=f"no decode worker.*within 5 s.*{words}"):
        found(others)


async def test_one_that_starts_says_where_its_engine_is() -> None:
    """At its agent, with the token, and only once its engine is up."""
    clock = SystemClock()
    server = TransferServer(incarnation="d1-1", clock=clock, token="secret")
    await server.start()
    told = json.dumps({"engine_url": THEIRS.engine_url, "bootstrap": "", "kv": asdict(THEIRS.kv)})

    async def listed() -> Fleet:
        return Fleet(1, {"d1": worker("d1", Role.DECODE, STARTS, url=server.url)})

    def asked(token: str, limit_s: float) -> Coroutine[Any, Any, Partner]:
        return meeting.partner_for(
            listed,
            worker_id="p0",
            role=Role.PREFILL,
            serving=MINE,
            clock=clock,
            limit_s=limit_s,
            token=token,
        )

    try:
        with pytest.raises(Unavailable, match="d1 is not up"):
            await asked("secret", 0.0)
        server.engine_told = lambda: told
        with pytest.raises(Unavailable):
            await asked("wrong", 0.0)
        async with asyncio.timeout(5):
            partner = await asked("secret", 5.0)
        assert (partner.url, partner.bootstrap) == (THEIRS.engine_url, "10.0.0.1:8998")
    finally:
        await server.stop()
