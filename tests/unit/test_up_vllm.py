"""What `readyplane up --engine vllm` does before and beside a vLLM: refusals, questions, prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from readyplane import profiles
from readyplane.core.errors import InvalidField, Refused
from readyplane.core.identity import Canary
from readyplane.core.profile import ClassProfile
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.engines.port import GenerateResult
from readyplane_lab.profiling.live import Measured
from readyplane_lab.up.golden import ask_golden
from readyplane_lab.up.options import UpOptions
from readyplane_lab.up.prompts import TEXT_SHARE, as_text, as_tokens, words_of
from readyplane_lab.up.real_engine import ON_CPU, RealEngine, find_engine
from readyplane_lab.up.reference import (
    MEASURE_WITHIN_S,
    Reference,
    Subject,
    command,
    kv_bytes_per_token,
    profile_in_time,
)
from readyplane_lab.up.serving import vllm_policy
from readyplane_lab.workload.request import WorkloadRequest

ENGINE = RealEngine(Path("/env/bin/vllm"), "0.32.0+cpu", on_cpu=True)
REQUEST = WorkloadRequest(0, 0.0, 300, 20, ((7, 200), (8, 100)))


def model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_options_that_do_not_fit_together_are_refused_by_name(tmp_path: Path) -> None:
    where = model(tmp_path / "m")
    trace = tmp_path / "t.csv"
    cases: list[tuple[str, dict[str, Any]]] = [
        ("--engine", {"engine": "other"}),
        ("--model", {"engine": "vllm"}),
        ("--model", {"engine": "vllm", "model_dir": tmp_path}),
        ("--model", {"model_dir": where}),
        ("--vllm-bin", {"vllm_bin": where}),
        ("--engine-arg", {"engine_args": ("--x",)}),
        ("--quick", {"engine": "vllm", "model_dir": where, "quick": True}),
        ("--trace", {"engine": "vllm", "model_dir": where, "trace": trace}),
    ]
    for field, given in cases:
        with pytest.raises(InvalidField) as caught:
            UpOptions(**given)
        assert caught.value.field == field
    assert UpOptions(engine="vllm", model_dir=where).model_dir == where


def program(folder: Path, python: str) -> Path:
    """An environment whose Python says what it is told to say."""
    folder.mkdir()
    for name, text in (("vllm", "#!/bin/sh\n"), ("python", f"#!/bin/sh\n{python}\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder / "vllm"


def test_an_environment_without_vllm_is_refused_with_what_to_do(tmp_path: Path) -> None:
    cases = [
        (tmp_path / "none" / "vllm", "no program is there"),
        (program(tmp_path / "a", "echo no module >&2; exit 1"), "no module"),
        (
            program(tmp_path / "b", """echo '{"vllm": "1", "torch": "2", "nixl": false}'"""),
            "no NIXL",
        ),
    ]
    for where, why in cases:
        with pytest.raises(InvalidField) as caught:
            find_engine(where)
        assert why in str(caught.value) and "make vllm-env" in str(caught.value)
    told = """echo '{"vllm": "0.32.0", "torch": "2.13.0+cpu", "nixl": true}'"""
    found = find_engine(program(tmp_path / "c", told))
    assert found.on_cpu and found.version == "0.32.0"


def test_what_the_environment_says_goes_before_what_a_cpu_wants() -> None:
    found = ENGINE.environment({"VLLM_CPU_KVCACHE_SPACE": "4"})
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert set(ON_CPU) <= set(found)
    assert not set(ON_CPU) & set(replace(ENGINE, on_cpu=False).environment({}))


class Speaking:
    """Answers by the first token of a question, with a lead of each token over the next."""

    model = "m"

    def __init__(self, leads: Mapping[int, float], *, fickle: bool = False) -> None:
        self.leads, self.fickle = leads, fickle

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return (len(text), 5)

    async def post(self, target: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        assert (target, timeout_s > 0) == ("/v1/completions", True)
        lead = self.leads[body["prompt"][0]]
        tops = [{"token_id:1": -0.1, "token_id:2": -0.1 - lead}, {"token_id:3": -0.1}]
        choice = {
            "token_ids": [1, 3],
            "finish_reason": "stop",
            "logprobs": {"top_logprobs": tops[:1] if lead else tops},
        }
        return {"choices": [choice]}

    async def generate(self, *_: Any, **__: Any) -> GenerateResult:
        return GenerateResult((1, 4) if self.fickle else (1, 3), "", "stop", 2)


async def test_the_known_answer_is_the_clearest_one_that_repeats_itself() -> None:
    speaking = Speaking({1: 0.2, 2: 3.0, 3: 0.0})
    found = await ask_golden(cast("OpenAiEngine", speaking), ("a", "bb", "ccc"))
    assert found.canary == Canary((2, 5), (1, 3))
    assert found.ends and found.margin == pytest.approx(3.0)
    with pytest.raises(Refused, match="twice"):
        await ask_golden(cast("OpenAiEngine", Speaking({1: 1.0}, fickle=True)), ("a",))


def test_prompts_as_text_share_what_the_requests_share_and_fit_the_context() -> None:
    body = as_text("m", context=4000, characters_per_token=4.0)
    one = body(REQUEST)
    other = body(replace(REQUEST, parts=((7, 200), (9, 100))))
    assert one["prompt"][:800] == other["prompt"][:800] and one["prompt"] != other["prompt"]
    assert len(one["prompt"]) == 1200 and one["max_tokens"] == 20 and one["ignore_eos"] is True
    cut = as_text("m", context=120, characters_per_token=4.0)(REQUEST)
    assert len(cut["prompt"]) == int(TEXT_SHARE * 100) * 4
    assert words_of(3, 500).startswith(words_of(3, 90))
    assert as_tokens("m")(REQUEST)["vllm_xargs"] == {"modelled_output_tokens": 20}


def test_a_reference_is_kept_as_it_was_and_by_what_it_depends_on(tmp_path: Path) -> None:
    kept = Reference(Canary((1, 2), (3,)), True, profiles.load("unknown"), 4096, 3.5)
    assert Reference.from_document(json.loads(json.dumps(kept.document()))) == kept
    subject = Subject("m", tmp_path, "sha256:1", ENGINE, ("--x", "1"), 8)
    assert subject.key != replace(subject, args=("--x", "2")).key
    assert subject.key != replace(subject, engine=replace(ENGINE, version="0.33.0")).key
    assert subject.key == replace(subject, folder=tmp_path / "moved").key
    words = command(subject, 8123)
    assert words[:3] == ["/env/bin/vllm", "serve", str(tmp_path)]
    assert words[-2:] == ["--x", "1"] and "8123" in words


def test_bytes_of_a_tokens_kv_follow_from_the_models_configuration() -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 256}
    assert kv_bytes_per_token({**config, "num_key_value_heads": 4, "dtype": "bfloat16"}) == 2048
    assert kv_bytes_per_token({"text_config": config, "torch_dtype": "torch.float32"}) == 8192
    with pytest.raises(InvalidField, match="num_hidden_layers"):
        kv_bytes_per_token({**config, "num_hidden_layers": None})


def test_the_policy_is_one_worker_of_each_stage_with_a_file_laid_over_it(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps(profiles.load("unknown").document()))
    plain = vllm_policy("m", "m:latest", ENGINE, tmp_path / "p.json", None)
    assert (plain["prefill"]["max"], plain["decode"]["max"]) == (1, 1)
    assert plain["decode"]["worker_class"] == "vllm-cpu"
    over = tmp_path / "over.json"
    over.write_text('{"prefill": {"max": 2}}')
    wider = vllm_policy("m", "m:latest", ENGINE, tmp_path / "p.json", over)
    assert (wider["prefill"]["max"], wider["prefill"]["min"]) == (2, 1)


async def test_a_busy_machine_is_measured_again_for_longer() -> None:
    """A profile of one point is no profile; what is too little in the longest try is refused."""
    took: list[float] = []
    said: list[str] = []
    enough_s = MEASURE_WITHIN_S[1]

    async def measured_in(seconds: float) -> Measured:
        took.append(seconds)
        return cast("Measured", seconds)

    def fitted(measured: Measured) -> ClassProfile:
        if cast("float", measured) < enough_s:
            raise InvalidField("decode points", 1, "measure at least 2")
        return profiles.load("h200-slow10")

    measured, profile = await profile_in_time(measured_in, fitted, said.append)
    assert cast("float", measured) == enough_s
    assert profile.name == "h200-slow10"
    assert took == list(MEASURE_WITHIN_S[:2])
    assert len(said) == 1
    assert "decode points: 1" in said[0]

    enough_s = 1e9
    with pytest.raises(InvalidField, match="decode points"):
        await profile_in_time(measured_in, fitted, said.append)
    assert took[2:] == list(MEASURE_WITHIN_S)
