"""`make bench-gateway`: what a gateway adds to a request, beside vllm-router.

Prints at the end:

    bench-gateway gateway_p50_ratio= gateway_asks_p50_ratio= gateway_grpc_p50_ratio=

All: p50 that our gateway adds at 1 in flight, over hitting a worker directly, divided by what
vllm-router adds in its P/D mode, the better of its policies. `gateway` has the router's brain
embedded and the model's tokenizer at hand, `gateway_asks` has no tokenizer and asks an engine for
each prompt's tokens, `gateway_grpc` has the tokenizer and asks a router process at its pick port. 8 prefill and 8
decode workers that answer at once (and tokenise at once, see `bench.gateway_tokenizer`), prompts of
4,000 characters that no path sees twice, one raw client, all paths in turn within one run. The lines
above say p50, p99, what is added at p50 and at p5 (when the machine was least busy with others) and
the processor time of everything that a path consists of (the gateway; the router and Redis where it
uses them). Without vllm-router the ratios are "not run". With `--undisturbed` (root) whatever takes
part goes before other work while its path has its turn, for a machine that has such.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from bench.own_services import own_services, publish_demo
from readyplane_lab.demo import MODEL
from readyplane_lab.up.local_server import free_port

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".venv-peers" / "bin" / "vllm-router"
POLICIES = ("round_robin", "power_of_two")
PROMPT_CHARACTERS = 4_000
ROUNDS = 20
REQUESTS_A_ROUND = 60
WARM_REQUESTS = 100
STARTS_WITHIN_S = 60.0
FIRST = 1  # of SCHED_FIFO: before all that is not real time
OTHERS_TURN_S = 0.05
DIRECT = "one worker"
TOKENIZER = ROOT / "bench" / "gateway_tokenizer"
# Of our ways: who pairs, and whether the model's tokenizer is at hand.
OURS = {
    "gateway": ("embedded", True),
    "gateway_asks": ("embedded", False),
    "gateway_grpc": ("grpc", True),
}


@dataclass(slots=True)
class Way:
    """One way to the workers: where it listens and what it consists of."""

    name: str
    port: int
    processes: list[psutil.Process]
    seconds: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    def used_s(self) -> float:
        """Processor time of all its processes so far."""
        return sum(sum(p.cpu_times()[:2]) for p in self.processes)

    def added_s(self, direct: Way, quantile: float = 0.5) -> float:
        """What it takes beyond a worker hit directly, at a quantile of both."""
        own, bare = (float(np.quantile(w.seconds, quantile)) for w in (self, direct))
        return own - bare


class Client:
    """One keep-alive connection, one request at a time, on a blocking socket."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> float:
        """Seconds from the first byte sent to the last one read."""
        began_s = time.perf_counter()
        self._socket.sendall(request)
        data = self._socket.recv(65536)
        while not _complete(data):
            more = self._socket.recv(65536)
            if not more:
                raise SystemExit(f"the connection was closed after {data[:200]!r}")
            data += more
        took_s = time.perf_counter() - began_s
        if not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"it answered {data[:600]!r}")
        return took_s

    def close(self) -> None:
        """Close it."""
        self._socket.close()


def _complete(data: bytes) -> bool:
    head, found, body = data.partition(b"\r\n\r\n")
    if not found:
        return False
    head = head.lower()
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    at = head.find(b"content-length: ")
    return len(body) >= int(head[at + 16 :].split(b"\r\n", 1)[0])


def prompts(count: int, seed: int) -> list[bytes]:
    """Requests, each with a text of its own."""
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz     "
    found = []
    for _ in range(count):
        text = "".join(draw.choices(letters, k=PROMPT_CHARACTERS))
        body = json.dumps({"model": MODEL, "prompt": text, "max_tokens": 16}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        found.append(f"{head}content-type: application/json\r\n\r\n".encode() + body)
    return found


# ---------------------------------------------------------------------- what is measured


async def _ready(process: subprocess.Popen[bytes], port: int, path: str) -> None:
    """Wait until a server answers 200."""
    deadline_s = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0) as s:
            s.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            if s.recv(200).startswith(b"HTTP/1.1 200"):
                return
        await asyncio.sleep(0.1)
    raise SystemExit(f"{process.args!r} did not come up")


@contextlib.asynccontextmanager
async def _running(
    command: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> AsyncIterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            yield process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            process.kill()
            process.wait()


async def _peers(
    stack: contextlib.AsyncExitStack, urls: dict[str, list[str]], folder: Path
) -> list[Way]:
    """vllm-router with each policy, none where it is not there."""
    if not PEERS.exists():
        return []
    found = []
    for policy in POLICIES:
        port = free_port()
        command = [str(PEERS), "--host", "127.0.0.1", "--port", str(port), "--policy", policy]
        command += ["--vllm-pd-disaggregation", "--prometheus-port", str(free_port())]
        command += [part for url in urls["prefill"] for part in ("--prefill", url)]
        command += [part for url in urls["decode"] for part in ("--decode", url)]
        process = await stack.enter_async_context(_running(command, folder / f"{policy}.log"))
        await _ready(process, port, "/health")
        found.append(Way(f"vllm-router {policy}", port, [psutil.Process(process.pid)]))
    return found


async def _workers(
    stack: contextlib.AsyncExitStack, router: str, digest: str
) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "bench.gateway_workers", "--router", router]
    process = await asyncio.create_subprocess_exec(
        *command, "--digest", digest, stdout=subprocess.PIPE, cwd=ROOT
    )

    async def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    stack.push_async_callback(end)
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), STARTS_WITHIN_S)
    if not line:
        raise SystemExit("the workers did not come up")
    urls: dict[str, list[str]] = json.loads(line)
    return urls


@contextlib.asynccontextmanager
async def _all_paths(folder: Path) -> AsyncIterator[list[Way]]:
    """Stores, registry, router, workers, both gateways and the peers."""
    async with contextlib.AsyncExitStack() as stack:
        own = await stack.enter_async_context(own_services(folder))
        services, environment = own.services, dict(own.environment)
        registry = services.plan("registry", args=("--blob-dir", str(folder / "blobs")))
        picks = free_port()
        router = services.plan("router", args=("--pick-port", str(picks)))
        router.environment["READYPLANE_REGISTRY"] = registry.grpc
        await asyncio.gather(services.start(registry), services.start(router))
        urls = await _workers(stack, router.grpc, await publish_demo(registry.grpc))
        redis = [p for p in psutil.Process().children(recursive=True) if _is_redis(p)]
        pid = next(r.pid for r in own.table.running() if r.name == "router")
        beside = {"embedded": redis, "grpc": [psutil.Process(pid), *redis]}
        paths = [Way(DIRECT, int(urls["decode"][0].rpartition(":")[2]), [])]
        tokenizers = folder / "tokenizers"
        (tokenizers / MODEL).mkdir(parents=True)
        (tokenizers / MODEL / "tokenizer.json").write_text("{}")
        environment["PYTHONPATH"] = str(TOKENIZER)
        for name, (pairing, at_hand) in OURS.items():
            port = free_port()
            command = [sys.executable, "-m", "readyplane_gateway", "--pairing", pairing]
            command += ["--router", router.grpc, "--http-port", str(port)]
            command += ["--tokenizers-dir", str(tokenizers)] if at_hand else []
            command += ["--router-picks", f"127.0.0.1:{picks}"] if pairing == "grpc" else []
            process = await stack.enter_async_context(
                _running(command, folder / "logs" / f"{name}.log", environment)
            )
            await _ready(process, port, "/readyz")
            paths.append(Way(name, port, [psutil.Process(process.pid), *beside[pairing]]))
        paths += await _peers(stack, urls, folder / "logs")
        yield paths


def _serves(process: psutil.Process) -> bool:
    return "bench.gateway_workers" in process.cmdline()


def _is_redis(process: psutil.Process) -> bool:
    return any(name in process.name() for name in ("valkey", "redis"))


@contextlib.contextmanager
def _undisturbed(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """These and this process go before everything else meanwhile; then the others have a turn."""
    threads = [
        int(entry.name)
        for process in (psutil.Process(), *processes)
        for entry in Path(f"/proc/{process.pid}/task").iterdir()
    ]
    try:
        _schedule(threads, os.SCHED_FIFO, FIRST)
        yield
    finally:
        _schedule(threads, os.SCHED_OTHER, 0)
        time.sleep(OTHERS_TURN_S)


def _schedule(threads: Sequence[int], policy: int, priority: int) -> None:
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setscheduler(thread, policy, os.sched_param(priority))


async def measure(rounds: int, *, undisturbed: bool = False) -> list[Way]:
    """All paths, in turn, `rounds` times."""
    with tempfile.TemporaryDirectory() as name:
        async with _all_paths(Path(name)) as paths:
            clients = {path.name: Client(path.port) for path in paths}
            workers = [p for p in psutil.Process().children() if _serves(p)]
            for i in range(-1, rounds):
                asked = prompts(WARM_REQUESTS if i < 0 else REQUESTS_A_ROUND, i)
                for path in paths:
                    client = clients[path.name]
                    alone = [*path.processes, *workers] if undisturbed else None
                    with contextlib.nullcontext() if alone is None else _undisturbed(alone):
                        before_s = path.used_s()
                        took = [client.ask(request) for request in asked]
                        used_s = path.used_s() - before_s
                    if i >= 0:
                        path.seconds += took
                        path.cpu_s += used_s
                    await asyncio.sleep(0)  # the stores' and services' keepers have their turn
            for client in clients.values():
                client.close()
            return paths


def _line(path: Way, direct: Way) -> str:
    p50, p99 = (1e6 * float(np.quantile(path.seconds, q)) for q in (0.5, 0.99))
    cpu = 1e6 * path.cpu_s / len(path.seconds)
    added, quiet = (1e6 * path.added_s(direct, q) for q in (0.5, 0.05))
    return (
        f"{path.name:26} p50 {p50:6.0f} us  p99 {p99:6.0f}  adds {added:6.0f} (p5 {quiet:6.0f})  "
        f"cpu {cpu:6.0f}"
    )


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what a gateway adds to a request")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    text = "all that takes part goes before other work (root)"
    parser.add_argument("--undisturbed", action="store_true", help=text)
    given = parser.parse_args()
    paths = asyncio.run(measure(given.rounds, undisturbed=given.undisturbed))
    direct = paths[0]
    for path in paths:
        print(_line(path, direct))
    peers = [p.added_s(direct) for p in paths if p.name.startswith("vllm-router")]
    if not peers:
        print("bench-gateway: not run (vllm-router is not there, see .venv-peers)")
        return 0
    best_s = min(peers)
    found = {p.name: p.added_s(direct) / best_s if best_s > 0 else math.nan for p in paths}
    print("bench-gateway " + " ".join(f"{n}_p50_ratio={found[n]:.3g}" for n in OURS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
