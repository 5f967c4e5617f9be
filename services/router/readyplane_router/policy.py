"""The router's policy: what is wanted, as one frozen value read from a document.

Owns defaults, the check of each field and the checks between fields; hands `PairPolicy` to the
pairing brain and the rest to the service. Every bound has its unit in its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from readyplane.core.errors import InvalidField, UnknownField
from readyplane.core.profile import LinkClass
from readyplane.core.work import Slo
from readyplane.core.worker import Lease
from readyplane_router.pair import PairPolicy
from readyplane_router.prefix import Limits

LEASE_MARGIN = 0.1
"""Share of a lease that is left when one renewal was lost and the next one arrives."""


@dataclass(frozen=True, slots=True)
class RouterPolicy:
    """Everything the router goes by; times in seconds.

    Attributes:
        pair: what the pairing brain goes by. prefix: bounds of the prefix index.
        lease_ttl_s: chosen here for every worker. tick_s: between two rounds of housekeeping.
        redis_absence_max_s: longest service without the store, then typed refusals.
        reservation_ttl_s: a reservation without an event for so long is given up.
        queue_tokens_max, queue_requests_max: bounds of a model's queue.
        look_past_max: how many waiting requests are looked at when those before them cannot go.
        output_quantile: quantile of the output whose KV is reserved at D.
        grow_tokens: KV reserved anew when an output outgrows its reservation.
        window_s, window_samples_max: of the latencies. lengths_half_life: finished requests after
            which a length has half its weight.
        stalled_after_s: running sequences and no iteration from one reading of the engine to another
            so much later means stalled. silent_after_s: its engine answers nothing at all for so
            long, idle or not: longer than its answers may take while it computes a long prompt.
        barrier_stall_s: a rank that its group waits for fails the generation when it tells neither a
            step nor progress for so long; more than the longest step that tells no progress.
        load_stale_s: an engine report older than this is not believed: `stale_sequences_max`.
        ramp_s, ramp_sequences: a new worker takes at most so many sequences in its first seconds.
        circuit_failures_max, circuit_window_s, circuit_open_s: see `circuit`.
        gone_kept_s: how long a worker that is gone stays visible.
        drain_deadline_s: when a drain names none.
        allow_attached: attached engines may join, with the checks nobody can make skipped.
        correct_prefill: apply the measured over predicted prefill time of each worker class.
        models_max: models of which requests are counted by name.
        kv_hold_s: how long the engines keep a prefilled prompt's KV for its decode end (vLLM's
            `kv_lease_duration`). kv_hold_margin_s: of it for hand-over and the first iteration.
    """

    pair: PairPolicy = field(default_factory=PairPolicy)
    prefix: Limits = field(default_factory=Limits)
    lease_ttl_s: float = 6.0
    tick_s: float = 1.0
    redis_absence_max_s: float = 60.0
    reservation_ttl_s: float = 60.0
    queue_tokens_max: int = 2_000_000
    queue_requests_max: int = 10_000
    look_past_max: int = 8
    output_quantile: float = 0.9
    grow_tokens: int = 256
    window_s: float = 20.0
    window_samples_max: int = 4_096
    lengths_half_life: int = 5_000
    stalled_after_s: float = 10.0
    silent_after_s: float = 20.0
    barrier_stall_s: float = 300.0
    load_stale_s: float = 30.0
    stale_sequences_max: int = 1
    ramp_s: float = 3.0
    ramp_sequences: int = 16
    circuit_failures_max: int = 5
    circuit_window_s: float = 30.0
    circuit_open_s: float = 5.0
    gone_kept_s: float = 10.0
    drain_deadline_s: float = 300.0
    allow_attached: bool = True
    correct_prefill: bool = True
    models_max: int = 64
    kv_hold_s: float = 30.0
    kv_hold_margin_s: float = 5.0

    def __post_init__(self) -> None:
        """Check what must hold between the fields."""
        _check(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> RouterPolicy:
        """A policy from a JSON object; what is not given keeps its default.

        `pair` and `prefix` are objects of their own; `pair.slo` is {ttft_s, tpot_s}, links are
        {name, bandwidth_bytes_per_s, setup_s}.

        Raises:
            UnknownField: a name that does not exist. InvalidField: a value that does not fit.
        """
        policy: RouterPolicy = _read(cls(), document, "router_policy")
        return policy


def _read(value: Any, document: Any, where: str) -> Any:
    if not isinstance(document, Mapping):
        raise InvalidField(where, document, "use an object")
    known = {f.name: getattr(value, f.name) for f in fields(value)}
    changes: dict[str, Any] = {}
    for name, given in document.items():
        path = f"{where}.{name}"
        if name not in known:
            raise UnknownField(path, given, f"use one of {', '.join(known)}")
        changes[name] = _field(known[name], given, path)
    return replace(value, **changes)


def _field(default: Any, given: Any, path: str) -> Any:
    if isinstance(default, PairPolicy | Limits | Slo | LinkClass):
        return _read(default, given, path)
    if isinstance(default, bool):
        if not isinstance(given, bool):
            raise InvalidField(path, given, "use true or false")
        return given
    if isinstance(default, str):
        if not isinstance(given, str) or not given:
            raise InvalidField(path, given, "use a non-empty text")
        return given
    number = not isinstance(given, bool) and isinstance(given, int | float)
    if not number or not math.isfinite(given) or given < 0:
        raise InvalidField(path, given, "use a finite number, 0 or more")
    if isinstance(default, int):
        if given != int(given):
            raise InvalidField(path, given, "use a whole number")
        return int(given)
    return float(given)


def _check(policy: RouterPolicy) -> None:
    pair = policy.pair
    for name in ("lease_ttl_s", "tick_s", "reservation_ttl_s", "window_s", "lengths_half_life"):
        if getattr(policy, name) <= 0:
            raise InvalidField(f"router_policy.{name}", getattr(policy, name), "use more than 0")
    _check_lease(policy)
    longest_s = policy.kv_hold_s - policy.kv_hold_margin_s
    if pair.wait_max_s > longest_s:
        raise InvalidField(
            "router_policy.pair.wait_max_s",
            pair.wait_max_s,
            f"wait for {longest_s:g} s at most, kv_hold_s ({policy.kv_hold_s:g}) less "
            f"kv_hold_margin_s ({policy.kv_hold_margin_s:g}): engines give KV up after its hold",
        )
    if pair.locality_patience_s > pair.wait_max_s:
        raise InvalidField(
            "router_policy.pair.locality_patience_s",
            pair.locality_patience_s,
            f"stay within wait_max_s ({pair.wait_max_s})",
        )
    if not 0 < policy.output_quantile < 1:
        raise InvalidField(
            "router_policy.output_quantile", policy.output_quantile, "use more than 0, less than 1"
        )
    if pair.slo.ttft_s <= 0 or pair.slo.tpot_s <= 0:
        raise InvalidField("router_policy.pair.slo", str(pair.slo), "use times above 0")
    near, far = pair.local_link, pair.network_link
    if near.bandwidth_bytes_per_s < far.bandwidth_bytes_per_s or near.setup_s > far.setup_s:
        raise InvalidField(
            "router_policy.pair.local_link", near.name, f"it may not be slower than {far.name}"
        )


def _check_lease(policy: RouterPolicy) -> None:
    """One lost renewal must not end a lease (field report B158)."""
    lease = Lease("", "", 0, policy.lease_ttl_s)
    late_s = lease.renewed_within_s + policy.tick_s
    if late_s > (1.0 - LEASE_MARGIN) * policy.lease_ttl_s:
        raise InvalidField(
            "router_policy.lease_ttl_s",
            policy.lease_ttl_s,
            f"renewal every {lease.renew_every_s:g} + answer {lease.answer_within_s:g} + retry "
            f"{lease.retry_within_s:g} + tick_s {policy.tick_s:g} = {late_s:g} s must leave "
            f"{LEASE_MARGIN:.0%} of it: use 6 x tick_s ({6 * policy.tick_s:g}) or more",
        )
