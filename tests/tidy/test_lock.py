"""The locks pin what pyproject.toml asks for, by hash, and hold no address."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.tidy import tree

LOCKS = ["requirements.lock", "requirements-gen.lock"]
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>\S+)(?: ; (?P<marker>.+?))? \\$")
HASH = re.compile(r"^    --hash=sha256:[0-9a-f]{64}(?: \\)?$")


def pins(text: str) -> dict[str, list[Version]]:
    """The pinned versions by canonical name; a package may be pinned twice, for two Pythons."""
    found: dict[str, list[Version]] = {}
    for line in text.splitlines():
        if match := PIN.match(line):
            name = canonicalize_name(match["name"])
            found.setdefault(name, []).append(Version(match["version"]))
    return found


def faults(text: str) -> list[str]:
    """Lines that are neither an exact pin nor a hash, and pins without a hash."""
    found: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if PIN.match(line):
            if number == len(lines) or not HASH.match(lines[number]):
                found.append(f"line {number}: {line} has no hash")
        elif not HASH.match(line):
            found.append(f"line {number}: {line}")
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_only_pins_and_hashes(lock: str) -> None:
    assert not faults(tree.text(lock))
    assert pins(tree.text(lock))


def wanted() -> list[Requirement]:
    project = tomllib.loads(tree.text("pyproject.toml"))
    texts = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["dev"],
        *project["build-system"]["requires"],
    ]
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("requirement", wanted(), ids=str)
def test_the_lock_holds(requirement: Requirement) -> None:
    versions = pins(tree.text("requirements.lock")).get(canonicalize_name(requirement.name))
    assert versions, f"{requirement} is in pyproject.toml and not in the lock: run `make lock`"
    for version in versions:
        assert version in requirement.specifier, f"{requirement}, locked to {version}"


def test_faults_are_found() -> None:
    good = f"a==1.0 \\\n    --hash=sha256:{'0' * 64} \\\n    --hash=sha256:{'1' * 64}\n"
    assert not faults(good)
    assert faults("a==1.0\n")
    assert faults("a>=1.0 \\\n")
    assert faults("--index-url somewhere\n" + good)
    assert faults("# made by a tool\n" + good)
    assert faults("a==1.0 \\\n" + good)
