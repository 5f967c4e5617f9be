"""B6, token velocity with convertible decoders, after TokenScale (arXiv 2512.03416).

Rule: each stage has a velocity, the tokens/s that one worker lets through, known from its profile:
V_P of prefill, V_N of the network (KV handed over), V_D of decode, the rate at which a full batch
within the TPOT target releases the tokens that it holds, prompt and output. Workers of a stage =
token arrival rate / velocity: `P = ceil(prompt tokens/s / min(V_P, V_N))`,
`D = ceil((prompt + output) tokens/s / V_D)`. What bursts beyond that is absorbed by decoders that
take prefill work in restricted chunks while new P workers start; here every decoder may.

Prompt tokens are those that no cache held, and outputs are the recent mean times arrivals (the
paper predicts the output length of each request into classes). What is known of the paper states
neither a window for the rate nor when to shrink: here the rate is that of the last 10 s, and a pool
shrinks to the largest want of the last 60 s, so that growth is prompt and a lull shrinks nothing.
The knob multiplies the rates; published is 1. Without rates nothing changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from readyplane_lab.proof.baselines.parts.brain import RuleBrain, bounded, held
from readyplane_lab.proof.baselines.parts.facts import Facts
from readyplane_lab.proof.port import Contender, Fielded, Setting
from readyplane_planner.decide.follow import Targets

TICK_S = 2.0
RATE_S = 10.0
KEEP_S = 60.0
LINK_BYTES_PER_S = 50e9
"""400 Gbit/s between a prefill and a decode worker, as the simulated links."""


@dataclass(frozen=True, slots=True)
class VelocityState:
    """What still counts, and the last targets.

    Attributes:
        rates: (seconds, prompt tokens/s, requests/s). wants: (seconds, P, D).
    """

    rates: tuple[tuple[float, float, float], ...] = ()
    wants: tuple[tuple[float, int, int], ...] = ()
    prefill: int | None = None
    decode: int | None = None


@dataclass(frozen=True, slots=True)
class Velocity:
    """The rule; `margin` multiplies the token arrival rates."""

    setting: Setting
    margin: float = 1.0

    def step(self, facts: Facts, state: VelocityState) -> tuple[Targets, VelocityState]:
        """One tick of 2 s."""
        now_s = facts.now_s
        if facts.uncached is None or facts.arrivals is None:
            prefill = held(state.prefill, facts.prefill.live)
            decode = held(state.decode, facts.decode.live)
            state = replace(state, prefill=prefill, decode=decode)
            return Targets(prefill, decode, "rates are not known"), state
        rates = tuple(r for r in state.rates if r[0] > now_s - RATE_S + 1e-6)
        rates = (*rates, (now_s, facts.uncached, facts.arrivals))
        tokens, requests = (sum(r[of] for r in rates) / len(rates) for of in (1, 2))
        want_p = self.prefillers(tokens, new=facts.new, isl=facts.isl)
        want_d = self.decoders(requests, isl=facts.isl, osl=facts.osl)
        wants = state.wants or ((now_s, facts.prefill.live, facts.decode.live),)
        wants = tuple(w for w in wants if w[0] > now_s - KEEP_S + 1e-6)
        wants = (*wants, (now_s, want_p, want_d))
        prefill, decode = max(p for _at, p, _d in wants), max(d for _at, _p, d in wants)
        return Targets(prefill, decode, "token velocity"), VelocityState(
            rates, wants, prefill, decode
        )

    def prefillers(self, tokens: float, *, new: float, isl: float) -> int:
        """P workers for `tokens` uncached prompt tokens/s; the KV of whole prompts is sent."""
        profile = self.setting.prefill
        velocity = new / profile.prefill_s(new, max(0.0, isl - new))
        network = LINK_BYTES_PER_S / profile.kv_bytes_per_token * new / isl
        want = math.ceil(self.margin * tokens / min(velocity, network) - 1e-9)
        return bounded(want, self.setting.low[0], self.setting.high[0])

    def decoders(self, requests: float, *, isl: float, osl: float) -> int:
        """D workers for that many requests/s, each of `isl + osl` tokens held and released."""
        rate = self.margin * requests * (isl + osl)
        want = math.ceil(rate / self.decode_velocity(isl=isl, osl=osl) - 1e-9)
        return bounded(want, self.setting.low[1], self.setting.high[1])

    def decode_velocity(self, *, isl: float, osl: float) -> float:
        """Tokens/s that one decoder releases with its largest batch within the TPOT target."""
        profile, context = self.setting.decode, isl + osl / 2
        tpot_s = self.setting.slo.tpot_s
        batch = max(1.0, profile.decode_sequences(tpot_s=tpot_s, context=context))
        return batch * (isl + osl) / (osl * profile.iteration_s(batch, batch * context))


def make(margin: float, setting: Setting) -> Fielded:
    """Token velocity with that margin, decoders convertible."""
    return Fielded(
        RuleBrain(Velocity(setting, margin), VelocityState()),
        policy={"tick_s": TICK_S},
        convertible=True,
    )


CONTENDER = Contender(
    name="tokenscale",
    title="Token arrival rate over token velocity, with decoders that absorb prefill bursts.",
    source="TokenScale, arXiv 2512.03416",
    knob="multiple of the token arrival rates",
    values=(0.8, 0.9, 1.0, 1.15, 1.3, 1.5, 1.75, 2.0),
    default=1.0,
    make=make,
)
