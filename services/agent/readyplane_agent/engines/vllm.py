"""A vLLM process as an engine: its start, what it says of itself, its end.

Owns one engine life. The process is started at once and imports while the weights come in; its
loader plugin waits for the tensor table, which is written when they are verified. It can also be
started before anything of a model is known, and is then given its order (`StandsBy`).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil

from readyplane.core.errors import InvalidField, ReadyplaneError, Unavailable
from readyplane.core.identity import KvFormat
from readyplane.core.kv import KvEventBatch
from readyplane.core.startup import Segment
from readyplane.core.worker import Serving
from readyplane.kit.clock import Clock
from readyplane.kit.free_ports import free_ports
from readyplane_agent.engines.attached import AttachedEngine
from readyplane_agent.engines.child import EngineProcess, log_end
from readyplane_agent.engines.offers import Imported
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.engines.vllm_command import (
    LAUNCH,
    command,
    device_of,
    environment,
    events_endpoint,
    find_program,
    process_environment,
    python_of,
)
from readyplane_agent.engines.vllm_events import KvEventReader
from readyplane_agent.engines.vllm_first import ask_first
from readyplane_agent.engines.vllm_marks import (
    AS_CONFIGURED,
    MARKS_ENV,
    read_facts,
    read_marks,
    segments_of,
    write_mark,
)
from readyplane_agent.engines.vllm_nixl import WAKE_ENV, wake_us
from readyplane_agent.engines.vllm_shared import remove, shared_by

POLL_S = 0.05
UNMARKED_POLL_S = 1.0
CPU_EVERY_S = 2.0
CPU_STEP_S = 0.1  # so much more processor time is progress
MARKS_FILE = "engine-marks.jsonl"
NO_MODULE = "No module named readyplane_agent"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Until:
    """How long a start may take: since when, without progress, and in all."""

    begun_s: float
    stall_s: float
    limit_s: float


class VllmEngine(AttachedEngine):
    """`EnginePort` and `StandsBy` over a vLLM process of our own.

    Args:
        clock: time. program: `vllm` of an environment in which this project is installed too; None
            for `READYPLANE_VLLM_BIN`, else what PATH has.
    """

    def __init__(self, *, clock: Clock, program: Path | None = None) -> None:
        super().__init__("http://127.0.0.1:0", model="", profile="", clock=clock)
        self._program = program
        self._child = EngineProcess()
        self._marks = Path(os.devnull)
        self._device = ""
        self._ordered_s: float | None = None
        self._up_s: float | None = None
        self._stood_by_s = 0.0
        self._ports: tuple[int, ...] = (0, 0, 0)  # API, KV replay, KV side channel
        self._cpu: tuple[float, float] = (0.0, 0.0)
        self._asked_s = 0.0
        self._shared: frozenset[Path] = frozenset()

    @property
    def returncode(self) -> int | None:
        """Exit status once it is gone, else None."""
        return self._child.returncode

    @property
    def pid(self) -> int:
        """Process id, 0 before the start."""
        return self._child.pid

    # ------------------------------------------------------------------ start and stop

    async def stand_by(
        self, spec: EngineSpec, *, stall_s: float = 60.0, limit_s: float = 600.0
    ) -> Imported:
        """Start the process; returns when it has imported vLLM and waits for its order."""
        begun_s = self._clock.monotonic_s()
        await self._spawn(spec)
        imported = await self._until_marked("imported", stall_s=stall_s, limit_s=limit_s)
        self._stood_by_s = imported - begun_s
        held = await asyncio.to_thread(_resident_bytes, self.pid)
        device_bytes = 0 if self._device == "cpu" else None
        return Imported(self.pid, begun_s, imported, held, device_bytes)

    async def start(self, spec: EngineSpec) -> None:
        """Give the order to the process that waits, or to a new one, which takes it when it can.

        Raises:
            Unavailable: there is no vLLM, or the process is gone.
        """
        self._spec = spec
        self._ordered_s = self._clock.monotonic_s()
        if self._child.pid == 0:
            await self._spawn(spec)
        gone = self._child.died()
        if gone is not None:
            raise self._explained(gone)
        self._ports = free_ports(spec.host, 3)
        self._connect(
            f"http://{spec.host}:{self._ports[0]}", model=spec.model, profile=spec.profile
        )
        words = command(
            spec,
            # vLLM hashes the model's path into the key of its compile cache: one that begins at the
            # worker's own folder would find nothing that another worker has compiled.
            model_dir=Path("files"),
            port=self._ports[0],
            replay_port=self._ports[1],
            device=self._device,
        )
        order = {
            "words": words[1:],
            "environment": environment(spec, side_channel_port=self._ports[2]),
            "folder": str(spec.work_dir),
        }
        await self._child.tell(json.dumps(order).encode() + b"\n")

    async def _spawn(self, spec: EngineSpec) -> None:
        environ = {**os.environ, **spec.environment}
        program = find_program(self._program, environ)
        self._device = device_of(environ)
        spec.work_dir.mkdir(parents=True, exist_ok=True)
        self._marks = spec.work_dir / MARKS_FILE
        self._marks.unlink(missing_ok=True)
        self._mark("spawned")
        self._spec = spec
        await self._child.start(
            [str(python_of(program)), *LAUNCH],
            log_path=spec.log_path,
            environment={
                **process_environment(spec, device=self._device),
                MARKS_ENV: str(self._marks),
                WAKE_ENV: str(wake_us(environ, device=self._device)),
            },
            folder=spec.work_dir,
            told=True,
        )

    async def wait_ready(self, *, stall_s: float = 60.0, limit_s: float = 1800.0) -> None:
        """Wait until `/health` answers, and what would make a first request wait is done.

        Raises:
            Unavailable: it died, showed no progress (marks, log, processor time) for `stall_s`, or
            took longer than `limit_s`.
        """
        if self._spec is None or self._ordered_s is None:
            raise Unavailable("the engine was not started", "call start first")
        until = _Until(self._clock.monotonic_s(), stall_s, limit_s)
        await self._gets_on(self._answers, until)
        await self._first_requests(until)
        await self._gets_on(self._answers, until)  # it may have ended at one of them
        await super().wait_ready(stall_s=stall_s, limit_s=limit_s)
        self._shared = await asyncio.to_thread(lambda: shared_by(p.pid for p in _tree(self.pid)))
        self._up_s = self._clock.monotonic_s()  # it has told all that it is asked at its start

    async def _answers(self) -> bool:
        now_s = self._clock.monotonic_s()
        up = any(m.name == "engine_up" for m in read_marks(self._marks))
        if not up and now_s - self._asked_s < UNMARKED_POLL_S:
            return False  # nobody listens before that, in the versions that can be marked
        self._asked_s = now_s
        try:
            await self._client.get("/health", timeout_s=2.0)
        except (Unavailable, InvalidField):
            return False
        return True

    async def _first_requests(self, until: _Until) -> None:
        """What only the first of some requests waits for is done now. Raises as `wait_ready`."""
        asking = asyncio.create_task(ask_first(self._client, self._mark, timeout_s=until.limit_s))

        async def asked() -> bool:
            return asking.done()

        try:
            await self._gets_on(asked, until)
            await asking
        finally:
            asking.cancel()
            await asyncio.wait({asking})

    def _mark(self, name: str) -> None:
        write_mark(name, at_s=self._clock.monotonic_s(), path=str(self._marks))

    async def _until_marked(self, name: str, *, stall_s: float, limit_s: float) -> float:
        """When a mark came. Raises Unavailable as `wait_ready`."""

        async def marked() -> list[float]:
            return [m.at_s for m in read_marks(self._marks) if m.name == name]

        until = _Until(self._clock.monotonic_s(), stall_s, limit_s)
        return (await self._gets_on(marked, until))[0]

    async def _gets_on(self, look: Callable[[], Awaitable[T]], until: _Until) -> T:
        """What `look` finds as soon as it finds something, while the start gets on.

        Raises:
            Unavailable: as `wait_ready`.
        """
        moved_s = self._clock.monotonic_s()
        seen: object = None
        while True:
            gone = self._child.died()
            if gone is not None:
                raise self._explained(gone)
            if found := await look():
                return found
            now_s = self._clock.monotonic_s()
            progress = await self._progress(now_s)
            if progress != seen:
                seen, moved_s = progress, now_s
            self._refuse_stalled(now_s, moved_s, until)
            await self._clock.sleep(POLL_S)

    def _refuse_stalled(self, now_s: float, moved_s: float, until: _Until) -> None:
        if now_s - moved_s <= until.stall_s and now_s - until.begun_s <= until.limit_s:
            return
        running = [s for s in self.startup_segments() if s.end_s is None]
        what = f"{running[-1].name} ({running[-1].detail})" if running else "its start"
        raise Unavailable(
            f"vLLM does not get on with {what} ({now_s - moved_s:.0f} s without progress); "
            f"{log_end(self.log_tail(5))}",
            "see its log",
        )

    async def _progress(self, now_s: float) -> object:
        """Whatever changes when a start gets on."""
        assert self._spec is not None
        if now_s - self._cpu[0] >= CPU_EVERY_S:
            self._cpu = (now_s, await asyncio.to_thread(_cpu_s, self.pid))
        sizes = [p.stat().st_size if p.exists() else 0 for p in (self._spec.log_path, self._marks)]
        return *sizes, int(self._cpu[1] / CPU_STEP_S)

    def _explained(self, gone: Unavailable) -> Unavailable:
        if NO_MODULE in self.log_tail(5):
            return Unavailable(
                "the environment of this vLLM does not have readyplane installed",
                "install it there too (pip install --no-deps), or use the one of make vllm-env",
            )
        return gone

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """SIGTERM, after the grace SIGKILL; at the end to whatever is left of its process group.

        Shared memory that it had when it was ready and has not removed is removed.
        """
        await self._child.stop(grace_s=grace_s)
        self._child.end_session()
        remove(self._shared)

    def log_tail(self, lines: int = 20) -> str:
        """End of its log."""
        return self._child.tail(lines)

    # ------------------------------------------------------------------ what it is and does

    def startup_segments(self) -> tuple[Segment, ...]:
        """What its processes marked, from its order on."""
        if self._ordered_s is None:
            return ()
        return segments_of(
            read_marks(self._marks),
            ordered_s=self._ordered_s,
            up_s=self._up_s,
            stood_by_s=self._stood_by_s,
        )

    @property
    def reads_itself(self) -> bool:
        """False: its connector refuses to register its own engine id as a remote one."""
        return False

    async def is_idle(self) -> bool:
        """No sequence and no KV block in use: one that waits for its reader is no sequence to vLLM."""
        try:
            load = await self._client.load()
        except ReadyplaneError:
            return False
        return load.running == 0 and load.waiting == 0 and load.kv_used_blocks == 0

    def facts(self) -> Mapping[str, Any]:
        """What the engine told of its KV pool and formats (`vllm_hooks.facts_of`)."""
        return read_facts(self._marks)

    def formats(self) -> Mapping[str, str]:
        """Quantisation and KV type as the engine has settled them, in the manifest's names."""
        facts = self.facts()
        told = {"kv_dtype": str(facts["kv_dtype"])} if "kv_dtype" in facts else {}
        if "quantisation" in facts and self._spec is not None:
            told["quantisation"] = str(facts["quantisation"])
            if told["quantisation"] == AS_CONFIGURED:
                try:
                    doc = json.loads(self._spec.config_path.read_text())
                except (OSError, ValueError):
                    doc = {}
                told["quantisation"] = str(doc.get("quantisation", ""))
        return {name: value for name, value in told.items() if value}

    async def _read_serving(self) -> Serving:
        """What the server says, and what the engine behind it has told beside it."""
        plain = await super()._read_serving()
        assert self._spec is not None
        facts = self.facts()
        if "block_size" not in facts:
            raise Unavailable(
                f"vLLM does not tell its KV format ({facts.get('problem', 'no mark of it')})",
                "use the vLLM version that docs/vllm.md names",
            )
        return replace(
            plain,
            kv=KvFormat(
                model_digest=self._spec.manifest_digest,
                dtype=str(facts["kv_dtype"]),
                block_size=int(facts["block_size"]),
                layout=str(facts["kv_layout"]),
                tp=int(facts["tp"]),
                positions=str(facts["positions"]),
                engine_version=plain.kv.engine_version,
            ),
            max_num_seqs=int(facts["max_num_seqs"]),
            kv_side_channel=f"{self._spec.host}:{self._ports[2]}",
            mode=self._spec.mode,
        )

    async def kv_events(self) -> AsyncIterator[KvEventBatch]:
        """Its prefix-cache events in our hash scheme."""
        assert self._spec is not None
        reader = KvEventReader(
            events_endpoint(self._spec, port=self._ports[0]),
            f"tcp://{self._spec.host}:{self._ports[1]}",
            slept=self._client.slept,
        )
        async for batch in reader.follow():
            yield batch


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _cpu_s(pid: int) -> float:
    """Processor seconds of a process and all that it started."""
    total = 0.0
    for process in _tree(pid):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system
    return total


def _resident_bytes(pid: int) -> int | None:
    """Host memory of a process and all that it started; what they share counts once a process."""
    found = []
    for process in _tree(pid):
        try:
            found.append(process.memory_info().rss)
        except psutil.Error:
            continue
    return sum(found) or None
