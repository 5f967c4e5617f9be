"""The OpenAI side in values: what a request asks for, and what an error looks like.

Owns the checks that do not need an engine (the rest an engine answers, and its 4xx is passed on).
Fields that the gateway does not know are passed to the engine untouched. Nothing here waits,
reads a clock or keeps state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from readyplane.core.errors import (
    Conflict,
    InvalidField,
    LostLease,
    NoPair,
    NotFound,
    Overloaded,
    PromptTooLong,
    ReadyplaneError,
    Refused,
    Unauthenticated,
    Unavailable,
    UnknownField,
    Unsupported,
)
from readyplane.core.work import Slo
from readyplane_gateway.fleet import RouterRefuses

TOKEN_ID_MAX = 2**32 - 1
PRIORITY_MAX = 2**31 - 1
OUTPUT_TOKENS_MAX = 2**31 - 1
# What the gateway itself puts into the legs; a client that could would read others' KV.
OWNED_FIELDS = frozenset(
    {
        "kv_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "ec_transfer_params",
    }
)
# What shapes a chat's prompt and is no field of `/tokenize`.
SHAPE_THE_PROMPT = frozenset({"documents", "reasoning_effort", "tool_choice"})
SLO_HEADERS = {
    "ttft": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
    "tpot": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
}
TENANT_HEADERS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")

# Numbers that engines judge; JSON's true is none, though some would take it for 1.
NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
    "seed",
    "min_tokens",
    "max_tokens",
    "max_completion_tokens",
    "top_logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "thinking_token_budget",
)

_TOKENS = list[Annotated[int, msgspec.Meta(ge=0, le=TOKEN_ID_MAX)]]


class Kind(StrEnum):
    """Which of the two answers is asked for."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Path of the engine's API."""
        return "/v1/completions" if self is Kind.COMPLETIONS else "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request.

    Attributes:
        body: as the client sent it. token_ids: prompt tokens where they were given, else None
            (a chat may give them beside its messages, as `prompt_token_ids`).
        text: prompt text where that was given. messages: of a chat.
        max_tokens: None when absent (the model's own rule holds).
        include_usage, usage_in_each: the client wants the usage chunk of a stream, or usage in
            every chunk.
    """

    kind: Kind
    model: str
    body: Mapping[str, Any]
    token_ids: tuple[int, ...] | None
    text: str
    messages: tuple[Any, ...]
    max_tokens: int | None
    stream: bool
    include_usage: bool
    usage_in_each: bool
    priority: int
    cache_salt: str

    @property
    def told_by_tokens(self) -> bool:
        """Whether its token ids are all there is to know of the prompt.

        Not so for parts that are not text, and for what shapes a chat's prompt beside what
        `/tokenize` is told: the engines then write out the messages themselves.
        """
        return SHAPE_THE_PROMPT.isdisjoint(self.body) and all(
            not isinstance(content := message.get("content"), list)
            or all(isinstance(part, dict) and part.get("type") == "text" for part in content)
            for message in self.messages
        )

    @property
    def characters(self) -> int:
        """Characters of the prompt, to guess its tokens while nobody can tokenise."""
        if self.kind is Kind.COMPLETIONS:
            return len(self.text)
        return sum(len(str(message.get("content") or "")) for message in self.messages)

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of the prompt, or of all text in the messages' contents together."""
        if self.kind is Kind.COMPLETIONS:
            return _utf8_bytes(self.text)
        return sum(_content_bytes(message.get("content")) for message in self.messages)


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that is an error: HTTP status and the four fields of an OpenAI error body."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    body: bytes = b""

    def document(self) -> bytes:
        """`{"error": {...}}`; an engine's own error body is passed on as it came."""
        return self.body or msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def headers(self) -> list[tuple[bytes, bytes]]:
        """`Retry-After` in whole seconds, and why it was dropped; empty for other errors."""
        if self.retry_after_s is None:
            return []
        after = str(max(1, math.ceil(self.retry_after_s))).encode()
        return [(b"retry-after", after), (b"x-llm-d-request-dropped-reason", self.code.encode())]


# Most special first: (class, status, type, code).
_FAILURES: tuple[tuple[type[ReadyplaneError], int, str, str], ...] = (
    (Unauthenticated, 401, "authentication_error", "invalid_api_key"),
    (PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (UnknownField, 400, "invalid_request_error", "unknown_parameter"),
    (InvalidField, 400, "invalid_request_error", "invalid_value"),
    (Unsupported, 400, "invalid_request_error", "unsupported_parameter"),
    (NotFound, 404, "invalid_request_error", "model_not_found"),
    (Overloaded, 429, "rate_limit_error", "overloaded"),
    (NoPair, 503, "server_error", "no_ready_pair"),
    (Unavailable, 503, "server_error", "unavailable"),
    (LostLease, 503, "server_error", "unavailable"),
    (Conflict, 409, "server_error", "conflict"),
    (Refused, 500, "server_error", "model_load_failed"),
    (RouterRefuses, 500, "server_error", "router_refuses"),
)


def failure_of(error: ReadyplaneError) -> Failure:
    """What a client is told of an error of our own tree."""
    for cls, status, kind, code in _FAILURES:
        if isinstance(error, cls):
            param = error.field if isinstance(error, InvalidField) else None
            if isinstance(error, NotFound):
                param = error.what
            return Failure(status, kind, code, str(error), param, error.retry_after_s)
    return Failure(500, "server_error", "internal_error", str(error))


def failure_of_engine(status: int, body: bytes) -> Failure:
    """An engine's own refusal, passed on: its message and fields, in the shape clients read."""
    kind = "invalid_request_error"
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        found = None
    error = found.get("error", found) if isinstance(found, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        param, code = error.get("param"), error.get("code")
        return Failure(
            status=status,
            type=str(error.get("type") or kind),
            code=str(code) if code is not None else "engine_refused",
            message=error["message"],
            param=param if isinstance(param, str) else None,
            body=body
            if {"message", "type", "param", "code"} <= set(found.get("error", ()))
            else b"",
        )
    if isinstance(error, str) and error:
        return Failure(status, kind, "engine_refused", error)
    text = body[:400].decode(errors="replace").strip() or "no text"
    return Failure(status, kind, "engine_refused", f"the engine refused the request: {text}")


# --------------------------------------------------------------------------- requests


def parse_ask(kind: Kind, raw: bytes) -> Ask:
    """Check a request body.

    Raises:
        InvalidField: names the field (`InvalidField.field`), the value and the remedy.
    """
    body = _object(raw)
    for name in sorted(OWNED_FIELDS & set(body)):
        raise UnknownField(name, "given", "leave it out: the gateway sets it")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise InvalidField("model", model, "name a model of /v1/models")
    token_ids, text = (None, "")
    messages: tuple[Any, ...] = ()
    if kind is Kind.COMPLETIONS:
        token_ids, text = _prompt(body.get("prompt"))
        _unsupported(body, "prompt_embeds")
    else:
        messages = _messages(body.get("messages"))
        if body.get("prompt_token_ids") is not None:
            token_ids = _token_ids("prompt_token_ids", body["prompt_token_ids"])
    _no_booleans(body, kind)
    _only_one(body, "n")
    _only_one(body, "best_of")
    if body.get("use_beam_search"):
        raise _not_offered("use_beam_search", True)
    stream = _boolean(body, "stream")
    options = _stream_options(body, stream=stream)
    return Ask(
        kind=kind,
        model=model,
        body=body,
        token_ids=token_ids,
        text=text,
        messages=messages,
        max_tokens=_max_tokens(kind, body),
        stream=stream,
        include_usage=_boolean(options, "include_usage", "stream_options."),
        usage_in_each=_boolean(options, "continuous_usage_stats", "stream_options."),
        priority=_whole(body, "priority", -PRIORITY_MAX, PRIORITY_MAX) or 0,
        cache_salt=_text(body, "cache_salt"),
    )


def slo_of(headers: Mapping[str, str], default: Slo) -> Slo | None:
    """The SLO that the headers name; None without, the missing half from `default`.

    Raises:
        InvalidField: not a positive number of milliseconds.
    """
    ttft_s = _milliseconds(headers, SLO_HEADERS["ttft"])
    tpot_s = _milliseconds(headers, SLO_HEADERS["tpot"])
    if ttft_s is None and tpot_s is None:
        return None
    return Slo(ttft_s or default.ttft_s, tpot_s or default.tpot_s)


def tenant_of(headers: Mapping[str, str]) -> str:
    """The fairness key of a request, empty without."""
    for name in TENANT_HEADERS:
        if name in headers:
            return headers[name][:256]
    return ""


def check_length(isl: int, max_tokens: int | None, limit_tokens: int) -> None:
    """Compare prompt and asked output with what the model allows.

    Raises:
        PromptTooLong: names the limit.
    """
    if isl >= limit_tokens:
        raise PromptTooLong(
            "prompt",
            isl,
            f"send at most {limit_tokens - 1} tokens",
            f"the model allows {limit_tokens} tokens of prompt and output together; "
            f"the prompt has {isl}: shorten it to at most {limit_tokens - 1}",
        )
    if max_tokens is not None and isl + max_tokens > limit_tokens:
        raise PromptTooLong(
            "max_tokens",
            max_tokens,
            f"ask for at most {limit_tokens - isl}",
            f"the model allows {limit_tokens} tokens of prompt and output together; the prompt has "
            f"{isl} and max_tokens is {max_tokens}: ask for at most {limit_tokens - isl}",
        )


def check_size(ask: Ask, limit_tokens: int, bytes_per_token_max: int) -> None:
    """Refuse, before anybody tokenises it, a prompt that cannot fit whatever its tokens are.

    Args:
        limit_tokens: prompt and output together. bytes_per_token_max: UTF-8 bytes that a token
            covers at most on average.

    Raises:
        PromptTooLong: names the limit.
    """
    if ask.token_ids is not None:
        check_length(len(ask.token_ids), ask.max_tokens, limit_tokens)
        return
    size, most = ask.text_bytes, limit_tokens * bytes_per_token_max
    if size > most:
        raise PromptTooLong(
            "prompt" if ask.kind is Kind.COMPLETIONS else "messages",
            size,
            f"send at most {limit_tokens - 1} tokens",
            f"the model allows {limit_tokens} tokens of prompt and output together, which is at "
            f"most {most} bytes of text ({bytes_per_token_max} a token); the prompt has {size} "
            f"bytes: shorten it to at most {limit_tokens - 1} tokens",
        )


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _content_bytes(content: Any) -> int:
    if isinstance(content, str):
        return _utf8_bytes(content)
    if not isinstance(content, list):
        return 0
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return sum(_utf8_bytes(text) for text in texts if isinstance(text, str))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        shown = raw[:60].decode(errors="replace")
        raise InvalidField("body", shown, f"send one valid JSON object ({error})") from error
    if not isinstance(body, dict):
        raise InvalidField("body", _short(body), "send one JSON object")
    return body


def _prompt(value: Any) -> tuple[tuple[int, ...] | None, str]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise InvalidField("prompt", value, "send at least one character or token")
        return None, value
    if not isinstance(value, list):
        raise InvalidField("prompt", _short(value), "send text or a list of token ids")
    if not value:
        raise InvalidField("prompt", value, "send at least one character or token")
    if len(value) > 1 and isinstance(value[0], str | list):
        remedy = "send one prompt a request"
        raise InvalidField("prompt", f"{len(value)} prompts", remedy)
    return _token_ids("prompt", value), ""


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    try:
        return tuple(msgspec.convert(value, _TOKENS))
    except msgspec.ValidationError as error:
        remedy = f"send token ids from 0 to {TOKEN_ID_MAX} ({error})"
        raise InvalidField(name, _short(value), remedy) from error


def _messages(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidField("messages", _short(value), "send a list of at least one message")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            remedy = 'send {"role": ..., "content": ...}'
            raise InvalidField(f"messages[{index}]", _short(message), remedy)
    return tuple(value)


def _max_tokens(kind: Kind, body: Mapping[str, Any]) -> int | None:
    asked = _whole(body, "max_tokens", 1, OUTPUT_TOKENS_MAX)
    if kind is Kind.CHAT:
        newer = _whole(body, "max_completion_tokens", 1, OUTPUT_TOKENS_MAX)
        return asked if newer is None else newer
    return asked


def _stream_options(body: Mapping[str, Any], *, stream: bool) -> Mapping[str, Any]:
    options = body.get("stream_options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        remedy = 'send {"include_usage": true} or leave it out'
        raise InvalidField("stream_options", _short(options), remedy)
    if not stream:
        raise InvalidField("stream_options", _short(options), "send it only with stream=true")
    return options


def _only_one(body: Mapping[str, Any], name: str) -> None:
    value = body.get(name)
    if value is None or (value == 1 and not isinstance(value, bool)):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidField(name, _short(value), "send 1 or leave it out")
    raise _not_offered(name, value, "send 1: one hand-over carries one sequence")


def _no_booleans(body: Mapping[str, Any], kind: Kind) -> None:
    """Raises InvalidField: true or false where a number belongs (a chat's `logprobs` is one)."""
    for name in NUMBERS:
        if isinstance(body.get(name), bool):
            raise InvalidField(name, body[name], "send a number, or leave it out")
    if kind is Kind.COMPLETIONS and isinstance(body.get("logprobs"), bool):
        raise InvalidField("logprobs", body["logprobs"], "send a whole number, or leave it out")


def _unsupported(body: Mapping[str, Any], name: str) -> None:
    if body.get(name) is not None:
        raise _not_offered(name, _short(body[name]))


def _not_offered(name: str, value: object, remedy: str = "leave it out") -> InvalidField:
    return InvalidField(name, value, remedy, f"{name}={value!r} is not supported; {remedy}")


def _whole(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidField(name, _short(value), f"send a whole number from {low} to {high}")
    return value


def _boolean(body: Mapping[str, Any], name: str, where: str = "") -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidField(where + name, _short(value), "send true or false")
    return value


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidField(name, _short(value), "send text")
    return value


def _milliseconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        if name not in headers:
            continue
        given = headers[name]
        try:
            value = float(given)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not 0 < value <= 1e9:
            raise InvalidField(name, given, "send milliseconds as a number above 0")
        return value / 1000.0
    return None


def _short(value: object) -> object:
    """A value that is safe to repeat: long ones are cut, huge lists are not printed."""
    if isinstance(value, str):
        return value if len(value) <= 80 else value[:77] + "..."
    if isinstance(value, list):
        return value if len(value) <= 8 else [*value[:8], "..."]
    if isinstance(value, dict):
        return dict.fromkeys(list(value)[:8], "...")
    return value
