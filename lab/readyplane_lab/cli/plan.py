"""`readyplane plan --what-if`: what the planner would decide if load, starts, fleet or policy differed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField
from readyplane_lab.cli import output
from readyplane_lab.cli.flags import Json, examples
from readyplane_lab.cli.where import PlannerAddress, Where, find, planner_of, run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EXAMPLES = examples(
    "readyplane plan --what-if isl=2x,tready=180",
    "readyplane plan --what-if rps=1.5x --what-if hit=0.1",
    "readyplane plan --what-if workers.prefill=1,policy.headroom=0.3 --json",
    "readyplane plan --scenario isl-burst --at 600 --what-if osl=+50%",
)
KEY = re.compile(r",(?=[A-Za-z_][A-Za-z0-9_.]*=)")
FIGURES = (
    ("before", "workers, ordered ones included", 0),
    ("wanted", "wanted", 0),
    ("target", "target of this tick", 0),
    ("demand", "demand, tokens/s", 0),
    ("demand_upper", "its bound", 0),
    ("horizon_s", "horizon, s", 0),
    ("worker_rate", "tokens/s of a worker", 0),
    ("load", "load", 2),
    ("t_ready_p90_s", "T_ready P90, s", 0),
)


def plan(
    what_if: Annotated[
        list[str],
        typer.Option(
            "--what-if",
            metavar="KEY=VALUE,…",
            help=(
                "Of rps, isl, osl, hit, queue, tready, tready.prefill, tready.decode, "
                "workers.prefill, workers.decode, policy.FIELD; 2x, +30% or a number."
            ),
        ),
    ],
    scenario: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Ask a played scenario instead of a running planner."),
    ] = None,
    at: Annotated[
        float | None,
        typer.Option(metavar="S", help="With --scenario: at that moment (default: its busiest)."),
    ] = None,
    model: Annotated[str, typer.Option(metavar="M", help="Of this model.")] = "",
    json: Json = False,
    planner: PlannerAddress = "",
) -> None:
    """Show what would be decided if something were otherwise, beside what was decided.

    The planner's last inputs are changed as asked and the same brain decides again; nothing is
    ordered and nothing is stored.
    A changed load is meant as if it had been so all along; what waits now stays.
    """
    changes = parse_what_if(what_if)
    if at is not None and scenario is None:
        raise InvalidField("--at", at, "give it with --scenario NAME")
    if scenario is not None:
        from readyplane_lab.cli.plan_offline import ask_scenario

        with output.console(stderr=True).status("simulating"):
            found = ask_scenario(scenario, changes, at_s=at)
    else:
        found = run(_ask(find("planner", planner=planner), model, changes))
    if json:
        output.emit(found)
        return
    show_what_if(output.console(), found)


async def _ask(where: Where, model: str, changes: Mapping[str, str]) -> dict[str, Any]:
    async with planner_of(where) as planner:
        return await planner.what_if(changes, model=model)


def parse_what_if(given: Sequence[str]) -> dict[str, str]:
    """`["isl=2x,tready=180"]` -> `{"isl": "2x", "tready": "180"}`; values may hold commas.

    Raises:
        InvalidField: no `=`, or one key twice.
    """
    found: dict[str, str] = {}
    for part in (p for text in given for p in KEY.split(text)):
        key, equals, value = part.partition("=")
        key, value = key.strip(), value.strip()
        if not equals or not key or not value:
            raise InvalidField("--what-if", part, "write it like isl=2x,tready=180")
        if key in found:
            raise InvalidField("--what-if", part, f"give {key} once")
        found[key] = value
    return found


def show_what_if(screen: Console, found: Mapping[str, Any]) -> None:
    """The two decisions side by side, for a person."""
    from rich.markup import escape

    from readyplane_planner.explain import candidate_lines, expectation_lines

    for change in found["changes"]:
        was, then = _amount(change["from"]), _amount(change["to"])
        screen.print(f"[bold]{escape(change['key'])}[/bold]  {escape(was)} → {escape(then)}")
    for note in found["notes"]:
        screen.print(f"[dim]{escape(note)}[/dim]")
    screen.print(what_if_table(found))
    for title, side in (("as it is", found["as_is"]), ("what if", found["what_if"])):
        screen.print(f"[bold]{title}[/bold]  {escape(side['summary'])}")
    screen.print("\n[bold]why[/bold]")
    for reason in found["what_if"]["reasons"]:
        pool = f"{reason['pool']}: " if reason.get("pool") else ""
        screen.print(
            f"  {escape(pool + reason['text'])} [dim]\\[{output.cell(reason['code'])}][/dim]"
        )
    for title, lines in (
        ("weighed", candidate_lines(found["what_if"])),
        ("expected", expectation_lines(found["what_if"])),
    ):
        if lines:
            screen.print(f"[bold]{title}[/bold]")
            for line in lines:
                screen.print(f"  {escape(line)}")


def what_if_table(found: Mapping[str, Any]) -> Table:
    """Figures of both pools, as they are and as they would be; what differs is bold."""
    made = output.table("", "as it is", "what if", right=("as it is", "what if"))
    for pool in ("prefill", "decode"):
        now, then = found["as_is"][pool], found["what_if"][pool]
        made.add_row(f"[bold]{pool}[/bold]", "", "")
        for name, label, digits in FIGURES:
            was, would = (output.number(side[name], digits) for side in (now, then))
            made.add_row(f"  {label}", was, would if was == would else f"[bold]{would}[/bold]")
    return made


def _amount(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    return output.NOT_KNOWN if value is None else str(value)
