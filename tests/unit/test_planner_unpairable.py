"""Capacity that can pair with nobody is no supply: it is named, not counted, never drained for."""

from readyplane.core.identity import KvFormat
from readyplane.core.worker import Role
from tests.unit.planner_world import DIGEST, HandClock, Run, World, planner, policy

FOREIGN = KvFormat("attached:demo", dtype="unknown")


def put(world: World, name: Role, kv: KvFormat = FOREIGN, *, attached: bool = True) -> str:
    """One more ready worker, by default an attached engine whose KV fits nobody."""
    world.add(name, 1, prefix="ext")
    worker_id, box = list(world.boxes.items())[-1]
    box.kv, box.attached = kv, attached
    return worker_id


async def fleet(p: int = 1, d: int = 1) -> tuple[Run, list[str]]:
    world = World(HandClock())
    world.add(Role.PREFILL, p)
    world.add(Role.DECODE, d)
    return await planner(world), list(world.boxes)


async def test_an_attached_engine_that_fits_nobody_never_displaces_the_one_that_does() -> None:
    run, _own = await fleet()
    await run.step(20)
    stranger = put(run.world, Role.DECODE)
    await run.step(120)
    assert not run.world.drains and not run.world.releases and not run.world.provisions
    assert {d for _p, d in run.between(20, 140)} == {1}
    said = [r for r in run.decisions[-1].why if r.code == "unpairable"]
    assert [(r.pool, stranger in r.text) for r in said] == [("decode", True)]
    assert "model_digest attached:demo against sha256:" in said[0].text
    assert "dtype unknown against fp8_e4m3" in said[0].text
    state = await run.service.state()
    assert state["pools"]["decode"]["ready"] == 1 and run.decisions[-1].decode.counts.ready == 1
    rows = {w["worker_id"]: w.get("unpairable", "") for w in state["workers"]}
    assert [name for name, why in rows.items() if why] == [stranger]


async def test_an_attached_engine_that_fits_is_supply() -> None:
    run, _own = await fleet()
    put(run.world, Role.DECODE, KvFormat(DIGEST))
    await run.step(5)
    assert run.decisions[-1].decode.counts.ready == 2
    assert "unpairable" not in run.codes(5)


async def test_where_all_of_a_stage_fits_nobody_the_floor_is_ordered() -> None:
    run, _own = await fleet(d=0)
    put(run.world, Role.DECODE)
    await run.step(1)
    assert [o.role for o in run.world.provisions] == [Role.DECODE]
    await run.step(30)
    assert [o.role for o in run.world.provisions] == [Role.DECODE] and not run.world.drains


async def test_own_workers_without_a_partner_are_ordered_once_and_go_first() -> None:
    """A start whose format fits nobody must not be ordered again with every tick."""
    world = World(HandClock())
    run = await planner(world, policy(decode={"min": 2}))
    world.add(Role.PREFILL, 1)
    world.add(Role.DECODE, 1)
    odd = put(world, Role.DECODE, KvFormat(DIGEST, tp=2), attached=False)
    await run.step(60)
    assert not world.provisions and run.decisions[-1].decode.counts.ready == 1
    put(world, Role.DECODE, KvFormat(DIGEST), attached=False)
    await run.step(120)
    assert world.drains == [odd]


async def test_nobody_is_stranded_while_the_other_stage_has_nobody_ready() -> None:
    run, _own = await fleet(p=0)
    put(run.world, Role.DECODE)
    await run.step(2)
    assert "unpairable" not in run.codes(2)


async def test_a_worker_of_both_stages_pairs_with_itself() -> None:
    run, _own = await fleet()
    put(run.world, Role.BOTH)
    await run.step(2)
    assert "unpairable" not in run.codes(2)
