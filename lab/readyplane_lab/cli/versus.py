"""The part of `readyplane replay` that plays rules of the proof, one or several, on one workload."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from readyplane.core.errors import InvalidField
from readyplane_lab.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from readyplane_lab.proof.port import Scenario
    from readyplane_lab.proof.versus import Player
    from readyplane_lab.workload.request import WorkloadRequest

T_READY_S = 60.0
T_READY_S_MAX = 3600.0
PEAK_MIN, PEAK_MAX = 2.0, 1024.0


@dataclass(frozen=True, slots=True)
class Versus:
    """What was asked for on the command line; None where an option was left out."""

    scenario: str | None
    policy: str | None
    compare: str | None
    peak: float | None
    t_ready_s: float | None
    seed: int


def play_versus(
    asked: Versus,
    workload: tuple[str, Sequence[WorkloadRequest]] | None,
    out: Path,
    *,
    json: bool,
) -> None:
    """Play, write `replay.json` and `replay.png`, and tell.

    Args:
        workload: name and requests of a workload that is no scenario, on the demo's class.
    """
    _check(asked)
    from readyplane_lab.proof.versus import versus, write_versus

    players = _players(asked)
    scenario, peak = _scenario(asked, workload)
    with output.console(stderr=True).status("simulating") as status:
        document = versus(
            scenario,
            players,
            t_ready_s=T_READY_S if asked.t_ready_s is None else asked.t_ready_s,
            peak=peak,
            seed=asked.seed,
            progress=status.update,
        )
        status.update("drawing")
        files = write_versus(out, document)
    if json:
        runs = {
            label: {k: v for k, v in run.items() if k not in {"trace", "decisions"}}
            for label, run in document["runs"].items()
        }
        output.emit({**document, "runs": runs, "files": [str(f) for f in files]})
        return
    show_versus(output.console(), document)
    for file in files:
        print(file)


def _check(asked: Versus) -> None:
    if asked.policy is not None and asked.compare is not None:
        raise InvalidField("--compare", asked.compare, "leave --policy out, or name it in the list")
    if asked.peak is not None and not PEAK_MIN <= asked.peak <= PEAK_MAX:
        remedy = f"give workers from {PEAK_MIN:g} to {PEAK_MAX:g}"
        raise InvalidField("--peak", asked.peak, remedy)
    t_ready_s = asked.t_ready_s
    if t_ready_s is not None and not (
        math.isfinite(t_ready_s) and 1.0 <= t_ready_s <= T_READY_S_MAX
    ):
        raise InvalidField("--t-ready", t_ready_s, f"give seconds from 1 to {T_READY_S_MAX:g}")


def _players(asked: Versus) -> list[Player]:
    from readyplane_lab.proof.versus import our_player, player

    if asked.compare is not None:
        names = [name.strip() for name in asked.compare.split(",") if name.strip()]
        if not names:
            raise InvalidField("--compare", asked.compare, "write names with commas, as hpa,kpa")
        return [player(name) for name in dict.fromkeys(names)]
    if asked.policy is None:
        return [player("readyplane")]
    path = Path(asked.policy)
    if path.suffix in {".yaml", ".yml", ".json"} or path.is_file():
        from readyplane_lab.up.options import read_policy

        return [our_player(read_policy(path))]
    return [player(asked.policy)]


def _scenario(
    asked: Versus, workload: tuple[str, Sequence[WorkloadRequest]] | None
) -> tuple[Scenario, float | None]:
    """The scenario, and the peak it is to have: 8 workers unless told, own workloads as they are."""
    if workload is not None:
        from readyplane.core.work import Slo
        from readyplane_lab.demo import DEMO_POLICY, WORKER_CLASS
        from readyplane_lab.proof.versus import scenario_of

        name, requests = workload
        slo: Any = DEMO_POLICY["slo"]
        made = scenario_of(
            name, requests, worker_class=WORKER_CLASS, slo=Slo(slo["ttft_s"], slo["tpot_s"])
        )
        return made, asked.peak
    from readyplane_lab.proof import entrants
    from readyplane_lab.proof.port import find
    from readyplane_lab.proof.prove import CENTRE_PEAK

    found: Scenario = find(str(asked.scenario), entrants.scenarios(), "--scenario")
    return found, CENTRE_PEAK if asked.peak is None else asked.peak


def show_versus(screen: Console, document: Mapping[str, Any]) -> None:
    """The comparison for a person."""
    slo = document["slo"]
    screen.print(
        f"[bold]{output.cell(document['workload'])}[/bold], seed {document['seed']}: "
        f"{document['requests']:,} requests in {document['span_s']:,.0f} virtual seconds, "
        f"T_ready {document['t_ready_s']:g} s, at its peak {document['peak_workers']:g} workers"
    )
    columns = (
        "attained",
        "GPU-hours",
        "TTFT P99",
        "TPOT P99",
        "starts",
        "wasted",
        "reversals/h",
    )
    made = output.table("", *columns, right=columns)
    for label, run in document["runs"].items():
        scores = run["scores"]
        made.add_row(
            output.cell(label),
            f"{scores['attainment']:.2%}",
            f"{scores['gpu_hours']:.2f}",
            output.seconds(scores["ttft_p99_s"], 3),
            output.seconds(scores["tpot_p99_s"], 4),
            str(scores["starts"]),
            str(scores["wasted"]),
            f"{scores['reversals_per_h']:.1f}",
        )
    screen.print(made)
    screen.print(f"attained: TTFT ≤ {slo['ttft_s']:g} s and TPOT ≤ {slo['tpot_s']:g} s")
    if document["expected"]:
        screen.print(f"expected: {output.cell(document['expected'])}")
    for label, run in document["runs"].items():
        for why in run["unexpected"]:
            screen.print(
                f"[yellow]not as expected[/yellow] ({output.cell(label)}): {output.cell(why)}"
            )
