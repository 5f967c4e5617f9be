"""Whatever happens, each reservation has exactly one end, and nothing is held for nobody."""

import asyncio
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.errors import NoPair, Overloaded, Unavailable
from readyplane_gateway.bounds import Bounds
from tests.unit.gateway_world import MODEL, Plan, World, play

HOWS = (
    *("ok", "ok", "ok", "refuse", "hang", "reset", "reset_mid", "garbage", "truncated"),
    *("error_event", "stall_mid", "no_params", "400", "404", "429", "500", "503"),
)
plans = st.lists(
    st.builds(
        Plan,
        how=st.sampled_from(HOWS),
        after_s=st.sampled_from([0.0, 0.01, 0.2]),
        tokens=st.integers(1, 8),
        every_s=st.sampled_from([0.0, 0.01]),
    ),
    max_size=4,
)
router_faults = st.lists(
    st.one_of(
        st.sampled_from([0.0, 0.05, 1.0]),
        st.builds(lambda: NoPair("none", 1.0)),
        st.builds(lambda: Overloaded("shed", 1.0)),
        st.builds(lambda: Unavailable("away", "wait")),
    ),
    max_size=3,
)
clients = st.lists(
    st.fixed_dictionaries(
        {
            "at_s": st.sampled_from([0.0, 0.005, 0.03]),
            "stream": st.booleans(),
            "leave_after_s": st.one_of(st.none(), st.floats(0.0, 0.3)),
            "prompt": st.sampled_from(["some text", [1, 2, 3]]),
        }
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150)
@given(
    engines=st.fixed_dictionaries(dict.fromkeys(("p1", "p2", "d1", "d2"), plans)),
    faults=router_faults,
    lost=st.integers(0, 2),
    clients=clients,
)
def test_every_reservation_has_one_end(
    engines: dict[str, list[Plan]],
    faults: list[Any],
    lost: int,
    clients: list[dict[str, Any]],
) -> None:
    async def one(world: World, client: dict[str, Any]) -> None:
        await asyncio.sleep(client["at_s"])
        got = await world.ask(
            {"model": MODEL, "prompt": client["prompt"], "stream": client["stream"]},
            leave_after_s=client["leave_after_s"],
        )
        if got.left:
            return
        assert got.ended
        if got.status != 200:
            assert set(got.error) == {"message", "type", "param", "code"}
            assert ("retry-after" in got.headers) or got.status in {400, 404, 413, 422, 500}
        elif client["stream"]:
            errors = [e for e in got.events if e != "[DONE]" and "error" in e]
            assert (got.events[-1] == "[DONE]") or len(errors) == 1  # never cut off in silence

    async def story(world: World) -> None:
        for name, behaviour in engines.items():
            world.engine(name).plans.extend(behaviour)
        world.router.faults.extend(faults)
        world.router.complete_faults.extend(Unavailable("away", "wait") for _ in range(lost))
        await asyncio.gather(*(one(world, client) for client in clients))
        await world.settle(5)

    bounds = Bounds(decode_first_s_max=3, decode_idle_s_max=3, decode_total_s_max=3)
    play(story, bounds=bounds, late=lost > 0)
