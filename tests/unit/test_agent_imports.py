"""What agents and engines do not import, since imports are part of every start (R6)."""

import subprocess
import sys

import pytest

HEAVY = (
    "numpy",
    "scipy",
    "prometheus_client",
    "psutil",
    "pydantic",
    "fastapi",
    "aiohttp",
    "uvicorn",
)
AGENT = "readyplane_agent.__main__, readyplane.client.router, readyplane.client.registry"
ENGINE = "readyplane_agent.engines.modelled.__main__"


@pytest.mark.parametrize("modules", [AGENT, ENGINE], ids=["agent", "engine"])
def test_a_start_imports_nothing_heavy(modules: str) -> None:
    program = f"import sys, {modules}\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
