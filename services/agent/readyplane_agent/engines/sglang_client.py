"""What an SGLang server answers, in our words: answers, load and times, and legs that meet.

Owns the reading of SGLang's own `/generate` (token ids in and out), `/get_server_info` and metrics.
A server that serves one stage only answers nobody alone: `Partner` is the other end, and both legs
are sent at once under a room of their own (SGLang's bootstrap).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from readyplane.core.errors import InvalidField, ReadyplaneError, Unavailable, Unsupported
from readyplane.core.work import bootstrap_room
from readyplane.core.worker import LoadReport, Role
from readyplane_agent.engines.exchange import exchange, refused
from readyplane_agent.engines.openai import LOAD_LIMIT_S, OpenAiEngine, labels_of, sample_of
from readyplane_agent.engines.port import GenerateResult
from readyplane_agent.pacing import ServingTimes

# SGLang's own name for "nobody": a prefill server then computes and hands over nothing (its warm-up
# is made so). Not in any documentation; read in its source.
NOBODY = "2.2.2.2"
# Older and newer names of one path.
INFO_PATHS = ("/get_server_info", "/server_info")
METER = "sglang:"
ABORT_S_MAX = 2.0
MODES = {"prefill_compute": "computed", "prefill_cache": "cached", "decode": "decoded"}


@dataclass(frozen=True, slots=True)
class Partner:
    """The other end of a pair.

    Attributes:
        url: of its API. bootstrap: `host:port` of the prefill end, whichever of the two that is.
        name: of its worker, for messages.
    """

    url: str
    bootstrap: str
    name: str = ""


class SglangClient(OpenAiEngine):
    """A client of one SGLang server.

    Args:
        url, model, token: see `OpenAiEngine`. role: the stage it serves; BOTH answers alone.
        bootstrap: `host:port` where it meets others, of a prefill server.

    Attributes:
        partner: with whom a server of one stage answers; None while there is nobody.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        token: str = "",
        role: Role = Role.BOTH,
        bootstrap: str = "",
    ) -> None:
        super().__init__(url, model=model, token=token)
        self.role, self.bootstrap = role, bootstrap
        self.partner: Partner | None = None

    async def info(self) -> dict[str, Any]:
        """What the server says of itself. Raises Unavailable, Unsupported."""
        for path in INFO_PATHS:
            try:
                found = await self.read(path)
            except Unsupported:
                continue
            if isinstance(found, dict):
                return found
        raise Unsupported(f"{self.url} has no {' nor '.join(INFO_PATHS)}", "give an SGLang server")

    async def read(self, path: str) -> Any:
        """A JSON document. Raises Unavailable, Unsupported, InvalidField."""
        body = await self.get(path)
        try:
            return json.loads(body)
        except ValueError:
            raise Unavailable(f"{self.url}{path} answered no JSON", "check the address") from None

    # ------------------------------------------------------------------ answers

    async def complete(
        self, prompt_token_ids: Sequence[int], *, max_tokens: int, timeout_s: float, **more: Any
    ) -> GenerateResult:
        """One answer to a prompt given as tokens; `more` fields of the request.

        A prefill server without a partner gives the first token and no more; a decode server
        without one has nothing to decode from.

        Raises:
            Unavailable, InvalidField. Unsupported: a field that SGLang does not offer, or nobody to
            answer with.
        """
        body: dict[str, Any] = {
            "input_ids": list(prompt_token_ids),
            "sampling_params": sampling_params(max_tokens, more),
            "stream": False,
        }
        given = more.get("kv_transfer_params")
        if given is not None:
            return _result(await self._leg(self.url, {**body, **given}, timeout_s), self.url)
        if self.role is Role.BOTH:
            return _result(await self._leg(self.url, body, timeout_s), self.url)
        if self.partner is not None:
            return await self._with(self.partner, body, timeout_s)
        if self.role is Role.DECODE:
            raise Unsupported(
                "an SGLang decode server answers nobody alone", "wait for a prefill worker"
            )
        meeting = _meeting(f"{NOBODY}:{self.bootstrap.rpartition(':')[2]}")
        return _result(await self._leg(self.url, {**body, **meeting}, timeout_s), self.url)

    async def _with(
        self, partner: Partner, body: Mapping[str, Any], timeout_s: float
    ) -> GenerateResult:
        """Both legs at once; the decode end's answer. The first that fails ends both."""
        both = {**body, **_meeting(partner.bootstrap)}
        mine, theirs = (
            asyncio.ensure_future(self._leg(url, both, timeout_s))
            for url in (self.url, partner.url)
        )
        decode = theirs if self.role is Role.PREFILL else mine
        try:
            done, _ = await asyncio.wait({mine, theirs}, return_when=asyncio.FIRST_EXCEPTION)
            # One that merely waited for the other says so; what broke says why.
            for leg in sorted(done, key=lambda d: not isinstance(d.exception(), Unavailable)):
                leg.result()
            return _result(decode.result(), self.url)
        finally:
            left = [leg for leg in (mine, theirs) if not leg.done()]
            for leg in left:
                leg.cancel()
            await asyncio.gather(mine, theirs, return_exceptions=True)
            if left:
                asked = (self.abort(both["rid"], url=url) for url in (self.url, partner.url))
                await asyncio.gather(*asked, return_exceptions=True)

    async def abort(self, rid: str, *, url: str = "") -> None:
        """End a request here, or at another server; it says nothing of whether it knew it.

        Raises:
            Unavailable, InvalidField, Unsupported.
        """
        at = url or self.url
        answer = await exchange(at, "/abort_request", body={"rid": rid}, timeout_s=ABORT_S_MAX)
        error = refused(answer, "POST /abort_request")
        if error is not None:
            raise error

    async def _leg(self, url: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        server = self if url == self.url else OpenAiEngine(url, model=self.model)
        return await server.post("/generate", body, timeout_s=timeout_s)

    # ------------------------------------------------------------------ load and times

    async def load(self, metrics: Mapping[str, float] | None = None) -> LoadReport:
        """Load from SGLang's metrics; None for what it does not export."""
        m = metrics
        if m is None:
            m = read_page(await self.get("/metrics", timeout_s=LOAD_LIMIT_S))
        total = _whole(m.get("num_pages"))
        usage = m.get("token_usage")
        return LoadReport(
            running=_whole(m.get("num_running_reqs")),
            waiting=_waiting(m),
            kv_used_blocks=None if total is None or usage is None else round(usage * total),
            kv_total_blocks=total,
            prefill_tokens_total=_added(m.get("computed"), m.get("cached")),
            decode_tokens_total=_whole(m.get("decoded")),
            cached_tokens_total=_whole(m.get("cached")),
            preemptions_total=_whole(m.get("num_retracted_reqs")),
            # SGLang counts no iterations: nobody knows of progress but by its tokens.
            iterations_total=None,
        )

    async def serving_times(self) -> ServingTimes:
        """What it has measured of its requests; unknown after a bad read."""
        try:
            m = read_page(await self.get("/metrics", timeout_s=5.0))
        except ReadyplaneError:
            return ServingTimes()
        return ServingTimes(
            ttft_sum_s=m.get("time_to_first_token_seconds_sum"),
            ttft_count=m.get("time_to_first_token_seconds_count"),
            tpot_sum_s=m.get("inter_token_latency_seconds_sum"),
            tpot_count=m.get("inter_token_latency_seconds_count"),
        )


def sampling_params(max_tokens: int, more: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's words in SGLang's `sampling_params`.

    Raises:
        Unsupported: a seed, which SGLang keeps to in its deterministic mode only; an unknown field.
    """
    found: dict[str, Any] = {"max_new_tokens": max_tokens, "temperature": 0}
    for name, value in more.items():
        if name in ("temperature", "ignore_eos", "top_p", "top_k", "stop"):
            found[name] = value
        elif name in ("structured_outputs", "guided_choice"):
            choices = value["choice"] if isinstance(value, Mapping) else value
            found["regex"] = "(" + "|".join(map(str, choices)) + ")"
        elif name == "seed":
            why = "SGLang repeats a seeded answer in its deterministic mode only"
            raise Unsupported(why, "do without")
        elif name != "kv_transfer_params":
            raise Unsupported(f"SGLang's /generate has no {name}", "do without")
    return found


def _meeting(bootstrap: str) -> dict[str, Any]:
    host, _, port = bootstrap.rpartition(":")
    rid = secrets.token_hex(16)
    return {
        "bootstrap_host": host,
        "bootstrap_port": int(port),
        "bootstrap_room": bootstrap_room(rid),
        "rid": rid,
    }


def _result(document: Any, url: str) -> GenerateResult:
    try:
        meta = document["meta_info"]
        reason = meta["finish_reason"]
        return GenerateResult(
            token_ids=tuple(int(t) for t in document["output_ids"]),
            text=str(document["text"]),
            finish_reason=str(reason["type"] if isinstance(reason, dict) else reason),
            prompt_tokens=int(meta["prompt_tokens"]),
            cached_tokens=meta.get("cached_tokens"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable(f"{url}: an answer without {error}", "give an SGLang server") from None


def read_page(page: bytes) -> dict[str, float]:
    """SGLang's samples of its first rank, without `sglang:`.

    Every rank tells the same of the whole, so they are not added up. Tokens are told by mode
    (`computed`, `cached`, `decoded`), the cache by its labels (`num_pages`, `page_size`).

    Raises:
        InvalidField: a page without one metric of SGLang, as a server started without
            `--enable-metrics` gives.
    """
    found: dict[str, float] = {}
    for line in page.decode("utf-8", "replace").splitlines():
        if not line.startswith(METER):
            continue
        name, labels, value = sample_of(line)
        ranks = (labels.get(f"{which}_rank", "0") or "0" for which in ("tp", "pp", "dp"))
        if value is None or any(rank != "0" for rank in ranks):
            continue
        short = name.removeprefix(METER)
        if short == "realtime_tokens_total":
            mode = MODES.get(labels.get("mode", ""))
            if mode is not None:
                found[mode] = found.get(mode, 0.0) + value
        elif short.endswith("_bucket"):
            continue
        else:
            found[short] = value
    if not found:
        raise InvalidField(
            "/metrics", "no metric of SGLang", "start the server with --enable-metrics"
        )
    for label, shown in labels_of(page, "sglang:cache_config_info").items():
        if label in ("num_pages", "page_size") and shown.isdigit():
            found[label] = float(shown)
    return found


def _waiting(m: Mapping[str, float]) -> int | None:
    """What waits in any queue: one of its own before a meeting, or of the stage it serves."""
    queues = [
        "num_queue_reqs",
        "num_prefill_prealloc_queue_reqs",
        "num_prefill_inflight_queue_reqs",
        "num_decode_prealloc_queue_reqs",
        "num_decode_transfer_queue_reqs",
    ]
    if queues[0] not in m:
        return None
    return round(sum(m.get(name, 0.0) for name in queues))


def _added(*values: float | None) -> int | None:
    known = [v for v in values if v is not None]
    return round(sum(known)) if known else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
