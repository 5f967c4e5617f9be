"""What checkpoints say of their quantisation, form by form as hubs hold them: tables."""

from typing import Any

import pytest

from readyplane.core.errors import InvalidField
from readyplane.core.identity import Scales, TensorEntry
from readyplane_registry.quantised import quantisation_of, scales_from_text, scales_of


def tensors(**shapes: tuple[str, tuple[int, ...]]) -> list[TensorEntry]:
    """Tensors by name (double underscore for a dot), with dtype and shape."""
    return [
        TensorEntry(name.replace("__", "."), dtype, shape, "f", 0, 64)
        for name, (dtype, shape) in shapes.items()
    ]


DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            "input_activations": {"dynamic": True, "strategy": "token"},
        }
    },
}


@pytest.mark.parametrize(
    ("told", "held", "name", "scales"),
    [
        (
            DEEPSEEK,
            tensors(
                l__w=("F8_E4M3", (256, 256)),
                l__weight_scale_inv=("F32", (2, 2)),
            ),
            "fp8",
            Scales("block", "F32", (128, 128), "dynamic", ("l.weight_scale_inv",)),
        ),
        (
            COMPRESSED,
            tensors(l__w=("F8_E4M3", (8, 8)), l__weight_scale=("BF16", (8, 1))),
            "compressed-tensors",
            Scales("channel", "BF16", (), "dynamic", ("l.weight_scale",)),
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            tensors(l__qweight=("I32", (8, 8)), l__scales=("F16", (1, 8)), l__qzeros=("I32", (1,))),
            "awq",
            Scales("group", "F16", (128,), "none", ("l.scales",)),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": -1},
            tensors(l__qweight=("I32", (8, 8)), l__scales=("F16", (1, 8))),
            "gptq",
            Scales("channel", "F16", (), "none", ("l.scales",)),
        ),
        (
            {"quant_method": "mxfp4"},
            tensors(down_proj_blocks=("U8", (8, 8)), down_proj_scales=("U8", (8, 1))),
            "mxfp4",
            Scales("group", "U8", (32,), "none", ("down_proj_scales",)),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            tensors(
                l__weight_scale=("F8_E4M3", (8, 8)),
                l__weight_scale_2=("F32", ()),
                l__input_scale=("F32", ()),
            ),
            "nvfp4",
            Scales(
                *("group", "F32", (16,), "static"),
                ("l.input_scale", "l.weight_scale", "l.weight_scale_2"),
            ),
        ),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            tensors(l__weight_scale=("F32", ()), l__input_scale=("F32", ())),
            "fp8",
            Scales("tensor", "F32", (), "static", ("l.input_scale", "l.weight_scale")),
        ),
    ],
)
def test_forms(told: Any, held: list[TensorEntry], name: str, scales: Scales) -> None:
    config = {"quantization_config": told}
    assert quantisation_of(config) == name
    assert scales_of(name, config, held) == scales


def test_plain_weights_have_none() -> None:
    assert quantisation_of({}) == "none"
    assert scales_of("none", {}, tensors(upscale=("F32", (4,)))) is None


@pytest.mark.parametrize("told", [{}, {"quant_method": 3}, "fp8", [], {"quant_method": ""}])
def test_a_format_without_a_name_is_refused(told: Any) -> None:
    with pytest.raises(InvalidField, match="quant_method"):
        quantisation_of({"quantization_config": told})


def test_what_nothing_says_is_asked_for() -> None:
    with pytest.raises(InvalidField, match="--scales"):
        scales_of("fp8", {}, tensors(l__w=("F8_E4M3", (8, 8)), l__upscale_w=("F32", (1,))))


@pytest.mark.parametrize(
    ("text", "scales"),
    [
        ("tensor:F32", Scales("tensor", "F32")),
        ("block:F32:128x64", Scales("block", "F32", (128, 64))),
        ("group:BF16:32", Scales("group", "BF16", (32,))),
    ],
)
def test_scales_of_a_command_line(text: str, scales: Scales) -> None:
    assert scales_from_text(text) == scales


@pytest.mark.parametrize(
    "text",
    ["", "tensor", "tensor:F33", "block:F32", "block:F32:128", "group:F32:0", "tensor:F32:8",
     "group:F32:x", "group:F32:1x2x3", "group:F32:²"],
)  # fmt: skip
def test_wrong_scales_of_a_command_line(text: str) -> None:
    with pytest.raises(InvalidField, match="--scales"):
        scales_from_text(text)
