"""A journalled decision taken again: the same brain on the recorded inputs, compared by field.

Owns the comparison. Pure; handed to the service, which fetches the record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from readyplane.core.errors import InvalidField
from readyplane.core.identity import digest_of_bytes
from readyplane_planner.decide import decide
from readyplane_planner.decide.follow import Brain
from readyplane_planner.journal import Record, decision_document, plain_inputs, replay

DIFFERENCES_MAX = 200


def recall(record: Record, *, brain: Brain = decide) -> dict[str, Any]:
    """Decide again and say what differs; `same` is True when nothing does.

    Fields that the record does not have, because an older planner wrote it, are listed apart.

    Raises:
        NotFound: kept without inputs. InvalidField: the inputs cannot be read by this version.
    """
    try:
        decision = replay(record, brain=brain)
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise InvalidField(
            "inputs of decision",
            record.decision_id,
            f"replay it with the version of the planner that wrote it ({error})",
        ) from error
    document = record.document
    again = decision_document(
        decision,
        at_s=document.get("at_s", record.create_s),
        leader_epoch=int(document.get("leader_epoch", 0)),
        inputs_digest=digest_of_bytes(plain_inputs(record.inputs)),
        totals=document.get("totals"),
    )
    recorded, replayed = dict(flat(_plain(document))), dict(flat(_plain(again)))
    unrecorded = sorted(set(replayed) - set(recorded))
    differing = [name for name in recorded if recorded[name] != replayed.get(name, _ABSENT)]
    # A list that grew or shrank is a difference, not a field that an older planner did not know.
    roots = {name.partition(".")[0] for name in recorded}
    known = {name for name in unrecorded if name.partition(".")[0] in roots}
    shown = [*differing, *sorted(known)]
    return {
        "decision_id": record.decision_id,
        "model": record.model,
        "policy_version": record.policy_version,
        "summary": again["summary"],
        "same": not shown,
        "differences": [
            {"field": name, "recorded": recorded.get(name), "replayed": replayed.get(name)}
            for name in shown[:DIFFERENCES_MAX]
        ],
        "unrecorded": [name for name in unrecorded if name not in known],
    }


class _Absent:
    def __repr__(self) -> str:
        return "absent"


_ABSENT = _Absent()


def _plain(value: Any) -> Any:
    """As JSON would have it, so that a store in between makes no difference."""
    return msgspec.json.decode(msgspec.json.encode(value))


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf; an empty list or object is a leaf."""
    if isinstance(value, Mapping) and value:
        for name, below in value.items():
            yield from flat(below, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(value, list) and value:
        for place, below in enumerate(value):
            yield from flat(below, f"{prefix}.{place}")
    else:
        yield prefix, value
