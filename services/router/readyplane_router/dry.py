"""Routes that are looked at: a dry run, and the explanation of one that was booked.

Owns no decision: it asks the desk and the pairing brain, and shapes what they say.
"""

from __future__ import annotations

from typing import Any

from readyplane.ports import Pair
from readyplane_router.answers import end_of, waiting_error
from readyplane_router.bookings import Held
from readyplane_router.desk import Desk
from readyplane_router.pair import Chosen, PairPolicy, Shed
from readyplane_router.pair.explain import explain as explained
from readyplane_router.waiting import Waiting


def dry_run_of(
    desk: Desk, entry: Waiting, policy: PairPolicy, *, explain: bool, now_s: float
) -> Pair:
    """The pair that a request would get now, without a reservation.

    Raises:
        ReadyplaneError: it would be refused, or wait.
    """
    verdict = desk.verdict(entry, now_s=now_s)
    told: dict[str, Any] = {}
    if explain:
        ask = desk.ask(entry, now_s=now_s)
        told = explained(ask, desk.prefills, desk.decodes, policy, now_s=now_s)
    if isinstance(verdict, Chosen):
        return Pair(
            reservation_id="",
            prefill=end_of(verdict.prefill, verdict.prefill_cached),
            decode=end_of(verdict.decode, verdict.decode_cached),
            local=verdict.local,
            predicted_ttft_s=verdict.terms.ttft_s,
            predicted_tpot_s=verdict.terms.tpot_s,
            waited_s=0.0,
            ttl_s=0.0,
            explanation=told or None,
        )
    if isinstance(verdict, Shed):
        raise desk.error(verdict, entry.shape)
    why = f"{verdict.reason} (it would wait)"
    if told.get("excluded"):
        why += "; " + "; ".join(f"{k}: {v}" for k, v in list(told["excluded"].items())[:8])
    raise waiting_error(verdict, why, desk)


def explain_booked(
    desk: Desk, entry: Waiting, held: Held, policy: PairPolicy, *, now_s: float
) -> dict[str, Any]:
    """What was chosen beside the best pairs as they are with it booked."""
    ask = desk.ask(entry, now_s=now_s)
    told = explained(ask, desk.prefills, desk.decodes, policy, now_s=now_s)
    told["chosen"] = {
        "prefill": held.prefill.worker_id,
        "decode": held.decode.worker_id,
        "local": held.local,
        "terms": {name: round(getattr(held.terms, name), 6) for name in held.terms.__slots__},
    }
    told["note"] = "pairs are shown with this request already booked; `chosen` is as judged"
    return told
