"""The engine model, with memory and speed that change while it runs (pure).

Owns what an upgrade does to one engine: blocks leave the KV pool for graphs, or come back, and
iterations take less time from the next one on. No request is touched: a block in use is never taken,
and the iteration under way ends as it began.
"""

from __future__ import annotations

from readyplane_agent.engines.modelled.core import EngineModel


class StagedEngineModel(EngineModel):
    """One engine whose graphs come later. `withheld`: blocks that graphs have taken."""

    withheld = 0

    def withhold(self, blocks: int, now_s: float) -> bool:
        """Take blocks out of the pool that nobody uses or will; False when there are not so many now.

        Who is here, running or waiting, is left all that its whole answer takes: none of them is ever
        preempted for it. Idle blocks that hold a prefix go first to last used, and are told as removed.
        """
        self._interrupt(now_s)
        size = self.block_size
        claimed = sum(
            -(-(s.request.prompt_tokens + s.request.output_tokens) // size)
            for s in self._all.values()
        )
        fits = claimed + blocks <= self.pool.total and blocks < self.pool.total
        if not fits or blocks > self.pool.available:
            return False
        self.pool.take(blocks)
        self._told_evictions(now_s)
        self.pool.private -= blocks
        self.pool.total -= blocks
        self.withheld += blocks
        return True

    def return_withheld(self, now_s: float) -> None:
        """Every withheld block is KV again."""
        self._interrupt(now_s)
        self.pool.total += self.withheld
        self.withheld = 0
        self._no_admission_at = -1

    def run_at(self, factor: float, now_s: float) -> None:
        """From the next iteration on every time is the profile's times `factor`."""
        self._interrupt(now_s)
        a, b, c = self.profile.decode_coefficients_s()
        self._factor = factor
        self._base, self._per_seq, self._per_token = (v * factor for v in (a, b, c))
