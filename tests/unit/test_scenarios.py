"""Every scenario is found, can be had at any scale, and disturbs what it says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from readyplane import profiles
from readyplane.core.errors import InvalidField
from readyplane_lab.proof import scenarios as package
from readyplane_lab.proof.port import Scenario
from readyplane_lab.proof.scenarios import scenarios, scenarios_of
from readyplane_lab.simulator.faults import Fault
from readyplane_lab.simulator.startup import StartUpModel
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_planner.policy import Policy, merged

SHARED = Path(os.environ.get("READYPLANE_DATA", Path(__file__).parents[3] / "shared" / "data"))
KNOWN = scenarios()
REPLAYS = {"az-conv", "az-code", "mc-conv", "servegen-large-day", "servegen-small-day"}
GENERATED = sorted(set(KNOWN) - REPLAYS)
SMALL = 0.1


def drawn(name: str, scale: float, seed: int) -> Sequence[WorkloadRequest]:
    if name in REPLAYS and not (SHARED / "traces").exists():
        pytest.skip(f"public traces are not at {SHARED}")
    # A day is drawn at a hundredth, so that the test is quick.
    return KNOWN[name].requests(scale * (0.05 if name.startswith("servegen") else 1.0), seed)


def test_everything_that_is_asked_for_is_there() -> None:
    wanted = {
        *REPLAYS,
        *("calm", "isl-burst", "osl-burst", "cache-shift", "cold-cluster", "warm-peer"),
        *("source-failure", "mixed-hardware", "rolling-upgrade", "long-drain", "flash-crowd"),
        *("telemetry-faults", "poisoned-forecast", "quota-denied", "spot-reclaim"),
        *("oscillation-30s", "oscillation-60s", "oscillation-120s", "oscillation-240s"),
        *("oscillation-sine", "oscillation-phases", "isl-burst-10s", "isl-burst-30s"),
    }
    assert wanted <= KNOWN.keys()
    assert {s.name for s in KNOWN.values() if s.kind == "replay"} == REPLAYS


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_it_says_what_it_is(name: str) -> None:
    scenario = KNOWN[name]
    assert scenario.name == name
    assert scenario.title and scenario.expected.endswith(".")
    assert scenario.expected.count(". ") == 0, "one sentence"
    for profile in (scenario.worker_class, scenario.decode_class or scenario.worker_class):
        assert profiles.load(profile).gpus >= 1
    StartUpModel(**scenario.startup)
    merged(Policy(model="m"), scenario.policy)


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_its_requests_are_valid_and_follow_from_the_seed(name: str) -> None:
    requests = list(drawn(name, SMALL, 1))
    assert len(requests) > 100
    assert requests[0].at_s == 0.0
    assert all(a.at_s <= b.at_s for a, b in pairwise(requests))
    assert [r.index for r in requests] == list(range(len(requests)))
    assert all(sum(n for _, n in r.parts) == r.isl >= 1 and r.osl >= 1 for r in requests)
    assert list(drawn(name, SMALL, 1)) == requests
    if name in GENERATED:
        assert list(drawn(name, SMALL, 2)) != requests


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_scale_multiplies_the_load_and_keeps_the_span(name: str) -> None:
    small, large = drawn(name, SMALL, 1), drawn(name, 3 * SMALL, 1)
    assert len(large) / len(small) == pytest.approx(3.0, rel=0.15)
    assert large[-1].at_s == pytest.approx(small[-1].at_s, rel=0.05)


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_one_takes_twenty_to_thirty_minutes(name: str) -> None:
    assert 1200 <= drawn(name, SMALL, 1)[-1].at_s <= 1800


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_what_goes_wrong_does_so_within_the_run(name: str) -> None:
    span_s = 1500.0
    for fault in KNOWN[name].disturb(span_s, 1).faults:
        assert isinstance(fault, get_args(Fault))
        assert 0 < fault.at_s < span_s
    assert KNOWN[name].disturb(span_s, 1) == KNOWN[name].disturb(span_s, 1)


def test_a_missing_trace_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("READYPLANE_DATA", str(tmp_path))
    for name in sorted(REPLAYS):
        with pytest.raises(InvalidField, match="READYPLANE_DATA"):
            KNOWN[name].requests(0.01, 1)


def test_a_file_without_a_scenario_is_named() -> None:
    for module in (
        SimpleNamespace(),
        SimpleNamespace(SCENARIO="calm"),
        SimpleNamespace(SCENARIOS=()),
    ):
        with pytest.raises(InvalidField, match=r"scenarios/odd\.py"):
            scenarios_of(module, "scenarios/odd.py")


def test_a_name_is_given_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calm: Scenario = KNOWN["calm"]
    modules = {"one": SimpleNamespace(SCENARIO=calm), "two": SimpleNamespace(SCENARIOS=(calm,))}
    for name in modules:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(package, "import_module", lambda name: modules[name.rpartition(".")[2]])
    with pytest.raises(InvalidField, match=r"scenarios/two\.py"):
        package._found((str(tmp_path),), "made.up")
