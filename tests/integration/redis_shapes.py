"""Redis as a cluster and behind a Sentinel, from the embedded server's program."""

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from readyplane_lab.up.local_server import free_port
from readyplane_lab.up.redis_server import find_program

HOST = "127.0.0.1"
SLOTS = 16_384
UP_S_MAX = 90.0
MEET_AGAIN_S = 10.0


class Servers:
    """Processes that end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[int, Process] = {}

    async def start(self, *flags: str, sentinel: str = "") -> int:
        """One server; returns its port."""
        port = free_port()
        home = self.folder / str(port)
        home.mkdir(parents=True)
        command = [await find_program()]
        if sentinel:
            (home / "sentinel.conf").write_text(f"port {port}\nbind {HOST}\n{sentinel}\n")
            command += [str(home / "sentinel.conf"), "--sentinel"]
        else:
            command += ["--port", str(port), "--bind", HOST, "--save", "", *flags]
        self.running[port] = await asyncio.create_subprocess_exec(
            *command, cwd=home, stdout=DEVNULL, stderr=DEVNULL
        )
        async with asyncio.timeout(UP_S_MAX):
            while not await answers(port):
                await asyncio.sleep(0.05)
        return port

    async def kill(self, port: int) -> None:
        """At once, without a word."""
        process = self.running.pop(port)
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def end(self) -> None:
        for port in list(self.running):
            await self.kill(port)


async def answers(port: int) -> bool:
    """Whether a server is there."""
    async with Redis(host=HOST, port=port) as client:
        with contextlib.suppress(RedisError, OSError):
            return bool(await client.ping())
    return False


async def one_cluster(client: Redis, nodes: int) -> bool:
    """Whether a node knows them all and has each slot served."""
    told = await client.execute_command("CLUSTER", "INFO")
    lines = bytes(told).decode().split()
    return {"cluster_state:ok", f"cluster_known_nodes:{nodes}"} <= set(lines)


async def until_one(clients: Sequence[Redis], nodes: int, limit_s: float) -> None:
    """Until the nodes are one cluster, or the time is up."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not all([await one_cluster(client, nodes) for client in clients]):
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def cluster(folder: Path, *, nodes: int = 3) -> AsyncIterator[str]:
    """A cluster of masters; its address by two of them."""
    servers = Servers(folder)
    try:
        # By default they meet 10,000 ports higher, which may be none.
        buses = [free_port() for _ in range(nodes)]
        flags = ("--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port")
        ports = [await servers.start(*flags, str(bus)) for bus in buses]
        clients = [Redis(host=HOST, port=port) for port in ports]
        for number, client in enumerate(clients):
            first, last = SLOTS * number // nodes, SLOTS * (number + 1) // nodes - 1
            await client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        async with asyncio.timeout(UP_S_MAX):
            while not all([await one_cluster(client, nodes) for client in clients]):
                # Two meet within their node timeout, or never: told again, on a busy machine.
                for client in clients[1:]:
                    await client.execute_command("CLUSTER", "MEET", HOST, ports[0], buses[0])
                await until_one(clients, nodes, MEET_AGAIN_S)
        for client in clients:
            await client.aclose()
        yield f"redis+cluster://{HOST}:{ports[0]},{HOST}:{ports[1]}"
    finally:
        await servers.end()


@contextlib.asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[tuple[str, Servers, int]]:
    """A master with a replica and a Sentinel: the address, the servers, the master's port."""
    servers = Servers(folder)
    try:
        master = await servers.start()
        await servers.start("--replicaof", HOST, str(master))
        lines = (
            f"sentinel monitor fleet {HOST} {master} 1",
            "sentinel down-after-milliseconds fleet 500",
            "sentinel failover-timeout fleet 3000",
        )
        sentinel = await servers.start(sentinel="\n".join(lines))
        async with Redis(host=HOST, port=sentinel) as client, asyncio.timeout(UP_S_MAX):
            while not await client.execute_command("SENTINEL", "REPLICAS", "fleet"):
                await asyncio.sleep(0.1)
        yield f"redis+sentinel://{HOST}:{sentinel}/fleet/0", servers, master
    finally:
        await servers.end()
