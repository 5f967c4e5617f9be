"""What engines tell of themselves: vLLM and SGLang by table, forward passes, and broken pages."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane_planner.signals import engines, exposition, forward_pass
from readyplane_planner.signals.outside import EngineLoad
from readyplane_planner.signals.queries import answer, query

VLLM = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000",gpu_memory="0.9"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000",gpu_memory="0.9"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 5000.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 5000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1500.0
vllm:generation_tokens_total{engine="0",model_name="m"} 700.0
vllm:iteration_tokens_total_bucket{engine="0",le="1.0"} 9.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 42.0
vllm:iteration_tokens_total_count{engine="1",model_name="m"} 44.0
process_start_time_seconds 1.75e+09
"""
SGLANG = """
sglang:num_running_reqs{tp_rank="0",model_name="m"} 5.0
sglang:num_running_reqs{tp_rank="1",model_name="m"} 5.0
sglang:num_queue_reqs{tp_rank="0",model_name="m"} 1.0
sglang:token_usage{tp_rank="0",model_name="m"} 0.5
sglang:cache_config_info{page_size="64",num_pages="100",tp_rank="0"} 1.0
sglang:realtime_tokens_total{mode="prefill_compute",tp_rank="0"} 900.0
sglang:realtime_tokens_total{mode="prefill_compute",tp_rank="1"} 900.0
sglang:realtime_tokens_total{mode="prefill_cache",tp_rank="0"} 4000.0
sglang:realtime_tokens_total{mode="decode",tp_rank="0"} 300.0
"""


def test_vllm_is_added_up_over_its_engines() -> None:
    """Requests and tokens are sums, shares are means, and what a cache held was not computed."""
    load, life, bad = engines.read(VLLM, "vllm")
    assert load == EngineLoad(
        running=7,
        waiting=2,
        kv_usage=0.5,
        kv_tokens=0.5 * 2000 * 16,
        kv_capacity_tokens=2000 * 16.0,
        prefill_tokens_total=8500.0,
        decode_tokens_total=700.0,
        iterations_total=43.0,
    )
    assert life == "1750000000.000" and bad == ()


def test_sglang_tells_the_same_on_every_rank() -> None:
    load, life, bad = engines.read(SGLANG, "sglang")
    assert load == EngineLoad(
        running=5,
        waiting=1,
        kv_usage=0.5,
        kv_tokens=3200.0,
        kv_capacity_tokens=6400.0,
        prefill_tokens_total=900.0,
        decode_tokens_total=300.0,
    )
    assert life == "" and bad == ()


@pytest.mark.parametrize(
    ("line", "field", "refused"),
    [
        ("vllm:num_requests_running NaN", "running", "vllm:num_requests_running"),
        ("vllm:num_requests_waiting +Inf", "waiting", "vllm:num_requests_waiting"),
        ("vllm:generation_tokens_total -3", "decode_tokens_total", "generation_tokens_total"),
        ("vllm:kv_cache_usage_perc 37", "kv_usage", "kv_cache_usage_perc=37 of 1"),
        ("vllm:num_requests_running{engine=0} 1", "running", "1 lines that are no metrics"),
        ('vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1', "kv_tokens", ""),
    ],
)
def test_a_number_that_is_none_is_unknown_and_named(line: str, field: str, refused: str) -> None:
    load, _life, bad = engines.read(line, "vllm")
    assert getattr(load, field) is None
    assert any(refused in name for name in bad) if refused else not bad


def test_another_page_than_an_engines_tells_nothing() -> None:
    for text in ("", "<html>404</html>", SGLANG):
        assert engines.read(text, "vllm")[0] == EngineLoad()


def test_the_old_name_is_read_where_the_new_one_is_not_there() -> None:
    assert engines.read("vllm:gpu_cache_usage_perc 0.4", "vllm")[0].kv_usage == 0.4


@pytest.mark.parametrize(
    ("line", "labels", "value"),
    [
        ("x 1", {}, 1.0),
        ('x{a="b"} 1.5e3 1700000000000', {"a": "b"}, 1500.0),
        ('x{a="b,c",d="}"} 2', {"a": "b,c", "d": "}"}, 2.0),
        (r'x{a="say \"hi\"\n",} 3', {"a": 'say "hi"\n'}, 3.0),
    ],
)
def test_lines_as_the_format_has_them(line: str, labels: dict[str, str], value: float) -> None:
    found, bad = exposition.read(f"{line}\ny 7\n", {"x"})
    assert bad == 0 and len(found) == 1
    assert (dict(found[0].labels), found[0].value) == (labels, value)


def test_every_table_gives_numbers_that_a_load_knows() -> None:
    for table in engines.TABLES.values():
        assert set(table.rows) <= set(engines.WANTED)


# --------------------------------------------------------------------------- forward passes


def document(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "version": 1,
        "worker_id": "w",
        "dp_rank": 0,
        "counter_id": 12,
        "wall_time": 0.02,
        "scheduled_requests": {
            "num_prefill_requests": 1,
            "sum_prefill_tokens": 512,
            "sum_prefill_kv_tokens": 100,
            "num_decode_requests": 3,
            "sum_decode_kv_tokens": 900,
        },
        "queued_requests": {
            "num_prefill_requests": 2,
            "sum_prefill_tokens": 4000,
            "num_decode_requests": 0,
        },
    }
    return made | changes


def test_ranks_of_a_worker_are_added_up() -> None:
    one, two = (forward_pass.read(document(dp_rank=rank))[0] for rank in (0, 1))
    assert one is not None and two is not None and not one.idle
    assert forward_pass.load([one, two]) == EngineLoad(
        running=8,
        waiting=4,
        waiting_prefill_tokens=8000,
        kv_tokens=2000.0,
        iterations_total=12.0,
    )


def test_the_all_zero_document_is_idle() -> None:
    zero = {"num_prefill_requests": 0, "sum_prefill_tokens": 0, "num_decode_requests": 0}
    found, why = forward_pass.read(document(scheduled_requests=zero, queued_requests=zero))
    assert found is not None and found.idle and not why
    assert forward_pass.load([found]).kv_tokens is None, "absent is not zero"


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"version": 2}, "version 2"),
        ({"worker_id": ""}, "worker_id is empty"),
        ({"dp_rank": -1}, "no rank"),
        ({"queued_requests": None}, "is missing"),
    ],
)
def test_a_document_of_another_kind_is_left_out_with_the_reason(
    changed: dict[str, Any], word: str
) -> None:
    found, why = forward_pass.read(document(**changed))
    assert found is None and word in why
    assert forward_pass.read([1])[1] == "list is no ForwardPassMetrics map"


def test_a_broken_number_of_a_document_is_unknown_and_named() -> None:
    queued = {**document()["queued_requests"], "sum_prefill_tokens": math.nan}
    found, _why = forward_pass.read(document(queued_requests=queued))
    assert found is not None and found.bad == ("w.sum_prefill_tokens=nan",)
    assert forward_pass.load([found]).waiting_prefill_tokens is None


# --------------------------------------------------------------------------- whatever comes

JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["status", "data", "result", "resultType", "value", "metric", "x"]),
            inner | st.sampled_from(["success", "vector", "scalar"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(body=JSON)
def test_any_answer_of_a_query_is_read_and_never_raises(body: object) -> None:
    asked = query("queue", "x{$selector}", "tokens", selector={"a": "b"})
    for found in (body, {"status": "success", "data": {"resultType": "vector", "result": body}}):
        reading = answer(asked, found, asked_s=1.0)
        assert reading.value is None or (math.isfinite(reading.value) and reading.value >= 0)
        assert (reading.value is None) == bool(reading.why)


@given(lines=st.lists(st.sampled_from(VLLM.splitlines()) | st.text(max_size=40), max_size=12))
def test_any_page_is_read_and_never_raises(lines: list[str]) -> None:
    for engine in engines.TABLES:
        load, _life, _bad = engines.read("\n".join(lines), engine)
        assert all(v is None or v >= 0 for v in (load.running, load.kv_usage, load.kv_tokens))


@given(body=JSON)
def test_any_document_is_read_and_never_raises(body: object) -> None:
    given_doc = document(scheduled_requests=body, queued_requests=body)
    for found in (body, given_doc):
        read, why = forward_pass.read(found)
        assert (read is None) == bool(why)
        if read is not None:
            forward_pass.load([read, read])
