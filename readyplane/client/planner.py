"""The planner over gRPC: implements `readyplane.ports.Planner`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc.aio

from readyplane import wire
from readyplane.client.channel import ServiceClient, built
from readyplane.core.identity import canonical
from readyplane.v1 import planner_pb2 as pb
from readyplane.v1 import planner_pb2_grpc

PAGE_SIZE = 200


class PlannerClient(ServiceClient):
    """`readyplane.ports.Planner` over gRPC."""

    service = "planner"

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        return planner_pb2_grpc.PlannerStub(channel)

    async def state(self, model: str = "") -> dict[str, Any]:
        """What a person watches."""
        response: pb.GetStateResponse = await self.call(
            "GetState", lambda: pb.GetStateRequest(model=model)
        )
        return wire.object_of(response.state_json, "state_json")

    async def watch_state(self, model: str = "") -> AsyncIterator[dict[str, Any]]:
        """The same after every tick; while the planner is away, the last one with `degraded` set."""
        last: dict[str, Any] = {}

        def read(message: pb.WatchStateResponse) -> dict[str, Any]:
            nonlocal last
            last = wire.object_of(message.state_json, "state_json")
            return last

        def degraded(why: str) -> dict[str, Any]:
            return {**last, "degraded": why}

        request = built("WatchState", lambda: pb.WatchStateRequest(model=model))
        async for state in self.follow("WatchState", request, read, degraded):
            yield state

    async def list_decisions(
        self, *, model: str = "", limit: int = 50, changes_only: bool = False
    ) -> list[dict[str, Any]]:
        """Newest first, `limit` at most."""
        found: list[dict[str, Any]] = []
        token = ""
        while len(found) < limit:
            size = min(PAGE_SIZE, limit - len(found))
            response: pb.ListDecisionsResponse = await self.call(
                "ListDecisions",
                lambda size=size, token=token: pb.ListDecisionsRequest(  # type: ignore[misc]
                    model=model, page_size=size, page_token=token, changes_only=changes_only
                ),
            )
            found += [wire.object_of(d.decision_json, "decision_json") for d in response.decisions]
            token = response.next_page_token
            if not token or not response.decisions:
                break
        return found[:limit]

    async def explain(self, decision_id: str) -> dict[str, Any]:
        """One decision with what came of it; `text` is the same for a terminal."""
        response: pb.ExplainResponse = await self.call(
            "Explain", lambda: pb.ExplainRequest(decision_id=decision_id)
        )
        found = wire.object_of(response.explanation_json, "explanation_json")
        if response.text:
            found.setdefault("text", response.text)
        return found

    async def replay(self, decision_id: str) -> dict[str, Any]:
        """It is taken again from its recorded inputs and compared."""
        response: pb.ReplayResponse = await self.call(
            "Replay", lambda: pb.ReplayRequest(decision_id=decision_id)
        )
        return wire.object_of(response.replay_json, "replay_json")

    async def what_if(self, changes: Mapping[str, str], *, model: str = "") -> dict[str, Any]:
        """The last decision beside the one under changes; `text` is the same for a terminal."""
        response: pb.WhatIfResponse = await self.call(
            "WhatIf", lambda: pb.WhatIfRequest(model=model, changes=dict(changes))
        )
        found = wire.object_of(response.what_if_json, "what_if_json")
        if response.text:
            found.setdefault("text", response.text)
        return found

    async def get_policy(self, model: str = "") -> tuple[dict[str, Any], int]:
        """Policy in force and its version."""
        response: pb.GetPolicyResponse = await self.call(
            "GetPolicy", lambda: pb.GetPolicyRequest(model=model)
        )
        return wire.object_of(response.policy_json, "policy_json"), response.version

    async def set_policy(
        self,
        policy: Mapping[str, Any],
        *,
        model: str = "",
        merge: bool = False,
        expected_version: int = 0,
    ) -> tuple[dict[str, Any], int]:
        """Compare-and-set."""
        response: pb.SetPolicyResponse = await self.call(
            "SetPolicy",
            lambda: pb.SetPolicyRequest(
                request_id=self._make_id(),
                model=model,
                policy_json=canonical(policy, where="policy").decode(),
                merge=merge,
                expected_version=expected_version,
            ),
        )
        return wire.object_of(response.policy_json, "policy_json"), response.version

    async def rollout(self, model: str = "") -> dict[str, Any]:
        """Where the roll-out is."""
        response: pb.GetRolloutResponse = await self.call(
            "GetRollout", lambda: pb.GetRolloutRequest(model=model)
        )
        return wire.object_of(response.rollout_json, "rollout_json")

    async def ask_rollout(
        self, action: str, *, to: str = "", surge: int = 0, by: str = "", model: str = ""
    ) -> dict[str, Any]:
        """Begin a roll-out (go), or pause, resume or undo the one under way."""
        response: pb.AskRolloutResponse = await self.call(
            "AskRollout",
            lambda: pb.AskRolloutRequest(
                request_id=self._make_id(), model=model, action=action, to=to, surge=surge, by=by
            ),
        )
        return wire.object_of(response.rollout_json, "rollout_json")

    async def set_paused(
        self,
        paused: bool,
        *,
        model: str = "",
        reason: str = "",
    ) -> bool:
        """Hold all targets, or let go."""
        response: pb.SetPausedResponse = await self.call(
            "SetPaused",
            lambda: pb.SetPausedRequest(
                request_id=self._make_id(), model=model, paused=paused, reason=reason
            ),
        )
        return response.paused
