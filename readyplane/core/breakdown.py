"""Parts of a model's signals: how requests ended by generation, and what came by client.

Owns the words in which the router tells them; whoever reads counters differences them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GenerationSignals:
    """Requests that pairs of one artifact served, by how they ended; since the router began.

    Attributes:
        finished_total: with all tokens. attained_total: of those, with both targets met.
        failed_total: legs that a worker of it failed, or took along when it went, and requests that
            were given up after waiting too long. late_requests: under way now and late already.
    """

    manifest_digest: str
    finished_total: int = 0
    attained_total: int = 0
    failed_total: int = 0
    late_requests: int = 0


@dataclass(frozen=True, slots=True)
class ClientSignals:
    """What one of the clients (tenants) that bring most of the work has brought since its counting
    began.

    Attributes:
        client: name as the router bounds it. life: another one after each new beginning at zero, so
            counters of two lives are never compared. arrivals_total, arrival_uncached_tokens_total:
            its part of the model's counters of that name.
    """

    client: str
    life: int
    arrivals_total: int = 0
    arrival_uncached_tokens_total: int = 0
