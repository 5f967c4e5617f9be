"""Where the running local stack can be reached, for the `readyplane` command.

Owns one small file per user, readable by that user alone. It is written when a stack is up and
removed when it ends; a file whose process is gone is not believed.
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
    """`$XDG_STATE_HOME/readyplane/up.json`, by default below `~/.local/state`."""
    root = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(root).expanduser() / "readyplane" / "up.json"


def write_book(book: AddressBook) -> None:
    """Make the stack known; the newest stack of a user wins."""
    path = book_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(path, json.dumps(asdict(book), indent=1))
    path.chmod(0o600)


def read_book() -> AddressBook | None:
    """The running stack of this user; None when there is none."""
    try:
        book = AddressBook(**json.loads(book_path().read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return book if start_mark(book.pid) == book.mark else None


def remove_book(pid: int) -> None:
    """Forget the stack of this process, unless another one has taken its place."""
    try:
        if json.loads(book_path().read_text()).get("pid") == pid:
            book_path().unlink(missing_ok=True)
    except (OSError, ValueError):
        return
