"""An engine's side of the arena: its tensors by name, without a copy and read-only.

Needs numpy only; with PyTorch there, tensors of its own types share the
same memory. An arena stays what it is for as long as it is adopted (B126): a sealed one is guarded
by the kernel, a pooled one by the shared lock that its map takes, without which its pool lends it to
nobody, and files of the node's cache by the same lock, without which they would be evicted.

    arena = adopt(Path(spec.arena_path), spec.tensor_table_path.read_bytes())
    weight = arena["model.layers.0.mlp.up_proj.weight"]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from readyplane.core.errors import InvalidField
from readyplane_agent.engines.layout import TensorSlot, read_tensor_table
from readyplane_agent.engines.mapping import ArenaMap, read_file_parts

# Types that numpy has not come as the bits they are; `torch` gives them their meaning.
NUMPY: Mapping[str, str] = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
TORCH: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


class AdoptedArena(Mapping[str, "np.ndarray[Any, Any]"]):
    """Tensors by name, as read-only numpy views of shared memory."""

    def __init__(self, slots: tuple[TensorSlot, ...], mapped: ArenaMap) -> None:
        self.slots = {slot.name: slot for slot in slots}
        self._mapped = mapped

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """One tensor; BF16 and F8 as their bits. Raises KeyError."""
        slot = self.slots[name]
        kind = np.dtype(NUMPY[slot.dtype])
        if slot.size_bytes == 0:
            nothing = np.empty(slot.shape, kind)
            nothing.flags.writeable = False
            return nothing
        count = slot.size_bytes // kind.itemsize
        flat = np.frombuffer(self._mapped.view, kind, count=count, offset=slot.offset_bytes)
        return flat.reshape(slot.shape)

    def __iter__(self) -> Iterator[str]:
        """Names, in the table's order."""
        return iter(self.slots)

    def __len__(self) -> int:
        """How many tensors."""
        return len(self.slots)

    def torch(self, name: str) -> Any:
        """One tensor as PyTorch's, on the same memory: nobody may write to it.

        Raises:
            KeyError: no such tensor. ImportError: PyTorch is not installed.
            InvalidField: its place is not aligned to its type.
        """
        import warnings

        import torch  # type: ignore[import-not-found, unused-ignore]

        slot = self.slots[name]
        kind = getattr(torch, TORCH[slot.dtype])
        if slot.size_bytes == 0:
            return torch.empty(slot.shape, dtype=kind)
        if slot.offset_bytes % kind.itemsize:
            raise InvalidField(name, slot.offset_bytes, f"align it to {kind.itemsize} B")
        data = self._mapped.view[slot.offset_bytes : slot.offset_bytes + slot.size_bytes]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the memory is read-only is what is wanted
            return torch.frombuffer(data, dtype=kind).reshape(slot.shape)

    def state_dict(self) -> dict[str, Any]:
        """All of them as PyTorch tensors, as `safetensors.torch.load_file` would give them."""
        return {name: self.torch(name) for name in self}

    def close(self) -> None:
        """Let go of it; while a view is still held it stays adopted. Idempotent."""
        self._mapped.close()


def adopt(path: Path, tensor_table: bytes | str) -> AdoptedArena:
    """Open the arena that a tensor table describes.

    Raises:
        InvalidField: the table is none, points outside the arena, or the arena is too short.
        OSError: it cannot be opened.
    """
    slots, size_bytes = read_tensor_table(tensor_table)
    return AdoptedArena(slots, ArenaMap(path, size_bytes, read_file_parts(tensor_table)))
