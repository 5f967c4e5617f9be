"""Compiled code that vLLM would not take again although it is the same: two repairs, by name.

Owns them, each with its reason. Both touch the key or the loading of vLLM's own cache, never what is
computed; the canary of a start is asked all the same.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

# In vLLM's key for compiled code, although code does not depend on it: every worker has another.
NOT_FACTORS = ("VLLM_NIXL_SIDE_CHANNEL_PORT",)


def repair() -> None:
    """Both repairs in this process; one whose place is not there is left out. Idempotent."""
    _leave_out_ports()
    _take_plain_functions()


def _leave_out_ports() -> None:
    """Without this each start compiles anew, since it has a port of its own."""
    envs = sys.modules.get("vllm.envs")
    plain = vars(envs).get("compile_factors") if envs is not None else None
    if plain is None or hasattr(plain, "left_out"):
        return

    @functools.wraps(plain)
    def factors() -> dict[str, object]:
        found: dict[str, object] = plain()
        return {name: value for name, value in found.items() if name not in NOT_FACTORS}

    factors.left_out = NOT_FACTORS  # type: ignore[attr-defined]
    setattr(envs, "compile_factors", factors)  # noqa: B010


def _take_plain_functions() -> None:
    """On a CPU what is loaded is a plain function, and vLLM asks it to finish its loading.

    It has nothing to finish; vLLM takes the missing method for a broken file and compiles again.
    """
    compiler = sys.modules.get("torch.compiler")
    plain = getattr(compiler, "load_compiled_function", None)
    if compiler is None or plain is None or hasattr(plain, "finishes"):
        return

    @functools.wraps(plain)
    def load(*args: Any, **kwargs: Any) -> Any:
        loaded = plain(*args, **kwargs)
        inner = getattr(getattr(loaded, "_artifacts", None), "compiled_fn", None)
        if inner is not None and not hasattr(inner, "finalize_loading"):
            inner.finalize_loading = _nothing
        return loaded

    load.finishes = True  # type: ignore[attr-defined]
    setattr(compiler, "load_compiled_function", load)  # noqa: B010


def _nothing(_config: object) -> None:
    """Nothing is left to load."""
