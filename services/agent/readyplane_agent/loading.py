"""The weights of one start: which artifact, whose bytes, in which memory, and the word that they are right.

Owns the questions to the registry, the loader of a start, the last check before an engine may have
the weights (R10.3), and what the node's cache keeps of them. `starting` says when.
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

from readyplane.core.errors import IdentityMismatch, InvalidField, Refused, Unavailable
from readyplane.core.identity import CANARY_REMEDY, Manifest
from readyplane.kit.clock import Clock
from readyplane.ports import FetchPlan, Registry
from readyplane_agent import probes
from readyplane_agent.arena import Arena
from readyplane_agent.cache import WeightCache
from readyplane_agent.dead_end import CANARY
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.loader import Loader
from readyplane_agent.mapped_memory import MappedMemory, files_of
from readyplane_agent.nixl_way import Transport
from readyplane_agent.patience import Patient
from readyplane_agent.pipeline import staging_share
from readyplane_agent.reading import Reader
from readyplane_agent.settings import AgentSettings
from readyplane_agent.trace import StartTrace
from readyplane_agent.vouching import refuse_untrusted

log = logging.getLogger("agent.start")

CHECKPOINT_ENGINES = ("sglang",)


class Loading:
    """What a start does about its weights.

    Args:
        settings, incarnation: who this is. registry: None for an attached engine without one.
        cache: the node's. patient: how services are asked.
    """

    def __init__(
        self,
        settings: AgentSettings,
        *,
        incarnation: str,
        registry: Registry | None,
        cache: WeightCache | None,
        clock: Clock,
        patient: Patient,
    ) -> None:
        self._s, self._incarnation, self._cache = settings, incarnation, cache
        self._registry_or_none, self._clock, self._patient = registry, clock, patient

    @property
    def registry(self) -> Registry:
        """The registry. Raises InvalidField without one."""
        if self._registry_or_none is None:
            raise InvalidField("--registry", "", "give the registry's address")
        return self._registry_or_none

    async def manifest(self) -> Manifest:
        """What was ordered.

        Raises:
            IdentityMismatch: the registry has something else under that digest, or of another model.
            Refused: it has no known answer, so no worker of it is ever admitted; said before a byte
            is loaded. WrongSetting: there is no room for its chunks.
        """
        return self._fitting(await self._patient(self._asked))

    async def look_ahead(self) -> None:
        """Whether this agent can serve what was ordered, told while it loads nothing yet.

        A registry that is away says so when the start begins. Raises as `manifest`.
        """
        try:
            self._fitting(await self._asked())
        except (Unavailable, TimeoutError) as error:
            log.info("what was ordered is looked at when it is loaded: %s", error)

    async def _asked(self) -> Manifest:
        if not self._s.manifest:
            return await self.registry.resolve(self._s.model)
        return await self.registry.get_manifest(self._s.manifest)

    def _fitting(self, found: Manifest) -> Manifest:
        if not self._s.manifest:
            return _loadable(found, self._s)
        if found.digest != self._s.manifest:
            raise IdentityMismatch(
                "manifest",
                [f"digest: {found.digest} != {self._s.manifest}"],
                "ask the registry's owner",
            )
        if found.model != self._s.model:
            raise IdentityMismatch(
                "manifest", [f"model: {found.model} != {self._s.model}"], "order the right artifact"
            )
        return _loadable(found, self._s)

    async def vouched(self, manifest: Manifest) -> str:
        """Who vouches for it. Raises Refused when nobody does who has to."""
        return await self._patient(
            lambda: refuse_untrusted(
                manifest,
                registry=self.registry,
                trust_file=self._s.trust_file,
                clock=self._clock,
            )
        )

    async def plan(self, manifest: Manifest) -> FetchPlan:
        """Who could give its bytes."""
        return await self._patient(
            lambda: self.registry.plan_fetch(
                manifest.digest,
                worker_id=self._s.worker_id,
                incarnation=self._incarnation,
                node=self._s.node,
            )
        )

    def loader(self, arena: Arena, trace: StartTrace) -> Loader:
        """Brings them into the arena, within this process's share of the node's staging."""
        manifest = arena.manifest
        if self._s.transport == "nixl" and not arena.whole_files:
            log.warning("weights of %d ranks come over TCP, not NIXL", arena.world)
        return Loader(
            arena,
            registry=self.registry,
            clock=self._clock,
            reader=Reader(self._s.worker_id, self._incarnation, self._s.node),
            trace=trace,
            cache=self._cache,
            staging_bytes=staging_of(self._s, manifest),
            connections=self._s.read_connections,
            limit_s=self._s.fetch_limit_s,
            token=self._s.token,
            # NIXL writes to an arena's memory, and a chunk for several ranks is cut after it came.
            transport=(
                Transport(self._s.transport, self._s.nixl_python)
                if arena.whole_files
                else Transport()
            ),
        )

    async def verify(self, arena: Arena, spec: EngineSpec) -> None:
        """Seal, check coverage and rank ownership, and only then let the engine have it (R10.3).

        The engine waits for the tensor table, which is therefore written last.
        """
        manifest = arena.manifest
        arena.seal()
        missing = await asyncio.to_thread(probes.missing_tensors, arena, ranks=self._s.tp)
        if missing:
            raise IdentityMismatch("weights", missing[:8], "publish the artifact again")
        if self._s.engine in CHECKPOINT_ENGINES:
            # These read a folder; until they map the arena themselves the bytes are copied.
            for entry in manifest.files:
                if entry.purpose == "weights":
                    await asyncio.to_thread(
                        write_whole, self._s.work_dir / "files" / entry.path, arena.view(entry.path)
                    )
        tables = arena.tables()
        tables[0].update(files_of(arena, tables[0]["arena_bytes"]))
        paths = (spec.tensor_table_path, *(rank.tensor_table_path for rank in spec.ranks))
        for path, table in zip(paths, tables, strict=True):
            write_whole(path, json.dumps(table).encode())

    async def keep(self, arena: Arena) -> None:
        """Let the node's cache have the files, if it has not; beside the start."""
        cache = self._cache
        if isinstance(arena.memory, MappedMemory):
            return  # it is the cache's own
        if cache is None or cache.holds(arena.manifest):
            return
        try:
            written = await asyncio.to_thread(cache.store, arena)
            if written:
                log.info("weight cache: %.1f MB written", written / 1e6)
        except (OSError, IdentityMismatch) as error:
            log.warning(
                "weight cache %s not written: %s; the worker serves, the next start here reads"
                " from elsewhere",
                *(cache.folder, error),
            )


def staging_of(s: AgentSettings, manifest: Manifest) -> int:
    """Bytes that this agent may have read of an artifact and not verified yet.

    Raises:
        WrongSetting: no room for one chunk of it.
    """
    return staging_share(
        s.staging_bytes,
        node_bytes=s.staging_node_bytes,
        node_processes=s.node_processes,
        chunk_bytes=min(manifest.chunk_bytes, manifest.size_bytes),
    )


def _loadable(manifest: Manifest, s: AgentSettings) -> Manifest:
    if manifest.canary is None:
        raise Refused(CANARY, [f"{manifest.digest} has no known answer"], CANARY_REMEDY)
    staging_of(s, manifest)
    return manifest


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Whole or not at all: whoever sees the name sees all bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    part.replace(path)
