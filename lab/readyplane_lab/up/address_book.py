"""Where the running local stack can be reached, for the `readyplane` command.

Owns one small file per stack and one for the newest, readable by their user alone. They are written
when a stack is up and removed when it ends; a file whose process is gone is not believed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from readyplane_lab.up.pids import start_mark
from readyplane_lab.up.processes import write_atomically


@dataclass(frozen=True, slots=True)
class AddressBook:
    """Addresses of one running stack.

    Attributes:
        pid, mark: the `readyplane up` process, by id and start mark.
        registry, router, planner, actuator: gRPC, `host:port`.
        registry_http, router_http, planner_http, gateway_http: base URLs.
        token: bearer token. model: name that requests use. data_dir, logs_dir: its folders.
    """

    pid: int
    mark: str
    registry: str
    router: str
    planner: str
    actuator: str
    registry_http: str
    router_http: str
    planner_http: str
    gateway_http: str
    token: str
    model: str
    data_dir: str
    logs_dir: str


def book_path() -> Path:
    """`$XDG_STATE_HOME/readyplane/up.json`, by default below `~/.local/state`: the newest stack."""
    root = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(root).expanduser() / "readyplane" / "up.json"


def write_book(book: AddressBook) -> None:
    """Make the stack known; the newest stack of a user is the one that commands find."""
    path = book_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for target in (_own_path(book.pid), path):
        write_atomically(target, json.dumps(asdict(book), indent=1))
        target.chmod(0o600)


def read_book() -> AddressBook | None:
    """The newest running stack of this user; None when there is none."""
    return _read(book_path()) or next(iter(_living()), None)


def remove_book(pid: int) -> None:
    """Forget the stack of this process; an older one that still runs is found again."""
    _own_path(pid).unlink(missing_ok=True)
    newest = _read(book_path())
    if newest is not None and newest.pid != pid:
        return
    older = next(iter(_living()), None)
    if older is None:
        book_path().unlink(missing_ok=True)
    else:
        write_book(older)


def _own_path(pid: int) -> Path:
    return book_path().with_name(f"up-{pid}.json")


def _living() -> list[AddressBook]:
    """Books of stacks that run, the newest first; books of dead ones are removed."""
    found: list[tuple[float, AddressBook]] = []
    for path in book_path().parent.glob("up-*.json"):
        book = _read(path)
        if book is None:
            path.unlink(missing_ok=True)
        else:
            found.append((path.stat().st_mtime, book))
    return [book for _, book in sorted(found, key=lambda pair: -pair[0])]


def _read(path: Path) -> AddressBook | None:
    try:
        book = AddressBook(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return book if start_mark(book.pid) == book.mark else None
