"""What picking a pair costs, beside Dynamo's `select_service`.

A pick reserves both sides and then releases both. For us that is a route and a completion over gRPC;
for the peer two select-and-reserve, one in each group, and two deletes over HTTP. Both get the same
prompts, every one of them new, from the same lean client (`bench.lean`), in turns within one run.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.lean import Grpc, Http, Lane, Talk, drive
from bench.router_fleet import BLOCK_SIZE
from bench.router_stack import PEER_GROUPS, PEER_MODEL, Side, our_side, their_side
from readyplane.v1 import router_pb2 as pb
from readyplane_lab.demo import MODEL

ISL, MAX_TOKENS, EXPECTED = 8_192, 64, 32
IN_FLIGHT, BATCH = 16, 16
FIRST_TOKEN = 100_000
VOCABULARY = 128_000
TAILS = 64
PROMPTS = 4_096
ROUTE = b"/readyplane.v1.Router/Route"
ROUTE_BATCH = b"/readyplane.v1.Router/RouteBatch"
COMPLETE = b"/readyplane.v1.Router/Complete"

Lanes = Callable[[Talk, Iterator[int], list[float]], Lane]


@dataclass(frozen=True, slots=True)
class Round:
    """One way, once: picks a second, its latencies, CPU of the side in seconds a pick."""

    per_s: float
    p50_s: float
    cpu_s: float


class Tokens:
    """Prompts of 8,192 token ids: the first is a number of its own, so that no two share a block."""

    def __init__(self) -> None:
        generator = np.random.default_rng(7)
        tails = generator.integers(0, VOCABULARY, (TAILS, ISL - 1), np.uint32)
        self._packed = [tail.tobytes() for tail in tails]
        self._json = [b",".join(b"%d" % value for value in tail) + b"]" for tail in tails]

    def ours(self, number: int) -> bytes:
        """The field of a `RouteRequest`."""
        first = (FIRST_TOKEN + number).to_bytes(4, "little")
        return b"\x1a" + _varint(4 * ISL) + first + self._packed[number % TAILS]

    def theirs(self, number: int) -> bytes:
        """The members of a JSON object."""
        return b'"token_ids":[%d,%b' % (FIRST_TOKEN + number, self._json[number % TAILS])


class Hashes:
    """The same as hashes of their blocks, which are new for a prompt."""

    def __init__(self) -> None:
        generator = np.random.default_rng(8)
        count = ISL // BLOCK_SIZE
        hashes = generator.integers(0, 1 << 63, (PROMPTS, count), np.int64)
        self._packed = [b"\x22" + _varint(8 * count) + row.tobytes() for row in hashes]
        self._json = []
        for row in hashes:
            text = b"[" + b",".join(b"%d" % value for value in row) + b"]"
            self._json.append(
                b'"block_hashes":%b,"sequence_hashes":%b,"isl_tokens":%d' % (text, text, ISL)
            )

    def ours(self, number: int) -> bytes:
        """The field of a `RouteRequest`."""
        return self._packed[number % PROMPTS]

    def theirs(self, number: int) -> bytes:
        """The members of a JSON object."""
        return self._json[number % PROMPTS]


Prompts = Tokens | Hashes


# --------------------------------------------------------------------------- lanes


class Ours:
    """Lanes that pick at our router."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        shape = pb.RouteRequest(model=MODEL, isl=ISL, max_tokens=MAX_TOKENS)
        self._shape = shape.SerializeToString()
        event = pb.RequestEvent(kind="finished", output_tokens=EXPECTED, attained=True)
        self._event = event.SerializeToString()

    def _request(self, number: int) -> bytes:
        name = b"p%d" % number
        return b"".join((_field(1, name), self._shape, self._prompts.ours(number)))

    def _ended(self, number: int) -> bytes:
        return _field(2, _field(1, b"p%d.0" % number) + self._event)

    def unary(self, _talk: Talk, numbers: Iterator[int], took_s: list[float]) -> Lane:
        """One route, one completion."""
        clock = _clock()
        for number in numbers:
            began_s = clock()
            yield ROUTE, self._request(number)
            yield COMPLETE, self._ended(number)
            took_s.append(clock() - began_s)

    def batch(self, _talk: Talk, numbers: Iterator[int], took_s: list[float]) -> Lane:
        """Sixteen routes in a message, sixteen completions in another."""
        clock = _clock()
        while some := list(itertools.islice(numbers, BATCH)):
            began_s = clock()
            answer = yield ROUTE_BATCH, *(_field(2, self._request(n)) for n in some)
            results = pb.RouteBatchResponse.FromString(answer).results
            if len(results) != len(some) or any(r.error_status for r in results):
                raise RuntimeError(f"not all were routed: {results[0]}")
            yield COMPLETE, *map(self._ended, some)
            took_s.extend([clock() - began_s] * len(some))


class Theirs:
    """Lanes that pick at the peer."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts

    def unary(self, talk: Talk, numbers: Iterator[int], took_s: list[float]) -> Lane:
        """Two reservations, then two deletes, one after the other as its own frontend does."""
        assert isinstance(talk, Http)
        clock = _clock()
        heads = [
            b'{"model_name":"%b","routing_group":"%b","expected_output_tokens":%d,'
            b'"selection_id":"' % (PEER_MODEL.encode(), group.encode(), EXPECTED)
            for group in PEER_GROUPS
        ]
        for number in numbers:
            began_s = clock()
            prompt = self._prompts.theirs(number)
            names = [b"%b%d" % (group[:1].encode(), number) for group in PEER_GROUPS]
            for head, name in zip(heads, names, strict=True):
                size = len(head) + len(name) + len(prompt) + 3
                yield (
                    talk.head(b"POST", b"/select_and_reserve", size),
                    head,
                    name,
                    b'",',
                    prompt,
                    b"}",
                )
            for name in names:
                yield (talk.head(b"DELETE", b"/reservations/" + name, 0),)
            took_s.append(clock() - began_s)


# --------------------------------------------------------------------------- rounds


class Bench:
    """Rounds of picks against one side, over connections that stay open."""

    def __init__(self, side: Side, make: Callable[[str], Talk], numbers: Iterator[int]) -> None:
        self._side = side
        self._make = make
        self._numbers = numbers

    def round(self, lanes: Lanes, picks: int, in_flight: int) -> Round:
        """So many picks by so many lanes."""
        talks = [
            self._make(self._side.addresses[i % len(self._side.addresses)])
            for i in range(in_flight)
        ]
        numbers = itertools.islice(self._numbers, picks)
        took_s: list[float] = []
        try:
            before_s = self._side.cpu_s()
            whole_s = drive([(talk, lanes(talk, numbers, took_s)) for talk in talks])
            cpu_s = self._side.cpu_s() - before_s
        finally:
            for talk in talks:
                with closing(talk):
                    pass
        return Round(len(took_s) / whole_s, statistics.median(took_s), cpu_s / len(took_s))


def _clock() -> Callable[[], float]:
    import time

    return time.perf_counter


def _field(number: int, body: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
