"""Which clients bring most of the work, and what each has brought; of labelled requests alone.

Owns the choice in bounded memory (a space-saving sketch whose weights fade) and exact counters of
those chosen: a client that takes another's place begins at zero, as another life, so that whoever
differences counters is never misled. What is not told here is in the model's own counters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import xxhash

from readyplane.core.breakdown import ClientSignals
from readyplane.core.work import RequestShape
from readyplane_router.signals import Lengths

CLIENTS_KEPT_MAX = 64
CLIENTS_TOLD_MAX = 16
NAME_CHARS_MAX = 64
SHARE_MIN = 0.01
"""Of all labelled work lately: who brings less is not worth a forecast of its own."""
HALF_LIFE_S = 600.0
_REBASE_HALVINGS = 64.0


@dataclass(slots=True)
class Client:
    """One client that is counted.

    Attributes:
        life: another one with each new beginning. weight: its work, fading, and what it took over;
        inherited: that part, which may be anybody's.
    """

    name: str
    life: int
    weight: float
    inherited: float
    arrivals: int = 0
    uncached_tokens: int = 0


@dataclass(slots=True)
class Clients:
    """The clients of one model. A name nobody sent costs nothing: nothing is made for it."""

    _kept: dict[str, Client] = field(default_factory=dict)
    _lives: int = 0
    _base_s: float = 0.0
    _total: float = 0.0

    def arrived(
        self, shape: RequestShape, uncached_tokens: int, lengths: Lengths, now_s: float
    ) -> None:
        """A labelled request, with what it has to compute here and the output to be expected."""
        output_tokens, _ = lengths.remaining(shape.isl, 0, shape.max_tokens)
        self.add(
            shape.tenant, uncached_tokens=uncached_tokens, output_tokens=output_tokens, now_s=now_s
        )

    def add(self, tenant: str, *, uncached_tokens: int, output_tokens: float, now_s: float) -> None:
        """One labelled request that has arrived, with the output that is expected of it.

        Any client with more than a 64th of the recent work is kept, however many names there are.
        """
        name = bounded_name(tenant)
        halvings = (now_s - self._base_s) / HALF_LIFE_S
        if halvings > _REBASE_HALVINGS:
            self._rebase(halvings, now_s)
            halvings = 0.0
        # Later work weighs more instead of all earlier work less: nothing is touched but one entry.
        weight = (uncached_tokens + output_tokens) * 2.0**halvings
        self._total += weight
        client = self._kept.get(name)
        if client is None:
            client = self._begin(name)
        client.weight += weight
        client.arrivals += 1
        client.uncached_tokens += uncached_tokens

    def top(self) -> tuple[ClientSignals, ...]:
        """Those who surely bring most, the largest first; empty while nobody is labelled."""
        least = SHARE_MIN * self._total
        sure = sorted((c.inherited - c.weight, c.name, c) for c in self._kept.values())
        return tuple(
            ClientSignals(c.name, c.life, c.arrivals, c.uncached_tokens)
            for less, _, c in sure[:CLIENTS_TOLD_MAX]
            if -less >= least
        )

    def _begin(self, name: str) -> Client:
        inherited = 0.0
        if len(self._kept) >= CLIENTS_KEPT_MAX:
            least = min(self._kept.values(), key=lambda c: c.weight)
            del self._kept[least.name]
            inherited = least.weight
        self._lives += 1
        client = self._kept[name] = Client(name, self._lives, inherited, inherited)
        return client

    def _rebase(self, halvings: float, now_s: float) -> None:
        fade = 2.0**-halvings
        self._base_s = now_s
        self._total *= fade
        for client in self._kept.values():
            client.weight *= fade
            client.inherited *= fade


def bounded_name(tenant: str) -> str:
    """A client's name as it is counted and told: short and printable, and never another's.

    What is too long, or holds what does not print, keeps its beginning and gets its hash.
    """
    if len(tenant) <= NAME_CHARS_MAX and tenant.isprintable():
        return tenant
    raw = tenant.encode("utf-8", "surrogatepass")
    head = "".join(c for c in tenant[: NAME_CHARS_MAX - 17] if c.isprintable())
    return f"{head}~{xxhash.xxh3_64_hexdigest(raw)}"
