"""One contender plays one case, in either mode of the simulator."""

from __future__ import annotations

from typing import Any

from readyplane_lab.proof.inputs import BLOCK_SIZE, Case
from readyplane_lab.proof.port import Contender, Fielded
from readyplane_lab.simulator.fluid import FluidOptions, run_fluid
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.simulator.world import WorldOptions, run_world
from readyplane_planner.policy import overlay

FINE_SPAN_S, FINE_STEP_S, COARSE_STEP_S = 7200.0, 1.0, 5.0


def play(case: Case, contender: Contender, knob: float, *, mode: str) -> RunResult:
    """Run it. `mode`: `event`, or `fluid`."""
    return play_fielded(case, contender.make(knob, case.setting), mode=mode)


def play_fielded(case: Case, fielded: Fielded, *, mode: str) -> RunResult:
    """Run one that is ready to play; it keeps state, so it plays once."""
    if mode == "fluid":
        step_s = FINE_STEP_S if case.span_s <= FINE_SPAN_S else COARSE_STEP_S
        prefill_workers, _ = fielded.initial or case.setting.initial
        return run_fluid(
            FluidOptions(**_options(case, fielded), block_size=BLOCK_SIZE, step_s=step_s),
            case.arrivals(prefill_workers),
        )
    options = WorldOptions(**_options(case, fielded), block_size=BLOCK_SIZE)
    return run_world(options, case.requests).run()


def _options(case: Case, fielded: Fielded) -> dict[str, Any]:
    decode = {"decode": {"convertible": fielded.convertible}}
    return {
        "policy": overlay(overlay(case.policy, fielded.policy), decode),
        "seed": case.seed,
        "startup": case.startup,
        "brain": fielded.brain,
        "initial": fielded.initial or case.setting.initial,
        "faults": case.disturbances.faults,
    }
