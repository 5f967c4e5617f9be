"""The engine port suite on a real vLLM, field by field.

Two engines: one of them is also the one that answers alone. Where vLLM differs from what the suite
asks, `differences` says what it does instead, and that is what is checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import count

import aiohttp
import pytest
import pytest_asyncio

from readyplane_agent.engines.choice import client_of
from readyplane_lab.up.golden import ask_golden
from readyplane_lab.up.real_engine import RealEngine
from tests.engine import port_suite
from tests.vllm.differences import DIFFERENCES, LAST
from tests.vllm.vllm_world import MODEL, VllmFactory, vllm_factory

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore:The test .* is marked with '@pytest.mark.asyncio'"),
]
# What may end an engine comes last.
ORDERED = sorted(port_suite.CHECKS, key=lambda check: check.run.__name__ in LAST)


@pytest.fixture(scope="module")
def factory(engine: RealEngine, tmp_path_factory: pytest.TempPathFactory) -> VllmFactory:
    return vllm_factory(tmp_path_factory.mktemp("vllm"), engine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(factory: VllmFactory) -> AsyncIterator[port_suite.World]:
    async with AsyncExitStack() as stack:
        p, d = await asyncio.gather(
            *(stack.enter_async_context(factory.start(name)) for name in ("p", "d"))
        )
        http = await stack.enter_async_context(aiohttp.ClientSession())
        golden = await ask_golden(client_of(d, d.serving(), model=MODEL))
        factory.traits = replace(factory.traits, canary=golden.canary)
        made = port_suite.World(p, p, d, factory.traits, http, factory, count(1))
        # Two engines meet for the first time: half a minute on a small machine.
        for giver, taker in ((p, d), (d, p)):
            prompt = made.prompt(200)
            first = await giver.generate(
                prompt, max_tokens=1, kv_transfer_params=port_suite.PREFILL_LEG, timeout_s=120
            )
            await taker.generate(
                prompt, max_tokens=1, kv_transfer_params=first.kv_transfer_params, timeout_s=120
            )
        yield made


@pytest.mark.parametrize("check", ORDERED, ids=[f"{c.area}-{c.run.__name__}" for c in ORDERED])
async def test_port(world: port_suite.World, check: port_suite.Check) -> None:
    """As the suite asks, or as `differences` says that vLLM does instead."""
    differs = DIFFERENCES.get(check.run.__name__)
    await (check.run if differs is None else differs.run)(world)


def test_a_difference_is_one_from_a_check_of_the_suite() -> None:
    names = {check.run.__name__ for check in port_suite.CHECKS}
    assert set(DIFFERENCES) <= names
    assert set(LAST) <= names
