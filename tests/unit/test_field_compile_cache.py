"""Public faults of compile caches and KV profiles, as tests (B135, B137 to B143)."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.compile_key import FACTORS, CompileFacts, compile_key, differences, known

FULL = CompileFacts({name: known(f"v-{name}") for name in FACTORS}, {"VLLM_USE_V1": "1"})
BASE = compile_key(FULL)

# ------------------------------------------------------------------------------------ compile key

relevant = st.sampled_from(
    [*FACTORS, "env.VLLM_USE_V1", "env.VLLM_PP_LAYER_PARTITION", "env.TORCHINDUCTOR_MAX_AUTOTUNE"]
)


def changed(name: str, value: str) -> CompileFacts:
    if name.startswith("env."):
        environment = {**FULL.environment, name.removeprefix("env."): value}
        return replace(FULL, environment=environment)
    return replace(FULL, factors={**FULL.factors, name: known(value)})


@given(relevant, st.text(st.characters(min_codepoint=48, max_codepoint=122), min_size=1))
def test_b135_each_factor_alone_changes_the_key_and_is_named(name: str, value: str) -> None:
    found = compile_key(changed(name, value + "!"))
    assert found.digest != BASE.digest
    assert [d.field for d in differences(BASE.factors, found.factors)] == [name]


@given(
    st.sampled_from(["VLLM_", "TORCH_", "TORCHINDUCTOR_", "TRITON_", "CUDA_", "NCCL_", "SGLANG_"])
)
def test_b135_a_variable_that_nobody_has_reviewed_counts(prefix: str) -> None:
    found = compile_key(replace(FULL, environment={**FULL.environment, f"{prefix}NEW_THING": "1"}))
    assert found.digest != BASE.digest
    assert [d.field for d in differences(BASE.factors, found.factors)] == [f"env.{prefix}NEW_THING"]


def test_b135_a_factor_that_only_one_engine_has_counts() -> None:
    more = {**FULL.factors, "encoder_mode": known("eager")}
    assert compile_key(replace(FULL, factors=more)).digest != BASE.digest


per_pod = st.fixed_dictionaries(
    {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": st.ip_addresses().map(str),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": st.integers(1, 65535).map(str),
        "VLLM_HOST_IP": st.ip_addresses().map(str),
        "VLLM_PORT": st.integers(1, 65535).map(lambda n: f"tcp://10.0.0.1:{n}"),
        "VLLM_LOGGING_LEVEL": st.sampled_from(["DEBUG", "INFO", "WARNING"]),
        "VLLM_CACHE_ROOT": st.sampled_from(["/tmp/a", "/var/b"]),
        "VLLM_CPU_KVCACHE_SPACE": st.integers(1, 99).map(str),
        "HOSTNAME": st.sampled_from(["pod-1", "pod-2"]),
        "POD_NAME": st.text(max_size=4),
        "NCCL_DEBUG": st.sampled_from(["INFO", "WARN"]),
        "CUDA_VISIBLE_DEVICES": st.sampled_from(["0", "1", "0,1"]),
    }
)


@given(per_pod)
def test_b139_what_differs_from_pod_to_pod_is_the_same_key(pod: dict[str, str]) -> None:
    found = compile_key(replace(FULL, environment={**FULL.environment, **pod}))
    assert found.usable
    assert found == BASE
