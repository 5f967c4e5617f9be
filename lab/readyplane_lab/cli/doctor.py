"""`readyplane doctor`: is this machine fit, is the system well, is the engine usable; what to do.

Owns the order of the checks and how findings are shown. The checks themselves are in
`doctor_machine`, `doctor_stores`, `doctor_system`, `doctor_bytes` and `doctor_engine`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from readyplane.core.errors import InvalidField
from readyplane_lab.cli import output
from readyplane_lab.cli.finding import Finding
from readyplane_lab.cli.flags import Json, examples
from readyplane_lab.cli.where import (
    PlannerAddress,
    RegistryAddress,
    RegistryHttp,
    RouterAddress,
    run,
)

EXAMPLES = examples(
    "readyplane doctor",
    "readyplane doctor --engine http://127.0.0.1:8000",
    "readyplane doctor --port 8080 --data-dir ~/readyplane --redis-url redis://cache:6379/0 --json",
)
WORDS = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]fail[/red]"}


def doctor(
    engine: Annotated[
        str, typer.Option(metavar="URL", help="Also look at this engine, as `attach` would.")
    ] = "",
    port: Annotated[
        list[int] | None,
        typer.Option(metavar="PORT", help="A port that is wanted; may be repeated."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The data folder that is wanted.")
    ] = None,
    database_url: Annotated[
        str,
        typer.Option(
            envvar="READYPLANE_DATABASE_URL", metavar="URL", help="PostgreSQL that is wanted."
        ),
    ] = "",
    redis_url: Annotated[
        str,
        typer.Option(
            envvar="READYPLANE_REDIS_URL", metavar="URL", help="Redis or Valkey that is wanted."
        ),
    ] = "",
    json: Json = False,
    registry: RegistryAddress = "",
    router: RouterAddress = "",
    planner: PlannerAddress = "",
    registry_http: RegistryHttp = "",
) -> None:
    """Check machine, stores, running system, stored bytes and engine, and say what to do.

    Nothing is changed or started.
    Exit code 1 when something fails; warnings do not count.
    """
    for wanted in port or ():
        if not 0 < wanted < 65536:
            raise InvalidField("--port", wanted, "give 1 to 65535")
    given = {
        "registry": registry,
        "router": router,
        "planner": planner,
        "registry_http": registry_http,
    }
    findings = run(
        _show(
            _findings(engine, port or [], data_dir, (database_url, redis_url), given), as_json=json
        )
    )
    if any(f.status == "fail" for f in findings):
        raise typer.Exit(1)


async def _findings(
    engine: str,
    ports: Sequence[int],
    data_dir: Path | None,
    stores: tuple[str, str],
    given: dict[str, str],
) -> AsyncIterator[Finding]:
    from readyplane_lab.cli import (
        doctor_bytes,
        doctor_engine,
        doctor_machine,
        doctor_stores,
        doctor_system,
    )

    for finding in doctor_machine.findings(ports, data_dir):
        yield finding
    for found in (
        doctor_stores.findings(*stores),
        doctor_system.findings(given),
        doctor_bytes.findings(given),
        doctor_engine.findings(engine),
    ):
        async for finding in found:
            yield finding


async def _show(findings: AsyncIterator[Finding], *, as_json: bool) -> list[Finding]:
    from rich.markup import escape
    from rich.padding import Padding

    screen = output.console()
    told: list[Finding] = []
    area = ""
    async for finding in findings:
        told.append(finding)
        if as_json:
            continue
        if finding.area != area:
            area = finding.area
            screen.print(f"[bold]{area}[/bold]")
        screen.print(f"  {WORDS[finding.status]} {escape(finding.name)}: {escape(finding.found)}")
        if finding.remedy:
            screen.print(Padding(f"→ {escape(finding.remedy)}", (0, 0, 0, 7)))
    counts = {word: sum(f.status == word for f in told) for word in WORDS}
    if as_json:
        output.emit({"counts": counts, "findings": [asdict(f) for f in told]})
    else:
        screen.print(f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failures")
    return told
