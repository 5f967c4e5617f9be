"""What commands print: JSON for programs, tables for people, each number in one way.

Owns stdout. With `--json` nothing but one document is written there; remarks go to stderr.
What others have written (names, reasons) cannot steer the terminal: see `legible`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from readyplane_lab.cli.legible import legible, legible_json, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

__all__ = [
    "NOT_KNOWN",
    "cell",
    "console",
    "emit",
    "moment",
    "number",
    "say",
    "seconds",
    "share",
    "short",
    "size",
    "table",
]

PIPE_WIDTH = 120
NOT_KNOWN = "–"


def emit(document: object, *, line: bool = False) -> None:
    """One JSON document on stdout; with `line` on a single line. NaN and infinities become null."""
    text = json.dumps(
        _finite(document), indent=None if line else 2, ensure_ascii=False, allow_nan=False
    )
    print(legible_json(text), flush=line)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_finite(item) for item in value]
    return value


def console(*, stderr: bool = False) -> Console:
    """A console that does not colour words by itself; wide enough for a table when piped.

    Whatever text it is given, also in cells of tables, is printed without what steers a terminal.
    """
    from rich.console import Console

    class Legible(Console):
        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(legible(text, keep="\n\t"), **how)

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Legible(stderr=stderr, highlight=False, emoji=False, width=width)


def table(
    *columns: str, right: Iterable[str] = (), fixed: Iterable[str] = (), title: str = ""
) -> Table:
    """An empty table without lines around it.

    `right` names columns of numbers; these and the `fixed` ones are never broken over lines.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(
        box=SIMPLE_HEAD,
        title=title or None,
        title_justify="left",
        caption_justify="left",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    numbers = set(right)
    for name in columns:
        made.add_column(
            name,
            justify="right" if name in numbers else "left",
            overflow="fold",
            no_wrap=name in numbers or name in set(fixed),
        )
    return made


def cell(text: str) -> str:
    """What somebody else has named, as one line for a cell or a line: nothing in it is markup."""
    from rich.markup import escape

    return escape(legible(text))


def seconds(value: float | None, digits: int = 2) -> str:
    """`1.25 s`, or a dash."""
    return NOT_KNOWN if value is None else f"{value:.{digits}f} s"


def number(value: float | None, digits: int = 0) -> str:
    """`1,234`, or a dash."""
    return NOT_KNOWN if value is None else f"{value:,.{digits}f}"


def share(value: float | None) -> str:
    """`12 %`, or a dash."""
    return NOT_KNOWN if value is None else f"{100 * value:.0f} %"


def size(value: float | None) -> str:
    """`300 MB`: powers of ten, as disks are sold."""
    if value is None:
        return NOT_KNOWN
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return NOT_KNOWN


def moment(wall_s: float | None) -> str:
    """Local time of a moment to the second, with its date unless that is today."""
    if wall_s is None:
        return NOT_KNOWN
    from readyplane.kit.clock import SystemClock, utc

    then, now = utc(wall_s).astimezone(), utc(SystemClock().wall_s()).astimezone()
    return then.strftime("%H:%M:%S" if then.date() == now.date() else "%Y-%m-%d %H:%M:%S")


def short(digest: str) -> str:
    """The beginning of a digest, which commands take for the whole; `--json` has it whole."""
    return digest[:19] if digest.startswith("sha256:") else digest
