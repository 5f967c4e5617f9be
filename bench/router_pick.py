"""What picking a pair costs, beside Dynamo's `select_service`.

A pick reserves both sides and then releases both. For us that is a route and a completion over gRPC;
for the peer two select-and-reserve, one in each group, and two deletes over HTTP. Both get the same
prompts, every one of them new, from the same lean client (`bench.lean`), in turns within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.lean import Grpc, Http, Lane, Talk, drive
from bench.router_fleet import BLOCK_SIZE
from bench.router_stack import (
    PEER_GROUPS,
    PEER_MODEL,
    PEER_PYTHON,
    Side,
    our_side,
    their_side,
)
from readyplane.v1 import router_pb2 as pb
from readyplane_lab.demo import MODEL

RATIOS = ("pick_unary_ratio", "pick_batch_ratio", "pick_p50_ratio", "pick_cpu_ratio")
ROUTERS = 2
ISL, MAX_TOKENS, EXPECTED = 8_192, 64, 32
IN_FLIGHT, BATCH, BATCHES = 16, 16, 4
PEER_MORE = f"peer, {BATCHES * BATCH} in flight"
BATCHED = f"RouteBatch({BATCH}), {BATCHES} in flight"
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
        tail: bytes = self._packed[number % TAILS]
        return b"\x1a" + _varint(4 * ISL) + first + tail

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
        packed: bytes = self._packed[number % PROMPTS]
        return packed

    def theirs(self, number: int) -> bytes:
        """The members of a JSON object."""
        return self._json[number % PROMPTS]


Prompts = Tokens | Hashes


# --------------------------------------------------------------------------- lanes


class Ours:
    """Lanes that pick at our router."""

    def __init__(self, prompts: Prompts, prefix: str = "p") -> None:
        """`prefix`: of the request ids; two benches on one side must not share them."""
        self._prompts = prompts
        self._prefix = prefix.encode()
        shape = pb.RouteRequest(model=MODEL, isl=ISL, max_tokens=MAX_TOKENS)
        self._shape = shape.SerializeToString()
        event = pb.RequestEvent(kind="finished", output_tokens=EXPECTED, attained=True)
        self._event = event.SerializeToString()

    def _request(self, number: int) -> bytes:
        name = b"%b%d" % (self._prefix, number)
        return b"".join((_field(1, name), self._shape, self._prompts.ours(number)))

    def _ended(self, number: int) -> bytes:
        return _field(2, _field(1, b"%b%d.0" % (self._prefix, number)) + self._event)

    def unary(self, _talk: Talk, numbers: Iterator[int], took_s: list[float]) -> Lane:
        """One route, one completion."""
        clock = time.perf_counter
        for number in numbers:
            began_s = clock()
            yield ROUTE, self._request(number)
            yield COMPLETE, self._ended(number)
            took_s.append(clock() - began_s)

    def batch(self, _talk: Talk, numbers: Iterator[int], took_s: list[float]) -> Lane:
        """Sixteen routes in a message, sixteen completions in another."""
        clock = time.perf_counter
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
        clock = time.perf_counter
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
    """Rounds of picks against one side, each over connections of its own."""

    def __init__(
        self, side: Side, make: Callable[[str], Talk], *, undisturbed: bool = False
    ) -> None:
        self._undisturbed = undisturbed
        self._side = side
        self._make = make
        self._numbers = itertools.count()

    def round(self, lanes: Lanes, picks: int, in_flight: int) -> Round:
        """So many picks by so many lanes, spread over the addresses of the side."""
        places = itertools.islice(itertools.cycle(self._side.addresses), in_flight)
        talks = [self._make(address) for address in places]
        numbers = itertools.islice(self._numbers, picks)
        took_s: list[float] = []
        try:
            before_s = self._side.cpu_s()
            with self._side.undisturbed() if self._undisturbed else nullcontext():
                whole_s = drive([(talk, lanes(talk, numbers, took_s)) for talk in talks])
                cpu_s = self._side.cpu_s() - before_s
        finally:
            for talk in talks:
                talk.close()
        return Round(len(took_s) / whole_s, statistics.median(took_s), cpu_s / len(took_s))


@dataclass(frozen=True, slots=True)
class Way:
    """One way of picking in one set-up: how it is called, its bench, its lanes, how much of it."""

    name: str
    bench: Bench
    lanes: Lanes
    picks: int
    in_flight: int


def _play(ways: Sequence[Way], rounds: int) -> dict[str, list[Round]]:
    """All ways in turns, so that a busy moment of the machine meets each of them."""
    found: dict[str, list[Round]] = {way.name: [] for way in ways}
    for number in range(-1, rounds):  # the first is to get warm
        for way in ways:
            one = way.bench.round(way.lanes, way.picks, way.in_flight)
            if number >= 0:
                found[way.name].append(one)
    for name, played in found.items():
        rates = [one.per_s for one in played]
        print(
            f"  {name:32} {statistics.median(rates):7.0f} picks/s ({min(rates):.0f}-{max(rates):.0f})"
            f"  p50 {1e3 * statistics.median(one.p50_s for one in played):7.2f} ms"
            f"  CPU {1e6 * statistics.median(one.cpu_s for one in played):6.0f} us a pick",
            flush=True,
        )
    return found


def _ratio(
    name: str, ours: Sequence[Round], theirs: Sequence[Round], of: Callable[[Round], float]
) -> float:
    """Ours by theirs, round by round: the median, and the spread on a line of its own."""
    each = [of(one) / of(other) for one, other in zip(ours, theirs, strict=True)]
    print(f"  {name} {statistics.median(each):.2f} ({min(each):.2f}-{max(each):.2f})", flush=True)
    return statistics.median(each)


def measure_picks(rounds: int, routers: int, *, undisturbed: bool) -> dict[str, float]:
    """The four ratios, ours by theirs; all nan where the peer is not installed."""
    if not PEER_PYTHON.exists():
        print("pick: not run, the peer is not installed (make .venv-peers/stamp)", flush=True)
        return dict.fromkeys(RATIOS, math.nan)
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(_tokens(Path(folder), rounds, routers, undisturbed))
    with tempfile.TemporaryDirectory() as folder:
        figures |= asyncio.run(_hashes(Path(folder), rounds, undisturbed))
    return figures


async def _tokens(folder: Path, rounds: int, routers: int, undisturbed: bool) -> dict[str, float]:
    """64P+64D and 8,192 token ids: rates at 16 in flight, latency at 1."""
    print(f"64P+64D, {ISL} token ids, {routers} of our routers on one Redis", flush=True)
    async with (
        our_side(folder / "ours", prefills=64, decodes=64, routers=routers) as our,
        their_side(folder / "peer", prefills=64, decodes=64) as their,
    ):
        prompts = Tokens()
        ours, others, theirs = Ours(prompts), Ours(prompts, "u"), Theirs(prompts)
        here = Bench(our, Grpc, undisturbed=undisturbed)
        usual = Bench(replace(our, addresses=our.usual), Grpc, undisturbed=undisturbed)
        there = Bench(their, Http, undisturbed=undisturbed)
        found = await asyncio.to_thread(
            _play,
            [
                Way("peer, 16 in flight", there, theirs.unary, 480, IN_FLIGHT),
                Way("Route, 16 in flight", here, ours.unary, 480, IN_FLIGHT),
                Way("Route, 16 in flight, grpc.aio", usual, others.unary, 480, IN_FLIGHT),
                Way(PEER_MORE, there, theirs.unary, 480, BATCHES * BATCH),
                Way(BATCHED, here, ours.batch, 960, BATCHES),
                Way("RouteBatch(16), 1 in flight", here, ours.batch, 480, 1),
                Way("peer, 1 in flight", there, theirs.unary, 100, 1),
                Way("Route, 1 in flight", here, ours.unary, 100, 1),
            ],
            rounds,
        )
    peer, peer_more = found["peer, 16 in flight"], found[PEER_MORE]
    best = [max(a, b, key=_rate) for a, b in zip(peer, peer_more, strict=True)]
    _ratio("one batch at a time against 16:", found["RouteBatch(16), 1 in flight"], peer, _rate)
    unary, alone = found["Route, 16 in flight"], found["Route, 1 in flight"]
    return {
        "pick_unary_ratio": _ratio("unary:", unary, peer, _rate),
        "pick_batch_ratio": _ratio("batch:", found[BATCHED], best, _rate),
        "pick_p50_ratio": _ratio("p50:", alone, found["peer, 1 in flight"], lambda r: r.p50_s),
    }


async def _hashes(folder: Path, rounds: int, undisturbed: bool) -> dict[str, float]:
    """8P+8D and block hashes: CPU of the batch path."""
    print(f"8P+8D, hashes of {ISL // BLOCK_SIZE} blocks, one of our routers", flush=True)
    async with (
        our_side(folder / "ours", prefills=8, decodes=8) as our,
        their_side(folder / "peer", prefills=8, decodes=8) as their,
    ):
        prompts = Hashes()
        ours, theirs = Ours(prompts), Theirs(prompts)
        here = Bench(our, Grpc, undisturbed=undisturbed)
        there = Bench(their, Http, undisturbed=undisturbed)
        found = await asyncio.to_thread(
            _play,
            [
                Way("peer", there, theirs.unary, 1_920, IN_FLIGHT),
                Way("RouteBatch(16)", here, ours.batch, 1_920, 2),
            ],
            rounds,
        )
    both = found["RouteBatch(16)"], found["peer"]
    return {"pick_cpu_ratio": _ratio("CPU:", *both, lambda r: r.cpu_s)}


def _rate(one: Round) -> float:
    return one.per_s


def _field(number: int, body: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + _varint(len(body)) + body


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what picking a pair costs, beside the peer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--routers", type=int, default=ROUTERS, help="of ours, on one Redis")
    parser.add_argument(
        "--undisturbed",
        action="store_true",
        help="go before everything else while a round lasts (root; on a machine with other work)",
    )
    told = parser.parse_args()
    figures = measure_picks(told.rounds, told.routers, undisturbed=told.undisturbed)
    print("bench-router " + " ".join(f"{name}={figures[name]:.3g}" for name in RATIOS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
