"""The port suite on modelled engines, and what only they can be asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from tests.engine import port_suite
from tests.engine.engine_world import ModelledFactory, modelled_factory

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> ModelledFactory:
    return modelled_factory(tmp_path_factory.mktemp("engines"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(factory: ModelledFactory) -> AsyncIterator[port_suite.World]:
    async with (
        factory.start("one") as one,
        factory.start("p") as p,
        factory.start("d") as d,
        aiohttp.ClientSession() as http,
    ):
        yield port_suite.World(one, p, d, factory.traits, http, factory, count(1))


@pytest.mark.parametrize(
    "check", port_suite.CHECKS, ids=[f"{c.area}-{c.run.__name__}" for c in port_suite.CHECKS]
)
async def test_port(world: port_suite.World, check: port_suite.Check) -> None:
    await check.run(world)
