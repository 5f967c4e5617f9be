"""Who may play and on what: every baseline, bound and scenario that has a file, and our planner."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from readyplane_lab.proof import baselines, ours
from readyplane_lab.proof import scenarios as found
from readyplane_lab.proof.port import Contender, Scenario


@lru_cache(maxsize=1)
def contenders() -> Mapping[str, Contender]:
    """By name; our planner first."""
    return {ours.CONTENDER.name: ours.CONTENDER, **baselines.contenders()}


@lru_cache(maxsize=1)
def scenarios() -> Mapping[str, Scenario]:
    """By name."""
    return found.scenarios()
