"""`python -m readyplane_gateway`: the gateway as a process."""

from __future__ import annotations

import sys
import uuid

from readyplane.client import RegistryClient, RouterClient
from readyplane.kit.clock import SystemClock
from readyplane.kit.server import ServiceServer, run_service
from readyplane.kit.settings import parse_settings
from readyplane.kit.telemetry import metrics, setup_logging
from readyplane_gateway.api import Api
from readyplane_gateway.service import Gateway
from readyplane_gateway.settings import GatewaySettings

DESCRIPTION = """OpenAI-compatible gateway: pairs each request, runs prefill leg and decode leg.

example: python -m readyplane_gateway --router 127.0.0.1:7002 --http-port 8000"""


async def serve() -> None:
    """Build the parts and run until told to stop."""
    settings = parse_settings(
        GatewaySettings, sys.argv[1:], prog="readyplane_gateway", description=DESCRIPTION
    )
    setup_logging("gateway", settings.log_level)
    settings.need("router")
    router = RouterClient(settings.router, token=settings.token)
    registry = (
        RegistryClient(settings.registry, token=settings.token) if settings.registry else None
    )
    gateway = Gateway(
        router=router,
        registry=registry,
        clock=SystemClock(),
        bounds=settings.bounds(),
        metrics=metrics,
        show_pair=settings.show_pair,
        engine_token=settings.engine_token,
    )
    server = ServiceServer("gateway", settings)
    server.app.middleware_stack = Api(
        gateway,
        inner=server.app.build_middleware_stack(),
        new_id=lambda: uuid.uuid4().hex,
        api_key=settings.gateway_api_key,
    )
    server.set_ready(False, "the router has not sent the fleet yet")

    async def say_when_ready() -> None:
        await gateway.fleet_known()
        server.set_ready(True)

    try:
        await server.run(
            background=(
                gateway.tell_router,
                gateway.watch_fleet,
                gateway.watch_published,
                say_when_ready,
            ),
            on_stop=gateway.stop,
        )
    finally:
        await router.aclose()
        if registry is not None:
            await registry.aclose()


def main() -> None:
    """Entry point."""
    run_service(serve)


if __name__ == "__main__":
    main()
