"""What one worker gives of its weights, and why not: the verdict on each request for chunks.

Owns the handshake (R9.2): the artifact's digest (B115), the process's incarnation (B144) and the
digest of the layout in memory (B108) must be those that the reader was told, before the first byte.
Gives verified chunks only, of an arena that may still be filling: a chunk that is not verified yet
is answered `425 Too Early`. Hands `Answer` to `transfer`, which sends the bytes and paces them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import parse_qs, unquote

from readyplane_agent.arena import Arena
from readyplane_agent.engines.layout import layout_digest
from readyplane_agent.http_head import Answer, span

INCARNATION = "X-Readyplane-Incarnation"
LAYOUT = "X-Readyplane-Layout"
DRAINING = "X-Readyplane-Draining"
# Who reads, by its incarnation: a source that drains lets its readers finish.
READER = "X-Readyplane-Reader"
PAUSED = "X-Readyplane-Paused"
# The bytes go over NIXL: who asks for a chunk so is told its address instead.
VIA = "X-Readyplane-Via"
AT = "X-Readyplane-At"
NIXL = "X-Readyplane-Nixl"
OCTETS = "application/octet-stream"


class Offering:
    """The chunks of one arena.

    Args:
        arena: being filled, or full. incarnation: who we are.
    """

    def __init__(self, arena: Arena, *, incarnation: str) -> None:
        self._arena = arena
        self.digest = arena.manifest.digest
        self.layout = layout_digest(arena.manifest)
        self._files = [os.dup(fd) for fd in arena.memory.descriptors]
        self._echo = f"{INCARNATION}: {incarnation}\r\n{LAYOUT}: {self.layout}\r\n"

    def where(self, answer: Answer) -> tuple[int, int]:
        """Where the bytes of an answer begin: (descriptor, offset)."""
        number, at = self._arena.locate(answer.path, answer.start)
        return self._files[number], at

    def refusal(self, digest: str, query: str) -> Answer | None:
        """Why this reader gets nothing of what it speaks of, None when it may have it."""
        if digest != self.digest:
            return Answer("404 Not Found", b"this worker does not hold that artifact\n")
        layout = parse_qs(query).get("layout", [""])[0]
        if layout and layout != self.layout:
            return Answer(
                "412 Precondition Failed",
                f"the layout here is {self.layout}: read from another source\n".encode(),
            )
        return None

    def chunk(self, path: str, asked: str, *, extra: str = "") -> Answer:
        """A range of a file, if every chunk that it touches is verified."""
        path = unquote(path)
        entry = self._arena.entry(path)
        if entry is None:
            return Answer("404 Not Found", b"the artifact has no such file\n")
        found = span(asked, entry.size_bytes)
        if found is None:
            return Answer(
                "416 Range Not Satisfiable", f"{path} has {entry.size_bytes} bytes\n".encode()
            )
        start, size = found
        if not self._arena.verified(path, start, size):
            return Answer("425 Too Early", b"not yet: these bytes are not verified here\n")
        return Answer(
            "206 Partial Content" if asked else "200 OK",
            kind=OCTETS,
            path=path,
            start=start,
            size=size,
            total=entry.size_bytes,
            extra=self._echo + extra,
        )

    def holdings(self, *, extra: str = "") -> Answer:
        """A byte for each chunk of the artifact: missing, coming or verified (`Arena.progress`)."""
        return Answer("200 OK", bytes(self._arena.progress), OCTETS, extra=self._echo + extra)

    def address(self, chunk: Answer, base: int) -> Answer:
        """Instead of a chunk that may go: where it lies in memory that begins at `base`."""
        at = f"{AT}: {base + self._arena.offsets[chunk.path] + chunk.start}\r\n"
        return Answer("204 No Content", size=chunk.size, extra=chunk.extra + at)

    def nixl(self, metadata: str) -> Answer:
        """What a reader's process needs to find ours."""
        return Answer("204 No Content", extra=f"{self._echo}{NIXL}: {metadata}\r\n")

    def close(self) -> None:
        """Give the files back. Idempotent."""
        files, self._files = self._files, []
        for fd in files:
            os.close(fd)


def echoed(head: Mapping[str, str], *, incarnation: str, layout: str) -> str:
    """What is wrong with a source's side of the handshake, empty when nothing is.

    Args:
        head: header names in lower case. incarnation, layout: what the source must be and hold.
    """
    for name, wanted in ((INCARNATION, incarnation), (LAYOUT, layout)):
        given = head.get(name.lower(), "")
        if wanted and given != wanted:
            return f"{name} is {given or 'not said'}, wanted {wanted}"
    return ""
