"""The process that speaks NIXL, for one arena: run as a script, killed at any time without harm.

Owns the NIXL agent and a mapping of the arena, because a transfer library may abort the whole
process when its peer dies. Imports nothing of the product, so that any interpreter which has NIXL
can run it. `nixl_way` starts it and speaks with it: a JSON line each way; the first line that it
writes says `ready` or `failed`. It ends when its standard input does.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import select
import sys
from typing import Any

PROT_READ, PROT_WRITE, MAP_SHARED = 1, 2, 1
POLL_S = 0.0002
IDLE_S = 60.0


def mapped(fd: int, size_bytes: int, *, writable: bool) -> int:
    """Address of the arena; read-only for who gives, since it may be sealed later."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    if not writable:
        # A map of a file that is open for writing counts as one that may write, and forbids the seal.
        fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    wanted = PROT_READ | (PROT_WRITE if writable else 0)
    found = libc.mmap(None, size_bytes, wanted, MAP_SHARED, fd, 0)
    if found in {None, ctypes.c_void_p(-1).value}:
        raise OSError(ctypes.get_errno(), "the arena cannot be mapped")
    return int(found)


class Child:
    """One NIXL agent and its reads under way."""

    def __init__(self, fd: int, size_bytes: int, *, writable: bool, name: str, out: Any) -> None:
        from nixl._api import (  # type: ignore[import-not-found,unused-ignore]
            nixl_agent,
            nixl_agent_config,
        )

        self._out = out
        self._base = mapped(fd, size_bytes, writable=writable)
        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        self._agent.register_memory([(self._base, size_bytes, 0, "")], "DRAM")
        self._under_way: list[tuple[int, Any]] = []
        told = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self.say({"ready": told, "base": self._base})

    def say(self, answer: dict[str, Any]) -> None:
        """One line to the agent."""
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    def run(self) -> None:
        """Carry out what is asked until nobody asks any more."""
        pending = b""
        while True:
            wait_s = POLL_S if self._under_way else IDLE_S
            if select.select([0], [], [], wait_s)[0]:
                got = os.read(0, 65536)
                if not got:
                    return
                *lines, pending = (pending + got).split(b"\n")
                for line in lines:
                    self._begin(json.loads(line))
            self._look()

    def _begin(self, asked: dict[str, Any]) -> None:
        number = asked["id"]
        try:
            if "peer" in asked:
                found = self._agent.add_remote_agent(base64.b64decode(asked["peer"]))
                name = found.decode() if isinstance(found, bytes) else found
                self.say({"id": number, "peer": name})
                return
            here = self._agent.get_xfer_descs(
                [(self._base + asked["to"], asked["size"], 0)], "DRAM"
            )
            there = self._agent.get_xfer_descs([(asked["at"], asked["size"], 0)], "DRAM")
            handle = self._agent.initialize_xfer("READ", here, there, asked["of"])
            self._agent.transfer(handle)
            self._under_way.append((number, handle))
        except Exception as error:  # noqa: BLE001 - whatever the library raises is the answer
            self.say({"id": number, "failed": repr(error)})

    def _look(self) -> None:
        left = []
        for number, handle in self._under_way:
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:  # noqa: BLE001
                state = repr(error)
            if state == "PROC":
                left.append((number, handle))
                continue
            if state == "DONE":
                self._agent.release_xfer_handle(handle)
                self.say({"id": number})
            else:
                self.say({"id": number, "failed": state})
        self._under_way = left


def main() -> None:
    """Arguments: arena's file descriptor, its bytes, `read` or `give`, a name of our own."""
    fd, size_bytes, way, name = sys.argv[1:5]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library logs there
    try:
        child = Child(int(fd), int(size_bytes), writable=way == "read", name=name, out=out)
    except Exception as error:  # noqa: BLE001
        out.write(json.dumps({"failed": f"{type(error).__name__}: {error}"}) + "\n")
        out.flush()
        os._exit(1)
    child.run()
    os._exit(0)


if __name__ == "__main__":
    main()
