"""One module reads the clock, so that everything else can run on virtual time."""

import ast

import pytest

from tests.tidy import tree

CLOCK = "readyplane/kit/clock.py"

# Every other reader of a clock, with the reason why a clock that is handed in does not serve.
EXCEPTIONS: dict[str, str] = {
    "lab/readyplane_lab/simulator/loop.py": "is virtual time: its loop's time() is the clock",
}

TIME = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "gmtime", "localtime"}
READERS = {
    *(f"time.{name}" for name in TIME),
    *(f"time.{name}_ns" for name in TIME),
    "time.ctime",
    "time.strftime",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
    "datetime.datetime.today",
    "datetime.date.today",
}
LOOPS = {"get_running_loop", "get_event_loop", "new_event_loop"}


def clock_reads(module: ast.Module) -> list[str]:
    """Each place that reads a clock or passes one on, with its line."""
    found = [f"line {line}: {name}" for line, name in tree.references(module) if name in READERS]
    for node in ast.walk(module):
        if not (isinstance(node, ast.Attribute) and node.attr == "time"):
            continue
        owner = node.value
        if isinstance(owner, ast.Call):
            called = tree.dotted(owner.func) or ""
            if called.rpartition(".")[2] in LOOPS:
                found.append(f"line {node.lineno}: {called}().time")
        elif (tree.dotted(owner) or "").rpartition(".")[2] in {"loop", "_loop"}:
            found.append(f"line {node.lineno}: {tree.dotted(node)}")
    return found


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in tree.python_files(product_only=True)
        if name != CLOCK and name not in EXCEPTIONS
    ],
)
def test_no_clock_is_read(name: str) -> None:
    found = clock_reads(tree.tree(name))
    assert not found, f"{name}: use a clock of {CLOCK} that is handed in:\n  " + "\n  ".join(found)


def test_each_exception_is_needed() -> None:
    idle = [name for name in EXCEPTIONS if not clock_reads(tree.tree(name))]
    assert not idle, f"these read no clock any more, strike them off the list: {idle}"


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "import time as t\nt.monotonic()",
        "from time import perf_counter_ns as now\nnow()",
        "import time\nf(default_factory=time.time)",
        "import datetime\ndatetime.datetime.now(datetime.UTC)",
        "from datetime import datetime, UTC\ndatetime.now(UTC)",
        "from datetime import date\ndate.today()",
        "import asyncio\nasyncio.get_running_loop().time()",
        "def f(loop): return loop.time()",
    ],
)
def test_a_clock_read_is_found(source: str) -> None:
    assert clock_reads(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "from datetime import datetime\ndatetime.fromtimestamp(0)",
        "def f(clock): return clock.time()",
        "def f(sample): return sample.time",
    ],
)
def test_what_is_no_clock_read_passes(source: str) -> None:
    assert not clock_reads(ast.parse(source))
