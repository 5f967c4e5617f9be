"""An SGLang process as an engine: its command line, its start, what it serves (docs/sglang.md).

Owns what is special about SGLang beside its answers (`sglang_client`). It reads a checkpoint folder,
so the verified files are laid there before it is started. This adapter was written from SGLang's
documentation and is tested against a protocol double; it has not run a real SGLang.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from readyplane.core.errors import InvalidField, ReadyplaneError, Unavailable, Unsupported
from readyplane.core.identity import KvFormat
from readyplane.core.kv import KvEventBatch
from readyplane.core.startup import Segment, SegmentName, StartMode
from readyplane.core.worker import Role, Serving
from readyplane.kit.clock import Clock
from readyplane.kit.free_ports import free_ports
from readyplane_agent.engines.attached import AttachedEngine
from readyplane_agent.engines.child import EngineProcess, log_end
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.engines.sglang_client import Partner, SglangClient
from readyplane_agent.engines.vllm_events import KvEventReader

log = logging.getLogger(__name__)

POLL_S = 0.25
PROGRAM = ("python3", "-m", "sglang.launch_server")
MODES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "null"}
# SGLang's own page is one token, which would be one entry of the KV index a token.
PAGE_TOKENS = 16
BACKEND = "nixl"
MAX_NUM_SEQS = 256
# What SGLang's log says when a part of its start begins, and the segment that begins then. Where it
# says none of them, the start is one segment.
MARKS: tuple[tuple[str, SegmentName], ...] = (
    ("Load weight begin", SegmentName.HOST_TO_DEVICE),
    ("Load weight end", SegmentName.KV_PROFILE),
    ("KV Cache is allocated", SegmentName.WARMUP),
    ("Capture cuda graph begin", SegmentName.CUDA_GRAPH),
    ("Capture cuda graph end", SegmentName.WARMUP),
)


def command(
    spec: EngineSpec,
    *,
    model_dir: Path,
    port: int,
    bootstrap_port: int,
    events: tuple[int, int],
    page_tokens: int,
    program: Sequence[str] = PROGRAM,
) -> list[str]:
    """The command line of one server.

    Args:
        model_dir: folder with the checkpoint. port: of its API. bootstrap_port: where decode servers
            meet it, of a prefill server. events: ports of KV events and their replay.
    """
    publish = {
        "publisher": "zmq",
        "endpoint": f"tcp://{spec.host}:{events[0]}",
        "replay_endpoint": f"tcp://{spec.host}:{events[1]}",
    }
    words = [
        *program,
        *("--model-path", str(model_dir), "--served-model-name", spec.model),
        *("--host", spec.host, "--port", str(port)),
        *("--enable-metrics", "--enable-cache-report"),
        *("--page-size", str(page_tokens)),
        *("--kv-events-config", json.dumps(publish)),
        *("--disaggregation-mode", MODES[spec.role]),
    ]
    if spec.role is not Role.BOTH:
        words += ["--disaggregation-transfer-backend", BACKEND]
    if spec.role is Role.PREFILL:
        words += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    if spec.mode is StartMode.EAGER:
        words.append("--disable-cuda-graph")
    if spec.kv_tokens:
        words += ["--max-total-tokens", str(spec.kv_tokens)]
    if spec.max_batch_tokens:
        # A prompt's chunk in one iteration with what decodes, within the bound.
        words += ["--enable-mixed-chunk", "--chunked-prefill-size", str(spec.max_batch_tokens)]
    if spec.max_num_seqs:
        words += ["--max-running-requests", str(spec.max_num_seqs)]
    return [*words, *spec.extra_args]


def environment(spec: EngineSpec) -> dict[str, str]:
    """What SGLang and the compilers below it read from the environment."""
    found = {"HF_HUB_OFFLINE": "1", "SGLANG_HOST_IP": spec.host}
    if spec.compile_cache_dir is not None:
        found["TORCHINDUCTOR_CACHE_DIR"] = str(spec.compile_cache_dir / "torchinductor")
        found["TRITON_CACHE_DIR"] = str(spec.compile_cache_dir / "triton")
    return {**found, **spec.environment}


class SglangEngine(AttachedEngine):
    """`EnginePort` over an SGLang server of our own.

    Args:
        clock: time. program: what is run; its arguments follow.
    """

    def __init__(self, *, clock: Clock, program: Sequence[str] = PROGRAM) -> None:
        super().__init__("http://127.0.0.1:0", model="", profile="", clock=clock)
        self._program = tuple(program)
        self._child = EngineProcess()
        self._client: SglangClient
        self._began_s: float | None = None
        self._up_s: float | None = None
        self._marks: list[tuple[SegmentName, float]] = []
        self._read_bytes = 0
        self._events: tuple[str, str] = ("", "")
        self._page_tokens = PAGE_TOKENS

    def _connect(self, url: str, *, model: str, profile: str) -> None:
        self._client = SglangClient(url, model=model, token=self._token)
        self._profile = profile

    @property
    def client(self) -> SglangClient:
        """Asks the engine."""
        return self._client

    @property
    def meets(self) -> bool:
        """Whether it answers with another server only: of one stage, it does."""
        return self._spec is not None and self._spec.role is not Role.BOTH

    def meet(self, partner: Partner) -> None:
        """With whom it answers from now on."""
        self._client.partner = partner

    @property
    def returncode(self) -> int | None:
        """Exit status once it is gone, else None."""
        return self._child.returncode

    @property
    def pid(self) -> int:
        """Process id, 0 before the start."""
        return self._child.pid

    async def start(self, spec: EngineSpec) -> None:
        """Remember the order; SGLang reads weights at once, so it starts when they are verified."""
        if spec.kv_reuse_bytes:
            log.warning("SGLang measures its KV pool itself: %d B unused", spec.kv_reuse_bytes)
        if not spec.wait_weights:
            await self._spawn(spec)
        self._spec = spec

    async def _spawn(self, spec: EngineSpec) -> None:
        api, meet, publish, replay = free_ports(spec.host, 4)
        self._page_tokens = _page_tokens(spec)
        bootstrap = f"{spec.host}:{meet}" if spec.role is Role.PREFILL else ""
        self._client = SglangClient(
            f"http://{spec.host}:{api}",
            model=spec.model,
            token=self._token,
            role=spec.role,
            bootstrap=bootstrap,
        )
        self._profile = spec.profile
        self._events = (f"tcp://{spec.host}:{publish}", f"tcp://{spec.host}:{replay}")
        self._began_s = self._clock.monotonic_s()
        await self._child.start(
            command(
                spec,
                model_dir=Path("files"),
                port=api,
                bootstrap_port=meet,
                events=(publish, replay),
                page_tokens=self._page_tokens,
                program=self._program,
            ),
            log_path=spec.log_path,
            environment=environment(spec),
            folder=spec.work_dir,
        )

    async def wait_ready(self, *, stall_s: float = 60.0, limit_s: float = 1800.0) -> None:
        """Wait until `/health` answers, and read what it serves.

        Raises:
            Unavailable: it died, said nothing for `stall_s`, or took longer than `limit_s`.
            InvalidField: it does not say what it can hold.
        """
        if self._spec is None:
            raise Unavailable("the engine was not started", "call start first")
        if self._child.pid == 0:
            await self._spawn(self._spec)
        begun_s = moved_s = self._clock.monotonic_s()
        while True:
            gone = self._child.died()
            if gone is not None:
                raise gone
            now_s = self._clock.monotonic_s()
            if self._look(self._spec.log_path, now_s):
                moved_s = now_s
            try:
                await self._client.get("/health", timeout_s=2.0)
                break
            except (Unavailable, InvalidField, Unsupported):
                await self._clock.sleep(POLL_S)
            if now_s - moved_s > stall_s or now_s - begun_s > limit_s:
                raise Unavailable(
                    f"SGLang does not get on; {log_end(self.log_tail(5))}", "see its log"
                )
        self._up_s = self._clock.monotonic_s()
        await super().wait_ready(stall_s=stall_s, limit_s=limit_s)

    def _look(self, path: Path, now_s: float) -> bool:
        """Read on in the log; True when it has grown."""
        try:
            with path.open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read()
        except OSError:
            return False
        whole, _, _ = text.rpartition(b"\n")
        self._read_bytes += len(whole) + 1 if whole else 0
        for line in whole.decode("utf-8", "replace").splitlines():
            for words, segment in MARKS:
                if words in line and not (self._marks and self._marks[-1][0] is segment):
                    self._marks.append((segment, now_s))
        return bool(text)

    async def _read_serving(self) -> Serving:
        assert self._spec is not None
        info = await self._client.info()
        models = await self._client.models()
        found = next((m for m in models if m.get("id") == self._client.model), None)
        if found is None:
            names = ", ".join(str(m.get("id")) for m in models)
            raise InvalidField("--model", self._client.model, f"use one of {names}")
        if _count(info, "dp_size", 1) > 1:
            raise InvalidField(
                "--dp-size", info["dp_size"], "start one worker for each data-parallel rank"
            )
        page = _count(info, "page_size", self._page_tokens)
        tokens = _count(info, "max_total_num_tokens", 0)
        length = found.get("max_model_len") or info.get("context_length")
        for name, value in (("max_total_num_tokens", tokens), ("max_model_len", length)):
            if not value:
                raise InvalidField(
                    "--engine", self._client.url, f"start an SGLang server that tells its {name}"
                )
        role = self._spec.role
        return Serving(
            engine_url=self._client.url,
            kv=KvFormat(
                model_digest=self._spec.manifest_digest,
                dtype=_kv_dtype(info),
                block_size=page,
                layout="unknown",
                tp=_count(info, "tp_size", 1),
                connector="none" if role is Role.BOTH else f"sglang/{_backend(info)}",
                engine_version=f"sglang/{info.get('version', 'unknown')}",
            ),
            kv_total_blocks=tokens // page,
            block_size=page,
            max_model_len=int(str(length)),
            profile=self._profile,
            max_num_seqs=_count(info, "max_running_requests", 0) or MAX_NUM_SEQS,
            kv_side_channel=self._client.bootstrap,
            mode=self._spec.mode,
        )

    def startup_segments(self) -> tuple[Segment, ...]:
        """What its log has told apart, with the resolution of a look (0.25 s); else one segment."""
        if self._began_s is None:
            return ()
        if not self._marks:
            name, detail = SegmentName.PARALLEL_INIT, "SGLang start, not told apart"
            return (Segment(name, self._began_s, self._up_s, detail=detail),)
        begun = [(SegmentName.RUNTIME_IMPORT, self._began_s), *self._marks]
        ends: list[float | None] = [at_s for _, at_s in begun[1:]]
        return tuple(
            Segment(name, start_s, end_s, detail="by its log")
            for (name, start_s), end_s in zip(begun, [*ends, self._up_s], strict=True)
        )

    async def kv_events(self) -> AsyncIterator[KvEventBatch]:
        """Its prefix-cache events in our hash scheme."""
        reader = KvEventReader(*self._events, slept=self._client.slept)
        async for batch in reader.follow():
            yield batch

    async def is_idle(self) -> bool:
        """No sequence in any of its queues; False when it cannot be read."""
        try:
            load = await self._client.load()
        except ReadyplaneError:
            return False
        return load.running == 0 and load.waiting == 0

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL to its process group: schedulers may outlive the server."""
        pid = self._child.pid
        await self._child.stop(grace_s=grace_s)
        if pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def log_tail(self, lines: int = 20) -> str:
        """End of its log."""
        return self._child.tail(lines)


def _page_tokens(spec: EngineSpec) -> int:
    """Tokens of a page: as the artifact's config says, so that P and D agree."""
    try:
        size = json.loads(spec.config_path.read_text()).get("block_size")
    except (OSError, ValueError, AttributeError):
        return PAGE_TOKENS
    return size if isinstance(size, int) and size > 0 else PAGE_TOKENS


def _count(info: dict[str, Any], name: str, default: int) -> int:
    value = info.get(name)
    return value if type(value) is int else default


def _kv_dtype(info: dict[str, Any]) -> str:
    """As it is called elsewhere; what follows from the model is not known here."""
    told = str(info.get("kv_cache_dtype") or "auto")
    return "unknown" if told == "auto" else told


def _backend(info: dict[str, Any]) -> str:
    return str(info.get("disaggregation_transfer_backend") or BACKEND)
