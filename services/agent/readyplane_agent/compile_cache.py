"""Compiled code of one start: found before the engine starts, kept after it has compiled (R12).

Owns the order: look at the machine, make the key, take the node's entry or fetch the registry's,
and give the engine a folder of its own; after a miss pack what the engine has compiled, keep it on
the node and publish it. Nothing here fails a start: whatever goes wrong is a miss with its reason,
counted, and the engine compiles. Handed to `starting`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from readyplane.core.compile_key import (
    CompileFacts,
    CompileKey,
    compile_key,
    kind_of_factor,
    problems_text,
)
from readyplane.core.errors import (
    IdentityMismatch,
    InvalidField,
    ReadyplaneError,
    Refused,
    Unavailable,
)
from readyplane.core.identity import ArtifactKind, FieldDifference, Manifest
from readyplane.core.resolution import withdrawn_tag
from readyplane.core.startup import Segment, SegmentName, StartMode
from readyplane.kit.clock import Clock
from readyplane.ports import Registry
from readyplane_agent.compile_archive import ARCHIVE, ARCHIVE_BYTES_MAX, INDEX, read_index
from readyplane_agent.compile_store import CompileStore, Taken
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.exact_artifact import Nearest, exact_artifact

log = logging.getLogger("agent.compile")

PREPARE_LIMIT_S = 120.0
KEEP_LIMIT_S = 600.0
KEEP_ATTEMPTS_MAX = 3
KEEP_PAUSE_S = 5.0
FIELDS_SHOWN_MAX = 4
TAG = "compile/"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a start fared with compiled code.

    Attributes:
        hit: `node` or `registry`; empty on a miss.
        miss: `absent`, `differs`, `unknown`, `incomplete`, `corrupt`, `unreadable`, `refused` (by
            the registry for lack of trust, or too large), `unreachable` or `late`; empty on a hit.
        factors: the kinds of factors that differ or are not known, for a metric.
        detail: what a person needs to know.
    """

    hit: str = ""
    miss: str = ""
    factors: tuple[str, ...] = ()
    detail: str = ""

    def __str__(self) -> str:
        """One line for a trace."""
        told = f"hit: {self.hit}" if self.hit else f"miss: {self.miss}"
        return f"compiled code {told}" + (f", {self.detail}" if self.detail else "")


class Bytes(Protocol):
    """How the files of an artifact come and go; `compile_publish` does both."""

    async def fetch(self, manifest: Manifest) -> dict[str, bytes]:
        """Every file by its path, verified chunk by chunk.

        Raises:
            Refused: nobody trusted has signed it. Unavailable, IdentityMismatch: as a loader does.
        """
        ...

    async def publish(self, spec: EngineSpec, key: CompileKey, about: Manifest) -> tuple[str, str]:
        """Pack, keep on the node and publish: (`published`, `known` or why not, digest)."""
        ...


class CompileCache:
    """Compiled code of one start.

    Args:
        store: the node's. registry, clock. inspect: blocking, see `compile_inspect`.
        bytes_of: moves files.
    """

    def __init__(
        self,
        store: CompileStore,
        *,
        registry: Registry,
        clock: Clock,
        inspect: Callable[[EngineSpec, Manifest], CompileFacts],
        bytes_of: Bytes,
    ) -> None:
        self._store, self._registry, self._clock = store, registry, clock
        self._inspect, self._bytes = inspect, bytes_of
        self._spec: EngineSpec | None = None
        self._key: CompileKey | None = None
        self._digest = ""
        self._kept = False
        self.outcome: Outcome | None = None
        self.counts: dict[tuple[str, str], int] = {}

    # ------------------------------------------------------------------------------ before

    async def key_of(self, spec: EngineSpec, manifest: Manifest) -> CompileKey:
        """The key of this start; the machine is looked at once. Raises OSError."""
        if self._key is None:
            self._key = compile_key(await asyncio.to_thread(self._inspect, spec, manifest))
        return self._key

    async def prepare(self, spec: EngineSpec, manifest: Manifest) -> Outcome | None:
        """Give the engine's folder what fits exactly, or nothing; None when it compiles nothing."""
        if spec.mode is StartMode.EAGER or spec.compile_cache_dir is None:
            return None
        self._spec = spec
        try:
            async with asyncio.timeout(PREPARE_LIMIT_S):
                outcome = await self._prepare(spec, manifest)
        except TimeoutError:
            outcome = Outcome(miss="late", detail=f"not here within {PREPARE_LIMIT_S:.0f} s")
        except (ReadyplaneError, OSError) as error:
            outcome = Outcome(miss="unreadable", detail=str(error))
        self.outcome = outcome
        if outcome.hit:
            self._count("hit", outcome.hit)
        else:
            for factor in outcome.factors or ("",):
                self._count("miss", outcome.miss, factor)
        log.info("%s", outcome)
        return outcome

    async def _prepare(self, spec: EngineSpec, manifest: Manifest) -> Outcome:
        key = await self.key_of(spec, manifest)
        if not key.usable:
            kinds = _kinds(key.problems)
            return Outcome(miss="unknown", factors=kinds, detail=problems_text(key))
        taken = await self._take(spec, key)
        if not taken.miss:
            return Outcome("node", detail=_told(taken, key))
        if taken.miss != "absent":
            self._count("refused", taken.miss)
            log.warning("the node's compiled code is no good: %s %s", taken.miss, taken.detail)
        found = await exact_artifact(
            self._registry,
            tag_of(key),
            model=manifest.model,
            kind=ArtifactKind.COMPILE,
            factors=key.factors,
        )
        if isinstance(found, Manifest):
            return await self._fetched(spec, key, found)
        if taken.miss != "absent" and found.miss == "absent":
            return Outcome(miss=taken.miss, detail=taken.detail)
        return _missed(found)

    async def _take(self, spec: EngineSpec, key: CompileKey) -> Taken:
        assert spec.compile_cache_dir is not None
        return await asyncio.to_thread(self._store.take, key.factors, spec.compile_cache_dir)

    async def _fetched(self, spec: EngineSpec, key: CompileKey, found: Manifest) -> Outcome:
        """Bring an artifact to the node and to the engine; what is not as it says is withdrawn."""
        if found.size_bytes > ARCHIVE_BYTES_MAX:
            return Outcome(miss="refused", detail=f"{found.digest} has {found.size_bytes} B")
        try:
            files = await self._bytes.fetch(found)
        except Unavailable as error:
            return Outcome(miss="unreachable", detail=str(error))
        except IdentityMismatch as error:
            return Outcome(miss="corrupt", detail=str(error))
        except Refused as error:
            return Outcome(miss="refused", detail=str(error))
        try:
            index = read_index(files.get(INDEX, b""))
            archive = files.get(ARCHIVE, b"")
            await asyncio.to_thread(self._store.install, archive, index, wanted=key.factors)
        except (IdentityMismatch, InvalidField) as error:
            self._count("refused", "corrupt")
            await self._withdraw(found.digest, str(error))
            return Outcome(miss="corrupt", detail=str(error))
        taken = await self._take(spec, key)
        if taken.miss:
            return Outcome(miss=taken.miss, detail=taken.detail)
        self._digest = found.digest
        return Outcome("registry", detail=f"{found.digest}, {_told(taken, key)}")

    # ------------------------------------------------------------------------------- after

    def judge(self, segments: Sequence[Segment]) -> None:
        """Count a hit that the engine did not take: then the key lacks a factor, which is told."""
        if self.outcome is None or not self.outcome.hit:
            return
        told = [s.detail for s in segments if s.name is SegmentName.COMPILE and "miss" in s.detail]
        if told:
            self._count("refused", "engine")
            log.warning("the engine did not take the code compiled for this key: %s", told[0])

    async def failed(self) -> None:
        """The engine did not come up on reused code: nobody is to try that code again (R12.2)."""
        if self.outcome is None or not self.outcome.hit or self._key is None:
            return
        self._count("refused", "start_failed")
        log.warning("reused compiled code is withdrawn: the engine did not start on it")
        await asyncio.to_thread(self._store.quarantine, self._key.digest)
        digest = self._digest
        if not digest:
            try:
                found = await self._registry.resolve(tag_of(self._key), kind="compile")
            except ReadyplaneError as error:
                log.warning("not withdrawn in the registry: %s", error)
                return
            digest = found.digest
        await self._withdraw(digest, "an engine did not start on it")

    async def keep(self, manifest: Manifest) -> None:
        """After a miss: pack what was compiled, keep it here, publish it; once, and never in vain.

        Of many that publish the same key the first wins, and the others take its word.
        """
        key, outcome, spec = self._key, self.outcome, self._spec
        if key is None or outcome is None or spec is None or self._kept:
            return
        if outcome.hit or not key.usable:
            return
        self._kept = True
        try:
            async with asyncio.timeout(KEEP_LIMIT_S):
                told = await self._keep(spec, key, manifest)
        except TimeoutError:
            told = "late"
        except (ReadyplaneError, OSError) as error:
            log.warning("compiled code is not kept: %s", error)
            told = "refused" if isinstance(error, Refused) else "failed"
        self._count("published", told)

    async def _keep(self, spec: EngineSpec, key: CompileKey, manifest: Manifest) -> str:
        for attempt in range(KEEP_ATTEMPTS_MAX):
            try:
                told, digest = await self._bytes.publish(spec, key, manifest)
            except Unavailable as error:
                if attempt + 1 == KEEP_ATTEMPTS_MAX:
                    raise
                log.info("%s; trying again", error)
                await self._clock.sleep(KEEP_PAUSE_S)
            else:
                log.info("compiled code %s %s", told, digest)
                return told
        raise AssertionError("the last attempt returns or raises")

    async def _withdraw(self, digest: str, why: str) -> None:
        try:
            await self._registry.set_tag(withdrawn_tag(digest), digest)
        except ReadyplaneError as error:
            log.warning("%s is not withdrawn (%s): %s", digest, why, error)

    # ------------------------------------------------------------------------------ metrics

    def _count(self, what: str, reason: str, factor: str = "") -> None:
        name = (what, f"{reason}:{factor}" if factor else reason)
        self.counts[name] = self.counts.get(name, 0) + 1

    def metrics(self, who: str) -> list[str]:
        """Prometheus text; `who` are the labels of this worker."""
        lines: list[str] = []
        for what, label in LABELS.items():
            name = f"readyplane_compile_cache_{what}_total"
            lines.append(f"# TYPE {name} counter")
            for (counted, text), count in sorted(self.counts.items()):
                if counted == what:
                    value, _, factor = text.partition(":")
                    more = f',factor="{factor}"' if what == "miss" else ""
                    lines.append(f'{name}{{{who},{label}="{value}"{more}}} {count}')
        return lines


LABELS = {"hit": "where", "miss": "reason", "refused": "reason", "published": "outcome"}


def tag_of(key: CompileKey) -> str:
    """The tag under which the first artifact of a key is found by all."""
    return TAG + key.digest.removeprefix("sha256:")


def _told(taken: Taken, key: CompileKey) -> str:
    return f"{taken.files} files, {taken.size_bytes / 1e6:.1f} MB, key {key.digest[7:19]}"


def _kinds(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({kind_of_factor(name) for name in names}))


def _missed(nearest: Nearest) -> Outcome:
    if not nearest.fields:
        return Outcome(miss=nearest.miss, detail=nearest.detail)
    return Outcome(
        miss=nearest.miss,
        factors=_kinds(f.field for f in nearest.fields),
        detail=fields_text(nearest.fields),
    )


def fields_text(fields: Sequence[FieldDifference]) -> str:
    """`field: found != needed; …` of the first few."""
    told = [f"{f.field}: {f.right} != {f.left}" for f in fields]
    more = f", and {len(told) - FIELDS_SHOWN_MAX} more" if len(told) > FIELDS_SHOWN_MAX else ""
    return "; ".join(told[:FIELDS_SHOWN_MAX]) + more
