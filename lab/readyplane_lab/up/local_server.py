"""A server of our own on a loopback port: choose the port, start, wait for the first real answer.

Owns the choice of the port, the retry when somebody else took it between choosing and binding, and the
error that shows the end of the server's log. Hands ports to the embedded Postgres and Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from readyplane.core.errors import Unavailable
from readyplane.kit.free_ports import free_ports
from readyplane_lab.up.processes import LOG_TAIL_BYTES_MAX, ProcessTable

HOST = "127.0.0.1"
PORT_TRIES_MAX = 5
WANTED_TRIES_MAX = 3
WANTED_PAUSE_S = 0.5
"""A port may be taken for a moment, by a connection of somebody else's that was given its number."""
READY_POLL_EVERY_S = 0.01
LOG_LINES_SHOWN = 15
PORT_TAKEN = "Address already in use"


@dataclass(frozen=True, slots=True)
class Server:
    """What the launcher needs to know of a server.

    Args:
        what: its name for people.
        name: its name in the table.
        table: where `spawn` starts it.
        log_path: where it writes; a refused bind shows there.
        spawn: starts it on the given port.
        absent: why it does not answer there as itself yet; empty when it does.
    """

    what: str
    name: str
    table: ProcessTable
    log_path: Path
    spawn: Callable[[int], Awaitable[int]]
    absent: Callable[[int], Awaitable[str]]


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    return free_ports(HOST, 1)[0]


def plain_environment() -> dict[str, str]:
    """Nothing that a server would heed by surprise (PGOPTIONS, PGPORT, a locale, a time zone)."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {"PATH": os.defpath, **kept, "LC_ALL": "C", "TZ": "UTC"}


async def launch(server: Server, *, within_s: float, port_wanted: int | None = None) -> int:
    """Start the server and return its port once it answers; `port_wanted` is tried first,
    `WANTED_TRIES_MAX` times.

    Raises:
        Unavailable: it ended, or did not answer within `within_s`; with the end of its log. The
            caller closes the table.
    """
    for attempt in range(PORT_TRIES_MAX):
        wanted = port_wanted if attempt < WANTED_TRIES_MAX else None
        if wanted is not None and attempt:
            await asyncio.sleep(WANTED_PAUSE_S)
        port = wanted if wanted is not None else free_port()
        log_start_bytes = _size_bytes(server.log_path)
        await server.spawn(port)
        if await _answers(server, port, within_s):
            return port
        if PORT_TAKEN not in _text_since(server.log_path, log_start_bytes):
            code = server.table.returncode(server.name)
            raise _failed(server, f"ended with code {code} before it was ready")
    raise _failed(server, f"found {PORT_TRIES_MAX} ports taken one after the other")


async def _answers(server: Server, port: int, within_s: float) -> bool:
    """Whether it came to answer; False if it ended instead.

    Its end is watched beside the question: where a stranger took the port, the question may hang.
    """
    why, over = "no word", False

    async def ask() -> None:
        nonlocal why
        # A client library may swallow a cancellation that meets its own timeout: hence `over`.
        while not over and (why := await server.absent(port)):
            await asyncio.sleep(READY_POLL_EVERY_S)

    asking = asyncio.ensure_future(ask())
    ending = asyncio.ensure_future(server.table.wait(server.name))
    try:
        async with asyncio.timeout(within_s):
            await asyncio.wait((asking, ending), return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            return False
        await asking
    except TimeoutError:
        raise _failed(server, f"did not answer within {within_s:.0f} s ({why})") from None
    finally:
        over = True
        for task in (asking, ending):
            task.cancel()
        await asyncio.gather(asking, ending, return_exceptions=True)
    return True


def _failed(server: Server, how: str) -> Unavailable:
    tail = server.table.log_tail(server.name, LOG_LINES_SHOWN)
    said = f"; its log ends with\n{tail}\n" if tail else ""
    return Unavailable(
        f"{server.what} {how}{said}",
        f"see {server.log_path}, or give the address of a running server",
    )


def _size_bytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


def _text_since(path: Path, start_bytes: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(start_bytes if _size_bytes(path) >= start_bytes else 0)
            return file.read(LOG_TAIL_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
