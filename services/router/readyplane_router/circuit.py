"""The circuit breaker of a worker: closed, open, half open (field reports B68, B70).

Owns the table; the service feeds it failed legs and completions. A worker that answers 4xx or is
busy has not failed and is never reported here. An open circuit lets one probe through after
`open_s`; one good probe closes it, so that recovery is quicker than a client gives up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CLOSED = "closed"
OPEN = "open"
HALF_OPEN = "half_open"

# (state, what happened) -> state; what is not listed changes nothing.
TABLE: dict[tuple[str, str], str] = {
    (CLOSED, "too_many_failures"): OPEN,
    (OPEN, "time_passed"): HALF_OPEN,
    (HALF_OPEN, "failure"): OPEN,
    (HALF_OPEN, "success"): CLOSED,
}


@dataclass(frozen=True, slots=True)
class Circuit:
    """One worker's circuit. `since_s`: when it opened. `probing`: the one probe is under way."""

    state: str = CLOSED
    failures: int = 0
    last_failure_s: float = 0.0
    since_s: float = 0.0
    probing: bool = False


def failed(circuit: Circuit, *, now_s: float, failures_max: int, window_s: float) -> Circuit:
    """After a failed leg. Failures further apart than `window_s` do not add up."""
    if circuit.state == CLOSED:
        fresh = now_s - circuit.last_failure_s <= window_s
        count = circuit.failures + 1 if fresh else 1
        counted = replace(circuit, failures=count, last_failure_s=now_s)
        if count < failures_max:
            return counted
        return replace(counted, state=TABLE[CLOSED, "too_many_failures"], since_s=now_s)
    if circuit.state == HALF_OPEN:
        return Circuit(TABLE[HALF_OPEN, "failure"], circuit.failures, now_s, now_s)
    return replace(circuit, last_failure_s=now_s)


def succeeded(circuit: Circuit) -> Circuit:
    """After a leg that went well. A late success of an open circuit does not close it."""
    if circuit.state == HALF_OPEN:
        return Circuit(TABLE[HALF_OPEN, "success"])
    if circuit.state == CLOSED and circuit.failures:
        return Circuit()
    return circuit


def looked_at(circuit: Circuit, *, now_s: float, open_s: float) -> Circuit:
    """As it stands now: an open circuit turns half open when `open_s` have passed."""
    if circuit.state == OPEN and now_s - circuit.since_s >= open_s:
        return replace(circuit, state=TABLE[OPEN, "time_passed"], probing=False)
    return circuit


def passes(circuit: Circuit) -> bool:
    """Whether a request may be sent: closed, or half open with no probe under way."""
    return circuit.state == CLOSED or (circuit.state == HALF_OPEN and not circuit.probing)
