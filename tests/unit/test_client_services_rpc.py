"""The registry, planner and actuator clients: every argument goes out, every answer comes back."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc.aio
import pytest

from readyplane import wire
from readyplane.client import ActuatorClient, PlannerClient, RegistryClient
from readyplane.core.errors import IdentityMismatch, InvalidField, NotFound, Refused
from readyplane.core.identity import ArtifactKind, FileEntry, Manifest
from readyplane.core.startup import StartMode, WeightTier
from readyplane.core.worker import Role
from readyplane.kit.auth import TokenCheck
from readyplane.kit.rpc import OPTIONS, Guard
from readyplane.ports import (
    FetchPlan,
    Instance,
    ManifestSummary,
    Order,
    RankedSource,
    Source,
    Tag,
    Transfer,
)
from readyplane.v1 import (
    actuator_pb2,
    actuator_pb2_grpc,
    planner_pb2,
    planner_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
)

FILE = FileEntry("config.json", 3, "sha256:" + "0" * 64, ("0" * 32,), "config")
MANIFEST = Manifest(ArtifactKind.COMPILE, "m", (FILE,), config={"max_model_len": 8})
SOURCE = Source("s-1", MANIFEST.digest, WeightTier.L1_HOST, "http://peer", "w-2", "i", "n", 1e9, 1)
ORDER = Order(
    "w-1", Role.DECODE, "m", "h200", MANIFEST.digest, 2, StartMode.AOT, "d-1", ("n1", "n2")
)


class Recorder:
    """Keeps each request, answers with what the test has laid out for the method."""

    def __init__(self) -> None:
        self.requests: dict[str, list[Any]] = {}
        self.answers: dict[str, Callable[[Any], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)

        async def answer(request: Any, context: Any) -> Any:
            self.requests.setdefault(name, []).append(request)
            return self.answers[name](request)

        return answer

    async def WatchState(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for tick in range(3):
            yield planner_pb2.WatchStateResponse(state_json=json.dumps({"tick": tick}))


@pytest.fixture
async def server() -> AsyncIterator[tuple[Recorder, str]]:
    recorder = Recorder()
    server = grpc.aio.server(interceptors=(Guard(TokenCheck()),), options=OPTIONS)
    registry_pb2_grpc.add_RegistryServicer_to_server(recorder, server)  # type: ignore[arg-type]
    planner_pb2_grpc.add_PlannerServicer_to_server(recorder, server)  # type: ignore[arg-type]
    actuator_pb2_grpc.add_ActuatorServicer_to_server(recorder, server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield recorder, f"127.0.0.1:{port}"
    await server.stop(0)


async def test_manifests(server: tuple[Recorder, str]) -> None:
    recorder, address = server
    client = RegistryClient(address)
    text, digest = wire.manifest_to_json(MANIFEST), MANIFEST.digest
    recorder.answers = {
        "PublishManifest": lambda r: registry_pb2.PublishManifestResponse(
            digest=digest, created=True
        ),
        "GetManifest": lambda r: registry_pb2.GetManifestResponse(
            digest=digest, manifest_json=text
        ),
        "Resolve": lambda r: registry_pb2.ResolveResponse(digest=digest, manifest_json=text),
    }
    assert await client.publish_manifest(MANIFEST.document(), bytes_elsewhere=True) == (
        digest,
        True,
    )
    sent = recorder.requests["PublishManifest"][0]
    assert sent.manifest_json == text and sent.bytes_elsewhere and len(sent.request_id) == 32
    assert await client.get_manifest(digest) == MANIFEST
    assert await client.resolve("prod", need={"layout": "x"}) == MANIFEST
    sent = recorder.requests["Resolve"][0]
    assert (sent.reference, sent.kind, dict(sent.need)) == ("prod", "weights", {"layout": "x"})
    with pytest.raises(IdentityMismatch, match="asked for sha256:1111"):
        await client.get_manifest("sha256:" + "1" * 64)
    with pytest.raises(InvalidField, match="finite"):
        await client.publish_manifest({"x": float("nan")})
    await client.aclose()


async def test_lists_read_every_page(server: tuple[Recorder, str]) -> None:
    recorder, address = server
    client = RegistryClient(address)
    summaries = [ManifestSummary(str(i), "weights", "m", 1, 1, 0, 5.5, ("t",)) for i in range(3)]

    def page(request: Any) -> Any:
        at = int(request.page_token or 0)
        return registry_pb2.ListManifestsResponse(
            manifests=[wire.manifest_summary_to_proto(summaries[at])],
            next_page_token=str(at + 1) if at < 2 else "",
        )

    recorder.answers["ListManifests"] = page
    assert await client.list_manifests(model="m", kind="weights") == summaries
    assert {(r.model, r.kind) for r in recorder.requests["ListManifests"]} == {("m", "weights")}
    await client.aclose()


async def test_tags_sources_and_transfers(server: tuple[Recorder, str]) -> None:
    recorder, address = server
    client = RegistryClient(address)
    tag = Tag("prod", MANIFEST.digest, 3, 1_700_000_000.25)
    plan = FetchPlan((RankedSource(SOURCE, 0.25, "nearest"),), ("s-2: quarantined",))
    recorder.answers = {
        "SetTag": lambda r: registry_pb2.SetTagResponse(tag=wire.tag_to_proto(tag)),
        "RemoveTag": lambda r: registry_pb2.RemoveTagResponse(
            tag=registry_pb2.Tag(name="prod", version=4)
        ),
        "ListTags": lambda r: registry_pb2.ListTagsResponse(tags=[wire.tag_to_proto(tag)]),
        "AnnounceSource": lambda r: registry_pb2.AnnounceSourceResponse(ttl=wire.duration(4.5)),
        "WithdrawSource": lambda r: registry_pb2.WithdrawSourceResponse(),
        "PlanFetch": lambda r: wire.fetch_plan_to_proto(plan),
        "AcquireTransfer": lambda r: wire.transfer_to_proto(Transfer("t-1", 9.5)),
        "ReleaseTransfer": lambda r: registry_pb2.ReleaseTransferResponse(quarantined=True),
    }
    assert await client.set_tag("prod", "sha256:b", expected_digest="sha256:a", force=True) == tag
    sent = recorder.requests["SetTag"][0]
    assert (sent.name, sent.digest, sent.expected_digest, sent.force) == (
        "prod",
        "sha256:b",
        "sha256:a",
        True,
    )
    gone = await client.remove_tag("prod", expected_digest="sha256:b")
    assert (gone.digest, gone.version) == ("", 4)
    sent = recorder.requests["RemoveTag"][0]
    assert (sent.name, sent.expected_digest, sent.force) == ("prod", "sha256:b", False)
    assert await client.list_tags("prod") == [tag]
    assert await client.announce_source(SOURCE) == 4.5
    assert wire.source_from_proto(recorder.requests["AnnounceSource"][0].source) == SOURCE
    await client.withdraw_source("s-1", reason="drained")
    assert recorder.requests["WithdrawSource"][0].reason == "drained"
    assert await client.plan_fetch("d", worker_id="w", incarnation="i", node="n") == plan
    sent = recorder.requests["PlanFetch"][0]
    assert (sent.digest, sent.worker_id, sent.incarnation, sent.node) == ("d", "w", "i", "n")
    assert await client.acquire_transfer(
        "s-1", "d", worker_id="w", incarnation="i", request_id="q"
    ) == Transfer("t-1", 9.5)
    assert recorder.requests["AcquireTransfer"][0].request_id == "q"
    assert await client.release_transfer(
        "t-1", transferred_bytes=2**40, elapsed_s=0.5, failure="corrupt: chunk 3"
    )
    sent = recorder.requests["ReleaseTransfer"][0]
    assert (sent.transferred_bytes, wire.seconds_of(sent.elapsed_duration), sent.failure) == (
        2**40,
        0.5,
        "corrupt: chunk 3",
    )
    await client.aclose()


async def test_the_planner(server: tuple[Recorder, str]) -> None:
    recorder, address = server
    client = PlannerClient(address)

    def decisions(request: Any) -> Any:
        at = int(request.page_token or 0)
        shown = range(at, min(500, at + request.page_size))
        return planner_pb2.ListDecisionsResponse(
            decisions=[planner_pb2.DecisionSummary(decision_json=f'{{"n":{n}}}') for n in shown],
            next_page_token=str(shown.stop) if shown.stop < 500 else "",
        )

    def explain(request: Any) -> Any:
        if request.decision_id != "d-1":
            raise NotFound("decision", request.decision_id)
        return planner_pb2.ExplainResponse(explanation_json='{"id":"d-1"}', text="because")

    recorder.answers = {
        "GetState": lambda r: planner_pb2.GetStateResponse(
            state_json=json.dumps({"model": r.model})
        ),
        "ListDecisions": decisions,
        "Explain": explain,
        "GetPolicy": lambda r: planner_pb2.GetPolicyResponse(policy_json='{"a":1}', version=3),
        "SetPolicy": lambda r: planner_pb2.SetPolicyResponse(
            policy_json=r.policy_json, version=r.expected_version + 1
        ),
        "SetPaused": lambda r: planner_pb2.SetPausedResponse(paused=r.paused),
        "GetRollout": lambda r: planner_pb2.GetRolloutResponse(
            rollout_json=json.dumps({"model": r.model})
        ),
        "AskRollout": lambda r: planner_pb2.AskRolloutResponse(
            rollout_json=json.dumps({"asked": [r.action, r.to, r.surge, r.by]})
        ),
    }
    assert await client.state("m") == {"model": "m"}
    found = await client.list_decisions(limit=250, changes_only=True)
    assert [d["n"] for d in found] == list(range(250))
    assert len(await client.list_decisions(limit=10_000)) == 500
    assert await client.explain("d-1") == {"id": "d-1", "text": "because"}
    with pytest.raises(NotFound) as caught:
        await client.explain("d-2")
    assert (caught.value.what, caught.value.name) == ("decision", "d-2")
    assert await client.get_policy() == ({"a": 1}, 3)
    assert await client.set_policy({"b": None}, merge=True, expected_version=3) == ({"b": None}, 4)
    assert recorder.requests["SetPolicy"][0].merge
    assert await client.set_paused(True, reason="maintenance")
    assert recorder.requests["SetPaused"][0].reason == "maintenance"
    assert await client.rollout("m") == {"model": "m"}
    assert await client.ask_rollout("go", to="t", surge=2, by="ann") == {
        "asked": ["go", "t", 2, "ann"]
    }
    assert recorder.requests["AskRollout"][0].request_id
    async with aclosing(client.watch_state()) as states:  # type: ignore[type-var]
        assert [(await anext(states))["tick"] for _ in range(3)] == [0, 1, 2]
        ended = await anext(states)
        assert ended["tick"] == 2 and "ended" in ended["degraded"]
        assert await anext(states) == {"tick": 0}
    await client.aclose()


async def test_the_actuator(server: tuple[Recorder, str]) -> None:
    recorder, address = server
    client = ActuatorClient(address)
    instance = Instance(ORDER, "running", pid=5, running_ago_s=0.0, exit_code=None)
    ended = Instance(ORDER, "exited", exited_ago_s=1.5, exit_code=0, log_tail="bye\n")

    def provision(request: Any) -> Any:
        if request.leader_epoch < 4:
            raise Refused("order", ["leader_epoch 3 is fenced off by 4"], "follow the leader")
        return actuator_pb2.ProvisionResponse(instance=wire.instance_to_proto(instance))

    recorder.answers = {
        "Provision": provision,
        "Release": lambda r: actuator_pb2.ReleaseResponse(instance=wire.instance_to_proto(ended)),
        "ListInstances": lambda r: actuator_pb2.ListInstancesResponse(
            instances=[wire.instance_to_proto(i) for i in (instance, ended)]
        ),
    }
    assert await client.provision(ORDER, leader_epoch=4) == instance
    assert wire.order_from_proto(recorder.requests["Provision"][0].order) == ORDER
    with pytest.raises(Refused, match="fenced off") as caught:
        await client.provision(ORDER, leader_epoch=3)
    assert caught.value.reasons == ("leader_epoch 3 is fenced off by 4",)
    assert await client.release("w-1", grace_s=2.5, reason="scale-down", leader_epoch=4) == ended
    sent = recorder.requests["Release"][0]
    assert (sent.worker_id, wire.seconds_of(sent.grace_duration), sent.reason) == (
        "w-1",
        2.5,
        "scale-down",
    )
    assert await client.list_instances() == [instance, ended]
    await client.aclose()
