"""What no simulated worker does is refused by name, in both modes."""

from typing import Any

import pytest

from readyplane.core.errors import InvalidField
from readyplane_lab.demo import DEMO_POLICY
from readyplane_lab.simulator.fluid.run import _check
from readyplane_lab.simulator.loop import VirtualLoop
from readyplane_lab.simulator.world import World, WorldOptions
from readyplane_planner.policy import overlay, read_policy

STAGES = {"graph_stages": True}, r"policy\.graph_stages"
BARE = {"decode": {"standby_holds": "process"}}, r"policy\.decode\.standby_holds"
ASLEEP = {"prefill": {"standby_holds": "asleep"}}, r"policy\.prefill\.standby_holds"


@pytest.mark.parametrize(("changes", "field"), [ASLEEP])
def test_no_simulator_plays_it_as_something_else(changes: dict[str, Any], field: str) -> None:
    policy = overlay(DEMO_POLICY, changes)
    loop = VirtualLoop()
    try:
        with pytest.raises(InvalidField, match=field):
            World(WorldOptions(policy), loop)
    finally:
        loop.close()


@pytest.mark.parametrize(("changes", "field"), [STAGES, BARE, ASLEEP])
def test_a_fluid_plays_it_as_nothing_else(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField, match=field):
        _check(read_policy(overlay(DEMO_POLICY, changes)))
