"""B5, the older generation of Dynamo's planner (up to about 0.9), with correction factors.

Every 180 s: `p = TTFT / TTFT of the profile`, `d = ITL / ITL of the profile at the mean batch`, both
of the interval alone, neither smoothed nor bounded. P gets the prompt tokens/s of the interval,
times `min(1, p)` (so a correction only ever makes P smaller: cache hits, not queues), over the
profile's rate. D gets the output tokens/s over the profile's rate at an ITL of `SLA / d`; where no
batch keeps that, the minimum, as published. An interval in which anything is missing is skipped.

The planner reads means of TTFT and ITL; here they are the mean, over the interval's ticks, of the
medians that the router reports. The knob multiplies the predicted requests; published is 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from readyplane_lab.proof.baselines.parts.brain import RuleBrain, bounded
from readyplane_lab.proof.baselines.parts.dynamo import (
    NO_TRAFFIC,
    THROUGHPUT_S,
    TICK_S,
    Traffic,
)
from readyplane_lab.proof.baselines.parts.facts import Facts
from readyplane_lab.proof.port import Contender, Fielded, Setting
from readyplane_planner.decide.follow import Targets


@dataclass(frozen=True, slots=True)
class CorrectionState:
    """Sums of the interval, the time of the next decision and the last targets."""

    traffic: Traffic = NO_TRAFFIC
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    ticks: int = 0
    due_s: float | None = None
    targets: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class Correction:
    """The rule; `demand` multiplies the predicted requests."""

    setting: Setting
    demand: float = 1.0

    def step(self, facts: Facts, state: CorrectionState) -> tuple[Targets, CorrectionState]:
        """One tick of 5 s; decides every 180 s."""
        if state.due_s is None:
            found = (facts.prefill.live, facts.decode.live)
            state = CorrectionState(due_s=facts.now_s + THROUGHPUT_S, targets=found)
        state = replace(state, traffic=state.traffic.add(facts))
        if facts.ttft_s is not None and facts.tpot_s is not None:
            state = replace(
                state,
                ttft_s=state.ttft_s + facts.ttft_s,
                tpot_s=state.tpot_s + facts.tpot_s,
                ticks=state.ticks + 1,
            )
        why = "observing"
        if state.due_s is not None and facts.now_s >= state.due_s - 1e-6:
            wanted = self.replicas(state, decode_ready=facts.decode.ready)
            why = "skipped: something is missing" if wanted is None else "throughput, corrected"
            state = CorrectionState(
                due_s=state.due_s + THROUGHPUT_S, targets=wanted or state.targets
            )
        return Targets(state.targets[0], state.targets[1], why), state

    def replicas(self, state: CorrectionState, *, decode_ready: int) -> tuple[int, int] | None:
        """P and D for the next interval; None when the interval tells too little."""
        traffic, prefill, decode = state.traffic, self.setting.prefill, self.setting.decode
        isl, osl = traffic.isl, traffic.osl
        if not state.ticks or traffic.seconds <= 0 or isl <= 0 or osl <= 0 or not decode_ready:
            return None
        ttft_s, tpot_s = state.ttft_s / state.ticks, state.tpot_s / state.ticks
        rps = self.demand * traffic.requests / traffic.seconds
        context = isl + osl / 2

        correct_p = ttft_s / prefill.prefill_s(isl)
        prefill_tokens = rps * isl * min(1.0, correct_p)
        want_p = math.ceil(prefill_tokens / prefill.prefill_tokens_per_s(isl) - 1e-9)

        lasts_s = ttft_s + osl * tpot_s
        batch = traffic.requests / traffic.seconds * lasts_s / decode_ready
        correct_d = tpot_s / decode.iteration_s(batch, batch * context)
        itl_s = self.setting.slo.tpot_s / correct_d if correct_d > 0 else self.setting.slo.tpot_s
        rate = decode.decode_tokens_per_s(tpot_s=itl_s, context=context)
        low, high = self.setting.low, self.setting.high
        want_d = math.ceil(rps * osl / rate - 1e-9) if rate > 0 else low[1]
        return bounded(want_p, low[0], high[0]), bounded(want_d, low[1], high[1])


def make(demand: float, setting: Setting) -> Fielded:
    """The rule for `demand` times the predicted requests."""
    return Fielded(
        RuleBrain(Correction(setting, demand), CorrectionState()), policy={"tick_s": TICK_S}
    )


CONTENDER = Contender(
    name="dynamo-correction",
    title="NVIDIA Dynamo's older SLA planner: throughput over profiled rates, with corrections.",
    source="ai-dynamo/dynamo 002a7c31, 0ff50012 (about 0.9 and before), planner_core.py",
    knob="multiple of the predicted requests",
    values=(1.0, 1.2, 1.4, 1.7, 2.0, 2.5, 3.2, 4.0),
    default=1.0,
    make=make,
)
