"""The one shared token: who checks it, who sends it.

With a token set, every RPC and REST route needs `authorization: Bearer TOKEN`; health, metrics,
reflection and static page files stay open. Without one (the default on 127.0.0.1) all is open.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from readyplane.core.errors import Unauthenticated

HEADER = "authorization"
OPEN_RPC_PREFIXES = ("/grpc.health.", "/grpc.reflection.")
OPEN_HTTP_PATHS = frozenset({"/", "/healthz", "/readyz", "/health", "/metrics", "/favicon.ico"})


class TokenCheck:
    """Judges the `authorization` value of a call; lets everything pass when no token is set."""

    def __init__(self, token: str = "") -> None:
        self._wanted = f"Bearer {token}".encode() if token else b""

    @property
    def required(self) -> bool:
        """Whether a token is set."""
        return bool(self._wanted)

    def allows(self, value: str | bytes | None) -> bool:
        """Whether this header value carries the token; compared in constant time."""
        if not self._wanted:
            return True
        given = value.encode() if isinstance(value, str) else value or b""
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(b"Bearer " + token.strip(), self._wanted)

    def check_metadata(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Check the metadata of an RPC.

        Raises:
            Unauthenticated: the token is missing or another one.
        """
        if not self._wanted:
            return
        if not any(key == HEADER and self.allows(value) for key, value in metadata or ()):
            raise Unauthenticated


def token_metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a client sends with every RPC; empty without a token."""
    return ((HEADER, f"Bearer {token}"),) if token else ()


def token_headers(token: str) -> dict[str, str]:
    """What a client sends with every HTTP request; empty without a token."""
    return {HEADER: f"Bearer {token}"} if token else {}
