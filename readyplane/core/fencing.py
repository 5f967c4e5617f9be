"""The newest leadership that has acted on a model: older ones are refused from then on (B146).

Owns the rule alone; whoever carries orders out (actuator, router, their twins) keeps one `Fences`.
By model, since planners of several models share an actuator and their numbers say nothing of each
other. Number 0 is no planner: what a person asks for is not fenced.
"""

from __future__ import annotations

from readyplane.core.errors import StaleEpoch

LEADER_EPOCH = "leader_epoch"
MODELS_MAX = 4096


class Fences:
    """The greatest leader's number seen, by model; it never goes back."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    def take(self, model: str, leader_epoch: int) -> None:
        """Remember a leader's number.

        Raises:
            StaleEpoch: a newer leader has been seen; nothing may be done for this one.
        """
        if leader_epoch <= 0:
            return
        newest = self._newest.get(model, 0)
        if leader_epoch < newest:
            raise StaleEpoch(
                LEADER_EPOCH, leader_epoch, newest, "a newer planner leads; stop acting"
            )
        if model not in self._newest and len(self._newest) >= MODELS_MAX:
            self._newest.pop(next(iter(self._newest)))
        self._newest[model] = leader_epoch

    def newest(self, model: str) -> int:
        """The greatest number seen, 0 for none."""
        return self._newest.get(model, 0)
