"""What-if: the same brain under another load, other starts, another fleet or another policy."""

import asyncio
from typing import Any

import pytest

from readyplane.core.errors import InvalidField, Unavailable, UnknownField
from readyplane_planner.whatif import KEYS, read_changes
from tests.unit.planner_world import HandClock, Run, World, planner


@pytest.fixture(scope="module")
def run() -> Run:
    """Five requests a second on a settled fleet; nobody here changes it."""

    async def settled() -> Run:
        found = await planner(World(HandClock(), rps=lambda _t: 5.0))
        await found.step(150)
        return found

    return asyncio.run(settled())


async def ask(run: Run, **changes: str) -> dict[str, Any]:
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return await run.service.what_if(named)


async def test_no_real_change_is_the_real_decision(run: Run) -> None:
    found = await ask(run, isl="1x", osl="1x", rps="1x", tready="1x")
    assert found["differences"] == [] or {d["field"] for d in found["differences"]} == {"load"}
    last = run.decisions[-1]
    assert found["decision_id"] == last.decision_id
    assert found["as_is"]["prefill"]["target"] == last.prefill.target
    assert found["as_is"]["decode"]["wanted"] == last.decode.wanted


@pytest.mark.parametrize(
    ("changes", "pool", "field", "ratio"),
    [
        ({"isl": "2x"}, "prefill", "demand", 2.0),
        ({"rps": "1.5x"}, "prefill", "demand", 1.5),
        ({"rps": "+50%"}, "decode", "demand", 1.5),
        ({"osl": "2x"}, "decode", "demand", 2.0),
        ({"hit": "0.5"}, "prefill", "demand", 0.5),
        ({"tready": "3x"}, "prefill", "t_ready_p90_s", 3.0),
        ({"tready__decode": "2x"}, "decode", "t_ready_p90_s", 2.0),
    ],
)
async def test_a_factor_of_the_input_is_a_factor_of_what_follows(
    run: Run, changes: dict[str, str], pool: str, field: str, ratio: float
) -> None:
    found = await ask(run, **changes)
    was, then = found["as_is"][pool][field], found["what_if"][pool][field]
    assert then == pytest.approx(ratio * was, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "pool", "other"),
    [
        ({"isl": "3x"}, "prefill", None),
        ({"osl": "3x"}, "decode", "prefill"),
        ({"queue": "80000"}, "prefill", None),
        ({"policy__headroom": "2.0"}, "prefill", None),
    ],
)
async def test_more_work_wants_more_workers_of_its_own_pool(
    run: Run, changes: dict[str, str], pool: str, other: str | None
) -> None:
    """R25.1: an ISL burst grows P, an OSL burst grows D and leaves P."""
    found = await ask(run, **changes)
    assert found["what_if"][pool]["wanted"] > found["as_is"][pool]["wanted"]
    if other is not None:
        assert found["what_if"][other]["wanted"] <= found["as_is"][other]["wanted"]
    now, then = found["as_is"][pool]["wanted"], found["what_if"][pool]["wanted"]
    assert f"  wants {then} instead of {now}" in found["text"] and "because" in found["text"]


async def test_absolute_values_are_of_what_is_now(run: Run) -> None:
    found = await ask(run, isl="2310", osl="422", rps="30", tready="180", hit="0.25")
    by_key = {c["key"]: (c["from"], c["to"]) for c in found["changes"]}
    assert by_key["isl"] == (pytest.approx(1155.0, rel=0.02), 2310.0)
    assert by_key["rps"] == (pytest.approx(5.0, rel=0.2), 30.0)
    assert by_key["osl"][1] == 422.0
    assert by_key["tready"][1] == 180.0
    assert by_key["hit"] == (pytest.approx(0.0, abs=0.02), 0.25)
    assert found["what_if"]["prefill"]["horizon_s"] > 180.0


async def test_a_fleet_can_be_larger_or_smaller(run: Run) -> None:
    now = len([b for b in run.world.boxes.values() if b.alive and b.order.role == "prefill"])
    found = await ask(run, workers__prefill="1", workers__decode="+100%")
    assert found["changes"][0]["from"] == now > 1
    assert found["what_if"]["prefill"]["before"] == 1
    assert found["what_if"]["prefill"]["load"] > found["as_is"]["prefill"]["load"]
    assert found["what_if"]["decode"]["before"] == 2 * found["as_is"]["decode"]["before"]
    assert any("measured latencies" in note for note in found["notes"])


async def test_the_policy_asked_about_is_checked_like_any_other(run: Run) -> None:
    found = await ask(run, policy__prefill__max="1")
    assert found["changes"][0]["from"] == 6 and found["changes"][0]["to"] == 1
    assert found["what_if"]["prefill"]["target"] <= found["as_is"]["prefill"]["target"]
    with pytest.raises(UnknownField, match=r"it belongs to policy\.slo\.ttft_s"):
        await ask(run, policy__ttft_s="1")
    with pytest.raises(InvalidField, match=r"policy\.prefill\.min"):
        await ask(run, policy__prefill__min="9")


async def test_nothing_comes_of_a_question(run: Run) -> None:
    before = (len(run.world.provisions), len(run.world.drains), await run.service.get_policy())
    listed = len(await run.service.list_decisions(limit=200))
    await ask(run, isl="5x", policy__headroom="3", workers__decode="0")
    after = (len(run.world.provisions), len(run.world.drains), await run.service.get_policy())
    assert after == before
    assert len(await run.service.list_decisions(limit=200)) == listed


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"isll": "2x"}, UnknownField, "did you mean isl"),
        ({"zzz": "2x"}, UnknownField, "tready.prefill"),
        ({"policy.": "2"}, UnknownField, "policy.FIELD"),
        ({}, InvalidField, "name a change"),
        ({"isl": "long"}, InvalidField, "write a factor"),
        ({"isl": "-2x"}, InvalidField, "not negative"),
        ({"isl": "nan"}, InvalidField, "not negative"),
        ({"isl": "0"}, InvalidField, "more than 0"),
        ({"isl": "9999x"}, InvalidField, "1000x at most"),
        ({"hit": "40"}, InvalidField, "share from 0 to 1"),
        ({"workers.decode": "99999"}, InvalidField, "workers at most"),
        ({"workers.decode": "1.5"}, InvalidField, "whole number of workers"),
        ({"policy.model": "other"}, InvalidField, "plans one model"),
        ({"policy.slo": "{"}, InvalidField, "YAML"),
    ],
)
def test_a_wrong_question_is_refused_with_what_is_known(
    given: dict[str, str], error: type[InvalidField], words: str
) -> None:
    with pytest.raises(error) as caught:
        read_changes(given)
    assert words in str(caught.value)
    if error is UnknownField:
        assert all(key in caught.value.remedy for key in KEYS)


async def test_there_must_be_something_to_change() -> None:
    run = await planner(World(HandClock()))
    with pytest.raises(Unavailable, match="has not looked yet"):
        await ask(run, isl="2x")
    await run.step(40)
    with pytest.raises(InvalidField, match="there is none of it now"):
        await ask(run, rps="3")


async def test_another_optimiser_can_be_asked_about(run: Run) -> None:
    found = await ask(run, policy__optimiser="tuned")
    assert found["changes"][0]["from"] == "size" and found["changes"][0]["to"] == "tuned"
    assert found["what_if"]["candidates"], "it proposed something"
    with pytest.raises(InvalidField, match="known are"):
        await ask(run, policy__optimiser="oracle")
