"""What every vLLM-style engine answers: models, completions, tokens and metrics, over HTTP.

Owns the reading of those answers in our words; `attached` and `vllm` are engine ports made of it,
and `probes` asks a peer's engine with it. Names of metrics are vLLM's (field reference 5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from readyplane.core.errors import ReadyplaneError, Unavailable
from readyplane.core.worker import LoadReport
from readyplane_agent.engines.exchange import exchange, refused
from readyplane_agent.engines.port import GenerateResult
from readyplane_agent.pacing import ServingTimes

SLEEP_STATE = "vllm:engine_sleep_state"
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")

# An engine that computes a long prompt may answer late; whoever asks goes on meanwhile.
LOAD_LIMIT_S = 20.0

# As newer and older versions of vLLM call it.
TPOT_NAMES = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")


class OpenAiEngine:
    """A client of one engine.

    Args:
        url: base URL. model: name to ask for. token: bearer token, empty for none.

    Attributes:
        slept: set when its metrics say that it has gone to sleep; whoever acts on it clears it.
    """

    def __init__(self, url: str, *, model: str, token: str = "") -> None:
        self.url, self.model, self._token = url.rstrip("/"), model, token
        self.slept = asyncio.Event()
        self._asleep = False

    async def get(self, target: str, *, timeout_s: float = 10.0) -> bytes:
        """The body of a good answer. Raises Unavailable, Unsupported, InvalidField."""
        answer = await exchange(self.url, target, timeout_s=timeout_s, token=self._token)
        error = refused(answer, f"GET {target}")
        if error is not None:
            raise error
        return answer.body

    async def post(self, target: str, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """The document of a good answer. Raises Unavailable, Unsupported, InvalidField."""
        answer = await exchange(self.url, target, body=body, timeout_s=timeout_s, token=self._token)
        error = refused(answer, f"POST {target}")
        if error is not None:
            raise error
        return answer.document(self.url)

    async def models(self) -> list[dict[str, Any]]:
        """Entries of /v1/models."""
        answer = await exchange(self.url, "/v1/models", token=self._token)
        error = refused(answer, "GET /v1/models")
        if error is not None:
            raise error
        doc = answer.document(self.url)
        found = doc.get("data") if isinstance(doc, dict) else None
        if not isinstance(found, list) or not all(isinstance(m, dict) for m in found):
            raise Unavailable(f"{self.url}/v1/models lists no models", "give an OpenAI-style URL")
        return found

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        ignore_eos: bool = False,
        kv_transfer_params: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
    ) -> GenerateResult:
        """One greedy completion of a prompt given as tokens."""
        more: dict[str, Any] = {"ignore_eos": True} if ignore_eos else {}
        if kv_transfer_params is not None:
            more["kv_transfer_params"] = dict(kv_transfer_params)
        return await self.complete(
            prompt_token_ids, max_tokens=max_tokens, timeout_s=timeout_s, **more
        )

    async def complete(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        timeout_s: float,
        path: str = "/v1/completions",
        **more: Any,
    ) -> GenerateResult:
        """One completion of a prompt given as tokens; `more` fields of the request.

        Token ids are the engine's own where it returns them (`return_token_ids`), else those of
        its tokenizer for the text, else the bytes of the text: enough to compare two answers.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt_token_ids),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": False,
            "return_token_ids": True,
            **more,
        }
        doc = await self.post(path, body, timeout_s=timeout_s)
        try:
            choice = doc["choices"][0]
            text, reason = str(choice["text"]), str(choice["finish_reason"])
        except (KeyError, IndexError, TypeError):
            raise Unavailable(f"{self.url}: a completion without choices", "check it") from None
        usage = doc.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            ids = await self._ids_of(text)
        return GenerateResult(
            token_ids=tuple(int(t) for t in ids),
            text=text,
            finish_reason=reason,
            prompt_tokens=int(usage.get("prompt_tokens", len(prompt_token_ids))),
            cached_tokens=details.get("cached_tokens"),
            kv_transfer_params=doc.get("kv_transfer_params"),
        )

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, by the engine's /tokenize."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        doc = await self.post("/tokenize", body, timeout_s=10.0)
        return tuple(int(t) for t in doc["tokens"])

    async def _ids_of(self, text: str) -> list[int]:
        try:
            return list(await self.tokenize(text))
        except (Unavailable, KeyError, TypeError):
            return list(text.encode())

    async def load(self, metrics: Mapping[str, float] | None = None) -> LoadReport:
        """Load from vLLM's metrics; None for what it does not export."""
        m = metrics
        if m is None:
            m = read_metrics(await self.get("/metrics", timeout_s=LOAD_LIMIT_S))
        total = _whole(m.get("vllm:cache_config_info.num_gpu_blocks"))
        usage = next((m[n] for n in KV_USAGE if n in m), None)
        asleep = m.get(f"{SLEEP_STATE}.awake") == 0.0
        if asleep and not self._asleep:
            self.slept.set()
        self._asleep = asleep
        used = None if total is None or usage is None else round(usage * total)
        return LoadReport(
            running=_whole(m.get("vllm:num_requests_running")),
            waiting=_whole(m.get("vllm:num_requests_waiting")),
            kv_used_blocks=used,
            kv_total_blocks=total,
            prefill_tokens_total=_whole(m.get("vllm:prompt_tokens_total")),
            decode_tokens_total=_whole(m.get("vllm:generation_tokens_total")),
            cached_tokens_total=_whole(m.get("vllm:prefix_cache_hits_total")),
            preemptions_total=_whole(m.get("vllm:num_preemptions_total")),
            iterations_total=_whole(m.get("vllm:iteration_tokens_total_count")),
        )

    async def serving_times(self) -> ServingTimes:
        """What it has measured of its requests, by vLLM's names; unknown after a bad read."""
        try:
            m = read_metrics(await self.get("/metrics", timeout_s=5.0))
        except ReadyplaneError:
            return ServingTimes()
        tpot = next((name for name in TPOT_NAMES if f"{name}_count" in m), TPOT_NAMES[0])
        return ServingTimes(
            ttft_sum_s=m.get("vllm:time_to_first_token_seconds_sum"),
            ttft_count=m.get("vllm:time_to_first_token_seconds_count"),
            tpot_sum_s=m.get(f"{tpot}_sum"),
            tpot_count=m.get(f"{tpot}_count"),
            kv_sum_s=m.get("vllm:nixl_xfer_time_seconds_sum"),
            kv_bytes_sum=m.get("vllm:nixl_bytes_transferred_sum"),
        )


def labels_of(text: bytes, name: str) -> dict[str, str]:
    """Labels of the first sample of a metric; empty where the page has none."""
    for line in text.decode("utf-8", "replace").splitlines():
        if line.startswith((name + "{", name + " ")):
            return sample_of(line)[1]
    return {}


def read_metrics(text: bytes) -> dict[str, float]:
    """Samples of Prometheus text, summed over labels; labels of `…_info` become `name.label`.

    Buckets of histograms are left out: they are most of a page, which is read while others serve.

    States of sleep are told apart: `vllm:engine_sleep_state.awake`.

    A number in an info label becomes its value (`vllm:cache_config_info.num_gpu_blocks`).
    """
    found: dict[str, float] = {}
    for line in text.decode("utf-8", "replace").splitlines():
        if not line or line.startswith("#") or "_bucket{" in line:
            continue
        name, labels, value = sample_of(line)
        if value is None:
            continue
        found[name] = found.get(name, 0.0) + value
        if name == SLEEP_STATE:
            found[f"{name}.{labels.get('sleep_state', '')}"] = value
        if name.endswith("_info"):
            for key, shown in labels.items():
                number = _number(shown)
                if number is not None:
                    found[f"{name}.{key}"] = number
    return found


def sample_of(line: str) -> tuple[str, dict[str, str], float | None]:
    """Name, labels and value of one line of Prometheus text; None for no finite number."""
    name, brace, rest = line.partition("{")
    labels: dict[str, str] = {}
    if brace:
        inside, _, after = rest.rpartition("}")
        for pair in inside.split('",'):
            key, _, shown = pair.partition('="')
            labels[key.strip(" ,")] = shown.removesuffix('"')
    else:
        name, _, after = line.partition(" ")
    return name.strip(), labels, _number(after.strip().split(" ")[0])


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None  # noqa: PLR0124 - NaN


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
