"""Worker-seconds from allocation to release, by role: what capacity has cost so far (R25.2).

Billed are boot, warm-up, serving and drain; an instance that the actuator has forgotten keeps what
it cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from readyplane.ports import Instance

LIVE_MAX = 100_000


class WorkerSeconds:
    """Sums over instances, each counted once."""

    def __init__(self) -> None:
        self._live: dict[str, tuple[str, float]] = {}
        self._ended: dict[str, float] = {}
        self._closed: dict[str, None] = {}

    def take(self, instances: Sequence[Instance] | None) -> None:
        """Take the actuator's list; None (it did not answer) changes nothing."""
        if instances is None:
            return
        listed: set[str] = set()
        for instance in instances:
            worker_id = instance.order.worker_id
            listed.add(worker_id)
            if worker_id in self._closed:
                continue
            role = str(instance.order.role)
            ended_ago_s = instance.exited_ago_s
            if ended_ago_s is None:
                self._live[worker_id] = (role, instance.allocated_ago_s)
                continue
            self._live.pop(worker_id, None)
            cost_s = max(0.0, instance.allocated_ago_s - ended_ago_s)
            self._ended[role] = self._ended.get(role, 0.0) + cost_s
            self._closed[worker_id] = None
        for worker_id in [w for w in self._live if w not in listed]:
            role, cost_s = self._live.pop(worker_id)
            self._ended[role] = self._ended.get(role, 0.0) + cost_s
            self._closed[worker_id] = None
        while len(self._closed) > LIVE_MAX:
            self._closed.pop(next(iter(self._closed)))

    def by_role(self) -> Mapping[str, float]:
        """Seconds so far, the living up to the last list."""
        total = dict(self._ended)
        for role, cost_s in self._live.values():
            total[role] = total.get(role, 0.0) + cost_s
        return total
