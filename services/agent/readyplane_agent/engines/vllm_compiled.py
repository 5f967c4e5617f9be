"""Where vLLM compiles what it need not: repairs, each by name and with its reason.

Owns two for code that it would not take again although it is the same, which touch the key and the
loading of its own cache, and one for code that a CPU does as well without. None changes what is
computed; the canary of a start is asked all the same.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

# In vLLM's key for compiled code, although code does not depend on it: every worker has another.
NOT_FACTORS = ("VLLM_NIXL_SIDE_CHANNEL_PORT",)
COUNTS = "batched_count_greater_than"


def repair() -> None:
    """What is taken again, in this process; a repair whose place is not there is left out. Idempotent."""
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


def count_plainly() -> None:
    """On a CPU the rank of a token among its log-probabilities is counted as it is written down.

    vLLM compiles that one comparison when the first request wants log-probabilities, eager or not,
    and computes nothing else for those many seconds. What it saves is a copy as large as a quarter
    of the log-probabilities themselves: no matter here, and left alone on a GPU, where that memory
    is counted. A version that does it otherwise is left as it is: the start asks for it first
    (`vllm_first`). To be called when vLLM's worker has been made. Idempotent.
    """
    sampler = sys.modules.get("vllm.v1.sample.sampler")
    platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    if sampler is None or platform is None or not platform.is_cpu():
        return
    plain = getattr(vars(sampler).get(COUNTS), "_torchdynamo_orig_callable", None)
    if plain is not None:
        setattr(sampler, COUNTS, plain)
