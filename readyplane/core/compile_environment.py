"""Which variables and arguments of an engine change the code it generates (R12.1). Pure.

Owns the review: everything with an engine's prefix counts unless it is listed here as something
that changes no code, with the reason. So a variable that nobody has looked at yet makes a miss
and never a wrong hit (B135), and a pod's address or port makes neither (B139). Handed to
`compile_key`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PREFIXES = (
    "VLLM_",
    "SGLANG_",
    "SGL_",
    "TORCH",
    "PYTORCH_",
    "TRITON_",
    "INDUCTOR_",
    "FLASHINFER_",
    "FLASH_ATTENTION_",
    "CUDA_",
    "CUDNN_",
    "CUBLAS_",
    "CUTLASS_",
    "NCCL_",
    "NVTE_",
    "NVIDIA_TF32_",
    "TENSORRT_",
    "TRTLLM_",
    "HIP_",
    "HSA_",
    "ROCM_",
    "RAY_EXPERIMENTAL_NOSET_",
)
EXACT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CC", "CXX", "CFLAGS", "CXXFLAGS", "NVCC_FLAGS")
ADDRESS, PORT, PATH, LOG = "address or host name", "port", "path", "logging"
SECRET, LIMIT, KV_SIZE, PLACE = "secret", "time limit", "KV size", "device placement"
SERVER = "belongs to the API server"
# Each was looked at: none of them reaches a tracer, a code generator or a launch configuration.
LEFT_OUT: Mapping[str, str] = {
    "VLLM_HOST_IP": ADDRESS,
    "VLLM_DP_MASTER_IP": ADDRESS,
    "VLLM_NIXL_SIDE_CHANNEL_HOST": ADDRESS,
    "VLLM_MOONCAKE_BOOTSTRAP_HOST": ADDRESS,
    "VLLM_LOOPBACK_IP": ADDRESS,
    "NCCL_SOCKET_IFNAME": ADDRESS,
    "NCCL_HOSTID": ADDRESS,
    "NCCL_IB_HCA": ADDRESS,
    "SGLANG_HOST_IP": ADDRESS,
    "VLLM_PORT": PORT,
    "VLLM_DP_MASTER_PORT": PORT,
    "VLLM_NIXL_SIDE_CHANNEL_PORT": PORT,
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": PORT,
    "VLLM_RINGBUFFER_WARNING_INTERVAL": LOG,
    "VLLM_CACHE_ROOT": PATH,
    "VLLM_CONFIG_ROOT": PATH,
    "VLLM_ASSETS_CACHE": PATH,
    "VLLM_XLA_CACHE_PATH": PATH,
    "VLLM_RPC_BASE_PATH": PATH,
    "VLLM_LORA_RESOLVER_CACHE_DIR": PATH,
    "VLLM_TORCH_PROFILER_DIR": PATH,
    "TORCH_HOME": PATH,
    "TORCHINDUCTOR_CACHE_DIR": PATH,
    "TORCH_EXTENSIONS_DIR": PATH,
    "TRITON_CACHE_DIR": PATH,
    "TRITON_HOME": PATH,
    "TRITON_DUMP_DIR": PATH,
    "CUDA_HOME": PATH,
    "CUDA_PATH": PATH,
    "CUDA_CACHE_PATH": PATH,
    "CUDA_CACHE_MAXSIZE": PATH,
    "CUDA_MPS_PIPE_DIRECTORY": PATH,
    "CUDA_MPS_LOG_DIRECTORY": PATH,
    "TORCHELASTIC_ERROR_FILE": PATH,
    "TORCHELASTIC_RUN_ID": PLACE,
    "TORCHELASTIC_RESTART_COUNT": PLACE,
    "TORCHELASTIC_MAX_RESTARTS": PLACE,
    "TORCHELASTIC_USE_AGENT_STORE": ADDRESS,
    "VLLM_RAY_BUNDLE_INDICES": PLACE,
    "VLLM_RAY_PER_WORKER_GPUS": PLACE,
    "FLASHINFER_WORKSPACE_BASE": PATH,
    "VLLM_CONFIGURE_LOGGING": LOG,
    "VLLM_LOGGING_LEVEL": LOG,
    "VLLM_LOGGING_CONFIG_PATH": LOG,
    "VLLM_LOGGING_PREFIX": LOG,
    "VLLM_LOGGING_STREAM": LOG,
    "VLLM_LOG_STATS_INTERVAL": LOG,
    "VLLM_LOG_BATCHSIZE_INTERVAL": LOG,
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": LOG,
    "VLLM_TRACE_FUNCTION": LOG,
    "SGLANG_LOGGING_CONFIG_PATH": LOG,
    "TORCH_LOGS": LOG,
    "TORCH_LOGS_FORMAT": LOG,
    "TORCH_LOGS_OUT": LOG,
    "TORCH_CPP_LOG_LEVEL": LOG,
    "TORCH_DISTRIBUTED_DEBUG": LOG,
    "TORCH_SHOW_CPP_STACKTRACES": LOG,
    "NCCL_DEBUG": LOG,
    "NCCL_DEBUG_FILE": LOG,
    "NCCL_DEBUG_SUBSYS": LOG,
    "VLLM_API_KEY": SECRET,
    "VLLM_DO_NOT_TRACK": SERVER,
    "VLLM_NO_USAGE_STATS": SERVER,
    "VLLM_USAGE_SOURCE": SERVER,
    "VLLM_USAGE_STATS_SERVER": SERVER,
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": SERVER,
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": LIMIT,
    "VLLM_RPC_TIMEOUT": LIMIT,
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": LIMIT,
    "VLLM_ENGINE_READY_TIMEOUT_S": LIMIT,
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": LIMIT,
    "VLLM_IMAGE_FETCH_TIMEOUT": LIMIT,
    "VLLM_VIDEO_FETCH_TIMEOUT": LIMIT,
    "VLLM_AUDIO_FETCH_TIMEOUT": LIMIT,
    "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": LIMIT,
    "NCCL_TIMEOUT": LIMIT,
    "VLLM_CPU_KVCACHE_SPACE": KV_SIZE,
    "CUDA_VISIBLE_DEVICES": PLACE,
    "CUDA_DEVICE_ORDER": PLACE,
    "HIP_VISIBLE_DEVICES": PLACE,
}
# What a cluster writes into every container for a service that happens to be called like an engine.
SERVICE_LINK = re.compile(
    r".+(_SERVICE_HOST|_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT_\d+_(TCP|UDP)(_\w+)?)"
)

ARGUMENTS_LEFT_OUT: Mapping[str, str] = {
    "--host": ADDRESS,
    "--port": PORT,
    "--uds": PATH,
    "--root-path": PATH,
    "--download-dir": PATH,
    "--log-file": LOG,
    "--uvicorn-log-level": LOG,
    "--log-level": LOG,
    "--disable-log-stats": LOG,
    "--disable-log-requests": LOG,
    "--enable-log-requests": LOG,
    "--max-log-len": LOG,
    "--api-key": SECRET,
    "--ssl-keyfile": SECRET,
    "--ssl-certfile": SECRET,
    "--served-model-name": SERVER,
    "--api-server-count": SERVER,
    "--allowed-origins": SERVER,
    "--kv-events-config": ADDRESS,
    "--data-parallel-address": ADDRESS,
    "--data-parallel-rpc-port": PORT,
    "--master-addr": ADDRESS,
    "--master-port": PORT,
    "--gpu-memory-utilization": KV_SIZE,
    "--kv-cache-memory-bytes": KV_SIZE,
    "--num-gpu-blocks-override": KV_SIZE,
    "--swap-space": KV_SIZE,
    "--mem-fraction-static": KV_SIZE,
    "--kv-tokens": KV_SIZE,
    "--kv-reuse-bytes": KV_SIZE,
    "--device-taken-bytes": KV_SIZE,
    "--seed": "seeds the sampler, not the code",
}


@dataclass(frozen=True, slots=True)
class Reviewed:
    """What of a list of settings counts for generated code.

    Attributes:
        counted: name -> value as given. left_out: name -> why it does not count.
    """

    counted: Mapping[str, str]
    left_out: Mapping[str, str]


def review_environment(environ: Mapping[str, str]) -> Reviewed:
    """The variables that count: those with an engine's prefix that are not listed as harmless."""
    counted: dict[str, str] = {}
    left_out: dict[str, str] = {}
    for name, value in sorted(environ.items()):
        if name not in EXACT and not name.startswith(PREFIXES):
            continue
        why = LEFT_OUT.get(name) or ("service link" if SERVICE_LINK.fullmatch(name) else "")
        if why:
            left_out[name] = why
        else:
            counted[name] = value
    return Reviewed(counted, left_out)


def review_arguments(words: Sequence[str]) -> Reviewed:
    """The arguments that count, by flag; `--flag value`, `--flag=value` and bare flags are known.

    A flag that comes twice keeps both values, in order. A word that belongs to no flag counts as
    itself.
    """
    counted: dict[str, str] = {}
    left_out: dict[str, str] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        flag, equals, value = word.partition("=")
        if not flag.startswith("-"):
            flag, value = "positional", word
        elif not equals:
            value = "set"
            if index < len(words) and not words[index].startswith("-"):
                value = words[index]
                index += 1
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        why = ARGUMENTS_LEFT_OUT.get(flag)
        if why:
            left_out[flag] = why
        elif flag in counted:
            counted[flag] += f" {value}"
        else:
            counted[flag] = value
    return Reviewed(counted, left_out)
