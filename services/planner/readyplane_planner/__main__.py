"""`python -m readyplane_planner`: the planner as a process; without `--actuator` an advisory one.

`--signals FILE` adds sources beyond the router, or stands in for it.

Owns the wiring of stores, ports and use-cases; everything it wires is tested without it.
"""

from __future__ import annotations

import logging
import secrets
import socket
import sys
from pathlib import Path
from typing import cast

from pydantic import Field

from readyplane.client import ActuatorClient, RegistryClient, RouterClient
from readyplane.core.errors import InvalidField, Refused
from readyplane.kit.clock import Clock, SystemClock
from readyplane.kit.database import async_engine, migrate
from readyplane.kit.redis import check_eviction, connect
from readyplane.kit.server import Background, ServiceServer, run_service
from readyplane.kit.settings import ServiceSettings, parse_settings
from readyplane.kit.telemetry import metrics, setup_logging
from readyplane.ports import Router
from readyplane_planner import api, rpc
from readyplane_planner.leadership import Leadership, named
from readyplane_planner.metrics import PlannerMetrics
from readyplane_planner.policy import Policy
from readyplane_planner.policy_file import PolicyFile, load_policy
from readyplane_planner.postgres import PostgresJournal
from readyplane_planner.redis import RedisLeaseStore
from readyplane_planner.service import PlannerService
from readyplane_planner.signal_sources import SignalSources, load_signals, make_sources
from readyplane_planner.sources import NoRouter
from readyplane_planner.upkeep import Upkeep

DAY_S = 86_400.0

log = logging.getLogger(__name__)


class Settings(ServiceSettings):
    """What the planner is told beside what every service is."""

    policy: Path | None = Field(None, description="YAML or JSON policy, used until one is stored")
    policy_again: bool = Field(
        default=True,
        description="a --policy file that differs from the stored one becomes the next",
    )
    policy_watch_s: float = Field(
        2.0, ge=0, le=3600, description="look so often whether the --policy file changed; 0: never"
    )
    leader_ttl_s: float = Field(10.0, ge=1, le=300, description="leadership lease")
    advertise: str = Field(
        default="",
        max_length=255,
        description="host:port of its gRPC where people reach it, told by those that stand by;"
        " empty: where it listens",
    )
    sample_every_s: float = Field(30.0, ge=1, le=3600, description="journal a decision at rest")
    keep_decisions: int = Field(
        20_000, ge=100, le=10_000_000, description="journal at most so many"
    )
    keep_days: float = Field(30.0, gt=0, le=3650, description="and no older ones")
    optimiser_s: float = Field(
        0.5, gt=0, le=60, description="how long a foreign optimiser may think in a tick"
    )
    release_grace_s: float = Field(
        20.0, ge=0, le=600, description="until a released worker is killed"
    )

    signals: Path | None = Field(
        None, description="YAML file of sources beyond the router: Prometheus queries, engines"
    )
    prometheus_token: str = Field(
        default="", repr=False, description="bearer token for Prometheus; better as a variable"
    )

    def reached_at(self, listening: str) -> str:
        """Where people reach this planner, given where it listens.

        One that listens everywhere is reached by its machine's name.
        """
        everywhere = self.host in {"", "0.0.0.0", "::"}
        port = listening.rpartition(":")[2]
        return self.advertise or (f"{socket.gethostname()}:{port}" if everywhere else listening)

    def first_sources(self, model: str, clock: Clock) -> SignalSources | None:
        """The sources of the given file; without a router there must be some.

        Raises:
            InvalidField: a wrong field in it, or an actuator whose workers nobody would drain.
        """
        alone = not self.router
        if self.signals is None:
            if alone:
                remedy = "give --router HOST:PORT, or --signals FILE where gateways are not ours"
                raise InvalidField("router", "", remedy)
            return None
        if alone and self.actuator:
            remedy = "leave it away: without a router nobody drains, and the planner only advises"
            raise InvalidField("actuator", self.actuator, remedy)
        found = load_signals(self.signals)
        return make_sources(
            found, model=model, clock=clock, alone=alone, token=self.prometheus_token
        )

    def first_policy(self) -> Policy:
        """The policy of the given file.

        Raises:
            InvalidField: no file, or a wrong field in it.
        """
        if self.policy is None:
            raise InvalidField("policy", "", "give --policy FILE.yaml or READYPLANE_POLICY")
        return load_policy(self.policy)


async def adopt_first(service: PlannerService, policy: Policy) -> None:
    """Make the policy of the file the next version, unless it is in force.

    One that would turn back the roll-out under way is told of, and the last one stays until the file
    changes: a planner that starts again moves nothing by it.
    """
    try:
        await service.adopt(policy)
    except Refused as error:
        text = f"policy file: {error}; the last good policy stays in force"
        service.tell_policy_error(text)
        log.error(text)


def watchers(settings: Settings, service: PlannerService, clock: Clock) -> list[Background]:
    """What looks after the policy file."""
    if settings.policy is None or not settings.policy_watch_s:
        return []
    watched = PolicyFile(
        settings.policy,
        adopt=service.adopt,
        tell=service.tell_policy_error,
        clock=clock,
        every_s=settings.policy_watch_s,
    )
    return [watched.run]


async def main(settings: Settings) -> None:
    """Serve until told to stop."""
    setup_logging("planner", settings.log_level)
    settings.need("database_url", "redis_url", "registry")
    policy, clock = settings.first_policy(), SystemClock()
    beyond = settings.first_sources(policy.model, clock)
    await migrate(settings.database_url, "readyplane_planner")
    engine, client = async_engine(settings.database_url), connect(settings.redis_url)
    router = RouterClient(settings.router, settings.token) if settings.router else None
    actuator = ActuatorClient(settings.actuator, settings.token) if settings.actuator else None
    registry = RegistryClient(settings.registry, settings.token)
    try:
        await check_eviction(client)
        life = secrets.token_hex(6)
        leadership = Leadership(
            RedisLeaseStore(client),
            name=policy.model,
            holder=life,
            ttl_s=settings.leader_ttl_s,
            now_s=clock.monotonic_s,
        )
        service = PlannerService(
            policy=policy,
            # The two methods that it has are all that the planner asks of a router.
            router=router or cast("Router", NoRouter()),
            actuator=actuator,
            registry=registry,
            journal=PostgresJournal(engine),
            leadership=leadership,
            clock=clock,
            make_id=lambda: secrets.token_hex(4),
            metrics=PlannerMetrics(metrics),
            upkeep=Upkeep(
                sample_every_s=settings.sample_every_s,
                keep_decisions=settings.keep_decisions,
                keep_s=settings.keep_days * DAY_S,
                release_grace_s=settings.release_grace_s,
                optimiser_s=settings.optimiser_s,
            ),
            beyond=beyond,
        )
        await service.begin()
        server = ServiceServer("planner", settings)

        async def lead() -> None:
            # Where it is reached is known once the ports are bound.
            leadership.holder = named(settings.reached_at(server.grpc_address), life)
            await service.run()

        background: list[Background] = [lead]
        if settings.policy_again:
            await adopt_first(service, policy)
            background += watchers(settings, service, clock)
        server.add_grpc(lambda grpc_server: rpc.register(grpc_server, service), rpc.FULL_NAME)
        server.app.include_router(api.routes(service, server.stopping))
        api.mount_page(server.app)
        await server.run(background=background, on_stop=service.aclose)
    finally:
        for port in (router, actuator, registry, beyond):
            if port is not None:
                await port.aclose()
        await client.aclose()
        await engine.dispose()


def run() -> None:
    """Entry of the process."""
    run_service(
        lambda: main(
            parse_settings(
                Settings,
                sys.argv[1:],
                "python -m readyplane_planner",
                "The planner: how many prefill and decode workers there should be, and why.",
            )
        )
    )


if __name__ == "__main__":
    run()
