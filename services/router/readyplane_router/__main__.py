"""`python -m readyplane_router`: the router as a process.

Owns the wiring of stores, use-cases and ports; everything it wires is tested without it.
"""

from __future__ import annotations

import gc
import secrets
import sys
from functools import partial
from pathlib import Path

from pydantic import Field

from readyplane.client import RegistryClient
from readyplane.kit.auth import TokenCheck
from readyplane.kit.clock import SystemClock
from readyplane.kit.database import async_engine, migrate
from readyplane.kit.lean_rpc import LeanServer
from readyplane.kit.redis import check_eviction, connect
from readyplane.kit.server import Background, ServiceServer, listen, run_service
from readyplane.kit.settings import ServiceSettings, parse_settings
from readyplane.kit.telemetry import metrics, setup_logging
from readyplane_router import api, rpc
from readyplane_router.given import read_policy, read_profiles, started
from readyplane_router.metrics import RouterCollector, StartMetrics
from readyplane_router.postgres import PostgresEpochs
from readyplane_router.redis import RedisStore
from readyplane_router.service import RouterService

PACKAGE = "readyplane_router"


class RouterSettings(ServiceSettings):
    """What the router is told."""

    policy_file: Path | None = Field(None, description="router policy as JSON (see README)")
    profiles_dir: Path | None = Field(None, description="folder of class profiles, *.json")
    pick_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="a second, lean gRPC port for Route, RouteBatch, Complete and what agents "
        "call; 0 for none",
    )


async def serve(settings: RouterSettings) -> None:
    """Run until a signal comes.

    Raises:
        InvalidField, Refused, Unavailable: a setting or a store is wrong.
    """
    settings.need("database_url", "redis_url")
    setup_logging("router", settings.log_level)
    clock = SystemClock()
    policy = read_policy(settings.policy_file)
    await migrate(settings.database_url, PACKAGE)
    client = connect(settings.redis_url)
    store = RedisStore(client)
    engine = async_engine(settings.database_url)
    registry = RegistryClient(settings.registry, settings.token) if settings.registry else None
    try:
        await check_eviction(client)
        starts = StartMetrics(metrics)
        service = RouterService(
            store=store,
            epochs=PostgresEpochs(engine),
            clock=clock,
            registry=registry,
            profiles=read_profiles(settings.profiles_dir),
            incarnation=f"router-{secrets.token_hex(6)}",
            policy=policy,
            on_admitted=starts.admitted,
            on_followed=starts.followed,
        )
        await started(service)
        # What was loaded to start lives as long as the process: no collection need look at it.
        gc.collect()
        gc.freeze()
        metrics.register(RouterCollector(service))
        server = ServiceServer("router", settings)
        server.add_grpc(lambda s: rpc.register(s, service, clock), rpc.FULL_NAME)
        server.app.include_router(api.routes(service, clock))
        background: list[Background] = [service.run]
        if settings.pick_port:
            lean = LeanServer(rpc.lean_methods(service, clock), TokenCheck(settings.token))
            picking = listen(settings.host, settings.pick_port, "pick_port")
            background.append(partial(lean.run, picking))
        try:
            await server.run(background)
        finally:
            await service.aclose()
    finally:
        await store.aclose()
        await engine.dispose()
        if registry is not None:
            await registry.aclose()


def main(argv: list[str] | None = None) -> None:
    """Entry of the process."""
    arguments = sys.argv[1:] if argv is None else argv

    async def run() -> None:
        settings = parse_settings(
            RouterSettings,
            arguments,
            "python -m readyplane_router",
            "Who is alive, and which pair serves a request.",
        )
        await serve(settings)

    run_service(run)


if __name__ == "__main__":
    main()
