"""The planner's port: what should be, and why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol


class Planner(Protocol):
    """What should be, and why. Documents are JSON objects described in the planner's README."""

    async def state(self, model: str = "") -> dict[str, Any]:
        """What a person watches."""
        ...

    def watch_state(self, model: str = "") -> AsyncIterator[dict[str, Any]]:
        """The same after every tick."""
        ...

    async def list_decisions(
        self, *, model: str = "", limit: int = 50, changes_only: bool = False
    ) -> list[dict[str, Any]]:
        """Newest first."""
        ...

    async def explain(self, decision_id: str) -> dict[str, Any]:
        """One decision with what came of it. Raises NotFound."""
        ...

    async def replay(self, decision_id: str) -> dict[str, Any]:
        """It is taken again from its recorded inputs and compared. Raises NotFound, InvalidField."""
        ...

    async def what_if(self, changes: Mapping[str, str], *, model: str = "") -> dict[str, Any]:
        """The last decision beside the one under changes. Raises UnknownField, InvalidField."""
        ...

    async def get_policy(self, model: str = "") -> tuple[dict[str, Any], int]:
        """Policy in force and its version."""
        ...

    async def set_policy(
        self,
        policy: Mapping[str, Any],
        *,
        model: str = "",
        merge: bool = False,
        expected_version: int = 0,
    ) -> tuple[dict[str, Any], int]:
        """Compare-and-set. Raises UnknownField, InvalidField, Conflict."""
        ...

    async def set_paused(self, paused: bool, *, model: str = "", reason: str = "") -> bool:
        """Hold all targets, or let go."""
        ...
