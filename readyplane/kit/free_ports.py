"""TCP ports for programs that can be told a port, but cannot choose one and tell which.

Owns the choice. A port that the kernel would give to `bind(0)` may be taken before the program binds
it: by any outgoing connection of the machine, since those come from the same range. So they are taken
from below that range, at random, where only who listens on purpose is met.
"""

from __future__ import annotations

import socket
from pathlib import Path
from random import SystemRandom

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST = 10_000
FEW = 2_000
"""Fewer ports than that below the kernel's own range are not enough to pick from at random."""

TRIES_MAX = 200


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """As many different ports of an address as nobody listened on a moment ago.

    Raises:
        OSError: the address is not of this machine, or it has no port left.
    """
    held: list[socket.socket] = []
    try:
        held.extend(_hold(host) for _ in range(count))
        return tuple(int(s.getsockname()[1]) for s in held)
    finally:
        for s in held:
            s.close()


def _hold(host: str) -> socket.socket:
    random, top = SystemRandom(), _lowest_of_the_kernel()
    if top - LOWEST >= FEW:
        for _ in range(TRIES_MAX):
            try:
                return socket.create_server((host, random.randrange(LOWEST, top)))
            except OSError:
                continue
    return socket.create_server((host, 0))


def _lowest_of_the_kernel() -> int:
    """First port that outgoing connections are given; `LOWEST` where nobody says."""
    try:
        return int(RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return LOWEST
