"""What a module is called, how long it is, that it says what it owns, and that somebody uses it."""

import ast
import re
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest

from tests.tidy import tree

# A name that says nothing attracts everything.
BANNED = {"utils", "util", "helpers", "helper", "manager", "managers", "common", "base", "misc"}
# Raised only with a reason: a longer file holds two things.
LINES_MAX = 600
SOURCES = {".py", ".sh", ".js", ".css", ".html", ".proto", ".sql", ".lua"}


def banned_parts(name: str) -> list[str]:
    """The parts of a Python file's path that are banned, alone or as the last word of a name."""
    parts = [part.removesuffix(".py") for part in PurePosixPath(name).parts]
    return [part for part in parts if part.lower().rpartition("_")[2] in BANNED]


@pytest.mark.parametrize("name", tree.python_files())
def test_a_module_has_a_telling_name(name: str) -> None:
    assert not banned_parts(name), f"{name}: name the module for what it owns"


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("readyplane/utils.py", False),
        ("services/router/readyplane_router/redis_helpers.py", False),
        ("readyplane/common/x.py", False),
        ("readyplane/core/worker.py", True),
        ("lab/readyplane_lab/proof/baselines.py", True),
    ],
)
def test_banned_names(name: str, good: bool) -> None:
    assert (not banned_parts(name)) == good


def source_files() -> list[str]:
    return [
        name
        for name in tree.files()
        if Path(name).suffix in SOURCES
        and not name.startswith("tests/")
        and not tree.is_generated(name)
        and "/vendor/" not in name
    ]


@pytest.mark.parametrize("name", source_files())
def test_a_file_is_not_too_long(name: str) -> None:
    count = tree.text(name).count("\n")
    assert count <= LINES_MAX, f"{name} has {count} lines, {LINES_MAX} at most: it holds two things"


def product_modules() -> list[str]:
    return [name for name in tree.python_files(product_only=True) if "/versions/" not in name]


@pytest.mark.parametrize("name", product_modules())
def test_a_module_says_what_it_owns(name: str) -> None:
    module = tree.tree(name)
    if not module.body:
        return  # an empty __init__.py owns nothing
    assert ast.get_docstring(module), f"{name}: say what it owns and to whom it hands it"


# --------------------------------------------------------------------------------- unused code


# Reached by a name that stands in no file of ours, with who calls it.
CALLED_FROM_OUTSIDE: dict[str, str] = {
    "intercept_service": "grpc.aio, on an interceptor",
    "main_loop": "uvicorn.Server.serve",
    "unregister": "asyncio's selector loop, on its selector",
    "get_map": "selectors.BaseSelector.get_key",
    "_run_once": "asyncio's event loop, once a round",
}


def spoken_names() -> Counter[str]:
    """How often each word occurs in the code, the pages and the settings of the project."""
    words: Counter[str] = Counter()
    for name in tree.files():
        path = Path(name)
        if path.suffix in {".lock", ".md", ".png", ".svg"} or tree.is_generated(name):
            continue
        if path.name in {"LICENSE", ".gitignore"}:
            continue
        try:
            words.update(re.findall(r"[A-Za-z_][A-Za-z0-9_]*", tree.text(name)))
        except UnicodeDecodeError:
            continue
    return words


def definitions(module: ast.Module) -> list[tuple[int, str]]:
    """Functions, classes and methods that only a mention of their name can reach."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        # A decorator may register it (a route, a command, a validator); a magic method is called
        # by the language.
        if node.decorator_list and not isinstance(node, ast.ClassDef):
            continue
        if node.name.startswith("__") or re.match(r"(visit|do|on)_", node.name):
            continue
        found.append((node.lineno, node.name))
    return found


def test_every_definition_is_used_somewhere() -> None:
    words = spoken_names()
    unused = [
        f"{name}:{line} {defined}"
        for name in product_modules()
        if "/migrations/" not in name
        for line, defined in definitions(tree.tree(name))
        if words[defined] == 1 and defined not in CALLED_FROM_OUTSIDE
    ]
    assert not unused, "defined and never mentioned again:\n  " + "\n  ".join(unused)


# A file that is laid there is found: nobody names it.
FOUND_BY_FOLDER = {"lab/readyplane_lab/proof/baselines", "lab/readyplane_lab/proof/scenarios"}


def test_every_module_is_used_somewhere() -> None:
    """Imported by another file, named in a text (`module:app`, `-m module`), or run by name."""
    imported: set[str] = set()
    for name in tree.python_files():
        for _line, source, what in tree.imports(tree.tree(name), of=tree.module_of(name)):
            imported.add(source)
            imported.add(f"{source}.{what}")
    texts = "\n".join(
        tree.text(name)
        for name in tree.files()
        if Path(name).suffix in {".py", ".toml", ".sh", ".yaml", ".yml", ".ini", ""}
        and not tree.is_generated(name)
        and Path(name).name != "LICENSE"
    )
    unused = [
        name
        for name in product_modules()
        if Path(name).name not in {"__init__.py", "__main__.py"}
        and "/migrations/" not in name
        and str(PurePosixPath(name).parent) not in FOUND_BY_FOLDER
        and tree.module_of(name) not in imported
        and not re.search(rf"[\"' ]{re.escape(tree.module_of(name))}\b[^.]", texts)
        and f'.with_name("{Path(name).name}")' not in texts  # run by another interpreter
    ]
    assert not unused, "nobody imports these modules:\n  " + "\n  ".join(unused)


def test_a_definition_is_found_once() -> None:
    module = ast.parse(
        "class A:\n    def b(self): ...\n    def __len__(self): ...\n@d\ndef c(): ..."
    )
    assert [name for _line, name in definitions(module)] == ["A", "b"]
