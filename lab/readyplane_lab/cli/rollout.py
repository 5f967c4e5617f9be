"""`readyplane rollout`: bring another artifact into service by whole pairs, and watch or stop it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField
from readyplane_lab.cli import output
from readyplane_lab.cli.flags import Json, examples
from readyplane_lab.cli.where import PlannerAddress, Where, find, planner_of, run

if TYPE_CHECKING:
    from readyplane.client import PlannerClient

app = typer.Typer()
EXAMPLES = examples(
    "readyplane rollout --to demo:next --watch",
    "readyplane rollout --to sha256:9f2c61aa… --surge 2",
    "readyplane rollout status",
    "readyplane rollout undo",
)
SURGE_MAX = 8
EVERY_S = 1.0
ENDS = {"idle": 0, "done": 0, "paused": 1, "rolled_back": 1, "failed": 1}
"""Phases in which nothing moves by itself, and the exit code of a watch that ends there."""

Model = Annotated[str, typer.Option(metavar="M", help="Of this model.")]
Watch = Annotated[
    bool,
    typer.Option("--watch", "-w", help="Until nothing moves: exit 0 when done or idle, else 1."),
]


@app.callback(invoke_without_command=True, epilog=EXAMPLES)
def rollout(
    context: typer.Context,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="DIGEST|TAG", help="The artifact to bring into service."),
    ] = None,
    surge: Annotated[
        int,
        typer.Option(
            metavar="N", help="Workers of each pool that start beside the others; 0: as before."
        ),
    ] = 0,
    watch: Watch = False,
    model: Model = "",
    json: Json = False,
    planner: PlannerAddress = "",
) -> None:
    """Roll another artifact out: new pairs start beside the old ones, prove themselves, replace them.

    It is rolled back by itself when the new generation attains less, or its starts fail.
    """
    if context.invoked_subcommand is not None:
        return
    if to is None and not surge and not watch:
        print(context.get_help())
        return
    if not to or not to.strip():
        raise InvalidField("--to", to or "", "name a digest or tag, or use `rollout status`")
    if not 0 <= surge <= SURGE_MAX:
        raise InvalidField("--surge", surge, f"give 1 to {SURGE_MAX}, or 0")
    _ask("go", planner, model, to=to, surge=surge, watch=watch, json=json)


@app.command(
    "status",
    epilog=examples("readyplane rollout status", "readyplane rollout status --watch --json"),
)
def status(
    watch: Watch = False, model: Model = "", json: Json = False, planner: PlannerAddress = ""
) -> None:
    """Show where the roll-out is, and what both generations attain."""
    where = find("planner", planner=planner)
    code = run(_status(where, model, watch=watch, json=json))
    if watch and code:
        raise typer.Exit(code)


@app.command("pause", epilog=examples("readyplane rollout pause"))
def pause(model: Model = "", json: Json = False, planner: PlannerAddress = "") -> None:
    """Hold it where it is: both generations serve on, and follow the demand."""
    _ask("pause", planner, model, json=json)


@app.command("resume", epilog=examples("readyplane rollout resume --watch"))
def resume(
    watch: Watch = False, model: Model = "", json: Json = False, planner: PlannerAddress = ""
) -> None:
    """Go on where it was held; evidence that did not come is awaited no more."""
    _ask("resume", planner, model, watch=watch, json=json)


@app.command("undo", epilog=examples("readyplane rollout undo --watch"))
def undo(
    watch: Watch = False, model: Model = "", json: Json = False, planner: PlannerAddress = ""
) -> None:
    """Go back to the generation before, also after it was done."""
    _ask("undo", planner, model, watch=watch, json=json)


def _ask(
    action: str,
    planner: str,
    model: str,
    *,
    to: str = "",
    surge: int = 0,
    watch: bool = False,
    json: bool = False,
) -> None:
    where = find("planner", planner=planner)
    code = run(_asked(where, model, action, to=to, surge=surge, watch=watch, json=json))
    if watch and code:
        raise typer.Exit(code)


async def _asked(
    where: Where, model: str, action: str, *, to: str, surge: int, watch: bool, json: bool
) -> int:
    async with planner_of(where) as planner:
        asked = await planner.ask_rollout(action, to=to, surge=surge, by=_who(), model=model)
        if watch:
            # The wish is followed with the next tick; what stood before it is no end.
            return await _watch(planner, model, json=json, since=asked["policy_version"])
        if json:
            output.emit(asked)
        else:
            output.say(f"asked to {action}{' ' + to if to else ''}: policy version", end=" ")
            output.say(f"{asked['policy_version']}; `readyplane rollout status --watch` follows it")
    return 0


async def _status(where: Where, model: str, *, watch: bool, json: bool) -> int:
    async with planner_of(where) as planner:
        if watch:
            return await _watch(planner, model, json=json, since=0)
        shown = await planner.rollout(model)
    if json:
        output.emit(shown)
    else:
        for line in lines(shown):
            output.say(line)
    return ENDS.get(shown["phase"], 0)


async def _watch(planner: PlannerClient, model: str, *, json: bool, since: int) -> int:
    """A line whenever something changed, until nothing moves by itself any more."""
    import asyncio

    before = ""
    while True:
        shown = await planner.rollout(model)
        line = one_line(shown)
        if json:
            output.emit(shown, line=True)
        elif line != before:
            output.say(line, flush=True)
        before = line
        # A decision that knows that version of the policy has followed the wish.
        if shown["decided_version"] >= since and shown["phase"] in ENDS:
            if not json and shown["reason"]:
                output.say(shown["reason"])
            return ENDS[shown["phase"]]
        await asyncio.sleep(EVERY_S)


def _who() -> str:
    """Who asks, for the record."""
    import getpass
    import socket

    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user without a name
        return socket.gethostname()


def one_line(shown: Mapping[str, Any]) -> str:
    """Where it is, in a line."""
    new, old = shown["new"], shown["old"]
    if shown["phase"] == "idle":
        return f"idle: {_generation(shown['serves'])} serves"
    text = (
        f"{shown['phase']}: {new['prefill']} P and {new['decode']} D of "
        f"{_generation(shown['to'])} serve, {old['prefill']} P and {old['decode']} D are old"
    )
    if shown["leaving"]:
        text += f", {shown['leaving']} drain"
    if shown["attained_new"] is not None:
        text += f"; {shown['attained_new']:.1%} of {shown['samples']} requests attained"
        if shown["attained_old"] is not None:
            text += f", {shown['attained_old']:.1%} on the old ones"
    return text


def lines(shown: Mapping[str, Any]) -> Iterator[str]:
    """Where it is, for a person."""
    if shown["phase"] == "idle":
        yield f"{one_line(shown)} ({shown['manifest'] or shown['model']})"
        return
    yield one_line(shown)
    yield f"from    {_generation(shown['from'])}"
    yield f"to      {_generation(shown['to'])}"
    if shown["phase_ago_s"] is not None:
        since = f"since {shown['phase_ago_s']:.0f} s, begun {shown['begun_ago_s'] or 0.0:.0f} s ago"
        yield f"phase   {shown['phase']} {since}"
    if shown["reason"]:
        yield f"why     {shown['reason']}"
    if shown["by"]:
        yield f"by      {shown['by']}"
    if shown["paused"]:
        yield "The planner is paused: nothing moves until `readyplane policy set paused=false`."
    elif shown["phase"] in {"paused", "failed"}:
        yield "`readyplane rollout resume` goes on, `readyplane rollout undo` goes back."
    if shown["degraded"]:
        yield f"degraded: {shown['degraded']}"


def _generation(generation: Mapping[str, Any]) -> str:
    digest = generation["digest"]
    return (
        f"generation {generation['generation']} ({output.short(digest)})" if digest else "nothing"
    )
