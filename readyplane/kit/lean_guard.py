"""What the lean gRPC server holds for all its clients together, and says of those that misbehave.

Owned by `readyplane.kit.lean_rpc`; what one connection may hold is bounded there. How long a client
may take to begin is said here.
"""

from __future__ import annotations

import asyncio
import logging

PREFACE_S_MAX = 30.0
REQUEST_S_MAX = 60.0
"""From the preface to the first call, and from a call's headers to the end of its message."""
UNFINISHED_BYTES_MAX = 512 * 1024 * 1024
WARN_EVERY_S = 10.0

log = logging.getLogger(__name__)


class Crowd:
    """All connections of a server.

    Attributes:
        unfinished_bytes: of requests that are not whole yet, or wait for their turn.
    """

    def __init__(self) -> None:
        """Nobody yet."""
        self.unfinished_bytes = 0
        self._quiet = False
        self._unsaid = 0

    def too_much(self, own_bytes: int, connections: int) -> bool:
        """Whether a connection with `own_bytes` has to go: all hold too much, and it its share."""
        everyone = self.unfinished_bytes
        return everyone > UNFINISHED_BYTES_MAX and own_bytes * connections >= everyone

    def warn(self, why: str) -> None:
        """Tell of a client that broke the rules, once in a while: who breaks them can do so fast."""
        if self._quiet:
            self._unsaid += 1
            return
        more = {"before": self._unsaid} if self._unsaid else {}
        log.warning("a client broke the protocol", extra={"why": why, **more})
        self._quiet, self._unsaid = True, 0
        asyncio.get_running_loop().call_later(WARN_EVERY_S, self._speak_again)

    def _speak_again(self) -> None:
        self._quiet = False
