"""What a start takes over from earlier ones: compiled code and a measured KV size (R12, R16).

Owns their wiring and the order of both in one start; `compile_cache` and `kv_reuse` decide. Handed
to `starting`, which asks before the engine starts, tells what the engine made of it, and lets it
keep what was new once the worker serves.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Sequence
from pathlib import Path

from readyplane.core.identity import Manifest
from readyplane.core.startup import Segment, SegmentName
from readyplane.kit.clock import Clock
from readyplane.ports import Registry
from readyplane_agent.compile_cache import CompileCache
from readyplane_agent.compile_inspect import Inspector
from readyplane_agent.compile_publish import CompileBytes
from readyplane_agent.compile_store import CompileStore
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.failed_plans import FailedPlans
from readyplane_agent.kv_memory import MemoryProbe
from readyplane_agent.kv_reuse import KvReuse
from readyplane_agent.reading import Reader
from readyplane_agent.settings import AgentSettings
from readyplane_agent.trace import StartTrace
from readyplane_agent.vouching import refuse_untrusted

log = logging.getLogger("agent.reuse")

FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals with which no code ends its own process by accident."""


def says_nothing_of_code(
    segments: Sequence[Segment], *, returncode: int | None, stopped: bool
) -> str:
    """Why a start that failed says nothing of the code it was given; empty if it may be the code."""
    if stopped:
        return "a signal has stopped the engine's process"
    if returncode is None:
        if any(segment.name is SegmentName.COMPILE for segment in segments):
            return ""
        return "the engine got stuck before it came to the code"
    if -returncode in FROM_OUTSIDE:
        return f"the engine was ended from outside, by signal {-returncode}"
    return ""


class Reuse:
    """One start's compiled code and KV size.

    Args:
        settings, incarnation: who starts. folder: the node's. registry, clock.
        upload: where the registry takes bytes, see `compile_publish.upload_url`.
    """

    def __init__(
        self,
        settings: AgentSettings,
        folder: Path,
        *,
        registry: Registry,
        clock: Clock,
        incarnation: str,
        upload: str,
    ) -> None:
        store = CompileStore(
            folder / "compiled",
            bytes_max=settings.compile_bytes_max,
            make_id=lambda: f"{settings.worker_id}-{secrets.token_hex(6)}",
        )
        moves = CompileBytes(
            store,
            registry=registry,
            clock=clock,
            # A reader beside that of the weights: one name for both would make their leases one.
            reader=Reader(settings.worker_id, f"{incarnation}+reuse", settings.node),
            upload=upload,
            vouch=lambda manifest: refuse_untrusted(
                manifest, registry=registry, trust_file=settings.trust_file, clock=clock
            ),
            token=settings.token,
        )
        environ = dict(os.environ)
        if settings.vllm_bin is not None:
            environ["READYPLANE_VLLM_BIN"] = str(settings.vllm_bin)
        self._compiled = CompileCache(
            store,
            registry=registry,
            clock=clock,
            inspect=Inspector(settings.engine, environ).facts,
            bytes_of=moves,
        )
        self._kv = KvReuse(
            registry=registry,
            look=MemoryProbe(settings.engine, environ).look,
            bytes_of=moves,
            failed=FailedPlans(folder / "kv-failed.json"),
        )

    async def prepare(self, spec: EngineSpec, manifest: Manifest, trace: StartTrace) -> EngineSpec:
        """The spec with what holds here; each look is a span with its outcome. Never raises for
        what is not there.
        """
        with trace.span(SegmentName.ARTIFACT_DISCOVERY, "compiled code") as span:
            outcome = await self._compiled.prepare(spec, manifest)
            text = f"compiled code: none in mode {spec.mode}" if outcome is None else str(outcome)
            span.detail = text
        with trace.span(SegmentName.ARTIFACT_DISCOVERY, "KV size") as span:
            try:  # a start that compiles nothing finds its key only here, and that takes its time
                key = await self._compiled.key_of(spec, manifest)
            except OSError:  # said and counted above
                span.detail = "KV size: not looked for without a key"
                return spec
            spec, span.detail = await self._kv.prepare(spec, manifest, key)
        return spec

    async def judge(self, segments: Sequence[Segment]) -> None:
        """The engine is up: did it take what it was given?"""
        self._compiled.judge(segments)
        await self._kv.judge(segments)

    async def failed(
        self, segments: Sequence[Segment], *, returncode: int | None, stopped: bool
    ) -> None:
        """The engine did not come up: what it was given is nobody's any more, if it may be to blame.

        Args:
            segments: of its start. returncode: None while it runs. stopped: a signal holds it still.
        """
        if not stopped:  # the kernel kills one for the memory that it took: that may be its KV
            await self._kv.failed()
        why_not = says_nothing_of_code(segments, returncode=returncode, stopped=stopped)
        if why_not:
            log.info("reused compiled code is kept: %s", why_not)
        else:
            await self._compiled.failed()

    async def keep(self, engine: object, manifest: Manifest, *, compiled: bool) -> None:
        """The worker serves: keep and publish what was new; code only where it is `compiled`."""
        await self._kv.keep(engine, manifest)
        if compiled:
            await self.keep_compiled(manifest)

    async def keep_compiled(self, manifest: Manifest) -> None:
        """All code is there: keep and publish it. Of a staged start that is after its upgrade."""
        await self._compiled.keep(manifest)

    def metrics(self, who: str) -> list[str]:
        """Prometheus text; `who` are the labels of this worker."""
        return [*self._compiled.metrics(who), *self._kv.metrics(who)]
