"""What publishers have written never steers the reader's terminal; `--json` keeps it exactly."""

import asyncio
import io
import json
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from readyplane.core.errors import NotFound, Refused
from readyplane.core.startup_failed import Failures
from readyplane.core.trust import ManifestEvent, Trail
from readyplane.core.work import RequestShape
from readyplane.core.worker import CheckResult, Fleet, Worker
from readyplane.ports import End, ManifestSummary, Pair, Tag
from readyplane_lab.cli import attached, decisions, output, route, startup_tables, workers
from readyplane_lab.cli.legible import STEERING, legible, legible_json
from readyplane_lab.cli.where import Where
from readyplane_registry.ingest import build_manifest
from tests.registry_data import model_folder
from tests.unit.cli_world import EXPLANATION, Terminal, clean_environment, fleet, stand_in, worker

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


# --------------------------------------------------------------------------- markup of others

NAME = "a[bold]b[/bold][/nope]"


def rendered(show: Callable[[Console], None]) -> str:
    screen = Console(width=400, file=io.StringIO(), record=True)
    show(screen)
    return screen.export_text()


def marked_worker() -> Worker:
    made = worker(NAME, checks=(CheckResult(NAME, False, {"x": NAME}, NAME),), told=NAME)
    offer = replace(made.offer, scale_decision_id=NAME, node=NAME, worker_class=NAME, ranks=2)
    assert made.progress is not None
    progress = replace(made.progress, failure=NAME, segments=())
    return replace(made, offer=offer, progress=progress, drain_reason=NAME, rank_steps=(NAME, ""))


def test_names_with_markup_are_shown_as_they_are_in_every_table() -> None:
    """Nothing that others have named is taken for colour, and a tag that never opened breaks nothing."""
    one, two = marked_worker(), worker("p-2")
    document = workers.fleet_document(fleet(one, two, degraded=NAME), [], [NAME])
    moment = {"after_s": 1.0, "who": NAME, "worker_id": NAME, "what": NAME, "took_s": 1.0}
    start = {
        "wall_s": 2.0,
        "exclusive_s": {NAME: 1.0},
        "segments": [{"name": NAME, "start_s": 0.0, "end_s": 1.0, "modelled": True}],
        "blocking_segment": NAME,
        "dominant_segment": "",
        "unexplained_s": None,
    }
    decision = {"decision_id": NAME, "at_s": 1.0, "summary": NAME, "reasons": [{"text": NAME}]}
    explained: dict[str, Any] = dict(EXPLANATION)
    pair = Pair(
        "r", End(NAME, "i", 1, "u"), End(NAME, "i", 1, "u"), False, 1.0, 1.0, 0.0, 0.0,
        {**EXPLANATION, "excluded": {NAME: NAME}, "pairs": [
            {**explained["pairs"][0], "prefill": NAME, "decode": NAME}]},
    )  # fmt: skip
    shape = RequestShape("r", NAME, 10)
    shown: dict[str, tuple[Callable[[Console], None], int]] = {
        "fleet": (lambda s: s.print(workers.fleet_table(document)), 8),
        "checks": (lambda s: s.print(workers.checks_table(workers.check_documents(one))), 3),
        "ranks": (lambda s: s.print(workers.ranks_table(workers.rank_documents(one) or [])), 1),
        "decisions": (lambda s: s.print(decisions.decisions_table([decision])), 2),
        "timeline": (
            lambda s: s.print(decisions.timeline_table([{**moment, "note": NAME}])),
            4,
        ),
        "segments": (lambda s: s.print(decisions.segments_table(start)), 1),
        "pair": (lambda s: route.show_pair(s, pair, shape), 7),
        "attached": (lambda s: s.print(attached.checks_table(one)), 2),
        "failures": (
            lambda s: s.print(
                startup_tables.failures_table([Failures(NAME, NAME, NAME, NAME, 2, (NAME,))])
            ),
            3,
        ),
    }
    for name, (show, most) in shown.items():
        text = rendered(show)
        assert text.count(NAME) >= most, (name, text.count(NAME), text)


def test_what_is_cut_or_coloured_is_shown_as_it_is_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single worker, as `readyplane workers WORKER` shows it."""

    screen = Console(width=400, file=io.StringIO(), record=True)
    monkeypatch.setattr(output, "console", lambda **_: screen)
    monkeypatch.setattr(workers, "router_of", lambda _where: _Router())
    asyncio.run(workers._one(Where(router="x:1"), "a[", as_json=False))
    text = screen.export_text()
    assert text.count(NAME) >= 6, text


class _Router:
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        return None

    async def list_workers(self, model: str = "") -> Fleet:
        return fleet(marked_worker())
