"""The checkpoint that `make bench-loader` loads: sharded safetensors of random bf16, with a manifest.

Owns the files in `build/bench-loader`: one layer of an 8B model a shard (436 MB), bits from a seed, so
that nothing can be left out or compressed. The node's cache holds the same files by content (hard
links). Made once; a folder that says another size is made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np

from readyplane.core.identity import CHUNK_BYTES_DEFAULT, Manifest, chunk_hash, digest_of_bytes

HIDDEN, KV, MLP = 4096, 1024, 14336
LAYER: dict[str, tuple[int, int]] = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
    "input_layernorm": (HIDDEN, 1),
    "post_attention_layernorm": (HIDDEN, 1),
}


def checkpoint(folder: Path, *, shards: int) -> Manifest:
    """The checkpoint of so many shards in a folder; made where it is not there."""
    mark = folder / "manifest.json"
    if mark.exists():
        found = Manifest.from_document(json.loads(mark.read_text()))
        if len(found.files) == shards:
            return found
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "cache").mkdir(parents=True)
    files: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    for shard in range(shards):
        path = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        data, listed = _shard(path, shard)
        (folder / path).write_bytes(data)
        entry = _entry(path, data)
        os.link(folder / path, folder / "cache" / entry["sha256"].removeprefix("sha256:"))
        files.append(entry)
        tensors += listed
    os.sync()
    document = {
        "schema": "readyplane/manifest/1",
        "kind": "weights",
        "model": "bench-loader",
        "files": files,
        "tensors": tensors,
    }
    mark.write_text(json.dumps(document))
    return Manifest.from_document(document)


def _shard(path: str, number: int) -> tuple[bytearray, list[dict[str, Any]]]:
    header: dict[str, Any] = {}
    end = 0
    for name, (rows, columns) in LAYER.items():
        size = rows * columns * 2
        shape = [rows] if columns == 1 else [rows, columns]
        key = f"model.layers.{number}.{name}.weight"
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    head = json.dumps(header).encode()
    head += b" " * (-(8 + len(head)) % 8)
    data = bytearray(8 + len(head) + end)
    data[: 8 + len(head)] = struct.pack("<Q", len(head)) + head
    bits = np.random.default_rng(number).integers(0, 2**64, size=end // 8, dtype=np.uint64)
    data[8 + len(head) :] = bits.tobytes()
    listed = [
        {
            "name": name,
            "dtype": "BF16",
            "shape": item["shape"],
            "file": path,
            "offset_bytes": 8 + len(head) + item["data_offsets"][0],
            "size_bytes": item["data_offsets"][1] - item["data_offsets"][0],
        }
        for name, item in header.items()
    ]
    return data, listed


def _entry(path: str, data: bytearray) -> dict[str, Any]:
    view = memoryview(data)
    step = CHUNK_BYTES_DEFAULT
    return {
        "path": path,
        "size_bytes": len(data),
        "sha256": digest_of_bytes(view),
        "chunks": [chunk_hash(view[at : at + step]) for at in range(0, len(data), step)],
        "purpose": "weights",
    }


def drop(folder: Path) -> None:
    """Take every file out of the page cache."""
    for path in folder.glob("model-*"):
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def warm(folder: Path, suffix: str) -> None:
    """Bring every file of a kind into the page cache."""
    for path in folder.glob(f"model-*.{suffix}"):
        with path.open("rb", buffering=0) as file:
            while file.read(16 * 2**20):
                pass
