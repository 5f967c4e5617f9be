"""What a checkpoint says of its quantisation: format, granularity, and which tensors are scales. Pure.

Owns the reading of `quantization_config` as Hugging Face checkpoints carry it (fp8, AWQ, GPTQ,
mxfp4, compressed-tensors, modelopt) beside the tensors that are really there. Handed to `ingest`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.identity import DTYPE_BYTES, GRANULARITIES, Scales, TensorEntry

SCALE = re.compile(r"(?:.*[._])?scales?(?:_inv|_2)?")
ACTIVATION_SCALE = re.compile(r".*[._]?(?:input|output|q|k|v|kv|qkv|prob)_scale")
GROUP_OF_FORMAT = {"mxfp4": 32, "nvfp4": 16, "mxfp8": 32}
REMEDY = "say it: --scales GRANULARITY:DTYPE[:GROUP], for example block:F32:128x128 or tensor:F32"


def quantisation_of(config: Mapping[str, Any]) -> str:
    """Name of the format in lower case, `none` for plain weights.

    Raises:
        InvalidField: there is a quantization_config that names no format.
    """
    told = config.get("quantization_config")
    if told is None:
        return "none"
    name = told.get("quant_method") if isinstance(told, Mapping) else None
    if isinstance(told, Mapping) and isinstance(told.get("quant_algo"), str):
        name = told["quant_algo"]  # modelopt names the method of all its formats alike
    if not isinstance(name, str) or not name:
        remedy = "name the format as quant_method"
        raise InvalidField("config.json: quantization_config.quant_method", name, remedy)
    return name.lower()


def scales_of(
    quantisation: str, config: Mapping[str, Any], tensors: Sequence[TensorEntry]
) -> Scales | None:
    """The scales of quantised weights, None for plain ones.

    Raises:
        InvalidField: neither the configuration nor the tensors say what the scales are.
    """
    if quantisation == "none":
        return None
    found = [t for t in tensors if SCALE.fullmatch(t.name)]
    of_weights = [t for t in found if not ACTIVATION_SCALE.fullmatch(t.name)]
    if not of_weights:
        what = f"no tensor of {len(tensors)} is called a scale"
        raise InvalidField(f"scales of {quantisation}", what, REMEDY)
    told = config.get("quantization_config")
    told = told if isinstance(told, Mapping) else {}
    weights, inputs = _group_of(told)
    granularity, group = _granularity(quantisation, {**told, **weights}, of_weights)
    return Scales(
        granularity=granularity,
        dtype=_heaviest(of_weights),
        group=group,
        activations=_activations(told, inputs, static=len(found) > len(of_weights)),
        tensors=tuple(sorted(t.name for t in found)),
    )


def _heaviest(scales: Sequence[TensorEntry]) -> str:
    """The type of most scale bytes: formats of two levels keep the upper one in another type."""
    held: Counter[str] = Counter()
    for tensor in scales:
        held[tensor.dtype] += tensor.size_bytes
    return min(held, key=lambda dtype: (-held[dtype], dtype))


def _group_of(told: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(weights, input activations) of the first group of compressed-tensors, empty elsewhere."""
    groups = told.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    if not isinstance(first, Mapping):
        return {}, {}
    weights, inputs = first.get("weights"), first.get("input_activations")
    return (
        weights if isinstance(weights, Mapping) else {},
        inputs if isinstance(inputs, Mapping) else {},
    )


def _granularity(
    quantisation: str, told: Mapping[str, Any], scales: Sequence[TensorEntry]
) -> tuple[str, tuple[int, ...]]:
    block = told.get("weight_block_size") or told.get("block_structure")
    if isinstance(block, list) and len(block) == 2 and all(_size(n) for n in block):
        return "block", (block[0], block[1])
    size = told.get("group_size", GROUP_OF_FORMAT.get(quantisation))
    if _size(size):
        return "group", (size,)
    strategy = told.get("strategy")
    if isinstance(strategy, str) and strategy in {"tensor", "channel", "token"}:
        return strategy, ()
    if size == -1:  # as AWQ and GPTQ say that a whole channel is one group
        return "channel", ()
    one_each = all(t.shape in {(), (1,)} for t in scales)
    return ("tensor" if one_each else "channel"), ()


def _activations(told: Mapping[str, Any], inputs: Mapping[str, Any], *, static: bool) -> str:
    scheme = told.get("activation_scheme")
    if scheme in {"static", "dynamic"}:
        return str(scheme)
    if inputs:
        return "dynamic" if inputs.get("dynamic") else "static"
    return "static" if static else "none"


def _size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def scales_from_text(text: str) -> Scales:
    """`GRANULARITY:DTYPE[:GROUP]` as given on a command line; the group is N or NxM.

    Raises:
        InvalidField: another form.
    """
    granularity, _, rest = text.partition(":")
    dtype, _, group = rest.partition(":")
    sizes = group.split("x") if group else []
    wanted = {"group": 1, "block": 2}.get(granularity, 0)
    whole = all(part.isascii() and part.isdigit() and 0 < int(part) <= 2**20 for part in sizes)
    if (
        granularity not in GRANULARITIES
        or dtype not in DTYPE_BYTES
        or not whole
        or (len(sizes) != wanted)
    ):
        raise InvalidField("--scales", text, REMEDY.removeprefix("say it: "))
    return Scales(granularity, dtype, tuple(int(part) for part in sizes))
