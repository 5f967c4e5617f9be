"""`readyplane attach`: a running OpenAI/vLLM-style engine becomes a worker, until Ctrl-C.

Owns the flags; the work is in `attached`, which is imported when the command runs.
"""

from __future__ import annotations

import math
import secrets
from typing import Annotated

import typer

from readyplane.core.errors import InvalidField
from readyplane_lab.cli.flags import examples
from readyplane_lab.cli.where import RegistryAddress, RouterAddress, find, run

EXAMPLES = examples(
    "readyplane attach http://127.0.0.1:8000 --role decode",
    "readyplane attach http://10.0.0.7:8000 --role prefill --model llama-8b"
    " --worker-class h200 --profile h200-llama8b-fp8",
)
ROLES = ("prefill", "decode", "both")


def attach(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Base URL of the engine, http://HOST:PORT.")
    ],
    role: Annotated[str, typer.Option(metavar="ROLE", help="prefill, decode or both.")],
    model: Annotated[
        str, typer.Option(metavar="M", help="Which of its models (default: the only one).")
    ] = "",
    worker_id: Annotated[
        str, typer.Option("--worker-id", metavar="ID", help="By default a new one.")
    ] = "",
    worker_class: Annotated[
        str,
        typer.Option(
            metavar="CLASS", help="What it runs on (default: as the other workers of the model)."
        ),
    ] = "",
    profile: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Profile of that class, a name or file (default: CLASS)."
        ),
    ] = "",
    manifest: Annotated[
        str, typer.Option(metavar="DIGEST", help="What it serves, if that is known.")
    ] = "",
    node: Annotated[str, typer.Option(metavar="NAME", help="Machine it runs on.")] = "local",
    drain_deadline: Annotated[
        float, typer.Option(metavar="S", help="Longest drain after Ctrl-C.")
    ] = 60.0,
    router: RouterAddress = "",
    registry: RegistryAddress = "",
) -> None:
    """Bring a running OpenAI/vLLM-style engine under control, until Ctrl-C.

    An agent beside it asks for a lease, proves the engine at the ready gate, and renews.
    What nobody can check from outside, such as the bytes it loaded, is shown as skipped.
    Ctrl-C drains: no new work, streams are finished, the lease is given back; the engine stays.
    Exit code 0 after an orderly end, 1 when the gate or the router refused it.
    """
    if role not in ROLES:
        raise InvalidField("--role", role, "write one of " + ", ".join(ROLES))
    if not (math.isfinite(drain_deadline) and drain_deadline > 0):
        raise InvalidField("--drain-deadline", drain_deadline, "give seconds above 0")
    if not url.startswith("http://"):
        raise InvalidField("URL", url, "write http://HOST:PORT of the engine")
    where = find("router", router=router, registry=registry)
    from readyplane_lab.cli.attached import attach_engine

    code = run(
        attach_engine(
            where,
            url.rstrip("/"),
            {
                "role": role,
                "model": model,
                "worker-id": worker_id or f"attached-{role[0]}-{secrets.token_hex(2)}",
                "worker-class": worker_class,
                "profile": profile,
                "manifest": manifest,
                "node": node,
                "drain-deadline-s": str(drain_deadline),
            },
        )
    )
    raise typer.Exit(code)
