"""A vLLM process as an engine: its command line, its start, its answers.

Owns what is special about vLLM beside the OpenAI-style answers. vLLM reads a checkpoint folder, so
the verified files are laid there (from the arena, by `starting`) before it is started.
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

from readyplane.core.errors import InvalidField, Unavailable
from readyplane.core.kv import KvEventBatch
from readyplane.core.startup import Segment, SegmentName, StartMode
from readyplane.core.worker import Role
from readyplane.kit.clock import Clock
from readyplane_agent.engines.attached import AttachedEngine
from readyplane_agent.engines.child import EngineProcess
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.engines.vllm_events import KvEventReader

POLL_S = 0.25
KV_ROLES = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer", Role.BOTH: "kv_both"}


def command(spec: EngineSpec, *, model_dir: Path, port: int, ports: tuple[int, int]) -> list[str]:
    """The command line of one engine.

    Args:
        model_dir: folder with the checkpoint. port: of its API. ports: KV events, KV replay.
    """
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{spec.host}:{ports[0]}",
        "replay_endpoint": f"tcp://{spec.host}:{ports[1]}",
    }
    transfer = {"kv_connector": "NixlConnector", "kv_role": KV_ROLES[spec.role]}
    words = [
        *("vllm", "serve", str(model_dir)),
        *("--served-model-name", spec.model),
        *("--host", spec.host, "--port", str(port)),
        *("--kv-events-config", json.dumps(events)),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    if spec.mode is StartMode.EAGER:
        words.append("--enforce-eager")
    if spec.kv_tokens:
        words += ["--num-gpu-blocks-override", str(-(-spec.kv_tokens // 16))]
    if spec.kv_reuse_bytes:
        words += ["--kv-cache-memory-bytes", str(spec.kv_reuse_bytes)]
    if spec.max_batch_tokens:
        # vLLM fills an iteration with tokens of what decodes first; the rest is a prompt's chunk.
        words += ["--enable-chunked-prefill"]
        words += ["--max-num-batched-tokens", str(spec.max_batch_tokens)]
    if spec.max_num_seqs:
        words += ["--max-num-seqs", str(spec.max_num_seqs)]
    return [*words, *spec.extra_args]


def environment(spec: EngineSpec, *, side_channel_port: int) -> dict[str, str]:
    """What vLLM reads from the environment."""
    found = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
    }
    if spec.compile_cache_dir is not None:
        # One folder for all that is compiled: what lies outside of it would not be there next time.
        found["VLLM_CACHE_ROOT"] = str(spec.compile_cache_dir)
        found["TORCHINDUCTOR_CACHE_DIR"] = str(spec.compile_cache_dir / "torchinductor")
        found["TRITON_CACHE_DIR"] = str(spec.compile_cache_dir / "triton")
    return {**found, **spec.environment}


class VllmEngine(AttachedEngine):
    """`EnginePort` over a vLLM process of our own.

    Args:
        clock: time.
    """

    def __init__(self, *, clock: Clock) -> None:
        super().__init__("http://127.0.0.1:0", model="", profile="", clock=clock)
        self._child = EngineProcess()
        self._began_s: float | None = None
        self._up_s: float | None = None
        self._events: tuple[str, str] = ("", "")

    @property
    def returncode(self) -> int | None:
        """Exit status once it is gone, else None."""
        return self._child.returncode

    @property
    def pid(self) -> int:
        """Process id, 0 before the start."""
        return self._child.pid

    async def start(self, spec: EngineSpec) -> None:
        """Remember the order; vLLM reads weights at once, so it starts when they are verified."""
        if not spec.wait_weights:
            await self._spawn(spec)
        self._spec = spec

    async def _spawn(self, spec: EngineSpec) -> None:
        ports = _free_ports(spec.host, 4)
        self._connect(f"http://{spec.host}:{ports[0]}", model=spec.model, profile=spec.profile)
        self._events = (f"tcp://{spec.host}:{ports[1]}", f"tcp://{spec.host}:{ports[2]}")
        self._began_s = self._clock.monotonic_s()
        await self._child.start(
            # vLLM hashes the model's path into the key of its compile cache: one that begins at the
            # worker's own folder would find nothing that another worker has compiled.
            command(spec, model_dir=Path("files"), port=ports[0], ports=(ports[1], ports[2])),
            log_path=spec.log_path,
            environment=environment(spec, side_channel_port=ports[3]),
            folder=spec.work_dir,
        )

    async def wait_ready(self, *, stall_s: float = 60.0, limit_s: float = 1800.0) -> None:
        """Wait until `/health` answers; what vLLM does until then is one segment.

        Raises:
            Unavailable: it died, said nothing for `stall_s`, or took longer than `limit_s`.
        """
        if self._spec is None:
            raise Unavailable("the engine was not started", "call start first")
        if self._child.pid == 0:
            await self._spawn(self._spec)
        begun_s = moved_s = self._clock.monotonic_s()
        size = -1
        while True:
            gone = self._child.died()
            if gone is not None:
                raise gone
            try:
                await self._client.get("/health", timeout_s=2.0)
                break
            except (Unavailable, InvalidField):
                await self._clock.sleep(POLL_S)
            now_s, found = self._clock.monotonic_s(), self._spec.log_path.stat().st_size
            if found != size:
                size, moved_s = found, now_s
            if now_s - moved_s > stall_s or now_s - begun_s > limit_s:
                raise Unavailable(
                    f"vLLM does not get on; its log ends: {self.log_tail(5)}", "see its log"
                )
        self._up_s = self._clock.monotonic_s()
        await super().wait_ready(stall_s=stall_s, limit_s=limit_s)

    def startup_segments(self) -> tuple[Segment, ...]:
        """One segment: vLLM exports no start-up times of its own."""
        if self._began_s is None:
            return ()
        return (Segment(SegmentName.COMPILE, self._began_s, self._up_s, detail="vLLM start"),)

    async def kv_events(self) -> AsyncIterator[KvEventBatch]:
        """Its prefix-cache events in our hash scheme."""
        async for batch in KvEventReader(*self._events, slept=self._client.slept).follow():
            yield batch

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """SIGTERM, then SIGKILL to its session."""
        await self._child.stop(grace_s=grace_s)

    def log_tail(self, lines: int = 20) -> str:
        """End of its log."""
        return self._child.tail(lines)


def _free_ports(host: str, count: int) -> tuple[int, ...]:
    """Ports that were free a moment ago; vLLM has no way to choose and tell."""
    held = [socket.create_server((host, 0)) for _ in range(count)]
    try:
        return tuple(s.getsockname()[1] for s in held)
    finally:
        for s in held:
            s.close()
