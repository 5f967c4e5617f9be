"""A reference as one manifest that may be loaded: names, needs, retirement and trust.

Owns the order in which a reference is looked up, and the refusal of what nobody trusts. The choice
among candidates is `catalog`'s, the verdict on signatures `core.trust`'s. Handed to `service`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from readyplane.core.errors import IdentityMismatch, InvalidField, NotFound, Refused
from readyplane.core.identity import Manifest
from readyplane.core.resolution import (
    CANDIDATES_MAX,
    CANDIDATES_SHOWN_MAX,
    Candidate,
    Resolution,
    withdrawn_tag,
)
from readyplane.core.trust import TrustMode, TrustPolicy, TrustVerdict, trusted
from readyplane.kit.clock import Clock
from readyplane.kit.signing import verify_ed25519
from readyplane_registry import catalog
from readyplane_registry.fetching import Tally
from readyplane_registry.store import CatalogStore, ManifestRecord

log = logging.getLogger(__name__)
PAGE_FIRST, PAGE = 4, 64
OUTLINES_MAX = 20_000
CONSIDERED_MAX = 1000
UNTRUSTED_TRIED_MAX = 64
REASONS_MAX = 5


class Resolving:
    """See `RegistryService` for the arguments.

    Args:
        manifest_of: one manifest by digest; raises NotFound.
        trust: the policy as it is now; raises InvalidField when its file went wrong.
    """

    def __init__(
        self,
        *,
        store: CatalogStore,
        manifest_of: Callable[[str], Awaitable[Manifest]],
        clock: Clock,
        trust: Callable[[], TrustPolicy],
        tally: Tally,
    ) -> None:
        self._store, self._manifest_of, self._clock = store, manifest_of, clock
        self._trust, self._tally = trust, tally
        self._outlines: OrderedDict[str, Manifest] = OrderedDict()

    async def resolve(self, reference: str, *, kind: str, need: Mapping[str, str]) -> Manifest:
        """See `readyplane.ports.Registry.resolve`."""
        found = await self.resolve_need(reference, kind=kind, need=need)
        if found.manifest is None:
            remedy = "publish an artifact with these fields, or ask for other ones"
            raise IdentityMismatch(f"{kind} of {reference!r}", found.reasons, remedy)
        return found.manifest

    async def resolve_need(
        self,
        reference: str,
        *,
        kind: str,
        need: Mapping[str, str],
        candidates_max: int = CANDIDATES_SHOWN_MAX,
    ) -> Resolution:
        """As `resolve`, with the candidates and their differing fields as an answer.

        Raises:
            NotFound: nothing has that name. Refused: it is retired, or nobody trusted signed it.
            InvalidField: reference, kind, a field of the need or the number is wrong.
        """
        if not 1 <= candidates_max <= CANDIDATES_MAX:
            raise InvalidField("candidates_max", candidates_max, f"use 1 to {CANDIDATES_MAX}")
        try:
            found = await self._resolve(reference, kind, dict(need), candidates_max)
        except NotFound:
            self._tally.count("resolves", outcome="unknown")
            raise
        except Refused:
            self._tally.count("resolves", outcome="refused")
            raise
        outcome = "mismatch" if found.manifest is None else "found"
        self._tally.count("resolves", outcome=outcome)
        return found

    async def _resolve(
        self, reference: str, kind: str, need: dict[str, str], candidates_max: int
    ) -> Resolution:
        catalog.check_kind(kind)
        reference = catalog.check_reference(reference)
        wanted = {**need, "kind": kind}
        if catalog.is_digest(reference):
            manifest = await self._manifest_of(reference)
            if (await self._store.trail(reference)).retired:
                remedy = "ask for another one, or publish its bytes again"
                raise Refused(f"{kind} {reference}", ["it is retired"], remedy)
            return await self._trusted(reference, manifest, wanted, candidates_max)
        tag = await self._store.get_tag(reference)
        if tag is not None:
            if not await self._not_withdrawn([tag.digest]):
                raise NotFound(f"{kind} of", reference, "it was withdrawn; publish another")
            manifest = await self._manifest_of(tag.digest)
            return await self._trusted(reference, manifest, wanted, candidates_max)
        return await self._of_model(reference, kind, wanted, candidates_max)

    async def _of_model(
        self, model: str, kind: str, wanted: dict[str, str], candidates_max: int
    ) -> Resolution:
        """The newest of a model that meets the need; page by page, since it is mostly the first."""
        misses: list[tuple[int, int, Candidate]] = []
        refused: list[str] = []
        before, named, page_size = 0, 0, PAGE_FIRST
        while named < CONSIDERED_MAX and len(refused) < UNTRUSTED_TRIED_MAX:
            page = await self._store.list_manifests(
                model=model, kind=kind, limit=page_size, before=before
            )
            named += len(page)
            digests = await self._not_withdrawn([record.digest for record in page])
            outlines = await self._outlined(digests)
            for digest in digests:
                fields = catalog.differing(outlines[digest], wanted)
                if fields:
                    misses.append((len(fields), len(misses), Candidate(digest, fields)))
                    continue
                manifest = await self._manifest_of(digest)
                verdict = await self.judge(manifest)
                if verdict.allowed:
                    return Resolution(manifest)
                refused.append(verdict.reason)
            if len(page) < page_size:
                break
            before, page_size = page[-1].sequence, PAGE
        if not named:
            await self._say_unknown(model, kind)
        if refused:
            raise _untrusted(model, refused)
        if not misses:
            raise NotFound(f"{kind} of", model, "it was withdrawn; publish another")
        nearest = sorted(misses, key=lambda miss: miss[:2])[:candidates_max]
        shown = tuple(candidate for _count, _place, candidate in nearest)
        return Resolution(None, shown, len(misses) - len(shown))

    async def _outlined(self, digests: Sequence[str]) -> dict[str, Manifest]:
        """Manifests without what no need asks for, kept: a need is compared with many of them."""
        found = {d: self._outlines[d] for d in digests if d in self._outlines}
        records = await self._store.get_manifests([d for d in digests if d not in found])
        for digest, record in records.items():
            found[digest] = self._outlines[digest] = _outline(record)
            await asyncio.sleep(0)  # documents of a large model take a while to read
        while len(self._outlines) > OUTLINES_MAX:
            self._outlines.popitem(last=False)
        return found

    async def _not_withdrawn(self, digests: list[str]) -> list[str]:
        """Without those that a tag says of that nobody may resolve to them any more."""
        tags = await self._store.tags_of(digests)
        return [digest for digest in digests if withdrawn_tag(digest) not in tags.get(digest, ())]

    async def _say_unknown(self, reference: str, kind: str) -> None:
        others = await self._store.list_manifests(model=reference, limit=1)
        if others:
            remedy = f"it has {others[0].kind}, but no {kind}; publish one"
            raise NotFound(f"{kind} of model", reference, remedy)
        raise NotFound("artifact", reference, "give a digest, a tag or a model that was published")

    # ----------------------------------------------------------------------------------- trust

    async def _trusted(
        self, reference: str, manifest: Manifest, wanted: dict[str, str], most: int
    ) -> Resolution:
        """The one that a digest or tag names, if it meets the need and is trusted.

        Raises:
            Refused: it is not signed as the policy asks; names the keys expected.
        """
        choice = catalog.choose([manifest], need=wanted, shown_max=most)
        if choice.manifest is not None:
            verdict = await self.judge(manifest)
            if not verdict.allowed:
                raise _untrusted(reference, [verdict.reason])
        return choice

    async def judge(self, manifest: Manifest) -> TrustVerdict:
        """Whether a manifest may be loaded, by its signatures; what is not trusted is told."""
        policy = self._trust()
        mode = policy.of(manifest.model).mode
        if mode is TrustMode.OFF:
            return TrustVerdict(True, False, mode, f"{manifest.model}: no signature is asked for")
        digest = manifest.digest
        verdict = trusted(
            digest,
            (await self._store.trail(digest)).signatures,
            policy,
            model=manifest.model,
            now_s=self._clock.wall_s(),
            verify=verify_ed25519,
        )
        if not verdict.verified:
            self._tally.count("untrusted", mode=str(mode))
            log.warning("not trusted", extra={"digest": digest, "why": verdict.reason})
        return verdict


def _outline(record: ManifestRecord) -> Manifest:
    whole = record.manifest
    files = tuple(entry for entry in whole.files if entry.purpose == "tokenizer")
    return replace(whole, files=files, tensors=(), canary=None)


def _untrusted(reference: str, reasons: Sequence[str]) -> Refused:
    remedy = "sign it: `readyplane artifact sign REF --key FILE`, or trust another key"
    return Refused(f"trust in {reference!r}", list(reasons[:REASONS_MAX]), remedy)
