"""One measurement from URL to readings: what is asked for, what the endpoint says, what it allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import aiohttp

from readyplane.core.errors import InvalidField
from readyplane.kit.clock import Clock
from readyplane_lab.profiling.endpoint import Endpoint, Facts
from readyplane_lab.profiling.measure import Measurement, Wanted
from readyplane_lab.profiling.readings import Readings
from readyplane_lab.profiling.sweep import Budget, Span

SEQUENCES_MAX = 256
"""Where nobody says how many sequences run at once: vLLM's own default."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person asks for; 0 and empty: as the endpoint says.

    Attributes:
        isl_max: longest prompt to send. sequences_max: most sequences at once.
        seconds_max, requests_max: what the whole measurement may take.
    """

    url: str
    model: str = ""
    token: str = ""
    isl_max: int = 0
    kv_tokens: int = 0
    sequences_max: int = 0
    seconds_max: float = 600.0
    requests_max: int = 5000
    wanted: Wanted = field(default_factory=Wanted)


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it. `kv_tokens`, `sequences_max`: as told or given."""

    readings: Readings
    facts: Facts
    kv_tokens: int
    sequences_max: int
    requests: int
    seconds: float


async def measure(
    asked: Asked, *, clock: Clock, random: Random, say: Callable[[str], None]
) -> Measured:
    """Drive the endpoint.

    Raises:
        InvalidField: what is asked does not fit the endpoint, or it does not say what is needed.
        Unavailable: it does not answer, or went away.
    """
    url = asked.url.rstrip("/").removesuffix("/v1")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        endpoint = Endpoint(session, url, clock=clock, token=asked.token)
        facts = await endpoint.facts(asked.model)
        span = span_of(asked, facts)
        say(
            f"{facts.model}: {span.kv_tokens:,} KV tokens, prompts up to {span.isl_max:,} tokens, "
            f"up to {span.sequences_max} sequences"
        )
        begun_s = clock.monotonic_s()
        budget = Budget(begun_s + asked.seconds_max, asked.requests_max)
        run = Measurement(endpoint, span, budget, asked.wanted, clock=clock, random=random, say=say)
        readings = await run.run()
    if not (asked.sequences_max or facts.sequences_max):
        readings.notes.append(f"the endpoint does not tell its sequences: {SEQUENCES_MAX} assumed")
    return Measured(
        readings=readings,
        facts=facts,
        kv_tokens=span.kv_tokens,
        sequences_max=span.sequences_max,
        requests=budget.spent,
        seconds=clock.monotonic_s() - begun_s,
    )


def span_of(asked: Asked, facts: Facts) -> Span:
    """What may be sent, by what is asked and what the endpoint says.

    Raises:
        InvalidField: neither says it, or what is asked does not fit.
    """
    kv_tokens = asked.kv_tokens or facts.kv_tokens
    if not kv_tokens:
        remedy = "the endpoint's /metrics do not tell its KV pool; give its tokens"
        raise InvalidField("--kv-tokens", None, remedy)
    context = facts.context_max or 0
    if not (context or asked.isl_max):
        remedy = "the endpoint does not tell its max_model_len; give a longest prompt"
        raise InvalidField("--isl-max", None, remedy)
    most = min(context or 2 * asked.isl_max, kv_tokens) - 2
    if asked.isl_max > most:
        raise InvalidField("--isl-max", asked.isl_max, f"the endpoint takes {most} at most")
    return Span(
        isl_max=asked.isl_max or most,
        context_max=most + 2,
        kv_tokens=kv_tokens,
        sequences_max=asked.sequences_max or facts.sequences_max or SEQUENCES_MAX,
    )
