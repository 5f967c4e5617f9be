"""`readyplane decisions` and `readyplane explain`: what the planner did, and why it took so long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField, NotFound, ReadyplaneError
from readyplane_lab.cli import output
from readyplane_lab.cli.faults import note
from readyplane_lab.cli.flags import Json, examples, switch
from readyplane_lab.cli.held_back import SHUT, not_ordered, shortfalls
from readyplane_lab.cli.where import PlannerAddress, Where, find, planner_of, run

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from readyplane.client import PlannerClient

EXAMPLES = examples(
    "readyplane decisions",
    "readyplane decisions --all --limit 5",
    "readyplane decisions --json | jq -r '.decisions[0].decision_id'",
)
EXPLAIN_EXAMPLES = examples(
    "readyplane explain last",
    "readyplane explain 9f2c61aa",
    "readyplane explain last --json | jq .timeline",
    "readyplane explain last --replay",
)
LIMIT_MAX = 10_000
SEARCHED_MAX = 2_000
BAR_WIDTH = 40
WHY_MAX = 66
UNDONE_MAX = 3


def decisions(
    limit: Annotated[int, typer.Option("--limit", "-n", metavar="N", help="How many.")] = 20,
    everything: Annotated[
        bool, switch("--all", text="Also those that changed nothing (a sample of them).")
    ] = False,
    model: Annotated[str, typer.Option(metavar="M", help="Of this model.")] = "",
    json: Json = False,
    planner: PlannerAddress = "",
) -> None:
    """List the planner's decisions, newest first.

    Below a decision stands what came to nothing: orders that were refused, starts that failed, pools
    for which nothing was ordered, and why.
    What is not ordered any more, or not now, because it was refused, failed for good or is held back,
    stands below the table with the way out.
    """
    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidField("--limit", limit, f"give 1 to {LIMIT_MAX}")
    where = find("planner", planner=planner)
    found, shut = run(_list(where, model, limit, changes_only=not everything))
    if json:
        output.emit({"decisions": found, "not_ordered": shut})
        return
    output.console().print(decisions_table(found, shut))


async def _list(
    where: Where, model: str, limit: int, *, changes_only: bool
) -> tuple[list[dict[str, Any]], list[str] | None]:
    """Decisions, and what is not ordered now and why; None where the planner does not tell."""
    async with planner_of(where) as planner:
        found = await planner.list_decisions(model=model, limit=limit, changes_only=changes_only)
        try:
            state = await planner.state(model)
        except ReadyplaneError as error:
            note(f"what is not ordered now is not shown: {error}")
            return found, None
    return found, shut_lines(state)


def shut_lines(state: Mapping[str, Any]) -> list[str]:
    """What is not ordered now and why, of a planner's state: a line each."""
    held = [f"{h['pool']}: {h['text']}" for h in state.get("held", ()) if h["code"] in SHUT]
    return held + [f"{s.pool}: {s.text()}; {s.remedy}" for s in shortfalls(state)]


def decisions_table(found: Sequence[Mapping[str, Any]], shut: Sequence[str] | None = None) -> Table:
    """Decisions for a person; `shut`: what is not ordered now, and why."""
    from rich.markup import escape

    made = output.table("decision", "at", "what and why", fixed=("decision", "at"))
    for decision in found:
        why = _line(_why(decision))
        changed = bool(decision.get("changes"))
        what = escape(decision.get("summary", ""))
        made.add_row(
            output.cell(decision["decision_id"]),
            output.moment(decision.get("at_s")),
            (f"[bold]{what}[/bold]" if changed else what)
            + (f"\n[dim]{escape(why)}[/dim]" if changed and why else "")
            + "".join(f"\n[red]{escape(text)}[/red]" for text in undone_lines(decision)),
        )
    none = "no decisions yet (--all shows those that changed nothing)"
    below = [*([] if found else [none]), *(f"[red]{escape(text)}[/red]" for text in shut or ())]
    made.caption = "\n".join(below) or None
    return made


def undone_lines(decision: Mapping[str, Any]) -> list[str]:
    """What came to nothing of it, one line for each reason, the first UNDONE_MAX of them."""
    alike: dict[tuple[str, str], list[str]] = {}
    for row in decision.get("undone") or ():
        what = str(row["kind"]).replace("_failed", " refused")
        alike.setdefault((what, row["why"]), []).append(row["worker_id"])
    lines = [
        f"{whom[0]}{f' and {len(whom) - 1} more' if len(whom) > 1 else ''} {what}: {why}".lstrip()
        for (what, why), whom in alike.items()
    ]
    lines = [*not_ordered(decision), *lines]
    more = len(lines) - UNDONE_MAX
    if more > 0:
        told = f"{more} more reasons: readyplane explain {decision['decision_id']}"
        lines = [*lines[:UNDONE_MAX], told]
    return lines


def _why(decision: Mapping[str, Any]) -> str:
    """The first reason that is about a pool that changed, else the first one."""
    reasons = decision.get("reasons") or ()
    changed = {change["pool"] for change in decision.get("changes") or ()}
    own = [r["text"] for r in reasons if r.get("pool") in changed]
    return next(iter([*own, *(r["text"] for r in reasons)]), "")


def _line(text: str) -> str:
    return text if len(text) <= WHY_MAX else text[: WHY_MAX - 1] + "…"


def explain(
    decision: Annotated[
        str,
        typer.Argument(
            metavar="DECISION",
            help="Its id, a unique beginning or end of it, or `last` (newest change).",
        ),
    ],
    replay: Annotated[
        bool,
        switch("--replay", text="Decide again from the recorded inputs; exit 1 if it differs."),
    ] = False,
    json: Json = False,
    planner: PlannerAddress = "",
) -> None:
    """Explain one decision: why it was taken, and why its starts took as long as they did.

    Told are the reasons, what was weighed, what was expected, and a timeline across planner,
    actuator, agent, gate and router.
    Each start is shown from order (desired) over lease (provisioned) to routable (ready), segment
    by segment; each drain until its worker had left; and whether it was worth it.
    It works for workers that are gone, and what nobody told is said to be unknown.
    """
    where = find("planner", planner=planner)
    if replay:
        _replay(where, decision, json=json)
        return
    found = run(_explain(where, decision))
    if json:
        output.emit(found)
        return
    show_explanation(output.console(), found)


async def _explain(where: Where, given: str) -> dict[str, Any]:
    async with planner_of(where) as planner:
        return await _asked(planner, planner.explain, given)


async def _asked(
    planner: PlannerClient, ask: Callable[[str], Awaitable[dict[str, Any]]], given: str
) -> dict[str, Any]:
    """The answer about a decision by its id, the part of one, or `last`."""
    if given == "last":
        newest = await planner.list_decisions(limit=1, changes_only=True)
        if not newest:
            raise NotFound("decision", "last", "nothing has been changed yet")
        return await ask(newest[0]["decision_id"])
    try:
        return await ask(given)
    except NotFound as error:
        if error.what != "decision":
            raise
        return await ask(await _whole_id(planner, given))


def _replay(where: Where, given: str, *, json: bool) -> None:
    """Tell whether the brain decides the same again; ends the command with 1 when it does not."""

    async def ask() -> dict[str, Any]:
        async with planner_of(where) as planner:
            return await _asked(planner, planner.replay, given)

    found = run(ask())
    if json:
        output.emit(found)
    else:
        show_replay(output.console(), found)
    if not found["same"]:
        raise typer.Exit(1)


def show_replay(screen: Console, found: Mapping[str, Any]) -> None:
    """The comparison for a person."""
    from rich.markup import escape

    screen.print(f"[bold]{output.cell(found['decision_id'])}[/bold]  {escape(found['summary'])}")
    if found["same"]:
        screen.print("the same brain on the recorded inputs gives the same decision")
    else:
        made = output.table("field", "recorded", "replayed", fixed=("field",))
        for each in found["differences"]:
            made.add_row(
                output.cell(each["field"]),
                escape(str(each["recorded"])),
                escape(str(each["replayed"])),
            )
        screen.print(made)
    if found["unrecorded"]:
        screen.print(
            f"[dim]not recorded by the planner that wrote it: {output.cell(', '.join(found['unrecorded']))}[/dim]"
        )


async def _whole_id(planner: PlannerClient, given: str) -> str:
    """The one decision that begins or ends so. Raises NotFound, InvalidField when several do."""
    known = await planner.list_decisions(limit=SEARCHED_MAX)
    ids = [str(d["decision_id"]) for d in known] if given else []
    found = [each for each in ids if each.startswith(given) or each.endswith(given)]
    if not found:
        raise NotFound("decision", given, "`readyplane decisions --all` lists them; old ones go")
    if len(found) > 1:
        raise InvalidField("DECISION", given, f"write more of it: {', '.join(found[:5])}")
    return found[0]


def show_explanation(screen: Console, found: Mapping[str, Any]) -> None:
    """The explanation for a person."""
    from rich.markup import escape

    from readyplane_planner.explain import candidate_lines, expectation_lines, outcome_text

    decision = found["decision"]
    screen.print(
        f"[bold]{output.cell(found['decision_id'])}[/bold]  {output.moment(found['at_s'])}"
    )
    screen.print(f"{escape(found['summary'])}  (policy version {found['policy_version']})\n")
    screen.print("[bold]why[/bold]")
    for reason in decision.get("reasons", ()):
        pool = f"{reason['pool']}: " if reason.get("pool") else ""
        screen.print(
            f"  {escape(pool + reason['text'])} [dim]\\[{output.cell(reason['code'])}][/dim]"
        )
    _show_lines(screen, "weighed", candidate_lines(decision))
    _show_lines(screen, "expected", expectation_lines(decision))
    for start in found["starts"]:
        _show_start(screen, start)
    for drain in found["drains"]:
        took = _after(drain["after_s"]) or output.NOT_KNOWN
        screen.print(
            f"\n[bold]{output.cell(drain['worker_id'])}[/bold] ({output.cell(drain['pool'])}): "
            f"{output.cell(drain['status'])}; {output.cell(took)}"
        )
        if drain.get("note"):
            screen.print(f"  {escape(drain['note'])}")
    for release in found["releases"]:
        screen.print(
            f"\n[bold]{output.cell(release['worker_id'])}[/bold] released: {escape(release['why'])}"
        )
    if moments := found.get("timeline"):
        screen.print()
        screen.print(timeline_table(moments))
    screen.print(f"\n[bold]outcome[/bold] {escape(outcome_text(found))}")
    screen.print(f"[bold]answer[/bold]  {escape(found['answer'])}")


def _show_lines(screen: Console, title: str, lines: Sequence[str]) -> None:
    from rich.markup import escape

    if lines:
        screen.print(f"[bold]{title}[/bold]")
        for line in lines:
            screen.print(f"  {escape(line)}")


def timeline_table(moments: Sequence[Mapping[str, Any]]) -> Table:
    """Who did what when, in seconds since the decision; a dash is not known."""
    from rich.markup import escape

    made = output.table(
        "after",
        "who",
        "worker",
        "what",
        "took",
        "",
        right=("after", "took"),
        fixed=("who", "worker"),
    )
    for moment in moments:
        made.add_row(
            output.seconds(moment["after_s"], 1),
            output.cell(moment["who"]),
            output.cell(moment["worker_id"]),
            escape(moment["what"]),
            "" if moment["took_s"] is None else output.seconds(moment["took_s"]),
            f"[dim]{escape(moment['note'])}[/dim]" if moment["note"] else "",
        )
    return made


def _show_start(screen: Console, start: Mapping[str, Any]) -> None:
    from rich.markup import escape

    took = _after(start["after_s"]) or "not ordered yet"
    tier = f", weights from {start['tier']}" if start.get("tier") else ""
    screen.print(
        f"\n[bold]{output.cell(start['worker_id'])}[/bold] ({output.cell(start['pool'])}): "
        f"{output.cell(start['status'] + tier)}\n  after the decision: {output.cell(took)}"
    )
    if start.get("note"):
        screen.print(f"  [red]{escape(start['note'])}[/red]")
    if start["segments"] and start["wall_s"]:
        screen.print(segments_table(start))
    if start.get("log_tail"):
        screen.print(f"  [dim]end of its log:[/dim]\n{escape(start['log_tail'])}")


def _after(steps: Mapping[str, float]) -> str:
    return " → ".join(f"{kind} {after_s:.1f} s" for kind, after_s in steps.items())


def segments_table(start: Mapping[str, Any]) -> Table:
    """A start as bars over its wall time; exclusive seconds sum up to it with the unexplained."""
    wall_s = float(start["wall_s"])
    made = output.table(
        "segment",
        "0 s" + f"{wall_s:.1f} s".rjust(BAR_WIDTH - 3),
        "share of T_ready",
        right=("share of T_ready",),
    )
    exclusive = start["exclusive_s"]
    spans: dict[str, list[tuple[float, float]]] = {}
    modelled: set[str] = set()
    for segment in start["segments"]:
        end_s = wall_s if segment["end_s"] is None else segment["end_s"]
        spans.setdefault(segment["name"], []).append((segment["start_s"], end_s))
        if segment["modelled"]:
            modelled.add(segment["name"])
    for name, parts in sorted(spans.items(), key=lambda item: min(item[1])):
        label = output.cell(f"{name} (modelled)" if name in modelled else name)
        if name == start["blocking_segment"]:
            label = f"[cyan]{label}, waiting[/cyan]"
        elif name == start["dominant_segment"]:
            label = f"[bold]{label}[/bold]"
        made.add_row(label, _bar(parts, wall_s), output.seconds(exclusive.get(name, 0.0)))
    if start["unexplained_s"] is not None:
        made.add_row("[dim]unexplained[/dim]", "", output.seconds(start["unexplained_s"]))
    made.add_row("[bold]T_ready[/bold]", "", f"[bold]{output.seconds(wall_s)}[/bold]")
    return made


def _bar(parts: Sequence[tuple[float, float]], wall_s: float) -> str:
    cells = [" "] * BAR_WIDTH
    for start_s, end_s in parts:
        first = min(BAR_WIDTH - 1, max(0, int(start_s / wall_s * BAR_WIDTH)))
        last = max(first + 1, min(BAR_WIDTH, round(end_s / wall_s * BAR_WIDTH)))
        cells[first:last] = "█" * (last - first)
    return "".join(cells)
