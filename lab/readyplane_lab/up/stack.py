"""The whole local stack: data folder, stores, services, actuator, model, address book.

Owns the order of starting and stopping, and that nothing stays behind whatever happens between.
Hands a running `Stack` to `readyplane_lab.up.run`.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from readyplane.client import PlannerClient, RegistryClient
from readyplane.core.errors import InvalidField
from readyplane.kit.clock import Clock
from readyplane_lab.up import actuator_rpc
from readyplane_lab.up.actuator import LocalActuator, WorkerPlace
from readyplane_lab.up.address_book import AddressBook, remove_book, write_book
from readyplane_lab.up.demo_policy import ClassProfiles, learn, ranks_of
from readyplane_lab.up.folder import DataFolder, sweep_abandoned
from readyplane_lab.up.local_server import free_port
from readyplane_lab.up.model import publish_model
from readyplane_lab.up.options import UpOptions
from readyplane_lab.up.pids import start_mark
from readyplane_lab.up.processes import ProcessTable
from readyplane_lab.up.services import Service, Services
from readyplane_lab.up.serving import Choice, Serving
from readyplane_lab.up.stores import Stores, connect_or_embed

RELEASE_GRACE_S = 20.0


@dataclass(slots=True)
class Stack:
    """A running stack."""

    options: UpOptions
    folder: DataFolder
    table: ProcessTable
    stores: Stores
    services: Services
    actuator: LocalActuator
    book: AddressBook
    serving: Serving
    failed: asyncio.Future[str]

    @property
    def page_url(self) -> str:
        """The page, with the token in the fragment (never sent to a server)."""
        return f"{self.book.planner_http}/#token={self.book.token}"

    async def end_ordering(self) -> None:
        """Nothing is ordered, drained or turned any more, from this call on; requests are served on.

        The actuator refuses at once, whatever is under way; the planner is gone on return.
        """
        self.actuator.take_no_more()
        await self.services.stop("planner")


@asynccontextmanager
async def running_stack(
    options: UpOptions,
    *,
    clock: Clock,
    say: Callable[[str], None],
    stop: asyncio.Event | None = None,
) -> AsyncIterator[Stack]:
    """Start everything; stop everything at the end, in the order that loses nothing.

    Args:
        options: what was asked. clock: real time. say: told one sentence a step.
        stop: once set, no further step of the start is taken.

    Raises:
        StartInterrupted: `stop` was set while starting; everything started has been stopped.
        InvalidField: a setting cannot work. Unavailable: a store or service did not start.
    """
    for port, name in (
        (options.page_port, "--page-port"),
        (options.gateway_port, "--gateway-port"),
    ):
        _check_port(port, name)
    choice = Choice(options)
    async with AsyncExitStack() as rooms:
        for path in await sweep_abandoned():
            say(f"removed what a killed run left in {path}")
        folder = rooms.enter_context(DataFolder.open(options.data_dir))
        for name in await folder.recover():
            say(f"ended what a killed run left: {name}")
        folder.guard()
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[str] = loop.create_future()

        def gave_up(why: str) -> None:
            if not failed.done():
                failed.set_result(why)

        def exited(name: str, returncode: int) -> None:
            services.exited(name, returncode)
            actuator.exited(name, returncode)

        table = await rooms.enter_async_context(ProcessTable(folder.run, on_exit=exited))
        token = secrets.token_hex(16)
        say(_stores_sentence(options))
        environment = _environment(options, token)
        making = asyncio.create_task(
            choice.serving(folder, table=table, environment=environment, clock=clock, say=say)
        )
        rooms.push_async_callback(_call_off, making)
        stores = await rooms.enter_async_context(
            await connect_or_embed(
                folder.pg,
                folder.redis,
                database_url=options.database_url or None,
                redis_url=options.redis_url or None,
                fsync=not folder.temporary,
                logs_dir=folder.logs,
                gave_up=gave_up,
            )
        )
        # Agents ask services, and never the stores: they are not told their passwords.
        of_services = {
            **environment,
            "READYPLANE_DATABASE_URL": stores.database_url,
            "READYPLANE_REDIS_URL": stores.redis_url,
        }
        services = Services(
            table,
            run_dir=folder.run,
            logs_dir=folder.logs,
            environment=of_services,
            clock=clock,
            gave_up=gave_up,
            stores_whole=stores.whole,
        )
        registry = services.plan("registry", args=("--blob-dir", str(folder.blobs)))
        routers, lean_addresses = _plan_routers(services, options, folder)
        router_addresses = ",".join(router.grpc for router in routers)
        profile_of = ClassProfiles()
        policy_file = folder.run / "policy.json"
        planner = services.plan(
            "planner",
            http_port=options.page_port,
            args=("--policy", str(policy_file), *_policy_flags(options)),
        )
        asked = PlannerClient(planner.grpc, token=token)
        gateway = services.plan("gateway", http_port=options.gateway_port)
        gateway.environment["READYPLANE_ROUTER_PICKS"] = lean_addresses
        actuator = LocalActuator(
            table,
            WorkerPlace(
                registry=registry.grpc,
                router=lean_addresses,  # all that agents call is there, for less
                work_dir=folder.cache / "workers",
                log_dir=folder.logs,
                environment={**environment, **choice.environment()},
                engine=options.engine,
                agent_args=("--cache-dir", str(folder.cache / "node"), *choice.agent_args()),
                workers_max=options.workers_max,
            ),
            clock=clock,
            profile_of=profile_of,
            ranks_of=ranks_of(profile_of),
            learn=partial(learn, profile_of, await rooms.enter_async_context(aclosing(asked))),
        )
        actuator_address = f"127.0.0.1:{free_port()}"
        server = await actuator_rpc.serve(actuator, address=actuator_address, token=token)
        rooms.push_async_callback(server.stop, 1.0)
        for service in (*routers, planner, gateway):
            service.environment.update(
                READYPLANE_REGISTRY=registry.grpc,
                READYPLANE_ROUTER=router_addresses,
                READYPLANE_PLANNER=planner.grpc,
                READYPLANE_ACTUATOR=actuator_address,
            )
        rooms.push_async_callback(_stop_in_order, services, actuator, say)
        _go_on(stop)
        say("starting registry, router and gateway")
        await asyncio.gather(*(services.start(s) for s in (registry, *routers, gateway)))
        serving = await _unless_stopped(making, stop)
        profile_of.take(serving.policy)
        policy_file.write_text(json.dumps(serving.policy))
        say("publishing the model")
        client = RegistryClient(registry.grpc, token=token)
        try:
            digest = await publish_model(client, serving.model, http=registry.http, token=token)
        finally:
            await client.aclose()
        _go_on(stop)
        say(f"published {serving.model.tag} as {digest[:19]}…; starting the planner")
        await services.start(planner)
        book = AddressBook(
            pid=os.getpid(),
            mark=start_mark(os.getpid()) or "",
            registry=registry.grpc,
            router=router_addresses,
            planner=planner.grpc,
            actuator=actuator_address,
            registry_http=registry.http,
            router_http=routers[0].http,
            planner_http=planner.http,
            gateway_http=gateway.http,
            token=token,
            model=serving.model.name,
            data_dir=str(folder.path),
            logs_dir=str(folder.logs),
        )
        write_book(book)
        rooms.callback(remove_book, os.getpid())
        yield Stack(options, folder, table, stores, services, actuator, book, serving, failed)


class StartInterrupted(Exception):
    """The start was called off between two of its steps."""


def _go_on(stop: asyncio.Event | None) -> None:
    if stop is not None and stop.is_set():
        raise StartInterrupted


async def _unless_stopped(making: asyncio.Task[Serving], stop: asyncio.Event | None) -> Serving:
    """What is made, or StartInterrupted as soon as the start is called off."""
    stopping = asyncio.ensure_future((stop or asyncio.Event()).wait())
    try:
        await asyncio.wait({making, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
    _go_on(stop)
    return await making


async def _call_off(making: asyncio.Task[Serving]) -> None:
    making.cancel()
    await asyncio.wait({making})


def _stores_sentence(options: UpOptions) -> str:
    own = [
        name
        for name, given in (("PostgreSQL", options.database_url), ("Valkey", options.redis_url))
        if not given
    ]
    return f"starting {' and '.join(own)}" if own else "using the given stores"


async def _stop_in_order(
    services: Services, actuator: LocalActuator, say: Callable[[str], None]
) -> None:
    """Planner first (nothing is ordered any more), then gateway, workers, router, registry."""
    say("stopping: planner, gateway, workers, router, registry, stores")
    await services.stop("planner")
    await services.stop("gateway")
    await actuator.release_all(grace_s=RELEASE_GRACE_S, reason="the run ends")
    await services.close()


def _environment(options: UpOptions, token: str) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("READYPLANE_", "OTEL_"))
    }
    return {
        **kept,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "READYPLANE_TOKEN": token,
        "READYPLANE_OTLP_ENDPOINT": options.otlp_endpoint,
        "READYPLANE_LOG_LEVEL": options.log_level,
    }


def _policy_flags(options: UpOptions) -> tuple[str, ...]:
    """A policy that was set in a kept folder stays, unless another one is asked for."""
    asked = options.policy_file is not None or options.quick
    return () if asked else ("--no-policy-again",)


def _plan_routers(
    services: Services, options: UpOptions, folder: DataFolder
) -> tuple[list[Service], str]:
    """The routers, and the addresses of their lean ports."""
    args: tuple[str, ...] = ()
    if options.router_policy is not None:
        path = folder.run / "router-policy.json"
        path.write_text(json.dumps(options.router_policy))
        args = ("--policy-file", str(path))
    more = [f"router-{number}" for number in range(2, options.routers + 1)]
    ports = [free_port() for _ in range(options.routers)]
    planned = [
        services.plan(name, module="router", args=(*args, "--pick-port", str(port)))
        for name, port in zip(("router", *more), ports, strict=True)
    ]
    return planned, ",".join(f"127.0.0.1:{port}" for port in ports)


def _check_port(port: int, option: str) -> None:
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise InvalidField(
                option, port, f"give a free port, or 0 for any ({error.strerror})"
            ) from error
