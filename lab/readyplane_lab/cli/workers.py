"""`readyplane workers` and `readyplane drain`: the fleet as the router knows it.

Owns the row of a worker, as document and as table. What was ordered but has no lease yet is known
to the planner alone, and is added when that can be asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField, NotFound, ReadyplaneError, Refused
from readyplane.core.gate_checks import SHARD_COVERAGE
from readyplane_lab.cli import output
from readyplane_lab.cli.faults import note
from readyplane_lab.cli.flags import Json, examples, switch
from readyplane_lab.cli.models import check_known
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
    from rich.table import Table

    from readyplane.client import RouterClient
    from readyplane.core.worker import Fleet, Worker

EXAMPLES = examples(
    "readyplane workers",
    "readyplane workers p-3-9f2c",
    "readyplane workers --watch",
    "readyplane workers --json | jq '.workers[] | select(.state == \"ready\").worker_id'",
)
DRAIN_EXAMPLES = examples(
    "readyplane drain p-3-9f2c",
    "readyplane drain d-1-9f2c --reason 'kernel update' --deadline 120 --wait",
)
EVERY_S = 1.0
PLANNER_S_MAX = 2.0
WAIT_MORE_S = 30.0
EVIDENCE_CHARS_MAX = 120
STARTING = ("ordered", "provisioned")
LAST_STEP = "canary_passed"
ROW = (
    *("worker_id", "incarnation", "role", "state", "model", "worker_class", "node", "generation"),
    *(
        "epoch",
        "mode",
        "tier",
        "attached",
        "convertible",
        "told",
        "holds",
        "engine_url",
        "active",
        "kv_usage",
        "unheard_s",
    ),
)
SAME = ("worker_class", "node", "generation", "mode", "tier")


def workers(
    worker: Annotated[
        str,
        typer.Argument(metavar="[WORKER]", help="Show one: the gate's checks with evidence."),
    ] = "",
    model: Annotated[str, typer.Option(metavar="M", help="Only of this model.")] = "",
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", "-w", help="Once a second until Ctrl-C (with --json: a line each)."
        ),
    ] = False,
    json: Json = False,
    router: RouterAddress = "",
    planner: PlannerAddress = "",
) -> None:
    """List the workers: state, load, T_ready and what a start is waiting for.

    T_ready is from order to routable; `longest` is the segment with the largest share of it.
    A start that is under way shows the segment it waits in.
    `decode+prefill` is a decode worker that also takes prompts, in short chunks.
    What a worker was told and has not done yet (activate, flip) stands behind its state, and with what
    a standby waits (weights, process, asleep).
    A worker that the router has lost while its process still runs keeps its last known state, and it is
    said for how long nothing has been heard of it.
    The decision is shown by its end, which `readyplane explain` takes.
    With WORKER (an id, or a unique beginning) the ready gate's checks of that one are shown: passed or
    not, why, and the evidence that was judged.
    Of a worker of several ranks also the last step that each has passed, and what its memory holds.
    """
    where = find("router", router=router, planner=planner)
    if worker:
        run(_one(where, worker, as_json=json))
        return
    run(_watch(where, model, as_json=json) if watch else _once(where, model, as_json=json))


async def _once(where: Where, model: str, *, as_json: bool) -> None:
    async with router_of(where) as router:
        fleet = await router.list_workers(model)
        ordered, held = await _planned(where, model, fleet)
        if model and not (fleet.workers or ordered):
            await check_known(router, model)
    document = fleet_document(fleet, ordered, held)
    if as_json:
        output.emit(document)
        return
    screen = output.console()
    screen.print(fleet_table(document))


async def _one(where: Where, given: str, *, as_json: bool) -> None:
    async with router_of(where) as router:
        known = (await router.list_workers()).workers
    found = known[match(given, known)]
    if as_json:
        output.emit({"worker": worker_row(found), "checks": check_documents(found)})
        return
    screen = output.console()
    row = worker_row(found)
    screen.print(
        f"[bold]{output.cell(found.worker_id)}[/bold]  {row['role']}  {row['state']}  epoch {found.epoch}"
    )
    for name in ("failure", "drain_reason"):
        if row[name]:
            screen.print(f"[red]{output.cell(row[name])}[/red]")
    if row["stage"]:
        screen.print(output.cell(stage_text(row["stage"])))
    if row["ranks"]:
        screen.print(ranks_table(row["ranks"]))
    screen.print(checks_table(check_documents(found)))


def check_documents(worker: Worker) -> list[dict[str, Any]]:
    """The gate's checks, whole."""
    return [
        {"name": c.name, "passed": c.passed, "reason": c.reason, "evidence": dict(c.evidence)}
        for c in worker.checks
    ]


def ranks_table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    """The ranks of one worker."""
    made = output.table("rank", "passed", "tensors", "MB", right=("rank", "tensors", "MB"))
    for rank in ranks:
        size = None if rank["bytes"] is None else rank["bytes"] / 1e6
        made.add_row(
            str(rank["rank"]),
            output.cell(rank["step"] or output.NOT_KNOWN),
            output.number(rank["tensors"]),
            output.NOT_KNOWN if size is None else f"{size:.1f}",
        )
    return made


def checks_table(checks: Sequence[Mapping[str, Any]]) -> Table:
    """Checks for a person; long evidence is cut, `--json` has it whole."""
    from rich.markup import escape

    made = output.table("check", "", "why and evidence", fixed=("check",))
    for check in checks:
        told = ", ".join(f"{k}: {_cut(str(v))}" for k, v in check["evidence"].items())
        why = f"[red]{escape(check['reason'])}[/red]\n" if not check["passed"] else ""
        made.add_row(
            output.cell(check["name"]),
            "[green]passed[/green]" if check["passed"] else "[red]failed[/red]",
            why + f"[dim]{escape(told)}[/dim]",
        )
    made.caption = None if checks else "no evidence has been handed in yet"
    return made


def _cut(text: str) -> str:
    return text if len(text) <= EVIDENCE_CHARS_MAX else text[: EVIDENCE_CHARS_MAX - 1] + "…"


async def _watch(where: Where, model: str, *, as_json: bool) -> None:
    from rich.live import Live

    from readyplane.core.errors import Unavailable
    from readyplane.core.worker import Fleet
    from readyplane.kit.clock import SystemClock

    clock = SystemClock()
    last: dict[str, Any] = fleet_document(Fleet(), [])
    async with router_of(where) as router:
        if model and not (await router.list_workers(model)).workers:
            await check_known(router, model)
        live = None if as_json else Live(console=output.console(), auto_refresh=False)
        if live is not None:
            live.start()
        try:
            while True:
                try:
                    fleet = await router.list_workers(model)
                    planned = await _planned(where, model, fleet, quiet=True)
                    last = fleet_document(fleet, *planned)
                except Unavailable as error:
                    last = {**last, "degraded": str(error)}
                if live is None:
                    output.emit(last, line=True)
                else:
                    live.update(fleet_table(last), refresh=True)
                await clock.sleep(EVERY_S)
        finally:
            if live is not None:
                live.stop()


async def _planned(
    where: Where, model: str, fleet: Fleet, *, quiet: bool = False
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of what the planner has ordered and the router has not heard of, or has lost while its
    process runs, and what it orders no more (B132).
    """
    if not where.planner:
        return [], []
    from readyplane_lab.cli.where import within

    try:
        async with planner_of(where) as planner:
            state = await within(planner.state(model), PLANNER_S_MAX, "the planner")
    except ReadyplaneError as error:
        if not quiet and not isinstance(error, NotFound):
            note(f"workers that are only ordered are not shown: {error}")
        return [], []
    rows = state.get("workers", [])
    held = [f"{h['pool']}: {h['text']}" for h in state.get("held", ()) if h["code"] == "dead_end"]
    return [
        r
        for r in rows
        if r.get("unheard_s") is not None
        or (r["state"] == "ordered" and r["worker_id"] not in fleet.workers)
    ], held


def fleet_document(
    fleet: Fleet, ordered: Sequence[Mapping[str, Any]], held: Sequence[str] = ()
) -> dict[str, Any]:
    """`{"version", "degraded", "workers": [row], "not_ordered"}`; null is not known.

    `held`: why the planner orders no more of some artifact.
    """
    rows = [worker_row(w) for w in fleet.workers.values()]
    by_id = {row["worker_id"]: row for row in rows}
    for state in ordered:
        known = by_id.get(state["worker_id"])
        if known is None:
            rows.append(row_of(state))
        elif known["state"] == "gone":  # else it has registered again meanwhile
            known["unheard_s"] = state.get("unheard_s")
    rows.sort(key=lambda r: (r["state"] == "gone", r["role"] != "prefill", r["worker_id"]))
    return {
        "version": fleet.version,
        "degraded": fleet.degraded,
        "workers": rows,
        "not_ordered": list(held),
    }


def worker_row(worker: Worker) -> dict[str, Any]:
    """One worker as a document."""
    from readyplane.core.worker import WorkerState
    from readyplane_planner.starts import start_document

    offer, load = worker.offer, worker.load
    usage = None
    if load.kv_used_blocks is not None and load.kv_total_blocks:
        usage = load.kv_used_blocks / load.kv_total_blocks
    return row_of(
        {
            **{
                name: str(getattr(offer, name))
                for name in ("worker_id", "incarnation", "model", "worker_class", "node")
            },
            "role": str(offer.counts_as),
            "convertible": offer.convertible,
            "told": worker.told,
            "holds": "" if worker.holds is None else str(worker.holds),
            "stage": stage_document(worker),
            "state": str(worker.state),
            "was_ready": worker.ready_s is not None or worker.state is WorkerState.READY,
            "mode": str(offer.mode),
            "tier": str(worker.serving.tier) if worker.serving is not None else None,
            "generation": offer.generation,
            "epoch": worker.epoch,
            "attached": offer.attached,
            "engine_url": worker.serving.engine_url if worker.serving is not None else None,
            "active": worker.active,
            "kv_usage": usage,
            "scale_decision_id": offer.scale_decision_id,
            "start": start_document(worker),
            "checks": [
                {"name": c.name, "passed": c.passed, "reason": c.reason} for c in worker.checks
            ],
            "drain_reason": worker.drain_reason,
            "ranks": rank_documents(worker),
        }
    )


def stage_document(worker: Worker) -> dict[str, Any] | None:
    """The stage of its capacity profile; None for a worker that was started whole."""
    stage = None if worker.serving is None else worker.serving.stage
    if stage is None:
        return None
    return {
        "number": stage.number,
        "state": str(stage.state),
        "profile": stage.profile,
        "compiled": stage.compiled,
        "shapes": list(stage.shapes),
        "kv_tokens": stage.kv_tokens,
        "graph_bytes": stage.graph_bytes,
        "digest": stage.digest,
        "failure": stage.failure or None,
        "took_s": stage.took_s,
    }


def stage_text(stage: Mapping[str, Any]) -> str:
    """A stage in one line."""
    text = f"stage {stage['number']} of its capacity profile ({stage['state']}): "
    text += f"{len(stage['shapes'])} graphs, {stage['kv_tokens']} KV tokens, {stage['digest']}"
    took = "" if stage["took_s"] is None else f", {stage['took_s']:.1f} s after it was ready"
    return text + took + (f"; {stage['failure']}" if stage["failure"] else "")


def rank_documents(worker: Worker) -> list[dict[str, Any]] | None:
    """The ranks of a worker of several: the last step of each, and what its memory holds.

    None for a worker of one, null for what is not known yet.
    """
    if worker.offer.ranks == 1:
        return None
    held = next((c.evidence for c in worker.checks if c.name == SHARD_COVERAGE), {})

    def known(values: object, rank: int) -> Any:
        return values[rank] if isinstance(values, list) and rank < len(values) else None

    return [
        {
            "rank": rank,
            "step": known(list(worker.rank_steps), rank) or None,
            "tensors": known(held.get("rank_tensors"), rank),
            "bytes": known(held.get("rank_bytes"), rank),
        }
        for rank in range(worker.offer.ranks)
    ]


def row_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """The row of the command from a row of a state document: fixed keys, null where not known."""
    start = state.get("start") or {}
    ready = state["state"] not in STARTING
    row = {key: None if state.get(key) == "" else state.get(key) for key in ROW}
    return {
        **row,
        "tier": None if row["tier"] == "unknown" else row["tier"],
        "decision": state.get("scale_decision_id") or None,
        # Whoever never was routable, a standby or a start that failed, has no T_ready.
        "t_ready_s": start.get("wall_s") if state.get("was_ready") else None,
        "starting_s": None if ready else start.get("wall_s"),
        "dominant_segment": start.get("dominant_segment"),
        "dominant_s": (start.get("exclusive_s") or {}).get(start.get("dominant_segment")),
        "blocking_segment": start.get("blocking_segment"),
        "failure": start.get("failure") or None,
        "log_tail": start.get("log_tail") or None,
        "drain_reason": state.get("drain_reason") or None,
        "checks_failed": [c["name"] for c in state.get("checks", ()) if not c["passed"]],
        "ranks": state.get("ranks"),
        "stage": state.get("stage"),
    }


def fleet_table(document: Mapping[str, Any]) -> Table:
    """The fleet for a person; what all workers share stands below the table."""
    rows: Sequence[Mapping[str, Any]] = document["workers"]
    columns = ("worker", "role", "state", "epoch", "active", "KV", "T_ready", "longest", "decision")
    differing = [key for key in SAME if len({r[key] for r in rows if r[key] is not None}) > 1]
    shown = [*columns[:3], *(_title(key) for key in differing), *columns[3:]]
    fixed = ("worker", "role", "state", "decision")
    made = output.table(*shown, right=("epoch", "active", "KV", "T_ready"), fixed=fixed)
    for row in rows:
        made.add_row(*_cells(row, differing))
    same = [
        f"{_title(key)} "
        + output.cell(str(next((r[key] for r in rows if r[key] is not None), output.NOT_KNOWN)))
        for key in SAME
        if key not in differing
    ]
    made.caption = ", ".join(same) if rows else "no workers"
    if document["degraded"]:
        made.caption += f"\n[yellow]degraded: {output.cell(document['degraded'])}[/yellow]"
    for text in document.get("not_ordered", ()):
        made.caption += f"\n[red]{output.cell(text)}[/red]"
    return made


def _title(key: str) -> str:
    return {"worker_class": "class", "generation": "gen"}.get(key, key)


def _cells(row: Mapping[str, Any], differing: Sequence[str]) -> list[str]:
    colour = {"ready": "green", "draining": "yellow", "stalled": "red", "gone": "dim"}.get(
        row["state"], "cyan"
    )
    if row["blocking_segment"]:
        segment = f"waits in {output.cell(row['blocking_segment'])}"
    elif row["dominant_segment"]:
        segment = f"{output.cell(row['dominant_segment'])} {output.seconds(row['dominant_s'], 1)}"
    else:
        segment = output.NOT_KNOWN
    if row["ranks"] and row["state"] in STARTING:
        segment += f", {_ranks_up(row['ranks'])}"
    if row["stage"] and row["stage"]["state"] != "complete":
        segment += f", graphs {output.cell(row['stage']['state'])}"
    if row["unheard_s"] is not None:
        silent = f"nothing heard of it for {output.seconds(row['unheard_s'], 0)}, its process runs"
        segment = f"[red]{silent}[/red]"
    if row["failure"]:
        segment = f"[red]{output.cell(row['failure'])}[/red]"
    took = row["t_ready_s"] if row["starting_s"] is None else row["starting_s"]
    return [
        output.cell(row["worker_id"]),
        output.cell(row["role"]) + ("+prefill" if row["convertible"] else ""),
        f"[{colour}]{row['state']}[/{colour}]"
        + (f" ({output.cell(row['told'])})" if row["told"] else "")
        + (f", {output.cell(row['holds'])}" if row["holds"] else ""),
        *(
            output.cell(str(row[key] if row[key] is not None else output.NOT_KNOWN))
            for key in differing
        ),
        str(row["epoch"] or output.NOT_KNOWN),
        output.number(row["active"]),
        output.share(row["kv_usage"]),
        output.seconds(took, 1) + ("…" if row["starting_s"] is not None else ""),
        segment,
        output.cell((row["decision"] or output.NOT_KNOWN).rpartition("-")[2]),
    ]


def _ranks_up(ranks: Sequence[Mapping[str, Any]]) -> str:
    """`ranks 1/2` of those that have passed everything."""
    return f"ranks {sum(r['step'] == LAST_STEP for r in ranks)}/{len(ranks)}"


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its id, or a unique beginning.")],
    deadline: Annotated[
        float, typer.Option(metavar="S", help="Longest drain; what runs then is ended.")
    ] = 300.0,
    reason: Annotated[
        str, typer.Option(metavar="TEXT", help="Kept with the worker.")
    ] = "asked for by a person",
    wait: Annotated[bool, switch("--wait", text="Until it has left.")] = False,
    json: Json = False,
    router: RouterAddress = "",
) -> None:
    """Drain one worker: no new work from now on, streams are finished, then it leaves.

    The planner replaces it if its pool needs it.
    """
    if not (math.isfinite(deadline) and deadline > 0):
        raise InvalidField("--deadline", deadline, "give seconds above 0")
    where = find("router", router=router)
    run(_drain(where, worker, deadline, reason, wait=wait, as_json=json))


async def _drain(
    where: Where, given: str, deadline_s: float, reason: str, *, wait: bool, as_json: bool
) -> None:
    from readyplane.kit.clock import SystemClock

    clock = SystemClock()
    async with router_of(where) as router:
        worker_id = match(given, await living(router))
        drained = await router.drain(worker_id, reason=reason, deadline_s=deadline_s)
        began_s = clock.monotonic_s()
        left = False
        if wait:
            with output.console(stderr=True).status(f"{output.cell(worker_id)} drains") as status:
                while not left and clock.monotonic_s() - began_s < deadline_s + WAIT_MORE_S:
                    await clock.sleep(0.25)
                    now = (await living(router)).get(worker_id)
                    left = now is None or now.epoch != drained.epoch
                    if now is not None and not left:
                        status.update(
                            f"{output.cell(worker_id)} drains, {now.active} requests are finishing"
                        )
    took_s = clock.monotonic_s() - began_s
    if as_json:
        row = worker_row(drained)
        output.emit({"worker": row, "left": left if wait else None, "waited_s": took_s})
    elif wait and left:
        output.say(f"{worker_id} has left after {took_s:.1f} s")
    elif not wait:
        output.say(f"{worker_id} drains ({drained.active} requests are finishing)")
    if wait and not left:
        raise Refused(
            f"end of {worker_id}",
            [f"it has not left {took_s:.0f} s after the order to drain"],
            "look at it with `readyplane workers`",
        )


async def living(router: RouterClient) -> dict[str, Worker]:
    """Workers by id, without those that have left and are only remembered for a while."""
    fleet = await router.list_workers()
    return {name: w for name, w in fleet.workers.items() if str(w.state) != "gone"}


def match(given: str, known: Mapping[str, object]) -> str:
    """The worker id that is meant: itself, or the one that begins so.

    Raises:
        NotFound: none does. InvalidField: several do.
    """
    if given in known:
        return given
    found = sorted(name for name in known if given and name.startswith(given))
    if not found:
        ids = ", ".join(sorted(known)[:8]) or "there are none"
        raise NotFound("worker", given, f"use one of: {ids}")
    if len(found) > 1:
        raise InvalidField("WORKER", given, f"write more of it: {', '.join(found[:8])}")
    return found[0]
