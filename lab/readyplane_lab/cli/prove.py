"""`readyplane prove`: our planner against the baselines and the clairvoyant bound."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField, ReadyplaneError
from readyplane_lab.cli import output
from readyplane_lab.cli.flags import Json, examples, switch
from readyplane_lab.cli.replay import check_writable

if TYPE_CHECKING:
    from rich.console import Console

    from readyplane_lab.proof.prove import Ask, Proof

EXAMPLES = examples(
    "readyplane prove --quick --out proof",
    "readyplane prove --out proof",
    "readyplane prove --scenario az-conv --scenario isl-burst --policy hpa --policy kpa --out proof",
    "readyplane prove --scenario az-conv --t-ready 180 --peak 32 --seed 1 --out proof",
)
T_READY_S_MAX = 3600.0
PEAK_MAX = 1024.0
PROCESSES_MAX = 256


def prove(
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Gets report.html, standings.md, proof.json, proof.csv, the runs."
        ),
    ],
    quick: Annotated[
        bool, switch("--quick", text="Two short inputs and few baselines: a look, not a proof.")
    ] = False,
    full: Annotated[
        bool, switch("--full", text="The whole grid by events instead of one factor at a time.")
    ] = False,
    scenario: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these inputs (several times; default: all)."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only these baselines (several times; default: all)."),
    ] = None,
    t_ready: Annotated[
        list[float] | None,
        typer.Option(metavar="S", help="T_ready grid, centre first (default: 60 10 30 180 300)."),
    ] = None,
    peak: Annotated[
        list[float] | None,
        typer.Option(metavar="N", help="Workers at the peak, centre first (default: 8 32 128)."),
    ] = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Seeds, centre first (default: 1 2 3 4 5)."),
    ] = None,
    attainment: Annotated[
        float, typer.Option(metavar="A", help="Asked of everybody that is compared.")
    ] = 0.99,
    fluid: Annotated[
        bool, switch("--fluid", text="Confirm nothing by events: faster, and only indicative.")
    ] = False,
    processes: Annotated[int, typer.Option(metavar="N", help="Side by side; 0: one a core.")] = 0,
    json: Json = False,
) -> None:
    """Compare the planner with baselines and the clairvoyant bound, at equal attainment.

    Each baseline's knob is swept in the fluid mode and its best point confirmed by events.
    Interrupted, the same call goes on where it was.
    """
    ask = _ask(
        quick=quick,
        full=full,
        scenario=scenario,
        policy=policy,
        t_ready=t_ready,
        peak=peak,
        seed=seed,
        attainment=attainment,
        fluid=fluid,
        processes=processes,
    )
    check_writable(out)
    from readyplane_lab.proof.prove import document_of, write_json
    from readyplane_lab.proof.prove import prove as run
    from readyplane_lab.proof.report import write_report
    from readyplane_lab.proof.ticktime import tick_figures

    with _progress() as advance:
        proof = run(ask, out, progress=advance)
    document = document_of(proof, ask)
    write_json(document, out / "proof.json")
    files = [out / "proof.json", *write_report(document, out)]
    if json:
        kept = {name: value for name, value in document.items() if name != "inputs"}
        output.emit({**kept, "files": [str(file) for file in files]})
        _judge(proof)
        return
    _show(output.console(), proof)
    for file in files:
        print(file)
    print(f"{proof.summary.line()} {tick_figures()}")
    _judge(proof)


def _judge(proof: Proof) -> None:
    """Raises ReadyplaneError where the proof itself is at fault."""
    faults = [f"the bound was undercut: {why}" for why in proof.undercut]
    faults += [f"{key}: {why}" for key, why in proof.faults.items()]
    if faults:
        raise ReadyplaneError("; ".join(faults))


def _ask(
    *,
    quick: bool,
    full: bool,
    scenario: list[str] | None,
    policy: list[str] | None,
    t_ready: list[float] | None,
    peak: list[float] | None,
    seed: list[int] | None,
    attainment: float,
    fluid: bool,
    processes: int,
) -> Ask:
    from readyplane_lab.proof.prove import Ask

    if quick and full:
        raise InvalidField("--quick", "with --full", "give one of them")
    if not 0.5 <= attainment <= 1:
        raise InvalidField("--attainment", attainment, "give a share from 0.5 to 1")
    if not 0 <= processes <= PROCESSES_MAX:
        raise InvalidField("--processes", processes, f"give 0 (one a core) to {PROCESSES_MAX}")
    for value in t_ready or ():
        if not 1 <= value <= T_READY_S_MAX:
            raise InvalidField("--t-ready", value, f"give seconds from 1 to {T_READY_S_MAX:g}")
    for value in peak or ():
        if not 2 <= value <= PEAK_MAX:
            raise InvalidField("--peak", value, f"give workers from 2 to {PEAK_MAX:g}")
    for number in seed or ():
        if number < 0:
            raise InvalidField("--seed", number, "give 0 or more")
    given: dict[str, Any] = {
        "scenarios": scenario,
        "contenders": policy,
        "t_ready_s": t_ready,
        "peaks": peak,
        "seeds": seed,
    }
    given = {name: tuple(dict.fromkeys(value)) for name, value in given.items() if value}
    if processes:
        given["processes"] = processes
    return Ask(attainment=attainment, quick=quick, full=full, events=not fluid, **given)


def _show(screen: Console, proof: Proof) -> None:
    """The table of the centre, for a person."""
    from rich.table import Table

    table = Table(title="At the centre point, GPU-hours at the attainment asked for")
    for name in ("input", "ours", "attained", "best baseline", "O_LB", "O_SIM", "R"):
        table.add_column(name, justify="left" if name in {"input", "best baseline"} else "right")
    from readyplane_lab.proof.verdict import best_tuned

    for one in proof.centre:
        best = best_tuned(one, proof.attainment)
        ours, osim = one.ours, one.osim_gpu_hours
        reached = ours is not None and ours.reaches(proof.attainment)
        table.add_row(
            one.scenario,
            "-" if ours is None else f"{ours.gpu_hours:.2f}",
            "-" if ours is None else f"{ours.attainment:.2%}",
            "none reached it" if best is None else f"{best[1].gpu_hours:.2f} {best[0]}",
            f"{one.lower_gpu_hours:.2f}",
            _osim(proof, one.key, osim),
            f"{ours.gpu_hours / osim:.2f}" if ours is not None and osim and reached else "-",
        )
    screen.print(table)
    for key, why in proof.skipped.items():
        screen.print(f"[yellow]skipped[/yellow] {key}: {why}")
    for key, why in proof.faults.items():
        screen.print(f"[red]broke[/red] {key}: {why}")
    for key in proof.summary.missed:
        screen.print(f"[yellow]missed[/yellow] {key}: a baseline reached it, ours did not")


SAID_EVERY = 0.05


def _osim(proof: Proof, key: str, osim: float | None) -> str:
    """With a mark where it is the fluid mode's, as on large inputs."""
    if osim is None:
        return "-"
    fluid = proof.documents[key]["bracket"]["mode"] == "fluid"
    return f"{osim:.2f} fluid" if fluid else f"{osim:.2f}"


class _progress:  # noqa: N801 - used as a context manager, like a function
    """A bar with the time left on stderr; a line every 5 % where that is no terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

        self._bar = Progress(
            "proving",
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            "{task.description}",
            console=output.console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
            refresh_per_second=2,
        )
        self._task = self._bar.add_task("", total=1.0)
        self._said = 0.0

    def __enter__(self) -> Callable[[str, float], None]:
        self._bar.start()
        return self._advance

    def _advance(self, text: str, share: float) -> None:
        if text:
            self._bar.update(self._task, description=text)
        self._bar.update(self._task, completed=share)
        if not sys.stderr.isatty() and share >= self._said + SAID_EVERY:
            self._said = share
            print(f"{share:.0%} {text}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
