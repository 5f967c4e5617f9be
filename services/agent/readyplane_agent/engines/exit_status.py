"""The exit status of an engine in words: a number, and the signal that it stands for.

Owns the wording alone, for failures that people read.
"""

from __future__ import annotations

import signal

_MEANS = {
    signal.SIGBUS: "a page that it maps is gone: a file was cut short, or cannot be read",
    signal.SIGKILL: "killed from outside, or by the kernel for want of memory",
}


def status_text(code: int | None) -> str:
    """`-7 (SIGBUS, a page that it maps is gone: …)`; the number alone where no signal ended it."""
    if code is None or code >= 0:
        return str(code)
    try:
        found = signal.Signals(-code)
    except ValueError:
        return str(code)
    means = _MEANS.get(found)
    return f"{code} ({found.name}{f', {means}' if means else ''})"
