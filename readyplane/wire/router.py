"""Sessions, groups, the gate, pairs, events and signals <-> router.proto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from readyplane.core.breakdown import ClientSignals, GenerationSignals
from readyplane.core.errors import InvalidField, ReadyplaneError
from readyplane.core.kv import GPU, KvEvent, KvEventBatch
from readyplane.core.ration import PrioritySignals, Ration
from readyplane.core.work import (
    ISL_EDGES,
    OSL_EDGES,
    EventKind,
    RequestEvent,
    RequestShape,
    Slo,
    pack_hashes,
    unpack_hashes,
)
from readyplane.core.worker import Holds
from readyplane.ports import (
    Directive,
    End,
    GateVerdict,
    GroupStatus,
    LatencyWindow,
    ModelSignals,
    Pair,
    RankReport,
    Renewal,
    RenewalAnswer,
    RouterSignals,
)
from readyplane.v1 import router_pb2 as pb
from readyplane.v1 import worker_pb2 as pb_worker
from readyplane.wire.errors import error_from_status, error_to_status
from readyplane.wire.scalars import duration, enum_of, json_of, object_of, seconds_of
from readyplane.wire.worker import (
    check_result_from_proto,
    check_result_to_proto,
    fleet_from_proto,
    fleet_to_proto,
    lease_from_proto,
    lease_to_proto,
    load_report_from_proto,
    load_report_to_proto,
    role_from_proto,
    role_to_proto,
    start_progress_from_proto,
    start_progress_to_proto,
)

# --------------------------------------------------------------------------- session


def kv_event_to_proto(event: KvEvent) -> pb.KvEvent:
    """KV event as message."""
    return pb.KvEvent(
        kind=event.kind,
        block_hashes=pack_hashes(event.block_hashes),
        parent_hash=event.parent_hash,
        tier="" if event.tier == GPU else event.tier,
    )


def kv_event_from_proto(message: pb.KvEvent) -> KvEvent:
    """Message as KV event; one of no known kind when its hashes are cut off."""
    parent = message.parent_hash if message.HasField("parent_hash") else None
    try:
        hashes = unpack_hashes(message.block_hashes)
    except ValueError:
        return KvEvent("garbled")
    return KvEvent(message.kind, hashes, parent, message.tier or GPU)


def kv_event_batch_to_proto(batch: KvEventBatch) -> pb.KvEventBatch:
    """Batch as message."""
    events = [kv_event_to_proto(e) for e in batch.events]
    return pb.KvEventBatch(sequence=batch.sequence, events=events)


def kv_event_batch_from_proto(message: pb.KvEventBatch) -> KvEventBatch:
    """Message as batch."""
    return KvEventBatch(message.sequence, tuple(kv_event_from_proto(e) for e in message.events))


def renewal_to_proto(renewal: Renewal, *, number: int = 0) -> pb.SessionRequest:
    """Renewal as one message up the session; `number` comes back with its answer."""
    progress, load = renewal.progress, renewal.load
    return pb.SessionRequest(
        worker_id=renewal.worker_id,
        incarnation=renewal.incarnation,
        epoch=renewal.epoch,
        progress=None if progress is None else start_progress_to_proto(progress),
        load=None if load is None else load_report_to_proto(load),
        kv_events=[kv_event_batch_to_proto(b) for b in renewal.kv_events],
        drained=renewal.drained,
        number=number,
        quiet=renewal.quiet,
        stands_by="" if renewal.stands_by is None else renewal.stands_by,
    )


def renewal_from_proto(message: pb.SessionRequest) -> Renewal:
    """Message as renewal; absent progress or load means no news."""
    has = message.HasField
    return Renewal(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        epoch=message.epoch,
        progress=start_progress_from_proto(message.progress) if has("progress") else None,
        load=load_report_from_proto(message.load) if has("load") else None,
        kv_events=tuple(kv_event_batch_from_proto(b) for b in message.kv_events),
        drained=message.drained,
        quiet=message.quiet,
        stands_by=enum_of(Holds, message.stands_by, "stands_by") if message.stands_by else None,
    )


def directive_to_proto(directive: Directive) -> pb.Directive:
    """Directive as message."""
    left = directive.deadline_s
    role = pb_worker.ROLE_UNSPECIFIED if directive.role is None else role_to_proto(directive.role)
    return pb.Directive(
        kind=directive.kind,
        deadline_duration=None if left is None else duration(left, "directive.deadline_duration"),
        reason=directive.reason,
        role=role,
    )


def directive_from_proto(message: pb.Directive) -> Directive:
    """Message as directive; `deadline_s` is seconds from now, None without a deadline."""
    known = message.HasField("deadline_duration")
    left = seconds_of(message.deadline_duration) if known else None
    role = role_from_proto(message.role, "directive.role") if message.role else None
    return Directive(message.kind, left, message.reason, role)


def renewal_answer_to_proto(
    answer: RenewalAnswer, *, number: int = 0, unasked: bool = False
) -> pb.SessionResponse:
    """Answer as one message down the session, to the request of that number or to none."""
    return pb.SessionResponse(
        lease=lease_to_proto(answer.lease),
        directives=[directive_to_proto(d) for d in answer.directives],
        number=number,
        unasked=unasked,
    )


def renewal_answer_from_proto(message: pb.SessionResponse) -> RenewalAnswer:
    """Message as answer."""
    directives = tuple(directive_from_proto(d) for d in message.directives)
    return RenewalAnswer(lease_from_proto(message.lease), directives)


# --------------------------------------------------------------------------- group and gate


def rank_report_to_proto(report: RankReport, *, request_id: str = "") -> pb.ReportRankRequest:
    """Report as request."""
    return pb.ReportRankRequest(
        request_id=request_id,
        worker_id=report.worker_id,
        incarnation=report.incarnation,
        epoch=report.epoch,
        rank=report.rank,
        step=report.step,
        manifest_digest=report.manifest_digest,
        detail=report.detail,
        life=report.life,
        communicator=report.communicator,
        progress=report.progress,
    )


def rank_report_from_proto(message: pb.ReportRankRequest) -> RankReport:
    """Request as report."""
    return RankReport(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        epoch=message.epoch,
        rank=message.rank,
        step=message.step,
        manifest_digest=message.manifest_digest,
        detail=message.detail,
        life=message.life,
        communicator=message.communicator,
        progress=message.progress,
    )


def group_status_to_proto(status: GroupStatus) -> pb.ReportRankResponse:
    """Status as response."""
    return pb.ReportRankResponse(
        group_state=status.state, group_epoch=status.group_epoch, waiting_for=status.waiting_for
    )


def group_status_from_proto(message: pb.ReportRankResponse) -> GroupStatus:
    """Response as status."""
    return GroupStatus(message.group_state, message.group_epoch, tuple(message.waiting_for))


def gate_verdict_to_proto(verdict: GateVerdict) -> pb.AdmitResponse:
    """Verdict as response."""
    return pb.AdmitResponse(
        admitted=verdict.admitted,
        reasons=verdict.reasons,
        checks=[check_result_to_proto(c) for c in verdict.checks],
        standby=verdict.standby,
    )


def gate_verdict_from_proto(message: pb.AdmitResponse) -> GateVerdict:
    """Response as verdict."""
    checks = tuple(check_result_from_proto(c) for c in message.checks)
    return GateVerdict(message.admitted, tuple(message.reasons), checks, message.standby)


# --------------------------------------------------------------------------- pairing


def request_shape_to_proto(
    shape: RequestShape,
    *,
    replaces: str = "",
    avoid: Sequence[str] = (),
    explain: bool = False,
    dry_run: bool = False,
) -> pb.RouteRequest:
    """Shape and options as one route request."""
    return pb.RouteRequest(
        request_id=shape.request_id,
        model=shape.model,
        token_ids=shape.token_ids,
        block_hashes=shape.block_hashes,
        isl=shape.isl,
        max_tokens=shape.max_tokens,
        priority=shape.priority,
        tenant=shape.tenant,
        slo_ttft_s=None if shape.slo is None else shape.slo.ttft_s,
        slo_tpot_s=None if shape.slo is None else shape.slo.tpot_s,
        lora=shape.lora,
        cache_salt=shape.cache_salt,
        replaces_reservation_id=replaces,
        avoid_worker_ids=avoid,
        explain=explain,
        dry_run=dry_run,
    )


def request_shape_from_proto(message: pb.RouteRequest) -> RequestShape:
    """The shape in a route request; its options are read off the message.

    Raises:
        InvalidField: half a token at the end, or one SLO target without the other.
    """
    if len(message.token_ids) % 4:
        given = f"{len(message.token_ids)} bytes"
        raise InvalidField("token_ids", given, "pack each token as 4 bytes, little-endian")
    has_ttft, has_tpot = message.HasField("slo_ttft_s"), message.HasField("slo_tpot_s")
    if has_ttft != has_tpot:
        missing = "slo_tpot_s" if has_ttft else "slo_ttft_s"
        raise InvalidField(missing, None, "give both slo_ttft_s and slo_tpot_s, or neither")
    return RequestShape(
        request_id=message.request_id,
        model=message.model,
        isl=message.isl,
        token_ids=message.token_ids,
        block_hashes=tuple(message.block_hashes),
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        priority=message.priority,
        tenant=message.tenant,
        slo=Slo(message.slo_ttft_s, message.slo_tpot_s) if has_ttft else None,
        lora=message.lora,
        cache_salt=message.cache_salt,
    )


def end_to_proto(end: End) -> pb.End:
    """End as message."""
    return pb.End(
        worker_id=end.worker_id,
        incarnation=end.incarnation,
        epoch=end.epoch,
        engine_url=end.engine_url,
        cached_tokens=end.cached_tokens,
        bootstrap=end.bootstrap,
    )


def end_from_proto(message: pb.End) -> End:
    """Message as end."""
    return End(
        message.worker_id,
        message.incarnation,
        message.epoch,
        message.engine_url,
        message.cached_tokens,
        message.bootstrap,
    )


def pair_to_proto(pair: Pair) -> pb.RouteResponse:
    """Pair as response."""
    return pb.RouteResponse(
        reservation_id=pair.reservation_id,
        prefill=end_to_proto(pair.prefill),
        decode=end_to_proto(pair.decode),
        local=pair.local,
        predicted_ttft_s=pair.predicted_ttft_s,
        predicted_tpot_s=pair.predicted_tpot_s,
        waited_s=pair.waited_s,
        ttl=duration(pair.ttl_s, "ttl"),
        explanation_json=json_of(pair.explanation),
        bootstrap_room=pair.bootstrap_room,
    )


def pair_from_proto(message: pb.RouteResponse) -> Pair:
    """Response as pair."""
    text = message.explanation_json
    return Pair(
        reservation_id=message.reservation_id,
        prefill=end_from_proto(message.prefill),
        decode=end_from_proto(message.decode),
        local=message.local,
        predicted_ttft_s=message.predicted_ttft_s,
        predicted_tpot_s=message.predicted_tpot_s,
        waited_s=message.waited_s,
        ttl_s=seconds_of(message.ttl),
        explanation=object_of(text, "explanation_json") if text else None,
    )


def route_result_to_proto(found: Pair | ReadyplaneError, *, request_id: str = "") -> pb.RouteResult:
    """What became of one request of a batch."""
    if isinstance(found, ReadyplaneError):
        status = error_to_status(found).SerializeToString()
        return pb.RouteResult(request_id=request_id, error_status=status)
    return pb.RouteResult(request_id=request_id, pair=pair_to_proto(found))


def route_result_from_proto(message: pb.RouteResult) -> Pair | ReadyplaneError:
    """One result of a batch: its pair, or the error that a route of its own would have raised."""
    if not message.error_status:
        return pair_from_proto(message.pair)
    return error_from_status(message.error_status)


def request_event_to_proto(event: RequestEvent) -> pb.RequestEvent:
    """Event as message."""
    return pb.RequestEvent(
        reservation_id=event.reservation_id,
        kind=event.kind,
        ttft_s=event.ttft_s,
        tpot_s=event.tpot_s,
        output_tokens=event.output_tokens,
        cached_tokens=event.cached_tokens,
        failed_worker_id=event.failed_worker_id,
        attained=event.attained,
        detail=event.detail,
    )


def request_event_from_proto(message: pb.RequestEvent) -> RequestEvent:
    """Message as event. Raises InvalidField for an unknown kind."""
    has = message.HasField
    return RequestEvent(
        reservation_id=message.reservation_id,
        kind=enum_of(EventKind, message.kind, "events.kind"),
        ttft_s=message.ttft_s if has("ttft_s") else None,
        tpot_s=message.tpot_s if has("tpot_s") else None,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens if has("cached_tokens") else None,
        failed_worker_id=message.failed_worker_id,
        attained=message.attained if has("attained") else None,
        detail=message.detail,
    )


# --------------------------------------------------------------------------- admission


def ration_to_proto(order: Ration) -> pb.RationOrder:
    """Order of admission as message. Raises InvalidField for a time that is not finite."""
    return pb.RationOrder(
        priority=order.priority,
        admit_share=order.admit_share,
        ttl=duration(order.ttl_s, "ttl_s"),
        reason=order.reason,
        scale_decision_id=order.scale_decision_id,
        retry_after_duration=duration(order.retry_after_s, "retry_after_s"),
    )


def ration_from_proto(message: pb.RationOrder) -> Ration:
    """Message as order of admission."""
    return Ration(
        priority=message.priority,
        admit_share=message.admit_share,
        ttl_s=seconds_of(message.ttl),
        reason=message.reason,
        scale_decision_id=message.scale_decision_id,
        retry_after_s=seconds_of(message.retry_after_duration),
    )


# --------------------------------------------------------------------------- signals

_COUNTS = (
    "arrivals_total",
    "arrival_tokens_total",
    "arrival_uncached_tokens_total",
    "finished_total",
    "finished_prompt_tokens_total",
    "output_tokens_total",
    "refused_total",
    "aborted_total",
    "attained_total",
    "repaired_total",
    "handovers_total",
    "queued_requests",
    "queued_tokens",
    "prefilling_requests",
    "prefilling_tokens",
    "decoding_requests",
    "decoding_remaining_tokens",
    "decoding_kv_tokens",
)
_WINDOWS = ("ttft_actual", "ttft_predicted", "tpot_actual", "tpot_predicted")


def latency_window_to_proto(window: LatencyWindow) -> pb.LatencyWindow:
    """Window as message."""
    return pb.LatencyWindow(
        window_s=window.window_s,
        count=window.count,
        p50_s=window.p50_s,
        p90_s=window.p90_s,
        p99_s=window.p99_s,
        mean_s=window.mean_s,
    )


def latency_window_from_proto(message: pb.LatencyWindow) -> LatencyWindow:
    """Message as window."""
    return LatencyWindow(
        window_s=message.window_s,
        count=message.count,
        p50_s=message.p50_s,
        p90_s=message.p90_s,
        p99_s=message.p99_s,
        mean_s=message.mean_s,
    )


def model_signals_to_proto(signals: ModelSignals) -> pb.ModelSignals:
    """Signals of one model as message; the length table is laid out row by row."""
    counts: dict[str, Any] = {name: getattr(signals, name) for name in _COUNTS}
    windows: dict[str, Any] = {
        name: latency_window_to_proto(getattr(signals, name)) for name in _WINDOWS
    }
    lengths = [value for row in signals.length_counts for value in row]
    return pb.ModelSignals(
        model=signals.model,
        **counts,
        **windows,
        length_counts=lengths,
        generations=[
            pb.GenerationSignals(
                manifest_digest=g.manifest_digest,
                finished_total=g.finished_total,
                attained_total=g.attained_total,
                failed_total=g.failed_total,
                late_requests=g.late_requests,
            )
            for g in signals.generations
        ],
        priorities=[
            pb.PrioritySignals(
                priority=p.priority,
                arrivals_total=p.arrivals_total,
                arrival_uncached_tokens_total=p.arrival_uncached_tokens_total,
                rationed_total=p.rationed_total,
            )
            for p in signals.priorities
        ],
        ration=None if signals.ration is None else ration_to_proto(signals.ration),
        clients=[
            pb.ClientSignals(
                client=c.client,
                life=c.life,
                arrivals_total=c.arrivals_total,
                arrival_uncached_tokens_total=c.arrival_uncached_tokens_total,
            )
            for c in signals.clients
        ],
    )


def model_signals_from_proto(message: pb.ModelSignals) -> ModelSignals:
    """Message as signals of one model.

    Raises:
        InvalidField: a length table that does not have the edges of `readyplane.core.work`.
    """
    flat, width = tuple(message.length_counts), len(OSL_EDGES)
    if flat and len(flat) != width * len(ISL_EDGES):
        wanted = f"send {len(ISL_EDGES)} x {width} counts, or none"
        raise InvalidField("length_counts", len(flat), wanted)
    counts: dict[str, Any] = {name: getattr(message, name) for name in _COUNTS}
    windows: dict[str, Any] = {
        name: latency_window_from_proto(getattr(message, name)) for name in _WINDOWS
    }
    rows = tuple(flat[i : i + width] for i in range(0, len(flat), width))
    generations = tuple(
        GenerationSignals(
            g.manifest_digest,
            g.finished_total,
            g.attained_total,
            g.failed_total,
            g.late_requests,
        )
        for g in message.generations
    )
    priorities = tuple(
        PrioritySignals(
            p.priority, p.arrivals_total, p.arrival_uncached_tokens_total, p.rationed_total
        )
        for p in message.priorities
    )
    return ModelSignals(
        model=message.model,
        **counts,
        **windows,
        length_counts=rows,
        generations=generations,
        priorities=priorities,
        ration=ration_from_proto(message.ration) if message.HasField("ration") else None,
        clients=tuple(
            ClientSignals(c.client, c.life, c.arrivals_total, c.arrival_uncached_tokens_total)
            for c in message.clients
        ),
    )


def router_signals_to_proto(signals: RouterSignals, *, now_s: float) -> pb.GetSignalsResponse:
    """Signals as response; clock readings of the fleet become ages at `now_s`."""
    return pb.GetSignalsResponse(
        incarnation=signals.incarnation,
        uptime_s=signals.uptime_s,
        models=[model_signals_to_proto(signals.models[name]) for name in sorted(signals.models)],
        fleet=fleet_to_proto(signals.fleet, now_s=now_s),
        routers_missing=signals.routers_missing,
    )


def router_signals_from_proto(message: pb.GetSignalsResponse, *, now_s: float) -> RouterSignals:
    """Response as signals; ages become readings of the reader's clock, which says `now_s`."""
    return RouterSignals(
        incarnation=message.incarnation,
        uptime_s=message.uptime_s,
        models={m.model: model_signals_from_proto(m) for m in message.models},
        fleet=fleet_from_proto(message.fleet, now_s=now_s),
        routers_missing=message.routers_missing,
    )
