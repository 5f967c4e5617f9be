"""The four services as processes: started with fixed addresses, watched, started again.

Owns names, ports, ready files and the restart bound. A service that ends by itself is started
again at the same address, a bounded number of times within a window; beyond that the stack says so
and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping
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
    ) -> None:
        """`gave_up` is called with a sentence when a service cannot be kept running."""
        self._table = table
        self._run_dir = run_dir
        self._logs_dir = logs_dir
        self._environment = dict(environment)
        self._clock = clock
        self._gave_up = gave_up
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
        while not _is_ready(ready_file):
            code = self._table.returncode(service.name)
            late = self._clock.monotonic_s() > deadline_s
            if code is not None or late:
                service.wanted = False
                await self._table.stop(service.name, grace_s=1.0)
                how = "was not ready in time" if code is None else f"ended with code {code}"
                raise Unavailable(
                    f"service {service.name} {how}:\n{self._table.log_tail(service.name)}",
                    f"see {self._logs_dir / (service.name + '.log')}",
                )
            await asyncio.sleep(POLL_EVERY_S)

    def exited(self, name: str, returncode: int) -> None:
        """To be called by the process table when a service ends that nobody asked to stop."""
        service = self._services.get(name)
        if service is None or not service.wanted:
            return
        if returncode == WRONG_SETTING:
            self._gave_up(f"{name} refused its settings:\n{self._table.log_tail(name)}")
            return
        now_s = self._clock.monotonic_s()
        if not may_start_again(service.again_s, now_s):
            times = f"{RESTARTS_MAX + 1} times in {now_s - service.again_s[0]:.0f} s"
            self._gave_up(f"{name} ended {times}, last with {returncode}")
            return
        service.restarts += 1
        service.again_s.append(now_s)
        log.warning(
            "%s ended with code %d; start %d of %d within %.0f s again",
            name,
            returncode,
            len(service.again_s),
            RESTARTS_MAX,
            RESTART_WINDOW_S,
        )
        task = asyncio.get_running_loop().create_task(self._again(service))
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)

    async def _again(self, service: Service) -> None:
        await self._clock.sleep(0.2 * 2 ** len(service.again_s))
        if not service.wanted:
            return
        try:
            await self.start(service)
        except Unavailable as error:
            self._gave_up(str(error))

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
