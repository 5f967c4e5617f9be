"""The communicator of a modelled group: rank 0 and all others, connected over TCP.

Owns the links, a sum over all ranks, and the beats that tell that every rank still takes part. Rank 0
listens at a free port and writes it, with a word that only this group knows, to a file; the others
wait for the file. A communicator that lost a rank is not mended: whoever waits for it gets
`RankLost` and ends, and a new group makes a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

from readyplane.core.errors import Unavailable
from readyplane.kit.clock import Clock

# A rank may be this much later than another, at first and in a step that all take part in.
CONNECT_LIMIT_S = 600.0
ANSWER_LIMIT_S = 600.0
BEAT_EVERY_S = 1.0
BEAT_LIMIT_S = 10.0
# Rank 0 asks every second, and waits for another rank that hangs: so that it is heard first.
SILENCE_LIMIT_S = BEAT_LIMIT_S + 2 * BEAT_EVERY_S
CONNECT_PAUSE_S = 0.02
HELLO = struct.Struct("<32sI")
WORD = struct.Struct("<Q")
BEAT = b"beat"
MASK = 2**64 - 1
REMEDY = "start the group anew"


class RankLost(Unavailable):
    """Another rank of the group is gone, or never came.

    Attributes:
        lost: which, None when it is not known.
    """

    def __init__(self, reason: str, remedy: str, *, lost: int | None = None) -> None:
        super().__init__(reason, remedy)
        self.lost = lost


class Communicator:
    """This rank's links: of rank 0 to all others, of the others to rank 0.

    Every call is one that all ranks make in the same order. Raises RankLost wherever another rank
    is gone, naming it where that is known.
    """

    def __init__(self, rank: int, world: int, links: dict[int, socket.socket]) -> None:
        self.rank, self.world, self._links = rank, world, links
        self._closed = threading.Event()

    # ------------------------------------------------------------------ coming together

    @classmethod
    def lead(cls, world: int, rendezvous: Path, *, host: str = "127.0.0.1") -> Communicator:
        """Rank 0's side: tell where, and wait for all others."""
        links: dict[int, socket.socket] = {}
        word = secrets.token_hex(16).encode()
        try:
            with socket.create_server((host, 0)) as server:
                server.settimeout(CONNECT_LIMIT_S)
                _tell(rendezvous, {"port": server.getsockname()[1], "word": word.decode()})
                while len(links) < world - 1:
                    link, _ = server.accept()
                    rank = _greeted(link, word, world)
                    if rank is None or rank in links:
                        link.close()
                        continue
                    links[rank] = link
        except OSError as error:
            for link in links.values():
                link.close()
            absent = sorted(set(range(1, world)) - set(links))
            raise RankLost(f"ranks {absent} did not connect ({error})", REMEDY) from error
        finally:
            rendezvous.unlink(missing_ok=True)
        return cls(0, world, links)

    @classmethod
    def follow(
        cls, rank: int, world: int, rendezvous: Path, *, clock: Clock, host: str = "127.0.0.1"
    ) -> Communicator:
        """Another rank's side: wait until rank 0 says where, and connect."""
        until_s, pause = clock.monotonic_s() + CONNECT_LIMIT_S, threading.Event()
        while True:
            try:
                told = json.loads(rendezvous.read_bytes())
                link = socket.create_connection((host, told["port"]), timeout=CONNECT_LIMIT_S)
                link.settimeout(ANSWER_LIMIT_S)
                link.sendall(HELLO.pack(str(told["word"]).encode(), rank))
            except (OSError, ValueError, KeyError) as error:
                if clock.monotonic_s() > until_s:
                    raise RankLost(f"rank 0 is not found ({error})", REMEDY) from error
                pause.wait(CONNECT_PAUSE_S)
            else:
                return cls(rank, world, {0: link})

    # ------------------------------------------------------------------ what all do together

    def all_reduce(self, values: Sequence[int]) -> list[int]:
        """The sums of all ranks' values, modulo 2**64, on every rank."""
        total = [value & MASK for value in values]
        kind = struct.Struct(f"<{len(total)}Q")
        if self.rank == 0:
            for rank in self._links:
                part = kind.unpack(self._take(rank, kind.size))
                total = [(a + b) & MASK for a, b in zip(total, part, strict=True)]
            for rank in self._links:
                self._give(rank, kind.pack(*total))
            return total
        self._give(0, kind.pack(*total))
        return list(kind.unpack(self._take(0, kind.size)))

    def gather(self, own: bytes | memoryview) -> list[bytes | memoryview]:
        """Every rank's bytes, by its number, at rank 0; empty on the others. Lengths may differ."""
        if self.rank:
            self._give(0, WORD.pack(len(own)))
            self._give(0, own)
            return []
        found: list[bytes | memoryview] = [own]
        for rank in range(1, self.world):
            (size,) = WORD.unpack(self._take(rank, WORD.size))
            found.append(self._take(rank, size))
        return found

    def spread(self, own: bytes) -> memoryview:
        """Rank 0's bytes, on every rank; what the others give is not looked at."""
        if self.rank:
            (size,) = WORD.unpack(self._take(0, WORD.size))
            return self._take(0, size)
        for rank in self._links:
            self._give(rank, WORD.pack(len(own)))
            self._give(rank, own)
        return memoryview(own)

    # ------------------------------------------------------------------ and from then on

    def beat(self) -> None:
        """Rank 0: one sum with all others, within `BEAT_LIMIT_S`; as long as it lasts nobody is gone."""
        for link in self._links.values():
            link.settimeout(BEAT_LIMIT_S)
        self.spread(BEAT)
        (present,) = self.all_reduce([1])
        if present != self.world:
            raise RankLost(f"{present} of {self.world} ranks answered", REMEDY)

    def watch(self) -> None:
        """Rank 0: beat until closed. Raises RankLost as soon as a rank is gone."""
        links = {link: rank for rank, link in self._links.items()}
        while not self._closed.is_set():
            gone, _, _ = select.select(list(links), [], [], BEAT_EVERY_S)
            if self._closed.is_set():
                return
            if gone:  # nobody speaks between two beats: this is the end of a link
                rank = links[gone[0]]
                raise RankLost(f"rank {rank} is gone", REMEDY, lost=rank)
            self.beat()

    def stand(self) -> None:
        """Other ranks: answer rank 0's beats. Raises RankLost when rank 0 is gone or falls silent."""
        self._links[0].settimeout(SILENCE_LIMIT_S)
        while True:
            self.spread(b"")
            self.all_reduce([1])

    def close(self) -> None:
        """Let go. Idempotent."""
        self._closed.set()
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
            link.close()

    def _give(self, rank: int, data: bytes | memoryview) -> None:
        try:
            self._links[rank].sendall(data)
        except OSError as error:
            raise RankLost(f"rank {rank} is gone ({error})", REMEDY, lost=rank) from error

    def _take(self, rank: int, size: int) -> memoryview:
        try:
            return _whole(self._links[rank], size)
        except TimeoutError as error:
            raise RankLost(f"rank {rank} does not answer", REMEDY, lost=rank) from error
        except OSError as error:
            raise RankLost(f"rank {rank} is gone ({error})", REMEDY, lost=rank) from error


def _tell(path: Path, document: dict[str, object]) -> None:
    """Whole or not at all, and for this user alone."""
    part = path.with_name(path.name + ".part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
        json.dump(document, file)
    part.replace(path)


def _greeted(link: socket.socket, word: bytes, world: int) -> int | None:
    """The rank that has connected; None for a stranger."""
    link.settimeout(BEAT_LIMIT_S)
    try:
        said, rank = HELLO.unpack(_whole(link, HELLO.size))
    except OSError:
        return None
    if not secrets.compare_digest(said, word) or not 0 < rank < world:
        return None
    link.settimeout(ANSWER_LIMIT_S)
    return int(rank)


def _whole(link: socket.socket, size: int) -> memoryview:
    found = memoryview(bytearray(size))
    done = 0
    while done < size:
        got = link.recv_into(found[done:])
        if not got:
            raise ConnectionResetError("the other end closed")
        done += got
    return found
