"""What the registry says of where workers may start: compile artifacts, and the way to each node.

Owns asking it, seldom and within a bound. A registry that is away leaves what was known: content does
not change, and a node's way to it changes slowly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from readyplane.core.errors import ReadyplaneError
from readyplane.core.identity import ArtifactKind, Manifest
from readyplane.core.startup import StartMode
from readyplane.ports import StartChoice, StartNode, StartPlacement
from readyplane_planner.decide import Plan
from readyplane_planner.signals import NodeView

log = logging.getLogger(__name__)


class Resolver(Protocol):
    """The part of the registry that the planner needs."""

    async def resolve(
        self, reference: str, *, kind: str = "weights", need: Mapping[str, str] | None = None
    ) -> Manifest:
        """By digest, tag or model name. Raises NotFound."""
        ...

    async def place_start(
        self, digest: str, *, nodes: Sequence[StartNode], starts: int = 1, layout_digest: str = ""
    ) -> StartPlacement:
        """Where to start next, over (node, source)."""
        ...


class Places:
    """Args:
    every_s: how often the registry is asked. timeout_s: bounds one round of questions.
    """

    def __init__(self, registry: Resolver | None, *, every_s: float, timeout_s: float) -> None:
        self.compiled: tuple[str, ...] = ()
        self.nodes: tuple[NodeView, ...] = ()
        self._registry = registry
        self._every_s, self._timeout_s = every_s, timeout_s
        self._about: tuple[str, tuple[str, ...]] | None = None
        self._asked_s = 0.0

    async def look(self, plan: Plan, *, now_s: float) -> None:
        """Ask again when it is time, or the artifact or the nodes are others."""
        if self._registry is None or not plan.manifest_digest:
            return
        if plan.start_mode != "auto" and not plan.nodes:
            return
        names = tuple(n.name for n in plan.nodes)
        about = plan.manifest_digest, names
        if self._about == about and now_s - self._asked_s < self._every_s:
            return
        self._about, self._asked_s = about, now_s
        try:
            async with asyncio.timeout(self._timeout_s):
                if plan.start_mode == "auto":
                    self.compiled = await self._compiled(self._registry, plan.model)
                self.nodes = await self._nodes(self._registry, plan)
        except (ReadyplaneError, OSError, TimeoutError) as error:
            log.warning("places: %s", str(error) or type(error).__name__)

    async def _compiled(self, registry: Resolver, model: str) -> tuple[str, ...]:
        """Start modes for which something was compiled ahead."""
        found = []
        for mode in (StartMode.JIT, StartMode.AOT):
            try:
                manifest = await registry.resolve(
                    model, kind=ArtifactKind.COMPILE, need={"key.mode": mode}
                )
            except ReadyplaneError:  # none of that mode, which is an answer
                continue
            if manifest.kind is ArtifactKind.COMPILE:
                found.append(str(mode))
        return tuple(found)

    async def _nodes(self, registry: Resolver, plan: Plan) -> tuple[NodeView, ...]:
        """The best way to every node, as the registry ranks them over (node, source)."""
        found = await registry.place_start(
            plan.manifest_digest, nodes=[StartNode(node.name) for node in plan.nodes]
        )
        ways = {way.node: way for way in (*found.choices, *found.alternatives)}
        return tuple(
            _view(ways[node.name]) if node.name in ways else _unreached(node.name, found.excluded)
            for node in plan.nodes
        )


def _view(way: StartChoice) -> NodeView:
    source = way.source
    return NodeView(way.node, way.artifact_s, str(source.tier), source.node, way.why)


def _unreached(node: str, excluded: Sequence[str]) -> NodeView:
    mark = f"node {node}: "
    told = [reason.removeprefix(mark) for reason in excluded if reason.startswith(mark)]
    return NodeView(node, why=told[0] if told else "the registry ranks so many nodes only")
