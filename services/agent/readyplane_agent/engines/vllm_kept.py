"""Processes of a vLLM that are forked from one that has imported everything.

Owns the process context that takes the place of vLLM's `spawn`: the standard library's fork server,
which has no threads and has computed nothing, with vLLM's modules imported in it. A process that is
forked from it is there in milliseconds, where a spawned one imports for seconds. Each gets the
environment of who asked for it, and ends with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import context, forkserver
from typing import Any

KEEP_ENV = "READYPLANE_VLLM_KEEP_IMPORTS"
BIND_ENV = "VLLM_CPU_OMP_THREADS_BIND"
# What vLLM's engine and worker processes have imported by the time that they serve.
PRELOAD = (
    "torch._inductor.config",
    "torch._dynamo.aot_compile",
    "torch._inductor.compile_fx",
    "torch._inductor.standalone_compile",
    "transformers",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.structured_output",
    "vllm.compilation.decorators",
    "vllm.compilation.backends",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.registry",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_events",
    "readyplane_agent.engines.vllm_plugin",
)
PRELOAD_CPU = ("vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn")
PRELOAD_GPU = ("vllm.v1.worker.gpu_worker",)


class KeptProcess(context.ForkServerProcess):
    """A process forked from the fork server, in the environment of who asked for it."""

    environ: Mapping[str, str] = {}

    def start(self) -> None:
        """Start it with the environment of this moment, as a spawned one would have it."""
        self.environ = dict(os.environ)
        super().start()

    def run(self) -> None:
        """In the new process: its environment, its end, its work."""
        os.environ.clear()
        os.environ.update(self.environ)
        # Python 3.11 would start a fork server for each process that asks for another; the one
        # that this process came from serves it as well.
        forkserver._forkserver.ensure_running = _running  # type: ignore[method-assign]  # noqa: SLF001
        threading.Thread(target=_end_with_parent, name="EndsWithParent", daemon=True).start()
        super().run()


class KeptContext(context.ForkServerContext):
    """`spawn` by its meaning (nothing is inherited), `forkserver` by its speed."""

    Process = KeptProcess


CONTEXT = KeptContext()


def _end_with_parent() -> None:
    """A forked process is a child of the fork server: whoever asked for it is watched by its pipe."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def may_keep(environ: Mapping[str, str], *, on_cpu: bool) -> bool:
    """Whether processes may be forked: not where each is to be bound to cores as it is loaded.

    On a CPU vLLM binds OpenMP's threads by variables that are read once, when a process imports
    PyTorch: a forked one would keep those of the fork server.
    """
    if environ.get(KEEP_ENV, "1") == "0":
        return False
    return not on_cpu or environ.get(BIND_ENV) == "nobind"


def begin_importing(modules: Sequence[str]) -> None:
    """Start the fork server, which imports `modules` beside whatever this process does next."""
    forkserver.set_forkserver_preload(list(modules))
    forkserver.ensure_running()
    os.environ[KEEP_ENV] = "ready"


def _running() -> None:
    """In place of starting a fork server where there is one."""


def wait_imported(modules: Sequence[str]) -> list[str]:
    """Wait until the fork server has imported; returns those of `modules` that it could not.

    Raises:
        RuntimeError: it is gone, or cannot fork.
    """
    reader, writer = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_tell_imported, args=(writer, list(modules)), name="Imported")
    process.start()
    writer.close()
    try:
        missing = reader.recv()
    except EOFError:
        raise RuntimeError("the fork server cannot fork; see the log above") from None
    finally:
        reader.close()
        process.join()
    return list(missing)


def _tell_imported(writer: Any, wanted: list[str]) -> None:
    writer.send([name for name in wanted if name not in sys.modules])
    writer.close()


def fork_kept_processes() -> None:
    """Let vLLM's processes be forked, if this one was started so (`begin_importing`).

    Wherever vLLM's choice of a context has been imported to, ours takes its place.
    """
    if os.environ.get(KEEP_ENV) != "ready":
        return
    origin = sys.modules.get("vllm.utils.system_utils")
    plain: Callable[[], Any] | None = getattr(origin, "get_mp_context", None)
    if plain is None or plain is kept_context:
        return
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm"):
            with contextlib.suppress(AttributeError, TypeError):
                if vars(module).get("get_mp_context") is plain:
                    setattr(module, "get_mp_context", kept_context)  # noqa: B010


def kept_context() -> context.BaseContext:
    """In place of vLLM's `get_mp_context`."""
    return CONTEXT
