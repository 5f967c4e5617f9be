"""The one transition table of an agent's life, from process start to exit (pure).

Owns which state may follow which and what an agent does in each; hands the state to `loop` and
`starting`, and the drawing to the README. Whatever is not in the table is refused: a state is
never guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum

from readyplane.core.errors import Conflict


class State(StrEnum):
    """Where an agent is."""

    NEW = "new"
    LEASED = "leased"
    LOADING = "loading"
    STARTING = "starting"
    PROVING = "proving"
    JOINING = "joining"
    BARE = "bare"
    STANDBY = "standby"
    ACTIVATING = "activating"
    READY = "ready"
    REJOINING = "rejoining"
    FLIPPING = "flipping"
    DRAINING = "draining"
    LEAVING = "leaving"
    FAILED = "failed"
    FENCED = "fenced"
    GONE = "gone"


class Event(StrEnum):
    """What happened to it."""

    LEASE_GRANTED = "lease_granted"
    SOURCES_PLANNED = "sources_planned"
    ENGINE_FOUND = "engine_found"
    IMPORTED = "imported"
    WEIGHTS_VERIFIED = "weights_verified"
    ENGINE_UP = "engine_up"
    CANARY_PASSED = "canary_passed"
    ADMITTED = "admitted"
    STOOD_BY = "stood_by"
    ACTIVATE_ASKED = "activate_asked"
    FLIP_ASKED = "flip_asked"
    TURNED = "turned"
    REFUSED = "refused"
    LEASE_REGRANTED = "lease_regranted"
    DRAIN_ASKED = "drain_asked"
    LEAVE_ASKED = "leave_asked"
    START_FAILED = "start_failed"
    ENGINE_DIED = "engine_died"
    FENCED_OFF = "fenced_off"
    RELEASED = "released"


class ExitCode(IntEnum):
    """What the exit status of an agent means. `release` by signal is a clean end."""

    LEFT = 0
    USAGE = 2
    START_FAILED = 3
    FENCED = 4
    ENGINE_DIED = 5


STARTS = (State.LEASED, State.LOADING, State.STARTING, State.PROVING, State.JOINING)
WAITS = (State.BARE, State.STANDBY, State.ACTIVATING)
SERVES = (State.READY, State.REJOINING, State.FLIPPING, State.DRAINING)
LIVES = (*STARTS, *WAITS, *SERVES)
ENDS = (State.LEAVING, State.FAILED, State.FENCED)

_PATH: Mapping[tuple[State, Event], State] = {
    (State.NEW, Event.LEASE_GRANTED): State.LEASED,
    (State.NEW, Event.START_FAILED): State.FAILED,
    (State.NEW, Event.LEAVE_ASKED): State.LEAVING,
    (State.NEW, Event.DRAIN_ASKED): State.LEAVING,
    (State.LEASED, Event.SOURCES_PLANNED): State.LOADING,
    (State.LEASED, Event.ENGINE_FOUND): State.STARTING,
    (State.LOADING, Event.WEIGHTS_VERIFIED): State.STARTING,
    (State.STARTING, Event.ENGINE_UP): State.PROVING,
    (State.PROVING, Event.CANARY_PASSED): State.JOINING,
    (State.JOINING, Event.ADMITTED): State.READY,
    (State.JOINING, Event.REFUSED): State.FAILED,
    # A bare standby has an engine process and nothing else: told to serve, it starts from there.
    (State.LEASED, Event.IMPORTED): State.BARE,
    (State.BARE, Event.ACTIVATE_ASKED): State.LEASED,
    (State.BARE, Event.LEASE_REGRANTED): State.BARE,
    # A standby passed the gate and waits for the word; it serves when the gate says so, not before.
    (State.JOINING, Event.STOOD_BY): State.STANDBY,
    (State.STANDBY, Event.ACTIVATE_ASKED): State.ACTIVATING,
    (State.ACTIVATING, Event.ADMITTED): State.READY,
    (State.ACTIVATING, Event.STOOD_BY): State.STANDBY,
    (State.ACTIVATING, Event.REFUSED): State.FAILED,
    (State.STANDBY, Event.LEASE_REGRANTED): State.REJOINING,
    (State.ACTIVATING, Event.LEASE_REGRANTED): State.REJOINING,
    (State.REJOINING, Event.STOOD_BY): State.STANDBY,
    # A flip drains as it serves; with the lease of the other stage everything is proved anew. A
    # router that came back empty has forgotten it: the stage stays what it was.
    (State.READY, Event.FLIP_ASKED): State.FLIPPING,
    (State.FLIPPING, Event.TURNED): State.PROVING,
    (State.FLIPPING, Event.DRAIN_ASKED): State.DRAINING,
    (State.FLIPPING, Event.LEASE_REGRANTED): State.REJOINING,
    # A router that came back empty has no verdict of us: the evidence is handed in again.
    (State.READY, Event.LEASE_REGRANTED): State.REJOINING,
    (State.REJOINING, Event.LEASE_REGRANTED): State.REJOINING,
    (State.REJOINING, Event.ADMITTED): State.READY,
    (State.REJOINING, Event.REFUSED): State.FAILED,
    (State.DRAINING, Event.LEASE_REGRANTED): State.DRAINING,
    (State.READY, Event.DRAIN_ASKED): State.DRAINING,
    (State.REJOINING, Event.DRAIN_ASKED): State.DRAINING,
}

TRANSITIONS: Mapping[tuple[State, Event], State] = {
    **_PATH,
    # A start that is no longer wanted has served nobody: there is nothing to drain.
    **{(s, Event.DRAIN_ASKED): State.LEAVING for s in (*STARTS, *WAITS)},
    **{(s, Event.LEAVE_ASKED): State.LEAVING for s in LIVES},
    **{(s, Event.LEASE_REGRANTED): s for s in STARTS},
    **{(s, Event.START_FAILED): State.FAILED for s in (*STARTS, *WAITS)},
    **{(s, Event.ENGINE_DIED): State.FAILED for s in LIVES},
    **{(s, Event.FENCED_OFF): State.FENCED for s in LIVES},
    **{(s, Event.RELEASED): State.GONE for s in ENDS},
}


def step(state: State, event: Event) -> State:
    """The state after an event.

    Raises:
        Conflict: the event has no place in this state; the allowed ones are named.
    """
    found = TRANSITIONS.get((state, event))
    if found is None:
        allowed = ", ".join(str(e) for e in allowed_events(state)) or "nothing: it is over"
        raise Conflict(
            f"agent in state {state}", allowed, str(event), "tell only what the table allows"
        )
    return found


def allowed_events(state: State) -> tuple[Event, ...]:
    """Events that have a place in this state, in the order of the table."""
    return tuple(event for (at, event) in TRANSITIONS if at is state)


def holds_lease(state: State) -> bool:
    """Whether the lease is to be renewed in this state."""
    return state in LIVES


def drawing() -> str:
    """The table as a Mermaid state diagram; edges between the same states share a line."""
    edges: dict[tuple[State, State], list[str]] = {}
    for (state, event), after in TRANSITIONS.items():
        edges.setdefault((state, after), []).append(str(event))
    lines = ["stateDiagram-v2", f"    [*] --> {State.NEW}"]
    lines += [f"    {a} --> {b}: {' / '.join(names)}" for (a, b), names in edges.items()]
    return "\n".join([*lines, f"    {State.GONE} --> [*]"])
