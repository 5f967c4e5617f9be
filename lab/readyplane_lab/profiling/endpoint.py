"""A live OpenAI-style endpoint: what it says of itself, and streams with the time of each token.

Owns HTTP. Tokens are counted by the endpoint's own running usage (`continuous_usage_stats`, vLLM
and SGLang), since one chunk may hold many; where it tells none, a chunk with text is one token, and
`measure` finds out whether that is true.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from readyplane.core.errors import InvalidField, ReadyplaneError, Unavailable
from readyplane.kit.clock import Clock
from readyplane_agent.engines.openai import read_metrics

ANSWER_S_MAX = 120.0
SILENCE_S_MAX = 60.0
_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_TEXT = re.compile(rb'"text"\s*:\s*"(?!")')
_NO_CHOICE = re.compile(rb'"choices"\s*:\s*\[\s*\]')
KV_TOKENS = ("sglang:max_total_num_tokens",)
PAGES = (
    ("vllm:cache_config_info.num_gpu_blocks", "vllm:cache_config_info.block_size"),
    ("sglang:cache_config_info.num_pages", "sglang:cache_config_info.page_size"),
)
SERVER_INFO = ("/server_info", "/get_server_info")
"""Of SGLang, under its new and its old name."""
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")


@dataclass(frozen=True, slots=True)
class Facts:
    """What an endpoint says of itself; None where it does not."""

    model: str
    context_max: int | None
    kv_tokens: int | None
    engine: str
    sequences_max: int | None = None
    batch_tokens: int | None = None


@dataclass(slots=True)
class Stream:
    """One answer as it came.

    Attributes:
        marks: (seconds, tokens so far) of each chunk with tokens. prompt_tokens, cached_tokens: as
            the endpoint counted them, None where it did not tell. counted: whether it told tokens
            with each chunk. total: what it told at the end.
    """

    sent_s: float
    marks: list[tuple[float, int]] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    counted: bool = False
    total: int | None = None
    ended: bool = False

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.marks[0][0] - self.sent_s

    @property
    def tokens(self) -> int:
        """Tokens that have come."""
        return self.marks[-1][1] if self.marks else 0


class Endpoint:
    """Asks one endpoint. `token`: bearer token, empty for none."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, *, clock: Clock, token: str = ""
    ) -> None:
        self._session, self._url, self._clock = session, url.rstrip("/"), clock
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.model = ""

    async def facts(self, model: str) -> Facts:
        """What it serves; from now on `model` is asked, or its only one.

        Raises:
            Unavailable: nobody answers. InvalidField: no such model.
        """
        try:
            listed = json.loads(await self._get("/v1/models"))["data"]
            entries = {str(m["id"]): m for m in listed}
        except (ValueError, KeyError, TypeError):
            raise Unavailable(
                f"{self._url}/v1/models lists no models", "give the base URL of an OpenAI-style API"
            ) from None
        if model not in entries and (model or len(entries) != 1):
            remedy = f"the endpoint serves {', '.join(entries) or 'none at all'}; name one of them"
            raise InvalidField("--model", model, remedy)
        self.model = model or next(iter(entries))
        length = entries[self.model].get("max_model_len")
        metrics = await self._metrics()
        engine = next((n.partition(":")[0] for n in metrics if ":" in n), "")
        info = {} if engine == "vllm" else await self._server_info()
        states = info.get("internal_states")
        state = states[0] if isinstance(states, list) and states else {}
        return Facts(
            model=self.model,
            context_max=int(length) if length else None,
            kv_tokens=_kv_tokens(metrics) or _whole(info.get("max_total_num_tokens")),
            engine=engine,
            sequences_max=_whole(state.get("effective_max_running_requests_per_dp"))
            or _whole(info.get("max_running_requests")),
            batch_tokens=_whole(info.get("chunked_prefill_size")),
        )

    async def running(self) -> float | None:
        """Requests that run now, None where it does not tell."""
        metrics = await self._metrics()
        return next((metrics[n] for n in RUNNING if n in metrics), None)

    async def answer(self, prompt: Sequence[int], *, max_tokens: int) -> Stream:
        """One whole answer.

        Raises:
            Unavailable: no answer, an answer that breaks off, or one without a token.
            InvalidField: the endpoint refuses the request, with what it says.
        """
        stream = Stream(self._clock.monotonic_s())
        async with aclosing(self.stream(prompt, max_tokens=max_tokens, into=stream)) as chunks:
            async for _ in chunks:
                pass
        if not stream.marks or not stream.ended:
            raise Unavailable(
                f"{self._url}: the stream ended before its end", "look at the engine's log"
            )
        return stream

    async def stream(
        self, prompt: Sequence[int], *, max_tokens: int, into: Stream
    ) -> AsyncGenerator[Stream, None]:
        """The same, chunk by chunk; who leaves early aborts it. Raises as `answer`."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        into.sent_s = self._clock.monotonic_s()
        limit = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=SILENCE_S_MAX)
        try:
            async with self._session.post(
                f"{self._url}/v1/completions", json=body, headers=self._headers, timeout=limit
            ) as response:
                if response.status != 200:
                    raise _refused(self._url, response.status, await response.text())
                async for line in response.content:
                    if self._take(line, into):
                        yield into
        except TimeoutError as error:
            raise Unavailable(
                f"{self._url} sent nothing for {SILENCE_S_MAX:.0f} s", "look at the engine's log"
            ) from error
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self._url}: {error}", "check that the endpoint runs") from error

    def _take(self, line: bytes, into: Stream) -> bool:
        """Read one line of a stream; whether it brought tokens."""
        if not line.startswith(b"data:"):
            return False
        now_s = self._clock.monotonic_s()
        data = line[5:].strip()
        if data == b"[DONE]":
            into.ended = True
            return False
        if b'"error"' in data:
            raise Unavailable(f"{self._url}: {_message(data.decode('utf-8', 'replace'))}", "see it")
        if b'"prompt_tokens_details"' in data or into.prompt_tokens is None:
            _usage(data, into)
        told = _TOKENS.search(data)
        if told is not None and _NO_CHOICE.search(data):
            into.total = int(told.group(1))
            return False
        tokens = into.tokens
        if told is not None:
            into.counted = True
            tokens = int(told.group(1))
        elif not into.counted and _TEXT.search(data):
            tokens += 1
        if tokens <= into.tokens:
            return False
        into.marks.append((now_s, tokens))
        return True

    async def _server_info(self) -> dict[str, Any]:
        for path in SERVER_INFO:
            try:
                document = json.loads(await self._get(path))
            except (ReadyplaneError, ValueError):
                continue
            if isinstance(document, dict):
                return document
        return {}

    async def _metrics(self) -> dict[str, float]:
        try:
            return read_metrics((await self._get("/metrics")).encode())
        except ReadyplaneError:
            return {}

    async def _get(self, path: str) -> str:
        limit = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
        try:
            async with self._session.get(
                self._url + path, headers=self._headers, timeout=limit
            ) as response:
                text = await response.text()
                if response.status != 200:
                    raise _refused(self._url + path, response.status, text)
                return text
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unavailable(
                f"{self._url}{path}: {str(error) or type(error).__name__}",
                "check that the endpoint runs and give its base URL, http://HOST:PORT",
            ) from error


def _usage(data: bytes, into: Stream) -> None:
    try:
        usage = json.loads(data).get("usage") or {}
    except (ValueError, AttributeError):
        return
    prompt = usage.get("prompt_tokens")
    details: Any = usage.get("prompt_tokens_details") or {}
    if isinstance(prompt, int):
        into.prompt_tokens = prompt
    if isinstance(details.get("cached_tokens"), int):
        into.cached_tokens = details["cached_tokens"]


def _kv_tokens(metrics: dict[str, float]) -> int | None:
    for blocks, size in PAGES:
        if metrics.get(blocks) and metrics.get(size):
            return int(metrics[blocks] * metrics[size])
    return next((int(metrics[n]) for n in KV_TOKENS if metrics.get(n)), None)


def _whole(value: object) -> int | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    return int(value) if known else None  # type: ignore[call-overload]


def _refused(url: str, status: int, text: str) -> ReadyplaneError:
    said = _message(text)
    if status in {401, 403}:
        return InvalidField("--token", "not accepted", "set READYPLANE_ENGINE_TOKEN to its API key")
    if 400 <= status < 500 and status != 429:
        return InvalidField("URL", url, f"it answered {status}: {said}")
    return Unavailable(f"{url} answered {status}: {said}", "look at the engine's log")


def _message(text: str) -> str:
    try:
        error = json.loads(text)
        error = error.get("error", error)
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except (ValueError, AttributeError):
        return " ".join(text.split())[:300]
