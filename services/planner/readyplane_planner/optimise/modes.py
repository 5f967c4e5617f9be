"""How a worker is started: eager, compiled as it starts, or from code compiled before (R13.1).

The mode that costs least over the expected life of the capacity: what is held while it comes up, what
more of it is needed because it runs slower, and what it breaks by arriving late. A burst is over
before a compilation pays; what stays for hours is worth one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from readyplane_planner.optimise.mix import start_cost

MODES = ("jit", "eager", "aot")
"""The first of two that cost the same is taken."""


@dataclass(frozen=True, slots=True)
class ModeOffer:
    """One way of starting a worker of one class.

    Attributes:
        ready_s: median seconds until it serves. slow: its times over those of the profile, from 1.
        count: starts that `ready_s` rests on. why_not: why it cannot be had; empty when it can.
    """

    mode: str
    ready_s: float
    slow: float = 1.0
    count: int = 0
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """The mode, and the offers with their expected costs per worker's worth of work, cheapest first.

    Attributes:
        price_per_s, life_s: that the costs were worked out with. others: that could not be had.
    """

    ranked: tuple[tuple[float, ModeOffer], ...]
    price_per_s: float
    life_s: float
    others: tuple[ModeOffer, ...] = ()

    @property
    def mode(self) -> str:
        """Of the cheapest."""
        return self.ranked[0][1].mode

    @property
    def ready_s(self) -> float:
        """Median seconds until it serves."""
        return self.ranked[0][1].ready_s

    @property
    def why(self) -> str:
        """What was weighed against what, in words."""
        price = self.price_per_s or 1.0
        parts = [_said(offer, cost / price) for cost, offer in self.ranked]
        parts += [f"{o.mode}: {o.why_not}" for o in self.others]
        return f"for {self.life_s:,.0f} s of serving, in worker-seconds: {'; '.join(parts)}"


def choose_mode(
    offers: Sequence[ModeOffer],
    *,
    price_per_s: float,
    life_s: float,
    in_time_s: float,
    missed_per_s: float,
) -> ModeChoice:
    """The cheapest mode that can be had; the first offer where none can.

    Args:
        price_per_s, in_time_s, missed_per_s: as of `mix.start_cost`. life_s: of the capacity.
    """

    def cost_of(offer: ModeOffer) -> float:
        # The work of one worker at full speed takes `slow` of them while they serve.
        return start_cost(
            price_per_s=price_per_s,
            ready_s=offer.ready_s,
            life_s=life_s * offer.slow,
            rate=1.0,
            in_time_s=in_time_s,
            missed_per_s=missed_per_s,
        )

    had = [o for o in offers if not o.why_not] or list(offers[:1])
    costs = sorted(((cost_of(o), MODES.index(o.mode), o) for o in had), key=lambda c: c[:2])
    ranked = tuple((cost, offer) for cost, _place, offer in costs)
    return ModeChoice(ranked, price_per_s, life_s, tuple(o for o in offers if o not in had))


def _said(offer: ModeOffer, cost: float) -> str:
    known = f"{offer.count} starts" if offer.count else "assumed"
    speed = "" if offer.slow == 1.0 else f", {offer.slow:g} times as slow"
    return f"{offer.mode} {cost:,.0f} (ready in {offer.ready_s:.0f} s, {known}{speed})"
