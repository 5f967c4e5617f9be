"""Workers, leases, start-up progress and load <-> worker.proto."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.identity import KvFormat
from readyplane.core.stage import CapacityStage, UpgradeState
from readyplane.core.startup import Segment, SegmentName, StartMode, WeightTier
from readyplane.core.worker import (
    CheckResult,
    Fleet,
    Holds,
    Lease,
    LoadReport,
    Role,
    Serving,
    StartProgress,
    Worker,
    WorkerOffer,
    WorkerState,
)
from readyplane.v1 import worker_pb2 as pb
from readyplane.wire.scalars import (
    age,
    duration,
    enum_of,
    json_of,
    object_of,
    seconds_of,
    since,
)

EVIDENCE_KEPT_MAX = 32_768
_ROLES = {
    Role.PREFILL: pb.ROLE_PREFILL,
    Role.DECODE: pb.ROLE_DECODE,
    Role.BOTH: pb.ROLE_BOTH,
}
_ROLES_BACK = {number: role for role, number in _ROLES.items()}
_STATES = {
    WorkerState.ORDERED: pb.STATE_ORDERED,
    WorkerState.PROVISIONED: pb.STATE_PROVISIONED,
    WorkerState.READY: pb.STATE_READY,
    WorkerState.DRAINING: pb.STATE_DRAINING,
    WorkerState.STALLED: pb.STATE_STALLED,
    WorkerState.GONE: pb.STATE_GONE,
    WorkerState.STANDBY: pb.STATE_STANDBY,
}
_STATES_BACK = {number: state for state, number in _STATES.items()}
_LOAD_COUNTS = (
    "running",
    "waiting",
    "waiting_prefill_tokens",
    "kv_used_blocks",
    "kv_total_blocks",
    "prefill_tokens_total",
    "decode_tokens_total",
    "cached_tokens_total",
    "preemptions_total",
    "iterations_total",
    "lateness_p99_s",
)


def role_to_proto(role: Role) -> pb.Role.ValueType:
    """Role as enum."""
    return _ROLES[role]


def role_from_proto(value: pb.Role.ValueType, field: str = "role") -> Role:
    """Enum as Role. Raises InvalidField for an unspecified or unknown one."""
    if value not in _ROLES_BACK:
        raise InvalidField(field, value, "use ROLE_PREFILL, ROLE_DECODE or ROLE_BOTH")
    return _ROLES_BACK[value]


def worker_state_to_proto(state: WorkerState) -> pb.State.ValueType:
    """State as enum."""
    return _STATES[state]


def worker_state_from_proto(value: pb.State.ValueType, field: str = "state") -> WorkerState:
    """Enum as WorkerState. Raises InvalidField for an unspecified or unknown one."""
    if value not in _STATES_BACK:
        raise InvalidField(field, value, "use a State other than STATE_UNSPECIFIED")
    return _STATES_BACK[value]


def worker_offer_to_proto(offer: WorkerOffer) -> pb.WorkerOffer:
    """Offer as message."""
    ago, left = offer.ordered_ago_s, offer.told_left_s
    return pb.WorkerOffer(
        worker_id=offer.worker_id,
        incarnation=offer.incarnation,
        role=_ROLES[offer.role],
        model=offer.model,
        worker_class=offer.worker_class,
        generation=offer.generation,
        manifest_digest=offer.manifest_digest,
        node=offer.node,
        scale_decision_id=offer.scale_decision_id,
        ranks=offer.ranks,
        agent_url=offer.agent_url,
        ordered_ago_duration=None if ago is None else duration(ago, "offer.ordered_ago_duration"),
        mode=offer.mode,
        attached=offer.attached,
        convertible=offer.convertible,
        standby=offer.standby,
        holds=offer.holds,
        told_left_duration=None if left is None else duration(left, "offer.told_left_duration"),
        told_reason=offer.told_reason,
    )


def worker_offer_from_proto(message: pb.WorkerOffer) -> WorkerOffer:
    """Message as offer. Raises InvalidField for an unknown role or mode."""
    known = message.HasField("ordered_ago_duration")
    told = message.HasField("told_left_duration")
    return WorkerOffer(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        role=role_from_proto(message.role, "offer.role"),
        model=message.model,
        worker_class=message.worker_class,
        generation=message.generation,
        manifest_digest=message.manifest_digest,
        node=message.node,
        scale_decision_id=message.scale_decision_id,
        ranks=message.ranks,
        agent_url=message.agent_url,
        ordered_ago_s=seconds_of(message.ordered_ago_duration) if known else None,
        mode=enum_of(StartMode, message.mode, "offer.mode", StartMode.JIT),
        attached=message.attached,
        convertible=message.convertible,
        standby=message.standby,
        holds=enum_of(Holds, message.holds, "offer.holds", Holds.WEIGHTS),
        told_left_s=seconds_of(message.told_left_duration) if told else None,
        told_reason=message.told_reason,
    )


def lease_to_proto(lease: Lease) -> pb.Lease:
    """Lease as message."""
    return pb.Lease(
        worker_id=lease.worker_id,
        incarnation=lease.incarnation,
        epoch=lease.epoch,
        ttl=duration(lease.ttl_s, "lease.ttl"),
    )


def lease_from_proto(message: pb.Lease) -> Lease:
    """Message as lease."""
    ttl_s = seconds_of(message.ttl)
    return Lease(message.worker_id, message.incarnation, message.epoch, ttl_s)


def segment_to_proto(segment: Segment) -> pb.Segment:
    """Segment as message; a running one has no end."""
    return pb.Segment(
        name=segment.name,
        start_s=segment.start_s,
        end_s=segment.end_s,
        modelled=segment.modelled,
        detail=segment.detail,
        saved_s=segment.saved_s,
    )


def segment_from_proto(message: pb.Segment) -> Segment:
    """Message as segment. Raises InvalidField for an unknown name."""
    return Segment(
        name=enum_of(SegmentName, message.name, "segment.name"),
        start_s=message.start_s,
        end_s=message.end_s if message.HasField("end_s") else None,
        modelled=message.modelled,
        detail=message.detail,
        saved_s=message.saved_s,
    )


def start_progress_to_proto(progress: StartProgress) -> pb.StartProgress:
    """Progress as message; its times stay on the agent's clock."""
    return pb.StartProgress(
        start_s=progress.start_s,
        now_s=progress.now_s,
        segments=[segment_to_proto(s) for s in progress.segments],
        log_tail=progress.log_tail,
        failure=progress.failure,
        dead_end=progress.dead_end,
    )


def start_progress_from_proto(message: pb.StartProgress) -> StartProgress:
    """Message as progress."""
    return StartProgress(
        start_s=message.start_s,
        now_s=message.now_s,
        segments=tuple(segment_from_proto(s) for s in message.segments),
        log_tail=message.log_tail,
        failure=message.failure,
        dead_end=message.dead_end,
    )


def load_report_to_proto(load: LoadReport) -> pb.LoadReport:
    """Load as message; what is not known stays absent."""
    known = {name: getattr(load, name) for name in _LOAD_COUNTS}
    return pb.LoadReport(**known, age_s=load.age_s)


def load_report_from_proto(message: pb.LoadReport) -> LoadReport:
    """Message as load; what is absent is None."""
    has = message.HasField  # field by field: it comes with every renewal
    return LoadReport(
        message.running if has("running") else None,
        message.waiting if has("waiting") else None,
        message.waiting_prefill_tokens if has("waiting_prefill_tokens") else None,
        message.kv_used_blocks if has("kv_used_blocks") else None,
        message.kv_total_blocks if has("kv_total_blocks") else None,
        message.prefill_tokens_total if has("prefill_tokens_total") else None,
        message.decode_tokens_total if has("decode_tokens_total") else None,
        message.cached_tokens_total if has("cached_tokens_total") else None,
        message.preemptions_total if has("preemptions_total") else None,
        message.iterations_total if has("iterations_total") else None,
        message.lateness_p99_s if has("lateness_p99_s") else None,
        message.age_s,
    )


def check_result_to_proto(check: CheckResult) -> pb.CheckResult:
    """Check as message. Raises InvalidField for evidence that JSON cannot hold."""
    return pb.CheckResult(
        name=check.name,
        passed=check.passed,
        evidence_json=json_of(check.evidence, f"checks.{check.name}.evidence"),
        reason=check.reason,
    )


def check_result_from_proto(message: pb.CheckResult) -> CheckResult:
    """Message as check."""
    evidence = _evidence(message.evidence_json, f"checks.{message.name}.evidence_json")
    return CheckResult(message.name, message.passed, dict(evidence), message.reason)


@functools.lru_cache(maxsize=EVIDENCE_KEPT_MAX)
def _evidence(text: str, field: str) -> Mapping[str, Any]:
    """Parsed once: the same evidence comes again with every snapshot of the fleet."""
    return object_of(text, field)


def kv_format_to_proto(kv: KvFormat) -> pb.KvFormat:
    """KV format as message."""
    return pb.KvFormat(
        model_digest=kv.model_digest,
        dtype=kv.dtype,
        block_size=kv.block_size,
        layout=kv.layout,
        tp=kv.tp,
        positions=kv.positions,
        connector=kv.connector,
        hash_scheme=kv.hash_scheme,
        engine_version=kv.engine_version,
    )


def kv_format_from_proto(message: pb.KvFormat) -> KvFormat:
    """Message as KV format."""
    return KvFormat(
        model_digest=message.model_digest,
        dtype=message.dtype,
        block_size=message.block_size,
        layout=message.layout,
        tp=message.tp,
        positions=message.positions,
        connector=message.connector,
        hash_scheme=message.hash_scheme,
        engine_version=message.engine_version,
    )


def stage_to_proto(stage: CapacityStage) -> pb.CapacityStage:
    """Stage as message."""
    return pb.CapacityStage(
        state=stage.state,
        profile=stage.profile,
        shapes=stage.shapes,
        kv_tokens=stage.kv_tokens,
        graph_bytes=stage.graph_bytes,
        failure=stage.failure,
        took_s=stage.took_s,
        digest=stage.digest,
    )


def stage_from_proto(message: pb.CapacityStage) -> CapacityStage:
    """Message as stage; its digest is worked out anew. Raises InvalidField for an unknown state."""
    has = message.HasField
    return CapacityStage(
        state=enum_of(UpgradeState, message.state, "stage.state"),
        profile=message.profile,
        shapes=tuple(message.shapes),
        kv_tokens=message.kv_tokens,
        graph_bytes=message.graph_bytes if has("graph_bytes") else None,
        failure=message.failure,
        took_s=message.took_s if has("took_s") else None,
    )


def serving_to_proto(serving: Serving) -> pb.Serving:
    """Serving as message."""
    return pb.Serving(
        engine_url=serving.engine_url,
        kv=kv_format_to_proto(serving.kv),
        kv_total_blocks=serving.kv_total_blocks,
        block_size=serving.block_size,
        max_model_len=serving.max_model_len,
        profile=serving.profile,
        max_num_seqs=serving.max_num_seqs,
        tokenizer_digest=serving.tokenizer_digest,
        kv_side_channel=serving.kv_side_channel,
        tier=serving.tier,
        mode=serving.mode,
        flips=serving.flips,
        moves=serving.moves,
        stage=None if serving.stage is None else stage_to_proto(serving.stage),
    )


def serving_from_proto(message: pb.Serving) -> Serving:
    """Message as serving. Raises InvalidField for an unknown tier or mode."""
    return Serving(
        engine_url=message.engine_url,
        kv=kv_format_from_proto(message.kv),
        kv_total_blocks=message.kv_total_blocks,
        block_size=message.block_size,
        max_model_len=message.max_model_len,
        profile=message.profile,
        max_num_seqs=message.max_num_seqs,
        tokenizer_digest=message.tokenizer_digest,
        kv_side_channel=message.kv_side_channel,
        tier=enum_of(WeightTier, message.tier, "serving.tier", WeightTier.UNKNOWN),
        mode=enum_of(StartMode, message.mode, "serving.mode", StartMode.JIT),
        flips=message.flips,
        moves=message.moves,
        stage=stage_from_proto(message.stage) if message.HasField("stage") else None,
    )


def worker_to_proto(worker: Worker, *, now_s: float) -> pb.Worker:
    """Worker as message; clock readings become ages at `now_s` of the router's clock."""

    def ago(then_s: float | None) -> object:
        return None if then_s is None else age(then_s, now_s)

    return pb.Worker(
        offer=worker_offer_to_proto(worker.offer),
        epoch=worker.epoch,
        state=_STATES[worker.state],
        serving=None if worker.serving is None else serving_to_proto(worker.serving),
        progress=None if worker.progress is None else start_progress_to_proto(worker.progress),
        load=load_report_to_proto(worker.load),
        checks=[check_result_to_proto(c) for c in worker.checks],
        drain_reason=worker.drain_reason,
        provisioned_ago_duration=ago(worker.provisioned_s),  # type: ignore[arg-type]
        ready_ago_duration=ago(worker.ready_s),  # type: ignore[arg-type]
        draining_ago_duration=ago(worker.draining_s),  # type: ignore[arg-type]
        renewed_ago_duration=age(worker.renewed_s, now_s),
        active=worker.active,
        promised_prefill_tokens=worker.promised_prefill_tokens,
        promised_kv_blocks=worker.promised_kv_blocks,
        told=worker.told,
        rank_steps=worker.rank_steps,
        holds="" if worker.holds is None else worker.holds,
    )


def worker_from_proto(message: pb.Worker, *, now_s: float) -> Worker:
    """Message as worker; ages become readings of the reader's clock, which says `now_s`."""

    def then(name: str) -> float | None:
        known = message.HasField(name)  # type: ignore[arg-type]
        return since(getattr(message, name), now_s) if known else None

    has = message.HasField
    return Worker(
        offer=worker_offer_from_proto(message.offer),
        epoch=message.epoch,
        state=worker_state_from_proto(message.state),
        serving=serving_from_proto(message.serving) if has("serving") else None,
        progress=start_progress_from_proto(message.progress) if has("progress") else None,
        load=load_report_from_proto(message.load),
        checks=tuple(check_result_from_proto(c) for c in message.checks),
        drain_reason=message.drain_reason,
        provisioned_s=then("provisioned_ago_duration"),
        ready_s=then("ready_ago_duration"),
        draining_s=then("draining_ago_duration"),
        renewed_s=since(message.renewed_ago_duration, now_s),
        active=message.active,
        promised_prefill_tokens=message.promised_prefill_tokens,
        promised_kv_blocks=message.promised_kv_blocks,
        told=message.told,
        rank_steps=tuple(message.rank_steps),
        holds=enum_of(Holds, message.holds, "worker.holds") if message.holds else None,
    )


def fleet_to_proto(fleet: Fleet, *, now_s: float) -> pb.Fleet:
    """Fleet as message, workers by id."""
    workers = [worker_to_proto(fleet.workers[key], now_s=now_s) for key in sorted(fleet.workers)]
    return pb.Fleet(version=fleet.version, workers=workers, degraded=fleet.degraded)


def fleet_from_proto(message: pb.Fleet, *, now_s: float) -> Fleet:
    """Message as fleet."""
    workers = [worker_from_proto(w, now_s=now_s) for w in message.workers]
    return Fleet(message.version, {w.worker_id: w for w in workers}, message.degraded)
