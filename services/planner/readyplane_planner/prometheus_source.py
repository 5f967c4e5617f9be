"""Asks a Prometheus server the configured queries, all at once and each within one bound.

Owns the HTTP of `/api/v1/query`; what an answer is worth is said by `signals.queries`. A server that
hangs costs the bound and gives readings that say so, never old values.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import aiohttp

from readyplane.kit.clock import Clock
from readyplane_planner.signals.outside import SIGNAL_UNITS, Reading
from readyplane_planner.signals.queries import Query, answer

BODY_MAX = 1 << 20
AT_ONCE = 16


class PrometheusSource:
    """One server and the queries of one deployment.

    Args:
        url: of the server, without `/api`. lookback_s: samples older than that are no data; the
            server's own five minutes would keep values of workers that are long gone (B08).
        token: bearer token, empty for none.
    """

    def __init__(
        self,
        url: str,
        queries: Sequence[Query],
        *,
        clock: Clock,
        lookback_s: float,
        token: str = "",
    ) -> None:
        self._url = url.rstrip("/") + "/api/v1/query"
        self._queries = tuple(queries)
        self._clock = clock
        self._lookback_s = lookback_s
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, *, within_s: float) -> tuple[Reading, ...]:
        """One reading for each query, whatever the server does."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=AT_ONCE), headers=self._headers
            )
        session = self._session
        return tuple(
            await asyncio.gather(*(self._one(session, q, within_s) for q in self._queries))
        )

    async def _one(self, session: aiohttp.ClientSession, asked: Query, within_s: float) -> Reading:
        asked_s = self._clock.monotonic_s()
        form = {
            "query": asked.text,
            "timeout": f"{max(1, round(within_s * 1000))}ms",
            "lookback_delta": f"{self._lookback_s:g}s",
        }
        try:
            async with (
                asyncio.timeout(within_s),
                session.post(self._url, data=form, allow_redirects=False) as found,
            ):
                body = await read_bounded(found, BODY_MAX)
            return answer(asked, json.loads(body), asked_s=asked_s)
        except TimeoutError:
            why = f"Prometheus did not answer within {within_s:g} s"
        except ValueError as error:
            why = f"Prometheus answered {str(error)[:100]}"
        except (aiohttp.ClientError, OSError) as error:
            why = f"Prometheus is not reached: {type(error).__name__}"
        unit = SIGNAL_UNITS[asked.signal]
        return Reading(asked.signal, unit, None, asked_s, why, window_s=asked.window_s)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()


async def read_bounded(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body. Raises ValueError for one that is longer than `most` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_chunked(65_536):
        size += len(part)
        if size > most:
            message = f"more than {most} bytes"
            raise ValueError(message)
        parts.append(part)
    return b"".join(parts)
