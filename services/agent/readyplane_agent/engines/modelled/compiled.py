"""What a modelled engine compiles: real files, one for each captured shape, and their index.

Owns the files of a compile cache. The time of a compilation is slept elsewhere; what it leaves
behind is real, so that a later start is warm only where every file is there and right. A file's
bytes follow from key and shape and begin with both, as a kernel's cache file names its source.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from readyplane.core.identity import digest_of
from readyplane.core.startup import StartMode
from readyplane_agent.engines.modelled.settings import ModelledSettings

LOG = logging.getLogger("engine")
KERNEL_BYTES = 16 * 1024
SHAPES_MAX = 256
INDEX = "index.json"


def compile_key(s: ModelledSettings, config: Mapping[str, Any]) -> dict[str, str]:
    """What a compile artifact depends on, field by field (R12.1)."""
    shape = {k: v for k, v in config.items() if k not in {"name", "comment"}}
    return {
        "model_structure": digest_of(shape),
        "engine": "modelled/1",
        "mode": str(s.mode),
        "profile": s.profile,
        "max_num_seqs": str(s.max_num_seqs),
        "block_size": str(s.block_size or config["block_size"]),
        **({"tp": str(s.world)} if s.world > 1 else {}),
    }


def captured_shapes(s: ModelledSettings) -> tuple[int, ...]:
    """Sequences in an iteration for which code is kept: powers of two, and the most there may be.

    Compiling ahead keeps every one; just in time only those that a start needs.
    """
    most = min(s.max_num_seqs or SHAPES_MAX, SHAPES_MAX)
    powers = [2**n for n in range(most.bit_length()) if 2**n <= most]
    rest = [3 * 2**n for n in range(most.bit_length()) if 3 * 2**n <= most]
    return tuple(sorted({*powers, most, *(rest if s.mode is StartMode.AOT else ())}))


def kernel(key: Mapping[str, str], shape: int) -> bytes:
    """The bytes of one shape's code."""
    head = json.dumps({"key": digest_of(dict(key)), "shape": shape}).encode() + b"\n"
    return head + hashlib.shake_256(head).digest(KERNEL_BYTES - len(head))


def folder_of(cache: Path, key: Mapping[str, str]) -> Path:
    """Where the files of a key lie."""
    return cache / f"modelled-{digest_of(dict(key)).removeprefix('sha256:')[:32]}"


def compile_miss(cache: Path | None, key: Mapping[str, str], shapes: tuple[int, ...]) -> str:
    """Why the cache cannot serve this key; empty on a hit, after every file was read.

    `no_cache`, `absent`, the differing fields of the nearest, `incomplete:FILE`, `corrupt:FILE`.
    """
    if cache is None:
        return "no_cache"
    nearest: list[str] | None = None
    for index in sorted(cache.glob(f"modelled-*/{INDEX}")) if cache.is_dir() else ():
        found = _read(index)
        if found is None:
            continue
        differing = sorted(n for n in {*key, *found["key"]} if found["key"].get(n) != key.get(n))
        if not differing:
            return _spoilt(index.parent, found["files"], key, shapes)
        if nearest is None or len(differing) < len(nearest):
            nearest = differing
    return "absent" if nearest is None else "+".join(nearest)


def _read(index: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(index.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        return None
    return found if isinstance(found.get("key"), dict) else None


def _spoilt(
    folder: Path, files: Mapping[str, str], key: Mapping[str, str], shapes: tuple[int, ...]
) -> str:
    for shape in shapes:
        name = _name(shape)
        try:
            data = (folder / name).read_bytes()
        except OSError:
            return f"incomplete:{name}"
        if hashlib.sha256(data).hexdigest() != files.get(name) or data != kernel(key, shape):
            return f"corrupt:{name}"
    return ""


def keep_compiled(cache: Path, key: Mapping[str, str], shapes: tuple[int, ...]) -> None:
    """Write what was compiled, all of it or nothing; a folder that cannot be written is said."""
    final = folder_of(cache, key)
    part = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        part.mkdir(parents=True, exist_ok=True)
        files: dict[str, str] = {}
        for shape in shapes:
            data = kernel(key, shape)
            (part / _name(shape)).write_bytes(data)
            files[_name(shape)] = hashlib.sha256(data).hexdigest()
        (part / INDEX).write_text(json.dumps({"key": dict(key), "files": files}))
        if final.exists():  # it was there and not right
            shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        LOG.warning("compile cache %s cannot be written: %s", cache, error)


def _name(shape: int) -> str:
    return f"kernel-{shape:04d}.bin"
