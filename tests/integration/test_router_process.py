"""The router as a process: over gRPC and REST, with its Redis killed under load, and fencing."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from readyplane.client import RouterClient
from readyplane.core.errors import (
    LostLease,
    NoPair,
    NotFound,
    PromptTooLong,
    Refused,
    Unavailable,
)
from readyplane.core.work import EventKind
from readyplane.core.worker import LoadReport, Role, Serving, WorkerState
from readyplane.kit.clock import SystemClock
from readyplane_lab.up.redis_server import EmbeddedRedis
from tests.router_world import MODEL, PROFILE, SERVED, FakeWorker, events, offer, shape

P, D = Role.PREFILL, Role.DECODE
POLICY = {
    "lease_ttl_s": 1.2,
    "tick_s": 0.2,
    "redis_absence_max_s": 2.5,
    "reservation_ttl_s": 20.0,
    "gone_kept_s": 1.0,
    "pair": {"prefill_ahead_s": 1000.0, "empty_wait_max_s": 1.0, "wait_max_s": 1.0},
}


@dataclass
class Process:
    process: asyncio.subprocess.Process
    client: RouterClient
    http: str
    log: Path

    async def stop(self) -> int:
        await self.client.aclose()
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 60)


async def start(
    tmp_path: Path,
    name: str,
    *flags: str,
    token: str = "",
    policy: Mapping[str, Any] = POLICY,
) -> Process:
    ready, log = tmp_path / f"{name}.json", tmp_path / f"{name}.log"
    (tmp_path / "policy.json").write_text(json.dumps(policy))
    profiles = tmp_path / "profiles"
    profiles.mkdir(exist_ok=True)
    (profiles / "toy.json").write_text(json.dumps(PROFILE.document()))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("READYPLANE_")}
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "readyplane_router",
            "--ready-file",
            str(ready),
            "--policy-file",
            str(tmp_path / "policy.json"),
            "--profiles-dir",
            str(profiles),
            *flags,
            stdout=out,
            stderr=out,
            env=environment | ({"READYPLANE_TOKEN": token} if token else {}),
        )
    async with asyncio.timeout(120):
        while not ready.exists():
            assert process.returncode is None, log.read_text()
            await asyncio.sleep(0.05)
    told = json.loads(ready.read_text())
    return Process(process, RouterClient(told["grpc"], token), told["http"], log)


@contextlib.asynccontextmanager
async def redis_of_its_own(folder: Path) -> AsyncIterator[EmbeddedRedis]:
    async with EmbeddedRedis(folder) as server:
        yield server


class Renewing:
    """Workers that renew until told otherwise."""

    def __init__(self) -> None:
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.clock = SystemClock()

    def keep(self, worker: FakeWorker) -> FakeWorker:
        self.tasks[worker.offer.worker_id] = asyncio.create_task(self._renew(worker))
        return worker

    async def _renew(self, worker: FakeWorker) -> None:
        number = 0
        while True:
            number += 1
            with contextlib.suppress(Unavailable):
                await worker.renew(load=LoadReport(running=0, iterations_total=number))
            await asyncio.sleep(0.3)

    async def stop(self, name: str) -> None:
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def end(self) -> None:
        for name in list(self.tasks):
            await self.stop(name)


async def attached(
    router: RouterClient, name: str, role: Role, *, serves: Serving | None = None, **changes: Any
) -> FakeWorker:
    """A worker through the gate of a router without a registry: attached, checks skipped."""
    from readyplane.core import gate_checks as gc

    worker = FakeWorker(router, offer(name, role, attached=True, **changes))
    await worker.register()
    await worker.form()
    skipped = {
        check: {gc.NOT_APPLICABLE: "already running"}
        for check in gc.ATTACHED_MAY_SKIP - {gc.KV_CONNECTOR}
    }
    answer = {
        "token_ids": [1],
        "repeat_token_ids": [1],
        "eos_ok": True,
        "sampling_ok": True,
    }
    changed: dict[str, Any] = {**skipped, "canary": answer}
    await worker.renew()  # whoever was slow to come here has a lease all the same
    assert await worker.admit(serves=serves, **changed) == ()
    return worker


async def until(holds: Any, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not await holds():
            await asyncio.sleep(0.05)


async def states(router: RouterClient) -> dict[str, WorkerState]:
    fleet = await router.list_workers()
    return {k: w.state for k, w in fleet.workers.items()}


async def test_redis_killed_under_load(database_url: str, tmp_path: Path) -> None:
    """Serves degraded, then refuses, then serves again; nobody dies, nothing stays reserved."""
    renewing = Renewing()
    folder = tmp_path / "redis"
    async with redis_of_its_own(folder) as redis:
        flags = ("--database-url", database_url, "--redis-url", redis.url)
        router = await start(tmp_path, "router", *flags)
        try:
            p0 = renewing.keep(await attached(router.client, "p0", P))
            renewing.keep(await attached(router.client, "d0", D))
            outcomes: list[str] = []
            stop = asyncio.Event()

            async def load(lane: int) -> None:
                number = 0
                while not stop.is_set():
                    number += 1
                    try:
                        pair = await router.client.route(shape(f"{lane}-{number}", 64, first=lane))
                        await asyncio.sleep(0.02)
                        await router.client.complete(events(pair, *SERVED))
                        outcomes.append("served")
                    except (Unavailable, NoPair) as error:
                        outcomes.append(type(error).__name__)
                        await asyncio.sleep(0.05)

            lanes = [asyncio.create_task(load(lane)) for lane in range(4)]
            await until(lambda: _true(outcomes.count("served") > 20))
            assert redis.pid is not None
            os.kill(redis.pid, signal.SIGKILL)
            killed = len(outcomes)
            await until(lambda: _degraded(router, "degraded"))
            await until(lambda: _true(outcomes[killed:].count("served") > 20))
            assert set(outcomes) == {"served"}  # not one was refused while degraded
            await until(lambda: _true("Unavailable" in outcomes))
            assert await states(router.client) == {
                "p0": WorkerState.READY,
                "d0": WorkerState.READY,
            }
            await redis.start()  # empty
            await until(lambda: _degraded(router, ""))
            back = len(outcomes)
            await until(lambda: _true(outcomes[back:].count("served") > 20))
            assert await states(router.client) == {
                "p0": WorkerState.READY,
                "d0": WorkerState.READY,
            }
            stop.set()
            await asyncio.gather(*lanes)
            fleet = await router.client.list_workers()
            assert {w.active for w in fleet.workers.values()} == {0}
            assert {w.promised_kv_blocks for w in fleet.workers.values()} == {0}
            newer = await attached(router.client, "d1", D)
            assert newer.lease.epoch > p0.lease.epoch
        finally:
            await renewing.end()
            code = await router.stop()
    assert code == 0, router.log.read_text()[-2000:]


async def _true(value: bool) -> bool:
    return value


async def _degraded(router: Process, words: str) -> bool:
    told = (await router.client.list_workers()).degraded
    return words in told if words else told == ""


async def test_two_router_processes_share_workers_and_fence_the_resumed(
    database_url: str, redis_url: str, tmp_path: Path
) -> None:
    renewing = Renewing()
    flags = ("--database-url", database_url, "--redis-url", redis_url)
    one, two = await asyncio.gather(start(tmp_path, "one", *flags), start(tmp_path, "two", *flags))
    try:
        old = await attached(one.client, "p0", P)
        renewing.keep(old)
        renewing.keep(await attached(two.client, "d0", D))

        async def both_ready() -> bool:
            want = {"p0": WorkerState.READY, "d0": WorkerState.READY}
            return await states(one.client) == want == await states(two.client)

        await until(both_ready)
        pair = await two.client.route(shape("r1"))
        assert await one.client.route(shape("r1")) == pair
        assert await one.client.complete(events(pair, EventKind.FINISHED)) == 0

        # The worker stops renewing: its lease ends at both, without a word from it.
        await renewing.stop("p0")

        async def gone() -> bool:
            found = [await states(r.client) for r in (one, two)]
            return all(s.get("p0", WorkerState.GONE) is WorkerState.GONE for s in found)

        await until(gone)
        with pytest.raises(NoPair):
            await one.client.route(shape("r2"))
        # A new incarnation takes its place at the other router; the old one resumes, too late.
        new = await attached(two.client, "p0", P, incarnation="p0-2")
        renewing.keep(new)
        assert new.lease.epoch > old.lease.epoch

        async def replaced() -> bool:
            worker = (await one.client.list_workers()).workers.get("p0")
            return worker is not None and worker.offer.incarnation == "p0-2"

        await until(replaced)
        with pytest.raises(LostLease):
            await old.renew()
        with pytest.raises(LostLease, match="taken over"):
            await old.register()
        assert (await one.client.route(shape("r3"))).prefill.epoch == new.lease.epoch
    finally:
        await renewing.end()
        codes = [await one.stop(), await two.stop()]
    assert codes == [0, 0]


async def test_rest_and_grpc_agree(database_url: str, redis_url: str, tmp_path: Path) -> None:
    renewing = Renewing()
    flags = ("--database-url", database_url, "--redis-url", redis_url)
    router = await start(tmp_path, "router", *flags, token="secret")
    headers = {"authorization": "Bearer secret"}
    try:
        async with httpx.AsyncClient(base_url=router.http, headers=headers) as http:
            renewing.keep(await attached(router.client, "p0", P))
            renewing.keep(await attached(router.client, "d0", D))
            body = {"request_id": "r1", "model": MODEL, "token_ids": list(range(160))}
            told = (await http.post("/v1/route", json=body | {"explain": True})).json()
            assert told["prefill"]["worker_id"] == "p0" and told["explanation"]["pairs"]
            assert (await router.client.route(shape("r1", max_tokens=None))).reservation_id == (
                told["reservation_id"]
            )
            done = {"reservation_id": told["reservation_id"], "kind": "finished"}
            answer = await http.post("/v1/complete", json={"events": [done]})
            assert answer.json() == {"unknown": 0}
            workers = (await http.get("/v1/workers")).json()["workers"]
            assert {w["offer"]["worker_id"]: w["state"] for w in workers} == {
                "p0": "ready",
                "d0": "ready",
            }
            assert workers[0]["ready_ago_s"] >= 0

            for wrong, status, field in (
                ({"max_tokens": 0}, 400, "max_tokens"),
                ({"max_token": 5}, 400, "max_token"),
                ({"token_ids": [-1]}, 400, "prompt"),
                ({"token_ids": [], "isl": 10**9}, 400, "isl"),
                ({"model": "nobody"}, 404, None),
                ({"token_ids": list(range(40_000))}, 400, "prompt"),
            ):
                answer = await http.post("/v1/route", json=body | {"request_id": "x"} | wrong)
                error = answer.json()["error"]
                assert answer.status_code in {status, 422, 413}, answer.text
                assert error["message"] and (field is None or error["field"] == field), error
            with pytest.raises(PromptTooLong):
                await router.client.route(shape("long", 40_000))
            with pytest.raises(NotFound):
                await router.client.route(shape("x", model="nobody"))

            drained = await http.post("/v1/workers/d0/drain", json={"reason": "by hand"})
            assert drained.json()["state"] == "draining"
            assert (await http.post("/v1/workers/nobody/drain")).status_code == 404
            assert (await http.post("/v1/workers/p0/activate")).json()["state"] == "ready"
            flipped = await http.post("/v1/workers/p0/flip", json={"role": "decode"})
            assert "its engine was attached" in flipped.json()["error"]["message"]
            with pytest.raises(Refused, match="its engine was attached"):
                await router.client.flip("p0", role=Role.DECODE)
            assert (await router.client.activate("p0")).state is WorkerState.READY
            answer = await http.post("/v1/route", json=body | {"request_id": "r9"})
            assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
            signals = (await http.get("/v1/signals", params={"model": MODEL})).json()
            assert signals["models"][MODEL]["refused_total"] >= 1

            metrics = (await http.get("/metrics")).text
            assert 'readyplane_router_workers{model="demo",pool="prefill"' in metrics
            assert 'readyplane_router_finished_total{model="demo"} 1.0' in metrics
            assert "nobody" not in metrics
        async with httpx.AsyncClient(base_url=router.http) as stranger:
            for method, path in (
                ("POST", "/v1/route"),
                ("POST", "/v1/complete"),
                ("GET", "/v1/workers"),
                ("POST", "/v1/workers/p0/drain"),
                ("GET", "/v1/signals"),
            ):
                assert (await stranger.request(method, path, json={})).status_code == 401
            assert (await stranger.get("/healthz")).status_code == 200
    finally:
        await renewing.end()
        code = await router.stop()
    assert code == 0, router.log.read_text()[-2000:]


@pytest.mark.parametrize(
    ("flags", "policy", "words"),
    [
        ((), {}, "database_url"),
        (("--databse-url", "x"), {}, "did you mean --database-url"),
        ((), {"lease_tl_s": 5}, "router_policy.lease_tl_s"),
        ((), {"pair": {"wait_max_s": 40}}, "engines give KV up after its hold"),
        ((), {"lease_ttl_s": 1, "tick_s": 1}, "use 6 x tick_s (6) or more"),
        ((), {"pair": {"slo": {"ttft_s": "2"}}}, "router_policy.pair.slo.ttft_s"),
    ],
)
def test_a_wrong_setting_is_one_clear_line(
    flags: tuple[str, ...],
    policy: dict[str, Any],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    from readyplane_router.__main__ import main
    from readyplane_router.given import read_policy

    if policy:
        from readyplane.core.errors import InvalidField

        path = tmp_path / "policy.json"
        path.write_text(json.dumps(policy))
        with pytest.raises(InvalidField) as caught:
            read_policy(path)
        assert words in str(caught.value)
        return
    with pytest.raises(SystemExit) as ended:
        main(list(flags))
    told = capsys.readouterr().err
    assert ended.value.code == 2
    assert told.count("\n") == 1
    assert words in told or words.removeprefix("did you mean ") in told
