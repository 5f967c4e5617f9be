"""What ranks agree on and make together, without processes (R10.3, R17.1)."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import InvalidField, Refused
from readyplane.core.worker import Lease
from readyplane.kit.clock import SystemClock
from readyplane.ports import GroupStatus, RankReport
from readyplane_agent.barrier import Barrier
from readyplane_agent.engines.layout import RankTable, TensorPart, read_rank_table
from readyplane_agent.engines.modelled import settings as engine_settings
from readyplane_agent.engines.modelled.communicator import Communicator, RankLost
from readyplane_agent.engines.modelled.group_weights import disagreement, joined
from readyplane_agent.engines.ranks import LOST_STATUS, STEPS, RankStep, first_gone
from readyplane_agent.ranks import Ranks, blamed
from readyplane_router.group import Group, publish, report

LIMIT_S = 20.0


def tables(world: int = 2) -> list[RankTable]:
    """A column-parallel tensor, a row-parallel one, and one that all have whole."""
    names = ("column", "row", "whole")
    return [
        RankTable(
            rank,
            world,
            names,
            {
                "column": TensorPart("F32", 0, rank * 2, rank * 2 + 2, (2 * world, 3)),
                "row": TensorPart("F32", 1, rank, rank + 1, (3, world)),
                "whole": TensorPart("F32", 0, 0, 5, (5,)),
            },
            prompt=(1, 2),
            golden=(3,),
        )
        for rank in range(world)
    ]


def changed(table: RankTable, name: str, **part: Any) -> RankTable:
    return replace(table, parts={**table.parts, name: replace(table.parts[name], **part)})


def without(table: RankTable, name: str) -> RankTable:
    return replace(table, parts={n: p for n, p in table.parts.items() if n != name})


@pytest.mark.parametrize("world", [1, 2, 4])
def test_tables_of_one_plan_agree(world: int) -> None:
    made = tables(world)
    assert disagreement(made) == []
    assert [RankTable.from_document(t.document()) for t in made] == made


WRONG: list[tuple[Callable[[list[RankTable]], list[RankTable]], str]] = [
    (lambda t: [t[0], t[0]], "rank 1: it speaks as 0"),
    (lambda t: [t[0], changed(t[1], "column", start=0, stop=2)], "column: parts"),
    (lambda t: [t[0], changed(t[1], "column", start=3, stop=4)], "column: parts"),
    (lambda t: [t[0], without(t[1], "row")], "row: parts"),
    (lambda t: [without(each, "whole") for each in t], "whole: no rank holds it"),
    (lambda t: [t[0], changed(t[1], "row", axis=0)], "row: the ranks have it in different ways"),
    (lambda t: [t[0], changed(t[1], "row", dtype="F16")], "row: the ranks have it in different"),
    (lambda t: [t[0], replace(t[1], golden=(9,))], "rank 1: golden differs"),
    (lambda t: [t[0], replace(t[1], names=("column",))], "rank 1: names differs"),
    (lambda t: [t[0], replace(t[1], world=3)], "rank 1: world differs"),
]


@pytest.mark.parametrize(("spoil", "says"), WRONG)
def test_what_does_not_fit_is_named(
    spoil: Callable[[list[RankTable]], list[RankTable]], says: str
) -> None:
    assert any(says in text for text in disagreement(spoil(tables()))), disagreement(
        spoil(tables())
    )


def test_a_table_without_a_rank_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"tensor_table\.rank"):
        read_rank_table('{"tensors": []}')
    with pytest.raises(InvalidField, match="write JSON"):
        read_rank_table("{")


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    axis=st.integers(0, 2),
    world=st.integers(1, 4),
    order=st.randoms(use_true_random=False),
)
def test_parts_in_any_order_are_the_tensor(
    shape: list[int], axis: int, world: int, order: Any
) -> None:
    axis %= len(shape)
    shape[axis] *= world
    whole = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    step = shape[axis] // world
    parts = [
        (TensorPart("F32", axis, r * step, (r + 1) * step, tuple(shape)), cut.tobytes())
        for r, cut in enumerate(np.split(whole, world, axis))
    ]
    order.shuffle(parts)
    assert bytes(joined(parts)) == whole.tobytes()


# --------------------------------------------------------------------------- the communicator


def together(folder: Path, work: Sequence[Callable[[Communicator], Any]]) -> list[Any]:
    """What each rank's work gave, or what it raised; every rank is a thread here."""
    out: list[Any] = [None] * len(work)
    path, clock = folder / "rendezvous.json", SystemClock()

    def run(rank: int) -> None:
        try:
            if rank == 0:
                link = Communicator.lead(len(work), path)
            else:
                link = Communicator.follow(rank, len(work), path, clock=clock)
            try:
                out[rank] = work[rank](link)
            finally:
                link.close()
        except RankLost as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return out


def test_sums_gathers_and_spreads_over_three_ranks(tmp_path: Path) -> None:
    def work(link: Communicator) -> Any:
        total = link.all_reduce([link.rank + 1, 2**64 - 1])
        parts = [bytes(part) for part in link.gather(b"x" * link.rank)]
        return total, parts, bytes(link.spread(b"from 0" if link.rank == 0 else b""))

    out = together(tmp_path, [work] * 3)
    assert [o[0] for o in out] == [[6, 2**64 - 3]] * 3
    assert [o[1] for o in out] == [[b"", b"x", b"xx"], [], []]
    assert [o[2] for o in out] == [b"from 0"] * 3
    assert not (tmp_path / "rendezvous.json").exists()


def test_a_rank_that_goes_is_named_by_the_watch(tmp_path: Path) -> None:
    out = together(tmp_path, [lambda link: link.watch(), lambda link: link.stand(), lambda _: None])
    assert isinstance(out[0], RankLost) and "rank 2 is gone" in str(out[0])
    assert isinstance(out[1], RankLost) and "rank 0 is gone" in str(out[1])


def test_a_rank_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from readyplane_agent.engines.modelled import communicator

    monkeypatch.setattr(communicator, "BEAT_LIMIT_S", 0.2)
    monkeypatch.setattr(communicator, "BEAT_EVERY_S", 0.05)
    over = threading.Event()

    def watch(link: Communicator) -> None:
        try:
            link.watch()
        finally:
            over.set()

    out = together(tmp_path, [watch, lambda _: over.wait(LIMIT_S)])
    assert isinstance(out[0], RankLost) and "rank 1 does not answer" in str(out[0])


def test_a_stranger_does_not_take_a_ranks_place(tmp_path: Path) -> None:
    import json
    import socket

    def late(link: Communicator) -> list[int]:
        try:
            return link.all_reduce([1])
        finally:
            link.close()

    path = tmp_path / "rendezvous.json"
    knocked = threading.Event()

    def stranger() -> None:
        while not path.exists():
            threading.Event().wait(0.01)
        port = json.loads(path.read_bytes())["port"]
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(b"w" * 36)
            knocked.set()

    thread = threading.Thread(target=stranger, daemon=True)
    thread.start()
    out: list[Any] = []
    leader = threading.Thread(
        target=lambda: out.append(late(Communicator.lead(2, path))), daemon=True
    )
    leader.start()
    assert knocked.wait(LIMIT_S)
    link = Communicator.follow(1, 2, path, clock=SystemClock())
    assert late(link) == [2]
    leader.join(LIMIT_S)
    assert out == [[2]]
    thread.join(LIMIT_S)
    assert not path.exists()


# --------------------------------------------------------------------------- what the agent tells


class Engine:
    """An engine of ranks whose steps are set by hand."""

    def __init__(self) -> None:
        self.told: tuple[RankStep, ...] = ()

    def ranks(self) -> tuple[RankStep, ...]:
        return self.told


class Router:
    """Judges rank reports as the real one does."""

    def __init__(self, ranks: int) -> None:
        self.group = Group(ranks, "sha256:m")
        self.heard: list[tuple[int, str, int]] = []

    async def report_rank(self, told: RankReport) -> GroupStatus:
        self.heard.append((told.rank, told.step, told.progress))
        self.group = report(
            self.group,
            rank=told.rank,
            step=told.step,
            manifest_digest=told.manifest_digest,
            detail=told.detail,
            progress=told.progress,
        )
        self.group = publish(self.group, 7)
        why = (self.group.failure,) if self.group.failure else self.group.waiting_for()
        return GroupStatus(self.group.state, self.group.epoch, why)


class Told(Ranks):
    """With its barrier at hand."""

    @property
    def barrier(self) -> Barrier:
        return self._barrier


def ranks(engine: Engine, router: Router, placed: tuple[int, ...] = (0, 0)) -> Told:
    async def patient(call: Callable[[], Any]) -> Any:
        return await call()

    barrier = Barrier(
        router=router,  # type: ignore[arg-type]
        clock=SystemClock(),
        patient=patient,
        lease=lambda: Lease("w", "i", 1, 6.0),
        digest=lambda: "sha256:m",
        limit_s=5.0,
    )
    return Told(
        world=2,
        engine=engine,  # type: ignore[arg-type]
        barrier=barrier,
        placed=lambda: placed,
        clock=SystemClock(),
    )


async def test_steps_are_told_once_and_rank_0s_canary_not_at_all() -> None:
    engine, router = Engine(), Router(2)
    told = ranks(engine, router, placed=(7, 9))
    await told.tell()
    assert router.heard == [(0, "scheduled", 7), (1, "scheduled", 9)]
    await told.tell()
    assert len(router.heard) == 2
    engine.told = (RankStep(0, STEPS[-1], 1), RankStep(1, STEPS[-1], 2))
    await told.tell()
    assert router.heard[2:] == [(0, "placed", 8), (1, "canary_passed", 11)]
    assert router.group.waiting_for() == ("rank 0: canary_passed",)
    await told.tell(again=True)
    assert len(router.heard) == 6, "a router that has forgotten hears all of it"


async def test_a_group_that_fails_ends_the_start_beside_it() -> None:
    engine, router = Engine(), Router(2)
    told = ranks(engine, router)
    ended = asyncio.Event()

    async def start() -> None:
        try:
            await asyncio.sleep(LIMIT_S)
        finally:
            ended.set()

    running = asyncio.create_task(told.beside(start()))
    await asyncio.sleep(0.05)
    router.group = report(router.group, rank=1, step="failed", detail="it broke")
    engine.told = (RankStep(0, "verified"),)
    with pytest.raises(Refused, match="rank 1: it broke"):
        await asyncio.wait_for(running, LIMIT_S)
    assert ended.is_set()


def test_who_lost_another_is_not_blamed() -> None:
    killed, lost = (
        RankStep(1, "placed", returncode=-9),
        RankStep(0, "placed", returncode=LOST_STATUS),
    )
    assert first_gone([lost, killed, RankStep(2, "placed")]) == killed
    assert first_gone([RankStep(0, "placed")]) is None
    engine = Engine()
    engine.told = (lost, killed)
    assert blamed(engine) == 1  # type: ignore[arg-type]
    assert blamed(object()) == 0  # type: ignore[arg-type]


def test_flags_of_a_rank_are_checked() -> None:
    needed = ["--model", "m", "--arena", "a", "--tensor-table", "t", "--config", "c"]
    needed += ["--profile", "p"]
    made = engine_settings.parse([*needed, "--rank", "1", "--world", "2", "--hold", "1:placed"])
    assert (made.rank, made.world, made.hold) == (1, 2, (1, "placed"))
    with pytest.raises(InvalidField, match="--rank"):
        engine_settings.parse([*needed, "--rank", "2", "--world", "2"])
    with pytest.raises(InvalidField, match="RANK:STEP"):
        engine_settings.parse([*needed, "--hold", "1:done"])


async def test_a_router_that_lost_the_group_hears_of_every_rank_again() -> None:
    """After its lease was granted anew a worker tells all ranks, not only the one that serves."""
    engine, router = Engine(), Router(2)
    engine.told = (RankStep(0, STEPS[-1]), RankStep(1, STEPS[-1]))
    told = ranks(engine, router)
    await told.tell()
    router.group = Group(2, "sha256:m")
    barrier = told.barrier
    barrier.others = lambda: told.tell(again=True)
    assert await asyncio.wait_for(barrier.fall(), LIMIT_S) == 7
