"""`python -m readyplane_registry`: the registry as a process.

Owns the wiring of stores, use-cases and ports; everything it wires is tested without it.
"""

from __future__ import annotations

import logging
import random
import secrets
import sys
from pathlib import Path

from pydantic import Field

from readyplane.core.errors import InvalidField, Unavailable
from readyplane.kit.clock import Clock, SystemClock
from readyplane.kit.database import async_engine, migrate
from readyplane.kit.redis import check_eviction, connect
from readyplane.kit.server import ServiceServer, run_service
from readyplane.kit.settings import ServiceSettings, parse_settings
from readyplane.kit.signing import TrustFile
from readyplane.kit.telemetry import metrics, setup_logging
from readyplane_registry import api, rpc
from readyplane_registry.blob_files import FileBlobs
from readyplane_registry.blob_http import BlobRoutes
from readyplane_registry.blob_objects import ObjectBlobs
from readyplane_registry.blob_urls import open_store, removal_of
from readyplane_registry.blobs import ByteStore
from readyplane_registry.collecting import Collecting
from readyplane_registry.fetching import RegistryPolicy, Tally
from readyplane_registry.metrics import PrometheusTally
from readyplane_registry.postgres import PostgresCatalog
from readyplane_registry.postgres_keeping import PostgresKeeping
from readyplane_registry.redis import RedisLive
from readyplane_registry.retention import DAY_S, RetentionPolicy
from readyplane_registry.service import RegistryService

WATCH_EVERY_S = 5.0
STORE_ASKED_EVERY_S = 15.0
OBJECTS_ASKED_EVERY_S = 5.0
log = logging.getLogger(__name__)


class Settings(ServiceSettings):
    """What the registry is told beside what every service is."""

    blob_dir: Path | None = Field(None, description="folder of the byte store [DATA_DIR/blobs]")
    blob_store: str = Field(
        "",
        description="or its URL: file:///, mount:///, s3://BUCKET/PREFIX?endpoint=…, gs://, az://",
    )
    advertise_url: str = Field("", description="http://host:port where workers reach this registry")
    storage_name: str = Field(
        "registry", description="one byte store, one name, however many serve"
    )
    source_ttl_s: float = Field(15.0, ge=1, le=3600, description="an announcement counts so long")
    transfer_ttl_s: float = Field(
        15.0, ge=1, le=3600, description="a reader's place counts so long"
    )
    storage_readers_max: int = Field(8, ge=1, le=1024, description="readers of the byte store")

    trust_file: Path | None = Field(
        None, description="whose signatures models need (JSON), read again when it changes"
    )
    keep_untagged_days: float = Field(
        30.0, ge=0, le=36_500, description="an artifact without a tag outlives its last use by this"
    )
    keep_history_days: float = Field(
        30.0, ge=0, le=36_500, description="a tag's earlier targets are kept this long"
    )
    collect_grace_s: float = Field(
        3600.0, ge=60, le=30 * DAY_S, description="bytes outlive what made them needless by this"
    )
    upload_ttl_s: float = Field(
        900.0, ge=10, le=DAY_S, description="bytes of an upload are held this long unless renewed"
    )

    def retention(self) -> RetentionPolicy:
        """How long what is kept."""
        return RetentionPolicy(
            keep_untagged_s=self.keep_untagged_days * DAY_S,
            keep_history_s=self.keep_history_days * DAY_S,
            grace_s=self.collect_grace_s,
        )

    def blobs(self, clock: Clock, tally: Tally) -> ByteStore:
        """The byte store. Raises InvalidField when none is given, or a folder can't be written."""
        if self.blob_store and self.blob_dir:
            raise InvalidField("blob_dir", str(self.blob_dir), "give --blob-store or --blob-dir")
        if self.blob_store:
            return open_store(self.blob_store, clock=clock, random=random.random, tally=tally)
        folder = self.blob_dir or (self.data_dir and self.data_dir / "blobs")
        if not folder:
            raise InvalidField("blob_dir", "", "give --blob-dir, or --blob-store for another kind")
        return FileBlobs(folder)


class StoreState:
    """Whether the byte store answers; each change is logged once.

    A store that has never answered (wrong credentials, wrong bucket) makes the registry not ready.
    One that did, and is away now, leaves it ready: names and peers are answered without it.

    Attributes:
        why: what it said when it was asked last; empty when it answered.
        answered: it has, since this process began.
    """

    def __init__(self, blobs: ByteStore) -> None:
        self._blobs, self._said = blobs, False
        self.why, self.answered = "", False

    async def ask(self) -> None:
        """Ask for a blob that nobody has: an answer is one."""
        before = self.why
        try:
            await self._blobs.length("sha256:" + "0" * 64)
        except Unavailable as error:
            self.why = str(error)
            if not before:
                log.error("the byte store cannot be asked", extra={"why": self.why})
            return
        self.why, self.answered = "", True
        if before or not self._said:
            self._said = True
            store = {"store": self._blobs.name, "tier": str(self._blobs.tier)}
            log.info("byte store", extra=store)

    async def watch(self, clock: Clock) -> None:
        """Ask on and on; apart from the readiness, which must not wait for an object store."""
        while True:
            await clock.sleep(STORE_ASKED_EVERY_S)
            await self.ask()


async def watch(
    service: RegistryService,
    server: ServiceServer,
    tally: PrometheusTally,
    clock: Clock,
    stored: StoreState,
) -> None:
    """Keep the gauges and the readiness: without Postgres nothing new can be answered."""
    while True:
        why, ok = stored.why, stored.answered
        try:
            tally.live(*await service.counts())
        except Unavailable as error:
            why = f"degraded, only storage is offered as a source: {error}"
        try:
            await service.list_page(limit=1)
        except Unavailable as error:
            why, ok = str(error), False
        server.set_ready(ok, why)
        await clock.sleep(WATCH_EVERY_S)


async def main(settings: Settings) -> None:
    """Serve until told to stop."""
    settings.need("database_url", "redis_url")
    tally, clock = PrometheusTally(metrics), SystemClock()
    blobs = settings.blobs(clock, tally)
    await migrate(settings.database_url, "readyplane_registry")
    engine, client = async_engine(settings.database_url), connect(settings.redis_url)
    try:
        await check_eviction(client)
        server = ServiceServer("registry", settings)
        stored = StoreState(blobs)
        await stored.ask()
        if settings.host in {"0.0.0.0", "::"} and not settings.advertise_url:
            log.warning("workers elsewhere cannot reach the byte store: give --advertise-url")
        policy = RegistryPolicy(
            source_ttl_s=settings.source_ttl_s,
            transfer_ttl_s=settings.transfer_ttl_s,
            storage_readers_max=settings.storage_readers_max,
            storage_tier=blobs.tier,
            storage_asked_every_s=OBJECTS_ASKED_EVERY_S if isinstance(blobs, ObjectBlobs) else 0.0,
        )
        store, live = PostgresCatalog(engine), RedisLive(client, weight=policy.ranking.weight)
        service = RegistryService(
            store=store,
            live=live,
            blobs=blobs,
            clock=clock,
            make_id=lambda: secrets.token_hex(12),
            storage_url=lambda: (
                (settings.advertise_url or server.http_url).rstrip("/") + "/v1/blobs"
            ),
            name=settings.storage_name,
            policy=policy,
            tally=tally,
            trust=TrustFile(settings.trust_file).policy,
            collecting=Collecting(
                store=store,
                keeping=PostgresKeeping(engine),
                live=live,
                removal=removal_of(blobs, clock),
                clock=clock,
                policy=settings.retention(),
                hold_ttl_s=settings.upload_ttl_s,
                tally=tally,
            ),
        )
        server.app.include_router(BlobRoutes(service, blobs, tally).router)
        server.app.include_router(api.routes(service))
        server.add_grpc(lambda grpc_server: rpc.register(grpc_server, service), rpc.FULL_NAME)
        await server.run(
            [
                lambda: watch(service, server, tally, clock, stored),
                lambda: stored.watch(clock),
            ]
        )
    finally:
        await client.aclose()
        await engine.dispose()


async def from_command_line() -> None:
    """Settings, logging, then `main`."""
    settings = parse_settings(
        Settings,
        sys.argv[1:],
        "python -m readyplane_registry",
        "Artifacts by digest, tags that point at them, and who holds the bytes now.",
    )
    setup_logging("registry", settings.log_level)
    await main(settings)


if __name__ == "__main__":
    run_service(from_command_line)
