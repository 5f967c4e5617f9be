"""B4, fixed xPyD groups: one signal, decode tokens/s, moves both pools at a frozen ratio.

Rule (HeteroScale, "Taming the Chaos", arXiv 2508.19559): proportional control on a metric that is
linear in load, `wanted = ceil(tokens/s of all decoders / target tokens/s of one)`, no change within
the tolerance of 0.1; P follows D at a maintained ratio, so prefill is never looked at.

The ratio is that of the two pools' work over the whole trace, known in hindsight: the best that
somebody could have frozen. A decoder's full rate is that of its largest batch within the TPOT
target. What the paper does not fix was taken from HPA, which its users would know: a period of 15 s
and no shrinking below the largest want of the last 300 s. Without a signal nothing changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from readyplane.core.profile import ClassProfile
from readyplane_lab.proof.baselines.parts.brain import RuleBrain, bounded
from readyplane_lab.proof.baselines.parts.facts import Facts
from readyplane_lab.proof.port import Contender, Fielded, Hindsight, Setting
from readyplane_planner.decide.follow import Targets

TICK_S = 5.0
PERIOD_S = 15.0
TOLERANCE = 0.1
DOWN_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class GroupState:
    """Sum and number of the period's samples, recent wants (seconds, decoders), the last targets."""

    tokens: float = 0.0
    ticks: int = 0
    due_s: float = 0.0
    said: tuple[tuple[float, int], ...] = ()
    prefill: int = 0
    decode: int = 0


@dataclass(frozen=True, slots=True)
class Groups:
    """The rule.

    Attributes:
        target: share of a decoder's full rate. ratio: P for each D.
    """

    target: float
    ratio: float
    decoder: ClassProfile
    tpot_s: float
    low: tuple[int, int]
    high: tuple[int, int]

    def step(self, facts: Facts, state: GroupState) -> tuple[Targets, GroupState]:
        """One tick of 5 s; decides every 15 s."""
        if not state.said:
            found = facts.prefill.live, facts.decode.live
            state = GroupState(
                due_s=facts.now_s + PERIOD_S,
                said=((facts.now_s, found[1]),),
                prefill=found[0],
                decode=found[1],
            )
        tokens, ticks, due_s = state.tokens, state.ticks, state.due_s
        said, prefill, decode = state.said, state.prefill, state.decode
        if facts.generated is not None:
            tokens, ticks = tokens + facts.generated, ticks + 1
        if facts.now_s >= due_s - 1e-6:
            if ticks:
                full = self.decoder.decode_tokens_per_s(tpot_s=self.tpot_s, context=facts.context)
                want = wanted(tokens / ticks, decode, target=self.target * full)
                want = bounded(want, self.low[1], self.high[1])
                said = tuple((at, n) for at, n in said if at > facts.now_s - DOWN_WINDOW_S)
                said = (*said, (facts.now_s, want))
                decode = max(n for _at, n in said)
                prefill = self.partners(decode)
            tokens, ticks, due_s = 0.0, 0, facts.now_s + PERIOD_S
        state = GroupState(tokens, ticks, due_s, said, prefill, decode)
        return Targets(prefill, decode, f"{self.ratio:.2f} P for each D"), state

    def partners(self, decode: int) -> int:
        """P workers that go with that many decoders."""
        return bounded(math.ceil(decode * self.ratio - 1e-9), self.low[0], self.high[0])


def wanted(tokens: float, now: int, *, target: float) -> int:
    """Decoders for that many output tokens/s at `target` tokens/s each."""
    if target <= 0:
        return now
    want = tokens / target
    if now and abs(want / now - 1.0) <= TOLERANCE + 1e-9:
        return now
    return math.ceil(want - 1e-9)


def frozen_ratio(future: Hindsight) -> float:
    """P work over D work of the whole trace; 1 where one of them has none."""
    work_p, work_d = float(future.work_p.sum()), float(future.work_d.sum())
    return work_p / work_d if work_p > 0 and work_d > 0 else 1.0


def make(target: float, setting: Setting) -> Fielded:
    """Groups at that share of a decoder's full rate."""
    rule = Groups(
        target,
        frozen_ratio(setting.hindsight),
        setting.decode,
        setting.slo.tpot_s,
        setting.low,
        setting.high,
    )
    return Fielded(RuleBrain(rule, GroupState()), policy={"tick_s": TICK_S})


CONTENDER = Contender(
    name="groups",
    title="Fixed xPyD groups: decode tokens/s scale both pools at the trace's own mean ratio.",
    source="HeteroScale, arXiv 2508.19559 (proportional control on decode tokens/s)",
    knob="target share of a decoder's full rate",
    values=(0.95, 0.85, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3),
    default=0.7,
    make=make,
    hindsight=True,
)
