"""What a rule may see, read from one Observation: token rates, backlogs, concurrency, engines.

Owns two judgements that the published rules leave to their own systems. First, requests that the
router still holds are counted where the shortage is: here the router holds a request back until a
pair has room, elsewhere it would queue at the engine that is short of it. Second, recent mean
lengths, as ratios of decayed sums. Unknown is None, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from readyplane.core.profile import ClassProfile
from readyplane.core.worker import Role, WorkerState
from readyplane_planner.decide.follow import PoolCount, count_pools
from readyplane_planner.decide.values import Memory, Plan
from readyplane_planner.signals import Observation, Signal, WorkerView

LENGTHS_TAU_S = 60.0
OUTPUT_TAU_S = 180.0
PRIOR_REQUESTS = 10.0
FULL_DECODE = 0.85
"""Share of its sequences at the SLO from which a D pool is taken to be what requests wait for."""
FULL_PREFILL_S = 0.4
"""Promised work of each P from which the P pool is: the router gives no more than half a second."""


@dataclass(frozen=True, slots=True)
class Recent:
    """Decayed sums whose ratios are recent mean lengths, and whether anything ever arrived."""

    requests: float = 0.0
    prompt: float = 0.0
    uncached: float = 0.0
    finished: float = 0.0
    generated: float = 0.0
    begun: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """One ready worker with its share of what the router holds for its pool.

    Attributes:
        queue_tokens: prompt tokens not yet computed. sequences: decoding or waiting to.
        kv_tokens: resident and queued.
    """

    worker_id: str
    queue_tokens: float = 0.0
    sequences: float = 0.0
    kv_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Facts:
    """One tick. Rates a second, tokens, workers; None is not known.

    Attributes:
        dt_s: that the rates cover, 0 without rates.
        arrivals, prompt, uncached, finished, generated: requests/s, prompt tokens/s, those that no
            cache held, requests/s, output tokens/s.
        backlog: prompt tokens that wait for P or are being computed. sequences: decoding, and
            held for D. isl, new, osl: recent mean prompt, its uncached part and output.
        context: mean KV tokens of a sequence.
        prefill_load, decode_load: demand in workers at the SLO, see `read`.
        ttft_s, tpot_s: median of the router's window.
    """

    now_s: float
    dt_s: float
    prefill: PoolCount
    decode: PoolCount
    prefill_engines: tuple[Engine, ...]
    decode_engines: tuple[Engine, ...]
    arrivals: float | None
    prompt: float | None
    uncached: float | None
    finished: float | None
    generated: float | None
    backlog: float | None
    sequences: float | None
    isl: float
    new: float
    osl: float
    context: float
    prefill_load: float | None
    decode_load: float | None
    ttft_s: float | None = None
    tpot_s: float | None = None


def read(
    observation: Observation, plan: Plan, memory: Memory, recent: Recent, *, now_s: float
) -> tuple[Facts, Recent]:
    """The facts of a tick.

    `prefill_load` is token concurrency over what a worker holds: the uncached tokens that arrive
    within one TTFT target and those that wait, over the tokens that one P computes within it.
    `decode_load` is sequences that decode or wait to, over the most that one D runs within the
    TPOT target (bound by time, by KV memory and by its batch limit).
    """
    recent = _follow_lengths(observation, recent)
    isl, new, osl = _lengths(observation, recent)
    context = _context(observation, isl, osl)
    counts = count_pools(observation, plan, memory, now_s=now_s)
    leaving = {worker_id for worker_id, _since in memory.draining}
    serving = [
        w
        for w in observation.workers
        if w.state is WorkerState.READY and not w.unpairable and w.worker_id not in leaving
    ]
    on_p = [w for w in serving if w.role.serves(Role.PREFILL)]
    on_d = [w for w in serving if w.role.serves(Role.DECODE)]
    rate = new / plan.prefill.profile.prefill_s(new, max(0.0, isl - new))
    most = max(1e-9, plan.decode.profile.decode_sequences(tpot_s=plan.tpot_s, context=context))

    here = sum(_waiting_tokens(w) for w in on_p)
    queue = _value(observation.queue)
    known = {w.worker_id for w in on_p}
    there = sum(w.promised_prefill_tokens for w in observation.workers if w.worker_id not in known)
    held = None if queue is None else max(0.0, queue - here - there)
    running = _running(observation, on_d)
    full_d = running is not None and _full_decode(on_d, running, most)
    full_p = bool(on_p) and here >= FULL_PREFILL_S * rate * len(on_p)
    held_p = 0.0 if full_d and not full_p else held
    held_d = 0.0 if held is None or not full_d else held / max(1.0, new)

    uncached = _value(observation.prefill_work)
    backlog = None if held_p is None or queue is None else here + held_p
    sequences = None if running is None else running + held_d
    facts = Facts(
        now_s=now_s,
        dt_s=observation.dt_s,
        prefill=counts["prefill"],
        decode=counts["decode"],
        prefill_engines=_prefill_engines(on_p, held_p or 0.0),
        decode_engines=_decode_engines(on_d, running or 0.0, held_d, context),
        arrivals=_value(observation.arrivals),
        prompt=_value(observation.prompt_work),
        uncached=uncached,
        finished=_value(observation.finished),
        generated=_generated(observation, running, on_d, plan.decode.profile, context),
        backlog=backlog,
        sequences=sequences,
        isl=isl,
        new=new,
        osl=osl,
        context=context,
        prefill_load=None
        if uncached is None or backlog is None
        else (uncached + backlog / plan.ttft_s) / rate,
        decode_load=None if sequences is None else sequences / most,
        ttft_s=_median(observation, "ttft_actual"),
        tpot_s=_median(observation, "tpot_actual"),
    )
    return facts, recent


def _value(signal: Signal) -> float | None:
    return signal.value if signal.known else None


def _median(observation: Observation, name: str) -> float | None:
    window = observation.latency.get(name)
    return window.p50_s if window is not None and window.count else None


def _follow_lengths(observation: Observation, recent: Recent) -> Recent:
    dt_s = observation.dt_s
    rates = (observation.arrivals, observation.prompt_work, observation.prefill_work)
    if dt_s > 0 and all(signal.known for signal in rates):
        fade = math.exp(-dt_s / LENGTHS_TAU_S)
        requests, prompt, uncached = (signal.get() * dt_s for signal in rates)
        recent = replace(
            recent,
            requests=recent.requests * fade + requests,
            prompt=recent.prompt * fade + prompt,
            uncached=recent.uncached * fade + uncached,
            begun=recent.begun or requests > 0,
        )
    if dt_s > 0 and observation.finished.known and observation.generated.known:
        fade = math.exp(-dt_s / OUTPUT_TAU_S)
        recent = replace(
            recent,
            finished=recent.finished * fade + observation.finished.get() * dt_s,
            generated=recent.generated * fade + observation.generated.get() * dt_s,
        )
    return recent


def _lengths(observation: Observation, recent: Recent) -> tuple[float, float, float]:
    """Mean prompt, its uncached part, mean output; a few pretended requests steady the output."""
    known = observation.lengths
    isl, new = known.isl, known.uncached
    if recent.requests >= 1.0:
        isl, new = recent.prompt / recent.requests, recent.uncached / recent.requests
    made = recent.generated + PRIOR_REQUESTS * known.osl
    isl = max(1.0, isl)
    return isl, min(isl, max(1.0, new)), max(1.0, made / (recent.finished + PRIOR_REQUESTS))


def _context(observation: Observation, isl: float, osl: float) -> float:
    """As measured where at least a few sequences run, else half of the output behind the prompt."""
    decoding, kv = observation.decoding.get(), observation.kv.get()
    if decoding >= 4 and kv > 0:
        return max(1.0, kv / decoding)
    return isl + osl / 2


def _waiting_tokens(worker: WorkerView) -> float:
    """The router's promises and the engine's own queue tell of the same prompts: the larger."""
    return float(max(worker.promised_prefill_tokens, worker.waiting_prefill_tokens or 0))


def _sequences(worker: WorkerView) -> float:
    return float(max(worker.active, (worker.running or 0) + (worker.waiting or 0)))


def _running(observation: Observation, on_d: Iterable[WorkerView]) -> float | None:
    """Sequences that the pool's ready workers hold; the router's gauge where they do not tell."""
    if not observation.decoding.known:
        return None
    told = sum(_sequences(w) for w in on_d)
    return told if told > 0 else observation.decoding.get()


def _full_decode(on_d: list[WorkerView], running: float, most: float) -> bool:
    if not on_d:
        return True
    usage = [w.kv_usage for w in on_d if w.kv_usage is not None]
    crowded = bool(usage) and sum(usage) / len(usage) >= FULL_DECODE
    return crowded or running >= FULL_DECODE * most * len(on_d)


def _generated(
    observation: Observation,
    running: float | None,
    on_d: list[WorkerView],
    profile: ClassProfile,
    context: float,
) -> float | None:
    """Output tokens/s as counted; by the profile for engines that do not count them."""
    if observation.generated.known or running is None:
        return _value(observation.generated)
    if not running or not on_d:
        return 0.0
    each = running / len(on_d)
    return running / profile.iteration_s(each, each * context)


def _prefill_engines(on_p: list[WorkerView], held: float) -> tuple[Engine, ...]:
    share = held / len(on_p) if on_p else 0.0
    return tuple(Engine(w.worker_id, queue_tokens=_waiting_tokens(w) + share) for w in on_p)


def _decode_engines(
    on_d: list[WorkerView], running: float, held: float, context: float
) -> tuple[Engine, ...]:
    """KV of a worker that does not tell it: its sequences at the mean context."""
    told = sum(_sequences(w) for w in on_d)
    share = held / len(on_d) if on_d else 0.0
    engines = []
    for worker in on_d:
        own = _sequences(worker) if told > 0 else running / len(on_d)
        resident = worker.kv_tokens
        if resident is None:
            resident = own * context
        elif worker.running is not None:
            resident += max(0.0, own - worker.running) * context
        engines.append(
            Engine(
                worker.worker_id,
                sequences=own + share,
                kv_tokens=resident + share * context,
            )
        )
    return tuple(engines)
