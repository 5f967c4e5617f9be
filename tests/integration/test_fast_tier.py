"""What takes effect in seconds or at once, in real processes, with its lead time measured there."""

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from readyplane import profiles
from readyplane.core import convertible
from readyplane.core.work import RequestShape, pack_tokens
from readyplane.core.worker import Role, Worker
from readyplane.ports import Pair
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from readyplane_router.service import RouterService
from tests.integration.agent_cluster import MODEL, Cluster, cluster

SLOW = "h200-slow10"
TPOT_S = 0.1
TOLD_ONE_BY_ONE = "--engine-arg=--coalesce-ms=0"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoModel:
    folder = tmp_path_factory.mktemp("demo")
    return make_demo_model(folder, size_bytes=12 * 2**20, shards=2, max_model_len=4096)


def prompt(isl: int, *, first: int = 0) -> list[int]:
    return [10 + (first + i) % 400 for i in range(isl)]


async def route(router: RouterService, isl: int, *, first: int, max_tokens: int) -> Pair:
    tokens = pack_tokens(prompt(isl, first=first))
    return await router.route(
        RequestShape(f"r-{isl}-{first}", MODEL, isl, tokens, max_tokens=max_tokens)
    )


async def stream(pair: Pair, isl: int, *, first: int, max_tokens: int) -> list[float]:
    """When each token came, as its client saw it."""
    body = {
        "model": MODEL,
        "prompt": prompt(isl, first=first),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    came: list[float] = []
    url = f"{pair.decode.engine_url}/v1/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                doc: dict[str, Any] = json.loads(line[6:])
                for choice in doc["choices"]:
                    came += [time.monotonic()] * len(choice.get("token_ids", ()))
    return came


async def convertible_decoder(c: Cluster, name: str) -> Worker:
    more = ("--worker-class", SLOW, "--convertible-tpot-s", repr(TPOT_S), TOLD_ONE_BY_ONE)
    await c.agent(name, "decode", *more)
    return await c.ready(name)


async def test_a_convertible_decoder_serves_prompts_that_have_no_prefill_worker(
    tmp_path: Path, demo: DemoModel, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = profiles.load(SLOW)
    told = convertible.told_profile(profile, tpot_s=TPOT_S)
    async with cluster(tmp_path, demo) as c:
        worker = await convertible_decoder(c, "d1")
        assert worker.role is Role.BOTH and worker.offer.counts_as is Role.DECODE
        assert worker.serving is not None and worker.serving.profile == told.name
        (seat,) = c.router.desk(MODEL).prefills
        assert seat.times.prefill_s(3000) == pytest.approx(told.prefill_s(3000)), "as it is told"

        asked_s = time.monotonic()
        pair = await route(c.router, 64, first=0, max_tokens=70)
        lead_s = time.monotonic() - asked_s
        assert pair.local and pair.prefill.worker_id == "d1"
        assert lead_s < 0.5, "it is ready already: nothing was waited for"

        # A sequence decodes; a prompt of six chunks comes beside it.
        decoding = asyncio.create_task(stream(pair, 64, first=0, max_tokens=70))
        await asyncio.sleep(1.0)
        second = await route(c.router, 3000, first=100, max_tokens=1)
        assert second.local
        began_s = time.monotonic()
        done_s = (await stream(second, 3000, first=100, max_tokens=1))[-1]
        tokens_s = await decoding

    gaps = [b - a for a, b in pairwise(tokens_s)]
    during = [b - a for a, b in pairwise(tokens_s) if began_s < b and a < done_s]
    alone = sorted(g for g in gaps if g not in during)[len(gaps) // 4]
    chunk = convertible.chunk_tokens(profile)
    bound_s = profile.prefill_s(chunk, 3000 - chunk) + profile.iteration_s(2, 3200)
    whole_s = profile.prefill_s(3000)
    with capsys.disabled():
        print(
            f"\nconvertible decoder: lead time {lead_s * 1e3:.1f} ms; time per token {alone:.3f} s "
            f"alone, {max(during):.3f} s at most beside a prompt of 3000 tokens in chunks of {chunk} "
            f"(bound {bound_s:.3f} s, unchunked {whole_s:.3f} s); prompt done in "
            f"{done_s - began_s:.2f} s, told {told.prefill_s(3000):.2f} s"
        )
    assert max(during) < bound_s + 0.1 < whole_s
    assert len(during) >= 3000 // chunk, "decoding went on between the chunks"
