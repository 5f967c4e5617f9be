"""What takes effect in seconds or at once, in real processes, with its lead time measured there."""

import asyncio
import itertools
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from readyplane import profiles
from readyplane.client import RouterClient
from readyplane.core import convertible
from readyplane.core.errors import NoPair, Overloaded, Refused
from readyplane.core.ration import Ration
from readyplane.core.work import EventKind, RequestEvent, RequestShape, pack_tokens
from readyplane.core.worker import Role, Worker, WorkerState
from readyplane.ports import Pair
from readyplane_agent.lifecycle import ExitCode
from readyplane_lab.up.demo_model import DemoModel, make_demo_model
from readyplane_router.service import RouterService
from tests.integration.agent_cluster import MODEL, Cluster, cluster
from tests.router_world import SERVED, events

SLOW = "h200-slow10"
TPOT_S = 0.1
RATION_S = 2.0  # how long an order of admission lasts that nobody renews
TRIES = 4
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


async def beside_a_prompt(c: Cluster, pair: Pair, turn: int) -> tuple[float, list[float], float]:
    """A sequence decodes, and a prompt of six chunks comes beside it.

    Seconds between its tokens without the prompt, and each beside it; seconds of the prompt.
    """
    decoding = asyncio.create_task(stream(pair, 64, first=0, max_tokens=70))
    await asyncio.sleep(1.0)
    second = await route(c.router, 3000, first=100 + turn, max_tokens=1)
    assert second.local
    began_s = time.monotonic()
    done_s = (await stream(second, 3000, first=100 + turn, max_tokens=1))[-1]
    tokens_s = await decoding
    await c.router.complete(events(second, *SERVED, output_tokens=1))  # else there is no room again
    gaps = [b - a for a, b in pairwise(tokens_s)]
    during = [b - a for a, b in pairwise(tokens_s) if began_s < b and a < done_s]
    alone = sorted(g for g in gaps if g not in during)[len(gaps) // 4]
    return alone, during, done_s - began_s


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
        assert lead_s < 3.0, "it is ready already: nothing was waited for"

        chunk = convertible.chunk_tokens(profile)
        bound_s = profile.prefill_s(chunk, 3000 - chunk) + profile.iteration_s(2, 3200)
        whole_s = profile.prefill_s(3000)
        alone, during, prompt_s = await beside_a_prompt(c, pair, 0)
        for turn in range(1, TRIES):  # a machine that stood still says nothing of the engine
            if max(during) < bound_s + 0.1:
                break
            alone, during, prompt_s = await beside_a_prompt(c, pair, turn)
    with capsys.disabled():
        print(
            f"\nconvertible decoder: lead time {lead_s * 1e3:.1f} ms; time per token {alone:.3f} s "
            f"alone, {max(during):.3f} s at most beside a prompt of 3000 tokens in chunks of {chunk} "
            f"(bound {bound_s:.3f} s, unchunked {whole_s:.3f} s); prompt done in "
            f"{prompt_s:.2f} s, told {told.prefill_s(3000):.2f} s"
        )
    # One gap may be the machine's; without chunks there is one, and it is the whole prompt.
    assert sorted(during)[-2] < bound_s + 0.1 < whole_s
    assert len(during) >= 3000 // chunk, "decoding went on between the chunks"


async def test_a_standby_is_proved_waits_and_serves_when_told(
    tmp_path: Path, demo: DemoModel, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(tmp_path, demo) as c:
        ordered_s = time.monotonic()
        await c.agent("p1", "prefill")
        await c.agent("d1", "decode", "--standby", "true")
        waiting = await c.until(lambda w: w.state is WorkerState.STANDBY, "d1")
        engine = c.engine("d1").pid
        loaded_s = time.monotonic() - ordered_s
        await c.ready("p1")
        assert waiting.serving is not None and all(check.passed for check in waiting.checks)
        assert waiting.offer.standby and c.router.desk(MODEL).decodes == []
        tokens = pack_tokens(prompt(64))
        with pytest.raises(NoPair):
            await c.router.route(RequestShape("no", MODEL, 64, tokens), dry_run=True)

        took_s = []
        client = RouterClient(c.address)
        try:
            asked_s = time.monotonic()
            told = await client.activate("d1", reason="a burst", scale_decision_id="d-9")
            assert told.told == "activate"
            await c.ready("d1")
            took_s.append(time.monotonic() - asked_s)
            assert (await client.activate("d1")).state is WorkerState.READY, "idempotent"
            assert c.engine("d1").pid == engine, "nothing is started again"
        finally:
            await client.aclose()
        pair = await route(c.router, 64, first=0, max_tokens=4)
        assert pair.decode.worker_id == "d1" and not pair.local
        assert c.router.members.counts["activated"] == 1
        # Whoever stands by and is not wanted any more leaves at once.
        await c.agent("d2", "decode", "--standby", "true")
        await c.until(lambda w: w.state is WorkerState.STANDBY, "d2")
        await c.router.drain("d2", reason="too many")
        assert await c.ended("d2") == ExitCode.LEFT
    with capsys.disabled():
        print(f"\nstandby: order to standby {loaded_s:.2f} s, activation {took_s[0]:.2f} s")
    # A renewal, which may be two seconds away; a start of this small model is quick here as well.
    assert took_s[0] < max(10.0, loaded_s)


async def test_a_worker_flips_to_the_other_stage_and_back(
    tmp_path: Path, demo: DemoModel, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(tmp_path, demo) as c:
        ordered_s = time.monotonic()
        await c.agent("w1", "prefill")
        await c.agent("w2", "prefill")
        first, _ = await c.ready("w1"), await c.ready("w2")
        cold_s = time.monotonic() - ordered_s
        process, engine = c.agents["w1"].pid, c.engine("w1").pid
        took_s = []
        for role in (Role.DECODE, Role.PREFILL):
            asked_s = time.monotonic()
            told = await c.router.flip("w1", role=role, reason="short of it")
            assert (told.state, told.told) == (WorkerState.DRAINING, "flip")
            now = await c.until(
                lambda w, wanted=role: w.state is WorkerState.READY and w.role is wanted,  # type: ignore[misc]
                "w1",
            )
            took_s.append(time.monotonic() - asked_s)
            if role is Role.DECODE:
                assert now.epoch > first.epoch and now.offer.incarnation == first.offer.incarnation
                pair = await route(c.router, 64, first=0, max_tokens=4)
                assert (pair.prefill.worker_id, pair.decode.worker_id) == ("w2", "w1")
                key = c.router.roster.members["w1"].key
                c.router.desk(MODEL).abort_on(key, now_s=c.router.now_s())
        assert (c.agents["w1"].pid, c.engine("w1").pid) == (process, engine)
        assert c.router.members.counts["flipped"] == 2
        # The decoder's stage of a convertible worker is not to be had: it serves both.
        with pytest.raises(Refused, match="to prefill or to decode"):
            await c.router.flip("w2", role=Role.BOTH)
    with capsys.disabled():
        shown = ", ".join(f"{s:.2f} s" for s in took_s)
        print(f"\nflip: {shown}; a cold start took {cold_s:.2f} s")
    # A renewal, which may be two seconds away, and the proof; a cold start is quick here as well.
    assert max(took_s) < max(10.0, cold_s)


async def asked(router: RouterClient, name: str, priority: int) -> Pair:
    """A request that is paired and given up at once, so that no place is taken."""
    tokens = pack_tokens(prompt(64))
    pair = await router.route(RequestShape(name, MODEL, 64, tokens, priority=priority))
    await router.complete([RequestEvent(pair.reservation_id, EventKind.ABORTED)])
    return pair


async def first_refused(router: RouterClient, name: str) -> tuple[float, Overloaded]:
    """When the first of many requests of priority 0 was refused, and with what."""
    async with asyncio.timeout(60.0):
        for number in itertools.count():
            try:
                await asked(router, f"{name}-{number}", 0)
            except Overloaded as error:
                return time.monotonic(), error
            await asyncio.sleep(0.001)
    raise AssertionError("nobody was refused")


async def test_an_order_of_admission_is_followed_at_once_and_ends_by_itself(
    tmp_path: Path, demo: DemoModel, capsys: pytest.CaptureFixture[str]
) -> None:
    async with cluster(tmp_path, demo) as c:
        await convertible_decoder(c, "d1")
        planner, gateway = RouterClient(c.address), RouterClient(c.address)
        took_s = []
        try:
            await asked(gateway, "high", 5)
            for number in range(3):
                order = Ration(1, 0.0, RATION_S, "a burst", f"d-{number}", 7.0)
                refused = asyncio.create_task(first_refused(gateway, f"low-{number}"))
                await asyncio.sleep(0.05)
                asked_s = time.monotonic()
                held = await planner.ration(MODEL, order, leader_epoch=1 + number)
                at_s, error = await refused
                took_s.append(at_s - asked_s)
                assert held is not None and held.ttl_s <= RATION_S
                assert f"d-{number}" in str(error) and error.retry_after_s == 7.0
                await asked(gateway, f"high-{number}", 5)
                # Nobody renews it: the planner is gone.
                await asyncio.sleep(max(0.0, RATION_S + 0.05 - (time.monotonic() - asked_s)))
                assert (await asked(gateway, f"again-{number}", 0)).decode.worker_id == "d1"
        finally:
            await planner.aclose()
            await gateway.aclose()
        assert c.router.desk(MODEL).refusals == {"rationed": 3}
    with capsys.disabled():
        shown = ", ".join(f"{s * 1e3:.1f}" for s in took_s)
        print(f"\norder of admission: first refused request after {shown} ms")
    assert max(took_s) < RATION_S
