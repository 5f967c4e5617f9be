"""The ports over gRPC: one client for each service, errors raised as core errors."""

from readyplane.client.actuator import ActuatorClient
from readyplane.client.planner import PlannerClient
from readyplane.client.registry import RegistryClient
from readyplane.client.router import RouterClient

__all__ = ["ActuatorClient", "PlannerClient", "RegistryClient", "RouterClient"]
