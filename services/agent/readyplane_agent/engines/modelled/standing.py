"""A modelled engine that stands by: everything is imported, nothing of a model is there yet.

Owns the wait of the bare process for its command line, which comes as a file. It holds no weights and
nothing of a device, and has opened no port.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from readyplane.core.errors import InvalidField

STAND_BY = "--stand-by"
SPAWNED_AT = "READYPLANE_SPAWNED_AT_MONOTONIC_S"
IMPORT_SAVED = "READYPLANE_IMPORT_SAVED_S"
POLL_S = 0.05


def stands_by(argv: Sequence[str]) -> bool:
    """Whether the process was started to wait."""
    return STAND_BY in argv[:1]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Flags of a process that waits: where its orders come, where it says that it waits."""
    parser = argparse.ArgumentParser(prog="python -m readyplane_agent.engines.modelled")
    parser.add_argument(STAND_BY, type=Path, required=True, help="file with the command line")
    parser.add_argument("--startup-file", type=Path, required=True, help="JSON: state, pid")
    parser.add_argument("--parent-pid", type=int, default=0, help="exit when it is gone")
    return parser.parse_args(list(argv))


def wait_for_orders(given: argparse.Namespace, *, now_s: float) -> list[str]:
    """Say that everything is imported, then wait for the command line as long as the parent lives.

    Raises:
        InvalidField: what came is no command line.
    """
    spawned_s = float(os.environ.get(SPAWNED_AT) or now_s)
    told = {"state": "imported", "pid": os.getpid(), "start_s": spawned_s, "ready_s": now_s}
    part = given.startup_file.with_name(f".{given.startup_file.name}.{os.getpid()}")
    part.write_text(json.dumps({**told, "failure": "", "segments": []}))
    part.replace(given.startup_file)
    while not given.stand_by.exists():
        time.sleep(POLL_S)
    os.environ[IMPORT_SAVED] = repr(max(0.0, now_s - spawned_s))
    try:
        argv = json.loads(given.stand_by.read_text())
    except (OSError, ValueError) as error:
        raise InvalidField(STAND_BY, str(given.stand_by), f"write a JSON list ({error})") from None
    if not isinstance(argv, list) or not all(isinstance(word, str) for word in argv):
        raise InvalidField(STAND_BY, argv, "write a JSON list of words")
    return argv
