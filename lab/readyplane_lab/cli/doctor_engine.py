"""Doctor's look at an engine that somebody wants to attach: health, models, metrics, tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from readyplane.core.errors import ReadyplaneError
from readyplane_lab.cli.finding import Finding

AREA = "engine"
PROBE = "readyplane"
# Without these an engine cannot be attached: nobody would know what it can hold.
NEEDED = ("vllm:cache_config_info.num_gpu_blocks", "vllm:cache_config_info.block_size")
# Without these its load is not known, and the router goes by its own bookings alone.
WANTED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
)
USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")


async def findings(url: str) -> AsyncIterator[Finding]:
    """Findings about one engine; none without an address."""
    from readyplane_agent.engines.openai import OpenAiEngine

    if not url:
        return
    engine = OpenAiEngine(url.rstrip("/"), model="")
    try:
        await engine.get("/health", timeout_s=5.0)
    except ReadyplaneError as error:
        yield _of(error, "health", "start it, and give http://HOST:PORT of its API")
        return
    yield Finding(AREA, "health", "ok", f"{url} answers")
    try:
        models = await engine.models()
    except ReadyplaneError as error:
        yield _of(error, "models", "attach an OpenAI-style server")
        return
    for finding in _models(models):
        yield finding
    try:
        from readyplane_agent.engines.openai import read_metrics

        metrics = read_metrics(await engine.get("/metrics"))
    except ReadyplaneError as error:
        yield _of(error, "metrics", "attach an engine with vLLM's /metrics")
        return
    for finding in _metrics(metrics):
        yield finding
    name = str(models[0].get("id")) if models else ""
    try:
        ids = await OpenAiEngine(url.rstrip("/"), model=name).tokenize(PROBE)
        yield Finding(AREA, "/tokenize", "ok", f"{len(ids)} tokens for {PROBE!r}")
    except (ReadyplaneError, KeyError, TypeError) as error:
        remedy = "prompts given as text cannot use cached prefixes; attach an engine that has it"
        yield Finding(AREA, "/tokenize", "warn", str(error), remedy)


def _models(models: list[dict[str, Any]]) -> list[Finding]:
    if not models:
        return [Finding(AREA, "models", "fail", "none", "load a model into it")]
    names = ", ".join(str(m.get("id")) for m in models)
    if not models[0].get("max_model_len"):
        remedy = "attach an engine whose /v1/models tells max_model_len (vLLM does)"
        return [Finding(AREA, "models", "fail", f"{names}, without max_model_len", remedy)]
    length = models[0]["max_model_len"]
    return [Finding(AREA, "models", "ok", f"{names}, up to {length:,} tokens")]


def _metrics(metrics: Mapping[str, float]) -> list[Finding]:
    missing = [name for name in NEEDED if not metrics.get(name)]
    found = []
    if missing:
        remedy = "attach an engine that exports them (vLLM 0.11 or later does)"
        found.append(
            Finding(AREA, "KV pool", "fail", f"/metrics lacks {', '.join(missing)}", remedy)
        )
    else:
        blocks, block = (int(metrics[name]) for name in NEEDED)
        tokens = f"{blocks:,} blocks of {block} tokens"
        found.append(Finding(AREA, "KV pool", "ok", tokens))
    unknown = [name for name in WANTED if name not in metrics]
    if not any(name in metrics for name in USAGE):
        unknown.append(USAGE[0])
    if unknown:
        remedy = "the router will go by its own bookings alone; export them for a better view"
        found.append(Finding(AREA, "load", "warn", f"/metrics lacks {', '.join(unknown)}", remedy))
    else:
        running, waiting = (int(metrics[name]) for name in WANTED[:2])
        found.append(Finding(AREA, "load", "ok", f"{running} running, {waiting} waiting"))
    return found


def _of(error: ReadyplaneError, name: str, remedy: str) -> Finding:
    return Finding(AREA, name, "fail", str(error), remedy)
