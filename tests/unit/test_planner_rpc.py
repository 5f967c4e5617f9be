"""The planner's doors: gRPC through the real client, REST through the real application."""

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import grpc.aio
import httpx
import pytest
from fastapi import FastAPI

from readyplane.client import PlannerClient
from readyplane.core.errors import Conflict, InvalidField, NotFound, Refused, UnknownField
from readyplane.kit.auth import TokenCheck
from readyplane.kit.http import make_app
from readyplane.kit.rpc import Guard
from readyplane.kit.telemetry import Metrics
from readyplane_planner import api, rpc
from readyplane_planner.metrics import PlannerMetrics
from tests.unit.planner_world import HandClock, Run, World, planner, policy


@pytest.fixture
async def run() -> Run:
    found = await planner(World(HandClock(), rps=lambda _t: 5.0))
    await found.step(30)
    assert len(await found.service.list_decisions(limit=9)) >= 3
    return found


@pytest.fixture
async def client(run: Run) -> AsyncIterator[PlannerClient]:
    server = grpc.aio.server(interceptors=(Guard(TokenCheck("")),))
    rpc.register(server, run.service)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    made = PlannerClient(f"127.0.0.1:{port}")
    yield made
    await made.aclose()
    await server.stop(None)


@pytest.fixture
async def http(run: Run) -> AsyncIterator[httpx.AsyncClient]:
    app: FastAPI = make_app("planner", TokenCheck(""), set(), lambda: (True, ""))
    app.include_router(api.routes(run.service))
    api.mount_page(app)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://planner") as made:
        yield made


async def test_grpc_says_what_the_service_says(run: Run, client: PlannerClient) -> None:
    assert await client.state() == json.loads(json.dumps(await run.service.state()))
    listed = await client.list_decisions(limit=3, changes_only=True)
    assert [d["decision_id"] for d in listed] == [
        d["decision_id"] for d in await run.service.list_decisions(limit=3, changes_only=True)
    ]
    told = await client.explain(listed[0]["decision_id"])
    assert told["text"].startswith(listed[0]["decision_id"])
    policy, version = await client.get_policy()
    assert (policy["model"], version) == ("demo", 1)
    assert (await client.set_policy({"headroom": 0.4}, merge=True))[1] == 2
    assert await client.set_paused(True) is True
    assert (await run.service.get_policy())[0]["paused"] is True


async def test_a_decision_is_taken_again_and_asked_about_over_both_doors(
    run: Run, client: PlannerClient, http: httpx.AsyncClient
) -> None:
    one = (await run.service.list_decisions(limit=1))[0]["decision_id"]
    again = await client.replay(one)
    assert again["same"] is True and again == (await http.get(f"/v1/replay/{one}")).json()
    changes = {"isl": "2x", "policy.headroom": "0.3"}
    asked = await client.what_if(changes)
    assert asked == (await http.post("/v1/what-if", json=changes)).json()
    assert asked["text"].startswith("what if isl=2x, policy.headroom=0.3")
    with pytest.raises(UnknownField, match="did you mean isl"):
        await client.what_if({"isll": "2x"})
    refused = await http.post("/v1/what-if", json={"isll": "2x"})
    assert refused.json()["error"]["reason"] == "UnknownField"
    with pytest.raises(NotFound):
        await client.replay("nothing")
    with pytest.raises(NotFound):
        await client.what_if(changes, model="another")


async def test_grpc_watches(run: Run, client: PlannerClient) -> None:
    states = client.watch_state()
    first = await asyncio.wait_for(anext(states), 5)
    assert first["model"] == "demo" and "history" not in first
    await run.step(1)
    second = await asyncio.wait_for(anext(states), 5)
    assert second["now_s"] > first["now_s"]
    await states.aclose()  # type: ignore[attr-defined]


async def test_grpc_pages_through_decisions(run: Run, client: PlannerClient) -> None:
    everything = await run.service.list_decisions(limit=100)
    assert len(everything) >= 3
    assert len(await client.list_decisions(limit=100)) == len(everything)


@pytest.mark.parametrize(
    ("document", "error", "status", "field"),
    [
        ({"max_step": 1}, UnknownField, 422, "policy.max_step"),
        ({"prefill": {"min": -1}}, InvalidField, 422, "policy.prefill.min"),
    ],
)
async def test_grpc_and_rest_agree_on_errors(
    client: PlannerClient,
    http: httpx.AsyncClient,
    document: dict[str, Any],
    error: type[InvalidField],
    status: int,
    field: str,
) -> None:
    with pytest.raises(error) as caught:
        await client.set_policy(document, merge=True)
    answer = await http.patch("/v1/policy", json=document)
    body = answer.json()["error"]
    assert caught.value.field == body["field"] == field
    assert body["reason"] == error.__name__ and answer.status_code in {400, status}
    with pytest.raises(NotFound):
        await client.explain("nothing")
    assert (await http.get("/v1/explain/nothing")).status_code == 404
    for of, name in product(("decisions", "explain", "replay"), ("%00", "%0A", "d" * 129)):
        wrong = await http.get(f"/v1/{of}/{name}")
        assert wrong.status_code in {400, 422} and "decision_id" in wrong.text
    with pytest.raises(Conflict):
        await client.set_policy({"headroom": 0.2}, merge=True, expected_version=7)
    answer = await http.patch("/v1/policy", json={"headroom": 0.2}, headers={"If-Match": '"7"'})
    assert answer.status_code == 409


async def test_rest_reads(run: Run, http: httpx.AsyncClient) -> None:
    state = (await http.get("/v1/state")).json()
    assert set(state["pools"]) == {"prefill", "decode"}
    assert {"t_s", "prefill", "decode", "ttft_actual_p90_s"} <= set(state["history"])
    assert {w["worker_id"] for w in state["workers"]} == {
        name for name, box in run.world.boxes.items() if box.alive
    }
    page = (await http.get("/v1/decisions", params={"limit": 2})).json()
    assert len(page["decisions"]) == 2
    more = (await http.get("/v1/decisions", params={"before": page["next_before"]})).json()
    assert more["decisions"][0]["sequence"] < page["decisions"][-1]["sequence"]
    one = page["decisions"][0]["decision_id"]
    assert (await http.get(f"/v1/decisions/{one}")).json()["decision_id"] == one
    assert (await http.get(f"/v1/explain/{one}")).json()["answer"]
    assert (await http.get("/v1/state", params={"model": "x"})).status_code == 404
    assert (await http.get("/v1/stream", params={"model": "x"})).status_code == 404
    assert (await http.get("/v1/decisions", params={"limit": 0})).status_code in {400, 422}


async def test_rest_policy_and_pause(run: Run, http: httpx.AsyncClient) -> None:
    found = await http.get("/v1/policy")
    assert found.headers["etag"] == '"1"'
    whole = found.json()["policy"]
    put = await http.put("/v1/policy", json={**whole, "headroom": 0.5}, headers={"If-Match": '"1"'})
    assert put.json()["version"] == 2 and put.json()["digest"] != found.json()["digest"]
    assert (await http.post("/v1/pause", json={"paused": True})).json() == {"paused": True}
    assert (await run.service.get_policy())[0]["headroom"] == 0.5
    assert (await http.post("/v1/pause", json={"paused": 1})).status_code in {400, 422}
    assert (await http.post("/v1/pause", json={"pause": True})).status_code in {400, 422}
    bad = await http.patch("/v1/policy", json={"headroom": 1}, headers={"If-Match": "x"})
    assert bad.json()["error"]["field"] == "If-Match"


async def test_rest_stream_sends_a_state_a_tick(run: Run) -> None:
    stopping = asyncio.Event()
    states = run.service.watch_state()
    events = api._events(await anext(states), states, stopping)
    first = await anext(events)
    assert first.startswith("data: {") and first.endswith("\n\n")
    coming = asyncio.ensure_future(_next(events))
    await run.step(1)
    second = json.loads((await asyncio.wait_for(coming, 5)).removeprefix("data: "))
    assert second["now_s"] > json.loads(first.removeprefix("data: "))["now_s"]
    stopping.set()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(_next(events), 5)
    assert not run.service._watchers, "a closed stream leaves nothing behind"


async def _next(events: AsyncIterator[str]) -> str:
    return await anext(events)


async def test_the_page_is_served(http: httpx.AsyncClient) -> None:
    page = await http.get("/")
    assert page.status_code == 200 and "text/html" in page.headers["content-type"]
    assert (await http.get("/openapi.json")).json()["paths"]["/v1/policy"].keys() >= {
        "get",
        "put",
        "patch",
    }


async def test_metrics_carry_the_names_of_the_requirements() -> None:
    """R24.1, B164: every name with pool, class and model; what is not known is absent, not zero."""
    registry = Metrics()
    slow = policy(forecast={"warmup_s": 120.0})
    run = await planner(World(HandClock(), rps=lambda _t: 5.0), slow)
    run.service._metrics = PlannerMetrics(registry)
    await run.step(30)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    pool = {"pool": "prefill", "worker_class": "h200-slow10", "model": "demo"}
    calibration = ("readyplane_forecast_coverage_ratio", "readyplane_forecast_pinball_loss")
    assert [value(name, **pool) for name in calibration] == [None, None], "nothing is judged yet"
    state = (await run.service.state())["pools"]["prefill"]
    for name, key in (
        ("readyplane_desired_replicas", "desired"),
        ("readyplane_provisioned_replicas", "provisioned"),
        ("readyplane_ready_replicas", "ready"),
        ("readyplane_desired_ready_gap_tokens_per_second", "gap_rate"),
        ("readyplane_ttft_predicted_seconds", "predicted_s"),
        ("readyplane_ttft_actual_seconds", "actual_s"),
        ("readyplane_prefill_queue_tokens", "queue_tokens"),
        ("readyplane_kv_usage_ratio", "kv_usage"),
        ("readyplane_load_ratio", "load"),
    ):
        assert value(name, **pool) == pytest.approx(state[key]), name
    decode = {**pool, "pool": "decode"}
    assert value("readyplane_decode_active_sequences", **decode) is not None
    assert value("readyplane_tpot_predicted_seconds", **decode) is not None
    assert value("readyplane_decisions_total", model="demo", kind="order") >= 1  # type: ignore[operator]
    assert value("readyplane_actuations_total", model="demo", outcome="ordered") == len(
        run.world.provisions
    )
    assert value("readyplane_signal_age_seconds", model="demo", signal="queue") == 0.0
    assert value("readyplane_t_ready_seconds", **pool, quantile="p90") == state["t_ready_p90_s"]
    await run.step(150)
    coverage, pinball = (value(name, **pool) for name in calibration)
    assert coverage is not None and 0.0 <= coverage <= 1.0
    assert pinball is not None and pinball >= 0.0
    run.world.empty = True
    await run.step(3)
    assert value("readyplane_ttft_predicted_seconds", **pool) is None
    assert value("readyplane_prefill_queue_tokens", **pool) is None
    assert value("readyplane_signal_age_seconds", model="demo", signal="queue") is None


async def test_a_roll_out_is_asked_for_and_shown_at_both_doors(
    run: Run, client: PlannerClient, http: httpx.AsyncClient
) -> None:
    shown = await client.rollout()
    assert shown["phase"] == "idle"
    assert (await http.get("/v1/rollout")).json()["serves"] == shown["serves"]
    with pytest.raises(Refused, match="nothing is being rolled out"):
        await client.ask_rollout("pause", by="ann")
    refused = await http.post("/v1/rollout", json={"id": "r1", "action": "undo"})
    assert refused.status_code == 422
    assert "nothing to go back to" in refused.text
    wrong = await http.post("/v1/rollout", json={"id": "r1", "action": "fly"})
    assert wrong.status_code == 422
    new = "sha256:" + "b" * 64
    await run.service.set_policy({"manifest": new}, merge=True)
    await run.step(2)
    paused = await http.post("/v1/rollout", json={"id": "r2", "action": "pause", "by": "ann"})
    assert paused.status_code == 200
    assert paused.json()["policy"]["asked"]["action"] == "pause"
    await run.step(1)
    assert (await client.rollout())["phase"] == "paused"
