"""What a person sees of a roll-out and may ask of it: go, pause, resume, undo.

Owns the checks before anything is asked for (can the artifact serve, is there anything to pause) and
writing the wish into the policy, where it
is versioned and every planner finds it. The roll-out itself is the brain's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from readyplane.core.errors import InvalidField, Refused, Unavailable
from readyplane.core.profile import ClassProfile
from readyplane.kit.clock import Clock
from readyplane_planner.fitting import Resolves, fitting

log = logging.getLogger(__name__)

ACTIONS = ("go", "pause", "resume", "undo")
SURGE_MAX = 8
MEANS = {
    "pause": ({"surging", "moving", "verifying", "rolling_back"}, "nothing is being rolled out"),
    "resume": ({"paused", "failed"}, "no roll-out is paused"),
    "undo": (
        {"surging", "moving", "verifying", "done", "paused", "failed"},
        "there is nothing to go back to",
    ),
}
"""Phases in which a wish means something, and what to say in any other."""
ALREADY = {
    ("pause", "paused"): "it is paused already",
    ("undo", "rolling_back"): "it goes back already",
    ("undo", "rolled_back"): "it has gone back already",
}
"""What to say where a wish has come true."""


class Planned(Protocol):
    """The part of the planner's service that is asked."""

    async def state(self, model: str = "") -> dict[str, Any]:
        """The state document."""
        ...

    async def get_policy(self, model: str = "") -> tuple[dict[str, Any], int]:
        """Policy and version."""
        ...

    async def set_policy(
        self,
        policy: Mapping[str, Any],
        *,
        model: str = "",
        merge: bool = False,
        expected_version: int = 0,
    ) -> tuple[dict[str, Any], int]:
        """Compare-and-set."""
        ...


class Upgrades:
    """Args:
    planned: whose policy and state. registry: None where the policy names a digest.
    profiles: of both pools, as they are now. leading: whether this planner may act.
    """

    def __init__(
        self,
        planned: Planned,
        registry: Resolves | None,
        *,
        profiles: Callable[[], tuple[ClassProfile, ClassProfile]],
        leading: Callable[[], bool],
        clock: Clock,
    ) -> None:
        self._planned = planned
        self._registry = registry
        self._profiles = profiles
        self._leading = leading
        self._clock = clock

    async def show(self, model: str = "") -> dict[str, Any]:
        """Where the roll-out is, what the policy says of it and what was asked last."""
        policy, version = await self._planned.get_policy(model)
        state = await self._planned.state(model)
        return {
            **state["rollout"],
            "model": policy["model"],
            "manifest": policy["manifest"],
            "policy": policy["rollout"],
            "policy_version": version,
            "decided_version": state["policy_version"],
            "paused": policy["paused"],
            "degraded": state["degraded"],
            "leader": state["leader"],
        }

    async def ask(
        self,
        action: str,
        *,
        asked_id: str,
        to: str = "",
        surge: int = 0,
        by: str = "",
        model: str = "",
    ) -> dict[str, Any]:
        """Ask for something once; repeated with the same id it changes nothing more.

        Raises:
            InvalidField: no such action, or fields that do not go with it. NotFound: no such
            artifact. Refused: it does not fit, or there is nothing to do that to. Unavailable:
            another planner leads, or the registry cannot be asked.
        """
        _check_fields(action, to, surge)
        shown = await self.show(model)
        last = shown["policy"]["asked"]
        if last is not None and last["id"] == asked_id:
            return shown
        if not self._leading():
            leader = shown["leader"]
            elsewhere = f"ask the one that leads: --planner {leader['at'] or 'HOST:PORT'}"
            raise Unavailable(
                f"this planner stands by ({shown['degraded']})",
                "ask again when that lease has run out" if leader["former_life"] else elsewhere,
            )
        changes: dict[str, Any] = {
            "rollout": {
                "asked": {
                    "id": asked_id,
                    "action": action,
                    "by": by[:200],
                    "at_s": self._clock.wall_s(),
                }
            }
        }
        if action == "go":
            profiles = self._profiles()
            found = await fitting(self._registry, to, model=shown["model"], profiles=profiles)
            digest = found.digest
            if shown["serves"]["digest"] == digest and shown["phase"] in {"idle", "done"}:
                raise Refused(f"roll-out to {to}", [f"{digest} serves already"], "name another")
            changes["manifest"] = to
            if surge:
                changes["rollout"]["surge"] = surge
        else:
            phases, why = MEANS[action]
            known = action != "undo" or shown["from"]["digest"]
            if shown["phase"] not in phases or not known:
                phase = shown["phase"]
                told = ALREADY.get((action, phase), f"{why}: it is {phase}")
                raise Refused(f"{action} of the roll-out", [told])
        await self._planned.set_policy(
            changes, model=model, merge=True, expected_version=shown["policy_version"]
        )
        log.info("roll-out: %s", action, extra={"by": by, "to": to, "asked_id": asked_id})
        return await self.show(model)


def _check_fields(action: str, to: str, surge: int) -> None:
    if action not in ACTIONS:
        raise InvalidField("action", action, f"use {', '.join(ACTIONS)}")
    if (action == "go") != bool(to):
        remedy = "name a digest, tag or model" if action == "go" else "leave it out"
        raise InvalidField("to", to, remedy)
    if not 0 <= surge <= SURGE_MAX:
        raise InvalidField("surge", surge, f"use 1 to {SURGE_MAX}, 0 for the policy's")
    if surge and action != "go":
        raise InvalidField("surge", surge, "give it with go")
