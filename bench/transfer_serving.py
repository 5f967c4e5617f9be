"""What giving weights does to those who are served: a worker with and without a push, in turns.

Owns the measurement of R9.1. The source is an agent's door beside a modelled decode engine that
serves real requests and pulls the KV of prompts that a second engine has computed; its `Watch` reads
the engine and paces what goes out. Hands `bench.transfer` windows of it.

The engine's times are modelled (iterations, wire of KV), so what a push can do to them here is to take
processor time from the engine, which the requests are then late by.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from bench.transfer_arms import Window
from readyplane.core.worker import Role
from readyplane_agent.engines.layout import arena_layout, tensor_table_document
from readyplane_agent.engines.modelled.adapter import ModelledEngine
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.engines.port import EngineSpec
from readyplane_agent.pacing import ServingTimes, between
from readyplane_lab.up.demo_model import make_demo_model
from readyplane_registry.ingest import Facts, build_manifest

PROFILE = "h200-llama8b-fp8"
MODEL = "demo"
DECODERS = 4
OUTPUT_TOKENS = 64
PROMPT_TOKENS = 200
HANDED_TOKENS = 1000
HANDERS = 4


@asynccontextmanager
async def engine(folder: Path, name: str, role: Role) -> AsyncIterator[OpenAiEngine]:
    """A modelled engine that serves; ends with the block."""
    work = folder / name
    work.mkdir()
    demo = make_demo_model(work / "model", size_bytes=8 * 2**20, shards=1, max_model_len=4096)
    facts = Facts(config=demo.config, canary=demo.canary)
    manifest, *_ = build_manifest(demo.folder, model=MODEL, facts=facts)
    layout = arena_layout(manifest)
    arena = bytearray(layout.size_bytes)
    for path, offset in layout.file_offsets.items():
        data = (demo.folder / path).read_bytes()
        arena[offset : offset + len(data)] = data
    (work / "arena").write_bytes(arena)
    table = tensor_table_document(layout, manifest_digest=manifest.digest)
    (work / "tensors.json").write_text(json.dumps(table))
    (work / "config.json").write_text(json.dumps(dict(manifest.config)))
    found = ModelledEngine()
    await found.start(
        EngineSpec(
            engine_id=name,
            role=role,
            model=MODEL,
            manifest_digest=manifest.digest,
            arena_path=work / "arena",
            tensor_table_path=work / "tensors.json",
            config_path=work / "config.json",
            tokenizer_path=demo.folder / "tokenizer.json",
            profile=PROFILE,
            work_dir=work,
            log_path=work / "engine.log",
            extra_args=("--modelled-segments", ""),
        )
    )
    try:
        await found.wait_ready(stall_s=30.0, limit_s=60.0)
        yield OpenAiEngine(found.serving().engine_url, model=MODEL)
    finally:
        await found.stop(grace_s=5.0)


class Load:
    """Requests that never end: some that decode, and some whose KV is handed over.

    Args:
        prefill, decode: the engines; `decode` is the source's.

    Attributes:
        into: the window that KV transfers belong to now.
    """

    def __init__(self, prefill: OpenAiEngine, decode: OpenAiEngine) -> None:
        self._prefill, self._decode = prefill, decode
        self._random = random.Random(1)
        self._turn = asyncio.Lock()
        self._before = ServingTimes()
        self.into = Window()

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(3, 250) for _ in range(tokens)]

    async def decode(self) -> None:
        """One answer after another."""
        while True:
            await self._decode.generate(
                self._prompt(PROMPT_TOKENS), max_tokens=OUTPUT_TOKENS, ignore_eos=True
            )

    async def hand_over(self) -> None:
        """A prompt on the one engine, its answer on the other; how long the KV took, by the latter.

        Prompts are computed side by side, KV is handed over one at a time: so there are many
        transfers, and the difference of two readings of the engine is one of them.
        """
        while True:
            prompt = self._prompt(HANDED_TOKENS)
            given = await self._prefill.generate(
                prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
            )
            async with self._turn:
                into = self.into
                await self._decode.generate(
                    prompt, max_tokens=1, kv_transfer_params=given.kv_transfer_params
                )
                after = await self._decode.serving_times()
                if into is self.into and None not in (after.kv_sum_s, self._before.kv_sum_s):
                    assert after.kv_sum_s is not None
                    assert self._before.kv_sum_s is not None
                    into.kv_s.append(after.kv_sum_s - self._before.kv_sum_s)
                self._before = after


async def window(load: Load, decode: OpenAiEngine, seconds: float) -> Window:
    """What is seen in so many seconds from now on."""
    found = load.into = Window(seconds=seconds)
    before = await decode.serving_times()
    await asyncio.sleep(seconds)
    after = await decode.serving_times()
    load.into = Window()
    found.tpot_count, found.tpot_sum_s = _difference(before, after)
    return found


def _difference(before: ServingTimes, after: ServingTimes) -> tuple[float, float]:
    if between(before, after).tpot_s is None:
        return 0.0, 0.0
    assert before.tpot_count is not None
    assert before.tpot_sum_s is not None
    assert after.tpot_count is not None
    assert after.tpot_sum_s is not None
    return after.tpot_count - before.tpot_count, after.tpot_sum_s - before.tpot_sum_s


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[tuple[Load, OpenAiEngine]]:
    """A decode engine under load, with what drives it."""
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(engine(folder, "p0", Role.PREFILL))
        decode = await stack.enter_async_context(engine(folder, "d0", Role.DECODE))
        load = Load(prefill, decode)
        tasks = [asyncio.create_task(load.decode()) for _ in range(DECODERS)]
        tasks += [asyncio.create_task(load.hand_over()) for _ in range(HANDERS)]
        try:
            await asyncio.sleep(1.0)
            yield load, decode
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
