"""The services as Protocols in core words: what a caller may rely on, whoever implements it.

Implemented by each service's `service.py` (in process, for the simulator), by `readyplane.client`
(over gRPC), and checked by one contract suite. Errors are those of `readyplane.core.errors`.
"""

from readyplane.ports.actuator import (
    Actuator,
    Instance,
    Order,
)
from readyplane.ports.planner import (
    Planner,
)
from readyplane.ports.registry import (
    FetchPlan,
    ManifestSummary,
    RankedSource,
    Registry,
    Source,
    StartChoice,
    StartNode,
    StartPlacement,
    Tag,
    Transfer,
)
from readyplane.ports.router import (
    Directive,
    End,
    GateVerdict,
    GroupStatus,
    LatencyWindow,
    ModelSignals,
    Mover,
    Pair,
    RankReport,
    Renewal,
    RenewalAnswer,
    Router,
    RouterSignals,
)

__all__ = [
    "Actuator",
    "Directive",
    "End",
    "FetchPlan",
    "GateVerdict",
    "GroupStatus",
    "Instance",
    "LatencyWindow",
    "ManifestSummary",
    "ModelSignals",
    "Mover",
    "Order",
    "Pair",
    "Planner",
    "RankReport",
    "RankedSource",
    "Registry",
    "Renewal",
    "RenewalAnswer",
    "Router",
    "RouterSignals",
    "Source",
    "StartChoice",
    "StartNode",
    "StartPlacement",
    "Tag",
    "Transfer",
]
