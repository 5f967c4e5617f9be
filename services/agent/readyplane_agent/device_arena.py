"""The arena of one rank on a device: verified chunks go from their buffer to device memory.

Owns the host-to-device stage of the pipeline. Needs PyTorch, which is imported here only; `device`
may be any of its devices, `cpu` included, which is how the stage is tried without a GPU. What a
device's memory goes through before another owner has it is specified in docs/loader.md.
"""

from __future__ import annotations

import warnings
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.identity import Manifest
from readyplane_agent.adopt import TORCH
from readyplane_agent.rank_arena import RankArena
from readyplane_agent.rank_plan import Placement, RankPlan


class DeviceArena(RankArena):
    """As `RankArena`, with the tensors on a device.

    Args:
        device: PyTorch's name of it.

    Attributes:
        device_bytes: how many bytes were copied to it.

    Raises:
        ImportError: PyTorch is not installed.
        InvalidField: a part has to be cast or is not one run of bytes, which only the host does.
    """

    def __init__(self, manifest: Manifest, plan: RankPlan, *, device: str) -> None:
        import torch  # type: ignore[import-not-found, unused-ignore]

        for placed in plan.placements:
            if placed.axis or placed.dtype != placed.tensor.dtype:
                raise InvalidField(
                    placed.tensor.name, f"axis {placed.axis}", "cut or cast it on the host"
                )
        # The host's memory stays untouched but for the files that are no weights.
        super().__init__(manifest, plan)
        self._torch = torch
        self._memory = torch.zeros(plan.size_bytes, dtype=torch.uint8, device=device)
        self.device_bytes = 0

    def _place(self, placed: Placement, start: int, data: memoryview) -> None:
        tensor = placed.tensor
        rows = max(1, tensor.shape[0]) if tensor.shape else 1
        row = tensor.size_bytes // rows
        begin = tensor.offset_bytes + placed.start * row
        low, high = max(start, begin), min(start + len(data), begin + placed.size_bytes)
        if low >= high:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            piece = self._torch.frombuffer(
                data[low - start : high - start], dtype=self._torch.uint8
            )
        at = placed.offset_bytes + low - begin
        # Waits for the copy: the buffer is lent to the next chunk when this returns.
        self._memory[at : at + high - low].copy_(piece)
        self.device_bytes += high - low

    def tensors(self) -> dict[str, Any]:
        """By name: views of the device's memory."""
        found = {}
        for placed in self.plan.placements:
            kind = getattr(self._torch, TORCH[placed.dtype])
            part = self._memory[placed.offset_bytes :][: placed.size_bytes]
            found[placed.tensor.name] = part.view(kind).reshape(placed.shape)
        return found
