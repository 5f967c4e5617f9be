"""The four services as processes: started with fixed addresses, watched, started again.

Owns names, ports, ready files and the restart bound. A service that ends by itself is started
again at the same address, a bounded number of times within a window; beyond that the stack says so
and ends. A start again that fails counts as one of them: a store that comes back takes its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from readyplane.core.errors import Unavailable
from readyplane.kit.clock import Clock
from readyplane_lab.up.local_server import free_port
from readyplane_lab.up.processes import ProcessTable

RESTARTS_MAX = 5
RESTART_WINDOW_S = 300.0
"""So many starts again within that time, and no more; one that ends now and then is kept."""
WRONG_SETTING = 2  # the exit code of a service that refuses what it was told
READY_WITHIN_S = 60.0
STOP_GRACE_S = 15.0
POLL_EVERY_S = 0.05

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Service:
    """One service process and its addresses."""

    name: str
    module: str
    grpc_port: int
    http_port: int
    args: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    restarts: int = 0
    again_s: deque[float] = field(default_factory=lambda: deque(maxlen=RESTARTS_MAX))
    wanted: bool = True
    starting: bool = False

    @property
    def grpc(self) -> str:
        """Address of its gRPC server, `host:port`."""
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def http(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.http_port}"


class Services:
    """The service processes of one stack."""

    def __init__(
        self,
        table: ProcessTable,
        *,
        run_dir: Path,
        logs_dir: Path,
        environment: Mapping[str, str],
        clock: Clock,
        gave_up: Callable[[str], None],
        stores_whole: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """A table of services, none of them planned yet.

        Args:
            table: starts them. run_dir, logs_dir: of ready files and of logs.
            environment: of all of them. clock: real time.
            gave_up: called with a sentence when a service cannot be kept running.
            stores_whole: waits until no store is being started again, in bounded time; asked before
                a service is started again.
        """
        self._table = table
        self._run_dir = run_dir
        self._logs_dir = logs_dir
        self._environment = dict(environment)
        self._clock = clock
        self._gave_up = gave_up
        self._stores_whole = stores_whole
        self._services: dict[str, Service] = {}
        self._restarting: set[asyncio.Task[None]] = set()

    def plan(
        self, name: str, *, module: str = "", http_port: int = 0, args: tuple[str, ...] = ()
    ) -> Service:
        """Choose the addresses of a service without starting it; `module` where it has another name."""
        service = Service(
            name=name,
            module=f"readyplane_{module or name}",
            grpc_port=free_port(),
            http_port=http_port or free_port(),
            args=args,
        )
        self._services[name] = service
        return service

    async def start(self, service: Service) -> None:
        """Start and wait until it has bound its ports.

        Raises:
            Unavailable: it ended or was not ready in time; the end of its log is shown.
        """
        service.starting = True  # whoever ends now is told of by this very call
        try:
            await self._start(service)
        except Unavailable:
            await self._table.stop(service.name, grace_s=1.0)
            raise
        finally:
            service.starting = False

    async def _start(self, service: Service) -> None:
        ready_file = self._run_dir / f"{service.name}.ready"
        ready_file.unlink(missing_ok=True)
        await self._table.spawn(
            service.name,
            [
                *(sys.executable, "-m", service.module),
                *("--grpc-port", str(service.grpc_port), "--http-port", str(service.http_port)),
                *("--ready-file", str(ready_file), *service.args),
            ],
            {**self._environment, **service.environment},
            self._logs_dir / f"{service.name}.log",
        )
        deadline_s = self._clock.monotonic_s() + READY_WITHIN_S
        while True:
            ready, code = _is_ready(ready_file), self._table.returncode(service.name)
            if ready and code is None:
                return
            if code is not None or self._clock.monotonic_s() > deadline_s:
                how = "was not ready in time" if code is None else f"ended with code {code}"
                raise Unavailable(
                    f"service {service.name} {how}:\n{self._table.log_tail(service.name)}",
                    f"see {self._logs_dir / (service.name + '.log')}",
                )
            await asyncio.sleep(POLL_EVERY_S)

    def exited(self, name: str, returncode: int) -> None:
        """To be called by the process table when a service ends that nobody asked to stop."""
        service = self._services.get(name)
        if service is None or not service.wanted or service.starting:
            return
        if self._counts(service, returncode):
            task = asyncio.get_running_loop().create_task(self._again(service))
            self._restarting.add(task)
            task.add_done_callback(self._restarting.discard)

    def _counts(self, service: Service, returncode: int | None, why: str = "") -> bool:
        """Whether it may be started once more, which then counts; where not, that is said.

        Args:
            service: has ended. returncode: how; None where it was only too slow.
            why: what its start said, where it had not come up.
        """
        if not service.wanted:
            return False
        name, now_s = service.name, self._clock.monotonic_s()
        if returncode == WRONG_SETTING:
            self._gave_up(f"{name} refused its settings:\n{self._table.log_tail(name)}")
            return False
        if not may_start_again(service.again_s, now_s):
            times = f"{RESTARTS_MAX + 1} times in {now_s - service.again_s[0]:.0f} s"
            self._gave_up(why or f"{name} ended {times}, last with {returncode}")
            return False
        service.restarts += 1
        service.again_s.append(now_s)
        log.warning(
            "%s %s; start %d of %d within %.0f s again",
            name,
            "was not ready in time" if returncode is None else f"ended with code {returncode}",
            len(service.again_s),
            RESTARTS_MAX,
            RESTART_WINDOW_S,
        )
        return True

    async def _again(self, service: Service) -> None:
        for _ in range(RESTARTS_MAX):
            await self._clock.sleep(0.2 * 2 ** len(service.again_s))
            if self._stores_whole is not None:
                await self._stores_whole()
            if not service.wanted:
                return
            try:
                await self.start(service)
            except Unavailable as error:
                code = self._table.returncode(service.name)
                if not self._counts(service, code, str(error)):
                    return
            else:
                return

    async def stop(self, name: str) -> None:
        """Ask a service to end, and wait for it."""
        service = self._services.get(name)
        if service is not None:
            service.wanted = False
            await self._table.stop(name, grace_s=STOP_GRACE_S)

    async def close(self) -> None:
        """No more restarts; stop all."""
        for service in self._services.values():
            service.wanted = False
        for task in list(self._restarting):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.gather(*(self.stop(name) for name in self._services))

    def like(self, module: str) -> list[Service]:
        """The services of one kind."""
        return [s for s in self._services.values() if s.module == f"readyplane_{module}"]

    @property
    def restarts(self) -> dict[str, int]:
        """How often each service was started again, only those that were."""
        return {s.name: s.restarts for s in self._services.values() if s.restarts}


def may_start_again(again_s: deque[float], now_s: float) -> bool:
    """Whether one more start is within the bound; starts of before the window are forgotten."""
    while again_s and now_s - again_s[0] >= RESTART_WINDOW_S:
        again_s.popleft()
    return len(again_s) < RESTARTS_MAX


def _is_ready(ready_file: Path) -> bool:
    try:
        return bool(json.loads(ready_file.read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return False
