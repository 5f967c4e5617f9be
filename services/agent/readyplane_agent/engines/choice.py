"""Which adapter serves a `--engine` name. Adapters are imported only when they are chosen."""

from __future__ import annotations

from readyplane.core.errors import InvalidField
from readyplane.kit.clock import Clock
from readyplane_agent.engines.port import EnginePort


def engine_for(
    name: str, *, clock: Clock, url: str = "", model: str = "", profile: str = "", token: str = ""
) -> EnginePort:
    """A new engine port by name; `url` is for an attached engine only.

    Raises:
        InvalidField: no such engine.
    """
    if name == "modelled":
        from readyplane_agent.engines.modelled.adapter import ModelledEngine

        return ModelledEngine(clock=clock)
    if name == "vllm":
        from readyplane_agent.engines.vllm import VllmEngine

        return VllmEngine(clock=clock)
    if name == "attached":
        from readyplane_agent.engines.attached import AttachedEngine

        return AttachedEngine(url, model=model, profile=profile, clock=clock, token=token)
    raise InvalidField("--engine", name, "write modelled, vllm or attached")
