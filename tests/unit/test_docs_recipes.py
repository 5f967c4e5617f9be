"""The whole files that CONTRIBUTING shows as examples are whole: they load and they play."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from readyplane_lab.proof import inputs, play
from readyplane_lab.proof.port import Contender, Scenario

TEXT = Path(__file__).parents[2] / "CONTRIBUTING.md"


def recipe(name: str, folder: Path) -> Any:
    """What the example that makes `name` makes, loaded from a file as it would be."""
    blocks = re.findall(r"```python\n(.*?)```", TEXT.read_text(), flags=re.DOTALL)
    (block,) = [b for b in blocks if re.search(rf"^{name} = ", b, flags=re.MULTILINE)]
    file = folder / f"recipe_{name.lower()}.py"
    file.write_text(block)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.fixture(scope="module")
def scenario(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    found = recipe("SCENARIO", tmp_path_factory.mktemp("recipe"))
    assert isinstance(found, Scenario)
    return found


def test_the_scenario_has_the_load_that_it_describes(scenario: Scenario) -> None:
    requests = scenario.requests(1.0, 1)
    before = sum(r.at_s < 600 for r in requests) / 600
    after = sum(r.at_s >= 600 for r in requests) / 900
    assert before == pytest.approx(7.0, rel=0.1) and after == pytest.approx(14.0, rel=0.1)


def test_the_baseline_plays_it_and_its_check_can_fail(scenario: Scenario, tmp_path: Path) -> None:
    contender = recipe("CONTENDER", tmp_path)
    assert isinstance(contender, Contender)
    case = inputs.make_case(scenario, t_ready_s=30.0, peak=None, seed=1)
    run = play.play(case, contender, contender.default, mode="fluid")
    assert len({p for _, p, _ in run.targets}) > 1, "it follows the queue"
    idle = play.play(case, contender, 0.0, mode="fluid")
    assert "P did not grow" in scenario.check(idle)
