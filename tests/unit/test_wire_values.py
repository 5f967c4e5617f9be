"""Every value survives the wire: `x_from_proto(x_to_proto(v)) == v`, absent apart from zero."""

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane import ports, wire
from readyplane.core import breakdown, kv, ration, trust, work, worker
from readyplane.core.chunks import union
from readyplane.core.errors import InvalidField
from readyplane.core.identity import KvFormat
from readyplane.core.startup import Segment, SegmentName, StartMode, WeightTier
from readyplane.v1 import actuator_pb2, registry_pb2, router_pb2, worker_pb2

# NFC, because evidence and explanations travel in canonical form.
texts = st.sampled_from(["", "w-1", "h200", "é", 'a b\n"c"', "sha256:" + "0" * 64, "漢字"])
small = st.integers(-(2**31), 2**31 - 1)
whole = st.integers(-(2**63), 2**63 - 1)
hashes = st.lists(st.integers(0, 2**64 - 1), max_size=4).map(tuple)
numbers = st.floats(allow_nan=False)
# Seconds that nanoseconds hold exactly, and so do floats.
seconds = st.integers(-(2**40), 2**40).map(lambda n: n / 512)
walls = st.integers(0, 2**41).map(lambda n: n / 512)
NOW_S = 1_000_000.5


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def many(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(values, max_size=3).map(tuple)


json_leaf = st.none() | st.booleans() | whole | numbers.filter(lambda x: abs(x) < 1e300) | texts
json_objects = st.dictionaries(texts, json_leaf | st.lists(json_leaf, max_size=2), max_size=3)

offers = st.builds(
    worker.WorkerOffer,
    worker_id=texts, incarnation=texts, role=st.sampled_from(worker.Role), model=texts,
    worker_class=texts, generation=whole, manifest_digest=texts, node=texts,
    scale_decision_id=texts, ranks=small, agent_url=texts, ordered_ago_s=maybe(seconds),
    mode=st.sampled_from(StartMode), attached=st.booleans(), convertible=st.booleans(),
    standby=st.booleans(), told_left_s=maybe(seconds), told_reason=texts,
)  # fmt: skip
leases = st.builds(worker.Lease, texts, texts, whole, seconds)
segments = st.builds(
    Segment, st.sampled_from(SegmentName), numbers, maybe(numbers), st.booleans(), texts
)
progress = st.builds(worker.StartProgress, numbers, numbers, many(segments), texts, texts, texts)
loads = st.builds(
    worker.LoadReport,
    **{
        f.name: maybe(numbers if f.name == "lateness_p99_s" else whole)
        for f in fields(worker.LoadReport)
        if f.name != "age_s"
    },
    age_s=numbers,
)
checks = st.builds(worker.CheckResult, texts, st.booleans(), json_objects, texts)
formats = st.builds(
    KvFormat,
    **{f.name: small if f.name in {"block_size", "tp"} else texts for f in fields(KvFormat)},
)
servings = st.builds(
    worker.Serving,
    engine_url=texts, kv=formats, kv_total_blocks=whole, block_size=small, max_model_len=whole,
    profile=texts, max_num_seqs=small, tokenizer_digest=texts, kv_side_channel=texts,
    tier=st.sampled_from(WeightTier), mode=st.sampled_from(StartMode), flips=st.booleans(),
)  # fmt: skip
workers = st.builds(
    worker.Worker,
    offer=offers, epoch=whole, state=st.sampled_from(worker.WorkerState),
    serving=maybe(servings), progress=maybe(progress), load=loads, checks=many(checks),
    drain_reason=texts, provisioned_s=maybe(seconds), ready_s=maybe(seconds),
    draining_s=maybe(seconds), renewed_s=seconds, active=whole,
    promised_prefill_tokens=whole, promised_kv_blocks=whole, told=texts,
)  # fmt: skip
fleets = st.builds(
    worker.Fleet,
    version=whole,
    workers=st.lists(workers, max_size=2).map(lambda ws: {w.worker_id: w for w in ws}),
    degraded=texts,
)
parents = st.none() | st.integers(0, 2**64 - 1)
kv_events = st.builds(
    kv.KvEvent, texts, hashes, parents, st.sampled_from([kv.GPU, kv.CPU, kv.DISK])
)
batches = st.builds(kv.KvEventBatch, whole, many(kv_events))
renewals = st.builds(
    ports.Renewal, texts, texts, whole, maybe(progress), maybe(loads), many(batches), st.booleans()
)
directives = st.builds(
    ports.Directive, texts, maybe(seconds), texts, maybe(st.sampled_from(worker.Role))
)
ends = st.builds(ports.End, texts, texts, whole, texts, whole, texts)
windows = st.builds(ports.LatencyWindow, numbers, whole, numbers, numbers, numbers, numbers)
row = st.lists(numbers, min_size=len(work.OSL_EDGES), max_size=len(work.OSL_EDGES)).map(tuple)
tables = st.just(()) | row.map(lambda r: (r,) * len(work.ISL_EDGES))
rations = st.builds(ration.Ration, small, numbers, seconds, texts, texts, seconds)
signals = st.builds(
    ports.ModelSignals,
    model=texts,
    **{
        f.name: numbers if f.name == "decoding_remaining_tokens" else whole
        for f in fields(ports.ModelSignals)
        if f.name.endswith(("_total", "_requests", "_tokens"))
    },
    ttft_actual=windows, ttft_predicted=windows, tpot_actual=windows, tpot_predicted=windows,
    length_counts=tables,
    generations=many(st.builds(breakdown.GenerationSignals, texts, whole, whole, whole, whole)),
    clients=many(st.builds(breakdown.ClientSignals, texts, whole, whole, whole)),
    priorities=many(st.builds(ration.PrioritySignals, small, whole, whole, whole)),
    ration=maybe(rations),
)  # fmt: skip
chunks = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 9)), max_size=3).map(
    lambda found: union((begin, begin + count) for begin, count in found)
)
sources = st.builds(
    ports.Source, texts, texts, st.sampled_from(WeightTier), texts, texts, texts, texts, numbers,
    small, small, st.booleans(), chunks, texts, maybe(numbers), st.booleans(), texts,
)  # fmt: skip
ranked = st.builds(ports.RankedSource, sources, seconds, texts, chunks, maybe(seconds))
start_nodes = st.builds(
    ports.StartNode, texts, texts, seconds, maybe(seconds), numbers, st.integers(1, 99)
)
choices = st.builds(
    ports.StartChoice, texts, sources, seconds, seconds, seconds, seconds, texts
)  # fmt: skip
orders = st.builds(
    ports.Order, texts, st.sampled_from(worker.Role), texts, texts, texts, whole,
    st.sampled_from(StartMode), texts, many(texts),
)  # fmt: skip

CASES: dict[str, st.SearchStrategy[Any]] = {
    "role": st.sampled_from(worker.Role),
    "worker_state": st.sampled_from(worker.WorkerState),
    "worker_offer": offers,
    "lease": leases,
    "segment": segments,
    "start_progress": progress,
    "load_report": loads,
    "check_result": checks,
    "kv_format": formats,
    "serving": servings,
    "worker": workers,
    "fleet": fleets,
    "kv_event": kv_events,
    "kv_event_batch": batches,
    "renewal": renewals,
    "directive": directives,
    "renewal_answer": st.builds(ports.RenewalAnswer, leases, many(directives)),
    "rank_report": st.builds(
        ports.RankReport, texts, texts, whole, small, texts, texts, texts
    ),
    "group_status": st.builds(ports.GroupStatus, texts, whole, many(texts)),
    "gate_verdict": st.builds(
        ports.GateVerdict, st.booleans(), many(texts), many(checks), st.booleans()
    ),
    "ration": rations,
    "request_shape": st.builds(
        work.RequestShape, request_id=texts, model=texts, isl=whole,
        token_ids=st.binary(max_size=4).map(lambda b: b * 4), block_hashes=hashes,
        max_tokens=maybe(whole), priority=small, tenant=texts,
        slo=maybe(st.builds(work.Slo, numbers, numbers)), lora=texts, cache_salt=texts,
    ),
    "end": ends,
    "pair": st.builds(
        ports.Pair, texts, ends, ends, st.booleans(), numbers, numbers, numbers, seconds,
        maybe(json_objects),
    ),
    "route_result": st.builds(
        ports.Pair, texts, ends, ends, st.booleans(), numbers, numbers, numbers, seconds,
        maybe(json_objects),
    ),
    "request_event": st.builds(
        work.RequestEvent, texts, st.sampled_from(work.EventKind), maybe(numbers), maybe(numbers),
        whole, maybe(whole), texts, maybe(st.booleans()), texts,
    ),
    "latency_window": windows,
    "model_signals": signals,
    "router_signals": st.builds(
        ports.RouterSignals, texts, numbers,
        st.lists(signals, max_size=2).map(lambda ms: {m.model: m for m in ms}), fleets, small,
    ),
    "manifest_summary": st.builds(
        ports.ManifestSummary, texts, texts, texts, whole, small, small, walls, many(texts)
    ),
    "tag": st.builds(ports.Tag, texts, texts, whole, walls),
    "trail": st.builds(
        trust.Trail,
        many(st.builds(trust.Signature, texts, st.binary(max_size=4), texts, walls)),
        many(
            st.builds(trust.ManifestEvent, texts, st.dictionaries(texts, texts, max_size=2), walls)
        ),
    ),
    "source": sources,
    "ranked_source": ranked,
    "fetch_plan": st.builds(ports.FetchPlan, many(ranked), many(texts), maybe(seconds)),
    "transfer": st.builds(ports.Transfer, texts, seconds, texts, texts, numbers, small),
    "start_node": start_nodes,
    "start_choice": choices,
    "start_placement": st.builds(
        ports.StartPlacement, many(choices), many(choices), many(texts)
    ),
    "order": orders,
    "instance": st.builds(
        ports.Instance, orders, texts, texts, texts, whole, numbers, maybe(numbers),
        maybe(numbers), maybe(small), texts, texts,
    ),
}  # fmt: skip


def there_and_back(name: str, value: Any) -> Any:
    out: Callable[..., Any] = getattr(wire, f"{name}_to_proto")
    back: Callable[..., Any] = getattr(wire, f"{name}_from_proto")
    clock = {"now_s": NOW_S} if "now_s" in inspect.signature(out).parameters else {}
    message = out(value, **clock)
    if isinstance(message, Message):  # through bytes, as on the wire
        message = type(message).FromString(message.SerializeToString())
    return back(message, **clock)


def test_every_message_has_a_case() -> None:
    pairs = {n.removesuffix("_to_proto") for n in wire.__all__ if n.endswith("_to_proto")}
    back = {n.removesuffix("_from_proto") for n in wire.__all__ if n.endswith("_from_proto")}
    assert pairs == back == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_there_and_back(name: str) -> None:
    @settings(max_examples=40)
    @given(CASES[name])
    def check(value: Any) -> None:
        found = there_and_back(name, value)
        assert found == value
        assert type(found) is type(value)

    check()


def test_the_strategies_reach_every_field() -> None:
    """A field that a mapping forgets would come back as its default; these values have none."""
    default = worker.LoadReport()
    values: list[Any] = [*range(1, 11), 0.5, 2.0]
    full = worker.LoadReport(*values)
    assert there_and_back("load_report", full) == full != default
    zero = worker.LoadReport(**{f.name: 0 for f in fields(worker.LoadReport)})
    assert there_and_back("load_report", zero) == zero != default
    assert there_and_back("load_report", default) == default


def test_ages_follow_the_readers_clock() -> None:
    offer = worker.WorkerOffer("w", "i", worker.Role.DECODE, "m", "c")
    sent = worker.Worker(offer, 1, worker.WorkerState.READY, ready_s=90.0, renewed_s=99.5)
    message = wire.worker_to_proto(sent, now_s=100.0)
    read = wire.worker_from_proto(message, now_s=5.0)
    assert (read.ready_s, read.renewed_s, read.provisioned_s) == (-5.0, 4.5, None)
    assert replace(read, ready_s=90.0, renewed_s=99.5) == sent


@pytest.mark.parametrize(
    "value",
    [0.0, 1e-9, 0.1, 1.1, 2.5, 1 / 3, 86_400.123456789, -0.25, -1.75, 1e9 + 0.1, 0.9999999999],
)
def test_seconds_keep_nanoseconds(value: float) -> None:
    assert wire.seconds_of(wire.duration(value)) == pytest.approx(value, abs=5.1e-10)
    if value >= 0:
        assert wire.seconds_of(wire.timestamp(1.7e9 + value)) == 1.7e9 + value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e15])
def test_seconds_that_are_none(value: float) -> None:
    with pytest.raises(InvalidField, match="finite"):
        wire.duration(value, "ttl")
    with pytest.raises(InvalidField, match="finite"):
        wire.timestamp(value)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: wire.worker_offer_from_proto(worker_pb2.WorkerOffer(worker_id="w")), "offer.role"),
    (
        lambda: wire.worker_offer_from_proto(
            worker_pb2.WorkerOffer(role=worker_pb2.ROLE_BOTH, mode="fast")
        ),
        "offer.mode",
    ),
    (lambda: wire.worker_from_proto(worker_pb2.Worker(
        offer=worker_pb2.WorkerOffer(role=worker_pb2.ROLE_BOTH)), now_s=0), "state"),
    (lambda: wire.segment_from_proto(worker_pb2.Segment(name="nap")), "segment.name"),
    (lambda: wire.serving_from_proto(worker_pb2.Serving(tier="L9")), "serving.tier"),
    (lambda: wire.source_from_proto(registry_pb2.Source(tier="L9")), "source.tier"),
    (lambda: wire.request_event_from_proto(router_pb2.RequestEvent(kind="won")), "events.kind"),
    (lambda: wire.order_from_proto(actuator_pb2.Order(role="")), "order.role"),
    (lambda: wire.request_shape_from_proto(router_pb2.RouteRequest(token_ids=b"abc")), "token_ids"),
    (lambda: wire.request_shape_from_proto(router_pb2.RouteRequest(slo_ttft_s=1)), "slo_tpot_s"),
    (
        lambda: wire.model_signals_from_proto(router_pb2.ModelSignals(length_counts=[1.0])),
        "length_counts",
    ),
    (lambda: wire.check_result_from_proto(
        worker_pb2.CheckResult(name="c", evidence_json="[1]")), "checks.c.evidence_json"),
    (lambda: wire.check_result_from_proto(
        worker_pb2.CheckResult(name="c", evidence_json="{")), "checks.c.evidence_json"),
    (lambda: wire.check_result_to_proto(
        worker.CheckResult("c", True, {"x": float("nan")})), "checks.c.evidence"),
]  # fmt: skip


@pytest.mark.parametrize("call, field", WRONG, ids=[field for _, field in WRONG])
def test_a_message_that_means_nothing_names_its_field(call: Callable[[], Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        call()
    assert caught.value.field == field
