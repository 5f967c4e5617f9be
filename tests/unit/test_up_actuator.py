"""The local actuator: one process an order, fenced, bounded, and billed to its end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from readyplane.core.errors import Conflict, InvalidField, NotFound, Refused, StaleEpoch
from readyplane.core.worker import Role
from readyplane.kit.clock import SystemClock
from readyplane.ports import Order
from readyplane_lab.up.actuator import LocalActuator, WorkerPlace
from readyplane_lab.up.processes import ProcessTable


class ScriptActuator(LocalActuator):
    """Runs a script in place of the agent."""

    script = "import time; time.sleep(60)"

    def _argv(self, order: Order) -> list[str]:
        return [sys.executable, "-c", self.script]


@pytest.fixture
async def actuator(tmp_path: Path) -> AsyncIterator[ScriptActuator]:
    def exited(name: str, returncode: int) -> None:
        made.exited(name, returncode)

    async with ProcessTable(tmp_path / "run", on_exit=exited) as table:
        place = WorkerPlace("r:1", "r:2", tmp_path, tmp_path, {}, workers_max=2)
        made = ScriptActuator(table, place, clock=SystemClock(), profile_of=lambda name: name)
        yield made


def order(worker_id: str = "p-1") -> Order:
    return Order(worker_id, Role.PREFILL, "demo", "h200", "sha256:x", scale_decision_id="d-1")


async def test_the_same_order_is_the_same_instance(actuator: ScriptActuator) -> None:
    first = await actuator.provision(order())
    again = await actuator.provision(order())
    assert first.pid == again.pid
    assert len(await actuator.list_instances()) == 1
    with pytest.raises(Conflict):
        await actuator.provision(Order("p-1", Role.DECODE, "demo", "h200", "sha256:x"))


async def test_a_class_of_several_gpus_is_started_as_so_many_ranks(tmp_path: Path) -> None:
    cases = (("modelled", 2, "2"), ("modelled", 1, None), ("vllm", 2, None))
    async with ProcessTable(tmp_path / "run", on_exit=lambda *_: None) as table:
        for engine, gpus, told in cases:
            place = WorkerPlace("r:1", "r:2", tmp_path, tmp_path, {}, engine=engine)
            made = LocalActuator(
                table,
                place,
                clock=SystemClock(),
                profile_of=lambda name: name,
                ranks_of={"h200": gpus}.__getitem__,
            )
            argv = made._argv(order())
            found = dict(zip(argv[3::2], argv[4::2], strict=False))
            assert found.get("--tp") == told, argv


async def test_release_ends_it_and_stops_the_bill(actuator: ScriptActuator) -> None:
    await actuator.provision(order())
    released = await actuator.release("p-1", grace_s=5.0, reason="test")
    assert released.state == "exited"
    assert released.exited_ago_s is not None
    billed = actuator.worker_seconds()["prefill"]
    assert actuator.worker_seconds()["prefill"] == billed > 0
    assert (await actuator.release("p-1")).pid == released.pid
    with pytest.raises(NotFound):
        await actuator.release("p-unknown")


async def test_no_more_places_is_a_refusal_with_a_reason(actuator: ScriptActuator) -> None:
    await actuator.provision(order("p-1"))
    await actuator.provision(order("p-2"))
    with pytest.raises(Refused, match="2 of 2"):
        await actuator.provision(order("p-3"))
    assert len(await actuator.list_instances()) == 2


async def test_an_older_leader_is_fenced(actuator: ScriptActuator) -> None:
    await actuator.provision(order("p-1"), leader_epoch=7)
    with pytest.raises(StaleEpoch):
        await actuator.provision(order("p-2"), leader_epoch=6)
    with pytest.raises(StaleEpoch):
        await actuator.release("p-1", leader_epoch=6)


async def test_an_agent_that_ends_by_itself_is_seen_with_its_log(
    actuator: ScriptActuator,
) -> None:
    actuator.script = "import sys; print('no such weights'); sys.exit(3)"
    await actuator.provision(order())
    await actuator._table.wait("worker-p-1")
    (instance,) = await actuator.list_instances()
    assert (instance.state, instance.exit_code) == ("failed", 3)
    assert "no such weights" in instance.log_tail
    assert "code 3" in instance.reason


class WorkingActuator(ScriptActuator):
    """Its script is told the worker's folder."""

    def _argv(self, order: Order) -> list[str]:
        return [*super()._argv(order), str(self._place.work_dir / order.worker_id)]


MAKES_ITS_FOLDER = """
import pathlib, sys, time
from readyplane_agent.folder import work_folder
path = pathlib.Path(sys.argv[1])
work_folder(path)
(path / "engine.log").write_text("x")
(path / "files").mkdir()
(path / "files" / "a").write_text("x")
print("made", flush=True)
time.sleep(60)
"""


async def test_what_a_killed_agent_left_is_removed(
    actuator: ScriptActuator, tmp_path: Path
) -> None:
    actuator.__class__ = WorkingActuator
    actuator.script = MAKES_ITS_FOLDER
    (tmp_path / "theirs").mkdir()
    instances = [await actuator.provision(order(name)) for name in ("p-1", "p-2")]
    async with asyncio.timeout(60):
        for name in ("p-1", "p-2"):
            while "made" not in actuator._table.log_tail(f"worker-{name}"):
                await asyncio.sleep(0.02)
        os.kill(instances[0].pid, signal.SIGKILL)
        while (tmp_path / "p-1").exists():
            await asyncio.sleep(0.02)
    assert (tmp_path / "p-2" / "engine.log").exists()
    states = {i.order.worker_id: i.state for i in await actuator.list_instances()}
    assert states == {"p-1": "failed", "p-2": "running"}
    await actuator.release_all(grace_s=0.0, reason="test")
    assert not (tmp_path / "p-2").exists()
    assert (tmp_path / "theirs").exists()


@pytest.mark.parametrize("worker_id", ["", ".", "..", "a b", "../x", "x" * 65])
async def test_a_bad_worker_id_is_named(actuator: ScriptActuator, worker_id: str) -> None:
    with pytest.raises(InvalidField, match="worker_id"):
        await actuator.provision(order(worker_id))
