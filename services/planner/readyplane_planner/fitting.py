"""Whether an artifact that somebody names can serve: it exists, is of the model, fits the pools.

Owns that question to the registry, asked before a wish becomes the policy. What the answer is worth
to whoever asked, a refusal or a warning, is theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from readyplane.core.errors import Refused, Unavailable
from readyplane.core.identity import CANARY_REMEDY, ArtifactKind, Manifest
from readyplane.core.profile import ClassProfile

ASK_S_MAX = 5.0
UNANSWERED = (
    "the artifact has no known answer, so no worker of it would ever be admitted; " + CANARY_REMEDY
)


class Resolves(Protocol):
    """The part of the registry that is asked."""

    async def resolve(
        self, reference: str, *, kind: str = "weights", need: Mapping[str, str] | None = None
    ) -> Manifest:
        """By digest, tag or model name. Raises NotFound."""
        ...


async def fitting(
    registry: Resolves | None,
    reference: str,
    *,
    model: str,
    profiles: tuple[ClassProfile, ClassProfile],
) -> Manifest:
    """The artifact of a digest, tag or model name, which the pools (P, D) can serve.

    Raises:
        NotFound: no such artifact. Refused: the pools cannot serve it, with every reason.
        Unavailable: the registry cannot be asked now.
    """
    if registry is None:
        raise Unavailable("this planner knows no registry", "start it with --registry")
    try:
        async with asyncio.timeout(ASK_S_MAX):
            manifest = await registry.resolve(reference)
    except (OSError, TimeoutError) as error:
        why = str(error) or f"waited {ASK_S_MAX:g} s"
        raise Unavailable(f"the registry does not answer ({why})", "try again") from error
    unfit = list(_unfit(manifest, model, profiles))
    if unfit:
        raise Refused(f"roll-out to {reference}", unfit, "name an artifact that fits the pools")
    return manifest


def _unfit(
    manifest: Manifest, model: str, profiles: tuple[ClassProfile, ClassProfile]
) -> list[str]:
    """Why the pools cannot serve an artifact; empty when they can."""
    found = []
    if manifest.kind is not ArtifactKind.WEIGHTS:
        found.append(f"kind: it is {manifest.kind}, weights are served")
    elif manifest.canary is None:
        found.append(f"canary: {UNANSWERED}")
    if manifest.model != model:
        found.append(f"model: it is of {manifest.model}, this planner plans {model}")
    placed = manifest.tp * manifest.pp
    for pool, profile in zip(("prefill", "decode"), profiles, strict=True):
        if placed > profile.gpus:
            found.append(
                f"{pool}: placed for {placed} GPUs (tp {manifest.tp}, pp {manifest.pp}), a worker of "
                f"{profile.worker_class} has {profile.gpus}"
            )
    return found
