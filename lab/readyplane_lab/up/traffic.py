"""Traffic: sends a workload through the gateway's OpenAI-style API and keeps what came of it.

Every request ends in exactly one outcome. Attainment counts both SLOs over **all** arrivals:
refusals, failures and time-outs are misses.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp
import numpy as np

from readyplane.core.work import Slo
from readyplane.kit.clock import Clock
from readyplane_lab.up.prompts import Body, as_tokens
from readyplane_lab.workload.request import WorkloadRequest

REQUEST_TIMEOUT_S = 120.0
SAMPLES_MAX = 200_000


class Outcome(StrEnum):
    """How a request ended, as its client saw it."""

    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Sample:
    """One finished or failed request; latencies in seconds, None where there were none."""

    index: int
    at_s: float
    isl: int
    osl: int
    outcome: Outcome
    ttft_s: float | None = None
    tpot_s: float | None = None
    attained: bool = False
    detail: str = ""


@dataclass(slots=True)
class Tally:
    """What came of the traffic so far."""

    sent: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    attained: int = 0
    output_tokens: int = 0
    first_answer_s: float | None = None
    samples: list[Sample] = field(default_factory=list)
    complaints: Counter[str] = field(default_factory=Counter)

    @property
    def ended(self) -> int:
        """Requests that have an outcome."""
        return sum(self.outcomes.values())

    @property
    def open(self) -> int:
        """Requests still under way."""
        return self.sent - self.ended

    @property
    def attainment(self) -> float | None:
        """Both SLOs met / all arrivals that have ended; None before the first."""
        return self.attained / self.ended if self.ended else None

    def quantile_s(self, name: str, q: float) -> float | None:
        """Quantile of `ttft_s` or `tpot_s` over finished requests; None without any."""
        values = [v for s in self.samples if (v := getattr(s, name)) is not None]
        return float(np.quantile(values, q)) if values else None

    def add(self, sample: Sample) -> None:
        """Count one outcome."""
        self.outcomes[sample.outcome] += 1
        self.attained += sample.attained
        self.output_tokens += sample.osl if sample.outcome is Outcome.FINISHED else 0
        if sample.detail and sample.outcome is not Outcome.FINISHED:
            self.complaints[f"{sample.outcome}: {sample.detail[:160]}"] += 1
        if len(self.samples) < SAMPLES_MAX:
            self.samples.append(sample)


class Traffic:
    """Drives one workload; `run` returns when every request has its outcome or it is stopped."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        slo: Slo,
        clock: Clock,
        speed: float = 1.0,
        open_max: int = 512,
        body: Body | None = None,
    ) -> None:
        """`url`: base URL of the gateway. `speed`: 2 sends twice as fast. `open_max`: in flight.

        `body`: how a request is put to the engines; None: as tokens, for modelled ones.
        """
        self.tally = Tally()
        self._url = url.rstrip("/") + "/v1/completions"
        self._body = body or as_tokens(model)
        self._slo = slo
        self._clock = clock
        self._speed = speed
        self._open_max = open_max
        self._begun_s = 0.0
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Send nothing more; requests under way may end."""
        self._stopping.set()

    async def run(self, requests: Iterable[WorkloadRequest]) -> Tally:
        """Send each request at its time. Cancelling ends the open ones as CANCELLED."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        self._begun_s = self._clock.monotonic_s()
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            asyncio.TaskGroup() as group,
        ):
            for request in requests:
                if not await self._wait_until(request.at_s / self._speed):
                    break
                self.tally.sent += 1
                if self.tally.open > self._open_max:
                    self._count(request, Outcome.REFUSED, detail="client: too many open requests")
                    continue
                group.create_task(self._one(session, request))
        return self.tally

    async def _wait_until(self, at_s: float) -> bool:
        delay_s = self._begun_s + at_s - self._clock.monotonic_s()
        if delay_s > 0 and not self._stopping.is_set():
            try:
                async with asyncio.timeout(delay_s):
                    await self._stopping.wait()
            except TimeoutError:
                pass
        return not self._stopping.is_set()

    async def _one(self, session: aiohttp.ClientSession, request: WorkloadRequest) -> None:
        began_s = self._clock.monotonic_s()
        try:
            await self._ask(session, request, began_s)
        except TimeoutError:
            self._count(request, Outcome.TIMED_OUT, detail=f"no end within {REQUEST_TIMEOUT_S} s")
        except aiohttp.ClientError as error:
            self._count(request, Outcome.FAILED, detail=f"{type(error).__name__}: {error}")
        except asyncio.CancelledError:
            self._count(request, Outcome.CANCELLED)
            raise

    async def _ask(
        self, session: aiohttp.ClientSession, request: WorkloadRequest, began_s: float
    ) -> None:
        body = {
            **self._body(request),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        first_s = last_s = None
        tokens, problem = 0, ""
        async with session.post(self._url, json=body) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                refused = response.status in (429, 503)
                self._count(
                    request,
                    Outcome.REFUSED if refused else Outcome.FAILED,
                    detail=f"HTTP {response.status} {_message(text)}",
                )
                return
            done = False
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    done = True
                    break
                now_s = self._clock.monotonic_s()
                chunk = json.loads(data)
                if "error" in chunk:
                    problem = str(chunk["error"].get("message", chunk["error"]))
                    break
                if usage := chunk.get("usage"):
                    tokens = usage["completion_tokens"]
                # A token may be no text yet: part of a letter, or one that is never written.
                choices = chunk.get("choices", ())
                if any(c.get("text") or c.get("token_ids") for c in choices):
                    first_s = first_s if first_s is not None else now_s
                    last_s = now_s
        if problem or not done or first_s is None or last_s is None:
            self._count(request, Outcome.FAILED, detail=problem or "the stream ended early")
            return
        if tokens != request.osl:
            self._count(
                request, Outcome.FAILED, detail=f"{tokens} tokens came, {request.osl} were due"
            )
            return
        self._finished(request, began_s, first_s, last_s)

    def _finished(
        self, request: WorkloadRequest, began_s: float, first_s: float, last_s: float
    ) -> None:
        ttft_s = first_s - began_s
        tpot_s = (last_s - first_s) / (request.osl - 1) if request.osl > 1 else 0.0
        if self.tally.first_answer_s is None:
            self.tally.first_answer_s = first_s
        self.tally.add(
            Sample(
                index=request.index,
                at_s=request.at_s,
                isl=request.isl,
                osl=request.osl,
                outcome=Outcome.FINISHED,
                ttft_s=ttft_s,
                tpot_s=tpot_s,
                attained=ttft_s <= self._slo.ttft_s and tpot_s <= self._slo.tpot_s,
            )
        )

    def _count(self, request: WorkloadRequest, outcome: Outcome, *, detail: str = "") -> None:
        self.tally.add(
            Sample(request.index, request.at_s, request.isl, request.osl, outcome, detail=detail)
        )


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text
