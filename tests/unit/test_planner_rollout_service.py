"""Roll-outs through the planner's service: B22, what is asked by a person, and replay."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import pytest

from readyplane.core.errors import InvalidField, NotFound, Refused, Unavailable
from readyplane.core.identity import ArtifactKind, Canary, FileEntry, Manifest, TensorEntry
from readyplane.core.worker import Role, WorkerState
from readyplane.ports import Order, RouterSignals
from readyplane_planner.__main__ import adopt_first
from readyplane_planner.journal import decode_inputs, replay
from readyplane_planner.policy import read_policy
from tests.unit.planner_world import MODEL, HandClock, Run, World, planner, policy

QUICK = {"verify_s": 5.0, "samples_min": 10}


def manifest(revision: int, **changes: object) -> Manifest:
    """An artifact of one tensor."""
    made = Manifest(
        kind=ArtifactKind.WEIGHTS,
        model=MODEL,
        files=(FileEntry("w", 4096, f"sha256:{revision:064x}", ("0" * 32,)),),
        tensors=(TensorEntry("w", "U8", (1024,), "w", 0, 1024),),
        canary=Canary((3,), (6,)),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


ONE, TWO = manifest(1), manifest(2)


class Names:
    """A registry of names."""

    def __init__(self, **known: Manifest) -> None:
        self.known = known

    async def resolve(
        self, reference: str, *, kind: str = "weights", need: Mapping[str, str] | None = None
    ) -> Manifest:
        for name, found in self.known.items():
            if reference in (name, found.digest):
                return found
        raise NotFound("artifact", reference, "publish it first")


async def serving(rps: float = 2.0, **rules: object) -> tuple[Run, Names]:
    """Two of each of the first revision, which the tag names, under a bit of load."""
    names = Names(stable=ONE, other=TWO)
    world = World(HandClock(), rps=lambda _t: rps, t_ready_s=lambda _n: 3.0)
    wanted = policy(
        manifest="stable",
        prefill={"min": 2},
        decode={"min": 2},
        min_ready_s=2.0,
        rollout={**QUICK, **rules},
    )
    run = await planner(world, wanted, registry=names, resolve_every_s=1.0)
    await run.step(15)
    return run, names


def held(run: Run, digest: str) -> tuple[int, int]:
    """Ready (P, D) of an artifact."""
    p, d = (
        sum(b.order.manifest_digest == digest for b in run.world.members(role, WorkerState.READY))
        for role in (Role.PREFILL, Role.DECODE)
    )
    return p, d


async def until(run: Run, phase: str, within_s: int = 120) -> None:
    for _ in range(within_s):
        if run.decisions[-1].rollout.phase == phase:
            return
        await run.step(1)
    pytest.fail(f"no {phase}: {run.decisions[-1].rollout}")


class Lagging(World):
    """A world whose router tells what was so many seconds ago."""

    lag_s = 30.0

    async def signals(self, model: str = "", *, leader_epoch: int = 0) -> RouterSignals:
        told: deque[tuple[float, RouterSignals]] = self.__dict__.setdefault("_told", deque())
        told.append((self.clock.now_s, self._signals_now()))
        while len(told) > 1 and told[1][0] <= self.clock.now_s - self.lag_s:
            told.popleft()
        return told[0][1]


async def test_b22_a_rolling_replacement_in_idle_traffic_moves_no_target() -> None:
    """B22: surge 1, nobody asks, metrics 30 s late, drains of 120 s: the target stays."""
    world = Lagging(HandClock(), drain_s=120.0)
    wanted = policy(
        prefill={"min": 2},
        decode={"min": 2},
        rollout={"verify_s": 10.0},
        eta_bound_factor=10.0,
        orphan_s=120.0,
    )
    run = await planner(world, wanted)
    await run.step(120)
    assert set(run.between(60, 120)) == {(2, 2)}
    new = "sha256:" + "b" * 64
    await run.service.set_policy({"manifest": new}, merge=True)
    most = 0
    for _ in range(120):
        await run.step(5)
        most = max(most, sum(b.alive and b.draining_s is None for b in world.boxes.values()))
        if run.decisions[-1].rollout.phase == "done":
            break
    assert run.decisions[-1].rollout.phase == "done"
    assert set(run.between(121, 10_000)) == {(2, 2)}, "the target moved for nobody"
    assert held(run, new) == (2, 2)
    assert len(world.provisions) == 8, "one order for each worker, and no more"
    assert most <= 6, "the surge and no more beside those who serve"
    counted = {(d.prefill.counts.live, d.decode.counts.live) for d in run.decisions[120:]}
    assert counted == {(2, 2)}, "starting and draining workers are no part of what is counted"


async def test_a_moved_tag_begins_a_roll_out() -> None:
    run, names = await serving()
    names.known["stable"] = TWO
    await until(run, "done")
    assert held(run, TWO.digest) == (2, 2)
    assert held(run, ONE.digest) == (0, 0)
    shown = await run.service.upgrades.show()
    assert shown["by"] == ""
    assert shown["serves"] == {"digest": TWO.digest, "generation": 2}
    assert shown["from"]["digest"] == ONE.digest


async def test_what_a_person_asks_for_is_on_record_and_followed_once() -> None:
    run, _names = await serving()
    asked = await run.service.upgrades.ask("go", asked_id="r1", to="other", surge=2, by="ann@desk")
    assert asked["manifest"] == "other"
    assert asked["policy"]["surge"] == 2
    stored = await run.journal.policy(MODEL)
    assert stored is not None
    wish = stored.document["rollout"]["asked"]
    assert (wish["id"], wish["action"], wish["by"]) == ("r1", "go", "ann@desk")
    assert wish["at_s"] == pytest.approx(run.world.clock.wall_s())
    again = await run.service.upgrades.ask("go", asked_id="r1", to="other", by="ann@desk")
    assert again["policy_version"] == asked["policy_version"]
    await until(run, "moving")
    told = run.decisions[-1].rollout
    assert told.by == "ann@desk"
    await run.service.upgrades.ask("pause", asked_id="r2", by="bob")
    await until(run, "paused")
    await run.step(30)
    assert run.decisions[-1].rollout.reason == "bob asked to pause"
    await run.service.upgrades.ask("undo", asked_id="r3", by="bob")
    await until(run, "rolled_back")
    assert held(run, ONE.digest) == (2, 2)
    assert held(run, TWO.digest) == (0, 0)
    shown = await run.service.upgrades.show()
    assert shown["to"]["digest"] == TWO.digest and shown["serves"]["digest"] == ONE.digest
    assert shown["new"] == {"prefill": 0, "decode": 0}, "nobody of what was asked for serves"
    assert shown["old"] == {"prefill": 2, "decode": 2}
    await run.step(30)
    assert run.decisions[-1].rollout.phase == "rolled_back", "the policy still names it"


async def test_a_tag_moved_to_an_artifact_without_a_known_answer_starts_nothing() -> None:
    """The gate would refuse each of its workers: what serves stays, and the remedy is said."""
    run, names = await serving()
    ordered = len(run.world.provisions)
    names.known["stable"] = manifest(6, canary=None)
    await run.step(20)
    assert held(run, ONE.digest) == (2, 2) and len(run.world.provisions) == ordered
    state = await run.service.state()
    assert "artifact stable: the artifact has no known answer" in state["degraded"]
    names.known["stable"] = ONE
    await run.step(3)
    assert not (await run.service.state())["degraded"]


async def test_what_does_not_fit_is_refused_by_name_and_nothing_changes() -> None:
    run, names = await serving()
    names.known |= {
        "wide": manifest(3, tp=8),
        "foreign": manifest(4, model="llama"),
        "graphs": manifest(5, kind=ArtifactKind.COMPILE, tensors=(), canary=None),
        "mute": manifest(6, canary=None),
    }
    ask, before = run.service.upgrades.ask, (await run.service.get_policy())[1]
    with pytest.raises(NotFound, match="nobody"):
        await ask("go", asked_id="a", to="nobody")
    for reference, why in (
        ("wide", "prefill: placed for 8 GPUs .tp 8, pp 1., a worker of h200-slow10 has 1"),
        ("foreign", "model: it is of llama, this planner plans demo"),
        ("graphs", "kind: it is compile"),
        ("mute", "canary: the artifact has no known answer.*--canary FILE"),
        ("stable", "serves already"),
    ):
        with pytest.raises(Refused, match=why):
            await ask("go", asked_id="a", to=reference)
    for action, why in (
        ("pause", "nothing is being rolled out: it is idle"),
        ("resume", "no roll-out is paused"),
        ("undo", "there is nothing to go back to"),
    ):
        with pytest.raises(Refused, match=why):
            await ask(action, asked_id="a")
    for action, fields in (
        ("fly", {}),
        ("go", {}),
        ("pause", {"to": "other"}),
        ("undo", {"surge": 1}),
    ):
        with pytest.raises(InvalidField):
            await ask(action, asked_id="a", **fields)
    assert (await run.service.get_policy())[1] == before
    alone = await planner(World(HandClock()))
    await alone.step(5)
    with pytest.raises(Unavailable, match="no registry"):
        await alone.service.upgrades.ask("go", asked_id="a", to="other")


async def test_one_that_attains_less_is_rolled_back_and_the_record_says_why() -> None:
    run, names = await serving(rps=4.0)
    run.world.attains = lambda digest: 0.5 if digest == TWO.digest else 0.97
    names.known["stable"] = TWO
    await until(run, "rolled_back")
    assert held(run, ONE.digest)[0] >= 2
    assert held(run, TWO.digest) == (0, 0)
    turned = [d for d in run.decisions if d.rollout.turned]
    assert [d.rollout.phase for d in turned] == ["surging", "rolling_back", "rolled_back"]
    assert "attained by the old one" in turned[1].rollout.reason
    found = await run.service.explain(turned[1].decision_id)
    assert found["decision"]["rollout"]["phase"] == "rolling_back"


async def test_status_after_a_roll_back_says_which_starts_failed_and_by_what() -> None:
    run, names = await serving()
    run.world.doom = lambda order: "canary" if order.manifest_digest == TWO.digest else ""
    names.known["stable"] = TWO
    await until(run, "rolled_back")
    await run.step(20)
    why = (await run.service.upgrades.show())["reason"]
    assert "starts of generation 2" in why and "the last by: it ended: canary" in why


async def test_a_surge_that_is_refused_backs_off_and_is_nobodys_failed_start() -> None:
    run, names = await serving(patience_s=60.0)
    asked: list[str] = []

    def refuse(order: Order) -> str:
        asked.append(order.worker_id)
        return "no place" if order.manifest_digest == TWO.digest else ""

    run.world.refuse = refuse
    names.known["stable"] = TWO
    await until(run, "paused")
    assert "no progress" in run.decisions[-1].rollout.reason
    assert len(asked) <= 16, "asked for again and again"
    assert held(run, ONE.digest) == (2, 2)
    run.world.refuse = lambda _order: ""
    await run.service.upgrades.ask("resume", asked_id="r1")
    await until(run, "done")
    assert held(run, TWO.digest) == (2, 2)


async def test_who_stands_by_with_an_artifact_that_is_served_no_more_is_released() -> None:
    run, names = await serving()
    await run.service.set_policy({"decode": {"standby": 1}}, merge=True)
    await run.step(10)
    names.known["stable"] = TWO
    await until(run, "done")
    await run.step(15)
    waiting = [b for b in run.world.boxes.values() if b.alive and b.state is WorkerState.STANDBY]
    assert [b.order.manifest_digest for b in waiting] == [TWO.digest]


@pytest.mark.parametrize("away_s", [20, 1200])
async def test_however_long_nobody_led_a_rejected_artifact_stays_rejected(away_s: int) -> None:
    run, names = await serving()
    run.world.attains = lambda digest: 0.3 if digest == TWO.digest else 1.0
    names.known["stable"] = TWO
    await until(run, "rolled_back")
    await run.step(35)  # a record at rest
    before = len(run.world.provisions)
    for _ in range(away_s):
        run.world.advance(1.0)
    policy_now, _version = await run.service.get_policy()
    assert policy_now["manifest"] == "stable"
    after = await planner(run.world, journal=run.journal, registry=names, resolve_every_s=1.0)
    await after.step(30)
    assert after.decisions[-1].rollout.phase == "rolled_back"
    assert all(o.manifest_digest == ONE.digest for o in run.world.provisions[before:])
    assert held(after, TWO.digest) == (0, 0)


async def test_every_decision_of_a_roll_out_comes_out_the_same_again() -> None:
    run, names = await serving(rps=3.0)
    names.known["stable"] = TWO
    await until(run, "done")
    by_id = {d.decision_id: d for d in run.decisions}
    seen = 0
    for row in await run.journal.newest(MODEL, limit=1000):
        record, _outcomes = await run.journal.get(row.decision_id)
        assert replay(record) == by_id[row.decision_id]
        seen += decode_inputs(record.inputs).memory.rollout.phase != "idle"
    assert seen >= 5


async def test_a_policy_stored_before_is_still_read() -> None:
    """`surge` was a field at the top once."""
    run, _names = await serving()
    stored = await run.journal.policy(MODEL)
    assert stored is not None
    document = {k: v for k, v in stored.document.items() if k != "rollout"} | {"surge": 3}
    await run.journal.put_policy(
        replace(stored, document=document), expected_version=stored.version
    )
    again = await planner(run.world, journal=run.journal)
    found, _version = await again.service.get_policy()
    assert found["rollout"]["surge"] == 3
    await asyncio.sleep(0)


async def test_a_file_that_names_no_artifact_leaves_it_to_whoever_rolls_one_out() -> None:
    run, _names = await serving()
    await run.service.upgrades.ask("go", asked_id="r1", to="other")
    given = {"model": MODEL, "prefill": policy().document()["prefill"], "tick_s": 1.0}
    given["decode"] = policy().document()["decode"]
    await run.service.adopt(read_policy(given))
    found, _version = await run.service.get_policy()
    assert found["manifest"] == "other"
    assert found["rollout"]["asked"]["id"] == "r1"
    await run.service.adopt(read_policy({**given, "manifest": "stable"}))
    found, _version = await run.service.get_policy()
    assert found["manifest"] == "stable", "what a file names is what is wanted"


async def test_what_is_under_way_is_undone_and_not_rolled_out_the_other_way() -> None:
    run, _names = await serving()
    ask, old = run.service.upgrades.ask, ONE.digest
    await ask("go", asked_id="r1", to="other")
    await until(run, "surging")
    with pytest.raises(Refused, match="rollout undo"):
        await ask("go", asked_id="r2", to=old)
    await ask("pause", asked_id="r3")
    await until(run, "paused")
    with pytest.raises(Refused, match="it is paused already") as told:
        await ask("pause", asked_id="r4")
    assert "nothing is being rolled out" not in str(told.value)
    with pytest.raises(Refused, match="rollout undo"):
        await ask("go", asked_id="r5", to=old)
    for back in ({"manifest": old}, {"manifest": "stable", "headroom": 0.3}):
        before = await run.service.get_policy()
        with pytest.raises(Refused, match="is paused; use `readyplane rollout undo`"):
            await run.service.set_policy(back, merge=True)
        with pytest.raises(Refused, match="rollout undo"):
            await run.service.set_policy({**before[0], **back})
        with pytest.raises(Refused, match="rollout undo"):
            await run.service.adopt(read_policy({**before[0], **back}))
        assert await run.service.get_policy() == before
    await ask("undo", asked_id="r6")
    await until(run, "rolled_back")
    with pytest.raises(Refused, match="it has gone back already"):
        await ask("undo", asked_id="r7")
    await run.service.set_policy({"manifest": "stable"}, merge=True)


async def test_a_planner_that_does_not_lead_refuses_the_way_back_too() -> None:
    """It goes by what the leader wrote: a restarted one whose file names the former artifact."""
    run, names = await serving()
    await run.service.upgrades.ask("go", asked_id="r1", to="other")
    await until(run, "surging")
    begun = policy(manifest="stable", rollout=QUICK)
    again = await planner(run.world, begun, journal=run.journal, registry=names)
    await adopt_first(again.service, begun)
    await again.step(1)
    assert "policy file: roll-out to stable refused" in (await again.service.state())["degraded"]
    with pytest.raises(Refused, match="surging"):
        await again.service.set_policy({"manifest": ONE.digest}, merge=True)
    assert (await again.service.get_policy())[0]["manifest"] == "other"
    names.known.clear()  # a digest needs no registry to be compared
    with pytest.raises(Refused, match="surging"):
        await again.service.set_policy({"manifest": ONE.digest}, merge=True)
