"""`python -m readyplane_agent`: settings, dependencies, signals, and the exit status.

Owns the wiring of one agent process; the life itself is `life.Life`. Imports are few and late,
because they are part of T_ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import random
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from readyplane.core.convertible import told_profile
from readyplane.core.errors import ReadyplaneError, Unavailable
from readyplane.core.startup import SegmentName, WeightTier
from readyplane.kit.clock import Clock, SystemClock
from readyplane.kit.telemetry import setup_logging
from readyplane.ports import Registry, Router
from readyplane.profiles import load as load_profile
from readyplane_agent.cache import WeightCache
from readyplane_agent.engines.choice import engine_for
from readyplane_agent.folder import work_folder
from readyplane_agent.life import Life
from readyplane_agent.lifecycle import ExitCode
from readyplane_agent.loading import staging_of
from readyplane_agent.settings import AgentSettings, WrongSetting, parse
from readyplane_agent.spans import export_start
from readyplane_agent.trace import StartTrace, process_start_s
from readyplane_agent.vouching import check_trust_file

log = logging.getLogger("agent")

NAME_S_MAX = 60.0
"""How long a registry that is away is waited for when only a name was given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one agent; returns its exit status (`lifecycle.ExitCode`)."""
    clock = SystemClock()
    try:
        settings = parse(sys.argv[1:] if argv is None else argv, os.environ)
        work_folder(settings.work_dir)
    except ReadyplaneError as error:
        print(f"readyplane_agent: {error}", file=sys.stderr)
        return ExitCode.USAGE
    setup_logging("agent", settings.log_level)
    trace = StartTrace(
        clock,
        process_start_s=process_start_s(now_s=clock.monotonic_s()),
        ordered_at_s=settings.ordered_at_s,
    )
    return asyncio.run(_live(settings, trace))


@contextlib.asynccontextmanager
async def _clients(settings: AgentSettings) -> AsyncIterator[tuple[Router, Registry | None]]:
    from readyplane.client.registry import RegistryClient
    from readyplane.client.router import RouterClient

    router = RouterClient(settings.router, settings.token)
    registry = RegistryClient(settings.registry, settings.token) if settings.registry else None
    try:
        yield router, registry
    finally:
        await router.aclose()
        if registry is not None:
            await registry.aclose()


async def _live(settings: AgentSettings, trace: StartTrace) -> int:
    clock = SystemClock()
    incarnation = f"{settings.worker_id}-{secrets.token_hex(6)}"
    try:
        check_trust_file(settings.trust_file)
        worker_class = settings.worker_class
        profile = load_profile(settings.profile or worker_class, worker_class=worker_class)
        if settings.convertible_tpot_s > 0:
            profile = told_profile(profile, tpot_s=settings.convertible_tpot_s)
        engine = engine_for(
            settings.engine,
            clock=clock,
            url=settings.engine_url,
            model=settings.model,
            profile=profile.name,
            tp=settings.tp,
            program=settings.vllm_bin,
        )
        folder = settings.cache_dir or settings.work_dir.parent / "weight-cache"
        attached = settings.engine == "attached"
        cache = None if attached else WeightCache(folder, bytes_max=settings.cache_bytes_max)
    except (ReadyplaneError, OSError) as error:
        print(f"readyplane_agent: {error}", file=sys.stderr)
        return ExitCode.USAGE
    async with _clients(settings) as (router, registry):
        try:
            if settings.engine != "attached" and not settings.manifest.startswith("sha256:"):
                with trace.span(SegmentName.ARTIFACT_DISCOVERY, "the name's digest"):
                    settings = await with_digest(settings, registry, clock)
        except ReadyplaneError as error:
            print(f"readyplane_agent: {error}", file=sys.stderr)
            misset = isinstance(error, WrongSetting)
            return ExitCode.USAGE if misset else ExitCode.START_FAILED
        life = Life(
            settings,
            incarnation=incarnation,
            registry=registry,
            router=router,
            engine=engine,
            profile=profile,
            cache=cache,
            clock=clock,
            trace=trace,
            random=random.random,
            on_ready=_on_ready,
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, life.signalled, number)
        trace.add(
            SegmentName.RUNTIME_IMPORT, trace.process_start_s, clock.monotonic_s(), "agent process"
        )
        code = await life.run()
        if life.ready_s is None:
            await asyncio.to_thread(_export, life)
        return code


async def with_digest(
    settings: AgentSettings, registry: Registry | None, clock: Clock
) -> AgentSettings:
    """The settings with a digest as `manifest`: a lease is asked for content, not for a name.

    A tag is looked up, and without one the model's name; a registry that is away is waited for.

    Raises:
        NotFound, IdentityMismatch: the name means nothing, or several things. Unavailable: the
            registry stayed away for NAME_S_MAX. WrongSetting: no room for a chunk of what it means.
    """
    assert registry is not None, "settings.parse asks for its address"
    until_s, pause_s = clock.monotonic_s() + NAME_S_MAX, 0.5
    while True:
        try:
            found = await registry.resolve(settings.manifest or settings.model)
        except Unavailable as error:
            left_s = until_s - clock.monotonic_s()
            if pause_s > left_s:
                raise
            log.warning(
                "what the name means is not known yet, asked for %.0f s more: %s", left_s, error
            )
            await clock.sleep(pause_s)
            pause_s = min(5.0, pause_s * 2)
        else:
            staging_of(settings, found)
            return replace(settings, manifest=found.digest)


def _on_ready(life: Life) -> None:
    """What is told once: the ready file and the trace; then memory settles for a long life."""
    settings = life.settings
    if settings.ready_file is not None:
        serving = life.started.serving
        document = {
            "name": settings.worker_id,
            "pid": os.getpid(),
            "incarnation": life.incarnation,
            "http": life.transfer.url,
            "engine": "" if serving is None else serving.engine_url,
        }
        part = settings.ready_file.with_name(settings.ready_file.name + ".part")
        part.write_text(json.dumps(document))
        part.replace(settings.ready_file)
    if settings.otlp_endpoint:
        life.background(asyncio.to_thread(_export, life))
    gc.collect()
    gc.freeze()


def _export(life: Life) -> None:
    """The start as a trace: until it served or stood by, or until it failed."""
    clock = SystemClock()
    fetched = life.started.fetched
    export_start(
        life.settings,
        life.trace,
        incarnation=life.incarnation,
        tier=WeightTier.UNKNOWN if fetched is None else fetched.tier,
        end_s=clock.monotonic_s() if life.up_s is None else life.up_s,
        clock=clock,
    )


if __name__ == "__main__":
    sys.exit(main())
