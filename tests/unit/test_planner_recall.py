"""A recorded decision is taken again and must come out the same; what differs is named by field."""

import gzip
from dataclasses import replace
from typing import Any

import pytest

from readyplane.core.errors import InvalidField, NotFound
from readyplane_planner.decide import Decision, Memory, Plan, decide
from readyplane_planner.journal import Record
from readyplane_planner.recall import recall
from readyplane_planner.signals import Observation
from tests.unit.planner_world import HandClock, Run, World, planner


@pytest.fixture
async def run() -> Run:
    found = await planner(World(HandClock(), rps=lambda _t: 5.0))
    await found.step(40)
    return found


async def newest(run: Run) -> Record:
    listed = await run.journal.newest("demo", limit=1, changes_only=True)
    return (await run.journal.get(listed[0].decision_id))[0]


async def test_every_kept_decision_comes_out_the_same(run: Run) -> None:
    for listed in await run.journal.newest("demo", limit=100):
        found = await run.service.replay(listed.decision_id)
        assert found["same"] is True and found["differences"] == [], listed.decision_id
        assert found["unrecorded"] == []


async def test_what_differs_is_listed_field_by_field(run: Run) -> None:
    record = await newest(run)
    document: dict[str, Any] = dict(record.document)
    document["prefill"] = {**document["prefill"], "target": 5}
    document["orders"] = [*document["orders"], {"worker_id": "p-77"}]
    found = recall(replace(record, document=document))
    assert found["same"] is False
    by_field = {d["field"]: (d["recorded"], d["replayed"]) for d in found["differences"]}
    assert by_field["prefill.target"] == (5, record.document["prefill"]["target"])
    place = len(record.document["orders"])
    assert by_field[f"orders.{place}.worker_id"] == ("p-77", None)


async def test_another_brain_decides_otherwise(run: Run) -> None:
    def bolder(
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        decision, memory = decide(observation, plan, memory, now_s=now_s, decision_id=decision_id)
        return replace(decision, prefill=replace(decision.prefill, target=6)), memory

    found = recall(await newest(run), brain=bolder)
    assert found["same"] is False
    assert "prefill.target" in {d["field"] for d in found["differences"]}


async def test_a_field_that_an_older_planner_did_not_write_is_no_difference(run: Run) -> None:
    record = await newest(run)
    older = {k: v for k, v in record.document.items() if k not in {"candidates", "expected"}}
    found = recall(replace(record, document=older))
    assert found["same"] is True
    assert any(name.startswith("candidates") for name in found["unrecorded"])


async def test_inputs_that_were_changed_are_seen(run: Run) -> None:
    record = await newest(run)
    found = recall(replace(record, document={**record.document, "inputs_digest": "sha256:other"}))
    assert [d["field"] for d in found["differences"]] == ["inputs_digest"]


async def test_what_cannot_be_replayed_says_why(run: Run) -> None:
    record = await newest(run)
    with pytest.raises(NotFound, match="inputs of decision"):
        recall(replace(record, inputs=b""))
    with pytest.raises(InvalidField, match="the version of the planner that wrote it"):
        recall(replace(record, inputs=gzip.compress(b'{"observation": {}}')))
    with pytest.raises(NotFound):
        await run.service.replay("nothing")
