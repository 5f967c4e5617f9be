"""A known answer is recorded, given when publishing, and missed aloud; tags in use are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import InvalidField
from readyplane.core.identity import Canary
from readyplane_lab.cli.artifact_canary import with_canary
from readyplane_lab.up.golden import Golden
from readyplane_registry.ingest import Facts
from tests.unit.cli_world import Terminal, clean_environment, stand_in

PLANNER = ("--registry", "127.0.0.1:1", "--planner", "127.0.0.1:3")


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    return Terminal(capfd)


def test_what_is_recorded_is_what_publishing_takes(
    cli: Terminal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str]] = []

    async def ask(client: Any) -> Golden:
        asked.append((client.url, client.model))
        return Golden(Canary((1, 2), (3, 4)), ends=True, margin=1.5)

    monkeypatch.setattr("readyplane_lab.up.golden.ask_golden", ask)
    file = tmp_path / "canary.json"
    argv = ("--engine-url", "http://127.0.0.1:8000", "--model", "m", "--out", str(file))
    said = cli("artifact", "canary", *argv)
    assert said.code == 0 and "--canary" in said.out
    assert asked == [("http://127.0.0.1:8000", "m")]
    facts = with_canary(Facts(config={"x": 1}), file)
    assert facts.canary == Canary((1, 2), (3, 4))
    assert facts.config == {"x": 1, "canary_ends": True}
    bad = cli("artifact", "canary", "--engine-url", "127.0.0.1", "--model", "m")
    assert bad.code != 0 and "--engine-url" in bad.err


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({}, "prompt_token_ids"),
        ({"prompt_token_ids": [1]}, "golden_token_ids"),
        ({"prompt_token_ids": [1], "golden_token_ids": []}, "golden_token_ids"),
        ({"prompt_token_ids": [True], "golden_token_ids": [1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1], "golden_token_ids": [-1]}, "golden_token_ids"),
        ({"prompt_token_ids": [1], "golden_token_ids": [1], "ends": 1}, "ends"),
        ({"prompt_token_ids": [1], "golden_token_ids": [1], "end": True}, "end"),
        ([], "an object"),
    ],
)
def test_a_wrong_file_is_refused_by_its_field(tmp_path: Path, document: object, named: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(document))
    with pytest.raises(InvalidField, match=named):
        with_canary(Facts(), file)


class Planner:
    """Has a policy that names one manifest."""

    async def get_policy(self, model: str = "") -> tuple[dict[str, Any], int]:
        return {"model": "demo", "manifest": "demo:latest"}, 4

    async def aclose(self) -> None:
        """Nothing is open."""


class Registry:
    """Holds two tags."""

    def __init__(self) -> None:
        self.removed: list[str] = []

    async def list_tags(self, name: str = "") -> list[Any]:
        from readyplane.ports import Tag

        return [Tag(name, "sha256:" + "a" * 64, 1, 0.0)]

    async def remove_tag(self, name: str, **_: Any) -> Any:
        from readyplane.ports import Tag

        self.removed.append(name)
        return Tag(name, "", 2, 0.0)

    async def aclose(self) -> None:
        """Nothing is open."""


def test_a_tag_that_the_policy_names_is_not_taken_away_unasked(
    cli: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry()
    stand_in(monkeypatch, "PlannerClient", Planner())
    stand_in(monkeypatch, "RegistryClient", registry)
    said = cli("artifact", "untag", "demo:latest", *PLANNER)
    assert said.code == 1 and not registry.removed
    assert "policy names it" in said.err and "--although-used" in said.err
    assert cli("artifact", "untag", "demo:old", *PLANNER).code == 0
    said = cli("artifact", "untag", "demo:latest", "--although-used", *PLANNER)
    assert said.code == 0 and registry.removed == ["demo:old", "demo:latest"]
    assert "degraded" in said.err, "what follows is said"
    said = cli("artifact", "untag", "demo:latest", *PLANNER[:2])
    assert said.code == 0 and "no planner was asked" in said.err
