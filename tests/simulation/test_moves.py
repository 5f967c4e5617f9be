"""A scale-down under long answers: with moves the worker has left long before, and nothing is cut."""

from functools import cache

from readyplane_lab.simulator.world_result import WorldResult
from readyplane_lab.workload.request import WorkloadRequest
from tests.simulation.sim_world import Fixed, same, world

SHRINKS_S = 12.0
LONG = 4_000
SHORT = 15


@cache
def first(*, moves: bool) -> WorldResult:
    return run(moves=moves)


def run(*, moves: bool) -> WorldResult:
    requests = tuple(
        WorkloadRequest(n, 0.5 * n, 400, LONG, ((n, 400),)) for n in range(12)
    ) + tuple(
        WorkloadRequest(12 + n, 10.0 + 4.0 * n, 400, 50, ((12 + n, 400),)) for n in range(SHORT)
    )
    brain = Fixed((0.0, 2, 2), (SHRINKS_S, 2, 1))
    policy = {"drain_deadline_s": 1200.0}
    return world(brain, requests, policy=policy, moves=moves)


def drain_s(result: WorldResult) -> float:
    """How long the one decode worker that went took to leave."""
    (life,) = [x for x in result.lives if x.pool == "decode" and x.drain_s is not None]
    assert life.drain_s is not None
    assert life.released_s is not None
    return life.released_s - life.drain_s


def test_moves_shorten_a_drain_and_conserve_every_token() -> None:
    stays, moves = first(moves=False), first(moves=True)
    for result in (stays, moves):  # the invariants were checked in each run, too
        assert all(r.outcome == "finished" for r in result.records)
        assert [r.osl for r in result.records] == [LONG] * 12 + [50] * SHORT
    assert drain_s(stays) > 30.0
    assert drain_s(moves) < 10.0


def test_moves_are_repeatable() -> None:
    assert same(first(moves=True).run(), run(moves=True).run())
