"""One decision across planner, actuator, agent, gate and router, as a list of moments (R24.2).

Owns the order of the steps and what is said of those nobody told of. Rests on the journal, so that
it works for workers that are gone; the live rows only add what is still under way. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from readyplane_planner.journal import Outcome, Record

UNTOLD = "not known"
MOVES = {
    "activations": ("activating", "activate_failed", "activated", "activation", "serves"),
    "flips": (
        "flipping",
        "flip_failed",
        "flipped",
        "change of the stage",
        "serves the other stage",
    ),
}
"""Words to workers that are loaded already: how they were taken, refused and done, for a person."""
Told = Mapping[str, Outcome]


def timeline(
    record: Record,
    told: Mapping[str, Told],
    starts: Sequence[Mapping[str, Any]],
    live: Mapping[str, Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Moments in order: `after_s` since the decision (null: not known), `who`, `what`, worker, note.

    Args:
        told: outcomes by worker and kind. starts: as `explain` tells them, with their segments.
        live: worker rows of the state document by id.
    """
    document = record.document
    first = _moment(0.0, "planner", "decided", note=record.summary)
    found = [[first]]
    by_id = {start["worker_id"]: start for start in starts}
    for order in document.get("orders", ()):
        worker_id = order["worker_id"]
        mine = told.get(worker_id, {})
        found.append(_started(worker_id, record, mine, by_id[worker_id], live.get(worker_id)))
    for name, words in MOVES.items():
        for word in document.get(name, ()):
            found.append(_moved(word, words, record, told.get(word["worker_id"], {})))
    for drain in document.get("drains", ()):
        worker_id = drain["worker_id"]
        found.append(_drained(worker_id, record, told.get(worker_id, {}), live.get(worker_id)))
    for release in document.get("releases", ()):
        worker_id = release["worker_id"]
        found.append(_released(worker_id, record, told.get(worker_id, {}), release["why"]))
    return _in_order(found)


def _moment(
    after_s: float | None,
    who: str,
    what: str,
    worker_id: str = "",
    note: str = "",
    took_s: float | None = None,
) -> dict[str, Any]:
    return {
        "after_s": None if after_s is None else round(after_s, 3),
        "who": who,
        "what": what,
        "worker_id": worker_id,
        "took_s": None if took_s is None else round(took_s, 3),
        "note": note,
    }


def _in_order(chains: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """By time; what has none follows the step before it in its own chain."""
    keyed: list[tuple[float, int, int, dict[str, Any]]] = []
    for place, chain in enumerate(chains):
        last = 0.0
        for step, moment in enumerate(chain):
            if moment["after_s"] is not None:
                last = max(last, moment["after_s"])
            at_s = last if moment["after_s"] is None else moment["after_s"]
            keyed.append((at_s, place, step, moment))
    return [moment for *_key, moment in sorted(keyed, key=lambda k: k[:3])]


def _after(told: Told, kind: str, record: Record) -> float | None:
    return told[kind].at_s - record.create_s if kind in told else None


def _note(told: Told, kind: str) -> str:
    return str(told[kind].document.get("note", "")) if kind in told else ""


def _started(
    worker_id: str,
    record: Record,
    told: Told,
    start: Mapping[str, Any],
    row: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """Order → allocation → process → segments → gate → registration → first request → end."""
    chain: list[dict[str, Any]] = []

    def add(
        kind: str, who: str, what: str, *, missing: str = "", after_s: float | None = None
    ) -> None:
        at_s = _after(told, kind, record) if after_s is None else after_s
        if at_s is None and not missing:
            return
        note = _note(told, kind) if at_s is not None else f"{UNTOLD}: {missing}"
        chain.append(_moment(at_s, who, what, worker_id, note))

    if "refused" in told:
        add("refused", "actuator", "order refused")
        return chain
    # The answer is read at the next tick, when the allocation may be there already.
    answers = [s for k in ("ordered", "allocated") if (s := _after(told, k, record)) is not None]
    accepted_s = min(answers) if "ordered" in told else None
    missing = "the call's answer was not kept"
    add("ordered", "actuator", "order accepted", missing=missing, after_s=accepted_s)
    add("allocated", "actuator", "allocated", missing="no list of the actuator showed it")
    add("running", "actuator", "process runs", missing="no list of the actuator showed it")
    known = (_after(told, kind, record) for kind in ("allocated", "ordered"))
    zero_s = next((s for s in known if s is not None), 0.0)
    chain.extend(_segments(worker_id, start, zero_s))
    add("provisioned", "router", "lease granted", missing="the router has not seen it")
    if "failed" in told and "ready" not in told:
        chain.extend(_gate(worker_id, told["failed"].document.get("checks", ()), None))
        add("failed", "actuator", "ended by itself")
        return chain
    ready = told.get("ready")
    if ready is None and "stood_by" in told:
        stood = told["stood_by"]
        at_s = stood.at_s - record.create_s
        chain.extend(_gate(worker_id, stood.document.get("checks", ()), at_s))
        note = "serves when it is told to"
        if stood.document.get("holds"):
            note = f"holds a {stood.document['holds']} only, and loads when it is told to"
        chain.append(_moment(at_s, "router", "stands by", worker_id, note))
        add("released", "actuator", "given back")
        return chain
    if ready is None:
        checks = () if row is None else row.get("checks", ())
        chain.extend(_gate(worker_id, checks, None))
        add("released", "actuator", "given back before it served")
        if "released" not in told:
            state = "nobody has seen it" if row is None else f"it is {row.get('state')} now"
            chain.append(_moment(None, "router", "registered", worker_id, f"not yet: {state}"))
        return chain
    ready_s = ready.at_s - record.create_s - float(ready.document.get("ready_ago_s") or 0.0)
    chain.extend(_gate(worker_id, ready.document.get("checks", ()), ready_s))
    chain.append(_moment(ready_s, "router", "registered, routable", worker_id))
    idle = "none was seen at a tick" if row is None else "none yet"
    chain.extend(_upgraded(worker_id, told, record))
    add("first_request", "router", "first request", missing=idle)
    add("failed", "actuator", "ended by itself")
    add("left", "router", "gone")
    add("released", "actuator", "given back")
    return chain


def _upgraded(worker_id: str, told: Told, record: Record) -> list[dict[str, Any]]:
    """Its graphs came while it served, or it went back to those of its start (R14)."""
    for kind, what in (
        ("upgraded", "runs with all graphs"),
        ("upgrade_failed", "keeps its graphs"),
    ):
        found = told.get(kind)
        if found is not None:
            document = found.document
            note = f"{document['kv_tokens']} KV tokens, {document['digest']}"
            note = f"{document['why']}; {note}" if document["why"] else note
            at_s = found.at_s - record.create_s
            return [_moment(at_s, "agent", what, worker_id, note, document["seconds"])]
    return []


def _segments(worker_id: str, start: Mapping[str, Any], zero_s: float) -> list[dict[str, Any]]:
    """The agent's segments, at the moment each began."""
    segments = start.get("segments") or ()
    if not segments:
        why = f"{UNTOLD}: no report of its start has come"
        return [_moment(None, "agent", "start", worker_id, why)]
    out = []
    for segment in sorted(segments, key=lambda s: s["start_s"]):
        end_s = segment["end_s"]
        took_s = None if end_s is None else end_s - segment["start_s"]
        notes = [segment.get("detail") or "", "modelled" if segment.get("modelled") else ""]
        if end_s is None:
            notes.append("under way")
        note = ", ".join(n for n in notes if n)
        after_s = zero_s + segment["start_s"]
        out.append(_moment(after_s, "agent", str(segment["name"]), worker_id, note, took_s))
    return out


def _gate(
    worker_id: str, checks: Sequence[Mapping[str, Any]], after_s: float | None
) -> list[dict[str, Any]]:
    """The gate's verdict: let in, or the checks that failed."""
    failed = [f"{c['name']}: {c.get('reason') or 'failed'}" for c in checks if not c["passed"]]
    if failed:
        return [_moment(None, "gate", "refused", worker_id, "; ".join(failed))]
    if after_s is None:
        return []
    note = f"{len(checks)} checks passed" if checks else f"{UNTOLD}: its checks were not kept"
    return [_moment(after_s, "gate", "admitted", worker_id, note)]


def _moved(
    word: Mapping[str, Any], words: tuple[str, ...], record: Record, told: Told
) -> list[dict[str, Any]]:
    """A standby that is told to serve, or a worker that is told to change its stage."""
    taken, refused, done, name, then = words
    worker_id = word["worker_id"]
    if "advised" in told:
        at_s = _after(told, "advised", record)
        return [_moment(at_s, "planner", f"{name} advised", worker_id, "nobody was told")]
    if refused in told:
        at_s, note = _after(told, refused, record), _note(told, refused)
        return [_moment(at_s, "router", f"{name} refused", worker_id, note)]
    lost = f"{UNTOLD}: the router's answer was not kept"
    chain = [
        _moment(
            _after(told, taken, record),
            "router",
            f"{name} accepted",
            worker_id,
            _note(told, taken) if taken in told else lost,
        )
    ]
    if done in told:
        seconds = told[done].document.get("seconds")
        chain.append(_moment(_after(told, done, record), "router", then, worker_id, "", seconds))
    else:
        chain.append(_moment(None, "router", then, worker_id, "not yet: nobody has seen it"))
    return chain


def _drained(
    worker_id: str, record: Record, told: Told, row: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    after = {kind: _after(told, kind, record) for kind in told}
    if "advised" in told:
        note = "advice: nobody was told"
        return [_moment(after["advised"], "planner", "drain advised", worker_id, note)]
    chain = []
    if "draining" in told:
        note = _note(told, "draining")
        chain.append(_moment(after["draining"], "router", "drain accepted", worker_id, note))
    elif "drain_failed" in told:
        note = _note(told, "drain_failed")
        return [_moment(after["drain_failed"], "router", "drain refused", worker_id, note)]
    else:
        note = f"{UNTOLD}: the router's answer was not kept"
        chain.append(_moment(None, "router", "drain accepted", worker_id, note))
    if "drained" in told:
        note = "its last stream has ended"
        chain.append(_moment(after["drained"], "router", "gone", worker_id, note))
    else:
        state = "nobody has seen it end"
        if row is not None:
            state = f"it is {row.get('state')} now with {row.get('active')} sequences"
        chain.append(_moment(None, "router", "gone", worker_id, f"not yet: {state}"))
    return chain


def _released(worker_id: str, record: Record, told: Told, why: str) -> list[dict[str, Any]]:
    for kind, what in (("released", "given back"), ("release_failed", "not given back")):
        if kind in told:
            note = _note(told, kind) or why
            return [_moment(_after(told, kind, record), "actuator", what, worker_id, note)]
    note = f"{UNTOLD}: the actuator's answer was not kept; {why}"
    return [_moment(None, "actuator", "given back", worker_id, note)]
