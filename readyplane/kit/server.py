"""The shell of a service process: one gRPC port, one HTTP port, background work, an orderly end.

Owns binding, health, reflection, readiness, `/metrics`, the error bodies of REST and the signals.
A service adds its servicers and routes and runs; nothing here knows what it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvicorn
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from readyplane.core.errors import InvalidField, ReadyplaneError
from readyplane.kit import telemetry
from readyplane.kit.auth import TokenCheck
from readyplane.kit.http import make_app
from readyplane.kit.rpc import OPTIONS, Guard
from readyplane.kit.settings import ServiceSettings

ON_STOP_S_MAX = 10.0
DRAIN_CALLS_S_MAX = 2.0
BACKGROUND_END_S_MAX = 3.0
EXIT_WRONG_INPUT = 2
EXIT_FAILED = 1

log = logging.getLogger(__name__)
Background = Callable[[], Coroutine[Any, Any, None]]


class _Http(uvicorn.Server):
    """uvicorn inside our loop: signals are ours, and it waits for an event instead of polling."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._stop.wait()

    def stop(self) -> None:
        self._stop.set()


class ServiceServer:
    """Both ports of a service.

    Attributes:
        app: the FastAPI application, with `/healthz`, `/readyz`, `/metrics`, error bodies and token
            check in place. Add routers before `run`.
        front: an ASGI application that answers instead of `app`, and hands on to it what it does
            not know; None for `app` itself.
        http: what speaks HTTP for it, as uvicorn's setting of that name.
        open_paths: HTTP paths that need no token, beside health, metrics and mounted static files.
        stopping: set when the end has begun; endless HTTP answers (SSE) should watch it.
        grpc_address, http_url: known once `run` has bound.
    """

    def __init__(self, name: str, settings: ServiceSettings) -> None:
        self.name = name
        self.settings = settings
        self.stopping = asyncio.Event()
        self.open_paths: set[str] = set()
        self.grpc_address = ""
        self.http_url = ""
        self._ready: bool | None = None
        self._why = "starting"
        self._check = TokenCheck(settings.token)
        self._guard = Guard(self._check)
        self._health = health.aio.HealthServicer()
        self._registrations: list[tuple[Callable[[grpc.aio.Server], None], str]] = []
        self._side_tasks: set[asyncio.Task[None]] = set()
        self.front: Any = None
        self.http: Any = "httptools"
        self.app = make_app(name, self._check, self.open_paths, self._readiness)

    def add_grpc(self, register: Callable[[grpc.aio.Server], None], full_name: str) -> None:
        """Serve a gRPC service; `full_name` is for health and reflection (`readyplane.v1.Router`)."""
        self._registrations.append((register, full_name))

    def set_ready(self, ok: bool, why: str = "") -> None:
        """Say whether calls make sense now; `/readyz` and gRPC health follow.

        A service that never says so is ready as soon as its background work has started.
        """
        if ok and self.stopping.is_set():  # a health loop that has not heard of the end yet
            return
        if self._ready is not ok or self._why != why:
            log.info("ready" if ok else "not ready", extra={"why": why} if why else {})
        self._ready, self._why = ok, why
        with contextlib.suppress(RuntimeError):  # no loop yet: `run` sets it
            self._side(self._tell_health())

    async def run(
        self,
        background: Sequence[Background] = (),
        on_stop: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Bind, start, serve until SIGTERM or SIGINT, then stop in order.

        Args:
            background: endless work; if one fails, the service stops and its error is raised.
            on_stop: called when the service is no longer ready, before the ports close.

        Raises:
            InvalidField: a port is in use, or the address is not of this machine.
            Exception: whatever a background task failed with.
        """
        if self.settings.ready_file is not None:  # one of an earlier life would mislead
            with contextlib.suppress(OSError):
                self.settings.ready_file.unlink(missing_ok=True)
        stop_tracing = telemetry.setup_tracing(self.name, self.settings.otlp_endpoint)
        listening = listen(self.settings.host, self.settings.http_port)
        try:
            server = await self._start_grpc()
        except BaseException:
            listening.close()
            raise
        http = _Http(self._http_config())
        serving = asyncio.create_task(http.serve(sockets=[listening]), name="http")
        tasks = [asyncio.create_task(work(), name=_name(work)) for work in background]
        failed: BaseException | None = None
        with _signals(self.stopping):
            try:
                await self._announce(http, serving, tasks, listening)
                failed = await self._until_stopped([serving, *tasks])
            finally:
                self.stopping.set()
                await self._stop(server, http, serving, tasks, on_stop)
                stop_tracing()
        if failed is not None:
            raise failed

    # ------------------------------------------------------------------ start

    async def _start_grpc(self) -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=(self._guard,), options=OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for register, _ in self._registrations:
            register(server)
        names = [full_name for _, full_name in self._registrations]
        reflection.enable_server_reflection(
            (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        host, wanted = self.settings.host, self.settings.grpc_port
        # grpc's own failure to bind says nothing of why: ask the kernel first.
        listen(host, wanted, "grpc_port").close()
        try:
            port = server.add_insecure_port(_address(host, wanted))
        except RuntimeError as error:
            raise _in_use("grpc_port", wanted, str(error)) from error
        if not port:
            raise _in_use("grpc_port", wanted, "it cannot be bound")
        await self._tell_health()
        await server.start()
        self.grpc_address = _address(_reachable(host), port)
        return server

    def _http_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self.front or self.app,
            http=self.http,
            proxy_headers=self.front is None,
            ws="none",
            lifespan="off",
            loop="none",
            access_log=False,
            log_config=None,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, round(DRAIN_CALLS_S_MAX)),
        )

    async def _announce(
        self,
        http: _Http,
        serving: asyncio.Task[None],
        tasks: Sequence[asyncio.Task[None]],
        listening: socket.socket,
    ) -> None:
        while not http.started and not serving.done():
            await asyncio.sleep(0)
        self.http_url = f"http://{_address(_reachable(self.settings.host), _port(listening))}"
        await asyncio.sleep(0)
        if any(task.done() and task.exception() for task in tasks if not task.cancelled()):
            return
        if self._ready is None:
            self.set_ready(True)
        log.info("serving", extra={"grpc": self.grpc_address, "http": self.http_url})
        if self.settings.ready_file is not None:
            _write_atomically(
                self.settings.ready_file,
                {
                    "name": self.name,
                    "pid": os.getpid(),
                    "grpc": self.grpc_address,
                    "http": self.http_url,
                },
            )

    # ------------------------------------------------------------------ run and stop

    async def _until_stopped(self, tasks: Sequence[asyncio.Task[None]]) -> BaseException | None:
        stop = asyncio.create_task(self.stopping.wait())
        pending: set[asyncio.Task[Any]] = {stop, *tasks}
        try:
            while not stop.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done - {stop}:
                    error = None if task.cancelled() else task.exception()
                    if error is not None:
                        name = task.get_name()
                        log.critical("%s failed, stopping the service", name, exc_info=error)
                        return error
            return None
        finally:
            stop.cancel()

    async def _stop(
        self,
        server: grpc.aio.Server,
        http: _Http,
        serving: asyncio.Task[None],
        tasks: Sequence[asyncio.Task[None]],
        on_stop: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self.set_ready(False, "stopping")
        if on_stop is not None:
            try:
                async with asyncio.timeout(ON_STOP_S_MAX):
                    await on_stop()
            except Exception:
                log.exception("on_stop failed")
        self._guard.end_streams()
        http.stop()
        await asyncio.gather(server.stop(DRAIN_CALLS_S_MAX), serving, return_exceptions=True)
        for task in tasks:
            task.cancel()
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=BACKGROUND_END_S_MAX)
            for task in late:
                log.error("%s did not end in time", task.get_name())
        log.info("stopped")

    # ------------------------------------------------------------------ readiness

    def _readiness(self) -> tuple[bool, str]:
        return bool(self._ready), self._why

    async def _tell_health(self) -> None:
        status = health_pb2.HealthCheckResponse
        now = status.SERVING if self._ready else status.NOT_SERVING
        for name in ("", *(full_name for _, full_name in self._registrations)):
            await self._health.set(name, now)

    def _side(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            task = asyncio.get_running_loop().create_task(work)
        except RuntimeError:
            work.close()
            raise
        self._side_tasks.add(task)
        task.add_done_callback(self._side_tasks.discard)


def run_service(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a service's main coroutine on uvloop; a wrong setting is one clear line and exit code 2.

    Exit codes: 0 stopped as asked, 1 failed while running, 2 a setting or input is wrong.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except ReadyplaneError as error:
        print(f"error: {telemetry.mask_url(str(error))}", file=sys.stderr)  # noqa: T201 - to a person
        wrong = isinstance(error, InvalidField)
        raise SystemExit(EXIT_WRONG_INPUT if wrong else EXIT_FAILED) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        log.critical("failed", exc_info=error)
        raise SystemExit(EXIT_FAILED) from error


@contextlib.contextmanager
def _signals(stopping: asyncio.Event) -> Iterator[None]:
    """The first SIGTERM or SIGINT asks to stop; a second one does what it does by default."""
    loop = asyncio.get_running_loop()
    caught = (signal.SIGTERM, signal.SIGINT)

    def on_signal() -> None:
        stopping.set()
        remove()

    def remove() -> None:
        for number in caught:
            loop.remove_signal_handler(number)

    try:
        for number in caught:
            loop.add_signal_handler(number, on_signal)
    except (RuntimeError, ValueError):  # not the main thread: whoever runs it there stops it
        yield
        return
    try:
        yield
    finally:
        remove()


def listen(host: str, port: int, field: str = "http_port") -> socket.socket:
    """A listening-to-be TCP socket that shares its port with nobody."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        remedy = "write an address of this machine, 127.0.0.1 or 0.0.0.0"
        raise InvalidField("host", host, f"{remedy} ({error})") from error
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        # Two sockets may bind with SO_REUSEADDR; only one can listen.
        listening.listen(2048)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "write an address of this machine, 127.0.0.1 or 0.0.0.0"
            raise InvalidField("host", host, remedy) from error
        raise _in_use(field, port, os.strerror(error.errno or 0)) from error
    listening.setblocking(False)
    return listening


def _in_use(field: str, port: int, why: str) -> InvalidField:
    flag = "--" + field.replace("_", "-")
    remedy = f"choose another port with {flag}, or 0 for a free one ({why})"
    return InvalidField(field, port, remedy)


def _port(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reachable(host: str) -> str:
    """Where this machine reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _name(work: Background) -> str:
    inner = getattr(work, "func", work)
    return str(getattr(inner, "__qualname__", None) or type(inner).__name__)


def _write_atomically(path: Path, document: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(document), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        remedy = f"give a file in a folder that can be written ({error.strerror})"
        raise InvalidField("ready_file", str(path), remedy) from error
