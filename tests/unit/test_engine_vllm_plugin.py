"""What vLLM's loader plugin takes and refuses, with vLLM and PyTorch replaced by doubles."""

import contextlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from readyplane.core.errors import IdentityMismatch, InvalidField, Unavailable, Unsupported
from readyplane_agent.adopt import AdoptedArena
from readyplane_agent.engines import vllm_compiled, vllm_plugin
from readyplane_agent.engines.layout import ArenaLayout, TensorSlot, tensor_table_document

DIGEST = "sha256:" + "a" * 64


def write_arena(folder: Path, *, digest: str = DIGEST) -> dict[str, Any]:
    """An arena with two tensors and its table; what a loader is ordered."""
    values = np.arange(6, dtype="<f4")
    (folder / "arena").write_bytes(values.tobytes() + bytes(4072))
    slots = (TensorSlot("a", "F32", (4,), 0, 16), TensorSlot("b", "F32", (2,), 16, 8))
    table = tensor_table_document(ArenaLayout({}, slots, 4096), manifest_digest=digest)
    (folder / "tensors.json").write_text(json.dumps(table))
    return {
        "arena": str(folder / "arena"),
        "tensor_table": str(folder / "tensors.json"),
        "manifest_digest": DIGEST,
        "wait_s": 0.1,
    }


class FakeLoader:
    """As much of vLLM's own loader as the plugin builds upon."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def download_model(self, model_config: object) -> None:
        raise AssertionError("nothing is downloaded")

    def get_all_weights(self, model_config: object, model: object) -> Iterator[tuple[str, Any]]:
        raise AssertionError("no checkpoint is read")

    def load_weights(self, model: Any, model_config: object) -> None:
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        self.track_weights_loading(model, loaded)

    def track_weights_loading(
        self, model: Any, loaded_weights: set[str], quantized: bool = False
    ) -> None:
        missing = set(model.wanted) - loaded_weights
        if missing:
            raise ValueError(f"not initialized: {sorted(missing)}")


class FakeModel:
    """Takes every tensor that it has a parameter for."""

    def __init__(self, *wanted: str, tells: bool = True) -> None:
        self.wanted, self.tells, self.got = wanted, tells, dict[str, list[float]]()

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> set[str] | None:
        for name, tensor in weights:
            self.got[name] = [float(v) for v in tensor]
        return set(self.got) if self.tells else None


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The loader class that the plugin registers, with vLLM and PyTorch replaced."""
    monkeypatch.setattr(AdoptedArena, "torch", AdoptedArena.__getitem__)
    registered: dict[str, Any] = {}

    def register_model_loader(name: str) -> Any:
        return lambda loader: registered.setdefault(name, loader)

    loaders = types.ModuleType("vllm.model_executor.model_loader")
    loaders.register_model_loader = register_model_loader  # type: ignore[attr-defined]
    default = types.ModuleType("vllm.model_executor.model_loader.default_loader")
    default.DefaultModelLoader = FakeLoader  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, loaders.__name__, loaders)
    monkeypatch.setitem(sys.modules, default.__name__, default)
    monkeypatch.delenv("READYPLANE_VLLM_MARKS", raising=False)
    vllm_plugin.register()
    return registered["readyplane"]


def config_of(extra: object) -> Any:
    return types.SimpleNamespace(load_format="readyplane", model_loader_extra_config=extra)


def test_weights_come_from_the_arena(plugged: Any, tmp_path: Path) -> None:
    loader = plugged(config_of(write_arena(tmp_path)))
    assert loader.config.model_loader_extra_config == {"enable_weights_track": True}
    model = FakeModel("a", "b")
    loader.download_model(None)
    loader.load_weights(model, None)
    assert model.got == {"a": [0.0, 1.0, 2.0, 3.0], "b": [4.0, 5.0]}


def test_every_parameter_must_come_from_the_arena(plugged: Any, tmp_path: Path) -> None:
    loader = plugged(config_of(write_arena(tmp_path)))
    with pytest.raises(IdentityMismatch, match=r"not initialized: \['c'\]"):
        loader.load_weights(FakeModel("a", "b", "c"), None)
    with pytest.raises(Unsupported, match="does not tell which weights"):
        loader.load_weights(FakeModel("a", tells=False), None)
    second = FakeModel("a", "b")
    second.secondary_weights = ("elsewhere",)  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match="second place"):
        loader.load_weights(second, None)


def test_a_table_of_another_manifest_is_refused(plugged: Any, tmp_path: Path) -> None:
    loader = plugged(config_of(write_arena(tmp_path, digest="sha256:another")))
    model = FakeModel("a", "b")
    with pytest.raises(IdentityMismatch, match="manifest_digest: sha256:another != sha256:aaaa"):
        loader.load_weights(model, None)
    assert model.got == {}, "not one tensor of it is taken"


@pytest.mark.parametrize(
    ("break_it", "error", "why"),
    [
        (lambda f: (f / "tensors.json").unlink(), Unavailable, "no tensor table"),
        (lambda f: (f / "tensors.json").write_text("[]"), InvalidField, "manifest_digest"),
        (
            lambda f: (f / "tensors.json").write_text(json.dumps({"manifest_digest": DIGEST})),
            InvalidField,
            "tensor_table",
        ),
        (lambda f: (f / "arena").write_bytes(b"short"), InvalidField, "arena"),
        (lambda f: (f / "arena").unlink(), FileNotFoundError, "arena"),
    ],
)
def test_an_arena_that_is_not_as_said_is_refused(
    plugged: Any, tmp_path: Path, break_it: Any, error: type[Exception], why: str
) -> None:
    order = write_arena(tmp_path)
    break_it(tmp_path)
    with pytest.raises(error, match=why):
        plugged(config_of(order)).load_weights(FakeModel("a", "b"), None)


@pytest.mark.parametrize(
    "change",
    [
        {"arena": ""},
        {"manifest_digest": None},
        {"wait_s": -1},
        {"wait_s": True},
        {"fall_back": True},
    ],
)
def test_an_order_of_the_loader_is_checked(
    plugged: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(InvalidField, match=r"--model-loader-extra-config"):
        plugged(config_of({**write_arena(tmp_path), **change}))
    with pytest.raises(InvalidField, match="JSON object"):
        plugged(config_of("text"))


@pytest.mark.usefixtures("plugged")
def test_a_vllm_that_cannot_be_built_upon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeLoader, "track_weights_loading")
    with pytest.raises(Unsupported, match="has no track_weights_loading"):
        vllm_plugin.register()


def test_a_port_is_no_factor_of_compiled_code_and_a_plain_function_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A false miss each: a port in the key (as vllm#47573's path), a loading that fails."""
    envs = types.ModuleType("vllm.envs")
    envs.compile_factors = lambda: {"VLLM_NIXL_SIDE_CHANNEL_PORT": 1, "VLLM_X": 2}  # type: ignore[attr-defined]
    compiler = types.ModuleType("torch.compiler")

    def plain() -> int:
        return 42

    compiler.load_compiled_function = lambda file: types.SimpleNamespace(  # type: ignore[attr-defined]
        _artifacts=types.SimpleNamespace(compiled_fn=plain), file=file
    )
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    monkeypatch.setitem(sys.modules, "torch.compiler", compiler)
    for _ in range(2):
        vllm_compiled.repair()
    assert envs.compile_factors() == {"VLLM_X": 2}
    loaded = compiler.load_compiled_function("f")
    assert loaded.file == "f"
    assert loaded._artifacts.compiled_fn.finalize_loading(None) is None
    assert loaded._artifacts.compiled_fn() == 42
    with contextlib.suppress(KeyError):
        del sys.modules["vllm.envs"]
    vllm_compiled.repair()


@pytest.mark.parametrize("on_cpu", [True, False])
def test_on_a_cpu_log_probabilities_compile_nothing(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    """On a GPU what vLLM compiles there saves memory that it has counted on."""

    def plain() -> str:
        return "counted"

    def compiled() -> str:
        return "counted by compiled code"

    compiled._torchdynamo_orig_callable = plain  # type: ignore[attr-defined]
    sampler = types.ModuleType("vllm.v1.sample.sampler")
    platforms = types.ModuleType("vllm.platforms")
    platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: on_cpu)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.sampler", sampler)
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    vllm_compiled.count_plainly()  # a version without it
    sampler.batched_count_greater_than = compiled  # type: ignore[attr-defined]
    for _ in range(2):
        vllm_compiled.count_plainly()
        assert sampler.batched_count_greater_than is (plain if on_cpu else compiled)
