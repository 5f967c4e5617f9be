"""Twins for the agent's tests: an artifact, a registry, a router, an engine, a byte server."""

import asyncio
import http.server
import json
import socketserver
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from readyplane.core.errors import LostLease, NotFound, Overloaded, StaleEpoch, Unavailable
from readyplane.core.identity import KvFormat, Manifest, chunk_hash, digest_of_bytes
from readyplane.core.kv import KvEvent, KvEventBatch
from readyplane.core.resolution import Resolution
from readyplane.core.startup import Segment, SegmentName, WeightTier
from readyplane.core.work import pack_tokens, sequence_hashes
from readyplane.core.worker import (
    CheckResult,
    Fleet,
    Lease,
    LoadReport,
    Serving,
    Worker,
    WorkerOffer,
    WorkerState,
)
from readyplane.ports import (
    Directive,
    FetchPlan,
    GateVerdict,
    GroupStatus,
    RankedSource,
    RankReport,
    Renewal,
    RenewalAnswer,
    Source,
    Transfer,
)
from readyplane_agent.engines.mapping import ArenaMap, read_file_parts
from readyplane_agent.engines.port import EngineSpec, GenerateResult, read_tensor_table
from readyplane_agent.pacing import ServingTimes

CHUNK = 64 * 1024


@dataclass
class Artifact:
    """A manifest and its files' bytes."""

    manifest: Manifest
    files: dict[str, bytes]

    def write(self, folder: Path) -> Path:
        for path, data in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        return folder


def safetensors(tensors: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    header: dict[str, Any] = {}
    body = b""
    for name, value in tensors.items():
        raw = value.tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(value.shape),
            "data_offsets": [len(body), len(body) + len(raw)],
        }
        body += raw
    head = json.dumps(header).encode()
    head += b" " * (-(8 + len(head)) % 64)
    return struct.pack("<Q", len(head)) + head + body


def artifact(
    *,
    seed: int = 1,
    shards: int = 2,
    floats: int = 50_000,
    chunk_bytes: int = CHUNK,
    model: str = "tiny",
    golden: Sequence[int] = (7, 8, 9, 2),
) -> Artifact:
    """A small sharded model with tokenizer and config, tensors from a seed."""
    rng = np.random.default_rng(seed)
    files: dict[str, bytes] = {}
    tensors: list[dict[str, Any]] = []
    for shard in range(shards):
        path = f"model-{shard}.safetensors"
        values = {
            f"layer.{shard}.a": rng.random(floats, dtype=np.float32),
            f"layer.{shard}.empty": np.zeros((0, 4), dtype=np.float32),
            f"layer.{shard}.one": rng.random(1, dtype=np.float32),
        }
        files[path] = safetensors(values)
        (length,) = struct.unpack("<Q", files[path][:8])
        for name, item in json.loads(files[path][8 : 8 + length]).items():
            start, end = item["data_offsets"]
            tensors.append(
                {
                    "name": name,
                    "dtype": "F32",
                    "shape": item["shape"],
                    "file": path,
                    "offset_bytes": 8 + length + start,
                    "size_bytes": end - start,
                }
            )
    files["tokenizer.json"] = b'{"type":"bytes","offset":3}'
    files["config.json"] = b"{}"
    document = {
        "schema": "readyplane/manifest/1",
        "kind": "weights",
        "model": model,
        "chunk_bytes": chunk_bytes,
        "files": [entry(path, data, chunk_bytes) for path, data in files.items()],
        "tensors": tensors,
        "config": {"max_model_len": 4096, "vocab_size": 512, "eos_token_id": 2},
        "canary": {"prompt_token_ids": [5, 6, 7], "golden_token_ids": list(golden)},
    }
    return Artifact(Manifest.from_document(document), files)


def entry(path: str, data: bytes, chunk_bytes: int) -> dict[str, Any]:
    purpose = "weights" if path.endswith(".safetensors") else path.split(".", maxsplit=1)[0]
    return {
        "path": path,
        "size_bytes": len(data),
        "sha256": digest_of_bytes(data),
        "chunks": [chunk_hash(data[i : i + chunk_bytes]) for i in range(0, len(data), chunk_bytes)],
        "purpose": purpose,
    }


# --------------------------------------------------------------------------- bytes over HTTP

Fault = Callable[[str, int, int, bytes], "bytes | str | None"]


class ByteServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves ranges of an artifact; `fault(path, start, count, data)` may spoil an answer.

    A fault returns other bytes, None for the right ones, or a word: `close` (no answer), `cut`
    (half the body), `empty`, `html`, `busy`, `whole` (ignores the range).
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, files: Mapping[str, bytes], fault: Fault | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.fault = files, fault
        self.asked: list[tuple[str, int, int]] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/blobs/x"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a reader that goes away is part of the tests


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ByteServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].removeprefix("/v1/blobs/").partition("/")[2]
        data = self.server.files[path]
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        start, end = int(first), int(last) + 1
        with self.server.lock:
            self.server.asked.append((path, start, end))
            count = len(self.server.asked)
        body: bytes | str | None = data[start:end]
        if self.server.fault is not None:
            spoiled = self.server.fault(path, start, count, data[start:end])
            body = body if spoiled is None else spoiled
        if isinstance(body, str):
            self._odd(body, data, start, end)
            return
        assert body is not None
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _odd(self, kind: str, data: bytes, start: int, end: int) -> None:
        self.close_connection = True
        if kind == "close":
            return
        if kind in {"busy", "missing"}:
            self.send_response(503 if kind == "busy" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if kind in {"empty", "html", "whole"}:
            body = {"empty": b"", "html": b"<html>oops</html>", "whole": data}[kind]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        self.wfile.write(data[start : start + (end - start) // 2])

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(files: Mapping[str, bytes], fault: Fault | None = None) -> Iterator[ByteServer]:
    server = ByteServer(files, fault)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# --------------------------------------------------------------------------- registry


class TwinRegistry:
    """What a loader and a life ask of a registry."""

    def __init__(self, manifest: Manifest | None = None) -> None:
        self.manifests = {} if manifest is None else {manifest.digest: manifest}
        self.sources: list[Source] = []
        self.acquired: list[str] = []
        self.released: list[tuple[str, int, str]] = []
        self.withdrawn: list[str] = []
        self.announced: dict[str, Source] = {}
        self.full: set[str] = set()
        self.plans = 0
        self.excluded: tuple[str, ...] = ()

    async def get_manifest(self, digest: str) -> Manifest:
        if digest not in self.manifests:
            raise NotFound("manifest", digest)
        return self.manifests[digest]

    async def dated_manifest(self, digest: str) -> tuple[Manifest, float]:
        return await self.get_manifest(digest), 0.0

    async def resolve(
        self, reference: str, *, kind: str = "weights", need: Mapping[str, str] | None = None
    ) -> Manifest:
        for manifest in self.manifests.values():
            if manifest.model == reference:
                return manifest
        raise NotFound("model", reference)

    async def resolve_need(
        self, reference: str, *, kind: str, need: Mapping[str, str], candidates_max: int = 5
    ) -> Resolution:
        raise NotFound(kind, reference)

    async def plan_fetch(
        self, digest: str, *, worker_id: str, incarnation: str, node: str, **_more: Any
    ) -> FetchPlan:
        self.plans += 1
        ranked = [RankedSource(s, 1.0, f"place {i}") for i, s in enumerate(self.sources, 1)]
        return FetchPlan(tuple(ranked), self.excluded)

    async def acquire_transfer(
        self,
        source_id: str,
        digest: str,
        *,
        worker_id: str,
        incarnation: str,
        request_id: str,
        source_incarnation: str = "",
        layout_digest: str = "",
        readers_seen: int | None = None,
    ) -> Transfer:
        if source_id in self.full:
            raise Overloaded(f"{source_id} is full", 0.1)
        self.acquired.append(source_id)
        return Transfer(f"t-{source_id}", 30.0)

    async def release_transfer(
        self, transfer_id: str, *, transferred_bytes: int, elapsed_s: float, failure: str = ""
    ) -> bool:
        self.released.append((transfer_id, transferred_bytes, failure))
        return failure.startswith("corrupt")

    async def announce_source(self, source: Source) -> float:
        self.announced[source.source_id] = source
        return 30.0

    async def withdraw_source(self, source_id: str, *, reason: str = "") -> None:
        self.withdrawn.append(source_id)


def source(
    url: str, name: str = "storage:1", tier: WeightTier = WeightTier.L4_OBJECT, **more: Any
) -> Source:
    return Source(source_id=name, digest="", tier=tier, url=url, **more)


# --------------------------------------------------------------------------- router


@dataclass
class TwinRouter:
    """Leases, barrier and gate as an agent sees them; tests set what it answers."""

    ttl_s: float = 0.6
    refuse: tuple[str, ...] = ()
    away: bool = False
    hold_group: bool = False
    offers: list[WorkerOffer] = field(default_factory=list)
    renewals: list[Renewal] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    admitted: list[tuple[Serving, Sequence[CheckResult]]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    drains: list[str] = field(default_factory=list)
    directives: list[Directive] = field(default_factory=list)
    fail_next: list[Exception] = field(default_factory=list)
    register_error: Exception | None = None
    epoch: int = 0
    lease: Lease | None = None
    fleet: Fleet = field(default_factory=Fleet)
    drained_is_enough: bool = True
    standby: bool = False
    told: Callable[[RenewalAnswer], None] | None = None

    def _check(self) -> None:
        if self.away:
            raise Unavailable("router is away", "wait")

    async def register(self, offer: WorkerOffer) -> Lease:
        self._check()
        if self.register_error is not None:
            raise self.register_error
        self.offers.append(offer)
        if self.lease is None or self.lease.incarnation != offer.incarnation:
            self.epoch += 1
            self.lease = Lease(offer.worker_id, offer.incarnation, self.epoch, self.ttl_s)
        return self.lease

    async def renew(self, renewal: Renewal) -> RenewalAnswer:
        self._check()
        if self.fail_next:
            raise self.fail_next.pop(0)
        if self.lease is None:
            raise LostLease(renewal.worker_id, renewal.incarnation, "no lease is known")
        if renewal.epoch != self.lease.epoch:
            raise StaleEpoch("epoch", self.lease.epoch, renewal.epoch, "stop")
        self.renewals.append(renewal)
        directives = list(self.directives)
        draining = any(d.kind == "drain" for d in directives) or self.drains
        if renewal.drained and draining and self.drained_is_enough:
            directives.append(Directive("leave", reason="drained"))
        if renewal.drained:  # nothing is left of the stage: the flip may go on
            directives = [replace(d, deadline_s=0.0) if d.role else d for d in directives]
        self.directives = [d for d in self.directives if d.kind != "replay_kv"]
        return RenewalAnswer(self.lease, tuple(directives))

    def hear(self, worker_id: str, incarnation: str, told: Callable[[RenewalAnswer], None]) -> None:
        self.told = told

    def say(self, *directives: Directive) -> None:
        """Tell it at once, as the router does besides with each answer."""
        self.directives = list(directives)
        assert self.lease is not None
        assert self.told is not None
        self.told(RenewalAnswer(self.lease, tuple(directives)))

    def _holds(self, worker_id: str, incarnation: str, epoch: int) -> None:
        self._check()
        if self.lease is None:
            raise LostLease(worker_id, incarnation, "no lease is known")
        if epoch != self.lease.epoch:
            raise StaleEpoch("epoch", self.lease.epoch, epoch, "stop")

    async def report_rank(self, report: RankReport) -> GroupStatus:
        self._holds(report.worker_id, report.incarnation, report.epoch)
        self.steps.append(report.step)
        if report.step == "canary_passed" and not self.hold_group:
            return GroupStatus("published", 11)
        return GroupStatus("forming", waiting_for=("rank 0: next",))

    async def admit(
        self,
        worker_id: str,
        incarnation: str,
        epoch: int,
        *,
        serving: Serving,
        checks: Sequence[CheckResult],
    ) -> GateVerdict:
        self._holds(worker_id, incarnation, epoch)
        failed = tuple(f"{c.name}: {c.reason}" for c in checks if not c.passed)
        if self.refuse or failed:
            return GateVerdict(False, self.refuse + failed)
        if self.standby:
            return GateVerdict(True, standby=True)
        self.admitted.append((serving, checks))
        return GateVerdict(True)

    async def leave(self, worker_id: str, incarnation: str, epoch: int, *, reason: str) -> None:
        self._check()
        self.left.append(reason)
        self.lease = None

    async def drain(
        self,
        worker_id: str,
        *,
        epoch: int = 0,
        reason: str = "",
        deadline_s: float = 300.0,
        scale_decision_id: str = "",
    ) -> Worker:
        self._check()
        self.drains.append(reason)
        return Worker(self.offers[-1], epoch, WorkerState.DRAINING)

    async def list_workers(self, model: str = "") -> Fleet:
        self._check()
        return self.fleet


# --------------------------------------------------------------------------- engine


class TwinEngine:
    """An engine port whose answers depend on the bytes that really lie in the arena."""

    def __init__(self, golden: Sequence[int] = (7, 8, 9, 2), *, init_s: float = 0.05) -> None:
        self.golden, self.init_s = tuple(golden), init_s
        self.returncode: int | None = None
        self.pid = 4242
        self.spec: EngineSpec | None = None
        self.segments: list[Segment] = []
        self.idle = True
        self.stopped = 0
        self.events: asyncio.Queue[KvEventBatch] = asyncio.Queue()
        self.asked: tuple[int, ...] = ()
        self.told = False
        self.die_in_start = False
        self.hang = False
        self.answer_of: Callable[[Sequence[int]], tuple[int, ...]] | None = None

    async def start(self, spec: EngineSpec) -> None:
        self.spec = spec

    async def wait_ready(self, *, stall_s: float = 60.0, limit_s: float = 1800.0) -> None:
        import time

        assert self.spec is not None
        assert self.spec.tensor_table_path.exists(), "the table comes before this is asked"
        table = self.spec.tensor_table_path.read_text()
        slots, size = read_tensor_table(table)
        data = ArenaMap(self.spec.arena_path, size, read_file_parts(table)).view
        assert len(data) >= size
        self.tensors = {s.name: bytes(data[s.offset_bytes :][: s.size_bytes]) for s in slots}
        start_s = time.monotonic()
        if self.hang:
            self.segments.append(Segment(SegmentName.COMPILE, start_s, None, modelled=True))
            await asyncio.sleep(3600)
        if self.die_in_start:
            self.returncode = -9
            raise Unavailable("the engine died: out of memory", "see its log")
        await asyncio.sleep(self.init_s)
        self.segments.append(Segment(SegmentName.COMPILE, start_s, time.monotonic(), modelled=True))

    async def get(self, target: str, *, timeout_s: float = 10.0) -> bytes:
        """As a peer it is asked for its health."""
        del target, timeout_s
        return b""

    def startup_segments(self) -> tuple[Segment, ...]:
        return tuple(self.segments)

    def serving(self) -> Serving:
        assert self.spec is not None
        return Serving(
            engine_url="http://127.0.0.1:1",
            kv=KvFormat(model_digest=self.spec.manifest_digest),
            kv_total_blocks=100,
            block_size=16,
            max_model_len=4096,
            profile="h200-slow10",
        )

    async def serving_times(self) -> ServingTimes:
        return ServingTimes()

    async def load_report(self) -> LoadReport:
        return LoadReport(running=0, waiting=0, kv_used_blocks=0, kv_total_blocks=100)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        ignore_eos: bool = False,
        kv_transfer_params: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
    ) -> GenerateResult:
        self.asked = tuple(prompt_token_ids)
        full = self.golden if self.answer_of is None else self.answer_of(prompt_token_ids)
        if ignore_eos:
            full = (*full, *([5] * max_tokens))
        tokens = tuple(full[:max_tokens])
        stop = not ignore_eos and len(full) <= max_tokens
        asked = kv_transfer_params or {}
        given = {"do_remote_prefill": True, "id": 1} if asked.get("do_remote_decode") else None
        return GenerateResult(
            tokens, "", "stop" if stop else "length", len(prompt_token_ids), 0, given
        )

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return tuple(b + 3 for b in text.encode())

    async def kv_events(self) -> AsyncIterator[KvEventBatch]:
        if not self.told:  # the start asks once, and forwards later
            self.told = True
            hashes = sequence_hashes(pack_tokens(self.asked), self.serving().block_size)
            yield KvEventBatch(0, (KvEvent("stored", hashes),))
        while True:
            yield await self.events.get()

    async def is_idle(self) -> bool:
        return self.idle

    async def stop(self, *, grace_s: float = 5.0) -> None:
        self.stopped += 1
        self.returncode = 0

    def log_tail(self, lines: int = 20) -> str:
        return "engine log"


def ready_worker(offer: WorkerOffer, serving_: Serving) -> Worker:
    return replace(Worker(offer, 1, WorkerState.READY), serving=serving_)
