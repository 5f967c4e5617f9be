"""Nothing here is run without being asked for: `make test-vllm` (docs/vllm.md says why)."""

from __future__ import annotations

import pytest

from readyplane_lab.up.real_engine import RealEngine
from tests.vllm.vllm_world import engine_or_why


@pytest.fixture(scope="session")
def engine() -> RealEngine:
    """The environment with vLLM; without one every test that asks for it is not run, and says why."""
    found = engine_or_why()
    if isinstance(found, str):
        pytest.skip(f"not run: {found}")
    return found
