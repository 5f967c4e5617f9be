"""`readyplane startup report`: where the time of starts goes, as waterfalls, quantiles and a picture.

Owns the collection (the planner's journal, the router's workers, or a file that an earlier report
wrote). `core.startup_report` does the arithmetic, `startup_documents` the JSON, `startup_tables` what is
printed, `startup_picture` the PNG.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from readyplane.core.errors import InvalidField, NotFound, ReadyplaneError
from readyplane_lab.cli import output
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
    from readyplane.core.startup_failed import FailedStart
    from readyplane.core.startup_report import Start

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
        typer.Option(
            metavar="A,B", help="Two of: cold, warm, standby, a class, a tier, a mode, a pool."
        ),
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
    Starts that failed are counted apart, by where they ended and by which error.
    """
    from readyplane.core.startup_failed import alike
    from readyplane.core.startup_report import chosen, compared, grouped, summed
    from readyplane_lab.cli import startup_documents as documents
    from readyplane_lab.cli import startup_tables as tables

    if not 1 <= limit <= LIMIT_MAX:
        raise InvalidField("--limit", limit, f"give 1 to {LIMIT_MAX}")
    words = [word.strip() for word in compare.split(",") if word.strip()]
    if compare and len(words) != 2:
        raise InvalidField("--compare", compare, "write two words with a comma, as cold,warm")
    if source:
        reports = [documents.read_report(path) for path in source]
        starts = [start for started, _ in reports for start in started]
        failed = [each for _, lost in reports for each in lost]
    else:
        where = find("planner", planner=planner, router=router)
        starts, failed = run(_collect(where, model, limit))
    if not (starts or failed):
        raise NotFound("start", model or "any", "wait until a worker is ready, or give --from")
    groups = grouped(starts)
    pair = [summed(word, chosen(starts, word)) for word in words]
    if png is not None:
        if not starts:
            raise NotFound("start", "any that became ready", "leave --png out to see what failed")
        from readyplane_lab.cli.startup_picture import draw

        draw(pair or groups, png)
        note(f"{png} written")
    if json:
        output.emit(
            {
                "groups": [documents.group_document(g) for g in groups],
                "compared": [documents.group_document(g) for g in pair],
                "starts": [documents.start_document(s) for s in starts],
                "failed": [documents.failed_document(f) for f in failed],
            }
        )
        return
    screen = output.console()
    for group in pair or groups:
        tables.show_group(screen, group)
    if pair:
        screen.print(tables.difference_table(pair[0], pair[1], compared(pair[0], pair[1])))
    if failed:
        screen.print(tables.failures_table(alike(failed)))


# ------------------------------------------------------------------------- where starts are kept


async def _collect(where: Where, model: str, limit: int) -> tuple[list[Start], list[FailedStart]]:
    """From the planner's journal, and from the router what nobody's decision ordered."""
    from readyplane_lab.cli.startup_documents import failed_of, start_of
    from readyplane_planner.explain import PROVED

    found: dict[str, Start] = {}
    failed: dict[str, FailedStart] = {}
    async with planner_of(where) as planner:
        for decision in await planner.list_decisions(model=model, limit=limit, changes_only=True):
            told = await planner.explain(str(decision["decision_id"]))
            for start in told["starts"]:
                if start["status"] in PROVED and start["wall_s"]:
                    found[str(start["worker_id"])] = start_of(start)
                elif start["status"] == "failed":
                    failed[str(start["worker_id"])] = failed_of(start)
    try:
        async with router_of(where) as router:
            fleet = await router.list_workers(model)
    except ReadyplaneError as error:
        note(f"workers that no decision ordered are not shown: {error}")
        return list(found.values()), list(failed.values())
    from readyplane.core.worker import Holds
    from readyplane_planner.starts import start_document as told_start

    for worker in fleet.workers.values():
        if worker.worker_id in found or worker.worker_id in failed or worker.offer.attached:
            continue
        document = told_start(worker)
        offer = worker.offer
        document |= {
            "worker_id": worker.worker_id,
            "worker_class": offer.worker_class,
            "mode": str(offer.mode),
            "tier": "" if worker.serving is None else str(worker.serving.tier),
            "pool": str(offer.counts_as),
            "from_standby": offer.holds is Holds.PROCESS,
        }
        if worker.holds is Holds.PROCESS:
            continue  # it waits with a process, and has begun no start
        if document["failure"] and worker.ready_s is None:
            failed[worker.worker_id] = failed_of(document)
        elif document["wall_s"] and not document["failure"] and str(worker.state) in ENDED:
            found[worker.worker_id] = start_of(document)
    return list(found.values()), list(failed.values())
