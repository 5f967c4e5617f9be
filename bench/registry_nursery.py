"""Registries that start in a fraction of a second, to be killed: forked from a process that has imported all.

`python -m bench.registry_nursery`: each line on stdin is the arguments of one registry as JSON; the
answer on stdout is its pid. What runs is the registry's own `main`; only the imports are saved.
Owned by `bench.registry_kills`.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from readyplane.kit.server import run_service
from readyplane.kit.settings import parse_settings
from readyplane.kit.telemetry import setup_logging
from readyplane_registry.__main__ import Settings, main


def _serve(arguments: list[str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    settings = parse_settings(Settings, arguments, "registry", "a registry that is to be killed")
    setup_logging("registry", settings.log_level)
    run_service(lambda: main(settings))


def nurse() -> None:
    """Fork one registry a line, until stdin ends."""
    signal.signal(
        signal.SIGCHLD, signal.SIG_IGN
    )  # those that were killed leave nothing to wait for
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            os.close(0)
            os.dup2(2, 1)
            try:
                _serve(json.loads(line))
            finally:
                os._exit(1)
        print(pid, flush=True)


if __name__ == "__main__":
    nurse()
