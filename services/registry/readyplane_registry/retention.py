"""Which manifests are needed, and why; the others may be retired. Pure.

Owns the rules of retention: tags, also where they pointed lately; workers that hold or read the
bytes; recent use and publication; the newest of a model. Handed to `collecting`, which acts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from readyplane.core.resolution import WITHDRAWN

DAY_S = 86_400.0
NAMES_SHOWN_MAX = 3
OF_MACHINES = ("compile/", "kv/", WITHDRAWN)
"""How tags begin that agents set. Each names what it was made for and none is ever taken back, so that
none keeps an artifact by itself: it stays as long as somebody asks for it."""


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """How long what is kept.

    Attributes:
        keep_untagged_s: since publication, and since a worker last asked for it or read from it.
        keep_history_s: since a tag moved away from it: a roll-back needs no download (B114).
        grace_s: bytes outlive what made them needless by this long: a retired manifest, a last
            reader, an upload that was never published.
    """

    keep_untagged_s: float = 30 * DAY_S
    keep_history_s: float = 30 * DAY_S
    grace_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """What is known of one manifest that is not retired; times are seconds since the epoch.

    Attributes:
        sequence: place in the order of publication.
        used_s: when a worker last planned to fetch it or read from the store; None: never.
        left_s: when a tag last moved away from it; None: never.
        tags: that point at it now.
    """

    digest: str
    model: str
    kind: str
    sequence: int
    created_s: float
    used_s: float | None = None
    left_s: float | None = None
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Kept:
    """A manifest that stays, and why."""

    digest: str
    why: str


@dataclass(frozen=True, slots=True)
class Retention:
    """The verdict on all manifests: those that nobody needs, and the others with their reasons."""

    needless: tuple[str, ...]
    kept: tuple[Kept, ...]


def retention(
    manifests: Sequence[ManifestFacts], *, now_s: float, policy: RetentionPolicy
) -> Retention:
    """Which manifests nobody needs by what the catalogue knows; live sources are asked after.

    Args:
        now_s: the clock that stamped the facts, seconds since the epoch.
    """
    newest: dict[tuple[str, str], int] = {}
    for facts in manifests:
        name = (facts.model, facts.kind)
        newest[name] = max(newest.get(name, 0), facts.sequence)
    needless: list[str] = []
    kept: list[Kept] = []
    for facts in manifests:
        is_newest = newest[facts.model, facts.kind] == facts.sequence
        why = next((told for rule in RULES if (told := rule(facts, now_s, policy))), "")
        withdrawn = any(name.startswith(WITHDRAWN) for name in facts.tags)
        if not why and is_newest and not withdrawn:
            why = f"newest {facts.kind} of model {facts.model}, which its name resolves to"
        if why:
            kept.append(Kept(facts.digest, why))
        else:
            needless.append(facts.digest)
    return Retention(tuple(needless), tuple(kept))


def _tagged(facts: ManifestFacts, _now_s: float, _policy: RetentionPolicy) -> str:
    tags = [name for name in facts.tags if not name.startswith(OF_MACHINES)]
    shown = ", ".join(tags[:NAMES_SHOWN_MAX])
    return f"tag {shown} points at it" if tags else ""


def _left(facts: ManifestFacts, now_s: float, policy: RetentionPolicy) -> str:
    told = _since(facts.left_s, now_s, policy.keep_history_s)
    return f"a tag moved away from it {told}" if told else ""


def _used(facts: ManifestFacts, now_s: float, policy: RetentionPolicy) -> str:
    told = _since(facts.used_s, now_s, policy.keep_untagged_s)
    return f"a worker asked for it {told}" if told else ""


def _young(facts: ManifestFacts, now_s: float, policy: RetentionPolicy) -> str:
    told = _since(facts.created_s, now_s, policy.keep_untagged_s)
    return f"published {told}" if told else ""


def _since(at_s: float | None, now_s: float, keep_s: float) -> str:
    """How long ago, when that is within `keep_s`; a time to come counts as now."""
    if at_s is None or now_s - at_s >= keep_s:
        return ""
    return f"{max(0.0, now_s - at_s) / DAY_S:.1f} days ago, kept {keep_s / DAY_S:g}"


Rule = Callable[[ManifestFacts, float, RetentionPolicy], str]
RULES: tuple[Rule, ...] = (_tagged, _left, _used, _young)
