"""`python -m readyplane_lab.tuning`: search parameters of the learned optimiser, and record them.

Owns the run: which inputs it learns on, which it is judged on and never learnt, when it stops, and the
file with where its numbers come from. Parameters that gain nothing on the inputs held out are not
recorded; the provenance says so either way.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from readyplane.core.errors import ReadyplaneError
from readyplane.kit.clock import SystemClock
from readyplane_lab.proof.inputs import Case
from readyplane_lab.tuning.playing import Played, all_played, cases, cost
from readyplane_lab.tuning.search import search
from readyplane_planner import optimise
from readyplane_planner.optimise.tuned import RANGES, Parameters

LEARNT = ("isl-burst", "osl-burst", "oscillation-240s")
HELD_OUT = ("flash-crowd", "cache-shift", "calm")
NAMES = tuple(f.name for f in fields(Parameters))
OUT = Path(optimise.__file__).with_name("tuned.json")


def tune(
    learnt: Sequence[Case], held_out: Sequence[Case], *, seed: int, evaluations: int, seconds: float
) -> dict[str, Any]:
    """The document to be recorded: parameters, and where they come from.

    Args:
        evaluations, seconds: whichever is reached first ends the search; 0 evaluations tunes
            nothing, and a run that ended by its evaluations repeats.
    """
    clock = SystemClock()
    began_s = clock.monotonic_s()
    base = all_played(learnt, None)
    best = best_cost = None
    tried = 0

    def asked(point: Sequence[float]) -> float:
        return cost(all_played(learnt, _parameters(point)), base)

    found = search(asked, [RANGES[name] for name in NAMES], begin=[1.0] * len(NAMES), seed=seed)
    while tried < evaluations and clock.monotonic_s() - began_s < seconds:
        point = next(found)
        tried = point.evaluation
        print(f"{tried}: {point.cost:.4f}", file=sys.stderr, flush=True)
        if best_cost is None or point.cost < best_cost:
            best, best_cost = _parameters(point.point), point.cost
    own = all_played(held_out, None)
    theirs = own if best is None else all_played(held_out, best)
    judged = cost(theirs, own)
    gained = best is not None and best_cost is not None and best_cost < 1.0 and judged < 1.0
    return {
        "parameters": asdict(best) if gained and best is not None else {},
        "provenance": {
            "tool": "python -m readyplane_lab.tuning",
            "seed": seed,
            "evaluations": tried,
            "cost": "GPU-hours over those of the planner's own optimiser, misses priced; 1 is equal",
            "learnt": _told(learnt, base, None),
            "cost_learnt": best_cost,
            "held_out": _told(held_out, own, theirs),
            "cost_held_out": judged,
            "tried": {} if best is None else asdict(best),
            "note": "recorded: it gains on inputs that it has not seen"
            if gained
            else "not recorded: it gains nothing on inputs that it has not seen",
        },
    }


def _parameters(point: Sequence[float]) -> Parameters:
    return Parameters(**dict(zip(NAMES, (round(x, 4) for x in point), strict=True)))


def _told(
    inputs: Sequence[Case], own: Sequence[Played], tuned: Sequence[Played] | None
) -> dict[str, Any]:
    return {
        case.key: {
            "size": asdict(own[place]),
            **({} if tuned is None else {"tuned": asdict(tuned[place])}),
        }
        for place, case in enumerate(inputs)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry of the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m readyplane_lab.tuning", description=__doc__)
    parser.add_argument("--learn", nargs="+", default=list(LEARNT), metavar="SCENARIO")
    parser.add_argument("--judge", nargs="+", default=list(HELD_OUT), metavar="SCENARIO")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--evaluations", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--t-ready", type=float, default=60.0)
    parser.add_argument("--peak", type=float, default=8.0, help="workers at the busiest moment")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    try:
        learnt, held_out = (
            cases(names, t_ready_s=given.t_ready, peak=given.peak, seed=given.seed + place)
            for place, names in enumerate((given.learn, given.judge))
        )
    except ReadyplaneError as error:
        print(f"tuning: {error}", file=sys.stderr)
        return 2
    document = tune(
        learnt,
        held_out,
        seed=given.seed,
        evaluations=given.evaluations,
        seconds=given.seconds,
    )
    given.out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    told = document["provenance"]
    print(
        f"bench-tuning evaluations={told['evaluations']} cost_learnt={told['cost_learnt']} "
        f"cost_held_out={told['cost_held_out']:.4f} recorded={bool(document['parameters'])}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
