"""Manifests, safetensors files and folders that the registry's tests share."""

import hashlib
import json
from pathlib import Path
from typing import Any

from readyplane.core.identity import chunk_hash

CHUNK_BYTES = 4096
CONFIG = {"max_model_len": 4096, "vocab_size": 512, "eos_token_id": 2}

SCALES = {"granularity": "tensor", "dtype": "F32"}


def safetensors(tensors: dict[str, bytes]) -> bytes:
    """A well-formed safetensors file of U8 tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


def raw_safetensors(header: object, data: bytes = b"") -> bytes:
    """A file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def sha256(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def file_entry(path: str, data: bytes, purpose: str = "weights") -> dict[str, Any]:
    pieces = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
    return {
        "path": path,
        "size_bytes": len(data),
        "sha256": sha256(data),
        "chunks": [chunk_hash(piece) for piece in pieces],
        "purpose": purpose,
    }


def document(
    model: str = "demo", *, salt: str = "", data: bytes = b"\1" * 100, **fields: Any
) -> dict[str, Any]:
    """A publishable weights manifest of one tensor in one plain file; `salt` makes it another one."""
    config = {**CONFIG, "salt": salt} if salt else dict(CONFIG)
    if fields.get("quantisation", "none") != "none":
        fields = {"schema": "readyplane/manifest/2", "scales": SCALES, **fields}
    return {
        "schema": "readyplane/manifest/1",
        "kind": "weights",
        "model": model,
        "files": [file_entry("weights.raw", data)],
        "tensors": [
            {
                "name": "w",
                "dtype": "U8",
                "shape": [len(data)],
                "file": "weights.raw",
                "offset_bytes": 0,
                "size_bytes": len(data),
            }
        ],
        "chunk_bytes": CHUNK_BYTES,
        "config": config,
        **fields,
    }


def model_folder(folder: Path, *, salt: int = 0, shard_bytes: int = 20_000) -> Path:
    """A small model as it comes from a hub: two shards, an index, config and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    for shard in range(2):
        name = f"model-{shard + 1:05d}-of-00002.safetensors"
        tensors = {
            f"layers.{shard}.w": bytes((i * 7 + shard + salt) % 251 for i in range(shard_bytes)),
            f"layers.{shard}.empty": b"",
            f"layers.{shard}.b": bytes([shard + salt]) * 16,
        }
        (folder / name).write_bytes(safetensors(tensors))
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(
        json.dumps({"max_position_embeddings": 4096, "vocab_size": 512, "eos_token_id": [2, 3]})
    )
    (folder / "tokenizer.json").write_text(json.dumps({"type": "bytes", "offset": 3}))
    return folder
