"""KV sizes that did not work out on this node: what failed once is never tried again unchanged (R16).

Owns one small file beside the node's weight cache. The registry's withdrawal says the same to all
nodes; this holds where the registry could not be told.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

log = logging.getLogger("agent.kv")

PLANS_MAX = 256


class FailedPlans:
    """Plan digests, the newest `PLANS_MAX` of them. A file that cannot be used is said, and empty."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def known(self) -> frozenset[str]:
        """Those that failed here."""
        return frozenset(self._read())

    def add(self, digest: str) -> None:
        """One more; whole or not at all for who reads meanwhile."""
        kept = [d for d in self._read() if d != digest]
        text = json.dumps([*kept, digest][-PLANS_MAX:])
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(text)
            part.replace(self._path)
        except OSError as error:
            log.warning("that %s failed is not kept on this node: %s", digest, error)

    def _read(self) -> list[str]:
        try:
            found = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read: %s", self._path, error)
            return []
        return [str(d) for d in found] if isinstance(found, list) else []
