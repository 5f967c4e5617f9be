"""Baselines are found by their file, and a file that is none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from readyplane.core.errors import InvalidField
from readyplane_lab.proof.baselines import contenders, gather

RULE = """
from dataclasses import replace
from readyplane_lab.proof.baselines.hpa import CONTENDER as PUBLISHED
CONTENDER = replace(PUBLISHED, name={name!r})
"""


def package(path: Path, monkeypatch: pytest.MonkeyPatch, name: str, **files: str) -> list[str]:
    folder = path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for module, text in files.items():
        (folder / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(path))
    return [str(folder)]


def test_every_contender_is_complete() -> None:
    found = contenders()
    assert {"static-peak", "static-quantile", "hpa", "kpa"} <= set(found)
    for name, contender in found.items():
        assert name == contender.name
        assert len(contender.values) == 8, name
        assert len(set(contender.values)) == 8, name
        assert contender.default in contender.values, name
        assert contender.title.endswith("."), name
        assert contender.source, name
        assert contender.knob, name


def test_a_new_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = package(tmp_path, monkeypatch, "found_rules", mine=RULE.format(name="mine"))
    assert set(gather("found_rules", folder)) == {"mine"}


def test_a_file_without_a_contender_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = package(tmp_path, monkeypatch, "empty_rules", hollow="X = 1\n")
    with pytest.raises(InvalidField, match=r"hollow\.py"):
        gather("empty_rules", folder)


def test_two_of_one_name_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = RULE.format(name="twin")
    folder = package(tmp_path, monkeypatch, "twin_rules", one=same, two=same)
    with pytest.raises(InvalidField, match=r"two\.py.*one\.py"):
        gather("twin_rules", folder)
