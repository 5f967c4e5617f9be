"""Signals of several routers as one: those of the router that is asked, and what it heard of others.

Owns the merging. Counters are those of this router's own life: what another one counted before it
began is not in them, and one that leaves keeps its part. Gauges, windows, lengths and clients are
of routers that are heard; who is not heard is told by `fresh`, never taken for idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import xxhash

from readyplane.core.breakdown import ClientSignals, GenerationSignals
from readyplane.core.ration import PrioritySignals
from readyplane.ports import LatencyWindow, ModelSignals
from readyplane_router.clients import CLIENTS_TOLD_MAX
from readyplane_router.rationing import PRIORITIES_MAX
from readyplane_router.signals import GENERATIONS_MAX

LIVES_MAX = 128
LATE_MAX = 64
COUNTERS = tuple(f.name for f in fields(ModelSignals) if f.name.endswith("_total"))
WINDOWS = ("ttft_actual", "ttft_predicted", "tpot_actual", "tpot_predicted")
GAUGES = (
    *("queued_requests", "queued_tokens", "prefilling_requests", "prefilling_tokens"),
    *("decoding_requests", "decoding_remaining_tokens", "decoding_kv_tokens"),
)
_PRIORITY = ("arrivals_total", "arrival_uncached_tokens_total", "rationed_total")
_GENERATION = ("finished_total", "attained_total", "failed_total")
_STEPS = ((0.5, "p50_s"), (0.4, "p90_s"), (0.09, "p99_s"))

Key = tuple[str, str, str]  # "", "priority" or "generation"; which one; the counter
Counts = dict[Key, int]


@dataclass(frozen=True, slots=True)
class Told:
    """One router's word: `uptime_s` of its life, and its own signals. `form`: of what is packed."""

    form: int
    uptime_s: float
    models: tuple[ModelSignals, ...]


@dataclass(slots=True)
class _Life:
    """Another router. `told_s`: when its last word was true, on this router's clock."""

    told_s: float
    counts: dict[str, Counts]
    models: dict[str, ModelSignals]


@dataclass(frozen=True, slots=True)
class _Late:
    """Growth that was heard of in one piece, paid in between two moments."""

    since_s: float
    until_s: float
    growth: dict[str, Counts]

    def paid(self, now_s: float) -> dict[str, Counts]:
        """The part of it that counts by now; only ever more."""
        share = min(1.0, max(0.0, (now_s - self.since_s) / (self.until_s - self.since_s)))
        return {
            model: {key: int(value * share) for key, value in counts.items()}
            for model, counts in self.growth.items()
        }


@dataclass(slots=True)
class Others:
    """What other routers told, as this router counts it; a word is fresh for `ttl_s`.

    What a router counted while it was not heard is paid in over as long again: told at once, it
    would look like a burst to whoever differences counters.
    """

    ttl_s: float
    _lives: dict[str, _Life] = field(default_factory=dict)
    _totals: dict[str, Counts] = field(default_factory=dict)
    _late: list[_Late] = field(default_factory=list)

    def hear(
        self, router_id: str, told: Told, *, told_s: float, now_s: float, began_s: float
    ) -> None:
        """A router's word, true at `told_s`; `began_s` is the beginning of this router's own life."""
        before = self._lives.get(router_id)
        counts = {m.model: counts_of(m) for m in told.models}
        if before is None:
            since_s = told_s - told.uptime_s
            # Whoever began earlier has counted what is not of this life: it counts from here.
            known = counts if since_s < began_s else {}
        else:
            since_s, known = before.told_s, before.counts
        growth = {model: grown(known.get(model, {}), now) for model, now in counts.items()}
        self._lives[router_id] = _Life(told_s, counts, {m.model: m for m in told.models})
        if told_s - since_s > self.ttl_s and any(growth.values()):
            self._late.append(_Late(now_s, now_s + told_s - since_s, growth))
            # Where it will be counted is settled now: what is paid in never changes its place.
            add(self._totals, {model: dict.fromkeys(counts, 0) for model, counts in growth.items()})
        else:
            add(self._totals, growth)
        while self._late and (len(self._late) > LATE_MAX or self._late[0].until_s <= now_s):
            add(self._totals, self._late.pop(0).growth)
        if len(self._lives) > LIVES_MAX:
            del self._lives[min(self._lives, key=lambda name: self._lives[name].told_s)]

    def fresh(self, now_s: float) -> dict[str, Mapping[str, ModelSignals]]:
        """Signals by model of each router whose word is not too old, by its id."""
        return {
            router_id: life.models
            for router_id, life in sorted(self._lives.items())
            if now_s - life.told_s < self.ttl_s
        }

    def merged(
        self, own: Mapping[str, ModelSignals], *, now_s: float, model: str = ""
    ) -> Mapping[str, ModelSignals]:
        """This router's signals with those of all others; its own as they are while it is alone.

        Args:
            model: only this one; empty for all.
        """
        if not self._lives:
            return own
        totals = {name: dict(counts) for name, counts in self._totals.items()}
        for late in self._late:
            add(totals, late.paid(now_s))
        told = self.fresh(now_s)
        names = dict.fromkeys(
            [*own, *totals, *(name for models in told.values() for name in models)]
        )
        return {
            name: merge(
                own.get(name) or ModelSignals(name),
                totals.get(name, {}),
                {router_id: models[name] for router_id, models in told.items() if name in models},
            )
            for name in names
            if model in ("", name)
        }


def counts_of(signals: ModelSignals) -> Counts:
    """Everything in them that only grows, by its key."""
    counts: Counts = {("", "", name): getattr(signals, name) for name in COUNTERS}
    for p in signals.priorities:
        counts |= {("priority", str(p.priority), name): getattr(p, name) for name in _PRIORITY}
    for g in signals.generations:
        counts |= {
            ("generation", g.manifest_digest, name): getattr(g, name) for name in _GENERATION
        }
    return counts


def grown(before: Counts, now: Counts) -> Counts:
    """What was counted between two words of one router; what went back began anew at zero."""
    out = {}
    for key, value in now.items():
        base = before.get(key, 0)
        delta = value - base if value >= base else value
        if delta > 0:
            out[key] = delta
    return out


def add(totals: dict[str, Counts], growth: Mapping[str, Counts]) -> None:
    """Add growth to totals, model by model; priorities and generations stay bounded in number."""
    for model, counts in growth.items():
        total = totals.setdefault(model, {})
        for (kind, name, counter), value in counts.items():
            key = kind, _place(total, name) if kind == "priority" else name, counter
            total[key] = total.get(key, 0) + value
        told = list(dict.fromkeys(name for kind, name, _ in total if kind == "generation"))
        for name in told[:-GENERATIONS_MAX]:
            for counter in _GENERATION:
                total.pop(("generation", name, counter), None)


def _place(total: Counts, priority: str) -> str:
    """Where a priority is counted: of too many, at the nearest below, or at the lowest."""
    known = {int(name) for kind, name, _ in total if kind == "priority"}
    wanted = int(priority)
    if wanted in known or len(known) < PRIORITIES_MAX:
        return priority
    return str(max((p for p in known if p < wanted), default=min(known)))


def merge(own: ModelSignals, others: Counts, fresh: Mapping[str, ModelSignals]) -> ModelSignals:
    """One model's signals of all routers.

    Args:
        own: this router's. others: what the others have counted in this router's life.
        fresh: signals of those that are heard, by router id.
    """
    told = [own, *fresh.values()]
    changes: dict[str, Any] = {
        name: getattr(own, name) + others.get(("", "", name), 0) for name in COUNTERS
    }
    changes |= {name: sum(getattr(s, name) for s in told) for name in GAUGES}
    changes |= {name: pool([getattr(s, name) for s in told]) for name in WINDOWS}
    return replace(
        own,
        **changes,
        length_counts=_summed([s.length_counts for s in told]),
        generations=_generations(own, others, fresh.values()),
        priorities=_priorities(own, others),
        ration=next((s.ration for s in told if s.ration is not None), None),
        clients=merge_clients({"": own.clients, **{k: s.clients for k, s in fresh.items()}}),
    )


def pool(windows: Sequence[LatencyWindow]) -> LatencyWindow:
    """Windows of several routers as one: counts and means exact, quantiles from above.

    Of each window half the samples are taken to be as slow as its p50, the next to be as slow as
    its p90, then its p99, and the last hundredth slower than anything. So a quantile is never below
    the true one (but for the interpolation between two neighbouring samples), never above the
    slowest router's own, and few slow samples of one router do not stand for all.
    """
    known = [w for w in windows if w.count]
    if len(known) < 2:
        return known[0] if known else windows[0]
    count = sum(w.count for w in known)
    steps: list[tuple[float, float]] = sorted(
        (getattr(w, name), share * w.count) for w in known for share, name in _STEPS
    )

    def quantile(q: float) -> float:
        below = 0.0
        for value, mass in steps:
            below += mass
            if below >= q * count * (1.0 - 1e-9):
                return value
        return steps[-1][0]

    return LatencyWindow(
        max(w.window_s for w in known),
        count,
        quantile(0.5),
        quantile(0.9),
        quantile(0.99),
        sum(w.mean_s * w.count for w in known) / count,
    )


def merge_clients(
    told: Mapping[str, Sequence[ClientSignals]],
) -> tuple[ClientSignals, ...]:
    """The largest clients of all routers, by the best place that one has at any.

    A client's counters are the sum of what those tell who tell of it now. When one begins or ceases
    to, the sum is another one: so is its life.

    Args:
        told: by router id, the largest first; this router's own under an empty one.
    """
    found: dict[str, list[tuple[int, str, ClientSignals]]] = {}
    for router_id, clients in told.items():
        for place, client in enumerate(clients):
            found.setdefault(client.client, []).append((place, router_id, client))
    out = []
    for name, parts in found.items():
        arrivals = sum(c.arrivals_total for _, _, c in parts)
        tokens = sum(c.arrival_uncached_tokens_total for _, _, c in parts)
        best = min(place for place, _, _ in parts)
        out.append((best, -tokens, name, ClientSignals(name, _life(parts), arrivals, tokens)))
    return tuple(client for *_, client in sorted(out)[:CLIENTS_TOLD_MAX])


def _life(parts: Sequence[tuple[int, str, ClientSignals]]) -> int:
    if len(parts) == 1 and not parts[0][1]:
        return parts[0][2].life  # counted here alone
    text = "\x1f".join(sorted(f"{router_id}\x1e{c.life}" for _, router_id, c in parts))
    return (xxhash.xxh3_64_intdigest(text.encode()) >> 2) + (1 << 62)


def _summed(
    tables: Sequence[tuple[tuple[float, ...], ...]],
) -> tuple[tuple[float, ...], ...]:
    """Sum of the tables that have the first one's form; a release may count in other bins."""
    known = [t for t in tables if t]
    same = [t for t in known if [len(row) for row in t] == [len(row) for row in known[0]]]
    return tuple(
        tuple(sum(cells) for cells in zip(*rows, strict=True)) for rows in zip(*same, strict=True)
    )


def _generations(
    own: ModelSignals, others: Counts, fresh: Iterable[ModelSignals]
) -> tuple[GenerationSignals, ...]:
    late = {g.manifest_digest: g.late_requests for g in own.generations}
    for signals in fresh:
        for g in signals.generations:
            late[g.manifest_digest] = late.get(g.manifest_digest, 0) + g.late_requests
    found = {g.manifest_digest: g for g in own.generations}
    out = []
    for name in sorted({*late, *(name for kind, name, _ in others if kind == "generation")}):
        here = found.get(name) or GenerationSignals(name)
        finished, attained, failed = (
            getattr(here, counter) + others.get(("generation", name, counter), 0)
            for counter in _GENERATION
        )
        out.append(GenerationSignals(name, finished, attained, failed, late.get(name, 0)))
    return tuple(out)


def _priorities(own: ModelSignals, others: Counts) -> tuple[PrioritySignals, ...]:
    found = {p.priority: p for p in own.priorities}
    names = {*found, *(int(name) for kind, name, _ in others if kind == "priority")}
    return tuple(
        PrioritySignals(
            priority,
            *(
                getattr(found.get(priority, PrioritySignals(priority)), counter)
                + others.get(("priority", str(priority), counter), 0)
                for counter in _PRIORITY
            ),
        )
        for priority in sorted(names, reverse=True)
    )
