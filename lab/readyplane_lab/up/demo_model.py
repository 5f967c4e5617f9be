"""The demo model: a few hundred megabytes of deterministic weights, made on this machine.

Owns the files (sharded safetensors with their index, config, tokenizer) and the known answer that
is recorded when they are published. `readyplane_registry` publishes the folder; nothing is
downloaded. Equal arguments give equal bytes, so a second `up` publishes the same digest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from readyplane.core.errors import InvalidField
from readyplane.core.identity import Canary
from readyplane.core.work import pack_tokens
from readyplane_agent.engines.modelled import answer

SIZE_BYTES_DEFAULT = 300 * 10**6
SHARDS_DEFAULT = 4
HIDDEN = 1024
ROWS_STEP = 64
"""Rows of the last layer are a multiple: a worker of any number of ranks can divide them."""
MAX_MODEL_LEN = 131_072
# The answer to this ends by itself after few tokens, so that the canary is quick and the EOS check
# of the gate has an end to look at.
CANARY_TEXT = "What makes worker 3625 ready?"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class DemoModel:
    """What was made.

    Attributes:
        folder: holds every file. config: for `manifest.config`. canary: for `manifest.canary`.
        purposes: file name -> purpose in the manifest. size_bytes: of all files.
        fingerprint: of the weights, as the modelled engine computes it.
    """

    folder: Path
    config: dict[str, Any]
    canary: Canary
    purposes: dict[str, str]
    size_bytes: int
    fingerprint: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, int]
    shard: int

    @property
    def size_bytes(self) -> int:
        return 2 * self.shape[0] * self.shape[1]


def make_demo_model(
    folder: Path,
    *,
    size_bytes: int = SIZE_BYTES_DEFAULT,
    shards: int = SHARDS_DEFAULT,
    seed: int = 1,
    max_model_len: int = MAX_MODEL_LEN,
) -> DemoModel:
    """Write the model into `folder` (made if absent); existing files of these names are replaced.

    Args:
        size_bytes: of the weights, which come within half of ROWS_STEP rows of it (0.07 MB).

    Raises:
        InvalidField: fewer than 1 shard, or a size that leaves a shard without a layer.
    """
    tensors = _tensors(size_bytes, shards)
    folder.mkdir(parents=True, exist_ok=True)
    digests: list[bytes] = []
    for shard in range(shards):
        own = [t for t in tensors if t.shard == shard]
        digests += _write_shard(folder / _shard_name(shard, shards), own, seed=(seed, shard))
    config = demo_config(max_model_len=max_model_len)
    _write_json(folder / "config.json", {**config, "hidden_size": HIDDEN, "torch_dtype": "bf16"})
    _write_json(folder / "tokenizer.json", {"type": "bytes", "offset": answer.TOKEN_OFFSET})
    weight_map = {t.name: _shard_name(t.shard, shards) for t in tensors}
    total = sum(t.size_bytes for t in tensors)
    _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    fingerprint = answer.fingerprint(digests)
    prompt = tuple(answer.encode(CANARY_TEXT))
    length = answer.answer_length(pack_tokens(prompt))
    purposes = {_shard_name(i, shards): "weights" for i in range(shards)}
    purposes |= {"config.json": "config", "tokenizer.json": "tokenizer", _INDEX: "config"}
    return DemoModel(
        folder=folder,
        config=config,
        canary=Canary(prompt, answer.golden_answer(fingerprint, prompt, length)),
        purposes=purposes,
        size_bytes=sum((folder / name).stat().st_size for name in purposes),
        fingerprint=fingerprint,
    )


def demo_config(*, max_model_len: int = MAX_MODEL_LEN) -> dict[str, Any]:
    """Facts for `manifest.config` that router, gateway and engine need."""
    return {
        "max_model_len": max_model_len,
        "vocab_size": answer.VOCAB_SIZE,
        "canary_ends": True,
        "bos_token_id": answer.BOS_TOKEN,
        "eos_token_id": answer.EOS_TOKEN,
        "pad_token_id": answer.PAD_TOKEN,
        "block_size": 16,
        "kv_dtype": "fp8_e4m3",
        "positions": "rope",
    }


def _tensors(size_bytes: int, shards: int) -> list[_Tensor]:
    """Square layers, an embedding and a head, spread over the shards; the last layer fills up."""
    per_tensor, per_step = 2 * HIDDEN * HIDDEN, 2 * HIDDEN * ROWS_STEP
    steps = round(size_bytes / per_step)
    most, rest = divmod(steps * per_step, per_tensor)
    rows = rest // (2 * HIDDEN)
    if shards < 1:
        raise InvalidField("shards", shards, "use at least 1")
    if most < shards + 2:
        raise InvalidField(
            "size_bytes",
            size_bytes,
            f"use at least {(shards + 2) * per_tensor} for {shards} shards",
        )
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
    count = most - 2 + (rows > 0)
    names += [
        f"model.layers.{i // len(parts)}.{parts[i % len(parts)]}.weight" for i in range(count)
    ]
    made = [
        _Tensor(name, (HIDDEN, HIDDEN), i * shards // len(names)) for i, name in enumerate(names)
    ]
    return [*made[:-1], replace(made[-1], shape=(rows, HIDDEN))] if rows else made


def _write_shard(path: Path, tensors: list[_Tensor], *, seed: tuple[int, int]) -> list[bytes]:
    """One safetensors file; returns the digests of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.size_bytes],
        }
        end += tensor.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.PCG64(np.random.SeedSequence(seed))
    digests: list[bytes] = []
    part = path.with_name(f".{path.name}.part")
    with part.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            data = _noise(random, tensor.size_bytes)
            file.write(data)
            digests.append(answer.tensor_digest(tensor.name, "BF16", tensor.shape, data))
    part.replace(path)
    return digests


def _noise(random: np.random.PCG64, size_bytes: int) -> memoryview:
    """bf16 numbers of 0.125 to 2, of either sign: random mantissa, exponents as real weights."""
    words = random.random_raw(size_bytes // 8)
    words &= np.uint64(0x81FF_81FF_81FF_81FF)  # sign, lowest exponent bits, mantissa
    words |= np.uint64(0x3E00_3E00_3E00_3E00)
    return words.view(np.uint8).data


def _shard_name(shard: int, shards: int) -> str:
    return f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"


def _write_json(path: Path, document: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    part.replace(path)
