"""What publishers have written never steers the reader's terminal; `--json` keeps it exactly."""

import asyncio
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.errors import NotFound, Refused
from readyplane.core.trust import ManifestEvent, Trail
from readyplane.ports import ManifestSummary, Tag
from readyplane_lab.cli import output
from readyplane_lab.cli.legible import STEERING, legible, legible_json
from readyplane_registry.ingest import build_manifest
from tests.registry_data import model_folder
from tests.unit.cli_world import Terminal, clean_environment, stand_in

EVIL = "m\x1b]0;owned\x07\x1b[31m\x9b2J\u202egpj\u2066\r\u200b\n[bold]x[/nope]\U000e0041\x7f"
DIGEST = "sha256:" + "a" * 64
ONLY = ("--registry", "127.0.0.1:1")


def steers(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in STEERING} - {"\n"}


@given(st.text(st.characters()))
def test_nothing_that_steers_is_left_and_the_rest_is_as_it_was(text: str) -> None:
    shown = legible(text)
    assert not steers(shown) and "\n" not in shown
    assert legible(shown) == shown
    plain = "".join(c for c in text if unicodedata.category(c) not in STEERING)
    assert legible(plain) == plain


@given(st.recursive(st.text(st.characters()), lambda inner: st.dictionaries(st.text(), inner)))
def test_json_means_the_same_and_steers_as_little(document: Any) -> None:
    for indent in (None, 2):
        text = legible_json(json.dumps(document, ensure_ascii=False, indent=indent))
        assert json.loads(text) == document and not steers(text)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("a\u202eb", "a\\u202eb"),
        ("a\nb", "a\\x0ab"),
        ("\udc9b", "\\udc9b"),
        ("\U000e0041", "\\U000e0041"),
        ("Grüße 模型 🙂", "Grüße 模型 🙂"),
    ],
)
def test_how_it_is_shown(text: str, shown: str) -> None:
    assert legible(text) == shown


def test_cells_and_lines_of_any_table(capfd: pytest.CaptureFixture[str]) -> None:
    made = output.table("a\x1b[1m", "b")
    made.add_row(output.cell(EVIL), "x\x1b[2J")
    made.caption = "c\u202e"
    output.console().print(made)
    output.console().print("line\x1b[2J", markup=False)
    output.say(EVIL)
    said = capfd.readouterr().out
    assert not steers(said) and "[bold]x[/nope]" in said.replace("\n", "") and "\\x1b[2J" in said


class Hostile:
    """A registry that holds what a hostile publisher has named."""

    def __init__(self, folder: Path) -> None:
        self.manifest, _, _ = build_manifest(folder, model="m")
        self.broken: Exception | None = None

    async def list_manifests(self, **_: Any) -> list[ManifestSummary]:
        await asyncio.sleep(0)
        if self.broken is not None:
            raise self.broken
        return [ManifestSummary(DIGEST, "weights", EVIL, 1, 2, 3, 4.0, (EVIL,))]

    async def list_tags(self, *_: Any) -> list[Tag]:
        return [Tag(EVIL, DIGEST, 1, 4.0)]

    async def resolve(self, *_: Any, **__: Any) -> Any:
        return self.manifest

    async def trail(self, *_: Any) -> Trail:
        return Trail(events=(ManifestEvent("origin", {"repository": EVIL}, 4.0),))

    async def aclose(self) -> None:
        """Nothing is open."""


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    return Terminal(capfd)


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hostile:
    made = Hostile(model_folder(tmp_path / "m"))
    stand_in(monkeypatch, "RegistryClient", made)
    return made


def test_commands_show_hostile_names_and_keep_them_in_json(cli: Terminal, hostile: Hostile) -> None:
    http = ("--registry-http", "http://127.0.0.1:2")
    for argv in (("list",), ("tag",), ("show", "m", *http)):
        said = cli("artifact", *argv, *ONLY)
        assert said.code == 0 and not steers(said.out), argv
        assert "\\" in said.out, f"{argv}: shown, although folded in a narrow column"
    (row,) = cli("artifact", "list", "--json", *ONLY).document["artifacts"]
    assert row["model"] == EVIL and row["tags"] == [EVIL]
    shown = cli("artifact", "show", "m", "--json", *ONLY)
    assert shown.document["origin"] == {"repository": EVIL} and not steers(shown.out)


def test_messages_of_failures_steer_nothing(cli: Terminal, hostile: Hostile) -> None:
    for error in (NotFound("model", EVIL, EVIL), Refused("it", [EVIL], EVIL), RuntimeError(EVIL)):
        hostile.broken = error
        for debug in ((), ("--debug",)):
            said = cli("artifact", "list", *ONLY, *debug)
            assert said.code == 1 and "\\x1b" in said.err and not steers(said.err)
            assert ("Traceback" in said.err) is bool(debug)
