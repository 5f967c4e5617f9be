"""What every test may rely on: marks by folder, seeded properties, and programs that may be absent."""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent

# A property runs the same examples every time; `HYPOTHESIS_PROFILE=search` looks for new ones.
settings.register_profile(
    "repeat",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile("search", deadline=None, max_examples=2_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test in tests/integration or tests/engine carries that mark without saying so."""
    for item in items:
        if TESTS not in item.path.parents:
            continue
        layer = item.path.relative_to(TESTS).parts[0]
        if layer in {"integration", "engine"}:
            item.add_marker(layer)


def _program(name: str, package: str) -> Path:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH (Debian: apt-get install {package})")
    return Path(found)


@pytest.fixture(scope="session")
def chromium() -> Path:
    """The browser for Playwright's `executable_path`; skips the test where there is none."""
    return _program("chromium", "chromium")


@pytest.fixture(scope="session")
def prometheus() -> Path:
    """A real Prometheus server; skips the test where there is none."""
    return _program("prometheus", "prometheus")


@pytest.fixture(scope="session")
def promtool() -> Path:
    """Prometheus's checker of rules; skips the test where there is none."""
    return _program("promtool", "prometheus")
