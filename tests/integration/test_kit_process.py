"""A service as a process: signals, exit codes, one line for a wrong setting, light imports."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys
from readyplane.kit.server import ServiceServer, run_service
from readyplane.kit.settings import ServiceSettings, parse_settings
from readyplane.kit.telemetry import setup_logging

async def main():
    settings = parse_settings(ServiceSettings, sys.argv[1:], "thing", "A thing")
    setup_logging("thing", settings.log_level)
    server = ServiceServer("thing", settings)
    async def work():
        try:
            await asyncio.sleep(3600)
        finally:
            print("work ended", flush=True)
    async def crash():
        if settings.registry:
            raise RuntimeError("no way on")
        await asyncio.sleep(3600)
    async def on_stop():
        print("stopping", flush=True)
    await server.run([work, crash], on_stop)

run_service(main)
"""


LIMIT_S = 120.0  # of what takes a second on a machine with nothing else to do


class Service:
    def __init__(self, process: asyncio.subprocess.Process, ready: Path) -> None:
        self.process, self.ready = process, ready

    async def up(self) -> dict[str, object]:
        async with asyncio.timeout(LIMIT_S):
            while not self.ready.exists():
                assert self.process.returncode is None
                await asyncio.sleep(0.02)
        told: dict[str, object] = json.loads(self.ready.read_text())
        return told

    async def end(self) -> tuple[int, str, str]:
        out, err = await asyncio.wait_for(self.process.communicate(), LIMIT_S)
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


Start = Callable[..., Awaitable[Service]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    started: list[Service] = []

    async def one(*flags: str, **environment: str) -> Service:
        ready = tmp_path / f"ready-{len(started)}"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, "--ready-file", str(ready), *flags,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **environment},
        )  # fmt: skip
        service = Service(process, ready)
        started.append(service)
        return service

    yield one
    for service in started:
        if service.process.returncode is None:
            service.process.kill()
            await service.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_in_order_and_in_time(start: Start, number: signal.Signals) -> None:
    service = await start()
    told = await service.up()
    assert told["pid"] == service.process.pid
    host, _, port = str(told["grpc"]).rpartition(":")
    with socket.create_connection((host, int(port)), 2):
        began = time.monotonic()
        service.process.send_signal(number)
        code, out, err = await service.end()
    assert code == 0, err
    assert out.split("\n")[:2] == ["stopping", "work ended"]
    assert time.monotonic() - began < 30
    assert "Traceback" not in err
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((host, int(port)), 1)


async def test_a_crash_is_exit_code_1_and_loud(start: Start) -> None:
    code, out, err = await (await start("--registry", "127.0.0.1:1")).end()
    assert code == 1
    assert out.split("\n")[:2] == ["stopping", "work ended"]
    assert "level=critical" in err and "no way on" in err


@pytest.mark.parametrize(
    "flags, environment, words",
    [
        (["--grpc-prot", "1"], {}, "did you mean --grpc-port"),
        ([], {"READYPLANE_HTTP_PORT": "x"}, "READYPLANE_HTTP_PORT"),
    ],
)
async def test_a_wrong_setting_is_one_line_and_exit_code_2(
    start: Start, flags: list[str], environment: dict[str, str], words: str
) -> None:
    code, _, err = await (await start(*flags, **environment)).end()
    assert code == 2
    lines = err.strip().split("\n")
    assert len(lines) == 1 and lines[0].startswith("error: ")
    assert words in lines[0]


async def test_a_port_in_use_is_one_line_and_exit_code_2(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flag in ("--grpc-port", "--http-port"):
            code, _, err = await (await start(flag, port)).end()
            lines = [line for line in err.strip().split("\n") if not line.startswith("ts=")]
            assert code == 2 and len(lines) == 1
            assert port in lines[0] and flag in lines[0] and "in use" in lines[0]


HEAVY = ("fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic", "asyncpg", "scipy",
         "matplotlib", "opentelemetry", "pydantic", "redis")  # fmt: skip


@pytest.mark.parametrize(
    "module",
    ["readyplane.kit.clock", "readyplane.kit.telemetry", "readyplane.wire", "readyplane.client"],
)
async def test_what_agents_import_is_light(module: str) -> None:
    check = f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", check, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.decode().strip() == "[]"
