"""An engine that already runs and is brought under control; its process is not ours.

Owns what can be known from outside: models, metrics and answers of an OpenAI/vLLM-style server. It
loads nothing and stops nothing. What nobody can see from outside (loaded bytes, tokenizer files)
is said to be not applicable by `probes`, and the gate's policy decides whether that will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from readyplane.core.errors import InvalidField, ReadyplaneError, Unavailable, Unsupported
from readyplane.core.identity import KvFormat
from readyplane.core.kv import KvEventBatch
from readyplane.core.startup import Segment
from readyplane.core.worker import LoadReport, Serving
from readyplane.kit.clock import Clock
from readyplane_agent.engines.openai import OpenAiEngine, read_metrics
from readyplane_agent.engines.port import EngineSpec, GenerateResult
from readyplane_agent.pacing import ServingTimes

POLL_S = 0.5
GONE_AFTER_S = 20.0


class AttachedEngine:
    """`EnginePort` over a running engine.

    Args:
        url: its base URL. model: model that it must list. profile: class profile to register.
        clock: time. token: bearer token of the engine, empty for none.
    """

    def __init__(
        self, url: str, *, model: str, profile: str, clock: Clock, token: str = ""
    ) -> None:
        self._clock, self._token = clock, token
        self._connect(url, model=model, profile=profile)
        self._serving: Serving | None = None
        self._spec: EngineSpec | None = None
        self._read_s: float | None = None
        self._failing_since_s: float | None = None
        self._last = LoadReport()

    def _connect(self, url: str, *, model: str, profile: str) -> None:
        self._client = OpenAiEngine(url, model=model, token=self._token)
        self._profile = profile

    @property
    def client(self) -> OpenAiEngine:
        """Asks the engine."""
        return self._client

    @property
    def returncode(self) -> int | None:
        """None while it answers; 1 once it has not for `GONE_AFTER_S`, since nobody tells us."""
        since_s = self._failing_since_s
        if since_s is None or self._clock.monotonic_s() - since_s < GONE_AFTER_S:
            return None
        return 1

    @property
    def pid(self) -> int:
        """0: its process is not ours."""
        return 0

    async def start(self, spec: EngineSpec) -> None:
        """Remember what it is to be; nothing is started."""
        self._spec = spec

    async def wait_ready(self, *, stall_s: float = 60.0, limit_s: float = 1800.0) -> None:
        """Wait until it answers and read what it serves.

        Raises:
            Unavailable: no answer within the smaller of the two limits.
            InvalidField: it does not serve the model, or does not say what it can hold.
        """
        until_s = self._clock.monotonic_s() + min(stall_s, limit_s)
        while True:
            try:
                await self._client.get("/health", timeout_s=5.0)
                self._serving = await self._read_serving()
                return
            except Unavailable:
                if self._clock.monotonic_s() > until_s:
                    raise
            except Unsupported as error:
                raise InvalidField(
                    "--engine-url", self._client.url, "give a vLLM-style server", str(error)
                ) from error
            await self._clock.sleep(POLL_S)

    async def _read_serving(self) -> Serving:
        models = await self._client.models()
        names = [str(m.get("id")) for m in models]
        found = next((m for m in models if m.get("id") == self._client.model), None)
        if found is None:
            raise InvalidField("--model", self._client.model, "use one of " + ", ".join(names))
        metrics = read_metrics(await self._client.get("/metrics"))
        blocks = metrics.get("vllm:cache_config_info.num_gpu_blocks")
        block_size = metrics.get("vllm:cache_config_info.block_size")
        length = found.get("max_model_len")
        for name, value in (
            ("/metrics vllm:cache_config_info num_gpu_blocks", blocks),
            ("/metrics vllm:cache_config_info block_size", block_size),
            ("/v1/models max_model_len", length),
        ):
            if not value:
                raise InvalidField(
                    "--engine-url",
                    self._client.url,
                    f"attach an engine that tells {name} (vLLM 0.11 or later does)",
                )
        assert blocks is not None
        assert block_size is not None
        version = await self._version()
        digest = self._spec.manifest_digest if self._spec is not None else ""
        return Serving(
            engine_url=self._client.url,
            kv=KvFormat(
                model_digest=digest or f"attached:{self._client.model}",
                dtype="unknown",
                block_size=int(block_size),
                layout="unknown",
                engine_version=version,
            ),
            kv_total_blocks=int(blocks),
            block_size=int(block_size),
            max_model_len=int(str(length)),
            profile=self._profile,
            max_num_seqs=256,
            # vLLM cannot give a running sequence away: such a worker is drained by finishing.
            moves=False,
        )

    async def _version(self) -> str:
        try:
            doc = await self._client.get("/version")
        except ReadyplaneError:
            return "attached/unknown"
        return "vllm/" + doc.decode("utf-8", "replace").strip('{}" \n').rpartition('"')[2]

    def startup_segments(self) -> tuple[Segment, ...]:
        """None: its start was before our time."""
        return ()

    def serving(self) -> Serving:
        """What it said of itself."""
        if self._serving is None:
            raise Unavailable("the attached engine has not answered yet", "wait for it")
        return self._serving

    async def load_report(self) -> LoadReport:
        """Its load; after a bad read the last one with its age (unknown is None, never zero)."""
        now_s = self._clock.monotonic_s()
        try:
            self._last = await self._client.load()
        except ReadyplaneError:
            if self._failing_since_s is None:
                self._failing_since_s = now_s
            if self._read_s is None:
                return LoadReport()
            return replace(self._last, age_s=self._clock.monotonic_s() - self._read_s)
        self._read_s, self._failing_since_s = now_s, None
        return self._last

    async def serving_times(self) -> ServingTimes:
        """What it has measured of its requests, as far as its metrics say."""
        return await self._client.serving_times()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        ignore_eos: bool = False,
        kv_transfer_params: Mapping[str, Any] | None = None,
        timeout_s: float = 30.0,
    ) -> GenerateResult:
        """One greedy answer."""
        return await self._client.generate(
            prompt_token_ids,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            kv_transfer_params=kv_transfer_params,
            timeout_s=timeout_s,
        )

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a text."""
        return await self._client.tokenize(text)

    async def kv_events(self) -> AsyncIterator[KvEventBatch]:
        """None ever come: nothing is known of its cache, so nobody believes in it."""
        await asyncio.Event().wait()
        yield KvEventBatch(0, ())

    async def is_idle(self) -> bool:
        """Whether its metrics show no sequence; False when they cannot be read."""
        try:
            load = await self._client.load()
        except ReadyplaneError:
            return False
        return load.running == 0 and load.waiting == 0

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """Nothing: it was there before us and stays."""

    def log_tail(self, lines: int = 20) -> str:  # noqa: ARG002 - the port's signature
        """Empty: its log is not ours."""
        return ""
