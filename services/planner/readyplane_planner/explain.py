"""Why a decision was taken and what came of it: a timeline with the segment that took longest.

Owns the answer to "why did this take three minutes" (R24.2), as a document and as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from readyplane_planner.journal import Outcome, Record

ENDS = ("ready", "failed", "refused", "released")


def explanation(
    record: Record, outcomes: Sequence[Outcome], live: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The explanation of one decision.

    Args:
        live: worker rows of the state document by id, for starts that are still under way.
    """
    document = dict(record.document)
    by_subject: dict[str, dict[str, Outcome]] = {}
    for outcome in outcomes:
        by_subject.setdefault(outcome.subject, {})[outcome.kind] = outcome
    starts = [
        _start(order["worker_id"], order["pool"], record, by_subject, live)
        for order in document.get("orders", ())
    ]
    drains = [
        _drain(drain, record, by_subject.get(drain["worker_id"], {}))
        for drain in document.get("drains", ())
    ]
    releases = [
        {**release, "outcome": sorted(by_subject.get(release["worker_id"], {}))}
        for release in document.get("releases", ())
    ]
    answer = {
        "decision_id": record.decision_id,
        "model": record.model,
        "at_s": record.create_s,
        "summary": record.summary,
        "policy_version": record.policy_version,
        "decision": document,
        "starts": starts,
        "drains": drains,
        "releases": releases,
        "answer": _answer(starts, drains),
    }
    answer["text"] = text_of(answer)
    return answer


def _start(
    worker_id: str,
    pool: str,
    record: Record,
    by_subject: Mapping[str, Mapping[str, Outcome]],
    live: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Desired → provisioned → ready of one ordered worker, in seconds since the decision."""
    found = by_subject.get(worker_id, {})
    row = live.get(worker_id)
    ready = found.get("ready")
    start: Mapping[str, Any] = {}
    if ready is not None:
        start = ready.document.get("start") or {}
    elif row is not None:
        start = row.get("start") or {}
    end = next((kind for kind in ENDS if kind in found), None)
    status = end or ("starting" if row is not None or "ordered" in found else "ordered")
    after = {
        kind: round(found[kind].at_s - record.create_s, 3)
        for kind in ("ordered", "provisioned", *ENDS)
        if kind in found
    }
    exclusive = dict(start.get("exclusive_s") or {})
    dominant = max(exclusive, key=lambda name: (exclusive[name], name)) if exclusive else None
    note = next((str(found[k].document.get("note", "")) for k in ENDS if k in found), "")
    return {
        "worker_id": worker_id,
        "pool": pool,
        "status": status,
        "after_s": after,
        "wall_s": start.get("wall_s"),
        "segments": list(start.get("segments") or ()),
        "exclusive_s": exclusive,
        "unexplained_s": start.get("unexplained_s"),
        "dominant_segment": dominant,
        "blocking_segment": start.get("blocking_segment"),
        "tier": ready.document.get("tier") if ready is not None else None,
        "note": note,
        "log_tail": start.get("log_tail", ""),
    }


def _drain(
    drain: Mapping[str, Any], record: Record, found: Mapping[str, Outcome]
) -> dict[str, Any]:
    after = {kind: round(o.at_s - record.create_s, 3) for kind, o in found.items()}
    status = "drained" if "drained" in found else "draining"
    if "drain_failed" in found and "draining" not in found:
        status = "drain_failed"
    notes = [str(o.document.get("note", "")) for o in found.values() if o.kind == "drain_failed"]
    return {**drain, "status": status, "after_s": after, "note": notes[0] if notes else ""}


def _answer(starts: Sequence[Mapping[str, Any]], drains: Sequence[Mapping[str, Any]]) -> str:
    """One sentence for 'why did this take so long'."""
    timed = [s for s in starts if s["wall_s"] is not None]
    if timed:
        slowest = max(timed, key=lambda s: (s["wall_s"], s["worker_id"]))
        verb = "took" if slowest["status"] == "ready" else "has taken"
        sentence = f"{slowest['worker_id']} {verb} {slowest['wall_s']:.1f} s from its order"
        name = slowest["dominant_segment"]
        if name is not None:
            share = slowest["exclusive_s"][name]
            sentence += (
                f"; {name} took {share:.1f} s of it ({share / slowest['wall_s']:.0%})"
                if (slowest["wall_s"] > 0)
                else f"; {name} took longest"
            )
        if slowest["blocking_segment"]:
            sentence += f"; it now waits in {slowest['blocking_segment']}"
        return sentence
    lost = [s for s in starts if s["status"] in {"failed", "refused"}]
    if lost:
        return f"{lost[0]['worker_id']} was {lost[0]['status']}: {lost[0]['note'] or 'no reason given'}"
    if starts:
        return "the ordered workers have not reported yet"
    finished = [d["after_s"]["drained"] for d in drains if "drained" in d["after_s"]]
    if finished:
        return f"draining took {max(finished):.1f} s, which is how long the last stream ran"
    if drains:
        return "still draining: streams are being finished, none is cut"
    return "nothing was ordered or drained"


def text_of(answer: Mapping[str, Any]) -> str:
    """The explanation for a terminal."""
    lines = [f"{answer['decision_id']}  {answer['summary']}", "why:"]
    for reason in answer["decision"].get("reasons", ()):
        pool = f"{reason['pool']}: " if reason.get("pool") else ""
        lines.append(f"  - {pool}{reason['text']} [{reason['code']}]")
    for start in answer["starts"]:
        steps = ", ".join(f"{kind} after {s:.1f} s" for kind, s in start["after_s"].items())
        lines.append(f"{start['worker_id']} ({start['pool']}): {start['status']}; {steps or '–'}")
        ranked = sorted(start["exclusive_s"].items(), key=lambda item: (-item[1], item[0]))
        lines.extend(f"    {name:<22}{seconds:8.2f} s" for name, seconds in ranked)
        if start["unexplained_s"] is not None:
            lines.append(f"    {'unexplained':<22}{start['unexplained_s']:8.2f} s")
        if start["note"]:
            lines.append(f"    {start['note']}")
    for drain in answer["drains"]:
        steps = ", ".join(f"{kind} after {s:.1f} s" for kind, s in drain["after_s"].items())
        lines.append(f"{drain['worker_id']} ({drain['pool']}): {drain['status']}; {steps or '–'}")
    lines.extend(f"{r['worker_id']} released: {r['why']}" for r in answer["releases"])
    lines.append(f"answer: {answer['answer']}")
    return "\n".join(lines)
