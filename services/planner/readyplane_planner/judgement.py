"""Whether a decision was worth it, from what the journal holds of it and of the time around it.

Owns the judgement only: effect on load and attainment, and of each worker whether its start or its
drain paid. Pure: records and outcomes in, a document out. Hands it to outcomes, which asks and
tells; null means 'not known', never 'no'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from readyplane_planner.journal import Outcome, Record
from readyplane_planner.signals import RouterSample

POOLS = ("prefill", "decode")
WINDOW_S_MIN = 60.0
"""Decisions at rest are kept every half minute: a shorter look would see none of them."""
ENDED = ("finished", "refused", "aborted")
MOVES = {
    "activations": ("activated", "activate_failed"),
    "flips": ("flipped", "flip_failed"),
}
"""What is told to workers that are loaded already: how it ends well, and how it does not."""
CANCELLED = "cancelled"
"""How the reason of a release begins that gives up a start nobody needs any more."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Of one worker: worth it, not, or not to be known; `settled` is False while it may yet be."""

    worker_id: str
    pool: str
    what: str
    worth: bool | None
    why: str
    settled: bool = True
    ready_s: float | None = None


def totals_of(sample: RouterSample | None) -> dict[str, Any] | None:
    """The router's counters as they stand; kept with a decision for its effect later."""
    if sample is None or not sample.model_known:
        return None
    names = ("arrivals", "attained", *ENDED)
    counters = {name: sample.counters.get(f"{name}_total") for name in names}
    return {"router": sample.incarnation, **counters}


def to_judge(document: Mapping[str, Any]) -> bool:
    """Whether a decision asked for anything that can turn out well or badly."""
    return bool(document.get("orders") or _given_up(document) or any(map(document.get, MOVES)))


def due_after_s(document: Mapping[str, Any]) -> float:
    """Seconds after a decision before which nothing can be said of it."""
    wait_s = max((_t_ready_s(document, pool) for pool in _pools(document)), default=0.0)
    return wait_s + _window_s(document)


def judge(
    record: Record,
    outcomes: Sequence[Outcome],
    before: Sequence[Record],
    after: Sequence[Record],
    *,
    now_s: float,
) -> dict[str, Any] | None:
    """The judgement, or None while what it hangs on is still going on.

    Args:
        outcomes: of this decision. before: records before it, newest first. after: records after
            it, oldest first. now_s: seconds since the epoch, like all times here.
    """
    document = record.document
    by_worker: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_worker.setdefault(outcome.subject, {})[outcome.kind] = outcome
    found = [
        _started(order, record, by_worker.get(order["worker_id"], {}), after, now_s)
        for order in document.get("orders", ())
    ]
    found += [
        _moved(word, kinds, by_worker.get(word["worker_id"], {}), after, now_s)
        for name, kinds in MOVES.items()
        for word in document.get(name, ())
    ]
    found += [
        _given(gone, record, by_worker.get(gone["worker_id"], {}), after, now_s)
        for gone in _given_up(document)
    ]
    window_s = _window_s(document)
    there = [v.ready_s for v in found if v.ready_s is not None]
    begins_s = max([record.create_s, *there])
    late = now_s - record.create_s > _patience_s(document)
    if not late and (any(not v.settled for v in found) or now_s < begins_s + window_s):
        return None
    spans = (record.create_s - window_s, record.create_s), (begins_s, begins_s + window_s)
    past, coming = (*reversed(before), record), (record, *after)
    told = [v.worth for v in found]
    worth = None if None in told else all(told)
    if False in told:
        worth = False
    return {
        "worth": worth,
        "why": "; ".join(v.why for v in found),
        "window_s": window_s,
        "ready_s": {v.worker_id: v.ready_s - record.create_s for v in found if v.ready_s},
        "workers": [_shown(v) for v in found],
        "load": {
            pool: {"before": _load(past, pool, spans[0]), "after": _load(coming, pool, spans[1])}
            for pool in POOLS
        },
        "attainment": {
            "before": _attainment(past, spans[0]),
            "after": _attainment(coming, spans[1]),
        },
    }


def _shown(verdict: _Verdict) -> dict[str, Any]:
    return {name: getattr(verdict, name) for name in ("worker_id", "pool", "what", "worth", "why")}


# --------------------------------------------------------------------------- workers


def _started(
    order: Mapping[str, Any],
    record: Record,
    told: Mapping[str, Outcome],
    after: Sequence[Record],
    now_s: float,
) -> _Verdict:
    """A start is worth it when its worker then served for at least one T_ready."""
    worker_id, pool = str(order["worker_id"]), str(order["pool"])
    needed_s = _t_ready_s(record.document, pool)

    def say(worth: bool | None, why: str, **more: Any) -> _Verdict:
        return _Verdict(worker_id, pool, "start", worth, f"{worker_id} {why}", **more)

    ready = told.get("ready")
    for kind in ("refused", "failed"):
        if kind in told and ready is None:
            note = str(told[kind].document.get("note", "")) or "no reason was given"
            if note.startswith("advisory"):
                return say(None, "was advice: nobody ordered it")
            return say(False, f"{kind}: {note}")
    leaves_s = _let_go_s(worker_id, after)
    if ready is None and "stood_by" in told:
        return say(None, "stands by: it is not judged by what it serves")
    if ready is None:
        if leaves_s is not None or "released" in told:
            return say(False, "was given up before it served")
        return say(None, "is not known to have served", settled=False)
    ready_s = ready.at_s - float(ready.document.get("ready_ago_s") or 0.0)
    ready_s = max(ready_s, record.create_s)
    ends = [leaves_s] if leaves_s is not None else []
    ends += [told[kind].at_s for kind in ("left", "failed", "released") if kind in told]
    end_s = min(ends, default=None)
    served_s = max(0.0, (now_s if end_s is None else end_s) - ready_s)
    if served_s >= needed_s:
        return say(True, f"served for {served_s:.0f} s or longer", ready_s=ready_s)
    if end_s is None:
        return say(None, f"has served for {served_s:.0f} s", settled=False, ready_s=ready_s)
    why = f"served for {served_s:.0f} s and took {needed_s:.0f} s to come"
    return say(False, why, ready_s=ready_s)


def _moved(
    word: Mapping[str, Any],
    kinds: tuple[str, str],
    told: Mapping[str, Outcome],
    after: Sequence[Record],
    now_s: float,
) -> _Verdict:
    """Told to serve, or to change the stage: right when it was not taken back within a minute."""
    worker_id, pool = str(word["worker_id"]), str(word.get("to", word["pool"]))
    done, failed = kinds

    def say(worth: bool | None, why: str, **more: Any) -> _Verdict:
        return _Verdict(worker_id, pool, done, worth, f"{worker_id} {why}", **more)

    if failed in told:
        return say(False, f"did not: {told[failed].document.get('note') or 'no reason was given'}")
    if "advised" in told:
        return say(None, "was advice: nobody told it")
    if done not in told:
        return say(None, f"is not known to have {done}", settled=False)
    done_s, leaves_s = told[done].at_s, _let_go_s(worker_id, after)
    if leaves_s is not None and leaves_s - done_s < WINDOW_S_MIN:
        return say(False, f"{done} and went after {max(0.0, leaves_s - done_s):.0f} s")
    if now_s - done_s < WINDOW_S_MIN:
        return say(None, f"has {done} just now", settled=False, ready_s=done_s)
    return say(True, f"{done} and stayed for a minute or longer", ready_s=done_s)


def _given(
    gone: Mapping[str, Any],
    record: Record,
    told: Mapping[str, Outcome],
    after: Sequence[Record],
    now_s: float,
) -> _Verdict:
    """Letting go was right when nobody was missed until a start would have brought another one."""
    worker_id, pool = str(gone["worker_id"]), str(gone["pool"])
    within_s = _t_ready_s(record.document, pool)

    def say(worth: bool | None, why: str, **more: Any) -> _Verdict:
        return _Verdict(worker_id, pool, "let go", worth, f"{worker_id} {why}", **more)

    for kind in ("drain_failed", "release_failed"):
        if kind in told and "drained" not in told:
            return say(None, f"did not go: {told[kind].document.get('note', '')}")
    if "advised" in told:
        return say(None, "was advice: nobody drained it")
    until_s = record.create_s + within_s
    for later in after:
        if later.create_s > until_s:
            break
        passed_s = later.create_s - record.create_s
        reasons = later.document.get("reasons", ())
        rolling = any(r.get("code") == "rollout" and r.get("pool") == pool for r in reasons)
        if not rolling and any(o["pool"] == pool for o in later.document.get("orders", ())):
            return say(False, f"was missed: another one was ordered {passed_s:.0f} s later")
        load = _value(later, pool)
        if load is not None and load > 1.0:
            return say(False, f"was missed: the load reached {load:.2f} after {passed_s:.0f} s")
    if now_s < until_s:
        return say(None, "may yet be missed", settled=False)
    return say(True, f"was not missed within {within_s:.0f} s")


def _let_go_s(worker_id: str, after: Sequence[Record]) -> float | None:
    """When a later decision drained or released it, or had it change the stage."""
    for later in after:
        names = ("drains", "releases", "flips")
        gone = [g for name in names for g in later.document.get(name, ())]
        if any(g["worker_id"] == worker_id for g in gone):
            return later.create_s
    return None


def _given_up(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Drains, and cancelled starts; what is only tidied up was nobody's choice."""
    releases = document.get("releases", ())
    cancelled = [r for r in releases if str(r.get("why", "")).startswith(CANCELLED)]
    return [*document.get("drains", ()), *cancelled]


# --------------------------------------------------------------------------- effect


def _load(records: Sequence[Record], pool: str, span: tuple[float, float]) -> float | None:
    """Mean of the loads that were kept in the span."""
    known = [_value(r, pool) for r in records if span[0] <= r.create_s <= span[1]]
    values = [v for v in known if v is not None]
    return sum(values) / len(values) if values else None


def _value(record: Record, pool: str) -> float | None:
    load = (record.document.get(pool) or {}).get("load") or {}
    value = load.get("value")
    return None if value is None else float(value)


def _attainment(records: Sequence[Record], span: tuple[float, float]) -> float | None:
    """Requests that met both targets over all that ended, from the router's counters.

    None where nothing ended, or where the router began anew in between.
    """
    kept = [
        t for r in records if span[0] <= r.create_s <= span[1] and (t := r.document.get("totals"))
    ]
    if len(kept) < 2 or kept[0].get("router") != kept[-1].get("router"):
        return None
    first, last = kept[0], kept[-1]
    names = (*ENDED, "attained")
    if any(t.get(name) is None for t in (first, last) for name in names):
        return None
    ended = sum(float(last[n]) - float(first[n]) for n in ENDED)
    if ended <= 0:
        return None
    return max(0.0, min(1.0, (float(last["attained"]) - float(first["attained"])) / ended))


# --------------------------------------------------------------------------- times


def _pools(document: Mapping[str, Any]) -> set[str]:
    asked = [x for name in ("orders", *MOVES) for x in document.get(name, ())]
    return {str(x["pool"]) for x in (*asked, *_given_up(document))}


def _t_ready_s(document: Mapping[str, Any], pool: str, quantile: str = "p50_s") -> float:
    t_ready = (document.get(pool) or {}).get("t_ready") or {}
    return float(t_ready.get(quantile) or 0.0)


def _window_s(document: Mapping[str, Any]) -> float:
    return max([WINDOW_S_MIN, *(_t_ready_s(document, pool) for pool in _pools(document))])


def _patience_s(document: Mapping[str, Any]) -> float:
    """After that nothing more will be heard: what is open then stays unknown."""
    latest_s = max((_t_ready_s(document, p, "p99_s") for p in _pools(document)), default=0.0)
    return 3.0 * latest_s + 3.0 * _window_s(document)
