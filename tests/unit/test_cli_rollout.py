"""`readyplane rollout`: what is asked of the planner, and what a person reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import Refused
from tests.unit.cli_world import Terminal, clean_environment, stand_in

PLANNER = ("--planner", "10.0.0.1:7003")
OLD, NEW = "sha256:" + "a" * 64, "sha256:" + "b" * 64


def shown(phase: str, **changes: Any) -> dict[str, Any]:
    """Where a roll-out is, as the planner tells it."""
    return {
        "phase": phase,
        "reason": "",
        "by": "ann@desk",
        "serves": {"digest": OLD, "generation": 1},
        "to": {"digest": NEW, "generation": 2},
        "from": {"digest": OLD, "generation": 1},
        "new": {"prefill": 1, "decode": 1},
        "old": {"prefill": 3, "decode": 2},
        "leaving": 0,
        "attained_new": None,
        "attained_old": 0.98,
        "samples": 4,
        "begun_ago_s": 30.0,
        "phase_ago_s": 10.0,
        "model": "demo",
        "manifest": "demo:next",
        "policy": {},
        "policy_version": 4,
        "decided_version": 4,
        "paused": False,
        "degraded": "",
        **changes,
    }


@dataclass
class Planner:
    """Tells of one phase after the other."""

    told: list[dict[str, Any]]
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    refuses: str = ""

    async def rollout(self, model: str = "") -> dict[str, Any]:
        return self.told.pop(0) if len(self.told) > 1 else self.told[0]

    async def ask_rollout(self, action: str, **given: Any) -> dict[str, Any]:
        self.asked.append((action, given))
        if self.refuses:
            raise Refused("roll-out to demo:next", [self.refuses])
        return self.told[0]

    async def aclose(self) -> None:
        """Nothing is open."""


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    monkeypatch.setattr("readyplane_lab.cli.rollout.EVERY_S", 0.0)
    return Terminal(capfd)


def planner(monkeypatch: pytest.MonkeyPatch, *told: dict[str, Any]) -> Planner:
    made = Planner(list(told))
    stand_in(monkeypatch, "PlannerClient", made)
    return made


def test_to_asks_once_and_says_who(cli: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = planner(monkeypatch, shown("idle"))
    said = cli("rollout", "--to", "demo:next", "--surge", "2", *PLANNER)
    assert said.code == 0
    action, given = fake.asked[0]
    assert (action, given["to"], given["surge"]) == ("go", "demo:next", 2)
    assert "@" in given["by"]
    assert "policy version 4" in said.out


def test_watch_follows_to_the_end_and_says_how_it_ended(
    cli: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = shown("idle", decided_version=3)  # of the tick before: no end
    moving = shown("moving", attained_new=0.97, samples=40)
    planner(monkeypatch, before, before, moving, moving, shown("done"))
    said = cli("rollout", "--to", "demo:next", "--watch", *PLANNER)
    assert said.code == 0
    assert said.out.count("moving: ") == 1, "a line is printed when it changes"
    assert "97.0% of 40 requests attained, 98.0% on the old ones" in said.out
    assert said.out.splitlines()[-1].startswith("done: ")
    back = shown("rolled_back", reason="60.0% of 25 requests attained")
    planner(monkeypatch, moving, back)
    said = cli("rollout", "--to", "demo:next", "--watch", *PLANNER)
    assert said.code == 1
    assert said.out.splitlines()[-1] == "60.0% of 25 requests attained"


def test_watch_as_documents_is_one_a_line(cli: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    planner(monkeypatch, shown("moving"), shown("done"))
    said = cli("rollout", "status", "--watch", "--json", *PLANNER)
    phases = [json.loads(line)["phase"] for line in said.out.splitlines()]
    assert phases == ["moving", "done"]


def test_status_reads_well(cli: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    planner(monkeypatch, shown("paused", reason="no progress for 601 s"))
    said = cli("rollout", "status", *PLANNER)
    assert said.code == 0
    for needle in (
        "paused: 1 P and 1 D of generation 2 (sha256:bbbbbbbbbbbb)",
        "3 P and 2 D are old",
        "why     no progress for 601 s",
        "by      ann@desk",
        "`readyplane rollout resume` goes on",
    ):
        assert needle in said.out
    planner(monkeypatch, shown("idle"))
    said = cli("rollout", "status", *PLANNER)
    assert said.out == "idle: generation 1 (sha256:aaaaaaaaaaaa) serves (demo:next)\n"
    assert cli("rollout", "status", "--json", *PLANNER).document["phase"] == "idle"


@pytest.mark.parametrize("action", ["pause", "resume", "undo"])
def test_a_person_may_hold_go_on_and_go_back(
    cli: Terminal, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    fake = planner(monkeypatch, shown("moving"))
    assert cli("rollout", action, *PLANNER).code == 0
    assert fake.asked[0][0] == action


def test_what_is_wrong_is_named(cli: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = planner(monkeypatch, shown("idle"))
    assert "rollout" in cli("rollout").out, "alone it prints its help"
    wrong = cli("rollout", "--surge", "2", *PLANNER)
    assert wrong.code == 2
    assert "--to" in wrong.err
    for empty in ("", " "):
        wrong = cli("rollout", "--to", empty, *PLANNER)
        assert wrong.code == 2 and "--to" in wrong.err, "a variable that is empty asks for nothing"
    assert cli("rollout", "--to", "x", "--surge", "9", *PLANNER).code == 2
    assert not fake.asked
    fake.refuses = "model: it is of llama, this planner plans demo"
    refused = cli("rollout", "--to", "demo:next", *PLANNER)
    assert refused.code == 1
    assert "it is of llama" in refused.err


def test_what_rests_is_told_by_what_serves(cli: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"digest": "", "generation": 0}
    planner(monkeypatch, shown("idle", to=nothing))
    said = cli("rollout", "status", "--watch", *PLANNER)
    assert said.code == 0
    assert "idle: generation 1 " in said.out and "nothing" not in said.out
