"""The KV-cache size of one start: taken over where it holds, measured and published where not (R16).

Owns the order: fingerprint, the registry's profile of exactly that, the verdict, and afterwards
what the engine made of it. A size that the engine refused, or did not start with, is withdrawn, so
that the next start measures. Nothing here fails a start. Handed to `starting`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from readyplane.core.compile_key import CompileKey, Seen, key_digest
from readyplane.core.errors import IdentityMismatch, InvalidField, ReadyplaneError, Refused
from readyplane.core.identity import ArtifactKind, Manifest
from readyplane.core.kv_profile import (
    FILE,
    LAYOUT,
    KvProfile,
    MemoryFacts,
    Refuse,
    fingerprint_of,
    kv_profile_from,
    may_reuse,
    measured,
)
from readyplane.core.resolution import withdrawn_tag
from readyplane.core.startup import Segment, SegmentName
from readyplane.ports import Registry
from readyplane_agent.compile_cache import fields_text
from readyplane_agent.compile_publish import CompileBytes, file_entry, keyed_manifest
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.exact_artifact import exact_artifact
from readyplane_agent.failed_plans import FailedPlans

log = logging.getLogger("agent.kv")

TAG = "kv/"
LOOK_LIMIT_S = 30.0
KEEP_LIMIT_S = 120.0


@runtime_checkable
class MeasuresMemory(Protocol):
    """An engine that can say where its device's memory goes."""

    def memory_account(self) -> Mapping[str, Any]:
        """`modelled.memory.Account` as a document; empty when it does not know."""
        ...


class KvReuse:
    """The KV size of one start.

    Args:
        registry. look: blocking, see `kv_memory`. bytes_of: moves files.
        failed: of this node, told by whoever failed here even where the registry was away.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        look: Callable[[EngineSpec, Manifest], tuple[MemoryFacts, Seen]],
        bytes_of: CompileBytes,
        failed: FailedPlans,
    ) -> None:
        self._registry, self._look, self._bytes = registry, look, bytes_of
        self._failed, self._plan = failed, ""
        self._fingerprint: dict[str, str] = {}
        self._spec: EngineSpec | None = None
        self._digest = ""
        self._kept = False
        self.counts: dict[tuple[str, str], int] = {}

    async def prepare(
        self, spec: EngineSpec, manifest: Manifest, key: CompileKey
    ) -> tuple[EngineSpec, str]:
        """The spec, with a size that was measured before where one holds; and what was found."""
        self._spec = spec
        try:
            async with asyncio.timeout(LOOK_LIMIT_S):
                found = await self._prepare(spec, manifest, key)
        except TimeoutError:
            found = Refuse((f"late: not here within {LOOK_LIMIT_S:.0f} s",))
        except IdentityMismatch as error:
            found = Refuse((f"wrong: {error}",))
        except Refused as error:
            found = Refuse((f"refused: {error}",))
        except (ReadyplaneError, OSError) as error:
            found = Refuse((f"unreadable: {error}",))
        if isinstance(found, Refuse):
            for kind in found.kinds:
                self._count("refused", kind)
            return spec, f"KV size to be measured: {'; '.join(found.reasons[:3])}"
        self._count("reused", "registry")
        kv_bytes = found.parts.kv
        text = f"KV size reused: {found.blocks} blocks, {kv_bytes} B, {self._digest}"
        return replace(spec, kv_reuse_bytes=kv_bytes), text

    async def _prepare(
        self, spec: EngineSpec, manifest: Manifest, key: CompileKey
    ) -> KvProfile | Refuse:
        facts, free = await asyncio.to_thread(self._look, spec, manifest)
        fingerprint, problems = fingerprint_of(key, facts)
        if problems:
            return Refuse(tuple(f"unknown: {name}: {why}" for name, why in problems.items()))
        self._fingerprint = fingerprint
        found = await exact_artifact(
            self._registry,
            tag_of(fingerprint),
            model=manifest.model,
            kind=ArtifactKind.KV_PROFILE,
            factors=fingerprint,
        )
        if not isinstance(found, Manifest):
            kind = "fingerprint_mismatch" if found.miss == "differs" else found.miss
            why = fields_text(found.fields) or found.detail
            return Refuse((f"{kind}: {why}" if why else kind,))
        files = await self._bytes.fetch(found)
        try:
            profile = kv_profile_from(files.get(FILE, b""))
        except InvalidField as error:
            await self._withdraw(found.digest)
            return Refuse((f"wrong: {error}",))
        verdict = may_reuse(
            profile, key, facts, free_bytes_now=free, loaded=False, failed=self._failed.known()
        )
        if isinstance(verdict, Refuse):
            return verdict
        self._digest, self._plan = found.digest, profile.plan_digest
        return profile

    async def judge(self, segments: Sequence[Segment]) -> None:
        """What the engine made of the size: one that did not fit after all is withdrawn."""
        if not self._digest:
            return
        told = [s.detail for s in segments if s.name is SegmentName.KV_PROFILE]
        if any(detail.startswith("refused") for detail in told):
            self._count("refused", "engine")
            log.warning("the engine did not take the KV size: %s", told[-1])
            await self._withdraw(self._digest)

    async def failed(self) -> None:
        """The engine did not start with the size: nobody is to try that again."""
        if self._digest:
            self._count("refused", "start_failed")
            await self._withdraw(self._digest)

    async def keep(self, engine: object, manifest: Manifest) -> None:
        """Publish what the engine has measured, once; an engine without an account has nothing."""
        if self._kept or self._spec is None or not self._fingerprint:
            return
        self._kept = True
        account = engine.memory_account() if isinstance(engine, MeasuresMemory) else {}
        if not account.get("measured"):
            return
        try:
            async with asyncio.timeout(KEEP_LIMIT_S):
                told = await self._publish(profile_of(self._fingerprint, account), manifest)
        except TimeoutError:
            told = "late"
        except (ReadyplaneError, OSError, KeyError, TypeError) as error:
            log.warning("the KV size is not kept: %s", error)
            told = "failed"
        self._count("published", told)

    async def _publish(self, profile: KvProfile, manifest: Manifest) -> str:
        assert self._spec is not None
        tag = tag_of(self._fingerprint)
        if await self._bytes.named(tag, ArtifactKind.KV_PROFILE):
            return "known"
        path = self._spec.work_dir / FILE
        path.write_bytes(profile.encoded())
        entry = await asyncio.to_thread(file_entry, FILE, path)
        about = keyed_manifest(
            ArtifactKind.KV_PROFILE, LAYOUT, (entry,), self._fingerprint, manifest
        )
        told, digest = await self._bytes.offer(tag, about, {FILE: path})
        log.info("KV size %s %s", told, digest)
        return told

    async def _withdraw(self, digest: str) -> None:
        if self._plan:
            self._failed.add(self._plan)
        try:
            await self._registry.set_tag(withdrawn_tag(digest), digest)
        except ReadyplaneError as error:
            log.warning("%s is not withdrawn: %s", digest, error)

    def _count(self, what: str, reason: str) -> None:
        self.counts[what, reason] = self.counts.get((what, reason), 0) + 1

    def metrics(self, who: str) -> list[str]:
        """Prometheus text; `who` are the labels of this worker."""
        lines: list[str] = []
        for what, label in LABELS.items():
            name = f"readyplane_kv_size_{what}_total"
            lines.append(f"# TYPE {name} counter")
            lines += [
                f'{name}{{{who},{label}="{reason}"}} {count}'
                for (counted, reason), count in sorted(self.counts.items())
                if counted == what
            ]
        return lines


LABELS = {"reused": "where", "refused": "reason", "published": "outcome"}


def tag_of(fingerprint: Mapping[str, str]) -> str:
    """The tag under which the profile of a fingerprint is found by all."""
    return TAG + key_digest(fingerprint).removeprefix("sha256:")


def profile_of(fingerprint: Mapping[str, str], account: Mapping[str, Any]) -> KvProfile:
    """The profile that an engine's account gives. Raises KeyError, TypeError, InvalidField."""
    return measured(
        fingerprint,
        device_total_bytes=int(account["device_bytes"]),
        memory_share=float(account["memory_share"]),
        co_tenant_bytes=int(account["taken"]),
        block_bytes=int(account["block_bytes"]),
        block_size=int(account["block_size"]),
        weights=int(account["weights"]),
        activations=int(account["activations"]),
        graphs=int(account["graphs"]),
        other=int(account["other"]),
    )
