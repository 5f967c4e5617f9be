"""The planner over gRPC: translates messages and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from readyplane.core.errors import InvalidField
from readyplane.core.identity import digest_of, parse
from readyplane.v1 import planner_pb2 as pb
from readyplane.v1 import planner_pb2_grpc
from readyplane.wire.scalars import timestamp
from readyplane_planner.document import dumps
from readyplane_planner.service import PlannerService

FULL_NAME = "readyplane.v1.Planner"
PAGE_DEFAULT = 50
PAGE_MAX = 200
Context = grpc.aio.ServicerContext[Any, Any]


def register(server: grpc.aio.Server, service: PlannerService) -> None:
    """Serve `service` on a gRPC server."""
    planner_pb2_grpc.add_PlannerServicer_to_server(PlannerServicer(service), server)


class PlannerServicer(planner_pb2_grpc.PlannerServicer):
    """One method for each rpc of planner.proto."""

    def __init__(self, service: PlannerService) -> None:
        self._service = service

    async def GetState(self, request: pb.GetStateRequest, context: Context) -> pb.GetStateResponse:
        return pb.GetStateResponse(state_json=dumps(await self._service.state(request.model)))

    async def WatchState(
        self, request: pb.WatchStateRequest, context: Context
    ) -> AsyncIterator[pb.WatchStateResponse]:
        async for state in self._service.watch_state(request.model):
            yield pb.WatchStateResponse(state_json=dumps(state))

    async def ListDecisions(
        self, request: pb.ListDecisionsRequest, context: Context
    ) -> pb.ListDecisionsResponse:
        size = min(request.page_size or PAGE_DEFAULT, PAGE_MAX)
        if size < 1:
            raise InvalidField("page_size", request.page_size, f"use 1 to {PAGE_MAX}")
        found = await self._service.list_decisions(
            model=request.model,
            limit=size,
            changes_only=request.changes_only,
            before=page_of(request.page_token),
        )
        return pb.ListDecisionsResponse(
            decisions=[
                pb.DecisionSummary(
                    decision_id=d["decision_id"],
                    create_time=timestamp(d["at_s"]),
                    model=d["model"],
                    summary=d["summary"],
                    decision_json=dumps(d),
                )
                for d in found
            ],
            next_page_token=str(found[-1]["sequence"]) if len(found) == size else "",
        )

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        answer = await self._service.explain(request.decision_id)
        return pb.ExplainResponse(explanation_json=dumps(answer), text=answer["text"])

    async def Replay(self, request: pb.ReplayRequest, context: Context) -> pb.ReplayResponse:
        return pb.ReplayResponse(replay_json=dumps(await self._service.replay(request.decision_id)))

    async def WhatIf(self, request: pb.WhatIfRequest, context: Context) -> pb.WhatIfResponse:
        answer = await self._service.what_if(dict(request.changes), model=request.model)
        return pb.WhatIfResponse(what_if_json=dumps(answer), text=answer["text"])

    async def GetPolicy(
        self, request: pb.GetPolicyRequest, context: Context
    ) -> pb.GetPolicyResponse:
        policy, version = await self._service.get_policy(request.model)
        return pb.GetPolicyResponse(
            policy_json=dumps(policy), version=version, digest=digest_of(policy)
        )

    async def SetPolicy(
        self, request: pb.SetPolicyRequest, context: Context
    ) -> pb.SetPolicyResponse:
        document = parse(request.policy_json, where="policy")
        if not isinstance(document, dict):
            raise InvalidField("policy_json", document, "write an object of policy fields")
        policy, version = await self._service.set_policy(
            document,
            model=request.model,
            merge=request.merge,
            expected_version=request.expected_version,
        )
        return pb.SetPolicyResponse(
            policy_json=dumps(policy), version=version, digest=digest_of(policy)
        )

    async def SetPaused(
        self, request: pb.SetPausedRequest, context: Context
    ) -> pb.SetPausedResponse:
        paused = await self._service.set_paused(
            request.paused, model=request.model, reason=request.reason
        )
        return pb.SetPausedResponse(paused=paused)

    async def GetRollout(
        self, request: pb.GetRolloutRequest, context: Context
    ) -> pb.GetRolloutResponse:
        shown = await self._service.upgrades.show(request.model)
        return pb.GetRolloutResponse(rollout_json=dumps(shown))

    async def AskRollout(
        self, request: pb.AskRolloutRequest, context: Context
    ) -> pb.AskRolloutResponse:
        if not request.request_id:
            raise InvalidField("request_id", "", "give each wish an id of its own")
        shown = await self._service.upgrades.ask(
            request.action,
            asked_id=request.request_id,
            to=request.to,
            surge=request.surge,
            by=request.by,
            model=request.model,
        )
        return pb.AskRolloutResponse(rollout_json=dumps(shown))


def page_of(token: str) -> int:
    """The sequence of a page token; an empty one is the beginning."""
    if token and not token.isdigit():
        raise InvalidField("page_token", token, "send back the token of the last page")
    return int(token or 0)
