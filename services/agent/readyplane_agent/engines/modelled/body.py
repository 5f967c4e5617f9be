"""OpenAI-style bodies in vLLM's dialect: what is asked, what is refused, what is answered.

Owns reading `/v1/completions` and `/v1/chat/completions` into an `Ask`, the chat template, and
writing answers and chunks. What a modelled engine cannot do (several answers, tools, log-probabilities, structured
output…) is refused by name with status 400, never ignored; sampling parameters are checked and then
have no effect, since the answer is greedy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from readyplane_agent.engines.modelled import answer

# Field -> what may be given without being refused.
_REFUSED: dict[str, Callable[[Any], bool]] = {
    "n": lambda v: v in (None, 1),
    "best_of": lambda v: v in (None, 1),
    "echo": lambda v: not v,
    "suffix": lambda v: v in (None, ""),
    "logprobs": lambda v: v is None or v is False,
    "top_logprobs": lambda v: v in (None, 0),
    "prompt_logprobs": lambda v: v is None,
    "logit_bias": lambda v: not v,
    "tools": lambda v: not v,
    "tool_choice": lambda v: v in (None, "none"),
    "functions": lambda v: not v,
    "function_call": lambda v: v in (None, "none"),
    "response_format": lambda v: v is None or (isinstance(v, dict) and v.get("type") == "text"),
    "structured_outputs": lambda v: not v or set(v) == {"choice"},
    "guided_json": lambda v: v is None,
    "guided_regex": lambda v: v is None,
    "guided_choice": lambda v: v is None,
    "guided_grammar": lambda v: v is None,
    "use_beam_search": lambda v: not v,
    "prompt_embeds": lambda v: not v,
    "truncate_prompt_tokens": lambda v: v is None,
    "modalities": lambda v: v in (None, ["text"]),
    "audio": lambda v: not v,
    "bad_words": lambda v: not v,
    "chat_template": lambda v: v is None,
    "documents": lambda v: not v,
    "allowed_token_ids": lambda v: not v,
}
REFUSED_FIELDS = tuple(_REFUSED)
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 1e9),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "top_k": (-1, 2**31),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 1e9),
}
STOPS_MAX = 16
CHOICES_MAX = 64


class BadBody(Exception):
    """A request that is refused: HTTP status, OpenAI error type and the parameter's name."""

    def __init__(
        self, message: str, param: str | None = None, *, status: int = 400, kind: str = ""
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status = message, param, status
        self.kind = kind or ("NotFoundError" if status == 404 else "BadRequestError")

    def document(self) -> dict[str, Any]:
        """The error body."""
        return error_document(self.message, self.kind, self.param, self.status)


def error_document(message: str, kind: str, param: str | None, code: int) -> dict[str, Any]:
    """An OpenAI error body as vLLM writes it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True)
class Continues:
    """Where another engine stopped: `output` tokens it had given, and the state behind the next.

    Attributes:
        response_id: of the answer as its client knows it. draws, choices: see `answer_state`.
    """

    output: tuple[int, ...]
    response_id: str
    draws: int | None
    choices: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, checked.

    Attributes:
        chat: by /v1/chat/completions. prompt: token ids. max_tokens: None when not given.
        modelled_output_tokens: true length, None for the rule. kv: kv_transfer_params, None
            without. usage_chunk, usage_always: `stream_options`. ids: `return_token_ids`.
        seed: of a sampled answer, None for a greedy one. choices: texts the answer is one of.
        continues: what another engine has begun, None for a request of its own.
    """

    chat: bool
    prompt: tuple[int, ...]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop: bool
    stream: bool
    usage_chunk: bool
    usage_always: bool
    ids: bool
    modelled_output_tokens: int | None
    kv: Mapping[str, Any] | None
    cache_salt: str
    request_id: str
    seed: int | None = None
    choices: tuple[tuple[int, ...], ...] = ()
    continues: Continues | None = None


def read_ask(
    raw: bytes, *, chat: bool, model: str, vocab_size: int, max_model_len: int, request_id: str = ""
) -> Ask:
    """Read a body.

    Raises:
        BadBody: what is wrong, with the parameter's name.
    """
    doc = read_json(raw)
    if doc.get("model", model) != model:
        raise BadBody(f"The model `{doc['model']}` does not exist.", "model", status=404)
    _refuse_unsupported(doc)
    for name, (low, high) in _RANGES.items():
        _number(doc, name, low, high)
    prompt = _chat_prompt(doc, max_model_len) if chat else _prompt(doc, max_model_len)
    _check_prompt(prompt, vocab_size)
    limit = "max_completion_tokens" if doc.get("max_completion_tokens") is not None else ""
    limit = limit or "max_tokens"
    max_tokens = _whole(doc, limit, 1, 2**31)
    if max_tokens is not None and len(prompt) + max_tokens > max_model_len:
        raise BadBody(
            f"'{limit}' is too large: {max_tokens}. This model's maximum context length is "
            f"{max_model_len} tokens and your request has {len(prompt)} input tokens.",
            limit,
        )
    min_tokens = _whole(doc, "min_tokens", 0, 2**31) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise BadBody(f"min_tokens must be at most {limit} ({max_tokens})", "min_tokens")
    options = _object(doc, "stream_options")
    stream = _flag(doc, "stream")
    if options and not stream:
        raise BadBody("Stream options can only be defined when `stream=True`.", "stream_options")
    xargs = _object(doc, "vllm_xargs")
    return Ask(
        chat=chat,
        prompt=prompt,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=_flag(doc, "ignore_eos"),
        stop=_stops(doc),
        stop_token_ids=_token_list(doc, "stop_token_ids"),
        include_stop=_flag(doc, "include_stop_str_in_output"),
        stream=stream,
        usage_chunk=_flag(options, "include_usage"),
        usage_always=_flag(options, "continuous_usage_stats"),
        ids=_flag(doc, "return_token_ids"),
        modelled_output_tokens=_whole(xargs, "modelled_output_tokens", 1, 2**31),
        kv=_object(doc, "kv_transfer_params") or None,
        cache_salt=str(doc.get("cache_salt") or ""),
        request_id=str(doc.get("request_id") or request_id),
        seed=_seed(doc),
        choices=_choices(doc),
        continues=_continues(doc, vocab_size),
    )


def _seed(doc: Mapping[str, Any]) -> int | None:
    """A seed with a temperature samples; an answer without either is greedy."""
    seed = doc.get("seed")
    if seed is None or not doc.get("temperature"):
        return None
    if type(seed) is not int:
        raise BadBody(f"seed must be a whole number, got {seed!r}", "seed")
    return int(seed)


def _choices(doc: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    where = "structured_outputs.choice"
    wanted = _object(doc, "structured_outputs").get("choice")
    if wanted is None:
        return ()
    if not isinstance(wanted, list) or not all(isinstance(t, str) and t for t in wanted):
        raise BadBody(f"{where} must be a list of non-empty texts", where)
    if not 1 <= len(wanted) <= CHOICES_MAX:
        raise BadBody(f"{where} may have 1 to {CHOICES_MAX} texts", where)
    return tuple(tuple(answer.encode(text)) for text in wanted)


def _continues(doc: Mapping[str, Any], vocab_size: int) -> Continues | None:
    """What another engine's `/move_out` said; forwarded verbatim."""
    found = _object(doc, "continuation")
    if not found:
        return None
    where = "continuation"
    tokens = found.get("output_token_ids")
    draws, choices = found.get("draws"), found.get("choices")
    if not isinstance(tokens, list) or not tokens:
        raise BadBody(f"{where}.output_token_ids must be a list of tokens", where)
    if draws is not None and not (isinstance(draws, str) and draws.isdigit()):
        raise BadBody(f"{where}.draws must be a number as text", where)
    if choices is not None and not isinstance(choices, dict):
        raise BadBody(f"{where}.choices must be an object", where)
    _check_prompt(tokens, vocab_size)
    return Continues(
        output=_tokens(tokens, where),
        response_id=str(found.get("response_id") or ""),
        draws=None if draws is None else int(draws),
        choices=choices,
    )


def read_tokens(doc: Mapping[str, Any], max_model_len: int) -> tuple[int, ...]:
    """Tokens of a `/tokenize` body: of `messages` by the chat template, or of a `prompt`.

    Too many are refused before they are made: the engine does nothing else meanwhile.

    Raises:
        BadBody: what is wrong, with the parameter's name.
    """
    _refuse_unsupported(doc)
    _flag(doc, "add_special_tokens")  # there are none to add
    if ("messages" in doc) == ("prompt" in doc):
        raise BadBody("Give either a prompt or messages", "prompt")
    if "messages" in doc:
        return _encode(_chat_text(doc), max_model_len, "messages")
    if not isinstance(doc["prompt"], str):
        raise BadBody("Give the prompt as text", "prompt")
    return _encode(doc["prompt"], max_model_len, "prompt")


def _encode(text: str, max_model_len: int, param: str) -> tuple[int, ...]:
    """A token is a byte, so that the length is known before there are tokens."""
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    _check_length(size, max_model_len, param)
    return tuple(answer.encode(text))


def _check_length(count: int, max_model_len: int, param: str) -> None:
    """The answer wants one token at least."""
    if count + 1 > max_model_len:
        raise BadBody(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"contains {count} tokens. Shorten the prompt.",
            param,
        )


def _refuse_unsupported(doc: Mapping[str, Any]) -> None:
    for name, allowed in _REFUSED.items():
        if name in doc and not allowed(doc[name]):
            raise BadBody(f"{name} is not supported by this engine; leave it out", name)


def read_json(raw: bytes) -> dict[str, Any]:
    """A JSON object.

    Raises:
        BadBody: anything else, NaN and infinities included.
    """

    def constant(text: str) -> float:
        raise ValueError(f"{text} is not JSON")

    try:
        doc = json.loads(raw, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise BadBody(f"The body is not valid JSON: {error}") from error
    if not isinstance(doc, dict):
        raise BadBody("The body must be a JSON object")
    return doc


def _prompt(doc: Mapping[str, Any], max_model_len: int) -> tuple[int, ...]:
    prompt = doc.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _encode(prompt, max_model_len, "prompt")
    if isinstance(prompt, list):
        if not {str, list}.isdisjoint(map(type, prompt)):
            raise BadBody("Several prompts in one request are not supported; send one", "prompt")
        _check_length(len(prompt), max_model_len, "prompt")
        return _tokens(prompt, "prompt")
    raise BadBody("Give the prompt as text or as a list of token ids", "prompt")


def _chat_prompt(doc: Mapping[str, Any], max_model_len: int) -> tuple[int, ...]:
    """Tokens of a chat: `prompt_token_ids` where the caller has them, else of its messages.

    The messages are checked all the same: what is refused does not depend on who tokenised.
    """
    text = _chat_text(doc)
    given = doc.get("prompt_token_ids")
    if given is None:
        return _encode(text, max_model_len, "messages")
    if not isinstance(given, list):
        raise BadBody("Give prompt_token_ids as a list of token ids", "prompt_token_ids")
    _check_length(len(given), max_model_len, "messages")
    return _tokens(given, "prompt_token_ids")


def _chat_text(doc: Mapping[str, Any]) -> str:
    """`role:text` lines and `assistant:`: the chat template of this engine.

    No space after the colon, so that a later turn's prompt begins with this prompt and its answer.
    `add_generation_prompt` (default true) and `continue_final_message` as vLLM has them.
    """
    messages = doc.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadBody("Give at least one message", "messages")
    lines: list[str] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadBody("Give each message a role and a content", where)
        if message.get("tool_calls"):
            raise BadBody("Tool calls are not supported by this engine", f"{where}.tool_calls")
        lines.append(f"{message['role']}:{_content(message.get('content'), where)}\n")
    text = "".join(lines)
    goes_on = _flag(doc, "continue_final_message")
    opens = doc.get("add_generation_prompt") is None or _flag(doc, "add_generation_prompt")
    if not goes_on:
        return text + ("assistant:" if opens else "")
    if opens:
        raise BadBody(
            "Set add_generation_prompt to false with continue_final_message",
            "continue_final_message",
        )
    return text.removesuffix("\n")


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [p.get("text") for p in content if isinstance(p, dict) and p.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(t, str) for t in texts):
            return "".join(str(t) for t in texts)
        raise BadBody("Only text parts are supported by this engine", f"{where}.content")
    raise BadBody("Give the content as text", f"{where}.content")


def _check_prompt(prompt: Sequence[int], vocab_size: int) -> None:
    if not prompt:
        raise BadBody("The prompt must have at least one token", "prompt")
    if max(prompt) >= vocab_size or min(prompt) < 0:
        raise BadBody(f"Token ids must be from 0 to {vocab_size - 1}", "prompt")


def _tokens(value: Sequence[Any], name: str) -> tuple[int, ...]:
    if not {int}.issuperset(map(type, value)):
        raise BadBody("Token ids must be whole numbers", name)
    return tuple(value)


def _token_list(doc: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = doc.get(name) or []
    if not isinstance(value, list):
        raise BadBody(f"{name} must be a list of token ids", name)
    return _tokens(value, name)


def _stops(doc: Mapping[str, Any]) -> tuple[str, ...]:
    value = doc.get("stop") or []
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise BadBody("stop must be a text or a list of non-empty texts", "stop")
    if len(stops) > STOPS_MAX:
        raise BadBody(f"stop may have at most {STOPS_MAX} texts", "stop")
    return tuple(stops)


def _number(doc: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = doc.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadBody(f"{name} must be a number from {low:g} to {high:g}, got {value!r}", name)
    return float(value)


def _whole(doc: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = doc.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise BadBody(f"{name} must be a whole number of at least {low}, got {value!r}", name)
    return int(value)


def _flag(doc: Mapping[str, Any], name: str) -> bool:
    value = doc.get(name)
    if value not in (None, True, False):
        raise BadBody(f"{name} must be true or false", name)
    return bool(value)


def _object(doc: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = doc.get(name)
    if value is not None and not isinstance(value, dict):
        raise BadBody(f"{name} must be an object", name)
    return value or {}


def usage_document(prompt: int, output: int, cached: int | None) -> dict[str, Any]:
    """Token counts of an answer."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + output,
        "completion_tokens": output,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage
