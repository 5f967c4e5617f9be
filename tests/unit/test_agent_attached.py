"""An engine that already runs, and a vLLM of our own, by what they answer."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import InvalidField, Unavailable, Unsupported
from readyplane.core.worker import LoadReport, Role
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines import attached as attached_module
from readyplane_agent.engines import exchange as exchange_module
from readyplane_agent.engines.attached import AttachedEngine
from readyplane_agent.engines.child import EngineProcess
from readyplane_agent.engines.choice import engine_for
from readyplane_agent.engines.exchange import exchange
from readyplane_agent.engines.openai import OpenAiEngine, read_metrics
from readyplane_agent.engines.port import EngineSpec

METRICS = """\
# HELP vllm:num_requests_running n
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="400"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 50.0
vllm:num_preemptions_total{engine="0"} 2.0
vllm:odd NaN
broken line
"""
MODELS = {"object": "list", "data": [{"id": "m", "max_model_len": 2048}]}

Route = Callable[[dict[str, Any]], Any]


@asynccontextmanager
async def answering(**routes: Any) -> AsyncIterator[str]:
    """A small HTTP server: path -> bytes, document, (status, document) or a function of the body."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = [h for h in head.split("\r\n") if h.lower().startswith("content-length")]
            size = int(length[0].split(":")[1]) if length else 0
            body = json.loads(await reader.readexactly(size)) if size else {}
            name = head.split(" ")[1].strip("/").replace("/", "_")
            found = routes.get(name, (404, {"error": {"message": f"no {name}"}}))
            if callable(found):
                found = found(body)
            status, found = found if isinstance(found, tuple) else (200, found)
            raw = found if isinstance(found, bytes) else json.dumps(found).encode()
            writer.write(
                f"HTTP/1.1 {status} X\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
            )
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def vllm_like(**more: Any) -> dict[str, Any]:
    return {
        "health": b"",
        "v1_models": MODELS,
        "metrics": METRICS.encode(),
        "version": {"version": "0.32.0"},
        **more,
    }


def attached(url: str) -> AttachedEngine:
    return AttachedEngine(url, model="m", profile="h200-slow10", clock=SystemClock())


async def test_what_a_running_vllm_tells() -> None:
    async with answering(**vllm_like()) as url:
        engine = attached(url)
        await engine.wait_ready(stall_s=5)
        told = engine.serving()
        assert not told.moves  # R22.2: vLLM says so, and is drained by finishing
        assert (told.kv_total_blocks, told.block_size, told.max_model_len) == (400, 16, 2048)
        assert told.kv.engine_version == "vllm/0.32.0"
        assert told.kv.model_digest == "attached:m"
        load = await engine.load_report()
        assert (load.running, load.waiting, load.kv_used_blocks) == (3, 1, 100)
        assert (load.prefill_tokens_total, load.preemptions_total) == (1000, 2)
        assert load.iterations_total is None, "unknown is not zero"
        assert not await engine.is_idle()
        await engine.stop()


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"v1_models": {"data": [{"id": "other", "max_model_len": 1}]}}, InvalidField, "other"),
        ({"metrics": b""}, InvalidField, "num_gpu_blocks"),
        ({"v1_models": {"data": [{"id": "m"}]}}, InvalidField, "max_model_len"),
        ({"v1_models": b"<html>"}, Unavailable, "no JSON"),
        ({"v1_models": (404, {})}, InvalidField, "engine-url|not supported"),
        ({"health": (503, {"error": "loading"})}, Unavailable, "loading"),
    ],
)
async def test_what_cannot_be_attached_is_said(
    change: dict[str, Any], error: type[Exception], says: str
) -> None:
    async with answering(**vllm_like(**change)) as url:
        with pytest.raises(error, match=says):
            await attached(url).wait_ready(stall_s=0.1)


async def test_nobody_there() -> None:
    with pytest.raises(Unavailable, match="check that the engine runs"):
        await attached("http://127.0.0.1:9").wait_ready(stall_s=0.1)


async def test_a_bad_read_gives_the_last_load_with_its_age() -> None:
    broken = False

    def metrics(body: dict[str, Any]) -> Any:
        return (500, {"error": "no"}) if broken else METRICS.encode()

    async with answering(**vllm_like(metrics=metrics)) as url:
        engine = attached(url)
        broken = True
        assert await engine.load_report() == LoadReport()
        broken = False
        good = await engine.load_report()
        broken = True
        await asyncio.sleep(0.05)
        old = await engine.load_report()
        assert old.running == good.running and old.age_s >= 0.05


async def test_an_attached_engine_that_is_gone_for_long_is_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attached_module, "GONE_AFTER_S", 0.1)
    async with answering(**vllm_like()) as url:
        engine = attached(url)
        await engine.load_report()
    await engine.load_report()
    assert engine.returncode is None, "one bad read is no death"
    await asyncio.sleep(0.12)
    await engine.load_report()
    assert engine.returncode == 1


def completion(**more: Any) -> dict[str, Any]:
    choice = {"text": "hi", "finish_reason": "stop", **more}
    return {"choices": [choice], "usage": {"prompt_tokens": 3}}


async def test_token_ids_are_the_engines_own_where_it_gives_them() -> None:
    asked: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> Any:
        asked.append(body)
        return completion(token_ids=[4, 5])

    async with answering(v1_completions=answer) as url:
        client = OpenAiEngine(url, model="m")
        found = await client.generate(
            (1, 2, 3), max_tokens=2, ignore_eos=True, kv_transfer_params={"do_remote_decode": True}
        )
        assert found.token_ids == (4, 5) and found.prompt_tokens == 3
        assert asked[0]["prompt"] == [1, 2, 3] and asked[0]["temperature"] == 0
        assert asked[0]["ignore_eos"] is True
        assert asked[0]["kv_transfer_params"] == {"do_remote_decode": True}


async def test_else_they_come_from_its_tokenizer_else_from_the_text() -> None:
    async with answering(v1_completions=completion(), tokenize={"tokens": [9, 8]}) as url:
        assert (await OpenAiEngine(url, model="m").generate((1,), max_tokens=2)).token_ids == (9, 8)
    async with answering(v1_completions=completion(), tokenize=(500, {})) as url:
        found = await OpenAiEngine(url, model="m").generate((1,), max_tokens=2)
        assert found.token_ids == tuple(b"hi")


@pytest.mark.parametrize(
    "answer, error",
    [
        ((400, {"error": {"message": "too long"}}), InvalidField),
        ((422, {"message": "bad"}), InvalidField),
        ((404, {}), Unsupported),
        ((429, {"error": "busy"}), Unavailable),
        ((500, b"oops"), Unavailable),
        ({"choices": []}, Unavailable),
    ],
)
async def test_refusals_become_core_errors(answer: Any, error: type[Exception]) -> None:
    async with answering(v1_completions=answer) as url:
        with pytest.raises(error):
            await OpenAiEngine(url, model="m").generate((1,), max_tokens=2)


def test_metrics_are_read_by_name_and_info_label() -> None:
    found = read_metrics(METRICS.encode())
    assert found["vllm:cache_config_info.num_gpu_blocks"] == 400
    assert found["vllm:num_requests_running"] == 3
    assert "vllm:odd" not in found and "broken" not in found
    summed = read_metrics(b'a_total{x="1"} 2\na_total{x="2"} 3\nb_bucket{le="1"} 4\nb_count 5\n')
    assert summed["a_total"] == 5


# --------------------------------------------------------------------------- exchange


async def raw_server(answer: bytes, *, hold: bool = False) -> tuple[asyncio.Server, str]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            if hold:
                await asyncio.sleep(30)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_chunked_answers_are_put_together() -> None:
    body = (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n"
    )
    server, url = await raw_server(body)
    assert (await exchange(url, "/x")).body == b"abcde"
    server.close()


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", b"nonsense\r\n\r\n", b"\r\n\r\n"],
)
async def test_broken_answers_are_unavailable(answer: bytes) -> None:
    server, url = await raw_server(answer)
    with pytest.raises(Unavailable):
        await exchange(url, "/x")
    server.close()


async def test_a_slow_answer_has_a_bound() -> None:
    server, url = await raw_server(b"HTTP/1.1 200 OK\r\n", hold=True)
    with pytest.raises(Unavailable, match=r"no answer within 0\.1 s"):
        await exchange(url, "/x", timeout_s=0.1)
    server.close()


async def test_an_answer_without_end_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "ANSWER_BYTES_MAX", 10)
    server, url = await raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n" + b"a" * 11)
    with pytest.raises(Unavailable, match="above 10 B"):
        await exchange(url, "/x")
    server.close()


async def test_a_wrong_url_is_said() -> None:
    with pytest.raises(InvalidField, match="http://HOST:PORT"):
        await exchange("ftp://x", "/")


# --------------------------------------------------------------------------- vLLM


def spec(tmp_path: Path, **more: Any) -> EngineSpec:
    facts: dict[str, Any] = {
        "engine_id": "w1-a",
        "role": Role.PREFILL,
        "model": "m",
        "manifest_digest": "sha256:x",
        "arena_path": tmp_path / "arena",
        "tensor_table_path": tmp_path / "tensors.json",
        "config_path": tmp_path / "config.json",
        "tokenizer_path": None,
        "profile": "h200-slow10",
        "work_dir": tmp_path,
        "log_path": tmp_path / "engine.log",
        **more,
    }
    return EngineSpec(**facts)


async def test_a_child_ends_by_signal_then_by_force(tmp_path: Path) -> None:
    child = EngineProcess()
    script = "trap '' TERM; echo started; while :; do sleep 0.1; done"
    await child.start(["sh", "-c", script], log_path=tmp_path / "log", environment={})
    async with asyncio.timeout(5):
        while "started" not in child.tail(5):
            await asyncio.sleep(0.02)
    assert child.died() is None
    await child.stop(grace_s=0.2)
    assert child.returncode == -9
    assert "ended with -9" in str(child.died())


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InvalidField, match="modelled, vllm, sglang or attached"):
        engine_for("magic", clock=SystemClock())
