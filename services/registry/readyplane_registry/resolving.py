"""A reference as one manifest that may be loaded: names, needs, retirement and trust.

Owns the order in which a reference is looked up, and the refusal of what nobody trusts. The choice
among candidates is `catalog`'s, the verdict on signatures `core.trust`'s. Handed to `service`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from readyplane.core.errors import IdentityMismatch, InvalidField, NotFound, Refused
from readyplane.core.identity import Manifest
from readyplane.core.resolution import (
    CANDIDATES_MAX,
    CANDIDATES_SHOWN_MAX,
    Resolution,
    withdrawn_tag,
)
from readyplane.core.trust import TrustMode, TrustPolicy, TrustVerdict, trusted
from readyplane.kit.clock import Clock
from readyplane.kit.signing import verify_ed25519
from readyplane_registry import catalog
from readyplane_registry.fetching import Tally
from readyplane_registry.store import CatalogStore

log = logging.getLogger(__name__)
PAGE = 32
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
            candidates = [await self._manifest_of(reference)]
            if (await self._store.trail(reference)).retired:
                remedy = "ask for another one, or publish its bytes again"
                raise Refused(f"{kind} {reference}", ["it is retired"], remedy)
            return await self._trusted(reference, candidates, wanted, candidates_max)
        tag = await self._store.get_tag(reference)
        if tag is not None:
            if not await self._not_withdrawn([tag.digest]):
                raise NotFound(f"{kind} of", reference, "it was withdrawn; publish another")
            candidates = [await self._manifest_of(tag.digest)]
            return await self._trusted(reference, candidates, wanted, candidates_max)
        return await self._of_model(reference, kind, wanted, candidates_max)

    async def _of_model(
        self, model: str, kind: str, wanted: dict[str, str], candidates_max: int
    ) -> Resolution:
        """The newest of a model that meets the need; page by page, since it is mostly the first."""
        candidates: list[Manifest] = []
        before = named = refused = 0
        while named < CONSIDERED_MAX and refused < UNTRUSTED_TRIED_MAX:
            page = await self._store.list_manifests(
                model=model, kind=kind, limit=PAGE, before=before
            )
            named += len(page)
            for digest in await self._not_withdrawn([record.digest for record in page]):
                candidates.append(await self._manifest_of(digest))
                if not catalog.differing(candidates[-1], wanted):
                    verdict = await self.judge(candidates[-1])
                    if verdict.allowed:
                        return Resolution(candidates[-1])
                    refused += 1
            if len(page) < PAGE:
                break
            before = page[-1].sequence
        if not named:
            await self._say_unknown(model, kind)
        if not candidates:
            raise NotFound(f"{kind} of", model, "it was withdrawn; publish another")
        return await self._trusted(model, candidates, wanted, candidates_max)

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
        self, reference: str, candidates: list[Manifest], wanted: dict[str, str], most: int
    ) -> Resolution:
        """The first that meets the need and is trusted; a refusal names the keys expected.

        Raises:
            Refused: some meet the need, and none of them is signed as the policy asks.
        """
        refused: list[str] = []
        left = list(candidates)
        choice = Resolution(None)
        while len(refused) < UNTRUSTED_TRIED_MAX:
            choice = catalog.choose(left, need=wanted, shown_max=most)
            if choice.manifest is None:
                break
            verdict = await self.judge(choice.manifest)
            if verdict.allowed:
                return choice
            refused.append(verdict.reason)
            left.remove(choice.manifest)
        if not refused:
            return choice
        remedy = "sign it: `readyplane artifact sign REF --key FILE`, or trust another key"
        raise Refused(f"trust in {reference!r}", refused[:REASONS_MAX], remedy)

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
