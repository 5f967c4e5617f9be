"""What the documents say can be done: links lead somewhere, files exist, commands and flags are real."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.tidy import tree

DOCUMENTS = [name for name in tree.files() if name.endswith(".md")]
LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(
    r"`((?:readyplane|services|lab|tests|deploy|docs|proto|tools|bench)/[\w./-]+"
    r"|(?:README|ARCHITECTURE|CONTRIBUTING|CHANGELOG)\.md|docker-compose\.yml|pyproject\.toml)`"
)
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")


def anchors(name: str) -> set[str]:
    """GitHub's anchors of a document's headings."""
    text = FENCED.sub("", tree.text(name))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t).strip().lower().replace(" ", "-") for t in titles}


def target(name: str, link: str) -> tuple[str, str]:
    """The file a link of a document leads to, relative to the root, and its anchor."""
    path, _, anchor = link.partition("#")
    if not path:
        return name, anchor
    parts: list[str] = []
    for part in (PurePosixPath(name).parent / path).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts), anchor


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    text = FENCED.sub("", tree.text(name))
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        path, anchor = target(name, link)
        assert (tree.ROOT / path).exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(path), f"{name}: {link}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_are_named_exist(name: str) -> None:
    for path in PATH.findall(tree.text(name)):
        assert (tree.ROOT / path).exists(), f"{name}: {path}"


def test_the_documents_that_users_expect_are_there() -> None:
    for name in TOP:
        assert (tree.ROOT / name).is_file(), name
    readme = tree.text("README.md")
    for words in ("make up", "make test", "docs/images/page.png", "architecture.svg", "## Limits"):
        assert words in readme
    image = (tree.ROOT / "docs/images/page.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) < 600_000


# ------------------------------------------------------------------------------------- commands


def commands(name: str) -> Iterator[list[str]]:
    """Command lines of a document's shell blocks, variables and comments left out."""
    for kind, block in FENCED.findall(tree.text(name)):
        if kind not in {"sh", "bash", "console", ""}:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # a picture, not a command
                continue
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words:
                yield words


def found(program: str) -> list[tuple[str, list[str]]]:
    return [
        (name, words)
        for name in DOCUMENTS
        for words in commands(name)
        if PurePosixPath(words[0]).name == program
    ]


@cache
def application() -> Any:
    import typer

    from readyplane_lab.cli.app import app

    return typer.main.get_command(app)


@pytest.mark.parametrize(("name", "words"), found("readyplane"), ids=str)
def test_commands_are_understood(name: str, words: list[str]) -> None:
    check_command(words[1:], where=name)


def check_command(words: list[str], *, where: str) -> None:
    """Every sub-command exists, and every flag is one of its flags."""
    command = application()
    rest = list(words)
    while getattr(command, "commands", None) and rest and not rest[0].startswith("-"):
        if not re.fullmatch(r"[a-z-]+", rest[0]):
            return  # a placeholder
        assert rest[0] in command.commands, f"{where}: readyplane {' '.join(words)}"
        command = command.commands[rest.pop(0)]
    known = {flag for p in command.params for flag in [*p.opts, *p.secondary_opts]}
    known |= {"--help", "-h"}
    for word in rest:
        flag = word.partition("=")[0]
        if re.fullmatch(r"--[a-z-]+", flag):
            assert flag in known, f"{where}: {flag} in readyplane {' '.join(words)}"


def test_a_wrong_flag_in_a_document_is_noticed() -> None:
    check_command(["up", "--quick"], where="here")
    for words in (["up", "--quik"], ["upp"], ["artifact", "publishh", "x"]):
        with pytest.raises(AssertionError):
            check_command(words, where="here")


@pytest.mark.parametrize(("name", "words"), found("make"), ids=str)
def test_make_targets_exist(name: str, words: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", tree.text("Makefile"), re.MULTILINE))
    for word in words[1:]:
        if word.startswith("ARGS="):
            if words[1] == "up":
                check_command(["up", *shlex.split(word.removeprefix("ARGS="))], where=name)
        else:
            assert word in targets, f"{name}: make {word}"


@cache
def flags_of(module: str) -> frozenset[str]:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], check=True, capture_output=True, text=True
    )
    return frozenset(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", done.stdout))


def modules() -> list[tuple[str, list[str]]]:
    return [
        (name, words[i + 2 :] if words[i + 1] == "-m" else [])
        for name in DOCUMENTS
        for words in commands(name)
        for i in [next((i for i, w in enumerate(words) if w.rpartition("/")[2] == "python"), -1)]
        if i >= 0 and len(words) > i + 2 and words[i + 2].startswith("readyplane")
    ]


@pytest.mark.parametrize(("name", "words"), modules(), ids=str)
def test_modules_and_their_flags_exist(name: str, words: list[str]) -> None:
    module, *rest = words
    assert importlib.util.find_spec(module) is not None, f"{name}: python -m {module}"
    for word in rest:
        flag = word.partition("=")[0]
        if flag.startswith("--"):
            assert flag in flags_of(module), f"{name}: {flag} of {module}"


def test_json_in_documents_is_json() -> None:
    import json

    for name in DOCUMENTS:
        for kind, block in FENCED.findall(tree.text(name)):
            if kind == "json":
                json.loads(block)


def test_python_in_documents_parses() -> None:
    import ast
    import textwrap

    for name in DOCUMENTS:
        for kind, block in FENCED.findall(tree.text(name)):
            if kind == "python":
                flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
                compile(textwrap.dedent(block), name, "exec", flags=flags)


def test_flags_are_read_from_help_texts() -> None:
    """If they stopped naming flags, the test of modules would prove nothing."""
    assert {"--blob-dir", "--redis-url"} <= flags_of("readyplane_registry")
