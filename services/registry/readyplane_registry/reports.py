"""What a reader's report of a transfer means for its source. Pure.

Owns the verdict (R9.2): barred for a while with a reason, or nothing. Handed to `fetching`.
"""

from __future__ import annotations

from dataclasses import dataclass

from readyplane_registry.rates import DEFAULT_POLICY, SourcePolicy


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a report means for the source: barred for a while with a reason, or nothing."""

    outcome: str
    bar_s: float = 0.0
    reason: str = ""

    @property
    def quarantine(self) -> bool:
        """True when the source gave wrong bytes and is believed to have done so."""
        return self.outcome == "corrupt" and self.bar_s > 0


FAILURES = ("dead", "slow", "corrupt")


def judge(
    failure: str,
    *,
    storage: bool,
    accused_before: int,
    policy: SourcePolicy = DEFAULT_POLICY,
) -> Verdict:
    """What to do with a source after a reader's report.

    Args:
        failure: empty, or `dead`, `slow`, `corrupt`, each with a detail after a colon.
        storage: the registry's own store is never barred: it is the last fallback, and it can be
            verified at home.
        accused_before: how many other sources this reader has called corrupt lately. A reader
            that finds all the world corrupt is more likely the faulty one.
    """
    kind, _, detail = failure.partition(":")
    kind, detail = kind.strip(), " ".join(detail.split())[:200]
    told = f" ({detail})" if detail else ""
    if not failure:
        return Verdict("ok")
    if kind not in FAILURES:
        return Verdict("other")
    if storage:
        return Verdict(kind)
    if kind == "corrupt":
        if accused_before >= policy.accusations_max:
            return Verdict("disbelieved")
        return Verdict(kind, policy.quarantine_s, f"quarantined for wrong bytes{told}")
    if kind == "dead":
        return Verdict(kind, policy.dead_s, f"it did not answer{told}")
    return Verdict(kind, policy.slow_s, f"its reader found it too slow{told}")
