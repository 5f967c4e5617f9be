"""Which adapter serves a `--engine` name, and what is asked of an adapter beside the engine port.

Adapters are imported only when they are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile
from readyplane.core.worker import Serving
from readyplane.kit.clock import Clock
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.engines.port import EnginePort
from readyplane_agent.settings import AgentSettings


@runtime_checkable
class HasClient(Protocol):
    """An adapter that keeps a client of its engine (with its token)."""

    @property
    def client(self) -> OpenAiEngine:
        """Asks the engine."""
        ...


@runtime_checkable
class TellsFormats(Protocol):
    """An adapter that knows more of its engine's formats than the engine's metrics tell."""

    def formats(self) -> Mapping[str, str]:
        """`quantisation` and `kv_dtype`, each only where it is known."""
        ...


@runtime_checkable
class HasMemoryAccount(Protocol):
    """An adapter whose engine may measure its own KV pool."""

    def memory_account(self) -> Mapping[str, Any]:
        """Empty when nothing was measured."""
        ...


def client_of(engine: EnginePort, serving: Serving, *, model: str) -> OpenAiEngine:
    """A client of a ready engine."""
    if isinstance(engine, HasClient):
        return engine.client
    return OpenAiEngine(serving.engine_url, model=model)


def ordered_kv_tokens(s: AgentSettings, profile: ClassProfile, engine: EnginePort) -> int | None:
    """KV tokens that the engine was told to hold; None where it measures them itself."""
    if s.engine == "attached":
        return None
    if isinstance(engine, HasMemoryAccount):
        if engine.memory_account():
            return None
        return s.kv_tokens or profile.kv_capacity_tokens
    return s.kv_tokens or None


def engine_for(
    name: str,
    *,
    clock: Clock,
    url: str = "",
    model: str = "",
    profile: str = "",
    token: str = "",
    tp: int = 1,
    program: Path | None = None,
) -> EnginePort:
    """A new engine port by name.

    Args:
        url, model, profile, token: of an attached engine. tp: of a modelled one. program: of vLLM.

    Raises:
        InvalidField: no such engine.
    """
    if name == "modelled" and tp > 1:
        from readyplane_agent.engines.modelled.group import ModelledGroup

        return ModelledGroup(clock=clock)
    if name == "modelled":
        from readyplane_agent.engines.modelled.adapter import ModelledEngine

        return ModelledEngine(clock=clock)
    if name == "vllm":
        from readyplane_agent.engines.vllm import VllmEngine

        return VllmEngine(clock=clock, program=program)
    if name == "sglang":
        from readyplane_agent.engines.sglang import SglangEngine

        return SglangEngine(clock=clock)
    if name == "attached":
        from readyplane_agent.engines.attached import AttachedEngine

        return AttachedEngine(url, model=model, profile=profile, clock=clock, token=token)
    raise InvalidField("--engine", name, "write modelled, vllm, sglang or attached")
