"""The search of the learned optimiser's parameters: it finds, it repeats, and it admits no gain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from readyplane_lab.tuning import __main__ as tuning
from readyplane_lab.tuning.playing import MISS_PRICE, Played, cost
from readyplane_lab.tuning.search import reflected, search
from readyplane_planner.optimise.tuned import Parameters, read_parameters

RANGES = [(0.0, 4.0), (0.25, 4.0), (0.0, 1.5)]
BEST = (3.0, 0.5, 1.2)


def bowl(point: Sequence[float]) -> float:
    return sum((a - b) ** 2 for a, b in zip(point, BEST, strict=True))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_finds_a_better_point_and_repeats(seed: int) -> None:
    tried = list(islice(search(bowl, RANGES, begin=[1.0] * 3, seed=seed), 60))
    assert [f.evaluation for f in tried] == list(range(1, 61))
    assert min(f.cost for f in tried) < 0.1 * tried[0].cost
    for found in tried:
        for value, (low, high) in zip(found.point, RANGES, strict=True):
            assert low <= value <= high
    again = list(islice(search(bowl, RANGES, begin=[1.0] * 3, seed=seed), 60))
    assert again == tried


def test_what_leaves_its_range_is_turned_back() -> None:
    found = reflected(np.array([-0.2, 0.0, 0.4, 1.0, 1.3, 2.0, -1.7]))
    assert found == pytest.approx([0.2, 0.0, 0.4, 1.0, 0.7, 0.0, 0.3])


def test_broken_costs_do_not_lead() -> None:
    def holes(point: Sequence[float]) -> float:
        return float("nan") if point[0] > 2.0 else bowl(point)

    tried = list(islice(search(holes, RANGES, begin=[1.0] * 3, seed=1), 40))
    known = [f.cost for f in tried if f.cost == f.cost]
    assert min(known) < known[0]


@pytest.mark.parametrize(
    ("found", "want"),
    [
        (Played(0.995, 10.0), 1.0),
        (Played(0.995, 9.0), 0.9),
        (Played(0.98, 9.0), 0.9 + MISS_PRICE * 0.01),
        (Played(1.0, 10.0), 1.0),  # more than is asked for is worth nothing
    ],
)
def test_a_miss_has_a_price(found: Played, want: float) -> None:
    assert cost([found], [Played(0.995, 10.0)]) == pytest.approx(want)


@pytest.mark.parametrize(("gain", "recorded"), [(0.2, True), (-0.2, False)])
def test_only_a_gain_on_inputs_held_out_is_recorded(
    gain: float, recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learnt inputs always look better; what counts was never learnt."""

    def played(inputs: Sequence[Any], parameters: Parameters | None) -> list[Played]:
        better = 0.0 if parameters is None else min(1.0, abs(parameters.headroom_p - 1.0))
        share = {"learnt": 0.3, "held out": gain}
        return [Played(0.99, 10.0 * (1.0 - share[c.key] * better)) for c in inputs]

    def cases(names: Sequence[str], **_: Any) -> list[Any]:
        return [SimpleNamespace(key=name) for name in names]

    monkeypatch.setattr(tuning, "all_played", played)
    monkeypatch.setattr(tuning, "cases", cases)
    out = tmp_path / "tuned.json"
    arguments = ["--learn", "learnt", "--judge", "held out", "--evaluations", "12"]
    assert tuning.main([*arguments, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert bool(document["parameters"]) is recorded
    read_parameters(document["parameters"])
    told = document["provenance"]
    assert (told["seed"], told["evaluations"]) == (1, 12)
    assert told["cost_learnt"] < 1.0
    assert (told["cost_held_out"] < 1.0) is recorded
    assert ("not recorded" in told["note"]) is not recorded
    assert set(told["held_out"]["held out"]) == {"size", "tuned"}


def test_an_input_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuning.main(["--learn", "no-such-scenario"]) == 2
    assert "no-such-scenario" in capsys.readouterr().err
