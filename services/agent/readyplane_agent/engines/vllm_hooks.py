"""Marks around the steps of a vLLM's start, inside its processes, and what its log leaves out.

Owns which of vLLM's functions are looked at. They are found by name in what is imported already, so
nothing of vLLM is imported here; one that a version does not have is left out and told by a mark
of its own, and its time then belongs to the step before it.
"""

from __future__ import annotations

import functools
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from readyplane.kit.clock import SystemClock
from readyplane_agent.engines.vllm_compiled import count_plainly
from readyplane_agent.engines.vllm_marks import (
    AS_CONFIGURED,
    FACTS,
    MARKS_ENV,
    SERVER_PID_ENV,
    write_mark,
)
from readyplane_agent.trace import process_start_s

_CLOCK = SystemClock()
# Of a worker's class, known once it is made: name -> mark before, mark after.
WORKER_STEPS = {
    "load_model": ("model", "model_loaded"),
    "determine_available_memory": ("kv_profile", ""),
    "initialize_from_config": ("kv_pool", ""),
    "compile_or_warm_up_model": ("warmup", ""),
}
RUNNER_STEPS = {
    "warming_up_model": ("compile", "compiled"),
    "capture_model": ("graphs", "graphs_captured"),
}
ACCESS_LOG = "uvicorn.access"
POLLED = ("/metrics", "/health")
_DONE: set[object] = set()


def mark(name: str, detail: str = "", *, at_s: float | None = None) -> None:
    """A mark of this process, now unless said otherwise."""
    write_mark(name, at_s=_CLOCK.monotonic_s() if at_s is None else at_s, detail=detail)


def hook() -> None:
    """Look at the steps of this process, once, where the environment asks for it."""
    if not os.environ.get(MARKS_ENV) or "hooked" in _DONE:
        return
    _DONE.add("hooked")
    process = process_kind()
    if not process:
        return
    if process in {"engine", "worker"}:
        mark(f"{process}_begun", at_s=process_start_s(now_s=_CLOCK.monotonic_s()))
    if process == "server":
        logging.getLogger(ACCESS_LOG).addFilter(worth_telling)
    mark("registered" if process == "server" else process)
    core = sys.modules.get("vllm.v1.engine.core")
    if core is not None and process == "engine":
        _around(core.EngineCore, "_initialize_kv_caches", "", "scheduler", then=_tell_facts)
        _around(core.EngineCoreProc, "run_busy_loop", "engine_up", "")
    wrapper = sys.modules.get("vllm.v1.worker.worker_base")
    if wrapper is not None:
        _around(wrapper.WorkerWrapperBase, "init_device", "device", "", then=_look_at_worker)


def worth_telling(record: logging.LogRecord) -> bool:
    """Whether a line of the server's access log says anything: not that its agent reads its load.

    That is a line a second: the end of the log, by which an engine's end is told, held nothing else.
    """
    said = record.args
    polled = isinstance(said, tuple) and len(said) == 5 and said[2] in POLLED and said[4] == 200
    return not polled


def process_kind() -> str:
    """Which of vLLM's processes this is, by the name that it gave it; empty for a helper's."""
    name = multiprocessing.current_process().name
    if name.startswith("EngineCore"):
        return "engine"
    if name.startswith("VllmWorker"):
        return "worker"
    return "server" if os.environ.get(SERVER_PID_ENV) == str(os.getpid()) else ""


def _look_at_worker(wrapper: Any) -> None:
    count_plainly()
    worker = wrapper.worker
    for name, (before, after) in WORKER_STEPS.items():
        _around(type(worker), name, before, after)
    runner = getattr(worker, "model_runner", None)
    for name, (before, after) in RUNNER_STEPS.items():
        if hasattr(type(runner), name):  # only some kinds of worker have them
            _around(
                type(runner), name, before, after, told=_compiled if after == "compiled" else None
            )
    _around_first_run()


def _around(
    owner: Any,
    name: str,
    before: str,
    after: str,
    *,
    then: Callable[[Any], None] | None = None,
    told: Callable[[], str] | None = None,
) -> None:
    """Put marks before and after a method; `then` gets its object, `told` adds what came of it."""
    plain = getattr(owner, name, None)
    if plain is None or (owner, name) in _DONE:
        return
    _DONE.add((owner, name))

    @functools.wraps(plain)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before:
            mark(before)
        given = plain(self, *args, **kwargs)
        if after:
            mark(after, told() if told is not None else "")
        if then is not None:
            then(self)
        return given

    setattr(owner, name, timed)


def _tell_facts(core: Any) -> None:
    """What a worker must know of its engine before its KV may pass to another (R20.2)."""
    try:
        told = facts_of(core.vllm_config)
    except AttributeError as error:  # another version: what is unknown stays unknown
        told = {"problem": str(error)}
    mark(FACTS, json.dumps(told))


def facts_of(config: Any) -> dict[str, Any]:
    """Format and size of the KV pool and what else vLLM has settled by its start.

    Raises:
        AttributeError: this version calls something otherwise.
    """
    cache, model = config.cache_config, config.model_config
    dtype = str(cache.cache_dtype)
    rope = getattr(model.hf_text_config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(model.hf_text_config, "rope_theta", None))
    return {
        "block_size": cache.block_size,
        "kv_blocks": cache.num_gpu_blocks,
        "kv_dtype": str(model.dtype).rpartition(".")[2] if dtype == "auto" else dtype,
        "kv_layout": str(getattr(cache, "kv_cache_layout", None) or "unknown"),
        "kv_memory_bytes": getattr(cache, "kv_cache_memory_bytes", None),
        "positions": "unknown" if theta is None else f"rope/{float(theta):g}",
        "quantisation": _quantisation(model),
        "tp": config.parallel_config.tensor_parallel_size,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
    }


def _quantisation(model: Any) -> str:
    """`as configured` where it follows the checkpoint's own word; kernels have other names for it."""
    if not model.quantization:
        return "none"
    if getattr(model.hf_config, "quantization_config", None):
        return AS_CONFIGURED
    return str(model.quantization)


def _compiled() -> str:
    """What vLLM counts of its compiling: whether it found compiled code or made it.

    In the words by which hits and misses are counted (`readyplane_compile_cache_hit_total`).
    """
    counter = sys.modules.get("vllm.compilation.counter")
    counts = getattr(counter, "compilation_counter", None)
    found = getattr(counts, "num_aot_artifacts_loaded", 0)
    made = getattr(counts, "num_aot_compiles", 0)
    found += getattr(counts, "num_compiled_artifacts_loaded", 0)
    made += getattr(counts, "num_inductor_compiles", 0)
    if made:
        return f"cache=miss:engine ({made} compiled, {found} found)"
    return f"cache=hit ({found} found)" if found else "nothing compiled"


def _around_first_run() -> None:
    """The first run of the compiled model follows its compilation inside one function."""
    found = sys.modules.get("vllm.compilation.decorators")
    plain = getattr(found, "monitor_profiling_run", None)
    if found is None or plain is None or "first_run" in _DONE:
        return
    _DONE.add("first_run")

    @contextmanager
    def timed(*args: Any, **kwargs: Any) -> Iterator[None]:
        mark("first_run")
        with plain(*args, **kwargs):
            yield

    found.monitor_profiling_run = timed  # type: ignore[attr-defined]
