"""Proof of an engine by another one only: who proves it, and what that shows.

Owns the search for a partner while both may still be starting (an engine that is up tells of itself
at its agent's `/v1/engine`), and the connector check that is made with one. Some engines answer with
another one only (`Meets`), others answer alone and cannot be handed their own KV (`ReadsOthersOnly`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol, runtime_checkable

from readyplane.core import gate_checks as gc
from readyplane.core.errors import ReadyplaneError, Unavailable
from readyplane.core.identity import KvFormat, compatible
from readyplane.core.worker import CheckResult, Fleet, Role, Serving, Worker, WorkerState
from readyplane.kit.clock import Clock
from readyplane_agent.engines.exchange import exchange
from readyplane_agent.engines.port import EnginePort
from readyplane_agent.engines.sglang_client import Partner
from readyplane_agent.probes import HANDOVER_TOKENS, PROBE_LIMIT_S, Question

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
ASK_S_MAX = 2.0
ALIVE = (WorkerState.READY, WorkerState.STANDBY, WorkerState.PROVISIONED)


@runtime_checkable
class Meets(Protocol):
    """An adapter whose engine of one stage answers with one of the other stage only."""

    def meet(self, partner: Partner) -> None:
        """With whom it answers from now on."""
        ...

    @property
    def meets(self) -> bool:
        """Whether it needs that, with its role."""
        ...


@runtime_checkable
class ReadsOthersOnly(Protocol):
    """An adapter whose engine may be unable to read KV that it holds itself."""

    @property
    def reads_itself(self) -> bool:
        """Whether it can be handed its own KV."""
        ...


def reads_itself(engine: EnginePort) -> bool:
    """Whether a hand-over to itself proves an engine's connector."""
    return not isinstance(engine, ReadsOthersOnly) or engine.reads_itself


def needs_partner(engine: EnginePort) -> bool:
    """Whether this engine answers with another one only."""
    return isinstance(engine, Meets) and engine.meets


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine that is up tells others which are to meet it."""

    engine_url: str
    bootstrap: str
    kv: KvFormat


def told(engine: EnginePort) -> str:
    """These facts as JSON; empty while the engine is not up, or where nobody need meet it."""
    if reads_itself(engine) and not needs_partner(engine):
        return ""
    try:
        serving = engine.serving()
    except Unavailable:
        return ""
    return json.dumps(asdict(Facts(serving.engine_url, serving.bootstrap, serving.kv)))


async def partner_for(
    list_workers: Callable[[], Awaitable[Fleet]],
    *,
    worker_id: str,
    role: Role,
    serving: Serving,
    clock: Clock,
    limit_s: float,
    token: str = "",
) -> Partner:
    """Wait for an engine of the other stage that fits: one that serves, else one that is up.

    Raises:
        Unavailable: none within `limit_s`. What `list_workers` raises.
    """
    until_s = clock.monotonic_s() + limit_s
    why = "there is none"
    while True:
        for worker in _others(await list_workers(), worker_id=worker_id, role=role):
            facts = await _facts_of(worker, token)
            if facts is None:
                why = f"{worker.worker_id} is not up"
                continue
            differing = compatible(serving.kv, facts.kv)
            if differing:
                why = f"{worker.worker_id} does not fit: {differing[0]}"
                continue
            bootstrap = serving.bootstrap or facts.bootstrap
            log.info("to be proved with %s at %s", worker.worker_id, facts.engine_url)
            return Partner(facts.engine_url, bootstrap, worker.worker_id)
        if clock.monotonic_s() > until_s:
            stage = "decode" if role is Role.PREFILL else "prefill"
            raise Unavailable(
                f"no {stage} worker to be proved with came within {limit_s:.0f} s ({why}); its "
                "engine cannot be proved alone",
                f"order a {stage} worker, or raise --start-limit-s",
            )
        await clock.sleep(LOOK_EVERY_S)


def _others(fleet: Fleet, *, worker_id: str, role: Role) -> Sequence[Worker]:
    """Living workers of the other stage, those that serve first."""
    found = [
        worker
        for worker in fleet.workers.values()
        if worker.worker_id != worker_id
        and worker.state in ALIVE
        and worker.role in (Role.PREFILL, Role.DECODE)
        and worker.role is not role
    ]
    return sorted(found, key=lambda w: (ALIVE.index(w.state), w.active, w.worker_id))


async def _facts_of(worker: Worker, token: str) -> Facts | None:
    if worker.serving is not None:
        serving = worker.serving
        return Facts(serving.engine_url, serving.bootstrap, serving.kv)
    if not worker.offer.agent_url:
        return None
    try:
        answer = await exchange(
            worker.offer.agent_url, "/v1/engine", timeout_s=ASK_S_MAX, token=token
        )
        if answer.status != 200:
            return None
        found = answer.document(worker.offer.agent_url)
        kv = KvFormat(**found["kv"])
        return Facts(str(found["engine_url"]), str(found["bootstrap"]), kv)
    except (ReadyplaneError, KeyError, TypeError) as error:
        log.info("%s does not say where its engine is: %s", worker.worker_id, error)
        return None


async def connector_check(
    engine: EnginePort, question: Question, expected: Sequence[int]
) -> CheckResult:
    """A meeting of its own: both engines reach each other, and the answer made from the KV is right.

    Without a known answer it is compared with the first one, which was made over the wire as well.
    """
    wanted = list(question.golden or expected)[:HANDOVER_TOKENS]
    try:
        got = await engine.generate(
            question.prompt,
            max_tokens=min(HANDOVER_TOKENS, question.max_tokens),
            timeout_s=PROBE_LIMIT_S,
        )
        answer = list(got.token_ids)
        good, why = answer == wanted, "" if answer == wanted else f"{answer} instead of {wanted}"
    except asyncio.CancelledError:
        raise
    except ReadyplaneError as error:
        good, why = False, str(error)
    # One meeting is both: the decode engine asks, and is written to by the prefill engine.
    evidence = {"outbound": good, "inbound": good, "detail": why or "met"}
    return CheckResult(gc.KV_CONNECTOR, good, evidence, why)
