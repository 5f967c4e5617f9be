"""The bounds of one case: what nothing can undercut, O_LB, and the bracket up to O_SIM.

Owns putting the oracle to a case. Hands documents to the runs, and to the verdict the question
whether a run without a miss was billed less than is possible, which would be a fault of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from readyplane.core.startup import SegmentName
from readyplane_lab.proof.baselines import clairvoyant
from readyplane_lab.proof.inputs import Case
from readyplane_lab.proof.measure import score
from readyplane_lab.proof.oracle import Bracket, bracket, lower_bound, lowest_bill
from readyplane_lab.proof.oracle.demand import request_work
from readyplane_lab.proof.play import play
from readyplane_lab.simulator.startup import Draws

STARTS_LOOKED_AT = 512
EVENT_TRIES = 6
FLUID_TRIES = 10
WIDTH = 0.02
CELLS = 1000
ROUNDING_GPU_HOURS = 1e-6


def bound_document(case: Case) -> dict[str, Any]:
    """The lower bounds in GPU-hours.

    `lower`: O_LB, whole fleets over the need. `floor`: below every run without a miss that begins
    with the setting's fleet; `floor_any`: whatever it begins with; `floor_convertible`: where
    decode workers take prefill work too, None for two classes.
    """
    found = lower_bound(case.setting, span_s=case.span_s)
    work = request_work(
        case.requests,
        prefill=case.setting.prefill,
        decode=case.setting.decode,
        slo=case.setting.slo,
        cached=case.cached,
        strict=True,
    )
    start_s = least_start_s(case)

    # No least fleet: a fault may take any worker away, and a rule may be allowed none.
    bare = replace(case.setting, low=(0, 0))

    def floor(billed_s: float, *, convertible: bool = False) -> float:
        return lowest_bill(
            work,
            bare,
            span_s=case.span_s,
            start_s=billed_s,
            convertible=convertible,
            cells=CELLS,
        ).gpu_hours

    one_class = case.setting.prefill.name == case.setting.decode.name
    return {
        "lower_gpu_hours": found.gpu_hours,
        "lower_starts": found.prefill.starts + found.decode.starts,
        "floor_gpu_hours": floor(start_s),
        "floor_any_gpu_hours": floor(0.0),
        "floor_convertible_gpu_hours": floor(0.0, convertible=True) if one_class else None,
        "requests": len(case.requests),
        "span_s": case.span_s,
        "scale": case.scale,
        "initial": list(case.setting.initial),
        "high": list(case.setting.high),
    }


def least_start_s(case: Case) -> float:
    """Seconds of the quickest start that this seed can draw, the weights counted as nothing."""
    draws = Draws(case.seed)
    names = (SegmentName.SCHEDULE, *case.startup.segments)
    return min(
        sum(case.startup.seconds(name, draws, pool, ordinal) for name in names)
        for pool in ("prefill", "decode")
        for ordinal in range(STARTS_LOOKED_AT)
    )


def undercut(bound: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Why a run cannot be right, empty when it can.

    Only a run that missed nothing is bounded.

    Args:
        bound: of `bound_document`. result: with `scores`, and the `initial` fleet and whether it
            was `convertible` in `fielded`.
    """
    fielded, scores = result["fielded"], result["scores"]
    floor = bound["floor_gpu_hours"]
    if fielded["convertible"]:
        floor = bound["floor_convertible_gpu_hours"]
    elif fielded["initial"] is not None or scores["starts"] > STARTS_LOOKED_AT:
        floor = bound["floor_any_gpu_hours"]
    hours = scores["gpu_hours"]
    if floor is None or scores["attainment"] < 1.0 or hours >= floor - ROUNDING_GPU_HOURS:
        return ""
    return f"{hours:.4f} GPU-hours without a miss, below the floor of {floor:.4f}"


def bracket_document(case: Case, attainment: float, *, fluid: bool) -> dict[str, Any]:
    """O_SIM: the smallest margin with which the clairvoyant plan attains, and what was tried."""
    mode = "fluid" if fluid else "event"

    def run(alpha: float) -> tuple[float, float]:
        played = play(case, clairvoyant.CONTENDER, 1.0 + alpha, mode=mode)
        found = score(played, slo=case.setting.slo, times=case.times, hindsight=case.hindsight)
        return found.attainment, found.gpu_hours

    found: Bracket = bracket(
        run,
        attainment=attainment,
        lower_gpu_hours=lower_bound(case.setting, span_s=case.span_s).gpu_hours,
        tries=FLUID_TRIES if fluid else EVENT_TRIES,
        width=WIDTH,
    )
    return {
        "mode": mode,
        "lower_gpu_hours": found.lower_gpu_hours,
        "osim_gpu_hours": found.upper_gpu_hours,
        "alpha": None if found.best is None else found.best.alpha,
        "tried": [[t.alpha, t.attainment, t.gpu_hours] for t in found.tried],
    }
