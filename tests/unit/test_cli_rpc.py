"""The command over a real gRPC connection: token, documents, and a service's own error words."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_status import rpc_status

from readyplane.core.errors import Unauthenticated, UnknownField
from readyplane.v1 import planner_pb2 as pb
from readyplane.v1 import planner_pb2_grpc as pb_grpc
from readyplane.wire import error_to_status
from tests.unit.cli_world import Terminal, clean_environment


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    return Terminal(capfd)


class _Planner(pb_grpc.PlannerServicer):
    """Knows one decision, wants a token, and refuses every policy as the real one would."""

    def ListDecisions(self, request: Any, context: grpc.ServicerContext) -> Any:
        if ("authorization", "Bearer t") not in context.invocation_metadata():
            context.abort_with_status(rpc_status.to_status(error_to_status(Unauthenticated())))
        document = json.dumps({"decision_id": "d1-a", "at_s": 1.0, "changes": [], "summary": "s"})
        return pb.ListDecisionsResponse(decisions=[pb.DecisionSummary(decision_json=document)])

    def GetPolicy(self, request: Any, context: grpc.ServicerContext) -> Any:
        return pb.GetPolicyResponse(policy_json="{}", version=1)

    def SetPolicy(self, request: Any, context: grpc.ServicerContext) -> Any:
        error = UnknownField("policy.ttft_s", 3, "it belongs to policy.slo.ttft_s")
        context.abort_with_status(rpc_status.to_status(error_to_status(error)))


def test_over_a_real_connection(cli: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_PlannerServicer_to_server(_Planner(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        given = ("--planner", f"127.0.0.1:{port}")
        nameless = cli("decisions", *given)
        assert nameless.code == 1 and "set READYPLANE_TOKEN" in nameless.err
        monkeypatch.setenv("READYPLANE_TOKEN", "t")
        assert cli("decisions", "--json", *given).document["decisions"][0]["summary"] == "s"
        refused = cli("policy", "set", "ttft_s=3", *given)
        assert refused.code == 2
        assert refused.err == (
            "error policy.ttft_s: 3 is not valid; it belongs to policy.slo.ttft_s\n"
        )
    finally:
        server.stop(0)
