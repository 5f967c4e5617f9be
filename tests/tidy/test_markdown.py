"""Markdown has one sentence per line, so that a change to a sentence is a change to a line."""

import re
from collections.abc import Iterator

import pytest

from tests.tidy import tree

FENCE = re.compile(r"^\s*(```|~~~)")
# Not prose: headings, tables, quotes' markers, HTML, link definitions, rules, indented code.
NOT_PROSE = re.compile(r"^\s*(#|\||<|\[[^\]]+\]:|---|===|\*\*\*|!\[)|^ {4,}\S")
ITEM = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+(?:\[[ x]\]\s+)?|^\s*>\s?")
SPAN = re.compile(r"`[^`]*`|\]\([^)]*\)|<[^>]+>|https?://\S+")
END = re.compile(r"[.!?][\"')*_”]*\s+(?=[\"'(*_“\[]*[A-Z`])")
ABBREVIATION = re.compile(
    r"(?:\b(?:e\.g|i\.e|etc|cf|vs|approx|resp|incl|no|fig|sec|dr|mr|ms|st|p|pp|vol|v)"
    r"|(?:^|\s)[A-Z]|(?:^|\s)\d+|\.\.)[.!?][\"')*_”]*\s+$",
    re.IGNORECASE,
)


def prose(text: str) -> Iterator[tuple[int, str, bool]]:
    """Lines of prose as (number, text without spans of code, does it begin an item)."""
    fenced = False
    front = text.startswith("---\n")
    for number, line in enumerate(text.splitlines(), start=1):
        if front:
            front = number == 1 or line != "---"
            continue
        if FENCE.match(line):
            fenced = not fenced
            continue
        if fenced or not line.strip() or (NOT_PROSE.match(line) and not ITEM.match(line)):
            continue
        item = ITEM.match(line)
        body = line[item.end() :] if item else line.strip()
        yield number, SPAN.sub("`x`", body).rstrip(), item is not None


def faults(text: str) -> list[str]:
    """Lines with more than one sentence, and sentences broken over lines."""
    found: list[str] = []
    previous: tuple[int, str] | None = None
    for number, line, item in prose(text):
        for match in END.finditer(line):
            if not ABBREVIATION.search(line[: match.end()]):
                found.append(f"line {number}: a second sentence begins at {line[match.end() :]!r}")
                break
        follows = previous is not None and previous[0] == number - 1 and not item
        if follows and previous and re.match(r"[a-z]", line) and re.search(r"[\w,]$", previous[1]):
            found.append(f"line {number}: goes on with the sentence of the line before")
        previous = (number, line)
    return found


@pytest.mark.parametrize("name", [name for name in tree.files() if name.endswith(".md")] or [None])
def test_one_sentence_per_line(name: str | None) -> None:
    if name is None:
        pytest.skip("no Markdown file yet")
    assert not faults(tree.text(name)), name


@pytest.mark.parametrize(
    "text",
    [
        "One sentence. Another one.",
        "- An item. Its second sentence.",
        "Is it? Yes.",
        "It is `code`. `More` code.",
        "A line that is broken\nhere and goes on.",
        "A (bracket.) Then more.",
    ],
)
def test_a_fault_is_found(text: str) -> None:
    assert faults(text)


@pytest.mark.parametrize(
    "text",
    [
        "One sentence.\nAnother one.",
        "- An item.\n  Its second sentence.",
        "Use a thing, e.g. Redis or i.e. Valkey vs. Postgres.",
        "Version 3.11 and `a. B`.",
        "# A heading. With two\n\n| a. B | c. D |",
        "```\nOne. Two.\n```",
        "1. First.\n2. Second.",
        "See [the guide. Part two](docs/x.md).".replace(". Part", " part"),
        "A list follows:\n- one\n- two",
        "---\ntitle: A. B\n---\nText.",
    ],
)
def test_one_sentence_per_line_passes(text: str) -> None:
    assert not faults(text)
