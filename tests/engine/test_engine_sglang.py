"""The SGLang adapter on a protocol double: the port suite as far as it applies, and what is SGLang's.

No real SGLang is run here (docs/sglang.md).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from readyplane.core.errors import InvalidField, Unavailable, Unsupported
from readyplane.core.identity import Canary
from readyplane.core.startup import StartMode
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane_agent.engines import sglang
from readyplane_agent.engines.port import EnginePort, EngineSpec
from readyplane_agent.engines.sglang import SglangEngine
from readyplane_agent.engines.sglang_client import Partner, read_page, sampling_params
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from tests.engine import port_suite, sglang_double
from tests.engine.engine_world import MODEL, Traits

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "tests.engine.sglang_double")
PROMPT = [40, 41, 42, 43]
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:The test .* is marked with '@pytest.mark.asyncio'"),
]

_NAMES = "SGLang's metrics have names of their own: test_metrics"
_ERRORS = "SGLang's errors are flat documents, and it judges otherwise: test_refusals"
_VLLM = "vLLM's hand-over: SGLang's legs meet under a room, test_meet…"
SILENT = {
    "completion_ids": "its OpenAI answers have no token ids: the port asks /generate",
    "completion_stops": "it says matched_stop and not stop_reason: test_stop",
    "chat_tokens": "it writes messages out itself: no tokens beside them",
    "error_model": "it answers under whatever name it is asked",
    "error_body": _ERRORS,
    "error_long": _ERRORS,
    "error_max_tokens": _ERRORS,
    "error_temperature": _ERRORS,
    "error_stream_options": _ERRORS,
    "error_port": "it takes max_new_tokens of 0: test_refusals asks with -1",
    "path_tokenize": "its /detokenize says text and not prompt: test_tokens",
    "path_event_sources": "a path of the modelled engine",
    "handover_fields": _VLLM,
    "handover_answer": _VLLM,
    "handover_chat": _VLLM,
    "handover_counted": _VLLM,
    "handover_holds": _VLLM,
    "handover_stale": _VLLM,
    "handover_foreign": _VLLM,
    "handover_other_prompt": _VLLM,
    "handover_expired": _VLLM,
    "handover_nobody": _VLLM,
    "handover_stream": _VLLM,
    "handover_wrong_kv": _VLLM,
    "handover_malformed": _VLLM,
    "metric_gauges": _NAMES,
    "metric_counters": _NAMES,
    "metric_histograms": _NAMES,
    "metric_cache_config": _NAMES,
    "metric_load": "it counts no iterations: test_metrics",
    "cache_hits": _NAMES,
    "cache_salt": "its KV events and metrics tell nothing of salts",
    "abort_releases": _VLLM,
    "abort_by_id": _VLLM,
    "abort_running": "it has /abort_request for one rid: test_abort",
    "port_serving": "a decode server is met by nobody, so it has no address for that: test_serving",
}
"""Checks of the suite that are not made, by their function, and why."""


@dataclass
class DoubleFactory:
    """Adapters over doubles, each with the demo model's files."""

    folder: Path
    demo: DemoModel
    traits: Traits
    _names: Any = field(default_factory=count)

    def spec(self, name: str, *, role: Role = Role.BOTH, **more: Any) -> EngineSpec:
        work = self.folder / f"{name}-{next(self._names)}"
        (work / "files").mkdir(parents=True)
        for path in self.demo.folder.iterdir():
            (work / "files" / path.name).symlink_to(path)
        (work / "config.json").write_text(json.dumps({"block_size": 16}))
        return EngineSpec(
            engine_id=work.name,
            role=role,
            model=MODEL,
            manifest_digest="sha256:" + "5" * 64,
            arena_path=Path(os.devnull),
            tensor_table_path=Path(os.devnull),
            config_path=work / "config.json",
            tokenizer_path=None,
            profile="h200-llama8b-fp8",
            work_dir=work,
            log_path=work / "engine.log",
            kv_tokens=16 * 4096,
            environment={"PYTHONPATH": str(ROOT), "SGLANG_DOUBLE_PART_S": "0.3"},
            **more,
        )

    @asynccontextmanager
    async def start(self, name: str, **options: Any) -> AsyncIterator[SglangEngine]:
        engine = SglangEngine(clock=SystemClock(), program=PROGRAM)
        await engine.start(self.spec(name, **options))
        try:
            await engine.wait_ready(stall_s=20.0, limit_s=40.0)
            yield engine
        finally:
            await engine.stop(grace_s=5.0)
            assert engine.returncode is not None


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> DoubleFactory:
    folder = tmp_path_factory.mktemp("sglang")
    demo = make_demo_model(folder / "model", size_bytes=6 * 2**20, shards=1, max_model_len=4096)
    golden = sglang_double.answer_of(demo.folder, PROMPT, 8)
    return DoubleFactory(folder, demo, Traits(MODEL, Canary(tuple(PROMPT), golden), 0.0, SILENT))


@dataclass
class Trio:
    """One that answers alone, and a pair that meets."""

    world: port_suite.World
    p: SglangEngine
    d: SglangEngine

    @property
    def one(self) -> EnginePort:
        return self.world.one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trio(factory: DoubleFactory) -> AsyncIterator[Trio]:
    async with AsyncExitStack() as stack:
        roles = {"one": Role.BOTH, "p": Role.PREFILL, "d": Role.DECODE}
        one, p, d = await asyncio.gather(
            *(
                stack.enter_async_context(factory.start(name, role=role))
                for name, role in roles.items()
            )
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        world = port_suite.World(one, p, d, factory.traits, http, factory, count(1))
        yield Trio(world, p, d)


def partner_of(engine: SglangEngine, p: SglangEngine) -> Partner:
    return Partner(engine.client.url, p.client.bootstrap)


ASKED = [c for c in port_suite.CHECKS if c.run.__name__ not in SILENT]


@pytest.mark.parametrize("check", ASKED, ids=[f"{c.area}-{c.run.__name__}" for c in ASKED])
async def test_port(trio: Trio, check: port_suite.Check) -> None:
    await check.run(trio.world)


def test_what_is_not_asked_is_a_check_and_said_why() -> None:
    known = {c.run.__name__ for c in port_suite.CHECKS}
    assert set(SILENT) <= known and all(SILENT.values())
    document = (ROOT / "docs" / "sglang.md").read_text()
    for check in port_suite.CHECKS:
        row = f"| {check.area} | {check.field} | {SILENT.get(check.run.__name__, 'checked')} |"
        assert row in document, f"write the table anew: python -m {__name__}"


# --------------------------------------------------------------------------- legs that meet


async def test_meet_and_the_answer_is_that_of_one_alone(trio: Trio) -> None:
    for length in (1, 15, 16, 17, 200):
        prompt = trio.world.prompt(length)
        alone = await trio.one.generate(prompt, max_tokens=20, ignore_eos=True)
        for engine, other in ((trio.p, trio.d), (trio.d, trio.p)):
            engine.client.partner = partner_of(other, trio.p)
            got = await engine.generate(prompt, max_tokens=20, ignore_eos=True)
            engine.client.partner = None
            assert got.token_ids == alone.token_ids
            assert (got.prompt_tokens, got.finish_reason) == (length, "length")


async def test_a_prefill_server_alone_gives_its_first_token_and_a_decode_server_none(
    trio: Trio,
) -> None:
    prompt = trio.world.prompt()
    alone = await trio.one.generate(prompt, max_tokens=3, ignore_eos=True)
    got = await trio.p.generate(prompt, max_tokens=3, ignore_eos=True)
    assert got.token_ids == alone.token_ids[:1]
    with pytest.raises(Unsupported, match="prefill worker"):
        await trio.d.generate(prompt, max_tokens=3)


async def test_meet_over_the_openai_paths_as_a_gateway_does(trio: Trio) -> None:
    """The same body to both, at the same time; the decode server's answer is the request's."""
    prompt = trio.world.prompt(50)
    host, _, port = trio.p.serving().bootstrap.rpartition(":")
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
    _, alone = await trio.world.post(trio.one, "/v1/completions", body)
    body |= {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": 2**52 + 7}
    (status, first), (_, both) = await asyncio.gather(
        trio.world.post(trio.p, "/v1/completions", body),
        trio.world.post(trio.d, "/v1/completions", body),
    )
    assert status == 200
    assert both["choices"] == alone["choices"]
    assert first["usage"]["completion_tokens"] == 1
    assert alone["choices"][0]["text"].startswith(first["choices"][0]["text"])


@pytest.mark.parametrize("gone", ["p", "d"])
async def test_meet_nobody_is_an_error_within_seconds(trio: Trio, gone: str) -> None:
    """A leg that fails ends the other (B71): neither waits for half an hour."""
    engine, bootstrap = (
        (trio.d, "127.0.0.1:1") if gone == "p" else (trio.p, trio.p.client.bootstrap)
    )
    engine.client.partner = Partner("http://127.0.0.1:1", bootstrap)
    try:
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable):
                await engine.generate(trio.world.prompt(), max_tokens=4, timeout_s=60.0)
        await trio.world.until(engine.is_idle)
    finally:
        engine.client.partner = None


async def test_wrong_kv_shows(trio: Trio) -> None:
    """Who decodes from another prompt's KV answers otherwise, or says that it does not fit."""
    mine, other = trio.world.prompt(64), trio.world.prompt(64)
    right = await trio.one.generate(mine, max_tokens=16, ignore_eos=True)
    host, _, port = trio.p.client.bootstrap.rpartition(":")
    room = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": 99}

    async def legs(given: list[int], taken: list[int]) -> tuple[int, ...]:
        _, got = await asyncio.gather(
            trio.p.generate(given, max_tokens=1, kv_transfer_params=room),
            trio.d.generate(taken, max_tokens=16, ignore_eos=True, kv_transfer_params=room),
        )
        return got.token_ids

    assert await legs(mine, mine) == right.token_ids
    assert await legs(other, mine) != right.token_ids
    with pytest.raises(Unavailable, match="another length"):
        await legs(other, [*mine, 5])


async def test_abort_by_rid_ends_what_waits_and_what_runs(trio: Trio) -> None:
    host, _, port = trio.p.client.bootstrap.rpartition(":")
    alone = {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": 7}
    body = {"input_ids": trio.world.prompt(), "sampling_params": {}, "rid": "mine", **alone}
    waiting = asyncio.create_task(trio.world.post(trio.p, "/generate", body))
    await trio.world.until(lambda: _busy(trio.p))
    await trio.p.client.abort("mine")
    assert (await waiting)[0] == 500
    await trio.world.until(trio.p.is_idle)


async def _busy(engine: EnginePort) -> bool:
    return not await engine.is_idle()


# --------------------------------------------------------------------------- the rest


async def test_serving(trio: Trio) -> None:
    one, p, d = (e.serving() for e in (trio.one, trio.p, trio.d))
    assert one.kv.connector == "none" and one.bootstrap == ""
    assert (
        p.kv == d.kv and p.kv.connector == "sglang/nixl" and p.kv.engine_version == "sglang/double"
    )
    assert p.bootstrap == p.kv_side_channel == trio.p.client.bootstrap and d.bootstrap == ""
    assert (one.kv_total_blocks, one.block_size, one.max_model_len) == (4096, 16, 4096)
    assert one.max_num_seqs == 64 and not one.moves and not one.flips


def grown(before: int | None, after: int | None) -> int:
    assert before is not None and after is not None
    return after - before


async def test_metrics(trio: Trio) -> None:
    """Two ranks tell the same; tokens by mode, blocks in use, and no iterations."""
    before = await trio.one.load_report()
    prompt = trio.world.prompt(50)
    await trio.one.generate(prompt, max_tokens=9, ignore_eos=True)
    after = await trio.one.load_report()
    assert (after.running, after.waiting, after.kv_used_blocks) == (0, 0, 0)
    assert after.kv_total_blocks == 4096
    assert grown(before.prefill_tokens_total, after.prefill_tokens_total) == 50
    assert grown(before.decode_tokens_total, after.decode_tokens_total) == 9
    assert after.iterations_total is None
    again = await trio.one.generate(prompt, max_tokens=9, ignore_eos=True)
    assert again.cached_tokens == 48
    later = await trio.one.load_report()
    assert grown(after.cached_tokens_total, later.cached_tokens_total) == 48
    times = await trio.one.serving_times()
    assert times.ttft_count and times.ttft_sum_s and times.kv_sum_s is None


def test_a_page_without_sglang_says_what_to_do() -> None:
    with pytest.raises(InvalidField, match="--enable-metrics"):
        read_page(b"python_info 1\n")


async def test_refusals(trio: Trio) -> None:
    with pytest.raises(InvalidField, match="max_new_tokens"):
        await trio.one.generate([5], max_tokens=-1)
    with pytest.raises(InvalidField, match=r"4097 tokens.*4096 tokens"):
        await trio.one.generate([5] * 4097, max_tokens=1)
    for body in (b"{", b"[]", b'{"model": "demo"}'):
        status, doc = await trio.world.post(trio.one, "/v1/completions", body)
        assert status == doc["code"] == 400
    with pytest.raises(InvalidField, match="bootstrap"):
        await trio.d.client.post("/generate", {"input_ids": [5]}, timeout_s=5.0)


async def test_stop(trio: Trio) -> None:
    prompt = trio.world.prompt()
    whole = await trio.one.generate(prompt, max_tokens=30, ignore_eos=True)
    stop = whole.text[10:13]
    fields = {"max_tokens": 30, "ignore_eos": True, "stop": [stop]}
    (choice,) = (await trio.world.complete(trio.one, prompt=prompt, **fields))["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", stop)
    assert choice["text"] == whole.text[: whole.text.index(stop)]


async def test_tokens(trio: Trio) -> None:
    tokens = await trio.one.tokenize("hello")
    _, doc = await trio.world.post(trio.one, "/detokenize", {"model": MODEL, "tokens": tokens})
    assert doc["text"] == "hello"


async def test_its_log_tells_the_parts_of_its_start(trio: Trio, factory: DoubleFactory) -> None:
    names = [str(s.name) for s in trio.one.startup_segments()]
    assert names == ["runtime_import", "host_to_device", "kv_profile", "cuda_graph", "warmup"]
    for before, after in pairwise(trio.one.startup_segments()):
        assert before.end_s == after.start_s
    async with factory.start("eager", mode=StartMode.EAGER) as engine:
        assert "cuda_graph" not in [str(s.name) for s in engine.startup_segments()]


async def test_a_start_that_fails_says_why(factory: DoubleFactory) -> None:
    engine = SglangEngine(clock=SystemClock(), program=PROGRAM)
    await engine.start(replace(factory.spec("flags"), extra_args=("--no-such-flag",)))
    with pytest.raises(Unavailable, match="no-such-flag"):
        await engine.wait_ready(stall_s=20.0)
    nowhere = SglangEngine(clock=SystemClock(), program=("no-such-program",))
    with pytest.raises(Unavailable, match="not on PATH"):
        await nowhere.start(factory.spec("nowhere"))


def test_the_command_line(factory: DoubleFactory) -> None:
    """Names and values as in SGLang's documentation."""
    spec = replace(
        factory.spec("words", role=Role.PREFILL), mode=StartMode.EAGER, max_num_seqs=9,
        extra_args=("--tp-size", "2"),
    )  # fmt: skip
    words = sglang.command(
        spec, model_dir=Path("files"), port=1, bootstrap_port=2, events=(3, 4), page_tokens=16
    )
    assert words[:3] == ["python3", "-m", "sglang.launch_server"]
    flags = dict(pairwise(words))
    assert flags["--disaggregation-mode"] == "prefill"
    assert flags["--disaggregation-bootstrap-port"] == "2"
    assert flags["--disaggregation-transfer-backend"] == "nixl"
    assert flags["--page-size"] == "16" and flags["--max-running-requests"] == "9"
    assert json.loads(flags["--kv-events-config"])["replay_endpoint"] == "tcp://127.0.0.1:4"
    assert "--disable-cuda-graph" in words and words[-2:] == ["--tp-size", "2"]
    both = sglang.command(
        factory.spec("both"), model_dir=Path("files"), port=1, bootstrap_port=2, events=(3, 4),
        page_tokens=16,
    )  # fmt: skip
    assert "--disaggregation-bootstrap-port" not in both
    assert both[both.index("--disaggregation-mode") + 1] == "null"


def test_sampling_words() -> None:
    more = {"temperature": 0.5, "structured_outputs": {"choice": ["a", "b"]}, "ignore_eos": True}
    assert sampling_params(4, more) == {
        "max_new_tokens": 4, "temperature": 0.5, "ignore_eos": True, "regex": "(a|b)",
    }  # fmt: skip
    for field_name in ("seed", "logit_bias"):
        with pytest.raises(Unsupported):
            sampling_params(4, {field_name: 1})


def table() -> str:
    """The list of checks as docs/sglang.md has it."""
    rows = ["| area | field | here |", "|---|---|---|"]
    rows += [
        f"| {c.area} | {c.field} | {SILENT.get(c.run.__name__, 'checked')} |"
        for c in port_suite.CHECKS
    ]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    page = ROOT / "docs" / "sglang.md"
    head, begin, rest = page.read_text().partition("<!-- checks begin -->\n")
    _, end, tail = rest.partition("<!-- checks end -->")
    page.write_text(head + begin + "\n" + table() + "\n" + end + tail)
