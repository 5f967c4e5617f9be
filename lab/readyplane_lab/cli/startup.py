"""`readyplane startup report`: where the time of starts goes, as waterfalls, quantiles and a picture.

Owns the collection (the planner's journal, the router's workers, or a file that an earlier report
wrote) and what is printed. `core.startup_report` does the arithmetic, `startup_picture` the PNG.
"""

from __future__ import annotations

import json as json_module
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField, NotFound, ReadyplaneError
from readyplane.core.startup import Segment, SegmentName
from readyplane_lab.cli import output
from readyplane_lab.cli.decisions import segments_table
from readyplane_lab.cli.faults import note
from readyplane_lab.cli.flags import Json, examples
from readyplane_lab.cli.where import (
    PlannerAddress,
    RouterAddress,
    Where,
    find,
    planner_of,
    router_of,
    run,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from readyplane.core.startup_report import Start, StartGroup

app = typer.Typer()
EXAMPLES = examples(
    "readyplane startup report",
    "readyplane startup report --compare cold,warm --png starts.png",
    "readyplane startup report --json > before.json",
    "readyplane startup report --from before.json --from after.json --compare jit,aot",
)
LIMIT_MAX = 2_000
ENDED = ("ready", "draining", "stalled", "standby", "gone")


@app.command("report", epilog=EXAMPLES)
def report(
    model: Annotated[str, typer.Option(metavar="M", help="Only of this model.")] = "",
    compare: Annotated[
        str,
        typer.Option(metavar="A,B", help="Two of: cold, warm, a class, a tier, a mode, a pool."),
    ] = "",
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the waterfalls.")] = None,
    source: Annotated[
        list[Path] | None,
        typer.Option("--from", metavar="FILE", help="Read what --json wrote (repeatable)."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", help="Look through the newest N decisions.")
    ] = 200,
    json: Json = False,
    planner: PlannerAddress = "",
    router: RouterAddress = "",
) -> None:
    """Show where the time of starts goes: critical path per class, tier and mode.

    Each segment has its exclusive share of T_ready; with what nothing explains they sum up to it.
    Cold starts had their weights from the rack or an object store, warm ones from a peer, this
    node's memory or its disk.
    """
    from readyplane.core.startup_report import chosen, compared, grouped, summed

    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidField("--limit", limit, f"give 1 to {LIMIT_MAX}")
    words = [word.strip() for word in compare.split(",") if word.strip()]
    if compare and len(words) != 2:
        raise InvalidField("--compare", compare, "write two words with a comma, as cold,warm")
    if source:
        starts = [start for path in source for start in read_starts(path)]
    else:
        where = find("planner", planner=planner, router=router)
        starts = run(_collect(where, model, limit))
    if not starts:
        raise NotFound("start", model or "any", "wait until a worker is ready, or give --from")
    groups = grouped(starts)
    pair = [summed(word, chosen(starts, word)) for word in words]
    if png is not None:
        from readyplane_lab.cli.startup_picture import draw

        draw(pair or groups, png)
        note(f"{png} written")
    if json:
        output.emit(
            {
                "groups": [group_document(g) for g in groups],
                "compared": [group_document(g) for g in pair],
                "starts": [start_document(s) for s in starts],
            }
        )
        return
    screen = output.console()
    for group in pair or groups:
        show_group(screen, group)
    if pair:
        screen.print(difference_table(pair[0], pair[1], compared(pair[0], pair[1])))


# ------------------------------------------------------------------------- where starts are kept


async def _collect(where: Where, model: str, limit: int) -> list[Start]:
    """From the planner's journal, and from the router what nobody's decision ordered."""
    found: dict[str, Start] = {}
    async with planner_of(where) as planner:
        for decision in await planner.list_decisions(model=model, limit=limit, changes_only=True):
            told = await planner.explain(str(decision["decision_id"]))
            for start in told["starts"]:
                if start["status"] == "ready" and start["wall_s"]:
                    found[str(start["worker_id"])] = start_of(start)
    try:
        async with router_of(where) as router:
            fleet = await router.list_workers(model)
    except ReadyplaneError as error:
        note(f"workers that no decision ordered are not shown: {error}")
        return list(found.values())
    from readyplane_planner.starts import start_document as told_start

    for worker in fleet.workers.values():
        if worker.worker_id in found or str(worker.state) not in ENDED or worker.offer.attached:
            continue
        document = told_start(worker)
        if document["wall_s"] and not document["failure"]:
            offer = worker.offer
            more = {
                "worker_id": worker.worker_id,
                "worker_class": offer.worker_class,
                "mode": str(offer.mode),
                "tier": "" if worker.serving is None else str(worker.serving.tier),
                "pool": str(offer.counts_as),
            }
            found[worker.worker_id] = start_of({**document, **more})
    return list(found.values())


def read_starts(path: Path) -> list[Start]:
    """The starts of a report that `--json` wrote.

    Raises:
        InvalidField: names the file.
    """
    try:
        document = json_module.loads(path.read_text())
        return [start_of(start) for start in document["starts"]]
    except OSError as error:
        raise InvalidField("--from", str(path), f"give a readable file ({error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = f"give what `startup report --json` wrote ({error!r})"
        raise InvalidField("--from", str(path), remedy) from error


def start_of(document: Mapping[str, Any]) -> Start:
    """A start from its document; what is not there is not known."""
    from readyplane.core.startup_report import Start

    segments = tuple(
        Segment(
            SegmentName(s["name"]),
            float(s["start_s"]),
            None if s["end_s"] is None else float(s["end_s"]),
            bool(s["modelled"]),
            str(s.get("detail", "")),
        )
        for s in document["segments"]
    )
    return Start(
        worker_id=str(document["worker_id"]),
        wall_s=float(document["wall_s"]),
        exclusive_s={str(n): float(v) for n, v in document["exclusive_s"].items()},
        unexplained_s=float(document["unexplained_s"] or 0.0),
        segments=segments,
        **{
            name: str(document.get(name) or "") for name in ("worker_class", "tier", "mode", "pool")
        },
    )


# ------------------------------------------------------------------------- documents and tables


def start_document(start: Start) -> dict[str, Any]:
    """A start as JSON; `start_of` reads it."""
    return {
        **{n: getattr(start, n) for n in ("worker_id", "worker_class", "tier", "mode", "pool")},
        "temperature": start.temperature or None,
        "wall_s": start.wall_s,
        "exclusive_s": dict(start.exclusive_s),
        "unexplained_s": start.unexplained_s,
        "segments": [
            {
                "name": str(s.name),
                "start_s": s.start_s,
                "end_s": s.end_s,
                "modelled": s.modelled,
                "detail": s.detail,
            }
            for s in start.segments
        ],
    }


def group_document(group: StartGroup) -> dict[str, Any]:
    """A group as JSON."""
    numbers = ("count", "p50_s", "p90_s", "p99_s", "mean_s", "unexplained_s", "dominant")
    return {
        "name": group.name,
        **{name: getattr(group, name) for name in numbers},
        "exclusive_s": dict(group.exclusive_s),
        "modelled": sorted(group.modelled),
        "typical": group.typical.worker_id,
    }


def show_group(screen: Console, group: StartGroup) -> None:
    """Quantiles, the waterfall of a typical start, and the mean share of each segment."""
    from rich.markup import escape

    share = group.unexplained_s / group.mean_s if group.mean_s else 0.0
    seconds = {**group.exclusive_s, "unexplained": group.unexplained_s}[group.dominant]
    modelled = ", modelled" if group.dominant in group.modelled else ""
    screen.print(
        f"[bold]{escape(group.name)}[/bold]: {group.count} starts, T_ready "
        f"P50 {output.seconds(group.p50_s)}, P90 {output.seconds(group.p90_s)}, "
        f"P99 {output.seconds(group.p99_s)}\n"
        f"longest on average: [bold]{group.dominant}[/bold] {output.seconds(seconds)}{modelled} "
        f"of {output.seconds(group.mean_s)}; unexplained {output.seconds(group.unexplained_s)} "
        f"({output.share(share)})\n"
        f"a typical start: {escape(group.typical.worker_id)}"
    )
    typical = start_document(group.typical)
    dominant = max(group.typical.exclusive_s, key=group.typical.exclusive_s.__getitem__, default="")
    screen.print(
        segments_table({**typical, "blocking_segment": None, "dominant_segment": dominant})
    )


def difference_table(first: StartGroup, second: StartGroup, found: Sequence[Any]) -> Table:
    """Two groups, segment by segment."""
    columns = ("segment", first.name, second.name, "saved")
    made = output.table(*columns, right=columns[1:], title="mean exclusive seconds")
    for each in found:
        made.add_row(
            each.segment,
            output.seconds(each.first_s),
            output.seconds(each.second_s),
            output.seconds(each.saved_s),
        )
    made.add_row(
        "[bold]T_ready[/bold]",
        output.seconds(first.mean_s),
        output.seconds(second.mean_s),
        output.seconds(first.mean_s - second.mean_s),
    )
    return made
