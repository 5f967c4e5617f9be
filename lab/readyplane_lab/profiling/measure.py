"""Drives a live endpoint: prompts one at a time, then batches of decoding sequences (R20.1).

Owns the order of work and what is thrown away. Prompts are unique, so that no cache answers them.
An iteration is measured while every sequence of a batch decodes and none prefills: from the moment
the last one has its first token. What is left of the batch then is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from statistics import median

from readyplane.core.errors import InvalidField
from readyplane.kit.clock import Clock
from readyplane_lab.profiling import sweep
from readyplane_lab.profiling.endpoint import Endpoint, Stream
from readyplane_lab.profiling.readings import DecodeReading, PrefillReading, Readings

TOKEN_IDS = (3, 200)
"""Every tokenizer has these; none of them ends a sequence where `ignore_eos` is set."""
WARM_PROMPTS = 3
WARM_TOKENS = 16
IDLE_S_MAX = 10.0
IDLE_POLL_S = 0.1
REPEATS_OF_CACHED = 2
BATCH_S_MAX = 180.0
CACHE_WORKS = 0.8


@dataclass(frozen=True, slots=True)
class Wanted:
    """How thoroughly to measure.

    Attributes:
        points: prompt lengths. steps: numbers of sequences a context. repeats: of each point.
        window: tokens of each sequence that an iteration's mean is made of.
    """

    points: int = 9
    steps: int = 4
    repeats: int = 3
    window: int = 32


class Measurement:
    """One run against one endpoint.

    Args:
        random: makes the prompts. say: told what is going on, one line each.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        span: sweep.Span,
        budget: sweep.Budget,
        wanted: Wanted,
        *,
        clock: Clock,
        random: Random,
        say: Callable[[str], None],
    ) -> None:
        self._endpoint, self._span, self._budget = endpoint, span, budget
        self._wanted, self._clock, self._random, self._say = wanted, clock, random, say
        self.readings = Readings()

    async def run(self) -> Readings:
        """Every point once, then again; what the budget does not allow any more is left out.

        Raises:
            Unavailable: the endpoint went away. InvalidField: it cannot be measured, and why.
        """
        wanted, span = self._wanted, self._span
        await self._warm_up()
        lengths = sweep.prompt_lengths(span, wanted.points)
        loads = sweep.decode_loads(span, wanted.steps)
        for turn in range(wanted.repeats):
            for length in lengths:
                if not self._may(1):
                    return self._stopped(f"in turn {turn + 1} of {wanted.repeats}, in prefill")
                await self._prefill(length)
            if turn == 0:
                await self._cached(sorted(lengths)[len(lengths) // 2])
            for sequences, context in loads:
                if not self._may(sequences):
                    return self._stopped(f"in turn {turn + 1} of {wanted.repeats}, in decode")
                await self._decode(sequences, context)
        return self.readings

    def _may(self, requests: int) -> bool:
        return self._budget.allows(requests, now_s=self._clock.monotonic_s())

    def _stopped(self, where: str) -> Readings:
        self.readings.notes.append(f"stopped by its budget {where}")
        return self.readings

    def _prompt(self, length: int) -> list[int]:
        low, high = TOKEN_IDS
        return [self._random.randint(low, high) for _ in range(length)]

    async def _warm_up(self) -> None:
        """Thrown away: first kernels, first graphs, first connections. Tells how tokens come."""
        length = min(sweep.ISL_MIN * 4, self._span.isl_max)
        stream = Stream(0.0)
        for _ in range(WARM_PROMPTS):
            self._budget.spend(1)
            stream = await self._endpoint.answer(self._prompt(length), max_tokens=WARM_TOKENS)
        if not stream.counted and stream.total not in {None, stream.tokens}:
            raise InvalidField(
                "URL",
                self._endpoint.model,
                f"{stream.total} tokens came in {stream.tokens} chunks, and it does not tell how "
                f"many each holds: serve it with running usage (stream_options."
                f"continuous_usage_stats, as vLLM and SGLang have it)",
            )
        if stream.prompt_tokens not in {None, length}:
            self.readings.notes.append(
                f"the endpoint adds {(stream.prompt_tokens or length) - length} tokens to a prompt"
            )

    async def _prefill(self, length: int) -> None:
        self._budget.spend(1)
        stream = await self._endpoint.answer(self._prompt(length), max_tokens=1)
        reading = PrefillReading(
            stream.prompt_tokens or length, stream.ttft_s * 1e3, stream.cached_tokens or 0
        )
        self.readings.prefill.append(reading)
        self._say(f"prefill {reading.tokens:>7,} tokens  {reading.milliseconds:9.1f} ms")

    async def _cached(self, length: int) -> None:
        """The same prompt again: what a held prefix saves, and whether one is held at all."""
        prompt = self._prompt(length)
        first: float | None = None
        for turn in range(1 + REPEATS_OF_CACHED):
            if not self._may(1):
                return
            self._budget.spend(1)
            stream = await self._endpoint.answer(prompt, max_tokens=1)
            ms = stream.ttft_s * 1e3
            if first is None:
                first = ms
                continue
            self.readings.repeats.append(
                PrefillReading(stream.prompt_tokens or length, ms, stream.cached_tokens or 0)
            )
            self._say(f"again   {length:>7,} tokens  {ms:9.1f} ms (repeat {turn})")
        again = median(r.milliseconds for r in self.readings.repeats)
        assert first is not None
        if again > CACHE_WORKS * first:
            self.readings.notes.append(
                f"a repeated prompt of {length:,} tokens takes {again / first:.0%} of the first "
                f"time: no prefix is kept, or it saves little"
            )

    async def _decode(self, sequences: int, context: int) -> None:
        self._budget.spend(sequences)
        left_s = max(1.0, self._budget.until_s - self._clock.monotonic_s())
        reading = await Batch(self._endpoint, self._clock, self._wanted.window).measure(
            [self._prompt(context) for _ in range(sequences)],
            tokens_max=self._answer(context),
            limit_s=min(BATCH_S_MAX, left_s),
        )
        if reading is None:
            self.readings.notes.append(
                f"{sequences} sequences of {context:,} tokens could not all decode at once"
            )
        else:
            self.readings.decode.append(reading)
            self._say(
                f"decode  {sequences:>4} x {context:>7,} tokens  {reading.milliseconds:7.2f} ms"
            )
        await self._idle()

    def _answer(self, context: int) -> int:
        """Answers are as long as the endpoint allows: the batch ends them when it has seen enough."""
        span = self._span
        return max(2, min(span.context_max, span.kv_tokens) - context - 1)

    async def _idle(self) -> None:
        """Until aborted sequences are gone, where the endpoint tells; else a moment."""
        until_s = self._clock.monotonic_s() + IDLE_S_MAX
        while self._clock.monotonic_s() < until_s:
            await self._clock.sleep(IDLE_POLL_S)
            if not await self._endpoint.running():
                return


class Batch:
    """Sequences that decode together, until each has made `window` tokens beside all others."""

    def __init__(self, endpoint: Endpoint, clock: Clock, window: int) -> None:
        self._endpoint, self._clock, self._window = endpoint, clock, window
        self._streams: list[Stream] = []
        self._full_s: float | None = None
        self._news = asyncio.Event()
        self._ended = False

    async def measure(
        self, prompts: Sequence[Sequence[int]], *, tokens_max: int, limit_s: float
    ) -> DecodeReading | None:
        """None when they never decoded all at once for long enough.

        Raises:
            Unavailable: the endpoint went away. InvalidField: it refuses such requests.
        """
        self._streams = [Stream(0.0) for _ in prompts]
        tasks = [
            asyncio.create_task(self._follow(prompt, stream, tokens_max))
            for prompt, stream in zip(prompts, self._streams, strict=True)
        ]
        try:
            await self._watch(tasks, limit_s)
        finally:
            for task in tasks:
                task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
        for failure in done:
            if isinstance(failure, Exception):
                raise failure
        return self._reading([len(p) for p in prompts])

    async def _follow(self, prompt: Sequence[int], stream: Stream, tokens_max: int) -> None:
        async with aclosing(
            self._endpoint.stream(prompt, max_tokens=tokens_max, into=stream)
        ) as chunks:
            async for _ in chunks:
                if self._full_s is None and all(s.marks for s in self._streams):
                    self._full_s = self._clock.monotonic_s()
                if self._full_s is not None and self._enough():
                    self._news.set()

    async def _watch(self, tasks: Sequence[asyncio.Task[None]], limit_s: float) -> None:
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait({news, *tasks}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()

    def _inside(self, stream: Stream) -> list[tuple[float, int]]:
        """Its marks while all decode."""
        begun_s = self._full_s
        return [] if begun_s is None else [m for m in stream.marks if m[0] >= begun_s]

    def _enough(self) -> bool:
        for stream in self._streams:
            marks = self._inside(stream)
            if len(marks) < 2 or marks[-1][1] - marks[0][1] < self._window:
                return False
        return True

    def _reading(self, lengths: Sequence[int]) -> DecodeReading | None:
        if self._full_s is None or not self._enough():
            return None
        each, held = [], 0.0
        for stream, length in zip(self._streams, lengths, strict=True):
            (first_s, first), *_, (last_s, last) = self._inside(stream)
            each.append((last_s - first_s) / (last - first))
            held += (stream.prompt_tokens or length) + (first + last) / 2.0
        return DecodeReading(float(len(each)), held, median(each) * 1e3)
