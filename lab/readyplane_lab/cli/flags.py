"""How options look in `--help`, and the one that every command shares.

Imported by every command file, so nothing heavy is imported here.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer


def switch(*names: str, text: str, panel: str | None = None) -> Any:
    """An option without a value; `names` as they are typed."""
    return typer.Option(*names, metavar="", help=text, rich_help_panel=panel)


def examples(*lines: str) -> str:
    """The end of a `--help`: each example on a line of its own."""
    return "\n".join(["[bold]Examples[/bold]", *(f"$ {line}" for line in lines)])


Json = Annotated[bool, switch("--json", text="Print one JSON document, nothing else.")]
