"""Several policies on one case, side by side: what `readyplane replay` shows of them.

Owns reading who is to play, and the document of the comparison.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane_lab.proof import entrants
from readyplane_lab.proof.inputs import Case, make_case
from readyplane_lab.proof.jobs import played
from readyplane_lab.proof.ours import CONTENDER as OURS
from readyplane_lab.proof.port import Contender, Fielded, Scenario, find
from readyplane_lab.proof.report.picture import draw_runs
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.scaling import scaled
from readyplane_planner.policy import overlay

KNOB_MAX = 1e6


@dataclass(frozen=True, slots=True)
class Player:
    """Who plays, at which knob, with which policy laid over the case's."""

    contender: Contender
    knob: float
    policy: Mapping[str, Any] | None = None

    @property
    def label(self) -> str:
        """For a person."""
        if self.policy is not None:
            return f"{self.contender.name}, own policy"
        default = self.knob == self.contender.default
        return self.contender.name if default else f"{self.contender.name} at {self.knob:g}"


def player(text: str) -> Player:
    """From `NAME`, `NAME:0.7` or `NAME:knob=0.7`.

    Raises:
        InvalidField: no such contender, or a knob that is no number.
    """
    name, _, knob = text.partition(":")
    contender: Contender = find(name, entrants.contenders(), "--policy")
    if not knob:
        return Player(contender, contender.default)
    said, equals, number = knob.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    named = not equals or said in {"knob", contender.knob}
    sound = 0 < value <= KNOB_MAX or value in contender.values  # some knobs may be 0
    if not (named and sound):
        remedy = f"write {name}:{contender.default:g}; its knob is: {contender.knob}"
        raise InvalidField("--policy", text, remedy)
    return Player(contender, value)


def our_player(policy: Mapping[str, Any]) -> Player:
    """Our planner under a policy of the user's."""
    return Player(OURS, OURS.default, policy)


def scenario_of(name: str, requests: Sequence[WorkloadRequest], **more: Any) -> Scenario:
    """A workload of the user's as a scenario. `more`: fields of `Scenario`."""
    return Scenario(
        name=name,
        title="a workload of your own",
        requests=lambda scale, seed: (
            list(requests) if scale == 1.0 else scaled(requests, scale, seed)
        ),
        expected="",
        kind="replay",
        **more,
    )


def versus(
    scenario: Scenario,
    players: Sequence[Player],
    *,
    t_ready_s: float,
    peak: float | None,
    seed: int,
    progress: Callable[[str], None] = lambda _text: None,
) -> dict[str, Any]:
    """Play them one after another, by events.

    Returns:
        The document: the case, and of each player scores, the series of a picture, decisions.

    Raises:
        InvalidField: a workload that cannot be had or scaled.
    """
    progress("making the workload")
    case = make_case(scenario, t_ready_s=t_ready_s, peak=peak, seed=seed)
    runs = {}
    for one in players:
        progress(f"{len(case.requests):,} requests, {one.label}")
        runs[one.label] = _run(case, one)
    return {
        "schema": "readyplane/replay/2",
        "workload": scenario.name,
        "expected": scenario.expected,
        "seed": seed,
        "t_ready_s": t_ready_s,
        "peak_workers": case.peak,
        "scale": case.scale,
        "requests": len(case.requests),
        "span_s": case.span_s,
        "slo": {"ttft_s": case.setting.slo.ttft_s, "tpot_s": case.setting.slo.tpot_s},
        "runs": runs,
    }


def write_versus(out: Path, document: Mapping[str, Any]) -> tuple[Path, Path]:
    """`replay.json` and `replay.png` in a folder that is there."""
    files = out / "replay.json", out / "replay.png"
    files[0].write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    draw_runs(document, files[1])
    return files


def _run(case: Case, one: Player) -> dict[str, Any]:
    fielded = one.contender.make(one.knob, case.setting)
    if one.policy is not None:
        fielded = Fielded(fielded.brain, overlay(fielded.policy, one.policy))
    ran = played(case, fielded, mode="event", check=one.contender is OURS)
    return {"contender": one.contender.name, "knob": one.knob, "unexpected": [], **ran}
