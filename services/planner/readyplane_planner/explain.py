"""Why a decision was taken and what came of it: weighed, expected, done, and worth it or not.

Owns the answer to "why did this take three minutes" (R24.2), as a document and as text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from readyplane.core.worker import Holds
from readyplane_planner.journal import Outcome, Record
from readyplane_planner.judgement import to_judge
from readyplane_planner.timeline import timeline

ENDS = ("ready", "failed", "refused", "released")
PROVED = ("ready", "stood_by")
"""A start that came to its end: it serves, or it stands by and has passed the gate."""


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
    judged = by_subject.get("", {}).get("judged")
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
        "activations": list(document.get("activations", ())),
        "flips": list(document.get("flips", ())),
        "timeline": timeline(record, by_subject, starts, live),
        "outcome": None if judged is None else dict(judged.document),
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
    ready = found.get("ready") or _proved_standby(found)
    start: Mapping[str, Any] = {}
    if ready is not None:
        start = ready.document.get("start") or {}
    elif row is not None and row.get("start"):
        start = row["start"]
    elif "failed" in found:
        start = found["failed"].document.get("start") or {}
    end = next((kind for kind in ENDS if kind in found), None)
    if ready is not None:  # whatever became of it later, its start had come to its end
        end = ready.kind
    lost: Mapping[str, Any] = found["failed"].document if end == "failed" else {}
    status = end or ("starting" if row is not None or "ordered" in found else "ordered")
    after = {
        kind: round(found[kind].at_s - record.create_s, 3)
        for kind in ("ordered", "provisioned", "stood_by", *ENDS)
        if kind in found
    }
    told = _who(ready, lost)
    later = next((found[k].document for k in ("upgraded", "upgrade_failed") if k in found), None)
    exclusive = dict(start.get("exclusive_s") or {})
    dominant = max(exclusive, key=lambda name: (exclusive[name], name)) if exclusive else None
    note = next((str(found[k].document.get("note", "")) for k in ENDS if k in found), "")
    return {
        "worker_id": worker_id,
        "pool": pool,
        "upgrade": None if later is None else dict(later),
        "status": status,
        "after_s": after,
        "wall_s": start.get("wall_s"),
        "segments": list(start.get("segments") or ()),
        "exclusive_s": exclusive,
        "unexplained_s": start.get("unexplained_s"),
        "dominant_segment": dominant,
        "blocking_segment": start.get("blocking_segment"),
        "tier": ready.document.get("tier") if ready is not None else None,
        "worker_class": told.get("worker_class"),
        "mode": told.get("mode"),
        "from_standby": told.get("holds") == Holds.PROCESS,
        "note": note,
        "failure": start.get("failure") or "",
        "ended_in": start.get("ended_in") or start.get("blocking_segment") if lost else None,
        "log_tail": start.get("log_tail", "") or _log_of(found),
    }


def _proved_standby(found: Mapping[str, Outcome]) -> Outcome | None:
    """What a standby told that passed the gate; one with a process only has told of no start yet."""
    told = found.get("stood_by")
    return told if told is not None and told.document.get("start") else None


def _who(ready: Outcome | None, lost: Mapping[str, Any]) -> Mapping[str, Any]:
    """Class and mode of a start, as far as they were told; older planners told them in the sample."""
    return lost if ready is None else {**(ready.document.get("sample") or {}), **ready.document}


def _log_of(found: Mapping[str, Outcome]) -> str:
    """The end of the log that the actuator kept of a failure."""
    return str(found["failed"].document.get("log_tail", "")) if "failed" in found else ""


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
        verb = "took" if slowest["status"] in PROVED else "has taken"
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
    decision = answer["decision"]
    lines = [f"{answer['decision_id']}  {answer['summary']}", "why:"]
    for reason in decision.get("reasons", ()):
        pool = f"{reason['pool']}: " if reason.get("pool") else ""
        lines.append(f"  - {pool}{reason['text']} [{reason['code']}]")
    lines += [f"weighed: {line}" for line in candidate_lines(decision)]
    lines += [f"expected: {line}" for line in expectation_lines(decision)]
    lines += [f"admission: {line}" for line in ration_lines(decision)]
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
    lines.append("timeline:")
    lines += [f"  {line}" for line in timeline_lines(answer["timeline"])]
    lines.append(f"outcome: {outcome_text(answer)}")
    lines.append(f"answer: {answer['answer']}")
    return "\n".join(lines)


def candidate_lines(decision: Mapping[str, Any]) -> list[str]:
    """What was weighed, one line a pair of targets; costs are GPU-seconds."""
    lines = []
    for place, found in enumerate(decision.get("candidates") or ()):
        parts = found["parts"]
        costs = (
            f"capacity {parts['capacity']:.0f}, start and drain {parts['start_drain']:.0f}, "
            f"late work {parts['slo']:.0f}"
        )
        verdict = "proposed" if place == 0 else "could be"
        if not found["feasible"]:
            verdict = ("proposed; " if place == 0 else "") + f"not enough: {found['why_not']}"
        pair = f"P {found['p']}, D {found['d']}"
        lines.append(f"{pair}: {found['cost']:.0f} GPU-s ({costs}); {verdict}")
    return lines


def expectation_lines(decision: Mapping[str, Any]) -> list[str]:
    """What each change should come to, one line a pool."""
    lines = []
    for made in decision.get("expected") or ():
        verb = "more serve" if made["workers"] > 0 else "fewer serve"
        line = (
            f"{made['pool']}: {abs(made['workers'])} {verb} in {made['in_p50_s']:.0f} s "
            f"(P90 {made['in_p90_s']:.0f} s), {made['rate']:+,.0f} tokens/s"
        )
        if made["load_now"] is not None and made["load_then"] is not None:
            line += f"; load {made['load_now']:.2f} → {made['load_then']:.2f}"
        lines.append(line)
    return lines


def ration_lines(decision: Mapping[str, Any]) -> list[str]:
    """Whom the router was told to refuse, and what that should come to."""
    order = decision.get("ration")
    if order is None:
        return []
    if order["admit_share"] >= 1.0:
        return [order["why"]]
    priority, share = order["priority"], order["admit_share"]
    whom = f"priorities up to {priority} are refused"
    if share > 0:
        whom = f"priorities below {priority} are refused, {share:.0%} of {priority} is admitted"
    return [
        f"{whom}, for {order['ttl_s']:.0f} s unless renewed (for {order['begun_ago_s']:.0f} s so far)",
        (
            f"late {order['late_without']:.1%} → {order['late_with']:.1%}, "
            f"{order['shed_tokens']:,.0f} prompt tokens/s refused"
        ),
        order["why"],
    ]


def timeline_lines(moments: Sequence[Mapping[str, Any]]) -> list[str]:
    """The moments, one line each."""
    lines = []
    for moment in moments:
        at = "      –  " if moment["after_s"] is None else f"{moment['after_s']:7.1f} s"
        took = "" if moment["took_s"] is None else f" took {moment['took_s']:.2f} s"
        note = f" ({moment['note']})" if moment["note"] else ""
        worker = f" {moment['worker_id']}" if moment["worker_id"] else ""
        lines.append(f"{at}  {moment['who']:<9}{worker} {moment['what']}{took}{note}")
    return lines


def outcome_text(answer: Mapping[str, Any]) -> str:
    """Worth it or not, in one sentence."""
    found = answer.get("outcome")
    if found is None:
        return "not judged yet" if to_judge(answer["decision"]) else "nothing to judge"
    verdict = {True: "worth it", False: "not worth it", None: "not known"}[found["worth"]]
    parts = [f"{verdict}: {found['why']}"]
    for pool, load in found["load"].items():
        if load["before"] is not None and load["after"] is not None:
            parts.append(f"load of {pool} {load['before']:.2f} → {load['after']:.2f}")
    both = found["attainment"]
    if both["before"] is not None and both["after"] is not None:
        parts.append(f"attainment {both['before']:.1%} → {both['after']:.1%}")
    return "; ".join(parts)
