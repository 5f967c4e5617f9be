"""One rank of a parallel group as a process of its own: `python -m …engines.modelled.rank`.

Owns the steps of a rank (R17.1) and what is real about them: it maps the arena and reads its own
tensors only, connects to the other ranks over TCP, and one all-reduce makes what all have read the
fingerprint that the canary's answer hangs on. Each step is one JSON line on stdout, told again with
growing progress while it lasts; nobody serves here, a group's engine would begin after the barrier.

A rank that loses another one ends: a communicator cannot be mended, only made anew.
"""

from __future__ import annotations

import argparse
import json
import mmap
import socket
import struct
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from readyplane.core.errors import InvalidField, ReadyplaneError, Unavailable
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines.layout import TensorSlot, read_tensor_table
from readyplane_agent.engines.modelled.answer import fingerprint, golden_answer, tensor_digest

CONNECT_LIMIT_S = 20.0
CONNECT_PAUSE_S = 0.02
FAILED_STATUS = 3
WORD = struct.Struct("<Q")
MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Who this rank is.

    `rendezvous`: port at which rank 0 listens. `wait_at`: a step to stop at, for tests, until a line
    comes on stdin.
    """

    rank: int
    world: int
    life: int
    communicator: int
    rendezvous: int
    arena: Path
    table: Path
    manifest_digest: str
    prompt: tuple[int, ...]
    golden: tuple[int, ...]
    wait_at: str = ""


def owned(slots: Sequence[TensorSlot], *, rank: int, world: int) -> list[int]:
    """Places of the tensors that a rank reads: every `world`-th, so that together they are all."""
    return [place for place in range(len(slots)) if place % world == rank]


def tell(s: RankSettings, step: str, *, progress: int = 0, detail: str = "") -> None:
    """One step, as a line; with `wait_at` it stays there until it is told to go on."""
    document = {
        "rank": s.rank,
        "step": step,
        "life": s.life,
        "communicator": s.communicator if step in {"connected", "placed", "canary_passed"} else 0,
        "manifest_digest": "" if step == "scheduled" else s.manifest_digest,
        "progress": progress,
        "detail": detail,
    }
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
    if step == s.wait_at and not sys.stdin.readline():
        raise Unavailable("nobody holds this rank any more", "start the group anew")


def read_own(s: RankSettings, slots: Sequence[TensorSlot]) -> tuple[list[int], int]:
    """Digests of the own tensors at their places, 0 elsewhere; and how many bytes were read."""
    out, done = [0] * len(slots), 0
    with s.arena.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for place in owned(slots, rank=s.rank, world=s.world):
            slot = slots[place]
            content = data[slot.offset_bytes : slot.offset_bytes + slot.size_bytes]
            digest = tensor_digest(slot.name, slot.dtype, slot.shape, content)
            (out[place],) = struct.unpack(">Q", digest)
            done += len(content)
            tell(s, "scheduled", progress=done)
    return out, done


class Communicator:
    """All ranks connected to rank 0; a sum over all of them goes through it.

    Raises Unavailable wherever another rank is gone.
    """

    def __init__(self, s: RankSettings) -> None:
        self._rank = s.rank
        self._links: list[socket.socket] = []
        try:
            if s.rank == 0:
                with socket.create_server(("127.0.0.1", s.rendezvous)) as server:
                    server.settimeout(CONNECT_LIMIT_S)
                    for _ in range(s.world - 1):
                        link, _ = server.accept()
                        link.settimeout(CONNECT_LIMIT_S)
                        if WORD.unpack(_whole(link, WORD.size)) != (s.communicator,):
                            raise Unavailable("a rank of another communicator came", "start anew")
                        self._links.append(link)
            else:
                link = _reach(s.rendezvous)
                link.sendall(WORD.pack(s.communicator))
                self._links.append(link)
        except OSError as error:
            raise Unavailable(
                f"the ranks do not find each other ({error})", "start anew"
            ) from error

    def all_reduce(self, values: Sequence[int]) -> list[int]:
        """The sums of all ranks' values, modulo 2**64, on every rank."""
        size = WORD.size * len(values)
        try:
            if self._rank == 0:
                total = list(values)
                for link in self._links:
                    part = struct.unpack(f"<{len(values)}Q", _whole(link, size))
                    total = [(a + b) & MASK for a, b in zip(total, part, strict=True)]
                for link in self._links:
                    link.sendall(struct.pack(f"<{len(total)}Q", *total))
                return total
            (link,) = self._links
            link.sendall(struct.pack(f"<{len(values)}Q", *values))
            return list(struct.unpack(f"<{len(values)}Q", _whole(link, size)))
        except OSError as error:
            raise Unavailable(f"another rank is gone ({error})", "start the group anew") from error

    def close(self) -> None:
        """Let go."""
        for link in self._links:
            link.close()


def _reach(port: int) -> socket.socket:
    """Rank 0, which may not listen yet."""
    clock, pause = SystemClock(), threading.Event()
    until_s = clock.monotonic_s() + CONNECT_LIMIT_S
    while True:
        try:
            link = socket.create_connection(("127.0.0.1", port), timeout=CONNECT_LIMIT_S)
        except ConnectionRefusedError:
            if clock.monotonic_s() > until_s:
                raise
            pause.wait(CONNECT_PAUSE_S)
        else:
            return link


def _whole(link: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = link.recv(size - len(parts))
        if not part:
            raise ConnectionResetError("the other end closed")
        parts += part
    return bytes(parts)


def run(s: RankSettings) -> None:
    """From scheduled to the canary.

    Raises:
        ReadyplaneError: why this rank failed.
    """
    tell(s, "scheduled")
    slots, _ = read_tensor_table(s.table.read_bytes())
    own, done = read_own(s, slots)
    tell(s, "verified", progress=done)
    group = Communicator(s)
    try:
        (present,) = group.all_reduce([1])
        if present != s.world:
            raise Unavailable(f"{present} of {s.world} ranks answered", "start the group anew")
        tell(s, "connected")
        everything = group.all_reduce(own)
        tell(s, "placed", detail=f"{sum(map(bool, everything))} tensors")
        weights = fingerprint(struct.pack(">Q", value) for value in everything)
        answer = golden_answer(weights, s.prompt, len(s.golden))
        if answer != s.golden:
            raise InvalidField("canary", list(answer), f"the known answer is {list(s.golden)}")
        group.all_reduce([1])  # nobody passes before all have answered
        tell(s, "canary_passed")
        sys.stdin.readline()  # the communicator lives as long as the group
    finally:
        group.close()


def main() -> int:
    """Run one rank. Exit status 3 when it failed; the reason is the last line."""
    parser = argparse.ArgumentParser(description="one rank of a modelled parallel group")
    for name in ("rank", "world", "life", "communicator", "rendezvous"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("arena", "table"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("manifest-digest", "prompt", "golden"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--wait-at", default="")
    given = vars(parser.parse_args())
    for name in ("prompt", "golden"):
        given[name] = tuple(int(token) for token in given[name].split(","))
    s = RankSettings(**given)
    try:
        run(s)
    except ReadyplaneError as error:
        tell(s, "failed", detail=str(error))
        return FAILED_STATUS
    return 0


if __name__ == "__main__":
    sys.exit(main())
