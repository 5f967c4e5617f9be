"""The demo's names and its policy: what `readyplane up` runs and `readyplane replay` simulates.

The worker class is the measured H200 profile slowed by 10, so that a few requests a second need one
to six prefill and one to four decode workers; at full speed one of each would do, and nothing would
scale.
"""

from __future__ import annotations

from collections.abc import Mapping

from readyplane.core.errors import InvalidField

MODEL = "demo"
MODEL_TAG = "demo:latest"
WORKER_CLASS = "h200-slow10"
MODEL_MB = 300
MODEL_MB_MIN, MODEL_MB_MAX = 13, 4000
"""Of the demo model's weights: each of its shards has a layer, beside embedding and head."""

DEMO_POLICY: Mapping[str, object] = {
    "model": MODEL,
    "manifest": MODEL_TAG,
    "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
    "prefill": {"min": 1, "max": 6, "worker_class": WORKER_CLASS, "profile": WORKER_CLASS},
    "decode": {"min": 1, "max": 4, "worker_class": WORKER_CLASS, "profile": WORKER_CLASS},
    "tick_s": 1.0,
    "t_ready_prior": {"p50_s": 6.0, "p90_s": 10.0, "p99_s": 15.0},
    # A demo shows in minutes what takes hours elsewhere: it may shrink soon after it began.
    "forecast": {"warmup_s": 20.0},
}

# Shorter times for the self-check of a minute, laid over the policy above.
QUICK_POLICY: Mapping[str, object] = {
    "min_ready_s": 4.0,
    "up": {"cooldown_s": 2.0},
    "down": {"cooldown_s": 3.0, "window_s": 3.0, "hold_s": 6.0},
    "drain_deadline_s": 40.0,
}

# For a real vLLM beside everything else on one small machine: one worker of each stage. Model, class
# and profile are those of the run.
VLLM_POLICY: Mapping[str, object] = {
    "slo": {"ttft_s": 5.0, "tpot_s": 0.5},
    "prefill": {"min": 1, "max": 1},
    "decode": {"min": 1, "max": 1, "convertible": False},
    "t_ready_prior": {"p50_s": 60.0, "p90_s": 120.0, "p99_s": 240.0},
    "forecast": {"warmup_s": 60.0},
}


def demo_bytes(model_mb: float) -> int:
    """Bytes of the demo model's weights, of the megabytes that were asked for.

    Raises:
        InvalidField: no number from MODEL_MB_MIN to MODEL_MB_MAX.
    """
    if not MODEL_MB_MIN <= model_mb <= MODEL_MB_MAX:
        raise InvalidField("--model-mb", model_mb, f"give {MODEL_MB_MIN} to {MODEL_MB_MAX}")
    return round(model_mb * 1e6)
