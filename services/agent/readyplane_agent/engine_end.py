"""Why a start failed, where the engine's own end is behind it.

Owns the wait for that end: who asks an engine that is about to be gone hears of a closed connection
first and of the process's exit status a moment later, and the exit status is the reason.
"""

from __future__ import annotations

from readyplane.core.errors import ReadyplaneError, Refused, Unavailable
from readyplane.kit.clock import Clock
from readyplane_agent.engines.child import ENDED, TAIL_LINES, ended
from readyplane_agent.engines.port import EnginePort

END_AWAITED_S_MAX = 2.5
"""Longer than a group waits to learn which of its ranks ended first, and a process to be reaped."""

LOOK_EVERY_S = 0.05


def end_text(engine: EnginePort) -> str:
    """How an engine ended, with the end of its log; empty while it runs."""
    if engine.returncode is None:
        return ""
    return ended(engine.returncode, engine.log_tail(TAIL_LINES))


async def explained(error: ReadyplaneError | OSError, engine: EnginePort, clock: Clock) -> str:
    """The failure of a start; with the engine's end, if that comes within `END_AWAITED_S_MAX`.

    An error that no engine's end can be behind is told at once, and so is one that tells of it.
    """
    told = str(error)
    if not (isinstance(error, (Unavailable, OSError)) or type(error) is Refused):
        return told
    if ENDED in told or not engine.pid:
        return told
    until_s = clock.monotonic_s() + END_AWAITED_S_MAX
    while engine.returncode is None and clock.monotonic_s() < until_s:
        await clock.sleep(LOOK_EVERY_S)
    end = end_text(engine)
    return f"{end}; {told}" if end else told
