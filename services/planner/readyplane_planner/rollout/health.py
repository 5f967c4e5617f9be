"""Whether the new generation serves as well as the others did, from what requests came to.

A request counts for the generation of the pair that served it: attained when both targets were met,
missed when one was not or a worker failed it. Few requests tell nothing: unknown is neither good
nor bad.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from readyplane_planner.rollout.values import Evidence, Rules, Tally

Z = 1.645
"""One-sided 95 %: a handful of unlucky requests is no verdict."""


class Health(StrEnum):
    """What is known of the new generation."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict in words; shares are of all that ended, None when too few did."""

    health: Health
    text: str
    new: float | None
    old: float | None
    samples: int


def gather(
    evidence: Evidence,
    tallies: Mapping[str, Tally] | None,
    goal: str,
    rules: Rules,
    *,
    now_s: float,
) -> Evidence:
    """The window with the ends of this tick; what is not known adds nothing. `goal` is empty at rest.

    A half of the window is over after `verify_s`, and not before it has samples enough to judge by
    or `patience_s` have passed: slow traffic fills it slowly, and what is old counts no more.
    """
    since_s = evidence.since_s
    if since_s is None:
        evidence, since_s = replace(evidence, since_s=now_s), now_s
    age_s = now_s - since_s
    judged = evidence.new_now if goal else evidence.old_now
    enough = judged.ended >= rules.samples_min
    if age_s >= rules.patience_s or (enough and age_s >= rules.verify_s):
        evidence = replace(
            evidence,
            new_now=Tally(),
            new_past=evidence.new_now,
            old_now=Tally(),
            old_past=evidence.old_now,
            since_s=now_s,
        )
    for digest, tally in (tallies or {}).items():
        if digest == goal:
            evidence = replace(evidence, new_now=evidence.new_now + tally)
        else:
            evidence = replace(evidence, old_now=evidence.old_now + tally)
    old = evidence.old_now + evidence.old_past
    if old.ended >= max(1, rules.samples_min):
        evidence = replace(evidence, baseline=old.attained / old.ended)
    return evidence


def renewed(evidence: Evidence) -> Evidence:
    """Nothing is known of the new generation any more; of the others what is known stays."""
    return replace(evidence, new_now=Tally(), new_past=Tally(), since_s=None, late=0)


def swapped(evidence: Evidence, rules: Rules) -> Evidence:
    """What was judged serves alone from now on: the next generation is compared with it."""
    new = evidence.new_now + evidence.new_past
    known = new.ended >= max(1, rules.samples_min)
    return Evidence(old_past=new, baseline=new.attained / new.ended if known else None)


def judge(evidence: Evidence, rules: Rules, *, promised: float) -> Finding:
    """Compare. `promised`: share that the policy promises, where nothing was seen of the others.

    Unhealthy is only what would hardly be chance: the upper bound of the new share (Wilson) lies
    below `rollback_below` times the old one.
    """
    new = evidence.new_now + evidence.new_past
    # Whoever is too late already is a miss now: a slow generation must not be judged by its slowness
    # to end anything.
    samples = new.ended + evidence.late
    if samples < max(1, rules.samples_min):
        text = f"{samples} of {rules.samples_min} requests of the new generation have ended"
        return Finding(Health.UNKNOWN, text, None, evidence.baseline, samples)
    share = new.attained / samples
    old = promised if evidence.baseline is None else evidence.baseline
    of = "promised" if evidence.baseline is None else "attained by the old one"
    text = f"{share:.1%} of {samples} requests attained, {old:.1%} {of}"
    if new.failed or evidence.late:
        text += f", {new.failed} failed, {evidence.late} are late"
    bad = _upper(new.attained, samples) < rules.rollback_below * old
    return Finding(Health.UNHEALTHY if bad else Health.HEALTHY, text, share, old, samples)


def _upper(good: int, of: int) -> float:
    """Upper bound of the share behind `good` of `of`."""
    share, z2 = good / of, Z * Z
    spread = Z * math.sqrt(share * (1.0 - share) / of + z2 / (4.0 * of * of))
    return (share + z2 / (2.0 * of) + spread) / (1.0 + z2 / of)
