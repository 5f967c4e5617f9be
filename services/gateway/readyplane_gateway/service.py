"""The gateway as a whole: its parts, its background work and its end.

Owns the composition and what is asked beside requests (models, health). The HTTP side is `api`, the
way of one request is `proxy`; the fleet comes from the router's watch, the names of published
models from the registry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

from readyplane.core.errors import ReadyplaneError, Unavailable
from readyplane.kit.clock import Clock
from readyplane.kit.telemetry import Metrics
from readyplane.ports import Mover, Registry, Router
from readyplane_gateway.ahead import RouteAhead
from readyplane_gateway.bounds import Bounds
from readyplane_gateway.engine_http import EngineHttp
from readyplane_gateway.fleet import FleetView, RouterRefuses
from readyplane_gateway.legs import Legs
from readyplane_gateway.local_tokens import LocalTokens
from readyplane_gateway.metrics import OTHER, Meters
from readyplane_gateway.moves import Moves
from readyplane_gateway.proxy import Proxy
from readyplane_gateway.reporter import Reporter
from readyplane_gateway.tokens import Tokens

PUBLISHED_EVERY_S = 15.0
REGISTRY_S_MAX = 5.0
HEALTH_REMEMBERED_S = 1.0
ROUTER_PING_S_MAX = 1.0
WATCH_PAUSE_S_MAX = 2.0
WATCH_REFUSED_S_MAX = 10.0  # then whoever refuses is taken at its word
DRAIN_S_MAX = 5.0
FLUSH_AT_END_S = 2.0
LATER_S_MAX = 1.0

log = logging.getLogger(__name__)


class Gateway:
    """All parts, made once a process."""

    def __init__(
        self,
        *,
        router: Router,
        registry: Registry | None,
        clock: Clock,
        bounds: Bounds,
        metrics: Metrics,
        show_pair: bool = True,
        engine_token: str = "",
        route_ahead: RouteAhead | None = None,
        mover: Mover | None = None,
        tokenizers_dir: Path | None = None,
    ) -> None:
        """`route_ahead`: `route` of a router in this process, which tells of pairs early. `mover`:
        who finds another worker for a request on one that drains; None lets them finish there.
        `tokenizers_dir`: see `LocalTokens.read`.
        """
        self.bounds = bounds
        self.clock = clock
        self.meters = Meters(metrics)
        self._router = router
        self._registry = registry
        self.engines = EngineHttp(
            clock, connections_max=bounds.connections_max, connect_s_max=bounds.connect_s_max
        )
        legs = Legs(self.engines, bounds, engine_token)
        self.reporter = Reporter(router, clock, self.meters)
        moves = Moves(
            mover,
            legs=legs,
            clock=clock,
            after_s=bounds.move_after_s,
            meters=self.meters,
            later=self._do_later,
        )

        def gone(worker_id: str, incarnation: str) -> None:
            legs.worker_gone(worker_id, incarnation)
            moves.gone(worker_id, incarnation)

        self.fleet = FleetView(gone=gone, drains=moves.drains)
        self.proxy = Proxy(
            router=router,
            clock=clock,
            bounds=bounds,
            fleet=self.fleet,
            tokens=Tokens(
                self.engines,
                bounds,
                self.meters,
                local=LocalTokens.read(tokenizers_dir, self.meters)
                if tokenizers_dir is not None
                else LocalTokens.none(self.meters),
                later=self._do_later,
            ),
            legs=legs,
            reporter=self.reporter,
            meters=self.meters,
            show_pair=show_pair,
            later=self._do_later,
            route_ahead=route_ahead,
            moves=moves,
        )
        self.tell_why: Callable[[str], None] = lambda _: None  # it is not ready for ever
        self.requests: set[asyncio.Task[object]] = set()
        self.meters.in_flight.set_function(lambda: len(self.requests))
        self.stopping = False
        self._known = asyncio.Event()
        self._idle = asyncio.Event()
        self._later: set[asyncio.Task[None]] = set()
        self._healthy = (-HEALTH_REMEMBERED_S, "never asked")

    # ------------------------------------------------------------------ background

    async def watch_fleet(self) -> None:
        """Follow the fleet for ever; a router that goes away is waited for.

        One that refuses to tell it (a pick port, a wrong token) is asked on, but after
        `WATCH_REFUSED_S_MAX` requests are told so and not to come again.
        """
        pause_s, refused_s = 0.0, None
        while True:
            try:
                async with aclosing(self._router.watch()) as fleets:  # type: ignore[type-var]
                    async for fleet in fleets:
                        self.fleet.apply(fleet)
                        self._known.set()
                        self.engines.keep_only(self.fleet.engine_urls())
                        pause_s = 0.0
            except Unavailable as error:
                refused_s = None
                log.warning("the fleet cannot be watched: %s", error)
            except ReadyplaneError as error:
                now_s = self.clock.monotonic_s()
                refused_s = now_s if refused_s is None else refused_s
                self._refused(str(error), now_s - refused_s)
            pause_s = min(WATCH_PAUSE_S_MAX, max(0.1, pause_s * 2))
            await self.clock.sleep(pause_s)

    def _refused(self, why: str, for_s: float) -> None:
        log.warning("the router refuses to tell the fleet: %s", why)
        if for_s >= WATCH_REFUSED_S_MAX and not self.fleet.applied and not self.fleet.refused:
            self.fleet.refused = why
            error = RouterRefuses(why)
            log.error("requests are refused for good: %s", error)
            self.tell_why(str(error))

    async def fleet_known(self) -> None:
        """Return when the first snapshot of the fleet has been applied (B51)."""
        await self._known.wait()

    async def watch_published(self) -> None:
        """Ask the registry now and then which models there are, served or not."""
        while self._registry is not None:
            try:
                async with asyncio.timeout(REGISTRY_S_MAX):
                    found = await self._registry.list_manifests(kind="weights")
                self.fleet.publish(summary.model for summary in found)
            except (ReadyplaneError, TimeoutError) as error:
                log.info("the registry does not answer", extra={"why": str(error)})
            await self.clock.sleep(PUBLISHED_EVERY_S)

    async def tell_router(self) -> None:
        """Send facts for ever."""
        await self.reporter.run()

    # ------------------------------------------------------------------ requests

    def enter(self, task: asyncio.Task[object]) -> bool:
        """Count a request in; False when there are too many already."""
        if len(self.requests) >= self.bounds.requests_max:
            return False
        self.requests.add(task)
        return True

    def leave(self, task: asyncio.Task[object]) -> None:
        """Count a request out."""
        self.requests.discard(task)
        if not self.requests:
            self._idle.set()

    def label(self, model: str) -> str:
        """The model as a metric's label: names that clients make up count as one (B159)."""
        return model if self.fleet.knows(model) else OTHER

    async def unhealthy(self) -> str:
        """Why requests cannot be served, empty when they can: fleet known, router reachable (B51)."""
        if self.stopping:
            return "stopping"
        if not self.fleet.applied:
            if self.fleet.refused:
                return str(RouterRefuses(self.fleet.refused))
            return "the router has not sent the fleet yet"
        asked_s, why = self._healthy
        now_s = self.clock.monotonic_s()
        if now_s - asked_s >= HEALTH_REMEMBERED_S:
            try:
                async with asyncio.timeout(ROUTER_PING_S_MAX):
                    await self._router.complete(())
                why = ""
            except (ReadyplaneError, TimeoutError) as error:
                why = f"the router does not answer ({str(error) or 'too slow'})"
            self._healthy = (now_s, why)
        return why

    # ------------------------------------------------------------------ end

    async def stop(self) -> None:
        """Let requests under way end for a while, cut off the rest, tell the router everything."""
        self.stopping = True
        if self.requests:
            self._idle.clear()
            try:
                async with asyncio.timeout(DRAIN_S_MAX):
                    await self._idle.wait()
            except TimeoutError:
                log.warning("cutting off requests", extra={"count": len(self.requests)})
                for task in tuple(self.requests):
                    task.cancel()
                await asyncio.wait(tuple(self.requests), timeout=1.0)
        if self._later:
            await asyncio.wait(tuple(self._later), timeout=LATER_S_MAX)
        await self.proxy.settle(LATER_S_MAX)
        if not await self.reporter.flush(FLUSH_AT_END_S):
            log.error("the router was not told", extra={"events": self.reporter.buffered})
        self.engines.close()

    def _do_later(self, work: Awaitable[object]) -> None:
        task = asyncio.ensure_future(_run(work))
        self._later.add(task)
        task.add_done_callback(self._later.discard)


async def _run(work: Awaitable[object]) -> None:
    try:
        await work
    except Exception:
        log.exception("work after a request failed")
