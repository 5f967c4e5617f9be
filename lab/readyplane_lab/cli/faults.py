"""What a failed command says and returns: one line on stderr, and an exit code that means something.

Owns the table from errors to exit codes. Hands both to `readyplane_lab.cli.__main__`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import IntEnum

from readyplane.core.errors import InvalidField, ReadyplaneError, Unauthenticated, Unavailable
from readyplane_lab.cli.legible import legible, say

DEBUG = "READYPLANE_DEBUG"


class ExitCode(IntEnum):
    """What the exit code of every command means."""

    DONE = 0
    FAILED = 1
    BAD_INPUT = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


def exit_code(error: Exception) -> ExitCode:
    """Bad input 2, a system that cannot be reached 3, every other failure or refusal 1."""
    if isinstance(error, InvalidField):
        return ExitCode.BAD_INPUT
    if isinstance(error, Unavailable):
        return ExitCode.UNREACHABLE
    return ExitCode.FAILED


def tell(text: str) -> None:
    """`error …` as one line on stderr, whatever lines the text had."""
    line = legible(" ".join(str(text).split()))
    print(f"{_word('error')} {line}", file=sys.stderr)


def note(text: str) -> None:
    """A remark on stderr that is no failure, so that stdout holds the answer alone."""
    say(f"note: {' '.join(text.split())}", stderr=True)


def failure(error: Exception, *, debug: bool) -> ExitCode:
    """Say what went wrong, with a traceback only when it was asked for; returns the exit code."""
    if debug:
        import traceback

        say("".join(traceback.format_exception(error)), end="", stderr=True, lines=True)
    if isinstance(error, Unauthenticated):
        tell("not authenticated; set READYPLANE_TOKEN to the token of that system")
    elif isinstance(error, ReadyplaneError):
        tell(str(error))
    elif isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        tell(f"{where}{error.strerror or error}; check that it can be used")
    else:
        tell(
            f"{type(error).__name__}: {error}; this is a fault of readyplane, "
            f"run it with --debug for the traceback"
        )
    return exit_code(error)


def without_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """(Arguments without `--debug`, wherever it stood; whether it was there or the variable is set).

    Who repeats a line with it puts it at the end. What follows `--` is left alone.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    kept = [argument for argument in argv[:end] if argument != "--debug"]
    asked = len(kept) < end or os.environ.get(DEBUG, "") not in {"", "0"}
    return [*kept, *argv[end:]], asked


def _word(text: str) -> str:
    colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return f"\x1b[31m{text}\x1b[0m" if colour else text
