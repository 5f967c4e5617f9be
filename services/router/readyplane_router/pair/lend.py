"""Decode workers that are lent to prefill: when they may take a prompt, and how they make up for it."""

from __future__ import annotations

from readyplane.core.work import Slo
from readyplane_router.pair.seat import Seat
from readyplane_router.pair.values import Ask

LEND_SHARE, LEND_LEAST = 0.5, 0.05
"""Share of what the TPOT target leaves that prompts may take on a lent decode worker, and the least
that is reckoned with."""
LEND_AT_ONCE = 0.5
LENT_AWAY_S = 1.0


def lent_s(ask: Ask, seat: Seat, own_s: float, *, now_s: float) -> float:
    """Seconds until a decode worker that is lent to prefill may take the prompt.

    Every sequence that decodes there waits for its chunks, and what they may lose is what the TPOT
    target leaves over the iterations as they are. One prompt must not take all of that of an answer
    of the usual length, and after a prompt they are made up for.
    """
    spare_s = ask.slo.tpot_s - _iteration_s(seat)
    if spare_s <= 0 or own_s > LEND_AT_ONCE * spare_s * ask.output_tokens:
        return LENT_AWAY_S
    return max(0.0, seat.lent_until_s - now_s)


def made_up_s(seat: Seat, own_s: float, slo: Slo) -> float:
    """How long a lent worker makes up for a prompt of that time."""
    share = LEND_SHARE * (1.0 - _iteration_s(seat) / slo.tpot_s)
    return own_s / max(share, LEND_LEAST)


def _iteration_s(seat: Seat) -> float:
    """Of the sequences that it has, without a prompt."""
    times = seat.times
    whole_s = times.a + times.b * seat.occupied() + times.c * seat.kv_tokens
    return whole_s * seat.decode_factor
