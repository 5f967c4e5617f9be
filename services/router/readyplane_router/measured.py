"""What a booked pair tells of the rates of its workers and their link, as its events come.

Owns which times of a request are whose; `Rates` makes factors of them.
"""

from __future__ import annotations

from readyplane.core.work import RequestEvent
from readyplane_router.bookings import Held
from readyplane_router.pair import PairPolicy
from readyplane_router.rates import Rates


def prefilled(rates: Rates, held: Held, *, now_s: float) -> None:
    """Its prompt has been prefilled."""
    seat, terms = held.prefill, held.terms
    rates.prefilled(
        seat,
        predicted_s=(terms.queue_s + terms.prefill_s) / seat.prefill_factor,
        measured_s=now_s - held.sent_s,
        now_s=now_s,
        queued=terms.queue_s > terms.prefill_s,
    )


def moved(rates: Rates, policy: PairPolicy, held: Held, *, now_s: float) -> None:
    """Its KV has come over, and a first token was made of it."""
    if held.local or held.prefill_done_s is None:
        return
    near = held.prefill.node == held.decode.node
    link = policy.local_link if near else policy.network_link
    rates.moved(
        link,
        predicted_s=held.terms.transfer_s / rates.factor_of(link),
        rest_s=1.5 * held.terms.first_iteration_s,  # it joins when the one under way has ended
        measured_s=now_s - held.prefill_done_s,
        now_s=now_s,
    )


def decoded(rates: Rates, held: Held, event: RequestEvent, *, now_s: float) -> None:
    """It has ended: its pace, beside that of its worker when it began and now."""
    if event.tpot_s is None:
        return
    seat, times = held.decode, held.decode.times
    iteration_s = times.a + times.b * seat.occupied() + times.c * seat.kv_tokens
    rates.decoded(
        seat,
        predicted_s=(held.iteration_s + iteration_s) / 2.0,
        measured_s=event.tpot_s,
        tokens=event.output_tokens,
        now_s=now_s,
    )
