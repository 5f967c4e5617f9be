"""The engine port over a modelled engine: its process, its start-up file, its HTTP and events.

Owns the child process of one engine life. It dies with this process (the kernel sees to it) and is
alone in its process group, so that stopping it stops whatever it may have started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from readyplane.core.errors import ReadyplaneError, Unavailable
from readyplane.core.identity import KvFormat
from readyplane.core.kv import KvEventBatch
from readyplane.core.startup import Segment, SegmentName
from readyplane.core.worker import LoadReport, Serving
from readyplane.kit.clock import Clock, SystemClock
from readyplane_agent.engines.child import is_stopped, log_end
from readyplane_agent.engines.exit_status import status_text
from readyplane_agent.engines.modelled import standing
from readyplane_agent.engines.modelled.asked import AskedBeyond
from readyplane_agent.engines.offers import Imported
from readyplane_agent.engines.openai import LOAD_LIMIT_S, OpenAiEngine, read_metrics
from readyplane_agent.engines.port import EngineSpec, GenerateResult
from readyplane_agent.engines.vllm_events import KvEventReader
from readyplane_agent.pacing import ServingTimes

POLL_S = 0.02
KILL_LIMIT_S = 5.0
CPU_TICKS_STEP = 10  # so much more processor time is progress: 0.1 s
LOG_TAIL_BYTES = 8192
STARTUP_FILE = "engine-startup.json"
ORDERS_FILE = "engine-orders.json"
ENGINE = ("-m", "readyplane_agent.engines.modelled")
ENGINE_WORDS = 1 + len(ENGINE)
_LATENESS = "readyplane_engine_lateness_seconds{"


class ModelledEngine(AskedBeyond):
    """`EnginePort` over `python -m readyplane_agent.engines.modelled`.

    Args:
        clock: time. python: interpreter of the engine.
    """

    def __init__(self, clock: Clock | None = None, *, python: str = sys.executable) -> None:
        self._clock, self._python = clock or SystemClock(), python
        self._process: asyncio.subprocess.Process | None = None
        self._spec: EngineSpec | None = None
        self._client: OpenAiEngine | None = None
        self._facts: dict[str, Any] = {}
        self._load = LoadReport()
        self._load_s: float | None = None
        self._up_s: float | None = None
        self._imported: Imported | None = None
        self._reader: KvEventReader | None = None

    @property
    def returncode(self) -> int | None:
        """Exit status, None while it runs."""
        return None if self._process is None else self._process.returncode

    @property
    def pid(self) -> int:
        """Process id, 0 before the start."""
        return 0 if self._process is None else self._process.pid

    # ------------------------------------------------------------------ start and stop

    async def start(self, spec: EngineSpec) -> None:
        """Start the process, or tell the one that stands by. Raises Unavailable when neither can."""
        self._spec = spec
        spec.work_dir.mkdir(parents=True, exist_ok=True)
        if self._imported is None:
            self._startup_path.unlink(missing_ok=True)
            await self._spawn(self.command(spec), spec)
            return
        if self.returncode is not None:
            raise self._died()
        self._imported, self._facts = None, {}
        orders = spec.work_dir / ORDERS_FILE
        part = orders.with_name(orders.name + ".part")
        part.write_text(json.dumps(self.command(spec)[ENGINE_WORDS:]))
        part.replace(orders)

    async def stand_by(
        self, spec: EngineSpec, *, stall_s: float = 60.0, limit_s: float = 600.0
    ) -> Imported:
        """Start a process that imports everything and waits; `start` tells it what to load."""
        self._spec = spec
        spec.work_dir.mkdir(parents=True, exist_ok=True)
        for name in (STARTUP_FILE, ORDERS_FILE):
            (spec.work_dir / name).unlink(missing_ok=True)
        command = [self._python, *ENGINE, standing.STAND_BY, str(spec.work_dir / ORDERS_FILE)]
        command += ["--startup-file", str(self._startup_path), "--parent-pid", str(os.getpid())]
        await self._spawn(command, spec)
        await self._until("imported", stall_s=stall_s, limit_s=limit_s)
        start_s, ready_s = float(self._facts["start_s"]), float(self._facts["ready_s"])
        self._imported = Imported(self.pid, start_s, ready_s, _resident_bytes(self.pid), 0)
        return self._imported

    async def _spawn(self, command: Sequence[str], spec: EngineSpec) -> None:
        environment = {**os.environ, **spec.environment}
        environment[standing.SPAWNED_AT] = repr(self._clock.monotonic_s())
        try:
            with spec.log_path.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    process_group=0,  # not a session: see `child`
                )
        except OSError as error:
            raise Unavailable(
                f"cannot start the engine with {self._python} ({error})",
                "check that the file exists and may be run",
            ) from error

    def command(self, spec: EngineSpec) -> list[str]:
        """The command line of one engine life."""
        flags: list[tuple[str, object]] = [
            ("--model", spec.model),
            ("--engine-id", spec.engine_id),
            ("--manifest-digest", spec.manifest_digest),
            ("--arena", spec.arena_path),
            ("--tensor-table", spec.tensor_table_path),
            ("--config", spec.config_path),
            ("--profile", spec.profile),
            ("--host", spec.host),
            ("--port", spec.port),
            ("--side-channel-port", spec.kv_side_channel_port),
            ("--kv-events-port", spec.kv_events_port),
            ("--kv-replay-port", spec.kv_replay_port),
            ("--kv-tokens", spec.kv_tokens),
            ("--kv-reuse-bytes", spec.kv_reuse_bytes),
            ("--max-batch-tokens", spec.max_batch_tokens),
            ("--max-num-seqs", spec.max_num_seqs),
            ("--mode", spec.mode),
            ("--startup-file", spec.work_dir / STARTUP_FILE),
            ("--parent-pid", os.getpid()),
        ]
        if spec.tokenizer_path is not None:
            flags.append(("--tokenizer", spec.tokenizer_path))
        if spec.compile_cache_dir is not None:
            flags.append(("--compile-cache", spec.compile_cache_dir))
        if spec.wait_weights:
            flags.append(("--wait-weights-s", 86_400))
        command = [self._python, *ENGINE]
        for flag, value in flags:
            command += [flag, str(value)]
        staged = ["--graph-stages"] if spec.graph_stages else []
        return [*command, *staged, *spec.extra_args]

    @property
    def _startup_path(self) -> Path:
        assert self._spec is not None
        return self._spec.work_dir / STARTUP_FILE

    async def wait_ready(self, *, stall_s: float = 60.0, limit_s: float = 1800.0) -> None:
        """Return when `/health` is 200; see the port for what counts as progress."""
        await self._until("ready", stall_s=stall_s, limit_s=limit_s)
        spec = self._spec
        assert spec is not None
        url = f"http://{spec.host}:{self._facts['port']}"
        self._client = OpenAiEngine(url, model=spec.model)
        await self._client.get("/health", timeout_s=10.0)
        self._up_s = self._clock.monotonic_s()

    async def _until(self, state: str, *, stall_s: float, limit_s: float) -> None:
        """Wait for a state of the start-up file."""
        if self._process is None:
            raise Unavailable("the engine was not started", "call start first")
        begun_s = moved_s = self._clock.monotonic_s()
        seen: object = None
        while True:
            if self.returncode is not None:
                raise self._died()
            self._read_facts()
            if self._facts.get("state") == state:
                return
            now_s = self._clock.monotonic_s()
            found = self._progress()
            if found != seen:
                seen, moved_s = found, now_s
            if now_s - moved_s > stall_s or now_s - begun_s > limit_s:
                stopped = "; a signal has stopped its process" if is_stopped(self.pid) else ""
                raise Unavailable(
                    f"the engine does not get on with {self._running_segment()} "
                    f"({now_s - moved_s:.0f} s without progress){stopped}; "
                    f"{log_end(self.log_tail(5))}",
                    "see the engine's log, and its machine",
                )
            await self._clock.sleep(POLL_S)

    def _died(self) -> Unavailable:
        why = self._facts.get("failure") or log_end(self.log_tail(5))
        return Unavailable(
            f"the engine ended with {status_text(self.returncode)}: {why}", "see the engine's log"
        )

    def _read_facts(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._facts = json.loads(self._startup_path.read_text())

    def _progress(self) -> object:
        """Whatever changes when a start gets on: segments, log, processor time."""
        assert self._process is not None
        assert self._spec is not None
        used = cpu_ticks(self._process.pid)
        try:
            size = self._spec.log_path.stat().st_size
        except OSError:
            size = 0
        return self._facts.get("segments"), size, used // CPU_TICKS_STEP

    def _running_segment(self) -> str:
        running = [s for s in self.startup_segments() if s.end_s is None]
        return str(running[-1].name) if running else "its start"

    def startup_segments(self) -> tuple[Segment, ...]:
        """Segments of the start-up file, and what it took from their end until it answered."""
        if self._facts.get("state") != "ready" and self._spec is not None:
            self._read_facts()
        told = tuple(
            Segment(
                SegmentName(s["name"]),
                s["start_s"],
                s["end_s"],
                s["modelled"],
                str(s["detail"]),
                s["saved_s"],
            )
            for s in self._facts.get("segments", ())
        )
        ends = [s.end_s for s in told if s.end_s is not None]
        if self._up_s is None or not ends:
            return told
        return (
            *told,
            Segment(SegmentName.WARMUP, max(ends), self._up_s, detail="until it answered"),
        )

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """SIGTERM, after `grace_s` SIGKILL to its process group."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            async with asyncio.timeout(KILL_LIMIT_S):
                await process.wait()

    def log_tail(self, lines: int = 20) -> str:
        """End of its log."""
        if self._spec is None:
            return ""
        try:
            with self._spec.log_path.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    # ------------------------------------------------------------------ what it is and does

    def memory_account(self) -> Mapping[str, Any]:
        """What it says of its device's memory (`modelled.memory.Account`); empty without one."""
        found = self._facts.get("memory")
        return found if isinstance(found, dict) else {}

    def serving(self) -> Serving:
        """How it is reached and what it holds."""
        spec, facts = self._spec, self._facts
        if self._client is None or spec is None:
            raise Unavailable("the engine is not ready yet", "wait for it")
        return Serving(
            engine_url=self._client.url,
            kv=KvFormat(
                model_digest=spec.manifest_digest,
                dtype=str(facts["kv_dtype"]),
                block_size=int(facts["block_size"]),
            ),
            kv_total_blocks=int(facts["kv_blocks"]),
            block_size=int(facts["block_size"]),
            max_model_len=int(facts["max_model_len"]),
            profile=spec.profile,
            max_num_seqs=int(facts["max_num_seqs"]),
            kv_side_channel=f"{spec.host}:{facts['side_channel_port']}",
            mode=spec.mode,
            moves=True,
            flips=True,  # one process does what it is asked, whichever stage it registered for
        )

    @property
    def client(self) -> OpenAiEngine:
        """Asks the engine. Raises Unavailable before it is ready."""
        return self._ready_client()

    def _ready_client(self) -> OpenAiEngine:
        if self._client is None:
            raise Unavailable("the engine is not ready yet", "wait for it")
        return self._client

    async def load_report(self) -> LoadReport:
        """Its load; after a bad read the last one with its age."""
        now_s = self._clock.monotonic_s()
        try:
            client = self._ready_client()
            page = await client.get("/metrics", timeout_s=LOAD_LIMIT_S)
            metrics = read_metrics(page)
            load = await client.load(metrics)
        except ReadyplaneError:
            if self._load_s is None:
                return LoadReport()
            # The question itself may have taken its whole bound.
            return replace(self._load, age_s=self._clock.monotonic_s() - self._load_s)
        ours = "readyplane_engine_"
        self._load_s = now_s
        self._load = replace(
            load,
            waiting_prefill_tokens=_whole(metrics.get(f"{ours}waiting_prefill_tokens")),
            kv_used_blocks=_whole(metrics.get(f"{ours}kv_used_blocks")),
            iterations_total=_whole(metrics.get(f"{ours}iterations_total")),
            lateness_p99_s=_lateness_p99_s(page),
        )
        return self._load

    async def serving_times(self) -> ServingTimes:
        """What it has measured of its requests; nothing before it is ready."""
        return ServingTimes() if self._client is None else await self._client.serving_times()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        ignore_eos: bool = False,
        kv_transfer_params: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
    ) -> GenerateResult:
        """One greedy answer."""
        return await self._ready_client().generate(
            prompt_token_ids,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            kv_transfer_params=kv_transfer_params,
            timeout_s=timeout_s,
        )

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        return await self._ready_client().tokenize(text)

    async def kv_events(self) -> AsyncIterator[KvEventBatch]:
        """Its prefix-cache events in our hash scheme."""
        self._ready_client()
        assert self._spec is not None
        host = self._spec.host
        self._reader = KvEventReader(
            f"tcp://{host}:{self._facts['kv_events_port']}",
            f"tcp://{host}:{self._facts['kv_replay_port']}",
        )
        async for batch in self._reader.follow():
            yield batch

    async def is_idle(self) -> bool:
        """No sequence running or waiting, no KV held for a reader; False when not known."""
        try:
            metrics = read_metrics(await self._ready_client().get("/metrics", timeout_s=5.0))
        except ReadyplaneError:
            return False
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "readyplane_engine_held_requests",
        )
        return all(metrics.get(name) == 0 for name in names)


def cpu_ticks(pid: int) -> int:
    """Processor time of a process in kernel ticks of 10 ms, 0 when it is gone (proc(5), stat)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _resident_bytes(pid: int) -> int | None:
    """Memory of a process in the host; None when nobody says (proc(5), statm)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _lateness_p99_s(page: bytes) -> float | None:
    for line in page.decode().splitlines():
        if line.startswith(_LATENESS) and 'quantile="0.99"' in line:
            return float(line.rpartition(" ")[2])
    return None
