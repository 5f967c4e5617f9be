"""Ways of choosing a pair on one fixed fleet: the same for all, and each by its own rule."""

import asyncio
import math
from dataclasses import replace

import pytest

from bench.pairing import OURS, Played, p99, report
from readyplane.core.profile import LinkClass
from readyplane.core.work import Slo
from readyplane.core.worker import Role
from readyplane_lab.pairing.field import Fleet, Place, play
from readyplane_lab.pairing.inputs import inputs, sessions_of
from readyplane_lab.pairing.rivals import rules
from readyplane_lab.simulator.links import SharedLinks
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop, run_virtual
from readyplane_lab.workload.request import WorkloadRequest

FLEET = Fleet(
    tuple(
        Place(role, "h100-tp4-llama70b", f"m{machine}")
        for machine in range(2)
        for role in (Role.PREFILL, Role.DECODE)
    ),
    near=LinkClass("near", 100e9, 0.001),
    far=LinkClass("far", 10e9, 0.003),
    slo=Slo(2.0, 0.1),
)
# Three chats of four turns each, told turn by turn.
TURNS = tuple(
    WorkloadRequest(
        4 * chat + turn,
        2.0 * turn + 0.3 * chat,
        1_000 + 600 * turn,
        8,
        ((chat + 7, 1_000 + 600 * turn),),
    )
    for chat in range(3)
    for turn in range(4)
)
REQUESTS = tuple(replace(r, index=n) for n, r in enumerate(sorted(TURNS, key=lambda r: r.at_s)))


@pytest.mark.parametrize("held", [False, True])
def test_every_rule_serves_everybody_and_the_same_way_each_time(held: bool) -> None:
    sessions = sessions_of(REQUESTS)
    for rule in rules(held=held, sessions=sessions, seed=1):
        records = play(FLEET, REQUESTS, rule)
        assert [r.outcome for r in records] == ["finished"] * len(REQUESTS), rule.name
        (again,) = [r for r in rules(held=held, sessions=sessions, seed=1) if r.name == rule.name]
        assert play(FLEET, REQUESTS, again) == records, rule.name


def test_ours_and_affinity_find_what_a_rule_without_eyes_does_not() -> None:
    sessions = sessions_of(REQUESTS)
    assert len(set(sessions.values())) == 3  # each chat is one session, as a client would say
    by_name = {r.name: r for r in rules(held=False, sessions=sessions, seed=1)}
    cached = {
        name: sum(r.cached_tokens for r in play(FLEET, REQUESTS, rule))
        for name, rule in (("ours", None), *by_name.items())
    }
    assert cached["ours"] > cached["round-robin"]
    assert cached["session-affinity"] > cached["random"]


def test_what_stays_within_a_machine_goes_over_its_own_link() -> None:
    loop = VirtualLoop()
    clock = VirtualClock(loop)
    near, far = LinkClass("near", 100.0, 0.0), LinkClass("far", 10.0, 0.0)
    links = SharedLinks(far, clock, near=near, node_of=lambda worker: worker[0])

    async def main() -> tuple[float, ...]:
        async def timed(ends: tuple[str, str]) -> float:
            await links.move(ends, 100.0)
            return clock.monotonic_s()

        # Both begin at once at the same worker; neither is in the other's way.
        return tuple(await asyncio.gather(timed(("a1", "a2")), timed(("a1", "b1"))))

    assert run_virtual(main(), loop=loop) == pytest.approx((1.0, 10.0))


def test_a_request_without_an_answer_is_infinite_and_ratios_are_to_the_best_of_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert p99([1.0] * 99 + [math.inf]) == 1.0 and p99([1.0] * 90 + [math.inf] * 10) == math.inf
    played = {
        OURS: Played((1.0, 2.0), (0.1, math.nan), 0.0, 1.0),
        "quick": Played((2.0, 4.0), (0.4, 0.4), 0.0, 1.0),
        "smooth": Played((9.0, math.inf), (0.05, 0.05), 0.0, 0.0),
    }
    ttft_ratio, tpot_ratio = report("x", [played])
    assert (ttft_ratio, tpot_ratio) == pytest.approx((1.0 / 2.0, 0.1 / 0.05))
    assert "smooth" in capsys.readouterr().out


def test_the_inputs_are_those_that_are_promised() -> None:
    made = inputs(40)
    assert [i.name for i in made] == ["mooncake", "turns", "slow-link", "hot-prefix", "mixed"]
    by_name = {i.name: i for i in made}
    assert {p.profile for p in by_name["mixed"].fleet.places} == {
        "h100-tp4-llama70b",
        "a100-tp4-llama70b",
    }
    far = by_name["turns"].fleet.far.bandwidth_bytes_per_s
    assert by_name["slow-link"].fleet.far.bandwidth_bytes_per_s < far / 4
    hot = by_name["hot-prefix"].requests(1)
    heads = [r.parts[0] for r in hot]
    assert max(heads.count(h) for h in heads) > len(hot) / 5
    assert by_name["turns"].requests(1) != by_name["turns"].requests(2)
