"""The pure modules stay pure: values in, values out, with nothing read from the world.

import-linter sees packages; what it can not see is the standard library (clocks, randomness,
files, event loops), so each pure module's syntax tree is read here.
"""

import ast
from pathlib import PurePosixPath

import pytest

from tests.tidy import tree

REGISTRY = tree.PACKAGES["readyplane_registry"]
ROUTER = tree.PACKAGES["readyplane_router"]
PLANNER = tree.PACKAGES["readyplane_planner"]
AGENT = tree.PACKAGES["readyplane_agent"]

# A brain is one module, or a folder of that name when it has grown.
BRAINS = [
    "readyplane/core",
    *(
        f"{REGISTRY}/{name}"
        for name in (
            "catalog",
            "kinds",
            "quantised",
            "retention",
            "sources",
            "fanout",
            "rates",
            "reports",
            "placement",
            "retrying",
            "oci",
        )
    ),
    *(
        f"{ROUTER}/{name}"
        for name in (
            "gate",
            "group",
            "lease",
            "prefix",
            "pair",
            "circuit",
            "cuts",
            "triage",
            "rates",
        )
    ),
    *(
        f"{PLANNER}/{name}"
        for name in ("signals", "forecast", "capacity", "optimise", "rollout", "guard", "decide")
    ),
    *(f"{AGENT}/{name}" for name in ("lifecycle", "pacing", "chunk_order")),
]
PATTERNS = [
    *(f"{brain}.py" for brain in BRAINS),
    *(f"{brain}/*.py" for brain in BRAINS),
    *(f"{brain}/*/*.py" for brain in BRAINS),
    f"{AGENT}/engines/modelled/core*.py",
    f"{AGENT}/engines/modelled/answer*.py",
]

# Modules of the standard library that only turn values into values.
STANDARD = {
    "__future__",
    "abc",
    "array",
    "base64",
    "binascii",
    "bisect",
    "collections",
    "contextlib",
    "copy",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "graphlib",
    "hashlib",
    "heapq",
    "itertools",
    "json",
    "math",
    "numbers",
    "operator",
    "random",  # the type of a seeded source that is handed in; see RANDOM
    "re",
    "statistics",
    "string",
    "struct",
    "textwrap",
    "types",
    "typing",
    "unicodedata",
}
LIBRARIES = {"numpy", "scipy", "xxhash", "typing_extensions"}

RANDOM = {"random.Random"}
NUMPY_RANDOM = {"numpy.random.Generator", "numpy.random.PCG64", "numpy.random.SeedSequence"}
CLOCKS = {
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
    "datetime.date.today",
}
EFFECTS = {"open", "print", "input", "breakpoint", "exec", "eval", "compile", "__import__"}


def is_pure(name: str) -> bool:
    return any(PurePosixPath(name).match(pattern) for pattern in PATTERNS)


def module_is_pure(module: str) -> bool:
    """True for the module or the package of a brain; an empty parent package is as good as pure."""
    package, _, rest = module.partition(".")
    if package not in tree.PACKAGES:
        return False
    path = "/".join([tree.PACKAGES[package], *rest.split(".")] if rest else [])
    return is_pure(f"{path}.py") or is_pure(f"{path}/__init__.py")


PURE_FILES = [name for name in tree.python_files(product_only=True) if is_pure(name)]


def impurities(module: ast.Module, *, of: str) -> list[str]:
    """Everything in a module that a pure one may not have, each with its line."""
    found: list[str] = []
    for line, source, imported in tree.imports(module, of=of):
        top = source.partition(".")[0]
        if top in STANDARD or top in LIBRARIES:
            continue
        if module_is_pure(source) or (imported and module_is_pure(f"{source}.{imported}")):
            continue
        found.append(f"line {line}: imports {source}")
    for line, name in tree.references(module):
        if name in CLOCKS:
            found.append(f"line {line}: reads the clock with {name}; take `now` as an argument")
        elif name.startswith("random.") and ".".join(name.split(".")[:2]) not in RANDOM:
            found.append(f"line {line}: {name}; take a seeded random.Random as an argument")
        elif name.startswith("numpy.random.") and not any(
            name == allowed or name.startswith(allowed + ".") for allowed in NUMPY_RANDOM
        ):
            found.append(f"line {line}: {name}; take a numpy.random.Generator as an argument")
    for node in ast.walk(module):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            found.append(f"line {node.lineno}: is asynchronous")
        elif isinstance(node, ast.Global):
            found.append(f"line {node.lineno}: keeps state in a module's global")
        elif isinstance(node, ast.Call) and tree.dotted(node.func) in EFFECTS:
            found.append(f"line {node.lineno}: calls {tree.dotted(node.func)}")
        elif isinstance(node, ast.Call) and tree.dotted(node.func) == "Random" and not node.args:
            found.append(f"line {node.lineno}: seeds a Random from the system")
    return found


@pytest.mark.parametrize("name", PURE_FILES)
def test_pure_module(name: str) -> None:
    found = impurities(tree.tree(name), of=tree.module_of(name))
    assert not found, f"{name} is meant to be pure:\n  " + "\n  ".join(found)


def test_the_core_is_among_the_pure_modules() -> None:
    """The list above is matched against real files: a moved core would leave it empty."""
    assert any(name.startswith("readyplane/core/") for name in PURE_FILES)


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import asyncio",
        "import logging",
        "import os.path",
        "import uuid",
        "from socket import socket",
        "from readyplane.kit import clock",
        "from readyplane import client",
        "from . import rpc",
        "from .rpc import Servicer",
        "import datetime\nx = datetime.datetime.now()",
        "from datetime import datetime, UTC\nx = datetime.now(UTC)",
        "from random import random\nx = random()",
        "import random\nx = random.choice([1])",
        "from random import Random\nx = Random()",
        "import numpy as np\nx = np.random.rand()",
        "async def f(): ...",
        "x = open('f')",
    ],
)
def test_an_impurity_is_found(source: str) -> None:
    assert impurities(ast.parse(source), of="readyplane_router.pair")


@pytest.mark.parametrize(
    "source",
    [
        "from dataclasses import dataclass",
        "from collections.abc import Mapping",
        "from scipy.optimize import linprog",
        "from readyplane.core import worker",
        "from readyplane.core.worker import Fleet",
        "from readyplane_router import prefix",
        "from . import prefix",
        "from .prefix import Index",
        "from datetime import datetime, timedelta\ndef f(now: datetime) -> datetime: return now",
        "from random import Random\ndef f(rng: Random) -> float: return rng.random()",
        "import numpy as np\ndef f(rng: np.random.Generator) -> float: return rng.random()",
    ],
)
def test_a_pure_module_passes(source: str) -> None:
    assert not impurities(ast.parse(source), of="readyplane_router.pair")
