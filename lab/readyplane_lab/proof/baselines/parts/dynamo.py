"""The SLA planner of NVIDIA Dynamo, generation 2a6da14c (2026-08-21), for disaggregated serving.

Owns both of its modes and how they go together; the contenders are files beside this folder.

Throughput mode, every 180 s: requests, prompt and output lengths of the interval are each taken to
come again (the `constant` predictor; `kalman` is offered too, auto-ARIMA and Prophet are not, for
they need libraries that nothing else here needs), and each pool gets
`ceil(requests/s over what one engine serves within the SLA)`.
Load mode, every 5 s: one worker more when all engines of a pool are estimated above the SLA, one
less when the queue or the KV of every engine, shared by one worker fewer, stays within 0.8 of it.
Both modes: the throughput result is only the floor of the load mode. Until the first one, the fleet
that the planner finds is the floor, as with predictors that were warmed with a trace; else the load
mode would be free to empty the pools for three minutes.

The published planner fits its performance model to measured forward passes; here that model is the
profile that the engines themselves follow, which is what the fit converges to. Minimum, maximum and
budget are those of every contender.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from readyplane.core.profile import ClassProfile
from readyplane_lab.proof.baselines.parts.brain import bounded
from readyplane_lab.proof.baselines.parts.facts import Engine, Facts
from readyplane_lab.proof.baselines.parts.kalman import UNSEEN, Kalman
from readyplane_lab.proof.port import Setting
from readyplane_planner.decide.follow import PoolCount, Targets

SOURCE = "ai-dynamo/dynamo 2a6da14c (2026-08-21), components/src/dynamo/planner"
TICK_S = 5.0
THROUGHPUT_S = 180.0
OBSERVATIONS_MIN = 5
STEP_MAX = 8
DOWN_SHARE = 0.8
HIT_MAX = 0.95
BATCHES_MAX = 128

Pair = tuple[int, int]


class Predictor(StrEnum):
    """How the next interval's traffic follows from those before."""

    CONSTANT = "constant"
    KALMAN = "kalman"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Sums over one interval, over the ticks in which all rates were known."""

    seconds: float = 0.0
    requests: float = 0.0
    prompt: float = 0.0
    uncached: float = 0.0
    finished: float = 0.0
    generated: float = 0.0

    def add(self, facts: Facts) -> Traffic:
        """With one more tick; the same where a rate is not known."""
        rates = (facts.arrivals, facts.prompt, facts.uncached, facts.finished, facts.generated)
        if facts.dt_s <= 0 or None in rates:
            return self
        grown = [(rate or 0.0) * facts.dt_s for rate in rates]
        return Traffic(
            self.seconds + facts.dt_s,
            self.requests + grown[0],
            self.prompt + grown[1],
            self.uncached + grown[2],
            self.finished + grown[3],
            self.generated + grown[4],
        )

    @property
    def each_interval(self) -> float:
        """Requests of a whole interval at the rate of the ticks that were known."""
        return self.requests / self.seconds * THROUGHPUT_S if self.seconds > 0 else 0.0

    @property
    def isl(self) -> float:
        """Mean prompt tokens; 0 without requests, as the planner takes a missing mean."""
        return self.prompt / self.requests if self.requests > 0 else 0.0

    @property
    def osl(self) -> float:
        """Mean output tokens; 0 when nothing was finished."""
        return self.generated / self.finished if self.finished > 0 else 0.0

    @property
    def hit(self) -> float:
        """Share of the prompt tokens that a prefix cache held."""
        return 1.0 - self.uncached / self.prompt if self.prompt > 0 else 0.0


NO_TRAFFIC = Traffic()


def prefill_rps(profile: ClassProfile, *, isl: float, ttft_s: float) -> float:
    """Requests/s of one P engine: the best batch of prompts that is through within the SLA.

    0 when there is nothing to go by. A prompt that alone misses the SLA counts at its own pace.
    """
    if isl <= 0:
        return 0.0
    best = 1.0 / chunked_s(profile, isl)
    for batch in range(2, BATCHES_MAX + 1):
        seconds = chunked_s(profile, batch * isl)
        if seconds > ttft_s:
            break
        best = max(best, batch / seconds)
    return best


def decode_rps(profile: ClassProfile, *, isl: float, osl: float, tpot_s: float) -> float:
    """Requests/s of one D engine at the largest batch within the SLA; 0 with nothing to go by."""
    if isl <= 0 or osl <= 0:
        return 0.0
    context = isl + osl / 2
    batch = max(1, math.floor(profile.decode_sequences(tpot_s=tpot_s, context=context)))
    return batch / (osl * profile.iteration_s(batch, batch * context))


def chunked_s(profile: ClassProfile, tokens: float) -> float:
    """Seconds of that many prompt tokens in iterations of at most `max_batch_tokens`."""
    whole = max(0, math.ceil(tokens / profile.max_batch_tokens) - 1)
    rest = tokens - whole * profile.max_batch_tokens
    full_s = profile.prefill_s(profile.max_batch_tokens) if whole else 0.0
    return whole * full_s + profile.prefill_s(rest)


def prefill_change(
    engines: tuple[Engine, ...], profile: ClassProfile, *, new: float, ttft_s: float
) -> int:
    """+1, 0 or -1 by the estimated TTFT of a mean prompt (`new` tokens) behind each queue."""
    count = len(engines)
    if not count:
        return 0
    own_s = chunked_s(profile, new)
    if all(chunked_s(profile, e.queue_tokens + new) > ttft_s for e in engines):
        return 1
    budget_s = (ttft_s - own_s) * DOWN_SHARE
    if count == 1 or budget_s <= 0:
        return 0
    shared = count / (count - 1)
    after = [chunked_s(profile, e.queue_tokens * shared + new) - own_s for e in engines]
    return -1 if all(seconds < budget_s for seconds in after) else 0


def decode_change(
    engines: tuple[Engine, ...], profile: ClassProfile, *, context: float, tpot_s: float
) -> int:
    """+1, 0 or -1 by the estimated ITL at each engine's resident and queued KV."""
    count = len(engines)
    if not count:
        return 0

    def itl_s(kv_tokens: float) -> float:
        return profile.iteration_s(kv_tokens / max(1.0, context), kv_tokens)

    if all(itl_s(e.kv_tokens) > tpot_s for e in engines):
        return 1
    if count == 1:
        return 0
    after = [e.kv_tokens * count / (count - 1) for e in engines]
    fits = all(kv < profile.kv_capacity_tokens and itl_s(kv) < tpot_s * DOWN_SHARE for kv in after)
    return -1 if fits else 0


@dataclass(frozen=True, slots=True)
class DynamoState:
    """Between ticks; None before the first.

    Attributes:
        targets, floor: of P and D. due_s: of the next throughput decision.
        reports: engine reports seen so far, of P and D.
    """

    traffic: Traffic = NO_TRAFFIC
    targets: Pair | None = None
    floor: Pair = (1, 1)
    due_s: float = 0.0
    reports: Pair = (0, 0)
    requests: Kalman = UNSEEN
    isl: Kalman = UNSEEN
    osl: Kalman = UNSEEN


@dataclass(frozen=True, slots=True)
class Dynamo:
    """The planner with one or both modes.

    Attributes:
        demand: multiplies the predicted requests (published: 1). slack: share of the slack between
            an unloaded engine and the SLO that is given to the load mode as its SLA (1: the SLO).
    """

    setting: Setting
    throughput: bool
    load: bool
    demand: float = 1.0
    slack: float = 1.0
    predictor: Predictor = Predictor.CONSTANT

    def step(self, facts: Facts, state: DynamoState) -> tuple[Targets, DynamoState]:
        """One tick of 5 s: first the load mode, then the throughput mode, as published."""
        if state.targets is None:
            found = (facts.prefill.live, facts.decode.live)
            state = replace(state, targets=found, floor=found, due_s=facts.now_s + THROUGHPUT_S)
        targets = state.targets or (0, 0)
        state = replace(
            state,
            traffic=state.traffic.add(facts),
            reports=(
                state.reports[0] + len(facts.prefill_engines),
                state.reports[1] + len(facts.decode_engines),
            ),
        )
        why = "observing"
        if self.load:
            targets, why = self._by_load(facts, state, targets)
        if self.throughput and facts.now_s >= state.due_s - 1e-6:
            wanted, why = self._by_throughput(state)
            state = self._next_interval(state)
            if wanted is not None and self.load:
                state = replace(state, floor=wanted)
            elif wanted is not None:
                targets = self._bounded(wanted, targets)
        state = replace(state, targets=targets)
        return Targets(targets[0], targets[1], why), state

    def _by_throughput(self, state: DynamoState) -> tuple[Pair | None, str]:
        traffic = state.traffic
        if traffic.seconds <= 0:
            return None, "no traffic data"
        requests, isl, osl = self._predicted(state)
        rps = self.demand * requests / THROUGHPUT_S
        hit = min(HIT_MAX, max(0.0, traffic.hit))
        slo = self.setting.slo
        on_p = prefill_rps(self.setting.prefill, isl=isl * (1.0 - hit), ttft_s=slo.ttft_s)
        on_d = decode_rps(self.setting.decode, isl=isl, osl=osl, tpot_s=slo.tpot_s)
        if on_p <= 0 or on_d <= 0:
            return None, "partner_not_ready"
        wanted = (max(1, math.ceil(rps / on_p - 1e-9)), max(1, math.ceil(rps / on_d - 1e-9)))
        return wanted, f"throughput: {rps:.2f} requests/s predicted"

    def _predicted(self, state: DynamoState) -> tuple[float, float, float]:
        seen = (state.traffic.each_interval, state.traffic.isl, state.traffic.osl)
        if self.predictor is Predictor.CONSTANT:
            return seen
        filters = (state.requests, state.isl, state.osl)
        ahead = [f.add(value).next for f, value in zip(filters, seen, strict=True)]
        return max(0.0, ahead[0]), max(0.0, ahead[1]), max(0.0, ahead[2])

    @staticmethod
    def _next_interval(state: DynamoState) -> DynamoState:
        traffic = state.traffic
        return replace(
            state,
            traffic=NO_TRAFFIC,
            due_s=state.due_s + THROUGHPUT_S,
            requests=state.requests.add(traffic.each_interval),
            isl=state.isl.add(traffic.isl),
            osl=state.osl.add(traffic.osl),
        )

    def _by_load(self, facts: Facts, state: DynamoState, targets: Pair) -> tuple[Pair, str]:
        counts = (facts.prefill, facts.decode)
        engines = (facts.prefill_engines, facts.decode_engines)
        if any(_moving(count, want) for count, want in zip(counts, targets, strict=True)):
            return targets, "scaling_in_progress"
        if any(len(e) != count.ready for e, count in zip(engines, counts, strict=True)):
            return targets, "worker_count_mismatch"
        if facts.backlog is None or facts.sequences is None:
            return targets, "no_fpm_data"
        ttft_s, tpot_s = self._sla(facts)
        changes = [0, 0]
        if state.reports[0] >= OBSERVATIONS_MIN:
            changes[0] = prefill_change(
                engines[0], self.setting.prefill, new=facts.new, ttft_s=ttft_s
            )
        if state.reports[1] >= OBSERVATIONS_MIN:
            changes[1] = decode_change(
                engines[1], self.setting.decode, context=facts.context, tpot_s=tpot_s
            )
        wanted = (counts[0].ready + changes[0], counts[1].ready + changes[1])
        if self.throughput:
            wanted = (max(wanted[0], state.floor[0]), max(wanted[1], state.floor[1]))
        return self._bounded(wanted, targets), f"load: P {changes[0]:+d}, D {changes[1]:+d}"

    def _sla(self, facts: Facts) -> tuple[float, float]:
        slo = self.setting.slo
        own_s = chunked_s(self.setting.prefill, facts.new)
        least_s = self.setting.decode.iteration_s(1.0, facts.context)
        return (
            own_s + self.slack * (slo.ttft_s - own_s),
            least_s + self.slack * (slo.tpot_s - least_s),
        )

    def _bounded(self, wanted: Pair, before: Pair) -> Pair:
        low, high = self.setting.low, self.setting.high
        step = [
            min(b + STEP_MAX, max(b - STEP_MAX, w)) for w, b in zip(wanted, before, strict=True)
        ]
        return bounded(step[0], low[0], high[0]), bounded(step[1], low[1], high[1])


def _moving(count: PoolCount, target: int) -> bool:
    """What is expected is not what is ready."""
    return count.pending > 0 or count.ready != target
