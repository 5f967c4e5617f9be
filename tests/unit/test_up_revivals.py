"""`up`: a store that ended is brought back, with several tries, and services wait for it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any, cast

import pytest
from sqlalchemy.exc import DBAPIError

from readyplane.core.errors import InvalidField, Unavailable
from readyplane.kit.database import database_errors
from readyplane_lab.up import stores as module
from readyplane_lab.up.stores import REVIVAL_TRIES_MAX, Stores


class Server:
    """An embedded server whose next starts fail as told."""

    url = "postgresql://same"

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.starts = 0
        self.on_exit: Any = None

    async def start(self) -> None:
        self.starts += 1
        await asyncio.sleep(0)
        if self.failures:
            raise self.failures.pop(0)

    async def stop(self) -> None:
        pass


def busy() -> Unavailable:
    return Unavailable("it did not answer", "look at its log")


@pytest.mark.parametrize(
    ("failures", "starts", "given_up"),
    [
        ([], 1, False),
        ([busy()], 2, False),
        ([busy()] * (REVIVAL_TRIES_MAX - 1), REVIVAL_TRIES_MAX, False),
        ([busy()] * REVIVAL_TRIES_MAX, REVIVAL_TRIES_MAX, True),
        ([InvalidField("data_dir", "x", "name another")], 1, True),
    ],
)
async def test_a_revival_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, failures: list[Exception], starts: int, given_up: bool
) -> None:
    monkeypatch.setattr(module, "REVIVAL_PAUSE_S", 0.001)
    told: list[str] = []
    server = Server(*failures)
    stores = Stores(cast("Any", server), "redis://given", gave_up=told.append)
    server.on_exit("postgres", -9)
    await asyncio.wait_for(stores.whole(), 5.0)
    assert server.starts == starts
    assert bool(told) is given_up, told


async def test_stores_are_whole_at_once_where_none_comes_back() -> None:
    await asyncio.wait_for(Stores("postgresql://given", "redis://given").whole(), 1.0)


@pytest.mark.parametrize(
    ("sqlstate", "error"),
    [("57P03", Unavailable), ("57P01", Unavailable), ("53300", Unavailable), ("23505", DBAPIError)],
)
def test_a_database_that_is_starting_is_unavailable(sqlstate: str, error: type[Exception]) -> None:
    cause = Exception("the database system is starting up")
    cause.sqlstate = sqlstate  # type: ignore[attr-defined]
    with pytest.raises(error), database_errors():
        raise DBAPIError("SELECT 1", None, cause)


@pytest.mark.parametrize("module_name", ["readyplane_lab.up.stack", "readyplane_router.__main__"])
def test_grpc_has_no_hand_in_forks(module_name: str) -> None:
    """It reads its environment as it is imported: whatever we set later is not heard."""
    code = (
        "import sys, os, importlib\n"
        "class Look:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc': print(os.environ.get('GRPC_ENABLE_FORK_SUPPORT'))\n"
        "sys.meta_path.insert(0, Look())\n"
        f"importlib.import_module({module_name!r})\n"
    )
    unset = {k: v for k, v in os.environ.items() if not k.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=unset
    )
    assert done.stdout.split() == ["0"]
