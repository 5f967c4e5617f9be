"""One contender plays one case, in either mode of the simulator."""

from __future__ import annotations

from typing import Any

from readyplane_lab.proof.inputs import BLOCK_SIZE, Case
from readyplane_lab.proof.port import Contender, Fielded
from readyplane_lab.simulator.fluid import FluidOptions, run_fluid
from readyplane_lab.simulator.outcome import RunResult
from readyplane_lab.simulator.world import WorldOptions, run_world
from readyplane_planner.policy import overlay

STEP_S, STREAM_STEPS_A_TTFT = 1.0, 4.0
"""A row of many requests that finds no place waits for the next step: a coarse one alone would make
it late. Single ones are bound to their second, whatever the step.
"""


def play(case: Case, contender: Contender, knob: float, *, mode: str) -> RunResult:
    """Run it. `mode`: `event`, or `fluid`."""
    return play_fielded(case, contender.make(knob, case.setting), mode=mode)


def play_fielded(case: Case, fielded: Fielded, *, mode: str) -> RunResult:
    """Run one that is ready to play; it keeps state, so it plays once."""
    if mode == "fluid":
        prefill_workers, _ = fielded.initial or case.setting.initial
        arrivals = case.arrivals(prefill_workers)
        step_s = STEP_S if arrivals.single else case.setting.slo.ttft_s / STREAM_STEPS_A_TTFT
        return run_fluid(
            FluidOptions(**_options(case, fielded), block_size=BLOCK_SIZE, step_s=step_s), arrivals
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
