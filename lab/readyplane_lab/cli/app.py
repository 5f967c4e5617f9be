"""The command tree: which command is in which file. Hands `app` to `__main__` and to `reference`.

Imports stay light here and in every command file, because `readyplane --help` imports them all;
what a command needs it imports when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from readyplane_lab.cli import (
    artifact,
    artifact_canary,
    artifact_export,
    artifact_keep,
    attach,
    change,
    decisions,
    doctor,
    plan,
    policy,
    profile,
    prove,
    replay,
    rollout,
    route,
    startup,
    trace,
    up,
    workers,
)
from readyplane_lab.cli.flags import switch

HELP = """Bring prefill and decode workers to readiness, and watch what the planner does with them.

Commands find a running `readyplane up` of this user by themselves.
For any other system give addresses (`--router`, `--planner`, `--registry`), or set
READYPLANE_ROUTER and so on, and READYPLANE_TOKEN where it wants a token.
"""
EXIT_CODES = (
    "Exit codes: 0 done, 1 failed or refused, 2 bad input, 3 cannot be reached, 130 interrupted."
)

app = typer.Typer(
    help=HELP,
    epilog=EXIT_CODES,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"readyplane {version('readyplane')}")
        raise typer.Exit


@app.callback()
def start(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback answers
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, metavar="", help="Print the version."
        ),
    ] = False,
    debug: Annotated[  # noqa: ARG001 - read by `faults.without_debug`
        bool,
        switch(
            "--debug",
            text="Show a traceback when something fails; may stand anywhere (READYPLANE_DEBUG).",
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def _group(made: typer.Typer, name: str, text: str) -> None:
    """A group that prints its help when it is called alone."""

    @made.callback(invoke_without_command=True)
    def alone(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    app.add_typer(made, name=name, help=text)


app.command("up", epilog=up.EXAMPLES)(up.up)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("attach", epilog=attach.EXAMPLES)(attach.attach)
app.command("workers", epilog=workers.EXAMPLES)(workers.workers)
app.command("drain", epilog=workers.DRAIN_EXAMPLES)(workers.drain)
app.command("activate", epilog=change.ACTIVATE_EXAMPLES)(change.activate)
app.command("flip", epilog=change.FLIP_EXAMPLES)(change.flip)
app.command("decisions", epilog=decisions.EXAMPLES)(decisions.decisions)
app.command("explain", epilog=decisions.EXPLAIN_EXAMPLES)(decisions.explain)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("route", epilog=route.EXAMPLES)(route.route)
app.command("replay", epilog=replay.EXAMPLES)(replay.replay)
app.command("prove", epilog=prove.EXAMPLES)(prove.prove)
artifact.app.command("canary", epilog=artifact_canary.CANARY_EXAMPLES)(artifact_canary.canary)
artifact.app.command("sign", epilog=artifact_keep.SIGN_EXAMPLES)(artifact_keep.sign)
artifact.app.command("untag", epilog=artifact_keep.UNTAG_EXAMPLES)(artifact_keep.untag)
artifact.app.command("retire", epilog=artifact_keep.RETIRE_EXAMPLES)(artifact_keep.retire)
artifact.app.command("gc", epilog=artifact_keep.GC_EXAMPLES)(artifact_keep.gc)
artifact.app.command("export", epilog=artifact_export.EXPORT_EXAMPLES)(artifact_export.export)
artifact.app.add_typer(artifact_keep.key_app, name="key", help="Make keys that sign artifacts.")
_group(
    artifact.app, "artifact", "Publish, sign, name, show, verify and collect artifacts (models)."
)
_group(policy.app, "policy", "Show and change what is wanted of a model's pools.")
_group(profile.app, "profile", "Measure, import and show what a class of workers can do.")
app.add_typer(rollout.app, name="rollout")
_group(startup.app, "startup", "Look into starts of workers.")
_group(trace.app, "trace", "Look into request traces.")
