"""What single clients bring, of labelled traffic: rates with unit, age and kind, as any signal.

Owns differencing a client's counters within one life of its counting, and the bounds of what a
sample may list. Nothing of it is needed to shrink a pool: what is not known of a client is in the
rest, which follows from the model's own signals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from readyplane_planner.signals.samples import check
from readyplane_planner.signals.values import (
    ClientCount,
    ClientWork,
    Kind,
    Observation,
    RouterSample,
    Signal,
)

CLIENTS_MAX = 16
NAME_CHARS_MAX = 128
_COUNTERS = (("arrivals", "requests/s"), ("prefill_work", "tokens/s"))


def rates(
    previous: RouterSample | None,
    current: RouterSample | None,
    dt_s: float,
    signal: Callable[[float | None, str], Signal],
    bad: list[str],
) -> tuple[ClientWork, ...]:
    """Each client's work a second, the largest first; `signal` knows what the sample is worth.

    A client whose counting began anew since the last sample (or router) has no rate yet.
    """
    if current is None or not current.clients:
        return ()
    before: dict[tuple[str, int], ClientCount] = {}
    if previous is not None and previous.incarnation == current.incarnation:
        before = {(c.name, c.life): c for c in previous.clients}
    if len(current.clients) > CLIENTS_MAX:
        bad.append(f"clients: {len(current.clients)} told of, {CLIENTS_MAX} at most")
    found: dict[str, ClientWork] = {}
    for now in current.clients[:CLIENTS_MAX]:
        if not 0 < len(now.name) <= NAME_CHARS_MAX or now.name in found:
            bad.append(f"clients: name {now.name[:40]!r}")
            continue
        old = before.get((now.name, now.life))
        values = (_rate(now, old, name, dt_s, signal, unit, bad) for name, unit in _COUNTERS)
        found[now.name] = ClientWork(now.name, *values)
    return tuple(found.values())


def _rate(
    now: ClientCount,
    old: ClientCount | None,
    name: str,
    dt_s: float,
    signal: Callable[[float | None, str], Signal],
    unit: str,
    bad: list[str],
) -> Signal:
    where = f"clients.{now.name[:40]}.{name}"
    value = check(where, getattr(now, name), bad)
    base = None if old is None else check(where, getattr(old, name), [])
    if value is None or (old is not None and base is None):
        return signal(None, unit)
    if base is None or dt_s <= 0:
        made = signal(0.0, unit)
        why = "counted since this sample only"
        return replace(made, kind=Kind.WARMING, value=None, why=why) if made.known else made
    if value < base:
        bad.append(f"{where}={value:.0f} after {base:.0f} in one life")
        return signal(None, unit)
    return signal((value - base) / dt_s, unit)


def scaled(
    observation: Observation, *, arrivals: float = 1.0, prefill_work: float = 1.0
) -> Observation:
    """As if every client had brought so many times as much."""
    if not observation.clients:
        return observation

    def times(signal: Signal, k: float) -> Signal:
        return signal if signal.value is None else replace(signal, value=signal.value * k)

    clients = tuple(
        ClientWork(c.name, times(c.arrivals, arrivals), times(c.prefill_work, prefill_work))
        for c in observation.clients
    )
    return replace(observation, clients=clients)
