"""The peers' side of `make bench-loader`: `python loader_peers.py FOLDER`, in an environment of their own.

Owns one set of tensors that are touched before anything is timed: the arena of those that can be
given one. Each peer also runs the way it is meant to, into memory of its own. None of them verifies
a byte. This file imports nothing of ours but its neighbour `loader_memory`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found, unused-ignore]
from fastsafetensors import SafeTensorsFileLoader, SingleGroup  # type: ignore[import-not-found]
from loader_memory import Growth  # type: ignore[import-not-found]
from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found]
from safetensors import safe_open  # type: ignore[import-not-found]
from safetensors.torch import load_file  # type: ignore[import-not-found]
from tensorizer import TensorDeserializer, TensorSerializer  # type: ignore[import-not-found]

PAGE = 4096
FOLDER = Path(sys.argv[1])
SHARDS = sorted(FOLDER.glob("model-*.safetensors"))
Pairs = Iterator[tuple[str, torch.Tensor]]


def safetensors() -> Pairs:
    """Views of the mapped file."""
    for path in SHARDS:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


def safetensors_touch() -> Pairs:
    """`load_file` has read nothing yet: one byte of each page is."""
    for path in SHARDS:
        for name, tensor in load_file(path).items():
            tensor.view(torch.uint8).flatten()[::PAGE].sum()
            yield name, tensor


def runai(limit: str) -> Pairs:
    """The streamer, with its memory limit (-1: one buffer for all; 0: that of the largest tensor)."""
    os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = limit
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in SHARDS])
        yield from streamer.get_tensors()


def fastsafetensors() -> Pairs:
    """Aggregated reads into memory of its own."""
    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: [str(path) for path in SHARDS]})
    try:
        buffers = loader.copy_files_to_device()
        try:
            for name in loader.get_keys():
                yield name, buffers.get_tensor(name)
        finally:
            buffers.close()
    finally:
        loader.close()


def tensorizer() -> Pairs:
    """Its own format, unverified as it comes."""
    for path in SHARDS:
        with TensorDeserializer(str(path.with_suffix(".tensors")), device="cpu") as found:
            yield from found.items()


class Side:
    """What can be asked for."""

    def __init__(self) -> None:
        for path in SHARDS:
            own = path.with_suffix(".tensors")
            if not own.exists():
                serializer = TensorSerializer(str(own))
                serializer.write_state_dict(load_file(path))
                serializer.close()
        os.sync()
        self.arena = {name: torch.empty_like(t).zero_() for name, t in safetensors()}
        self.bytes = sum(t.numel() * t.element_size() for t in self.arena.values())
        gc.collect()

    def run(self, name: str) -> dict[str, Any]:
        """One load."""
        way, _, kind = name.partition("+")
        pairs: Callable[[], Pairs] = {
            "safetensors": safetensors,
            "safetensors-touch": safetensors_touch,
            "runai": lambda: runai("0" if kind else "-1"),
            "fastsafetensors": fastsafetensors,
            "tensorizer": tensorizer,
        }[way]
        gc.collect()
        growth = Growth()
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        kept = []
        for key, tensor in pairs():
            if kind == "arena":
                self.arena[key].copy_(tensor)
            else:
                kept.append(tensor)
        wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
        answer = {"wall_s": wall_s, "cpu_s": cpu_s, "extra_bytes": growth.peak_bytes()}
        tensors = self.arena.values() if kind == "arena" else kept
        got = sum(t.numel() * t.element_size() for t in tensors)
        assert got == self.bytes, f"{name} gave {got} of {self.bytes} bytes"
        del kept, tensors, tensor
        gc.collect()
        # What a library has freed goes back to the kernel, or the next one is measured with it.
        ctypes.CDLL(None).malloc_trim(0)
        return answer

    def right(self) -> dict[str, Any]:
        """Whether the arena holds what the files do, bit for bit."""
        pairs = safetensors()
        same = all(
            torch.equal(self.arena[n].view(torch.int16), t.view(torch.int16)) for n, t in pairs
        )
        for tensor in self.arena.values():
            tensor.zero_()
        return {"right": same}


def main() -> None:
    """Answer line by line; what the libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_grad_enabled(False)
    side = Side()
    print(json.dumps({"torch": torch.__version__}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(side, asked.pop("do"))(**asked)
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
