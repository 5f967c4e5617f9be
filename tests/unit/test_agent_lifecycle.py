"""The transition table of an agent's life."""

import itertools
from pathlib import Path

import pytest

from readyplane.core.errors import Conflict
from readyplane_agent.lifecycle import (
    ENDS,
    LIVES,
    TRANSITIONS,
    Event,
    State,
    allowed_events,
    drawing,
    holds_lease,
    step,
)

README = Path(__file__).parents[2] / "services/agent/README.md"


def walk(*events: Event) -> State:
    state = State.NEW
    for event in events:
        state = step(state, event)
    return state


START = (
    Event.LEASE_GRANTED,
    Event.SOURCES_PLANNED,
    Event.WEIGHTS_VERIFIED,
    Event.ENGINE_UP,
    Event.CANARY_PASSED,
    Event.ADMITTED,
)
STANDBY = (*START[:5], Event.STOOD_BY)
FLIPPED = (*START, Event.FLIP_ASKED, Event.TURNED)


@pytest.mark.parametrize(
    "events, state",
    [
        (START, State.READY),
        ((*START, Event.DRAIN_ASKED, Event.LEAVE_ASKED, Event.RELEASED), State.GONE),
        ((*START, Event.LEASE_REGRANTED), State.REJOINING),
        ((*START, Event.LEASE_REGRANTED, Event.ADMITTED), State.READY),
        ((*START, Event.LEASE_REGRANTED, Event.REFUSED), State.FAILED),
        ((*START, Event.DRAIN_ASKED, Event.LEASE_REGRANTED), State.DRAINING),
        ((*START, Event.ENGINE_DIED), State.FAILED),
        ((*START[:2], Event.DRAIN_ASKED), State.LEAVING),  # nothing to drain in a start
        ((*START[:3], Event.LEASE_REGRANTED), State.STARTING),
        ((Event.LEASE_GRANTED, Event.ENGINE_FOUND, Event.ENGINE_UP), State.PROVING),
        ((*START[:5], Event.REFUSED), State.FAILED),
        ((Event.START_FAILED,), State.FAILED),
        (STANDBY, State.STANDBY),
        ((*STANDBY, Event.ACTIVATE_ASKED, Event.ADMITTED), State.READY),
        ((*STANDBY, Event.ACTIVATE_ASKED, Event.STOOD_BY), State.STANDBY),  # told too late
        ((*STANDBY, Event.ACTIVATE_ASKED, Event.REFUSED), State.FAILED),
        ((*STANDBY, Event.LEASE_REGRANTED, Event.STOOD_BY), State.STANDBY),
        ((*STANDBY, Event.ACTIVATE_ASKED, Event.LEASE_REGRANTED), State.REJOINING),
        ((*STANDBY, Event.DRAIN_ASKED), State.LEAVING),  # it has served nobody
        ((*START, Event.FLIP_ASKED), State.FLIPPING),
        ((*FLIPPED, Event.CANARY_PASSED, Event.ADMITTED), State.READY),
        ((*FLIPPED, Event.CANARY_PASSED, Event.REFUSED), State.FAILED),
        ((*START, Event.FLIP_ASKED, Event.DRAIN_ASKED), State.DRAINING),
        ((*START, Event.FLIP_ASKED, Event.LEASE_REGRANTED), State.REJOINING),  # forgotten
    ],
)
def test_paths(events: tuple[Event, ...], state: State) -> None:
    assert walk(*events) is state


def test_only_admission_leads_to_ready() -> None:
    """R18.2: no path around the gate."""
    into = {(s, e) for (s, e), after in TRANSITIONS.items() if after is State.READY}
    proved = (State.JOINING, State.REJOINING, State.ACTIVATING)
    assert into == {(state, Event.ADMITTED) for state in proved}


def test_weights_are_verified_before_an_engine_may_be_up() -> None:
    for state, event in TRANSITIONS:
        if event is Event.ENGINE_UP:
            assert state is State.STARTING
    into = {(s, e) for (s, e), after in TRANSITIONS.items() if after is State.STARTING}
    assert into == {
        (State.LOADING, Event.WEIGHTS_VERIFIED),
        (State.LEASED, Event.ENGINE_FOUND),
        (State.STARTING, Event.LEASE_REGRANTED),
    }


@pytest.mark.parametrize("state, event", itertools.product(State, Event))
def test_what_the_table_lacks_is_refused(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert step(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(Conflict, match=str(state)):
            step(state, event)


@pytest.mark.parametrize("state", LIVES)
def test_every_living_state_can_be_fenced_die_and_leave(state: State) -> None:
    assert step(state, Event.FENCED_OFF) is State.FENCED
    assert step(state, Event.ENGINE_DIED) is State.FAILED
    assert step(state, Event.LEAVE_ASKED) is State.LEAVING
    assert holds_lease(state)


@pytest.mark.parametrize("state", ENDS)
def test_every_end_is_over_once_released(state: State) -> None:
    assert allowed_events(state) == (Event.RELEASED,)
    assert step(state, Event.RELEASED) is State.GONE
    assert not holds_lease(state)


def test_every_state_can_be_reached_and_left() -> None:
    reached = {State.NEW, *TRANSITIONS.values()}
    assert reached == set(State)
    assert {s for s, _ in TRANSITIONS} == set(State) - {State.GONE}


def test_the_readme_shows_this_very_table() -> None:
    assert drawing() in README.read_text()
