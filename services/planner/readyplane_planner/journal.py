"""Decisions that are only ever added, with the inputs that replay them; policies; leader epochs.

Owns the record, its encoding and the Journal port with its memory twin; `postgres` implements the
same port. What came of a decision is attached to it as outcomes, never written over it.
"""

from __future__ import annotations

import gzip
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import msgspec

from readyplane.core.errors import Conflict, InvalidField, NotFound, StaleEpoch
from readyplane.core.identity import digest_of_bytes
from readyplane_planner.decide import Decision, Memory, Plan, decide
from readyplane_planner.decide.follow import Brain
from readyplane_planner.decide.rations import Rationed
from readyplane_planner.optimise.answer import Answer, answered
from readyplane_planner.signals import Observation

ID_MAX = 128
LIST_MAX = 10_000
OUTCOMES_MAX = 2000
"""Outcomes of one decision that are given back at most."""
LISTED_MAX = 20_000
"""Outcomes of a list of decisions that are given back at most."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that `decide` was called with; `answer` is a foreign optimiser's."""

    observation: Observation
    plan: Plan
    memory: Memory
    now_s: float
    decision_id: str
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One decision as it is kept.

    Attributes:
        create_s: seconds since the epoch. changed: whether it moved anything; the others are
            samples that show the planner at rest. document: the decision without its inputs.
        inputs: gzipped JSON of Inputs; its digest stands in the document.
        sequence: place in the journal, given by the store.
    """

    decision_id: str
    model: str
    create_s: float
    changed: bool
    summary: str
    policy_version: int
    document: Mapping[str, Any]
    inputs: bytes = b""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one order or drain of a decision: ordered, ready, failed, refused, drained."""

    decision_id: str
    subject: str
    kind: str
    at_s: float
    document: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """A policy version."""

    model: str
    version: int
    document: Mapping[str, Any]
    create_s: float = 0.0


class Journal(Protocol):
    """Where decisions, outcomes and policies are kept."""

    async def append(self, record: Record, *, leader_epoch: int = 0) -> None:
        """Add a record. Idempotent by decision id: the first one stays.

        Args:
            leader_epoch: number of the leader that decided it; 0 is older than any.

        Raises:
            StaleEpoch: a newer leader of the model has its number. What that one reads from then
                on is all that older ones have decided.
        """
        ...

    async def attach(self, outcomes: Sequence[Outcome]) -> None:
        """Add outcomes. Idempotent by (decision, subject, kind): the first one stays."""
        ...

    async def newest(
        self, model: str, *, limit: int, changes_only: bool = False, before: int = 0
    ) -> list[Record]:
        """Newest first, without inputs. `before`: only records with a smaller sequence."""
        ...

    async def since(self, model: str, sequence: int, *, limit: int) -> list[Record]:
        """Records with a greater sequence, oldest first, without inputs."""
        ...

    async def get(self, decision_id: str) -> tuple[Record, list[Outcome]]:
        """One record with its inputs and its outcomes, oldest first. Raises NotFound."""
        ...

    async def outcomes(self, model: str, kind: str, *, limit: int) -> list[Outcome]:
        """The newest outcomes of one kind, newest first."""
        ...

    async def outcomes_of(
        self, decision_ids: Collection[str], kinds: Collection[str]
    ) -> list[Outcome]:
        """Outcomes of some kinds of these decisions, oldest first, LISTED_MAX at most."""
        ...

    async def prune(self, model: str, *, keep: int, older_than_s: float) -> int:
        """Drop samples first, then whatever is beyond `keep` or too old. Returns how many."""
        ...

    async def policy(self, model: str) -> StoredPolicy | None:
        """The newest version."""
        ...

    async def put_policy(self, policy: StoredPolicy, *, expected_version: int) -> StoredPolicy:
        """Store as the next version if the newest is `expected_version` (0: none yet).

        Raises:
            Conflict: another version is the newest.
        """
        ...

    async def next_epoch(self, model: str) -> int:
        """A leadership number greater than any before, whatever became of other stores.

        From now on records of the model under older numbers are refused.
        """
        ...


class MemoryJournal:
    """The twin: same rules, gone with the process."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._outcomes: dict[str, dict[tuple[str, str], Outcome]] = {}
        self._told: list[Outcome] = []
        self._policies: dict[str, list[StoredPolicy]] = {}
        self._sequence = 0
        self._epoch = 0
        self._fences: dict[str, int] = {}

    async def append(self, record: Record, *, leader_epoch: int = 0) -> None:
        """See Journal."""
        newest = self._fences.get(record.model, 0)
        if leader_epoch < newest:
            raise stale_leader(record.model, leader_epoch, newest)
        if record.decision_id not in self._records:
            self._sequence += 1
            self._records[record.decision_id] = replace(record, sequence=self._sequence)

    async def attach(self, outcomes: Sequence[Outcome]) -> None:
        """See Journal."""
        for outcome in outcomes:
            mine = self._outcomes.setdefault(outcome.decision_id, {})
            if (outcome.subject, outcome.kind) not in mine:
                mine[outcome.subject, outcome.kind] = outcome
                self._told.append(outcome)

    async def newest(
        self, model: str, *, limit: int, changes_only: bool = False, before: int = 0
    ) -> list[Record]:
        """See Journal."""
        found: list[Record] = []
        for record in reversed(self._records.values()):
            if record.model != model or (changes_only and not record.changed):
                continue
            if before and record.sequence >= before:
                continue
            found.append(replace(record, inputs=b""))
            if len(found) >= min(limit, LIST_MAX):
                break
        return found

    async def since(self, model: str, sequence: int, *, limit: int) -> list[Record]:
        """See Journal."""
        found: list[Record] = []
        for record in reversed(self._records.values()):
            if record.sequence <= sequence:
                break
            if record.model == model:
                found.append(replace(record, inputs=b""))
        return found[::-1][:limit]

    async def get(self, decision_id: str) -> tuple[Record, list[Outcome]]:
        """See Journal."""
        record = self._records.get(decision_id)
        if record is None:
            raise unknown_decision(decision_id)
        mine = list(self._outcomes.get(decision_id, {}).values())
        return record, mine[:OUTCOMES_MAX]

    async def outcomes(self, model: str, kind: str, *, limit: int) -> list[Outcome]:
        """See Journal."""
        found = [
            o
            for o in reversed(self._told)
            if o.kind == kind
            and (record := self._records.get(o.decision_id)) is not None
            and record.model == model
        ]
        return found[:limit]

    async def outcomes_of(
        self, decision_ids: Collection[str], kinds: Collection[str]
    ) -> list[Outcome]:
        """See Journal."""
        wanted, asked = set(decision_ids), set(kinds)
        found = [o for o in self._told if o.kind in asked and o.decision_id in wanted]
        return found[:LISTED_MAX]

    async def prune(self, model: str, *, keep: int, older_than_s: float) -> int:
        """See Journal."""
        mine = [r for r in self._records.values() if r.model == model]
        mine.sort(key=lambda r: (r.changed, r.sequence), reverse=True)
        gone = {r.decision_id for r in mine[keep:]}
        gone |= {r.decision_id for r in mine if r.create_s < older_than_s}
        for decision_id in gone:
            del self._records[decision_id]
            self._outcomes.pop(decision_id, None)
        self._told = [o for o in self._told if o.decision_id not in gone]
        return len(gone)

    async def policy(self, model: str) -> StoredPolicy | None:
        """See Journal."""
        versions = self._policies.get(model)
        return versions[-1] if versions else None

    async def put_policy(self, policy: StoredPolicy, *, expected_version: int) -> StoredPolicy:
        """See Journal."""
        versions = self._policies.setdefault(policy.model, [])
        found = versions[-1].version if versions else 0
        if found != expected_version:
            raise policy_conflict(policy.model, expected_version, found)
        stored = StoredPolicy(policy.model, found + 1, policy.document, policy.create_s)
        versions.append(stored)
        return stored

    async def next_epoch(self, model: str) -> int:
        """See Journal."""
        self._epoch += 1
        self._fences[model] = self._epoch
        return self._epoch


def checked_id(decision_id: str) -> str:
    """An id that somebody asks for, fit to be looked up: a store takes no control characters.

    Raises:
        InvalidField: it cannot be one of a decision.
    """
    if not (0 < len(decision_id) <= ID_MAX and decision_id.isprintable()):
        remedy = f"give at most {ID_MAX} printable characters, as the list of decisions has them"
        raise InvalidField("decision_id", decision_id, remedy)
    return decision_id


def unknown_decision(decision_id: str) -> NotFound:
    """The error for a decision that is not in the journal."""
    return NotFound(
        "decision", decision_id, "list the decisions for known ids; old ones are pruned"
    )


def policy_conflict(model: str, expected: int, found: int) -> Conflict:
    """The error for a policy that somebody else has changed."""
    return Conflict(
        f"policy version of {model}", expected, found, "read the policy again and repeat the change"
    )


def stale_leader(model: str, epoch: int, newest: int) -> StaleEpoch:
    """The error for a record of a leader that another one has followed."""
    remedy = "stand by; a newer planner leads and its records alone are kept"
    return StaleEpoch(f"leader's number in the journal of {model}", epoch, newest, remedy)


# --------------------------------------------------------------------------- encoding


def encode_inputs(inputs: Inputs) -> tuple[bytes, str]:
    """(gzipped JSON, digest of the JSON). Floats keep every bit; equal inputs give equal bytes."""
    plain = msgspec.json.encode(inputs, order="deterministic")
    return gzip.compress(plain, compresslevel=1, mtime=0), digest_of_bytes(plain)


def decode_inputs(data: bytes) -> Inputs:
    """The inputs of a record."""
    return msgspec.json.decode(plain_inputs(data), type=Inputs)


def plain_inputs(data: bytes) -> bytes:
    """Their JSON, which the digest is of."""
    return gzip.decompress(data)


def replay(record: Record, *, brain: Brain = decide) -> Decision:
    """Decide again from what a record keeps; equal to the decision of then, bit for bit.

    Raises:
        NotFound: the record was kept without its inputs.
    """
    return replayed(record, brain=brain)[0]


def replayed(record: Record, *, brain: Brain = decide) -> tuple[Decision, Memory, float]:
    """(the decision, the memory after it, the planner's clock of then) of a record.

    Raises:
        NotFound: the record was kept without its inputs.
    """
    if not record.inputs:
        raise NotFound("inputs of decision", record.decision_id, "get the record from the journal")
    inputs = decode_inputs(record.inputs)
    return (*decided(inputs, brain=brain), inputs.now_s)


def decided(inputs: Inputs, *, brain: Brain = decide) -> tuple[Decision, Memory]:
    """What follows from inputs; a foreign optimiser's answer is taken as it was given."""
    if inputs.answer is not None and brain is decide:
        brain = partial(decide, optimiser=answered(inputs.answer))
    return brain(
        inputs.observation,
        inputs.plan,
        inputs.memory,
        now_s=inputs.now_s,
        decision_id=inputs.decision_id,
    )


def record_of(
    decision: Decision,
    inputs: Inputs,
    *,
    at_s: float,
    leader_epoch: int,
    totals: Mapping[str, Any] | None = None,
) -> Record:
    """A decision with everything that replays it; `totals` as in `decision_document`."""
    packed, digest = encode_inputs(inputs)
    return Record(
        decision_id=decision.decision_id,
        model=decision.model,
        create_s=at_s,
        changed=decision.changed,
        summary=summary_of(decision),
        policy_version=decision.policy_version,
        document=decision_document(
            decision, at_s=at_s, leader_epoch=leader_epoch, inputs_digest=digest, totals=totals
        ),
        inputs=packed,
    )


def row_of(record: Record) -> dict[str, Any]:
    """A decision as the state document lists it."""
    document = record.document
    return {
        "decision_id": record.decision_id,
        "at_s": record.create_s,
        "summary": record.summary,
        "changes": document.get("changes", []),
        "reasons": document.get("reasons", []),
    }


def decision_document(
    decision: Decision,
    *,
    at_s: float,
    leader_epoch: int,
    inputs_digest: str,
    totals: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The decision as a JSON object for people and programs (see the README).

    Args:
        totals: the router's counters of now and its incarnation, for the effect that is told
            later; None where the router did not answer.
    """
    document: dict[str, Any] = msgspec.to_builtins(decision)
    del document["at_s"], document["why"]
    changes = [
        {"pool": name, "from": pool.before, "to": pool.target}
        for name, pool in (("prefill", decision.prefill), ("decode", decision.decode))
        if pool.before != pool.target
    ]
    return {
        **document,
        "at_s": at_s,
        "clock_s": decision.at_s,
        "leader_epoch": leader_epoch,
        "inputs_digest": inputs_digest,
        "changes": changes,
        "summary": summary_of(decision),
        "reasons": [{"code": r.code, "text": r.text, "pool": r.pool} for r in decision.why],
        "totals": None if totals is None else dict(totals),
    }


def summary_of(decision: Decision) -> str:
    """One line: what moves and the reason that weighed most."""
    parts = [
        f"{name} {pool.before} → {pool.target}"
        for name, pool in (("prefill", decision.prefill), ("decode", decision.decode))
        if pool.before != pool.target
    ]
    for count, word in (
        (len(decision.orders), "ordered"),
        (len(decision.drains), "to drain"),
        (len(decision.releases), "released"),
        (len(decision.activations), "activated"),
        (len(decision.flips), "to change the stage"),
    ):
        if count:
            parts.append(f"{count} {word}")
    if decision.ration is not None and decision.ration.turned:
        parts.append(_rationed(decision.ration))
    if parts:
        return ", ".join(parts)
    return f"hold: {decision.why[0].text}"


def _rationed(order: Rationed) -> str:
    if order.admit_share >= 1.0:
        return "everybody admitted again"
    part = f", of {order.priority} {order.admit_share:.0%} admitted" if order.admit_share else ""
    return f"priorities {'below' if part else 'up to'} {order.priority} refused{part}"
