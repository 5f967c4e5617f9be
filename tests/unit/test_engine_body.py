"""What a modelled engine takes, what it refuses, and that it says which field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane_agent.engines.modelled import answer, body
from readyplane_agent.engines.modelled.handover import read_params


def ask(*, chat: bool = False, raw: bytes | None = None, **fields: Any) -> body.Ask:
    doc = {"messages": [{"role": "user", "content": "hi"}]} if chat else {"prompt": "hi"}
    data = json.dumps({"model": "m", **doc, **fields}).encode() if raw is None else raw
    return body.read_ask(data, chat=chat, model="m", vocab_size=512, max_model_len=100)


def test_a_plain_request() -> None:
    got = ask()
    assert got.prompt == tuple(answer.encode("hi"))
    assert (got.max_tokens, got.stream, got.kv, got.stop) == (None, False, None, ())


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 2),
        ("best_of", 3),
        ("echo", True),
        ("suffix", "x"),
        ("logprobs", 1),
        ("logprobs", 0),
        ("logprobs", True),
        ("top_logprobs", 5),
        ("prompt_logprobs", 0),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("functions", [{}]),
        ("function_call", "auto"),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"json": {}}),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "x"),
        ("use_beam_search", True),
        ("prompt_embeds", "AA"),
        ("truncate_prompt_tokens", 5),
        ("modalities", ["audio"]),
        ("audio", {"voice": "x"}),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("chat_template", "{{ messages }}"),
        ("documents", [{"text": "x"}]),
    ],
)
def test_what_is_not_offered_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(body.BadBody) as caught:
        ask(chat=field in {"tools", "tool_choice"}, **{field: value})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert field in caught.value.message
    assert caught.value.document()["error"]["code"] == 400


def test_every_refused_field_is_tried_above() -> None:
    cases = test_what_is_not_offered_is_refused_by_name.pytestmark[0].args[1]
    assert {case[0] for case in cases} == set(body.REFUSED_FIELDS)


@pytest.mark.parametrize("field", body.REFUSED_FIELDS)
def test_null_is_the_same_as_leaving_it_out(field: str) -> None:
    nothing: dict[str, Any] = {field: None}
    assert ask(**nothing).prompt == ask().prompt


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, 2.0]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x" * 100}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": 99}, "max_tokens"),
        ({"max_completion_tokens": 99}, "max_completion_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": 5, "stream": True}, "stream_options"),
        ({"ignore_eos": 3}, "ignore_eos"),
        ({"vllm_xargs": {"modelled_output_tokens": 0}}, "modelled_output_tokens"),
        ({"kv_transfer_params": 5}, "kv_transfer_params"),
    ],
)
def test_a_wrong_value_is_refused_and_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(body.BadBody) as caught:
        ask(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_unknown_model_is_404() -> None:
    with pytest.raises(body.BadBody) as caught:
        ask(model="other")
    assert (caught.value.status, caught.value.kind) == (404, "NotFoundError")


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"5", b'{"temperature": NaN}', b"\xff", b"[" * 9999]
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(body.BadBody):
        ask(raw=raw)


def test_a_longer_turn_begins_with_the_shorter_one() -> None:
    """So that the next turn of a conversation hits the prefix of this one and its answer."""
    first = ask(chat=True, messages=[{"role": "user", "content": "a"}])
    turn = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bc"},
        {"role": "user", "content": "d"},
    ]
    second = ask(chat=True, messages=turn)
    wanted = (*first.prompt, *answer.encode("bc"))
    assert second.prompt[: len(wanted)] == wanted


@pytest.mark.parametrize(
    "messages, param",
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
            "messages[0].tool_calls",
        ),
    ],
)
def test_messages_that_cannot_be_read(messages: Any, param: str) -> None:
    with pytest.raises(body.BadBody) as caught:
        ask(chat=True, messages=messages)
    assert caught.value.param == param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "prompt",
        "messages",
        "max_tokens",
        "stop",
        "stream",
        "kv_transfer_params",
        "vllm_xargs",
        "stream_options",
        "temperature",
        "n",
        "min_tokens",
        "stop_token_ids",
        "model",
        "cache_salt",
    ]
)


@given(st.dictionaries(NAMES, JSON, max_size=6), st.booleans())
def test_any_body_is_read_or_refused_never_worse(doc: dict[str, Any], chat: bool) -> None:
    try:
        got = body.read_ask(
            json.dumps(doc).encode(), chat=chat, model="m", vocab_size=512, max_model_len=100
        )
        if got.kv is not None:
            read_params(got.kv)
    except body.BadBody as error:
        refusal = error
    else:
        return
    assert refusal.status in (400, 404) and refusal.message


PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 20,
}


def test_hand_over_parameters() -> None:
    remote = read_params(PARAMS)
    assert remote is not None
    assert (remote.engine_id, remote.request_id, remote.port) == ("e", "r", 5600)
    assert (remote.block_ids, remote.num_tokens) == ((1, 2), 20)
    assert read_params({"do_remote_decode": True}) is None


@pytest.mark.parametrize(
    "change, param",
    [
        ({"do_remote_prefill": False}, ""),
        ({"do_remote_decode": True}, ""),
        ({"do_remote_decode": "no"}, ".do_remote_decode"),
        ({"remote_engine_id": None}, ".remote_engine_id"),
        ({"remote_request_id": 5}, ".remote_request_id"),
        ({"remote_port": True}, ".remote_port"),
        ({"remote_port": 70000}, ".remote_port"),
        ({"remote_block_ids": [1, 2]}, ".remote_block_ids"),
        ({"remote_block_ids": [[1], [2]]}, ".remote_block_ids"),
        ({"remote_block_ids": [["a"]]}, ".remote_block_ids"),
    ],
)
def test_malformed_hand_over_parameters_are_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(body.BadBody) as caught:
        read_params({**PARAMS, **change})
    assert caught.value.param == "kv_transfer_params" + param


# --------------------------------------------------------------------------- chats as tokens

CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


def tokens(**fields: Any) -> str:
    return answer.decode(body.read_tokens({"model": "m", **fields}, 100))


def test_a_chat_is_tokenised_as_it_is_answered() -> None:
    assert body.read_tokens({"messages": CHAT}, 100) == ask(chat=True, messages=CHAT).prompt
    assert tokens(messages=CHAT) == "system:be brief\nuser:hi\nassistant:"
    assert tokens(messages=CHAT, add_generation_prompt=False) == "system:be brief\nuser:hi\n"


def test_a_final_message_is_continued() -> None:
    begun = [*CHAT, {"role": "assistant", "content": "hel"}]
    fields: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert tokens(messages=begun, **fields) == "system:be brief\nuser:hi\nassistant:hel"
    assert ask(chat=True, messages=begun, **fields).prompt == body.read_tokens(
        {"messages": begun, **fields}, 100
    )


def test_a_later_turn_begins_with_the_earlier_one_and_its_answer() -> None:
    first = body.read_tokens({"messages": CHAT}, 100)
    later = [*CHAT, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]
    assert body.read_tokens({"messages": later}, 100)[: len(first) + 5] == (
        *first,
        *answer.encode("hello"),
    )


def test_a_chat_may_come_with_its_tokens() -> None:
    assert ask(chat=True, prompt_token_ids=[7, 8, 9]).prompt == (7, 8, 9)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": CHAT}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ({"messages": CHAT, "add_generation_prompt": 3}, "add_generation_prompt"),
    ],
)
def test_what_cannot_be_tokenised_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(body.BadBody) as caught:
        body.read_tokens(fields, 100)
    assert caught.value.param == param


@pytest.mark.parametrize("ids", ["text", [1, "a"], [True], [], [512], [-1]])
def test_tokens_of_a_chat_that_cannot_be(ids: Any) -> None:
    with pytest.raises(body.BadBody):
        ask(chat=True, prompt_token_ids=ids)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": "x" * 100}, "prompt"),
        ({"prompt": "é" * 50}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * 101}]}, "messages"),
        ({"prompt": [5] * 101}, "prompt"),
        ({"messages": CHAT, "prompt_token_ids": [5] * 101}, "messages"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_before_it_is_tokenised(
    fields: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> Any:
        raise AssertionError("it was worked on")

    monkeypatch.setattr(answer, "encode", never)
    monkeypatch.setattr(body, "_tokens", never)
    with pytest.raises(body.BadBody, match="maximum context length") as refused:
        ask(chat="messages" in fields, raw=json.dumps({"model": "m", **fields}).encode())
    assert (refused.value.status, refused.value.param) == (400, param)
    if isinstance(fields.get("prompt", ""), str) and "prompt_token_ids" not in fields:
        with pytest.raises(body.BadBody, match="maximum context length") as refused:
            body.read_tokens(fields, 100)
        assert (refused.value.status, refused.value.param) == (400, param)


def test_tokenize_takes_what_just_fits() -> None:
    assert len(body.read_tokens({"prompt": "x" * 99}, 100)) == 99
