"""Reasons: whoever reads a change of a target learns why it was right, with the numbers."""

import re
from typing import Any

from readyplane.core.worker import Role, WorkerState
from readyplane.ports import LatencyWindow
from tests.unit.planner_world import HandClock, Run, World, planner, policy


def world(**changes: Any) -> World:
    return World(HandClock(), **changes)


def changes(run: Run, pool: str) -> list[tuple[int, list[tuple[str, str]]]]:
    """(difference, reasons of that pool in order) of each decision that moved its target."""
    found = []
    for made in run.decisions:
        moved = made.pool(pool)
        if moved.before != moved.target:
            mine = [(r.code, r.text) for r in made.why if r.pool == pool]
            found.append((moved.target - moved.before, mine))
    return found


async def test_every_change_has_a_reason_of_its_own_pool_with_numbers() -> None:
    run = await planner(world(rps=lambda t: 7.5 if 15 <= t < 90 else 0.8))
    await run.step(260)
    up = {"demand", "queue", "sequences", "floor"}
    for pool, short in (("prefill", "P"), ("decode", "D")):
        moved = changes(run, pool)
        assert {by > 0 for by, _reasons in moved} == {True, False}
        for by, reasons in moved:
            code, text = reasons[0]
            assert code in (up if by > 0 else {"surplus"}), (pool, by, reasons)
            assert len(re.findall(r"\d", text)) >= 2, text
            if code != "floor":
                assert text.startswith(f"{short} needs "), text
    for made in run.decisions:
        codes = [r.code for r in made.why]
        assert codes and (codes == ["steady"] or "steady" not in codes)
        assert not (made.changed and "steady" in codes)
        assert made.why[0].pool or not made.changed


async def test_growth_says_what_comes_what_waits_and_what_is_there() -> None:
    run = await planner(world(rps=lambda t: 8.0 if t >= 15 else 1.0))
    await run.step(40)
    text = next(m[0][1] for by, m in changes(run, "prefill")[1:] if by > 0)
    assert re.fullmatch(
        r"P needs \d+\.\d workers: [\d,]+ tokens/s expected \(P90 of the next \d+\.\d s \+ 10%\), "
        r"\d+\.\d% may be late \+ [\d,]+ queued, [\d,]+ tokens/s a worker; "
        r"\d ready(, \d arriving(, the first)? in \d+\.\d s)?; Load_P \d+\.\d",
        text,
    )
    needed = float(text.split()[2])
    assert needed > 1.0


async def test_shrinking_says_how_long_and_how_little() -> None:
    run = await planner(world(rps=lambda t: 7.0 if t < 60 else 0.8))
    await run.step(150)
    text = next(m[0][1] for by, m in changes(run, "prefill") if by < 0)
    assert re.match(
        r"P needs \d\.\d of \d workers, \d\.\d with the band of 10%, for \d+\.\d s "
        r"\(\d+\.\d s are asked for\): ",
        text,
    )


async def test_what_a_worker_makes_is_told_with_its_target() -> None:
    """Long contexts fill the KV pool before the batch is slow: a worker makes less, and it is said."""

    async def told(isl: float) -> float:
        w = world(rps=lambda _t: 0.35, isl=lambda _t: isl, osl=lambda _t: 900.0)
        run = await planner(w, policy(slo={"ttft_s": 60.0, "tpot_s": 1.5}, decode={"max": 8}))
        await run.step(150)
        texts = " ".join(t for by, m in changes(run, "decode") if by > 0 for _c, t in m)
        found = re.search(r"D needs .* may be late, ([\d,]+) tokens/s a worker at TPOT", texts)
        assert found is not None, texts
        return float(found[1].replace(",", ""))

    assert await told(120_000.0) < 0.7 * await told(60_000.0)


async def test_a_crash_is_replaced_and_said_so() -> None:
    w = world()
    run = await planner(w)
    await run.step(30)
    box = w.members(Role.DECODE, WorkerState.READY)[0]
    box.exited_s, box.state, box.failed = w.clock.now_s, WorkerState.GONE, True
    await run.step(2)
    ordered = next(d for d in run.decisions[-2:] if d.orders)
    assert ordered.why[0].pool == "decode"
    assert ordered.why[0].code in {"floor", "replace"}
    assert "drift" in {r.code for r in ordered.why}


async def test_the_first_ticks_say_one_clause() -> None:
    """Six signals that are missing for one reason are one clause."""
    w = world()
    w.empty = True
    run = await planner(w)
    await run.step(2)
    told = [r.text for r in run.decisions[-1].why if r.code == "hold"]
    names = "arrivals, prefill work, finished, queue, in flight, decoding"
    assert told == [f"no request has been seen yet: {names} unknown"] * 2
    w.empty = False
    await run.step(20)
    w.empty = True
    await run.step(2)
    told = [r.text for r in run.decisions[-1].why if r.code == "hold"]
    assert told and told[0].startswith("the router answered without this model: arrivals, ")


async def test_the_actual_latency_tells_of_the_present() -> None:
    """R3.1: a stated quantile over a stated window; a longer one tells of what has passed."""
    w = world(rps=lambda t: 7.0 if t < 40 else 1.0)
    run = await planner(w)
    await run.step(60)
    stale = LatencyWindow(60.0, 200, 7.0, 7.0, 7.0)
    w.overrides = {"ttft_actual": stale, "tpot_actual": stale}
    await run.step(1)
    pool = (await run.service.state())["pools"]["prefill"]
    assert pool["actual_s"] is None and pool["load"] == pool["predicted_s"] / 2.0 < 1.0
    assert "actual_unknown" in run.codes()
    w.overrides = {"ttft_actual": LatencyWindow(20.0, 9, 7.0, 7.0, 7.0)}
    await run.step(1)
    few = (await run.service.state())["pools"]["prefill"]
    assert few["actual_s"] is None, "nine samples are too few"
    w.overrides = {"ttft_actual": LatencyWindow(20.0, 10, 7.0, 7.0, 7.0)}
    await run.step(1)
    enough = (await run.service.state())["pools"]["prefill"]
    assert enough["actual_s"] == 7.0 and enough["load"] == 3.5


async def test_shrinking_does_not_wait_for_latencies_to_be_forgotten() -> None:
    slow = LatencyWindow(20.0, 50, 7.0, 7.0, 7.0)
    w = world(rps=lambda t: 7.0 if t < 40 else 0.5, overrides={"ttft_actual": slow})
    run = await planner(w)
    await run.step(40)
    grown = run.desired[-1][1]
    await run.step(60)
    assert run.desired[-1][1] < grown
