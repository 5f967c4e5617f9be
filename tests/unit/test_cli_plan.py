"""`readyplane plan --what-if` and `explain --replay`: asked of a planner, or of a played scenario."""

from pathlib import Path

import pytest

from readyplane.core.errors import InvalidField, UnknownField
from readyplane_lab.cli.plan import parse_what_if
from tests.unit.cli_world import FakePlanner, Terminal, clean_environment, stand_in

PLANNER = ("--planner", "10.0.0.1:7003")


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePlanner:
    clean_environment(monkeypatch, tmp_path)
    made = FakePlanner()
    stand_in(monkeypatch, "PlannerClient", made)
    return made


@pytest.fixture
def terminal(capfd: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capfd)


def test_changes_are_separated_by_commas_or_given_apart() -> None:
    assert parse_what_if(["isl=2x,tready=180", "policy.headroom=0.3"]) == {
        "isl": "2x",
        "tready": "180",
        "policy.headroom": "0.3",
    }
    assert parse_what_if(["policy.slo={ttft_s: 1.0, tpot_s: 0.1},rps=2"]) == {
        "policy.slo": "{ttft_s: 1.0, tpot_s: 0.1}",
        "rps": "2",
    }
    for wrong in (["isl"], ["isl=2x", "isl=3x"], ["=2"], ["isl="]):
        with pytest.raises(InvalidField, match="--what-if"):
            parse_what_if(wrong)


def test_the_two_decisions_stand_side_by_side(planner: FakePlanner, terminal: Terminal) -> None:
    said = terminal("plan", "--what-if", "isl=2x,tready=180", *PLANNER)
    assert said.code == 0, said.err
    assert planner.asked == [({"isl": "2x", "tready": "180"}, "")]
    assert "isl  1155 → 2310" in said.out and "measured latencies" in said.out
    assert "prefill: a step adds 2 [max_step]" in said.out
    assert "P 4, D 2: 260 GPU-s" in said.out
    wanted = next(line.split() for line in said.out.splitlines() if line.strip().startswith("want"))
    assert wanted == ["wanted", "2", "4"]
    said = terminal("plan", "--what-if", "isl=2x", "--json", *PLANNER)
    assert said.document["differences"][0]["what_if"] == 4


def test_a_typo_is_refused_with_the_keys(planner: FakePlanner, terminal: Terminal) -> None:
    planner.error = UnknownField("isll", "2x", "did you mean isl? known: rps, isl, osl")
    said = terminal("plan", "--what-if", "isll=2x", *PLANNER)
    assert said.code == 2 and "known: rps, isl, osl" in said.err
    said = terminal("plan", "--what-if", "isl=2x", "--at", "5", *PLANNER)
    assert said.code == 2 and "--scenario" in said.err


def test_a_scenario_is_asked_without_a_planner(planner: FakePlanner, terminal: Terminal) -> None:
    said = terminal("plan", "--scenario", "isl-burst", "--what-if", "osl=2x", "--json")
    assert said.code == 0, said.err
    found = said.document
    assert found["scenario"].startswith("isl-burst ")
    assert found["what_if"]["decode"]["demand"] == pytest.approx(
        2 * found["as_is"]["decode"]["demand"], rel=0.05
    )
    assert planner.asked == []
    said = terminal("plan", "--scenario", "isl-burst", "--what-if", "osll=2x")
    assert said.code == 2 and "did you mean osl" in said.err
    said = terminal("plan", "--scenario", "nothing", "--what-if", "osl=2x")
    assert said.code == 2 and "isl-burst" in said.err


def test_a_replay_that_differs_ends_with_one(planner: FakePlanner, terminal: Terminal) -> None:
    said = terminal("explain", "bbbb", "--replay", *PLANNER)
    assert said.code == 0, said.err
    assert "gives the same decision" in said.out and "candidates.0.cost" in said.out
    planner.differs = True
    said = terminal("explain", "last", "--replay", *PLANNER)
    assert said.code == 1 and "prefill.target" in said.out
    said = terminal("explain", "last", "--replay", "--json", *PLANNER)
    assert said.code == 1 and said.document["differences"][0]["recorded"] == 2
    assert terminal("explain", "zzzz", "--replay", *PLANNER).code == 1


def test_explain_shows_the_timeline_and_what_is_not_known(
    planner: FakePlanner, terminal: Terminal
) -> None:
    assert planner.known
    said = terminal("explain", "last", *PLANNER)
    assert said.code == 0, said.err
    line = next(line for line in said.out.splitlines() if "first request" in line)
    assert line.split()[:3] == ["–", "router", "p-2-bbbb"] and "not known" in line
    assert "order accepted" in said.out and "outcome" in said.out
