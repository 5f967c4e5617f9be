"""Another stage of a serving worker's capacity profile: may it be believed? (pure, R14)

Owns the judgement; `membership` changes the seat. What is promised may change in three places only,
its times, its shapes and its KV; the upgrade itself is believed when the same questions got the same
tokens before and with the new graphs. Less KV is believed at once: nobody is harmed by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from readyplane.core import gate_checks as gc
from readyplane.core.errors import InvalidField
from readyplane.core.stage import UpgradeState, check_stage
from readyplane.core.worker import CheckResult, Serving

QUESTIONS_MIN = 2


def why_not_stage(before: Serving, after: Serving, checks: Sequence[CheckResult]) -> list[str]:
    """Every reason why a stage cannot be taken over; empty when it can."""
    stage = after.stage
    if stage is None or before.stage is None:
        return ["stage: it was not started in stages"]
    reasons = []
    try:
        check_stage(stage, kv_total_blocks=after.kv_total_blocks, block_size=after.block_size)
    except InvalidField as error:
        reasons.append(f"stage: {error}")
    same = replace(after, stage=before.stage, kv_total_blocks=before.kv_total_blocks)
    if same != before:
        names = [n for n in Serving.__slots__ if getattr(same, n) != getattr(before, n)]
        reasons.append(f"stage: {', '.join(names)} differ from what the gate admitted")
    if stage.profile != before.stage.profile:
        reasons.append(f"stage: profile {stage.profile}, admitted was {before.stage.profile}")
    if before.stage.state is UpgradeState.UNSUPPORTED:
        reasons.append("stage: its engine has none to go to")
    if stage.state is UpgradeState.COMPLETE:
        if after.kv_total_blocks > before.kv_total_blocks:
            reasons.append(
                f"stage: {after.kv_total_blocks} KV blocks beside more graphs, "
                f"{before.kv_total_blocks} without them"
            )
        found = [c for c in checks if c.name == gc.GRAPH_STAGE]
        reasons += _canary(found[0], after) if len(found) == 1 else [f"{gc.GRAPH_STAGE}: not made"]
    return reasons


def _canary(check: CheckResult, after: Serving) -> list[str]:
    if not check.passed:
        return [f"{gc.GRAPH_STAGE}: {check.reason or 'failed, without saying why'}"]
    told: Mapping[str, Any] = check.evidence
    missing = [name for name in gc.GRAPH_STAGE_FIELDS if name not in told]
    if missing:
        return [f"{gc.GRAPH_STAGE}: evidence lacks {', '.join(missing)}"]
    answers = told["answers"]
    pairs = answers if isinstance(answers, list) else []
    if len(pairs) < QUESTIONS_MIN:
        return [f"{gc.GRAPH_STAGE}: {len(pairs)} questions, {QUESTIONS_MIN} are asked at least"]
    wrong = [i for i, pair in enumerate(pairs) if not _equal(pair)]
    reasons = [
        f"{gc.GRAPH_STAGE}: question {i} got other tokens with the new graphs" for i in wrong
    ]
    if told["kv_total_blocks"] != after.kv_total_blocks:
        reasons.append(
            f"{gc.GRAPH_STAGE}: {told['kv_total_blocks']} KV blocks were left, "
            f"serving says {after.kv_total_blocks}"
        )
    return reasons


def _equal(pair: object) -> bool:
    if not isinstance(pair, dict):
        return False
    before, after = pair.get("before"), pair.get("after")
    return isinstance(before, list) and len(before) > 0 and before == after


def judged(kept: Sequence[CheckResult], checks: Sequence[CheckResult]) -> tuple[CheckResult, ...]:
    """A worker's evidence with that of its newest stage in place of an older one."""
    new = [c for c in checks if c.name == gc.GRAPH_STAGE]
    old = [c for c in kept if c.name != gc.GRAPH_STAGE or not new]
    return (*old, *new)
