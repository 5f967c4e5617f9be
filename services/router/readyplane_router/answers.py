"""Values between the port, the desk and the store: checks, reservation ids, takes, signals.

Owns the translation; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from readyplane.core.errors import InvalidField, NoPair, Overloaded, ReadyplaneError
from readyplane.core.work import RequestEvent, RequestShape
from readyplane.ports import End, LatencyWindow, ModelSignals, Pair
from readyplane_router.bookings import Held
from readyplane_router.desk import Desk
from readyplane_router.pair import Seat, Wait
from readyplane_router.seats import Side, Take, Use

ISL_MAX = 16_000_000
EVENT_TOKENS_MAX = 16_000_000
EVENT_S_MAX = 86_400.0

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


def check_shape(shape: RequestShape) -> None:
    if not shape.request_id or len(shape.request_id) > 200:
        raise InvalidField("request_id", shape.request_id, "give an id of 1 to 200 characters")
    if not shape.model:
        raise InvalidField("model", shape.model, "name the model")
    if not 1 <= shape.isl <= ISL_MAX:
        raise InvalidField("isl", shape.isl, f"give 1 to {ISL_MAX} prompt tokens")
    if shape.token_ids and len(shape.token_ids) != 4 * shape.isl:
        raise InvalidField(
            "token_ids", len(shape.token_ids), f"give 4 bytes a token: {4 * shape.isl} for the isl"
        )
    if shape.max_tokens is not None and not 1 <= shape.max_tokens <= ISL_MAX:
        raise InvalidField("max_tokens", shape.max_tokens, f"give 1 to {ISL_MAX}, or nothing")
    if shape.slo is not None and not (shape.slo.ttft_s > 0 and shape.slo.tpot_s > 0):
        raise InvalidField("slo", str(shape.slo), "give times above 0")


def check_events(events: Sequence[RequestEvent]) -> None:
    """Refuse facts that cannot be, before any of their batch is applied.

    Raises:
        InvalidField: a time that is not finite and within a day, or a count out of its bounds.
    """
    for place, event in enumerate(events):
        for name, seconds in (("ttft_s", event.ttft_s), ("tpot_s", event.tpot_s)):
            if seconds is not None and not 0 <= seconds <= EVENT_S_MAX:  # NaN is neither
                remedy = f"give finite seconds, 0 to {EVENT_S_MAX:g}, or nothing"
                raise InvalidField(f"events[{place}].{name}", seconds, remedy)
        for name, tokens in (
            ("output_tokens", event.output_tokens),
            ("cached_tokens", event.cached_tokens),
        ):
            if tokens is not None and not 0 <= tokens <= EVENT_TOKENS_MAX:
                remedy = f"give 0 to {EVENT_TOKENS_MAX} tokens"
                raise InvalidField(f"events[{place}].{name}", tokens, remedy)


def take_of(held: Held, payload: str, ttl_s: float) -> Take:
    p, d = held.prefill, held.decode
    work_us = round(held.terms.prefill_s * 1e6) if held.prefilling else 0
    tokens = held.uncached_tokens if held.prefilling else 0
    sides: tuple[Side, ...]
    if held.local:
        sides = (Side(d.worker_id, d.epoch, Use(1, held.decode_blocks, work_us, tokens)),)
    else:
        blocks = held.prefill_blocks if held.prefilling else 0
        sides = (
            Side(p.worker_id, p.epoch, Use(int(held.prefilling), blocks, work_us, tokens)),
            Side(d.worker_id, d.epoch, Use(1, held.decode_blocks)),
        )
    return Take(held.reservation_id, sides, payload, ttl_s)


def ends_of(held: Held) -> tuple[Seat, ...]:
    return (held.decode,) if held.local else (held.prefill, held.decode)


def learn(seat: Seat, used: Use) -> None:
    """What other routers have promised on a seat: all that the store counts, less our own."""
    seat.other_sequences = max(0, used.sequences - seat.sequences)
    seat.other_blocks = max(0, used.blocks - seat.kv_blocks)
    seat.other_work_s = max(0.0, used.work_us / 1e6 - seat.work_s)
    seat.other_tokens = max(0, used.tokens - seat.prefill_tokens)


def end_of(seat: Seat, cached_tokens: int) -> End:
    return End(
        seat.worker_id,
        seat.incarnation,
        seat.epoch,
        seat.engine_url,
        cached_tokens,
        seat.bootstrap,
    )


def payload_of(pair: Pair) -> str:
    def end(e: End) -> list[Any]:
        told = [e.worker_id, e.incarnation, e.epoch, e.engine_url, e.cached_tokens]
        return [*told, e.bootstrap] if e.bootstrap else told

    return _encode(
        [
            pair.reservation_id,
            end(pair.prefill),
            end(pair.decode),
            pair.local,
            pair.predicted_ttft_s,
            pair.predicted_tpot_s,
            pair.waited_s,
            pair.ttl_s,
        ]
    ).decode()


def pair_from(payload: str) -> Pair:
    rid, p, d, local, ttft_s, tpot_s, waited_s, ttl_s = _decode(payload)
    return Pair(rid, End(*p), End(*d), local, ttft_s, tpot_s, waited_s, ttl_s)


def waiting_error(wait: Wait, why: str, desk: Desk) -> ReadyplaneError:
    if wait.regime == "empty":
        return NoPair(why, 5.0)
    return Overloaded(why, wait.again_in_s or desk.retry_after_s())


def model_signals(desk: Desk, now_s: float) -> ModelSignals:
    counters = desk.counters
    windows = {}
    for name, window in desk.windows.items():
        count, p50, p90, p99, mean = window.quantiles(now_s=now_s)
        windows[name] = LatencyWindow(window.window_s, count, p50, p90, p99, mean)
    held = desk.held.values()
    prefilling = [h for h in held if h.prefilling]
    decoding = [h for h in held if not h.prefilling]
    return ModelSignals(
        model=desk.model,
        arrivals_total=counters.arrivals,
        arrival_tokens_total=counters.arrival_tokens,
        arrival_uncached_tokens_total=counters.arrival_uncached_tokens,
        finished_total=counters.finished,
        finished_prompt_tokens_total=counters.finished_prompt_tokens,
        output_tokens_total=counters.output_tokens,
        refused_total=counters.refused,
        aborted_total=counters.aborted,
        attained_total=counters.attained,
        repaired_total=counters.repaired,
        handovers_total=counters.handovers,
        queued_requests=len(desk.queue),
        queued_tokens=desk.queued_tokens,
        prefilling_requests=len(prefilling),
        prefilling_tokens=sum([h.uncached_tokens for h in prefilling]),
        decoding_requests=len(decoding),
        decoding_remaining_tokens=desk.lengths.remaining_in_all(
            [(h.isl, h.emitted, h.max_tokens) for h in decoding]
        ),
        decoding_kv_tokens=sum([h.isl + h.emitted for h in decoding]),
        length_counts=desk.lengths.snapshot(),
        generations=desk.ends_by_generation(now_s=now_s),
        priorities=desk.rationing.snapshot(),
        ration=desk.rationing.order(now_s=now_s),
        clients=desk.clients.top(),
        **windows,
    )
