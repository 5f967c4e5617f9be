"""What the gate compares evidence with: manifests, class profiles, and the worker's own standing.

Owns the caches of what the registry and the profiles say; `gate` judges, `membership` acts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from readyplane.core.errors import NotFound, Unavailable
from readyplane.core.identity import Manifest
from readyplane.core.profile import ClassProfile
from readyplane.core.startup import StartMode
from readyplane.core.worker import CheckResult, Serving, WorkerOffer
from readyplane_router import gate
from readyplane_router.members import Member
from readyplane_router.policy import RouterPolicy

MANIFESTS_KEPT_MAX = 32
PROFILES_MAX = 256


class Manifests(Protocol):
    """What the router needs of a registry; any `ports.Registry` is one."""

    async def get_manifest(self, digest: str) -> Manifest:
        """One manifest. Raises NotFound."""
        ...

    async def resolve(self, reference: str) -> Manifest:
        """By digest, tag or model name. Raises NotFound."""
        ...


class Admission:
    """The gate's knowledge."""

    def __init__(
        self, registry: Manifests | None, profiles: dict[str, ClassProfile], policy: RouterPolicy
    ) -> None:
        """`profiles` by name; more are registered from evidence that carries them whole."""
        self.profiles = profiles
        self._registry, self._policy = registry, policy
        self._manifests: dict[str, Manifest] = {}

    async def manifest(self, offer: WorkerOffer) -> Manifest | None:
        """What the worker was ordered to serve; None for an attached engine of unknown origin.

        Raises:
            NotFound: the registry does not have it. Unavailable: the registry.
        """
        if not offer.manifest_digest or self._registry is None:
            return None
        known = self._manifests.get(offer.manifest_digest)
        if known is not None:
            return known
        try:
            found = await self._registry.get_manifest(offer.manifest_digest)
        except NotFound:
            if offer.attached:
                return None
            raise
        if len(self._manifests) >= MANIFESTS_KEPT_MAX:
            self._manifests.pop(next(iter(self._manifests)))
        self._manifests[offer.manifest_digest] = found
        return found

    async def is_published(self, model: str) -> bool:
        """Whether the registry knows the model; True when it cannot be asked."""
        if self._registry is None:
            return False
        try:
            await self._registry.resolve(model)
        except NotFound:
            return False
        except Unavailable:
            return True
        return True

    def profile(self, serving: Serving, checks: Sequence[CheckResult]) -> ClassProfile | None:
        """The registered profile, registering the one that the evidence carries if it is new.

        A worker that was started eagerly is slower than its class: it is told apart (R13.1). So is
        one that has not got its graphs yet (R14.1).

        Raises:
            InvalidField: the profile that the evidence carries.
        """
        known = self.profiles.get(serving.profile)
        if known is None and len(self.profiles) < PROFILES_MAX:
            offered = gate.offered_profile(checks)
            if offered is not None and offered.name == serving.profile:
                known = self.profiles[offered.name] = offered
        if known is not None and serving.runs is StartMode.EAGER:
            return known.eager
        return known

    def expectations(
        self, member: Member, manifest: Manifest | None, *, silent_s: float, answering: bool
    ) -> gate.Expectations:
        """What the evidence must agree with; `silent_s`: seconds since the last renewal."""
        return gate.Expectations(
            offer=member.offer,
            manifest=manifest,
            epoch=member.epoch,
            lease_valid=silent_s <= self._policy.lease_ttl_s or not answering,
            lease_why=f"not renewed for {silent_s:.1f} s",
            group_state=member.group.state,
            group_epoch=member.group.epoch,
            profiles={name: profile.digest for name, profile in self.profiles.items()},
            allow_attached=self._policy.allow_attached,
        )
