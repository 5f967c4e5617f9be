"""`python -m readyplane_gateway`: the gateway as a process."""

from __future__ import annotations

import gc
import logging
import secrets
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from readyplane.client import RegistryClient, RouterClient
from readyplane.client.picks import PickingClient
from readyplane.kit.clock import SystemClock
from readyplane.kit.server import ServiceServer, run_service
from readyplane.kit.settings import parse_settings
from readyplane.kit.telemetry import metrics, setup_logging
from readyplane.ports import Mover, Registry, Router
from readyplane_gateway.ahead import RouteAhead
from readyplane_gateway.api import Api
from readyplane_gateway.http_server import HttpConnection
from readyplane_gateway.service import Gateway
from readyplane_gateway.settings import GatewaySettings

DESCRIPTION = """OpenAI-compatible gateway: pairs each request, runs prefill leg and decode leg.

example: python -m readyplane_gateway --router 127.0.0.1:7002 --http-port 8000"""

log = logging.getLogger(__name__)
Work = Callable[[], Coroutine[Any, Any, None]]


async def serve() -> None:
    """Build the parts and run until told to stop."""
    settings = parse_settings(
        GatewaySettings, sys.argv[1:], prog="readyplane_gateway", description=DESCRIPTION
    )
    setup_logging("gateway", settings.log_level)
    registry = (
        RegistryClient(settings.registry, token=settings.token) if settings.registry else None
    )
    try:
        choice = await _choice(settings, registry)
        try:
            await _serve(settings, registry, choice)
        finally:
            await choice.close()
    finally:
        if registry is not None:
            await registry.aclose()


@dataclass(frozen=True, slots=True)
class Choice:
    """Who chooses pairs and moves what is to move, how it is closed, what runs beside it, and how
    it tells of pairs early.
    """

    router: Router
    mover: Mover
    close: Work
    beside: Sequence[Work] = ()
    route_ahead: RouteAhead | None = None


async def _choice(settings: GatewaySettings, registry: Registry | None) -> Choice:
    """As the settings want it.

    Raises:
        InvalidField: a setting that the chosen way needs. Unavailable, Refused: the store.
    """
    if settings.pairing == "grpc":
        settings.need("router")
        client = (
            PickingClient(settings.router, token=settings.token, picks=settings.router_picks)
            if settings.router_picks
            else RouterClient(settings.router, token=settings.token)
        )
        return Choice(client, client, client.aclose)
    # Only here, so that a gateway that asks a router loads neither its brain nor a Redis client.
    from readyplane_router.embedded import EmbeddedRouter

    settings.need("redis_url")
    brain = EmbeddedRouter(
        redis_url=settings.redis_url,
        policy_file=settings.policy_file,
        profiles_dir=settings.profiles_dir,
        registry=registry,
        clock=SystemClock(),
        metrics=metrics,
    )
    log.info("pairing here: routers hear of it through Redis, and tell it a planner as demand")
    try:
        await brain.start()
    except BaseException:
        await brain.aclose()
        raise
    return Choice(brain.service, brain.service, brain.aclose, (brain.run,), brain.service.route)


async def _serve(settings: GatewaySettings, registry: Registry | None, choice: Choice) -> None:
    gateway = Gateway(
        router=choice.router,
        registry=registry,
        clock=SystemClock(),
        bounds=settings.bounds(),
        metrics=metrics,
        show_pair=settings.show_pair,
        engine_token=settings.engine_token,
        route_ahead=choice.route_ahead,
        mover=choice.mover,
        tokenizers_dir=settings.tokenizers_dir,
    )
    server = ServiceServer("gateway", settings)
    server.front = Api(
        gateway,
        inner=server.app,
        new_id=partial(secrets.token_hex, 16),
        api_key=settings.gateway_api_key,
    )
    server.http = HttpConnection
    server.set_ready(False, "the router has not sent the fleet yet")
    gateway.tell_why = partial(server.set_ready, False)

    async def say_when_ready() -> None:
        await gateway.fleet_known()
        _spare_the_collector()
        server.set_ready(True)

    await server.run(
        background=(
            *choice.beside,
            gateway.tell_router,
            gateway.watch_fleet,
            gateway.watch_published,
            say_when_ready,
        ),
        on_stop=gateway.stop,
    )


def _spare_the_collector() -> None:
    """What was imported lives as long as the process: it is not looked through again and again, and
    requests, which leave next to no cycles, are looked through more rarely.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def main() -> None:
    """Entry point."""
    run_service(serve)


if __name__ == "__main__":
    main()
