"""The upgrade of a serving worker's graphs: its one table, and what each stage promises (pure, R14).

Owns which step may follow which, whether an upgrade is worth its KV, the questions of its check and
the judgement of their answers. Hands stages to `upgrading`, which asks the engine and the router.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, islice

from readyplane.core import gate_checks as gc
from readyplane.core.errors import Conflict
from readyplane.core.stage import CapacityStage, UpgradeState
from readyplane.core.worker import CheckResult
from readyplane_agent.engines.offers import Graphs

KV_LEFT_SHARE_MIN = 0.5
"""An upgrade that would leave less of the KV is not made: the memory serves more as KV."""
TOGETHER = 4
"""So many of the questions are asked at once, so that a larger shape answers, too."""
QUESTION_TOKENS_MAX = 128


class Step(StrEnum):
    """What happened to an upgrade. INTERRUPTED: the worker has to do something else first."""

    RESERVED = "reserved"
    CAPTURED = "captured"
    CHECKED = "checked"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


TRANSITIONS: Mapping[tuple[UpgradeState, Step], UpgradeState] = {
    (UpgradeState.FIRST, Step.RESERVED): UpgradeState.CAPTURING,
    (UpgradeState.CAPTURING, Step.CAPTURED): UpgradeState.CHECKING,
    (UpgradeState.CHECKING, Step.CHECKED): UpgradeState.COMPLETE,
    # Whatever fails leads back to what the start had, and is not tried again in this life.
    (UpgradeState.FIRST, Step.FAILED): UpgradeState.ROLLED_BACK,
    (UpgradeState.CAPTURING, Step.FAILED): UpgradeState.ROLLED_BACK,
    (UpgradeState.CHECKING, Step.FAILED): UpgradeState.ROLLED_BACK,
    (UpgradeState.COMPLETE, Step.FAILED): UpgradeState.ROLLED_BACK,
    # A drain, a flip or a lost lease comes between: nothing has failed, it may begin again.
    (UpgradeState.FIRST, Step.INTERRUPTED): UpgradeState.FIRST,
    (UpgradeState.CAPTURING, Step.INTERRUPTED): UpgradeState.FIRST,
    (UpgradeState.CHECKING, Step.INTERRUPTED): UpgradeState.FIRST,
    (UpgradeState.COMPLETE, Step.INTERRUPTED): UpgradeState.COMPLETE,
    (UpgradeState.ROLLED_BACK, Step.INTERRUPTED): UpgradeState.ROLLED_BACK,
    (UpgradeState.UNSUPPORTED, Step.INTERRUPTED): UpgradeState.UNSUPPORTED,
}


def step(state: UpgradeState, event: Step) -> UpgradeState:
    """The state after an event. Raises Conflict: it has no place there; the allowed are named."""
    found = TRANSITIONS.get((state, event))
    if found is None:
        allowed = ", ".join(str(e) for (at, e) in TRANSITIONS if at is state)
        raise Conflict(
            f"upgrade in state {state}", allowed, str(event), "tell what the table allows"
        )
    return found


@dataclass(frozen=True, slots=True)
class Terms:
    """What does not change from stage to stage: the profile's name, tokens a block."""

    profile: str
    block_size: int

    def first(self, graphs: Graphs) -> CapacityStage:
        """As the start left it."""
        tokens = graphs.kv_total_blocks * self.block_size
        return CapacityStage(
            UpgradeState.FIRST, self.profile, graphs.used, tokens, graphs.graph_bytes
        )

    def reserved(self, graphs: Graphs, state: UpgradeState) -> CapacityStage:
        """While it is captured and checked: the KV of afterwards, the times of before.

        Promised before the engine takes the memory, so that nobody counts on it meanwhile.
        """
        tokens = min(graphs.kv_blocks_after, graphs.kv_total_blocks) * self.block_size
        return CapacityStage(state, self.profile, graphs.used, tokens, graphs.graph_bytes)

    def complete(self, graphs: Graphs) -> CapacityStage:
        """Requests run with all graphs."""
        tokens = graphs.kv_total_blocks * self.block_size
        return CapacityStage(
            UpgradeState.COMPLETE, self.profile, graphs.used, tokens, graphs.graph_bytes
        )

    def rolled_back(self, graphs: Graphs, failure: str) -> CapacityStage:
        """As the start left it, and why."""
        tokens = graphs.kv_total_blocks * self.block_size
        return CapacityStage(
            UpgradeState.ROLLED_BACK,
            self.profile,
            graphs.used,
            tokens,
            graphs.graph_bytes,
            failure or "it failed, nobody said why",
        )

    def unsupported(self, why: str, *, kv_total_blocks: int) -> CapacityStage:
        """Of an engine that was started whole because it has no stages."""
        tokens = kv_total_blocks * self.block_size
        return CapacityStage(UpgradeState.UNSUPPORTED, self.profile, (), tokens, None, why)


def why_not(graphs: Graphs, *, max_model_len: int, block_size: int) -> str:
    """Why an upgrade is not worth its KV, or cannot be; empty when it is."""
    left, now = graphs.kv_blocks_after, graphs.kv_total_blocks
    if left * block_size < max_model_len:
        return f"{left} KV blocks would be left, fewer than one request of {max_model_len} tokens"
    if left < KV_LEFT_SHARE_MIN * now:
        return f"{left} of {now} KV blocks would be left, {KV_LEFT_SHARE_MIN:.0%} are kept"
    return ""


def questions(prompt: Sequence[int], *, max_model_len: int) -> tuple[tuple[int, ...], ...]:
    """Prompts of the check: the canary's, and others made of its tokens, of other lengths."""
    most = max(1, min(QUESTION_TOKENS_MAX, max_model_len // 2))
    lengths = [max(1, most * n // TOGETHER) for n in range(1, TOGETHER + 1)]
    others = [
        tuple(islice(cycle((*prompt[n % len(prompt) :], *prompt[: n % len(prompt)])), length))
        for n, length in enumerate(lengths, 1)
    ]
    return (tuple(prompt), *others)


def judged(
    before: Sequence[tuple[int, ...]],
    after: Sequence[tuple[int, ...]],
    graphs: Graphs,
    plan: Graphs,
) -> CheckResult:
    """The check of an upgrade: token for token the same, and as much KV left as was promised."""
    pairs = [
        {"before": list(one), "after": list(two)} for one, two in zip(before, after, strict=True)
    ]
    why = []
    differ = [n for n, pair in enumerate(pairs) if pair["before"] != pair["after"]]
    if differ:
        why.append(f"other tokens with the new graphs at questions {differ}")
    if not all(pair["before"] for pair in pairs):
        why.append("a question got no token")
    if graphs.kv_total_blocks != plan.kv_blocks_after:
        why.append(f"{graphs.kv_total_blocks} KV blocks left, promised {plan.kv_blocks_after}")
    missing = sorted(set(plan.wanted) - set(graphs.captured))
    if missing:
        why.append(f"shapes {missing[:8]} are not captured")
    evidence = {
        "answers": pairs,
        "shapes": list(graphs.captured),
        "kv_total_blocks": graphs.kv_total_blocks,
        "graph_bytes": graphs.graph_bytes,
    }
    return CheckResult(gc.GRAPH_STAGE, passed=not why, evidence=evidence, reason="; ".join(why))
