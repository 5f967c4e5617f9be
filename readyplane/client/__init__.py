"""The ports over gRPC: one client for each service, errors raised as core errors.

Each is imported when it is first asked for: an agent needs two of the four, and its imports are
part of a start.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from readyplane.client.actuator import ActuatorClient
    from readyplane.client.planner import PlannerClient
    from readyplane.client.registry import RegistryClient
    from readyplane.client.router import RouterClient

__all__ = ["ActuatorClient", "PlannerClient", "RegistryClient", "RouterClient"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """`XClient` of the module `x` (PEP 562)."""
        if name in __all__:
            module = name.removesuffix("Client").lower()
            return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
