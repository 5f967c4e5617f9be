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
_USAGE = b',"usage":{'
MOVED = "moved"
_MOVED = b'"finish_reason":"moved"'
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
_usage_decoder = msgspec.json.Decoder(Usage)


class SseScan:
    """Follows one stream that was asked for with `include_usage` and `continuous_usage_stats`.

    Attributes:
        events: data events passed on, the end marker and usage chunks not counted.
        usage: the last usage told. done: the end marker was seen.
        error: the raw error object of an error event, empty while there was none.
        moved: the engine gave the request away; what it says after that is not for the client.
            Set it back when another engine goes on.
    """

    __slots__ = ("_carry", "_keep_each", "_keep_last", "done", "error", "events", "moved", "usage")

    def __init__(self, *, keep_last: bool, keep_each: bool = False) -> None:
        """What the client asked for itself, and is passed on. `keep_last`: the usage chunk at the
        end. `keep_each`: the usage in every chunk.
        """
        self._keep_last, self._keep_each = keep_last, keep_each
        self._carry = b""
        self.events = 0
        self.usage: Usage | None = None
        self.done = self.moved = False
        self.error = b""

    @property
    def tokens(self) -> int:
        """Output tokens so far: as told, else one for each event."""
        told = self.usage.completion_tokens if self.usage is not None else None
        return self.events if told is None else told

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
        if data.count(_TOKEN) == events and _USAGE not in data:
            self.events += events
            return data
        return b"".join(
            kept + b"\n\n" for event in data[:-2].split(b"\n\n") if (kept := self._event(event))
        )

    def _event(self, event: bytes) -> bytes:
        """One event: the bytes to pass on, empty to drop it."""
        if self.moved or _MOVED in event:
            self.moved = True
            return b""
        if _TOKEN in event:
            cut = _cut_usage(event)
            if cut is not None:
                self.events += 1
                self.usage, bare = cut
                return event if self._keep_each else bare
        return self._read(event)

    def _read(self, event: bytes) -> bytes:
        lines = [line for line in event.split(b"\n") if line and not line.startswith(b":")]
        payload = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
        if not payload:
            return b""  # a comment that keeps a connection open, or a field nobody uses
        plain = b"\n".join(lines)
        if payload == b"[DONE]":
            self.done = True
            return b"data: [DONE]"
        try:
            read = _decoder.decode(payload)
        except msgspec.MsgspecError:
            self.events += 1  # not ours to judge
            return plain
        if read.error and bytes(read.error) != b"null":
            self.error = bytes(read.error)
            return plain
        if read.usage is None:
            self.events += 1
            return plain
        self.usage = read.usage
        if not read.choices:
            return plain if self._keep_last else b""
        self.events += 1
        return plain if self._keep_each else b"data: " + _without_usage(payload)


def _cut_usage(event: bytes) -> tuple[Usage, bytes] | None:
    """Usage of an event and the event without it, by its bytes; None where that is not plain."""
    start = event.rfind(_USAGE)
    if start < 0 or not event.startswith(b"data:"):
        return None
    end, depth = start + len(_USAGE), 1
    while depth:  # no usage holds text, so every brace is one
        close = event.find(b"}", end)
        if close < 0:
            return None
        depth += event.count(b"{", end, close) - 1
        end = close + 1
    try:
        usage = _usage_decoder.decode(event[start + len(_USAGE) - 1 : end])
    except msgspec.MsgspecError:
        return None
    return usage, event[:start] + event[end:]


def _without_usage(payload: bytes) -> bytes:
    document = msgspec.json.decode(payload)
    del document["usage"]
    return msgspec.json.encode(document)
