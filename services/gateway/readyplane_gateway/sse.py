"""Server-sent events as bytes: what may be passed on untouched, and the few that are read.

Owns the scanner of a decode leg's stream. Most chunks of a stream are whole events that nobody
needs to understand: they are counted and handed on as they came. Only usage, errors, comments and
the end are parsed.
"""

from __future__ import annotations

import msgspec

# In every event that is a token and nothing else. It cannot stand inside a JSON string, where quotes
# are escaped; an engine that writes it otherwise is read event by event, which is right and slower.
_TOKEN = b'"finish_reason":null'
CARRY_BYTES_MAX = 4 * 1024 * 1024
DONE = b"data: [DONE]\n\n"


class Usage(msgspec.Struct):
    """Token counts as an engine tells them."""

    class Details(msgspec.Struct):
        """Of the prompt tokens."""

        cached_tokens: int | None = None

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that were not computed, None when not told."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] | None = None
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Event)


class SseScan:
    """Follows one stream.

    Attributes:
        events: data events passed on, the end marker and usage chunks not counted.
        usage: the last usage told. done: the end marker was seen.
        error: the raw error object of an error event, empty while there was none.
    """

    __slots__ = ("_carry", "_keep_usage", "done", "error", "events", "usage")

    def __init__(self, *, keep_usage: bool) -> None:
        """`keep_usage`: the client asked for the usage chunk, it is passed on."""
        self._keep_usage = keep_usage
        self._carry = b""
        self.events = 0
        self.usage: Usage | None = None
        self.done = False
        self.error = b""

    def feed(self, data: bytes) -> bytes:
        """Take bytes in, give the bytes that go to the client: always whole events.

        Raises:
            ValueError: an event longer than `CARRY_BYTES_MAX`.
        """
        if self._carry:
            data, self._carry = self._carry + data, b""
        if b"\r" in data:
            # JSON has no raw carriage return, so none is lost; one at the end may be half a break.
            data = data.replace(b"\r\n", b"\n")
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            if len(data) > CARRY_BYTES_MAX:
                raise ValueError(f"an event of over {CARRY_BYTES_MAX} bytes")
            self._carry = data
            return b""
        if end != len(data):
            data, self._carry = data[:end], data[end:]
        events = data.count(b"\n\n")
        if data.count(_TOKEN) == events:
            self.events += events
            return data
        return b"".join(
            kept + b"\n\n" for event in data[:-2].split(b"\n\n") if (kept := self._read(event))
        )

    def _read(self, event: bytes) -> bytes:
        """One event: the bytes to pass on, empty to drop it."""
        lines = [line for line in event.split(b"\n") if line and not line.startswith(b":")]
        payload = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        if not payload:
            return b""  # a comment that keeps a connection open, or a field nobody uses
        if payload == b"[DONE]":
            self.done = True
            return b"data: [DONE]"
        try:
            read = _decoder.decode(payload)
        except msgspec.MsgspecError:
            self.events += 1  # not ours to judge
            return b"\n".join(lines)
        if read.error and bytes(read.error) != b"null":
            self.error = bytes(read.error)
            return b"\n".join(lines)
        if read.usage is not None:
            self.usage = read.usage
            if not read.choices:
                return b"\n".join(lines) if self._keep_usage else b""
        self.events += 1
        return b"\n".join(lines)
