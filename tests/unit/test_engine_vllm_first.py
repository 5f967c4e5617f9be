"""First requests that make a vLLM compile: they are a part of its start (without one)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import Unavailable
from readyplane.core.startup import SegmentName
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines.vllm import VllmEngine
from readyplane_agent.engines.vllm_first import FIRST, PROMPT
from tests.unit.test_engine_vllm import program_in, spec

STALLS_S = 0.4
LOGPROBS = "first request with logprobs"
LIMITS = {"stall_s": 20.0, "limit_s": 40.0}
# A server with vLLM's paths whose first answer with logprobs takes its time.
SERVER = """
import http.server, json, os, sys, time

def mark(name, detail=""):
    line = json.dumps([name, time.monotonic(), os.getpid(), detail]) + "\\n"
    with open(os.environ["READYPLANE_VLLM_MARKS"], "a") as file:
        file.write(line)

PAGE = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="64"} 1.0'
MODELS = {"data": [{"id": "m", "max_model_len": 256}]}
ANSWER = {"choices": [{"text": "a", "finish_reason": "length", "token_ids": [7]}]}

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass

    def say(self, status, body):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        told = {"/metrics": PAGE.encode(), "/v1/models": json.dumps(MODELS).encode()}
        self.say(200, told.get(self.path, b"{}"))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with open("asked.jsonl", "a") as file:
            file.write(json.dumps(body) + "\\n")
        HOW
        self.say(200, json.dumps(ANSWER).encode())

words = json.loads(sys.stdin.buffer.readline())["words"]
port = int(words[words.index("--port") + 1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
facts = dict(block_size=16, kv_dtype="bfloat16", kv_layout="x", tp=1, positions="p", max_num_seqs=8)
mark("facts", json.dumps(facts))
mark("engine_up")
server.serve_forever()
"""


def engine_that(how: str, tmp_path: Path) -> VllmEngine:
    """An engine whose server does `how` with a completion before it answers."""
    server = tmp_path / "server.py"
    server.write_text(SERVER.replace("HOW", how))
    script = f"exec {sys.executable} {server}"
    return VllmEngine(clock=SystemClock(), program=program_in(tmp_path / "bin", script))


def asked(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "asked.jsonl").read_text().splitlines()]


async def test_what_the_first_request_waits_for_is_done_before_it_is_ready(tmp_path: Path) -> None:
    """Else it would be a user's, and those beside it would wait as well."""
    engine = engine_that(f"time.sleep({STALLS_S})", tmp_path)
    await engine.start(spec(tmp_path))
    try:
        await engine.wait_ready(**LIMITS)
        (body,) = asked(tmp_path)
        assert body["logprobs"] == 1
        assert body["max_tokens"] == 1
        assert body["prompt"] == list(PROMPT)
        (took,) = [s for s in engine.startup_segments() if s.detail == LOGPROBS]
        assert took.name is SegmentName.WARMUP, "a part of T_ready, by name"
        assert took.end_s is not None
        assert took.end_s - took.start_s >= STALLS_S
        assert engine.serving().max_model_len == 256
    finally:
        await engine.stop()


@pytest.mark.parametrize("status", [400, 500])
async def test_an_engine_that_answers_none_of_them_is_ready_all_the_same(
    tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """`--max-logprobs 0`: nobody is answered, so nobody waits; it is said."""
    engine = engine_that(f"return self.say({status}, b'no')", tmp_path)
    await engine.start(spec(tmp_path))
    try:
        await engine.wait_ready(**LIMITS)
        assert "a request with logprobs was not answered" in caplog.text
        assert len(asked(tmp_path)) == len(FIRST)
    finally:
        await engine.stop()


async def test_an_engine_that_ends_at_one_of_them_is_not_ready(tmp_path: Path) -> None:
    engine = engine_that("print('no compiler', flush=True); os._exit(3)", tmp_path)
    await engine.start(spec(tmp_path))
    try:
        with pytest.raises(Unavailable, match=r"ended with .*3.*no compiler"):
            await engine.wait_ready(**LIMITS)
    finally:
        await engine.stop()
