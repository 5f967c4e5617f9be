"""The policy in force: read, changed by compare-and-set, followed when another planner changed it.

Owns which version counts, its profiles and what it asks for in vain, and storing the next version.
Hands each new one to the service, which plans by it from its next tick.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from readyplane.core.errors import Conflict, InvalidField, NotFound, ReadyplaneError, Refused
from readyplane.kit.clock import Clock
from readyplane_planner.fitting import ASK_S_MAX, Resolves, fitting
from readyplane_planner.journal import Journal, StoredPolicy
from readyplane_planner.policy import (
    Policy,
    as_stored,
    kept,
    merged,
    policy_warnings,
    pool_profiles,
    read_policy,
)
from readyplane_planner.rollout import Told

log = logging.getLogger(__name__)

GOING_ON = frozenset({"surging", "moving", "verifying", "paused"})
"""Phases in which undo leads back to the generation before, at once."""
UNCHECKED = "manifest_unchecked"
"""The code of that warning: the registry could not be asked when the policy was set."""


class InForce:
    """Args:
    policy: what is wanted until the journal holds a newer version.
    registry: is asked whether the artifact that somebody names can serve; None: nobody is.
    every_s: so often a newer version is looked up.
    changed: told (before, now) when another version comes into force.
    rollout: as the last decision of this planner tells of it; None where another one leads.

    Attributes:
        error: what is wrong with a policy file that somebody watches, else empty.
        warnings: what the policy asks for and cannot get, as JSON objects.
    """

    def __init__(
        self,
        policy: Policy,
        journal: Journal,
        registry: Resolves | None,
        *,
        clock: Clock,
        every_s: float,
        changed: Callable[[Policy, Policy], None],
        rollout: Callable[[], Told | None],
    ) -> None:
        self.policy = policy
        self.version = 0
        self.profiles = pool_profiles(policy)
        self.warnings: list[dict[str, Any]] = []
        self.error = ""
        self._journal = journal
        self._registry = registry
        self._clock = clock
        self._every_s = every_s
        self._changed = changed
        self._rollout = rollout
        self._refreshed_s = float("-inf")

    async def begin(self) -> None:
        """Take the newest version; the given policy is stored as version 1 where there is none."""
        if await self._journal.policy(self.policy.model) is None:
            await self._put(self.policy, expected_version=0)
        await self.refresh()

    async def adopt(self, policy: Policy) -> None:
        """See PlannerService."""
        self.check(policy.model)
        await self.refresh()
        policy = kept(policy, self.policy)
        if policy.digest != self.policy.digest:
            await self._check_file(policy)
            # An artifact that a file names may be published later; until then the state says so.
            stored = await self._put(policy, expected_version=self.version)
            self._use(policy, stored.version)

    async def set(
        self,
        policy: Mapping[str, Any],
        *,
        model: str = "",
        merge: bool = False,
        expected_version: int = 0,
    ) -> tuple[dict[str, Any], int]:
        """See the planner's port."""
        self.check(model)
        await self.refresh()
        if expected_version and expected_version != self.version:
            raise Conflict(
                "policy version",
                expected_version,
                self.version,
                "read the policy again and repeat the change",
            )
        wanted = merged(self.policy, policy) if merge else read_policy(policy)
        if wanted.model != self.policy.model:
            raise NotFound("model", wanted.model, f"this planner plans {self.policy.model}")
        unchecked = await self._unchecked(wanted)
        stored = await self._put(wanted, expected_version=self.version)
        self._use(wanted, stored.version, unchecked)
        return wanted.document(), stored.version

    async def follow(self, now_s: float) -> None:
        """Now and then the newest version; the one in force stays while the journal is away."""
        if now_s - self._refreshed_s < self._every_s:
            return
        self._refreshed_s = now_s
        try:
            await self.refresh()
        except ReadyplaneError as error:
            log.warning("the policy in force stays: %s", error)

    async def refresh(self) -> None:
        """Take the newest version: another planner of this model may have been told."""
        stored = await self._journal.policy(self.policy.model)
        if stored is not None and stored.version > self.version:
            self._use(read_policy(as_stored(stored.document)), stored.version)

    def check(self, model: str) -> None:
        """Raises NotFound for another model than the policy's."""
        if model and model != self.policy.model:
            raise NotFound("model", model, f"this planner plans {self.policy.model}")

    def resolved(self) -> None:
        """The registry has told by now what the policy's artifact is."""
        self.warnings = [w for w in self.warnings if w["code"] != UNCHECKED]

    async def _unchecked(self, wanted: Policy) -> list[dict[str, Any]]:
        """A warning where the registry cannot say whether another artifact can serve.

        Raises:
            InvalidField: it cannot: there is none of that name, or it does not fit.
            Refused: it is what the roll-out under way leaves.
        """
        field, name = "policy.manifest", wanted.manifest
        if not name or wanted.reference == self.policy.reference:
            return []
        await self._check_way_back(name, name)
        try:
            found = await fitting(
                self._registry, name, model=wanted.model, profiles=pool_profiles(wanted)
            )
        except NotFound as error:
            remedy = "the registry has no such artifact; name one of `readyplane artifact list`"
            raise InvalidField(field, name, remedy) from error
        except Refused as error:
            remedy = f"it cannot serve ({'; '.join(error.reasons)}); {error.remedy}"
            raise InvalidField(field, name, remedy) from error
        except ReadyplaneError as error:
            text = f"{field} = {name} could not be checked: {error}"
            return [{"field": field, "value": name, "best": None, "text": text, "code": UNCHECKED}]
        await self._check_way_back(name, found.digest)
        return []

    async def _check_file(self, wanted: Policy) -> None:
        """The way back alone: what a file names may be published later."""
        if not wanted.manifest or wanted.reference == self.policy.reference:
            return
        digest = wanted.manifest
        if self._registry is not None:
            with contextlib.suppress(ReadyplaneError, OSError, TimeoutError):
                async with asyncio.timeout(ASK_S_MAX):
                    digest = (await self._registry.resolve(digest)).digest
        await self._check_way_back(wanted.manifest, digest)

    async def _check_way_back(self, name: str, digest: str) -> None:
        """Whether an artifact is the one that the roll-out under way leaves, whoever names it.

        Wanted like any other it would be a roll-out of its own, before which the starts of the new
        generation come to serve.

        Raises:
            Refused: it is; undo leads back to it at once.
        """
        told = self._rollout()
        if told is not None:
            phase, before = str(told.phase), told.before.digest
        else:  # as the leader wrote it last
            newest = await self._journal.newest(self.policy.model, limit=1)
            written = (newest[0].document.get("rollout") if newest else None) or {}
            phase = str(written.get("phase", ""))
            before = str((written.get("before") or {}).get("digest", ""))
        if digest == before and phase in GOING_ON:
            why = f"a roll-out away from {digest} is {phase}"
            raise Refused(f"roll-out to {name}", [why], "use `readyplane rollout undo`")

    async def _put(self, policy: Policy, *, expected_version: int) -> StoredPolicy:
        wanted = StoredPolicy(policy.model, 0, policy.document(), self._clock.wall_s())
        return await self._journal.put_policy(wanted, expected_version=expected_version)

    def _use(self, policy: Policy, version: int, unchecked: Sequence[dict[str, Any]] = ()) -> None:
        before = self.policy
        self.profiles = pool_profiles(policy)
        self.policy, self.version = policy, version
        self.warnings = [*policy_warnings(policy, self.profiles), *unchecked]
        for warned in self.warnings:
            log.warning(warned["text"], extra={"code": warned["code"]})
        self._changed(before, policy)
