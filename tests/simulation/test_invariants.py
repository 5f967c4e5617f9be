"""Every invariant can fail: the world is broken in one place, and the run says which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from readyplane.core.errors import StaleEpoch
from readyplane.core.fencing import Fences
from readyplane.core.worker import Lease, Role, WorkerOffer, WorkerState
from readyplane_lab.demo import DEMO_POLICY
from readyplane_lab.simulator import world as simulated
from readyplane_lab.simulator.faults import Partition
from readyplane_lab.simulator.invariants import Broken, bill_adds_up
from readyplane_lab.simulator.loop import VirtualLoop, run_virtual
from readyplane_planner.decide import Decision, Memory, Plan, StartOrder
from readyplane_planner.signals import Observation
from readyplane_router.service import RouterService
from tests.simulation.sim_world import Fixed, steady, world

KEEP = ((0.0, 2, 2),)
Meddle = Callable[[simulated.World], None]


def meddled(meddle: Meddle, *, at_s: float = 20.0) -> None:
    """A run in which somebody reaches into the world at one moment."""
    loop = VirtualLoop()
    options = simulated.WorldOptions(DEMO_POLICY, initial=(2, 2), brain=Fixed(*KEEP), record=False)
    made = simulated.World(options, loop)

    async def run() -> None:
        began = made._beside

        def beside(began_s: float) -> None:
            began(began_s)
            loop.call_at(began_s + at_s, meddle, made)

        made._beside = beside  # type: ignore[method-assign]
        await made.run(steady())

    run_virtual(run(), loop=loop)


def a_seat(made: simulated.World) -> Any:
    desk = made.router.desks["demo"]
    return next(iter(desk.seats.values()))


def an_idle_engine(made: simulated.World) -> Any:
    spare = made.actuator.begin(made.order("x-spare", Role.PREFILL))
    return spare.engine


def test_an_unmeddled_run_holds_them_all() -> None:
    meddled(lambda _made: None)


def set_blocks(made: simulated.World) -> None:
    a_seat(made).kv_blocks += 1


def set_sequences(made: simulated.World) -> None:
    a_seat(made).sequences += 1


def shrink_seat(made: simulated.World) -> None:
    for seat in made.router.desks["demo"].seats.values():
        seat.max_num_seqs = -1


def shrink_pool(made: simulated.World) -> None:
    for worker in made.actuator.living.values():
        worker.engine.model.pool.total = -1


def leak_blocks(made: simulated.World) -> None:
    an_idle_engine(made).model.pool.private = 3


def lose_output(made: simulated.World) -> None:
    an_idle_engine(made).tally.output += 1


def lose_prompt(made: simulated.World) -> None:
    an_idle_engine(made).tally.prompt += 1


def forget_to_bill(made: simulated.World) -> None:
    account = next(iter(made.actuator.living.values())).account
    account._part = None


def bill_twice(made: simulated.World) -> None:
    made.ledger.open("decode", 1)


@pytest.mark.parametrize(
    ("meddle", "said"),
    [
        (set_blocks, "a seat holds something else"),
        (set_sequences, "a seat holds something else"),
        (shrink_seat, "a seat is promised twice"),
        (shrink_pool, "an engine holds more than it has"),
        (leak_blocks, "an idle engine holds KV blocks"),
        (lose_output, "output tokens are not conserved"),
        (lose_prompt, "prompt tokens are not conserved"),
        (forget_to_bill, "billed seconds do not add up"),
        (bill_twice, "billed seconds do not add up"),
    ],
)
def test_a_broken_state_is_found(meddle: Meddle, said: str) -> None:
    with pytest.raises(Broken, match=said):
        meddled(meddle)


def test_a_request_on_a_worker_that_is_not_ready_is_found() -> None:
    def hide(made: simulated.World) -> None:
        for member in made.router.roster.members.values():
            member.state = WorkerState.PROVISIONED

    with pytest.raises(Broken, match="not ready"):
        meddled(hide)


def test_a_request_under_an_old_epoch_is_found() -> None:
    def renumber(made: simulated.World) -> None:
        for member in made.router.roster.members.values():
            member.epoch += 1

    with pytest.raises(Broken, match="not ready"):
        meddled(renumber)


def test_lease_epochs_that_go_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    granted = RouterService.register
    known: set[str] = set()

    async def backwards(router: RouterService, offer: WorkerOffer) -> Lease:
        lease = await granted(router, offer)
        if offer.worker_id in known:
            return replace(lease, epoch=0)
        known.add(offer.worker_id)
        return lease

    monkeypatch.setattr(RouterService, "register", backwards)
    with pytest.raises(Broken, match="lease epoch of a worker went back"):
        world(Fixed(*KEEP), faults=(Partition(5.0, Role.PREFILL, 12.0),))


def test_a_leader_of_the_past_is_refused_and_an_epoch_that_goes_back_is_found() -> None:
    loop = VirtualLoop()
    made = simulated.World(simulated.WorldOptions(DEMO_POLICY), loop)
    actuator = made.actuator

    async def orders() -> None:
        await actuator.provision(made.order("p-1", Role.PREFILL), leader_epoch=2)
        with pytest.raises(StaleEpoch):
            await actuator.provision(made.order("p-2", Role.PREFILL), leader_epoch=1)
        actuator._fences = Fences()  # it forgets who led
        await actuator.provision(made.order("p-2", Role.PREFILL), leader_epoch=1)

    with pytest.raises(Broken, match="epoch of the leader went back"):
        run_virtual(orders(), loop=loop)


class Wrong:
    """A brain whose decisions are tampered with."""

    def __init__(self, tamper: Callable[[Decision], Decision]) -> None:
        self._brain = Fixed(*KEEP)
        self._tamper = tamper

    def __call__(
        self,
        observation: Observation,
        plan: Plan,
        memory: Memory,
        *,
        now_s: float,
        decision_id: str,
    ) -> tuple[Decision, Memory]:
        decision, after = self._brain(
            observation, plan, memory, now_s=now_s, decision_id=decision_id
        )
        return self._tamper(decision), after


def target(count: int) -> Callable[[Decision], Decision]:
    return lambda d: replace(d, prefill=replace(d.prefill, target=count))


@pytest.mark.parametrize("count", [0, 7])
def test_a_target_out_of_bounds_is_found(count: int) -> None:
    with pytest.raises(Broken, match="a target is out of bounds"):
        world(Wrong(target(count)))


def test_orders_beyond_the_bounds_are_found() -> None:
    orders = tuple(
        StartOrder(f"p-{k}-x", "prefill", "h200-slow10", "sha256:0", 1, "jit") for k in range(9)
    )
    with pytest.raises(Broken, match="a target is out of bounds"):
        world(Wrong(lambda d: replace(d, orders=orders)))


def test_orders_beyond_the_budget_are_found() -> None:
    orders = (StartOrder("p-9-x", "prefill", "h200-slow10", "sha256:0", 1, "jit"),)
    with pytest.raises(Broken, match="orders exceed the budget"):
        world(Wrong(lambda d: replace(d, orders=orders)), policy={"budget_gpus": 4})


def test_a_lost_and_a_doubled_request_are_found() -> None:
    def lose(made: simulated.World) -> None:
        made.gateway.records.pop()

    def double(made: simulated.World) -> None:
        made.gateway.records.append(made.gateway.records[0])

    for meddle in (lose, double):
        with pytest.raises(Broken, match="not exactly one end"):
            meddled(meddle)


def test_a_finished_request_without_all_its_tokens_is_found() -> None:
    def cut(made: simulated.World) -> None:
        record = made.gateway.records[0]
        made.gateway.records[0] = replace(record, osl=record.osl + 1)

    with pytest.raises(Broken, match="finished requests lack tokens"):
        meddled(cut)


def test_a_bill_of_nothing_adds_up() -> None:
    bill_adds_up(0.0, [], (0.0, 10.0))
    bill_adds_up(40.0, [(4, -5.0, 10.0), (4, 10.0, 30.0)], (0.0, 10.0))
    with pytest.raises(Broken):
        bill_adds_up(40.1, [(4, -5.0, 10.0)], (0.0, 10.0))
