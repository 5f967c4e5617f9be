"""Text to token ids, once a request: by a tokenizer kept here, or the model's own engine.

Owns the calls of `/tokenize` and the memory. Both legs are then sent the same ids, so that prefill
and decode cannot read a prompt differently.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from readyplane.core.errors import Unavailable
from readyplane_gateway.bounds import Bounds
from readyplane_gateway.engine_http import EngineHttp, EngineTrouble
from readyplane_gateway.local_tokens import Local, LocalTokens
from readyplane_gateway.metrics import Meters
from readyplane_gateway.openai import Ask, Failure, Kind, failure_of_engine

MEMORY_CHARACTERS_MAX = 8 * 1024 * 1024
ENTRY_CHARACTERS_MAX = 256 * 1024
ANSWER_BYTES_MAX = 128 * 1024 * 1024
TRIES_MAX = 2
# What decides, beside the messages, how a chat is written out.
_CHAT_FIELDS = (
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "tools",
    "mm_processor_kwargs",
)


class _Answer(msgspec.Struct, gc=False):
    tokens: tuple[int, ...]


_decoder = msgspec.json.Decoder(_Answer)
# What `Tokens.of` gives for a prompt that the engines there do not tokenise for others.
NOT_OFFERED: tuple[int, ...] = ()
# How vLLM, and with it the modelled engine, says that a prompt is too long.
TOO_LONG = "maximum context length"
_NO_SUCH_PATH = frozenset({404, 405, 501})


class ClientFault(Exception):
    """An engine refused what the client sent; `failure` is passed on and nobody is blamed (B70)."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(failure.message)


class Tokens:
    """Tokenises over HTTP; a bounded memory of recent prompts."""

    def __init__(
        self,
        engines: EngineHttp,
        bounds: Bounds,
        meters: Meters,
        *,
        local: LocalTokens,
        later: Callable[[Awaitable[object]], None],
    ) -> None:
        """`local`: tokenizers kept here. `later`: run a bounded piece of work beside the request."""
        self._engines, self._local, self._later = engines, local, later
        self._bounds = bounds
        self._meters = meters
        self._memory: OrderedDict[tuple[str, str, bytes], tuple[int, ...]] = OrderedDict()
        self._characters = 0

    async def of(
        self, ask: Ask, engines: Callable[[], Sequence[str]], tokenizer: str
    ) -> tuple[int, ...] | None:
        """Token ids of a prompt; None when no engine is there to ask, `NOT_OFFERED` when none that
        is there tokenises such a prompt (the router then goes by an estimate, which is counted).

        Args:
            engines: gives the URLs of the model's engines, the one to ask first in front.
            tokenizer: digest of their tokenizer: another one forgets what was remembered.

        Raises:
            ClientFault: an engine refused the text. Unavailable: none of the engines answered.
        """
        if ask.token_ids is not None:
            self._meters.tokenized.labels("given").inc()
            return ask.token_ids
        local = self._local.of(ask.model, tokenizer) if ask.kind is Kind.COMPLETIONS else None
        if local is not None and local.trusted:
            return self._here(local, ask, engines)
        body = msgspec.json.encode(_question(ask))
        key = (ask.model, tokenizer, body)
        found = self._memory.get(key)
        if found is not None:
            self._memory.move_to_end(key)
            self._meters.tokenized.labels("remembered").inc()
            return found
        urls = engines()
        if not urls:
            return None
        troubles: list[str] = []
        for url in urls[:TRIES_MAX]:
            try:
                found = await self._ask(url, body, ask.kind)
            except (EngineTrouble, msgspec.MsgspecError) as error:
                troubles.append(f"{url}: {error}")
                continue
            if found is NOT_OFFERED:
                self._meters.tokenized.labels("not_offered").inc()
            else:
                self._meters.tokenized.labels("asked").inc()
                self._remember(key, found)
                if local is not None:
                    self._local.compare(local, ask.text, found, special=_special(ask))
            return found
        raise Unavailable(f"no engine tokenised the prompt ({'; '.join(troubles)})", "try again")

    def _here(
        self, local: Local, ask: Ask, engines: Callable[[], Sequence[str]]
    ) -> tuple[int, ...]:
        self._meters.tokenized.labels("local").inc()
        local.asked += 1
        if local.due and (urls := engines()):
            self._later(self._compare(local, ask, urls[0]))
        return local.encode(ask.text, special=_special(ask))

    async def _compare(self, local: Local, ask: Ask, url: str) -> None:
        try:
            found = await self._ask(url, msgspec.json.encode(_question(ask)), ask.kind)
        except (EngineTrouble, msgspec.MsgspecError, ClientFault):
            return  # it says nothing of the tokenizer; it is compared another time
        if found is not NOT_OFFERED:
            self._local.compare(local, ask.text, found, special=_special(ask))

    async def _ask(self, url: str, body: bytes, kind: Kind) -> tuple[int, ...]:
        exchange = await self._engines.open(
            url, "/tokenize", body, within_s=self._bounds.tokenize_s_max, doing="tokenising"
        )
        with exchange:
            status = await exchange.head()
            answer = await exchange.whole(ANSWER_BYTES_MAX)
        if status == 400:
            failure = failure_of_engine(status, answer)
            if TOO_LONG in failure.message:
                raise ClientFault(replace(failure, code="context_length_exceeded", body=b""))
        # An engine may tokenise text alone; of a chat that is wrong, its prefill leg says so.
        if status in _NO_SUCH_PATH or (kind is Kind.CHAT and status == 400):
            return NOT_OFFERED
        if status in (400, 413, 422):
            raise ClientFault(failure_of_engine(status, answer))
        if status != 200:
            raise msgspec.DecodeError(f"HTTP {status}")
        return _decoder.decode(answer).tokens

    def _remember(self, key: tuple[str, str, bytes], tokens: tuple[int, ...]) -> None:
        size = len(key[2]) + len(tokens)
        if size > ENTRY_CHARACTERS_MAX or key in self._memory:
            return
        self._memory[key] = tokens
        self._characters += size
        while self._characters > MEMORY_CHARACTERS_MAX:
            old, gone = self._memory.popitem(last=False)
            self._characters -= len(old[2]) + len(gone)


def _special(ask: Ask) -> bool:
    return ask.body.get("add_special_tokens") is not False


def _question(ask: Ask) -> dict[str, Any]:
    if ask.kind is Kind.COMPLETIONS:
        question: dict[str, Any] = {"model": ask.model, "prompt": ask.text}
        if "add_special_tokens" in ask.body:
            question["add_special_tokens"] = ask.body["add_special_tokens"]
        return question
    return {
        "model": ask.model,
        "messages": ask.body["messages"],
        **{name: ask.body[name] for name in _CHAT_FIELDS if name in ask.body},
    }
