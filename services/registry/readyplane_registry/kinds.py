"""What each kind of artifact must say of itself before it is published (R10.1, R10.3). Pure.

Owns the rules beyond a manifest's shape: who owns which rank, quantisation and its scales, layout,
runtime and capability, by kind. Handed to `catalog`, which refuses with every reason at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from readyplane.core.errors import InvalidField
from readyplane.core.identity import ArtifactKind, Manifest, check_digest

MODEL_TOKENS_MAX = 2**31
VERSIONED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*/[A-Za-z0-9][A-Za-z0-9._+-]*")
CHECKPOINT_LAYOUTS = ("safetensors",)
RANKS_SHOWN_MAX = 4


def kind_faults(manifest: Manifest) -> Iterator[str]:
    """Every reason why a manifest does not say what its kind must say; each names its field."""
    if not VERSIONED.fullmatch(manifest.layout):
        yield f"layout: {manifest.layout!r} names no version; write NAME/VERSION"
    yield from _scale_faults(manifest)
    if manifest.kind is ArtifactKind.WEIGHTS:
        yield from _weights_faults(manifest)
        yield from _config_faults(manifest)
        return
    if not manifest.key:
        yield f"key: a {manifest.kind} artifact needs the fields it depends on"
    if not manifest.capability:
        yield f"capability: a {manifest.kind} artifact runs on one only; name it (sm90, cpu, …)"
    if not VERSIONED.fullmatch(manifest.loader_version):
        yield (
            f"loader_version: {manifest.loader_version!r} names no runtime; a {manifest.kind} "
            "artifact belongs to one, write NAME/VERSION"
        )
    yield from _rank_faults(manifest)
    if manifest.kind is ArtifactKind.ENGINE:
        yield from _engine_faults(manifest)


def _scale_faults(manifest: Manifest) -> Iterator[str]:
    """Quantised weights are numbers only with their scales, and whoever reads them must know how."""
    scales, quantised = manifest.scales, manifest.quantisation != "none"
    carries = manifest.kind in {ArtifactKind.WEIGHTS, ArtifactKind.ENGINE}
    if scales is None:
        if quantised and carries:
            yield (
                f"scales: {manifest.quantisation} needs granularity, dtype and the tensors that are "
                "scales (none where the format carries them inside)"
            )
        return
    if not quantised:
        yield "scales: quantisation is none; name the format that they belong to"
    dtypes = {tensor.name: tensor.dtype for tensor in manifest.tensors}
    held = {dtypes[name] for name in scales.tensors if name in dtypes}
    if held and scales.dtype not in held:  # of two levels, the upper one may have another type
        yield f"scales.dtype: {scales.dtype}, but scales.tensors are {', '.join(sorted(held))}"


def _engine_faults(manifest: Manifest) -> Iterator[str]:
    if manifest.layout.partition("/")[0] in CHECKPOINT_LAYOUTS:
        yield f"layout: {manifest.layout} is a checkpoint's; a converted engine has one of its own"
    try:
        check_digest(manifest.key.get("weights", ""))
    except InvalidField:
        yield "key.weights: name the digest of the weights that the engine was made from"


def _rank_faults(manifest: Manifest) -> Iterator[str]:
    """Each rank of the placement owns something: a tensor, or else a file."""
    world = manifest.world
    owners = [(f"files[{f.path}]", f.ranks) for f in manifest.files]
    if manifest.tensors:
        owners = [(f"tensors[{t.name}]", t.ranks) for t in manifest.tensors]
    owned: set[int] = set()
    for what, ranks in owners:
        owned.update(ranks or range(world))
        foreign = [rank for rank in ranks if rank >= world]
        if foreign:
            yield f"{what}.ranks: {foreign[0]} of a world of {world} ranks"
        if len(set(ranks)) != len(ranks):
            yield f"{what}.ranks: {list(ranks)[:RANKS_SHOWN_MAX]} names a rank twice"
    missing = sorted(set(range(world)) - owned)
    if missing:
        what = "tensor" if manifest.tensors else "file"
        yield f"{what}s: no {what} belongs to rank {missing[0]} of {world}"


def _weights_faults(manifest: Manifest) -> Iterator[str]:
    purposes = {entry.path: entry.purpose for entry in manifest.files}
    used = {tensor.file for tensor in manifest.tensors}
    if not any(tensor.size_bytes for tensor in manifest.tensors):
        yield "tensors: not one of them has an element; publish the weights themselves"
    for path in sorted(used):
        if purposes[path] != "weights":
            yield f"files[{path}].purpose: holds tensors, write weights (not {purposes[path]})"
    for path, purpose in sorted(purposes.items()):
        if purpose == "weights" and path not in used:
            yield f"files[{path}]: a weights file that no tensor lies in"
    yield from _rank_faults(manifest)


def _config_faults(manifest: Manifest) -> Iterator[str]:
    config = manifest.config
    for name in ("max_model_len", "vocab_size"):
        if not whole(config.get(name), 1, MODEL_TOKENS_MAX):
            yield (
                f"config.{name}: {config.get(name)!r} is not a whole number of 1 to "
                f"{MODEL_TOKENS_MAX}"
            )
            return
    vocab = int(config["vocab_size"])
    eos = config.get("eos_token_id")
    for token in eos if isinstance(eos, list | tuple) else [] if eos is None else [eos]:
        if not whole(token, 0, vocab - 1):
            yield f"config.eos_token_id: {token!r} is not a token of a vocabulary of {vocab}"
    if manifest.canary is not None:
        for name in ("prompt_token_ids", "golden_token_ids"):
            tokens: tuple[int, ...] = getattr(manifest.canary, name)
            bad = [token for token in tokens if token >= vocab]
            if bad:
                yield f"canary.{name}: {bad[0]} is not a token of a vocabulary of {vocab}"


def whole(value: object, low: int, high: int) -> bool:
    """True for a whole number of that range; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
