"""What a modelled engine offers beyond the port, as its agent asks for it: graphs, sleep.

Owns the questions over HTTP and the reading of their answers; `adapter` has the process.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from readyplane.core.errors import IdentityMismatch, InvalidField, Refused, Unavailable
from readyplane_agent.engines.offers import CaptureState, Graphs, SleepDepth
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.engines.port import GenerateResult

ASK_LIMIT_S = 10.0
WAKE_LIMIT_S = 600.0
CHECK_LIMIT_S = 300.0


class AskedBeyond:
    """`StagesGraphs` and `Sleeps` over a client that the adapter has."""

    @property
    def client(self) -> OpenAiEngine:
        """Asks the engine. Raises Unavailable before it is ready."""
        raise NotImplementedError

    async def graphs(self) -> Graphs:
        """As they are now."""
        return _graphs(await _document(self.client, "/graphs"))

    async def capture(self) -> None:
        """Begin to capture what is wanted."""
        await self.client.post("/graphs/capture", {}, timeout_s=ASK_LIMIT_S)

    async def answer_captured(
        self, prompt_token_ids: tuple[int, ...], *, max_tokens: int
    ) -> GenerateResult:
        """One greedy answer made with what is captured."""
        return await self.client.complete(
            prompt_token_ids, max_tokens=max_tokens, timeout_s=CHECK_LIMIT_S, path="/graphs/answer"
        )

    async def use_captured(self) -> Graphs:
        """Requests run with what is captured."""
        return _graphs(await self.client.post("/graphs/use", {}, timeout_s=ASK_LIMIT_S))

    async def drop_captured(self) -> Graphs:
        """Back to what the start had."""
        return _graphs(await self.client.post("/graphs/drop", {}, timeout_s=ASK_LIMIT_S))

    async def sleep(self, depth: SleepDepth) -> None:
        """Give the device back. Raises Refused while it has something to do."""
        try:
            await self.client.post("/sleep", {"depth": str(depth)}, timeout_s=ASK_LIMIT_S)
        except InvalidField as error:
            raise Refused("sleep", [str(error)], "wait until it is idle") from error

    async def wake(self) -> None:
        """Take the device again. Raises IdentityMismatch: its weights are not what they were."""
        try:
            await self.client.post("/wake_up", {}, timeout_s=WAKE_LIMIT_S)
        except Unavailable as error:
            found = await _document(self.client, "/is_sleeping")
            why = str(found.get("failure") or "")
            if why:
                remedy = "load and verify the weights again"
                raise IdentityMismatch("weights", [why], remedy) from error
            raise


async def _document(client: OpenAiEngine, path: str) -> Mapping[str, Any]:
    try:
        found = json.loads(await client.get(path, timeout_s=ASK_LIMIT_S))
    except ValueError as error:
        raise Unavailable(f"{client.url}{path} is no JSON", "see its log") from error
    return found if isinstance(found, Mapping) else {}


def _graphs(doc: Mapping[str, Any]) -> Graphs:
    try:
        return Graphs(
            used=tuple(doc["used"]),
            captured=tuple(doc["captured"]),
            wanted=tuple(doc["wanted"]),
            state=CaptureState(doc["state"]),
            kv_total_blocks=int(doc["kv_total_blocks"]),
            kv_blocks_after=int(doc["kv_blocks_after"]),
            graph_bytes=int(doc["graph_bytes"]),
            failure=str(doc["failure"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise Unavailable(f"the engine tells no graphs ({error!r})", "see its log") from error
