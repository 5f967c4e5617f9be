"""`readyplane`: runs one command and returns its exit code.

Owns what every failure of a command looks like; the commands themselves raise core errors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import typer.main

from readyplane_lab.cli.app import app
from readyplane_lab.cli.faults import ExitCode, failure, tell, without_debug


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of `argv` (by default that of the process); never raises, returns the code."""
    given, debug = without_debug(list(sys.argv[1:] if argv is None else argv))
    try:
        code = _command()(args=given, prog_name="readyplane", standalone_mode=False)
    except typer.TyperException as error:
        return usage(error)
    except (KeyboardInterrupt, typer.Abort):
        code = ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the last stop: nobody should see a traceback
        return failure(error, debug=debug)
    if code == ExitCode.INTERRUPTED:
        print(file=sys.stderr)
    return int(code or 0)


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def usage(error: typer.TyperException) -> int:
    """A command line that cannot be understood: what is wrong and where the help is."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "readyplane"
    said = error.format_message().strip().rstrip(".")
    tell(f"command line: {said}; see `{path} --help`")
    return ExitCode.BAD_INPUT


if __name__ == "__main__":
    sys.exit(main())
