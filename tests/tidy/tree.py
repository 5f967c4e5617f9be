"""The repository as the tidy tests see it: its files, and the syntax trees of its Python modules."""

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Where each installed package lies; the order is that of the architecture, from the middle outwards.
PACKAGES: dict[str, str] = {
    "readyplane": "readyplane",
    "readyplane_registry": "services/registry/readyplane_registry",
    "readyplane_router": "services/router/readyplane_router",
    "readyplane_planner": "services/planner/readyplane_planner",
    "readyplane_agent": "services/agent/readyplane_agent",
    "readyplane_gateway": "services/gateway/readyplane_gateway",
    "readyplane_lab": "lab/readyplane_lab",
}


@functools.cache
def files() -> tuple[str, ...]:
    """Every file that is or could be committed, relative to the root, sorted."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    return tuple(sorted({name for name in listed.split("\0") if name and (ROOT / name).is_file()}))


def is_generated(name: str) -> bool:
    """Written by tools/generate.sh, so no taste applies to it."""
    return "_pb2" in Path(name).name


def python_files(*, product_only: bool = False) -> list[str]:
    """Hand-written Python files; with `product_only` those that are installed."""
    return [
        name
        for name in files()
        if name.endswith(".py")
        and not is_generated(name)
        and (not product_only or package_of(name) is not None)
    ]


def package_of(name: str) -> str | None:
    """The installed package that a file belongs to, or None for tests, benchmarks and tools."""
    for package, folder in PACKAGES.items():
        if name.startswith(folder + "/"):
            return package
    return None


def module_of(name: str) -> str:
    """`services/router/readyplane_router/pair.py` -> `readyplane_router.pair`."""
    package = package_of(name)
    path = Path(name)
    parts = list(path.with_suffix("").parts)
    if package is not None:
        parts = [package, *path.relative_to(PACKAGES[package]).with_suffix("").parts]
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


@functools.cache
def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@functools.cache
def tree(name: str) -> ast.Module:
    return ast.parse(text(name), filename=name)


def imports(module: ast.AST, *, of: str) -> Iterator[tuple[int, str, str | None]]:
    """Each import as (line, module, imported name or None); relative ones are made absolute."""
    package = of if of in PACKAGES else of.rpartition(".")[0]
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parts = package.split(".")
                above = ".".join(parts[: len(parts) - node.level + 1])
                source = f"{above}.{source}" if source else above
            for alias in node.names:
                yield node.lineno, source, alias.name


def dotted(node: ast.AST) -> str | None:
    """`datetime.datetime.now` for the expression of that name, None for anything computed."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    parts.append(node.id)
    return ".".join(reversed(parts))


def real_names(module: ast.AST) -> dict[str, str]:
    """What each imported local name really is: `from time import time as t` -> {"t": "time.time"}."""
    known: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                known[local] = alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return known


def references(module: ast.AST) -> Iterator[tuple[int, str]]:
    """Each outermost dotted name that begins at an import, as (line, its real dotted name)."""
    known = real_names(module)
    inner: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            inner.add(id(node.value))
        if id(node) in inner or not isinstance(node, ast.Attribute | ast.Name):
            continue
        name = dotted(node)
        if name is None:
            continue
        first, _, rest = name.partition(".")
        if first in known:
            yield node.lineno, known[first] + (f".{rest}" if rest else "")
