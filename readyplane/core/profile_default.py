"""What is assumed of a worker class that nobody has measured: slow on purpose.

Owns the assumptions. A planner that believes a class to be slower than it is asks for too many
workers, and only as advice; one that believes it to be faster misses its targets.
"""

from __future__ import annotations

from readyplane.core.profile import ClassProfile

UNKNOWN_CLASS = "unknown"
"""Class of the named profile `unknown`: it may be used for any class, and takes that class's name."""
MODEL_BYTES = 16e9
KV_BYTES_PER_TOKEN = 327_680
GPU_BYTES = 24e9
GPU_FILL = 0.9
KV_TOKENS_MIN = 16_384
BYTES_PER_S = 0.4e12
"""Of one GPU, in decode: half of what an L40S reads, a tenth of an H200."""
FLOP_PER_S = 60e12
"""Of one GPU, in prefill: what an L4 reaches in half precision."""
WEIGHT_BYTES = 2.0
PER_SEQUENCE_S = 100e-6
PREFILL_TOKENS = (128.0, 1024.0, 8192.0)
PREFILL_BASE_S = 0.02
ATTENTION_TOKENS = 65_536.0
"""A prompt of that length costs twice what its tokens alone would."""


def conservative(
    worker_class: str,
    *,
    gpus: int = 1,
    model_bytes: float | None = None,
    kv_tokens: int | None = None,
    kv_bytes_per_token: int | None = None,
) -> ClassProfile:
    """An unmeasured profile from what a worker offers; what is not known is assumed small and slow.

    Weights and KV are read once an iteration, a prompt token costs two operations a parameter
    (bf16 weights), and GPUs share both. Bytes and tokens of one worker.
    """
    weights = MODEL_BYTES if model_bytes is None else model_bytes
    kv_bytes = KV_BYTES_PER_TOKEN if kv_bytes_per_token is None else kv_bytes_per_token
    if kv_tokens is None:
        free = gpus * GPU_BYTES * GPU_FILL - weights
        kv_tokens = max(KV_TOKENS_MIN, int(free / kv_bytes))
    token_s = 2.0 * weights / WEIGHT_BYTES / (gpus * FLOP_PER_S)
    base_s, kv_token_s = weights / (gpus * BYTES_PER_S), kv_bytes / (gpus * BYTES_PER_S)
    told = ["1 GPU" if gpus == 1 else f"{gpus} GPUs"]
    told += [] if model_bytes is None else [f"{weights / 1e9:.1f} GB of weights"]
    known = ", ".join(told)
    return ClassProfile(
        name=f"{UNKNOWN_CLASS}-{worker_class}" if worker_class != UNKNOWN_CLASS else worker_class,
        source=f"not measured: conservative assumptions from {known}",
        worker_class=worker_class,
        gpus=gpus,
        price_per_gpu_hour=1.0,
        prefill_points=tuple(
            (n, round(1e3 * (PREFILL_BASE_S + token_s * n * (1.0 + n / ATTENTION_TOKENS)), 3))
            for n in PREFILL_TOKENS
        ),
        decode_points=tuple(
            (n, kv, round(1e3 * (base_s + PER_SEQUENCE_S * n + kv_token_s * kv), 4))
            for n, kv in ((1.0, 1000.0), (1.0, 8000.0), (16.0, 4000.0), (16.0, 16_000.0))
        ),
        kv_capacity_tokens=kv_tokens,
        kv_bytes_per_token=kv_bytes,
        measured=False,
    )
