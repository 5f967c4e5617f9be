"""What no committed text may hold: hosts of registries, paths of one machine, ways to run data as code."""

import ast
import re
from pathlib import Path

import pytest

from tests.tidy import tree

BINARY = {".png", ".woff2", ".ico", ".gz", ".zst"}

# Written in pieces, so that this file does not hold what it looks for.
HOSTS = [
    ("pypi", "org"),
    ("pythonhosted", "org"),
    ("npmjs", "(?:org|com)"),
    ("yarnpkg", "com"),
    ("deb.debian", "org"),
    ("archive.ubuntu", "com"),
    ("crates", "io"),
    ("proxy.golang", "org"),
    ("docker", "io"),
    ("ghcr", "io"),
    ("gcr", "io"),
    ("quay", "io"),
    ("nvcr", "io"),
    ("registry.k8s", "io"),
]
FOLDERS = ["root", r"home/[a-z]\w*", r"Users/[A-Za-z]\w*", "work", "opt/pypi", "opt/wheels"]
HOST = re.compile("|".join(rf"\b{name}\.{top}\b" for name, top in HOSTS).replace("k8s.", r"k8s\."))
FOLDER = re.compile(rf"(?<![\w.\-/}}])/(?:{'|'.join(FOLDERS)})/")


def addresses(text: str) -> list[str]:
    """Registry hosts and absolute paths of somebody's machine, each with its line."""
    return [
        f"line {number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for pattern in (HOST, FOLDER)
        for match in pattern.finditer(line)
    ]


@pytest.mark.parametrize("name", [name for name in tree.files() if Path(name).suffix not in BINARY])
def test_no_address_of_a_registry_or_a_machine(name: str) -> None:
    assert not addresses(tree.text(name)), name


@pytest.mark.parametrize(
    ("line", "good"),
    [
        ("see https://" + "pypi." + "org/project/x", False),
        ("FROM docker." + "io/library/python", False),
        ("files.python" + "hosted.org", False),
        ("in /" + "root/.cache", False),
        ("in /" + "home/someone/x", False),
        ("in (/" + "work/main/x)", False),
        ("readyplane/v1/registry.proto", True),
        ("GET /v1/work/items", True),
        ("https://example.org/root/x", True),
        ("$HOME/x and ~/x and /tmp/x and /usr/bin/chromium", True),
    ],
)
def test_addresses(line: str, good: bool) -> None:
    assert (not addresses(line)) == good


# ------------------------------------------------------------------------ data that runs as code

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
CALLS = {
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "yaml.Loader",
    "yaml.UnsafeLoader",
    "torch.load",
    "numpy.load",  # reads pickles when asked to; arrays travel as raw bytes with their shape
}


def dangers(module: ast.Module) -> list[str]:
    found = [
        f"line {line}: imports {source}"
        for line, source, _ in tree.imports(module, of="x")
        if source.partition(".")[0] in MODULES
    ]
    found += [f"line {line}: {name}" for line, name in tree.references(module) if name in CALLS]
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and tree.dotted(node.func) in {"eval", "exec"}:
            found.append(f"line {node.lineno}: {tree.dotted(node.func)}()")
    return found


@pytest.mark.parametrize("name", tree.python_files())
def test_no_data_is_run(name: str) -> None:
    assert not dangers(tree.tree(name)), name


@pytest.mark.parametrize(
    ("source", "good"),
    [
        ("import pickle", False),
        ("from marshal import loads", False),
        ("import yaml\nyaml.load(x)", False),
        ("from yaml import unsafe_load\nunsafe_load(x)", False),
        ("eval('1')", False),
        ("import numpy as np\nnp.load(x)", False),
        ("import yaml\nyaml.safe_load(x)", True),
        ("redis.eval(script)", True),
        ("import json\njson.load(x)", True),
    ],
)
def test_dangers(source: str, good: bool) -> None:
    assert (not dangers(ast.parse(source))) == good
