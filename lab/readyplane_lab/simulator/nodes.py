"""Machines of a simulated cluster: who runs where, and which of them hold the weights.

Owns the places on them. An order's preference is honoured where there is room, else the emptiest
machine is taken and the instance says so. A machine that has loaded the weights once keeps them on its
disk. Without machines every worker has one of its own, which holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from readyplane.core.errors import Refused
from readyplane.core.startup import WeightTier
from readyplane.ports import Order, RankedSource, Source
from readyplane_lab.simulator.startup import StartUpModel


class Nodes:
    """Args:
    gpus: of each machine. gpus_of: of a worker of a class.
    """

    def __init__(
        self, gpus: Mapping[str, int], startup: StartUpModel, *, gpus_of: Callable[[str], int]
    ) -> None:
        self._gpus, self._startup, self._gpus_of = dict(gpus), startup, gpus_of
        self._of: dict[str, str] = {}
        self._taken: dict[str, int] = {}
        self._notes: dict[str, str] = {}
        self._holding: set[str] = set()

    def take(self, order: Order) -> None:
        """Give a worker its place.

        Raises:
            Refused: no machine has room for it.
        """
        if not self._gpus:
            return
        each = self._gpus_of(order.worker_class)
        free = {name: self._free(name) for name in self._gpus}
        room = [name for name in free if free[name] >= each]
        if not room:
            raise Refused(f"order of {order.worker_id}", ["no machine has room"], "ask again later")
        wanted = [name for name in order.node_preference if name in room]
        node = wanted[0] if wanted else min(room, key=lambda name: (-free[name], name))
        if order.node_preference and node != order.node_preference[0]:
            self._notes[order.worker_id] = f"wanted {order.node_preference[0]}, which has no room"
        self._of[order.worker_id], self._taken[order.worker_id] = node, each

    def give(self, worker_id: str) -> None:
        """Its place is free again."""
        self._taken.pop(worker_id, None)

    def of(self, worker_id: str) -> str:
        """Where a worker runs or ran."""
        return self._of.get(worker_id, worker_id)

    def note_of(self, worker_id: str) -> str:
        """Why it is not where it was wanted."""
        return self._notes.get(worker_id, "")

    def loaded(self, worker_id: str) -> None:
        """The weights have come to its machine."""
        if worker_id in self._of:
            self._holding.add(self._of[worker_id])

    def holds(self, worker_id: str) -> bool:
        """Whether the machine of a worker has the weights."""
        return self._of.get(worker_id) in self._holding

    def way(self, node: str, digest: str) -> tuple[RankedSource, ...]:
        """What a registry would say of the way of the weights to a machine."""
        if node not in self._gpus:
            return ()
        near = node in self._holding
        tier = WeightTier.L2_NVME if near else WeightTier.L4_OBJECT
        rate = self._startup.disk_bytes_per_s if near else self._startup.store_bytes_per_s
        source = Source(f"{tier}:{node}", digest, tier, "", node=node if near else "")
        return (RankedSource(source, self._startup.weight_bytes / rate, "modelled"),)

    def _free(self, node: str) -> int:
        held = sum(n for worker_id, n in self._taken.items() if self._of[worker_id] == node)
        return self._gpus[node] - held
