"""Prefix hits that were counted on, against those that engines report.

Owns how far the belief in one worker's prefixes may be trusted (field report B104): an engine that
drops blocks without a word, or hashes them otherwise, is counted on again and again for hits that it
never has. Hits are compared as sums over a window, those counted on some time earlier, for a prompt
that waits has not hit yet. Engines that report no hits are not judged: unknown is not zero.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

LAG_S = 15.0
WINDOW_S = 120.0
SAMPLE_EVERY_S = 5.0
COUNTED_TOKENS_MIN = 32_768
TRUSTED_RATIO_MIN = 0.5
"""Below this the belief is lowered by as much. Honest engines evict what was counted on now and then."""


@dataclass(slots=True)
class _Worker:
    counted: int = 0  # tokens counted on, ever
    # (when, counted on until then, reported until then)
    samples: deque[tuple[float, int, int]] = field(default_factory=deque)
    ratio: float | None = None


class HitGap:
    """Hits of each worker, counted on and reported.

    Attributes:
        doubted: what a credit of a worker is worth that hits less than it should; others are absent.
    """

    def __init__(self) -> None:
        """Nobody is doubted."""
        self._workers: dict[str, _Worker] = {}
        self.doubted: dict[str, float] = {}

    def count_on(self, key: str, tokens: int) -> None:
        """A prompt was sent for whose first `tokens` a worker is believed to have the KV."""
        self._workers.setdefault(key, _Worker()).counted += tokens

    def reported(self, key: str, cached_tokens_total: int | None, *, now_s: float) -> None:
        """What an engine says it has found in its cache, in all."""
        worker = self._workers.get(key)
        if worker is None or cached_tokens_total is None:
            return
        samples = worker.samples
        if samples and cached_tokens_total < samples[-1][2]:
            samples.clear()  # its counter began anew
        while samples and samples[0][0] < now_s - WINDOW_S:
            samples.popleft()
        if samples and now_s - samples[-1][0] < SAMPLE_EVERY_S:
            return
        samples.append((now_s, worker.counted, cached_tokens_total))
        due = [counted for when_s, counted, _ in samples if when_s <= now_s - LAG_S]
        counted = due[-1] - samples[0][1] if due else 0
        if counted < COUNTED_TOKENS_MIN:
            worker.ratio = None
        else:
            worker.ratio = min(1.0, (cached_tokens_total - samples[0][2]) / counted)
        if worker.ratio is not None and worker.ratio < TRUSTED_RATIO_MIN:
            self.doubted[key] = worker.ratio
        elif worker.ratio is not None:
            self.doubted.pop(key, None)

    def ratios(self) -> dict[str, float]:
        """Reported over counted on, of those workers of whom enough is known."""
        return {k: w.ratio for k, w in self._workers.items() if w.ratio is not None}

    def forget(self, key: str) -> None:
        """A worker is gone."""
        self._workers.pop(key, None)
        self.doubted.pop(key, None)
