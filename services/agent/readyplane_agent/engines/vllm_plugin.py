"""Inside vLLM's own processes: weights out of the verified arena.

The only module that imports vLLM (`vllm_launch` runs it). `register` is found through the entry point group
`vllm.general_plugins` and is called in each of vLLM's processes; it adds the load format
`readyplane`.
With that load format no checkpoint file is read: the tensors are those of the arena, whose table
must belong to the manifest that was ordered. Whatever is not as ordered ends the start.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from readyplane.core.errors import IdentityMismatch, InvalidField, Unavailable, Unsupported
from readyplane.kit.clock import SystemClock
from readyplane_agent.adopt import AdoptedArena, adopt
from readyplane_agent.engines.vllm_compiled import repair
from readyplane_agent.engines.vllm_hooks import hook, mark, process_kind
from readyplane_agent.engines.vllm_kept import fork_kept_processes
from readyplane_agent.engines.vllm_nixl import let_sleep, wake_us

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig
    from vllm.config.load import LoadConfig

LOAD_FORMAT = "readyplane"
POLL_S = 0.02
WAIT_LIMIT_S = 1800.0
DEFAULT_LOADER = "vllm.model_executor.model_loader.default_loader.DefaultModelLoader"
# What is used of vLLM's own loader; a version without one of them is refused, not worked around.
NEEDED = ("get_all_weights", "load_weights", "track_weights_loading", "download_model")


@dataclass(frozen=True, slots=True)
class Ordered:
    """What `--model-loader-extra-config` says.

    Attributes:
        arena, tensor_table: paths. manifest_digest: what the table must belong to.
        wait_s: how long the table may take to appear; it is written when all is verified.
    """

    arena: Path
    tensor_table: Path
    manifest_digest: str
    wait_s: float

    @classmethod
    def read(cls, extra: object) -> Ordered:
        """Raises InvalidField naming what is missing or odd."""
        where = "--model-loader-extra-config"
        if not isinstance(extra, dict):
            raise InvalidField(where, repr(extra), "give a JSON object")
        known = {"arena", "tensor_table", "manifest_digest", "wait_s"}
        odd = sorted(set(extra) - known)
        if odd:
            raise InvalidField(f"{where}.{odd[0]}", extra[odd[0]], f"use {sorted(known)}")
        for name in ("arena", "tensor_table", "manifest_digest"):
            if not isinstance(extra.get(name), str) or not extra[name]:
                raise InvalidField(f"{where}.{name}", extra.get(name), "give a text")
        wait_s = extra.get("wait_s", WAIT_LIMIT_S)
        if isinstance(wait_s, bool) or not isinstance(wait_s, (int, float)) or wait_s < 0:
            raise InvalidField(f"{where}.wait_s", wait_s, "give seconds, 0 or more")
        return cls(
            Path(extra["arena"]),
            Path(extra["tensor_table"]),
            extra["manifest_digest"],
            float(wait_s),
        )


def wait_for_table(order: Ordered) -> bytes:
    """The tensor table as soon as it is there; it is written last, when all is verified.

    Raises:
        Unavailable: it has not come within `wait_s`.
    """
    clock = SystemClock()
    until_s = clock.monotonic_s() + order.wait_s
    while True:
        try:
            return order.tensor_table.read_bytes()
        except FileNotFoundError:
            if clock.monotonic_s() > until_s:
                raise Unavailable(
                    f"no tensor table at {order.tensor_table} within {order.wait_s:g} s",
                    "see why the weights were not verified",
                ) from None
        time.sleep(POLL_S)


def adopted(order: Ordered, table: bytes) -> AdoptedArena:
    """The arena, if its table is that of the manifest ordered.

    Raises:
        IdentityMismatch: it belongs to another manifest. InvalidField: it is no table of the arena.
    """
    try:
        told = str(json.loads(table)["manifest_digest"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidField(
            "tensor_table.manifest_digest", repr(error), "name the manifest in the table"
        ) from error
    if told != order.manifest_digest:
        raise IdentityMismatch(
            "tensor table",
            [f"manifest_digest: {told} != {order.manifest_digest}"],
            "give the engine the table of the manifest that was ordered",
        )
    return adopt(order.arena, table)


def named_tensors(arena: AdoptedArena) -> Iterator[tuple[str, Any]]:
    """Names and PyTorch tensors in the table's order, views of the arena that nobody may write."""
    for name in arena:
        yield name, arena.torch(name)


def register() -> None:
    """Entry point: add the load format in this process.

    Raises:
        Unsupported: this version of vLLM has no loader that can be built upon.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    missing = [name for name in NEEDED if not callable(getattr(DefaultModelLoader, name, None))]
    if missing:
        raise Unsupported(
            f"load format {LOAD_FORMAT}: {DEFAULT_LOADER} has no {', '.join(missing)}",
            "use the vLLM version that docs/vllm.md names",
        )
    register_model_loader(LOAD_FORMAT)(loader_class(DefaultModelLoader))
    repair()
    hook()
    if process_kind() in {"engine", "worker"}:
        let_sleep(wake_us(os.environ))
    fork_kept_processes()


def loader_class(parent: Any) -> Any:
    """The loader as a subclass of vLLM's own one, which knows how a model takes its tensors."""

    class ArenaModelLoader(parent):  # type: ignore[misc] # vLLM's class, known at run time only
        """Loads a model from the arena of the agent that started this engine."""

        def __init__(self, load_config: LoadConfig) -> None:
            self._order = Ordered.read(load_config.model_loader_extra_config)
            from copy import copy

            plain = copy(load_config)
            # vLLM's own loader refuses keys that it does not know; weights are always tracked.
            plain.model_loader_extra_config = {"enable_weights_track": True}
            super().__init__(plain)

        def download_model(self, model_config: ModelConfig) -> None:
            """Nothing: the weights are here before the engine is."""

        def get_all_weights(
            self,
            model_config: ModelConfig,  # noqa: ARG002 - vLLM's signature
            model: nn.Module,
        ) -> Iterator[tuple[str, Any]]:
            """Every tensor of the table, once."""
            if tuple(getattr(model, "secondary_weights", ())):
                raise Unsupported(
                    f"{type(model).__name__} loads weights from a second place",
                    "use --load-format auto for this model",
                )
            mark("weights_awaited")
            table = wait_for_table(self._order)
            arena = adopted(self._order, table)
            mark("weights", f"{len(arena)} tensors")
            # Its log line counts from here: waiting for the agent is not loading.
            self.counter_before_loading_weights = SystemClock().monotonic_s()
            try:
                yield from named_tensors(arena)
            finally:
                mark("weights_loaded")
                arena.close()

        def track_weights_loading(
            self, model: nn.Module, loaded_weights: set[str] | None, quantized: bool = False
        ) -> None:
            """Every parameter must have come from the arena.

            Raises:
                Unsupported: the model does not tell what it has loaded.
                IdentityMismatch: parameters were left as they were made.
            """
            if loaded_weights is None:
                raise Unsupported(
                    f"{type(model).__name__} does not tell which weights it has loaded",
                    "use --load-format auto for this model",
                )
            try:
                super().track_weights_loading(model, loaded_weights, quantized=quantized)
            except ValueError as error:
                raise IdentityMismatch(
                    "weights", [str(error)], "publish the whole checkpoint"
                ) from error

    return ArenaModelLoader
