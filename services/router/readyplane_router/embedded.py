"""The router's brain inside another process, a gateway's: one more replica over the same Redis.

Owns the composition of such a replica from the same parts as `__main__`. It follows the fleet and
the KV locations as every router does and reserves at the same store; it holds no worker's session,
so that it needs no epochs: nobody can register with it.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from readyplane.core.errors import Unsupported
from readyplane.kit.clock import Clock
from readyplane.kit.redis import check_eviction, connect
from readyplane.kit.telemetry import Metrics
from readyplane_router.admission import Manifests
from readyplane_router.given import read_policy, read_profiles, started
from readyplane_router.metrics import RouterCollector
from readyplane_router.redis import RedisStore
from readyplane_router.service import RouterService

TAKES_WITHIN_S = 0.002
"""Who embeds a router hears of a pair before it is reserved and begins: nothing waits for this."""


class NoLeases:
    """Epochs of a replica with which nobody registers: the first one starts its view's versions."""

    def __init__(self) -> None:
        """Nothing given yet."""
        self._begun = False

    async def next(self) -> int:
        """1 once, for the versions of the view; leases are granted by routers alone.

        Raises:
            Unsupported: a lease, or a group, is to be stamped.
        """
        if self._begun:
            raise Unsupported("an embedded router grants no leases", "register with a router")
        self._begun = True
        return 1


class EmbeddedRouter:
    """A replica and its store, made once a process; `start` before use, `run` beside it."""

    def __init__(
        self,
        *,
        redis_url: str,
        policy_file: Path | None,
        profiles_dir: Path | None,
        registry: Manifests | None,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        """Nothing is connected yet.

        Raises:
            InvalidField: an address, the policy or a profile.
        """
        self._client = connect(redis_url)
        self._store = RedisStore(self._client, takes_within_s=TAKES_WITHIN_S)
        self._metrics = metrics
        self.service = RouterService(
            store=self._store,
            epochs=NoLeases(),
            clock=clock,
            registry=registry,
            profiles=read_profiles(profiles_dir),
            incarnation=f"gateway-{secrets.token_hex(6)}",
            policy=read_policy(policy_file),
        )

    async def start(self) -> None:
        """Take over what the store knows.

        Raises:
            Refused: the store may evict what is alive. Unavailable: it does not answer.
        """
        await check_eviction(self._client)
        await started(self.service)
        self._metrics.register(RouterCollector(self.service))

    async def run(self) -> None:
        """Follow the store; endless."""
        await self.service.run()

    async def aclose(self) -> None:
        """Tell of the end, and close; reservations still open run out at the store."""
        await self.service.aclose()
        await self._store.aclose()
