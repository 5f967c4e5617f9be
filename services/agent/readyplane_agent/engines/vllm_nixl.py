"""NIXL's progress thread, which never sleeps by itself: how long it may.

Owns one setting and both its ends: what an agent puts into its engine's environment, and the change
inside vLLM's own process that follows from it. NIXL 1.5's Python side makes each agent with a delay of
nothing, so that its thread asks `poll` again and again and burns most of a core although nobody hands
over KV. No setting of NIXL, UCX or vLLM says otherwise. With a delay the thread sleeps until a file
descriptor wakes it; the delay is only how often it looks without being woken.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from readyplane.core.errors import InvalidField

WAKE_ENV = "READYPLANE_VLLM_NIXL_WAKE_US"
"""Microseconds; 0 leaves NIXL as it is. NIXL rounds up to whole milliseconds."""
WAKE_ON_CPU_US = 1000
WAKE_US_MAX = 1_000_000
BINDINGS = "nixlBind"
NOT_CHANGED = "NIXL's progress thread does not sleep: {why}\n"


def wake_us(environ: Mapping[str, str], *, device: str = "") -> int:
    """How long the thread may sleep [us]: as the environment says, else 1 ms on a CPU, else not at all.

    A processor computes there, and has no core to give away; on a GPU nobody has measured it yet.

    Raises:
        InvalidField: no number from 0 to a second.
    """
    told = environ.get(WAKE_ENV, "")
    if not told:
        return WAKE_ON_CPU_US if device == "cpu" else 0
    if not (told.isascii() and told.isdigit()) or int(told) > WAKE_US_MAX:
        raise InvalidField(WAKE_ENV, told, f"give microseconds from 0 to {WAKE_US_MAX}")
    return int(told)


def let_sleep(us: int) -> bool:
    """From now on agents of NIXL made in this process sleep up to `us`; whether that could be done.

    Where it cannot, NIXL is left as it is and standard error, the engine's log, says why. Idempotent.
    """
    if us == 0:
        return False
    try:
        # By vLLM's own way to NIXL, which sets what UCX has to be told before.
        found = importlib.import_module("vllm.distributed.nixl_utils").nixl_agent_config
    except (ImportError, AttributeError) as error:
        return _not_changed(str(error))
    api = sys.modules.get(getattr(found, "__module__", ""))
    bindings = getattr(api, BINDINGS, None)
    plain = getattr(bindings, "nixlAgentConfig", None)
    delay = getattr(plain, "pthrDelay", None)
    if delay is None:
        return _not_changed("this version has no nixlAgentConfig.pthrDelay")
    if not hasattr(plain, "sleeps_us"):
        setattr(bindings, "nixlAgentConfig", _sleeping(plain, delay, us))  # noqa: B010
    return True


def _sleeping(plain: Any, delay: Any, us: int) -> Any:
    """The class of an agent's settings, whose delay is never less than `us`."""

    class Sleeping(plain):  # type: ignore[misc] # NIXL's class, known at run time only
        sleeps_us = us

        @property
        def pthrDelay(self) -> int:  # noqa: N802 - NIXL's name
            return int(delay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, value: int) -> None:  # noqa: N802
            delay.__set__(self, max(int(value), us))

    return Sleeping


def _not_changed(why: str) -> bool:
    sys.stderr.write(NOT_CHANGED.format(why=why))
    return False
