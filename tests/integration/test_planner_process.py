"""The planner as a process with real stores, and its service on real time."""

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path

import httpx
import pytest

from readyplane.kit.clock import SystemClock
from readyplane.kit.database import async_engine
from readyplane_planner.leadership import Leadership
from readyplane_planner.postgres import PostgresJournal
from readyplane_planner.service import PlannerService
from tests.unit.planner_world import DIGEST, MODEL, HandClock, World, policy


class RealWorld(World):
    """The fluid fleet on the machine's clock."""

    def __init__(self, clock: SystemClock) -> None:
        self._real = clock
        hand = HandClock()
        hand.now_s = clock.monotonic_s()
        super().__init__(hand, rps=lambda _t: 6.0, t_ready_s=lambda _n: 0.5)

    async def flow(self) -> None:
        while True:
            await self._real.sleep(0.05)
            self.advance(self._real.monotonic_s() - self.clock.now_s)


async def test_the_loop_on_real_time_with_real_stores(database_url: str, redis_url: str) -> None:
    from readyplane.kit.database import migrate
    from readyplane.kit.redis import connect
    from readyplane_planner.redis import RedisLeaseStore

    await migrate(database_url, "readyplane_planner")
    clock = SystemClock()
    engine, client = async_engine(database_url), connect(redis_url)
    world = RealWorld(clock)
    ids = iter(range(10**6))
    service = PlannerService(
        policy=policy(tick_s=0.2, down={"cooldown_s": 1.0}, up={"cooldown_s": 0.2}),
        router=world,  # type: ignore[arg-type]
        actuator=world,
        registry=None,
        journal=PostgresJournal(engine),
        leadership=Leadership(
            RedisLeaseStore(client), name=MODEL, holder="x", ttl_s=5.0, now_s=clock.monotonic_s
        ),
        clock=clock,
        make_id=lambda: f"{next(ids):06x}",
    )
    work = [asyncio.create_task(world.flow()), asyncio.create_task(service.run())]
    try:
        async with asyncio.timeout(90):
            while True:
                await asyncio.sleep(0.2)
                with contextlib.suppress(Exception):
                    pools = (await service.state())["pools"]
                    if pools["prefill"]["ready"] >= 3 and pools["decode"]["ready"] >= 2:
                        break
        assert not work[1].done()
        decision = (await service.list_decisions(limit=50, changes_only=True))[-1]
        told = await service.explain(decision["decision_id"])
        assert {s["status"] for s in told["starts"]} == {"ready"}
        for kept in await service.list_decisions(limit=20):
            again = await service.replay(kept["decision_id"])
            assert again["same"], again["differences"]
    finally:
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        await service.aclose()
        await client.aclose()
        await engine.dispose()


async def test_the_process_serves_alone_says_so_and_stops(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Router, actuator and registry are away: nothing is believed, everything is told."""
    policy_file, ready = tmp_path / "policy.yaml", tmp_path / "ready.json"
    policy_file.write_text(f"model: alone\nmanifest: '{DIGEST}'\ntick_s: 0.5\n")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "readyplane_planner", "--policy", str(policy_file)),
        *("--database-url", database_url, "--redis-url", redis_url),
        *("--router", "127.0.0.1:1", "--actuator", "127.0.0.1:1", "--registry", "127.0.0.1:1"),
        *("--ready-file", str(ready), "--policy-watch-s", "0.1"),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(90):
            while not ready.exists():
                assert process.returncode is None, "it ended by itself"
                await asyncio.sleep(0.1)
            url = json.loads(ready.read_text())["http"]
            async with httpx.AsyncClient(base_url=url) as http:
                state = None
                while state is None or state.status_code != 200:
                    await asyncio.sleep(0.2)
                    state = await http.get("/v1/state")
                body = state.json()
                assert "does not answer" in body["degraded"]
                assert body["pools"]["prefill"]["load"] is None
                assert (body["pools"]["prefill"]["desired"], body["workers"]) == (1, [])
                assert (await http.get("/v1/policy")).json()["version"] == 1
                assert "readyplane_desired_replicas" in (await http.get("/metrics")).text
                bad = await http.patch("/v1/policy", json={"ttft": 1})
                assert bad.json()["error"]["field"] == "policy.ttft"
                policy_file.write_text(policy_file.read_text() + "headroom: 0.4\n")
                while (await http.get("/v1/policy")).json()["version"] == 1:
                    await asyncio.sleep(0.1)
                assert (await http.get("/v1/policy")).json()["policy"]["headroom"] == 0.4
                policy_file.write_text("model: alone\nheadrom: 0.4\n")
                while "policy.headrom" not in (await http.get("/v1/state")).json()["degraded"]:
                    await asyncio.sleep(0.1)
                assert (await http.get("/v1/policy")).json()["version"] == 2
            process.send_signal(signal.SIGTERM)
            _out, log = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, log.decode()[-2000:]
    assert b"Traceback" not in log


@pytest.mark.parametrize(
    ("text", "word"),
    [("model: x\nmax_step: 1\n", "policy.up.max_step"), ("- a\n", "object of policy fields")],
)
async def test_a_wrong_policy_file_is_one_line_and_exit_code_2(
    tmp_path: Path, text: str, word: str
) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "readyplane_planner", "--policy", str(tmp_path / "policy.yaml")),
        *("--database-url", "postgresql://x@127.0.0.1:1/x", "--redis-url", "redis://127.0.0.1:1"),
        *("--router", "127.0.0.1:1", "--actuator", "127.0.0.1:1", "--registry", "127.0.0.1:1"),
        stderr=asyncio.subprocess.PIPE,
    )
    _out, log = await process.communicate()
    assert process.returncode == 2
    assert word in log.decode() and "Traceback" not in log.decode()
