"""The journal in Postgres; see `readyplane_planner.journal.Journal`.

Rows are only added: the database refuses an update. Policies move by compare-and-set on their
version, the leader's number comes from a sequence.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Row, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from readyplane.kit.clock import utc
from readyplane.kit.database import database_errors
from readyplane_planner.journal import (
    LIST_MAX,
    LISTED_MAX,
    OUTCOMES_MAX,
    Outcome,
    Record,
    StoredPolicy,
    policy_conflict,
    stale_leader,
    unknown_decision,
)

COLUMNS = (
    "sequence, decision_id, model, create_time, changed, summary, policy_version,"
    " document::text AS document"
)
APPEND = text(
    "INSERT INTO decisions"
    " (decision_id, model, create_time, changed, summary, policy_version, document, inputs)"
    " VALUES (:decision_id, :model, :create_time, :changed, :summary, :policy_version,"
    " CAST(:document AS jsonb), :inputs)"
    " ON CONFLICT (decision_id) DO NOTHING"
)
NEWEST = text(
    f"SELECT {COLUMNS} FROM decisions"
    " WHERE model = :model AND (NOT :changes_only OR changed)"
    " AND (:before = 0 OR sequence < :before) ORDER BY sequence DESC LIMIT :limit"
)
SINCE = text(
    f"SELECT {COLUMNS} FROM decisions"
    " WHERE model = :model AND sequence > :sequence ORDER BY sequence LIMIT :limit"
)
GET = text(f"SELECT {COLUMNS}, inputs FROM decisions WHERE decision_id = :decision_id")
# An outcome belongs to its decision's model; one whose decision was pruned or never kept is dropped.
ATTACH = text(
    "INSERT INTO decision_outcomes (decision_id, subject, kind, model, create_time, document)"
    " SELECT d.decision_id, CAST(:subject AS text), CAST(:kind AS text), d.model,"
    " CAST(:create_time AS timestamptz), CAST(:document AS jsonb)"
    " FROM decisions d WHERE d.decision_id = :decision_id"
    " ON CONFLICT (decision_id, subject, kind) DO NOTHING"
)
OUTCOME = "decision_id, subject, kind, create_time, document::text AS document"
OUTCOMES_OF = text(
    f"SELECT {OUTCOME} FROM decision_outcomes WHERE decision_id = :decision_id"
    " ORDER BY sequence LIMIT :limit"
)
OUTCOMES_BY_KIND = text(
    f"SELECT {OUTCOME} FROM decision_outcomes WHERE model = :model AND kind = :kind"
    " ORDER BY sequence DESC LIMIT :limit"
)
OUTCOMES_OF_SEVERAL = text(
    f"SELECT {OUTCOME} FROM decision_outcomes WHERE decision_id = ANY(CAST(:ids AS text[]))"
    " AND kind = ANY(CAST(:kinds AS text[])) ORDER BY sequence LIMIT :limit"
)
PRUNE = text(
    "WITH ranked AS (SELECT decision_id, create_time,"
    " row_number() OVER (ORDER BY changed DESC, sequence DESC) AS place"
    " FROM decisions WHERE model = :model),"
    " gone AS (DELETE FROM decisions d USING ranked r WHERE d.decision_id = r.decision_id"
    " AND (r.place > :keep OR r.create_time < :older_than) RETURNING d.decision_id),"
    " more AS (DELETE FROM decision_outcomes o USING gone g WHERE o.decision_id = g.decision_id)"
    " SELECT count(*) FROM gone"
)
POLICY = text(
    "SELECT model, version, document::text AS document, create_time FROM policies"
    " WHERE model = :model ORDER BY version DESC LIMIT 1"
)
PUT_POLICY = text(
    "INSERT INTO policies (model, version, document, create_time)"
    " SELECT CAST(:model AS text), CAST(:version AS bigint), CAST(:document AS jsonb),"
    " CAST(:create_time AS timestamptz)"
    " WHERE COALESCE((SELECT max(version) FROM policies WHERE model = :model), 0) = :expected"
)
NEXT_EPOCH = text("SELECT nextval('planner_epochs')")
# Of two that take their numbers at once the greater one stays, whoever writes last.
RAISE_FENCE = text(
    "INSERT INTO planner_fences (model, epoch) VALUES (:model, :epoch) ON CONFLICT (model)"
    " DO UPDATE SET epoch = greatest(planner_fences.epoch, excluded.epoch)"
)
# Shared until the record is in: a new leader's number waits for it, or it waits and is refused.
FENCE = text("SELECT epoch FROM planner_fences WHERE model = :model FOR SHARE")


class PostgresJournal:
    """See Journal."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def append(self, record: Record, *, leader_epoch: int = 0) -> None:
        """See Journal."""
        values = {
            "decision_id": record.decision_id,
            "model": record.model,
            "create_time": utc(record.create_s),
            "changed": record.changed,
            "summary": record.summary,
            "policy_version": record.policy_version,
            "document": json.dumps(record.document),
            "inputs": record.inputs,
        }
        with database_errors():
            async with self._engine.begin() as connection:
                newest = await connection.scalar(FENCE, {"model": record.model}) or 0
                if newest <= leader_epoch:
                    await connection.execute(APPEND, values)
        if newest > leader_epoch:
            raise stale_leader(record.model, leader_epoch, newest)

    async def attach(self, outcomes: Sequence[Outcome]) -> None:
        """See Journal."""
        if not outcomes:
            return
        rows = [
            {
                "decision_id": o.decision_id,
                "subject": o.subject,
                "kind": o.kind,
                "create_time": utc(o.at_s),
                "document": json.dumps(o.document),
            }
            for o in outcomes
        ]
        with database_errors():
            async with self._engine.begin() as connection:
                await connection.execute(ATTACH, rows)

    async def newest(
        self, model: str, *, limit: int, changes_only: bool = False, before: int = 0
    ) -> list[Record]:
        """See Journal."""
        rows = await self._rows(
            NEWEST,
            model=model,
            limit=min(limit, LIST_MAX),
            changes_only=changes_only,
            before=before,
        )
        return [_record(row) for row in rows]

    async def since(self, model: str, sequence: int, *, limit: int) -> list[Record]:
        """See Journal."""
        rows = await self._rows(SINCE, model=model, sequence=sequence, limit=min(limit, LIST_MAX))
        return [_record(row) for row in rows]

    async def get(self, decision_id: str) -> tuple[Record, list[Outcome]]:
        """See Journal."""
        rows = await self._rows(GET, decision_id=decision_id)
        if not rows:
            raise unknown_decision(decision_id)
        found = await self._rows(OUTCOMES_OF, decision_id=decision_id, limit=OUTCOMES_MAX)
        return _record(rows[0], bytes(rows[0].inputs)), [_outcome(row) for row in found]

    async def outcomes(self, model: str, kind: str, *, limit: int) -> list[Outcome]:
        """See Journal."""
        rows = await self._rows(OUTCOMES_BY_KIND, model=model, kind=kind, limit=limit)
        return [_outcome(row) for row in rows]

    async def outcomes_of(
        self, decision_ids: Collection[str], kinds: Collection[str]
    ) -> list[Outcome]:
        """See Journal."""
        if not decision_ids:
            return []
        rows = await self._rows(
            OUTCOMES_OF_SEVERAL, ids=list(decision_ids), kinds=list(kinds), limit=LISTED_MAX
        )
        return [_outcome(row) for row in rows]

    async def prune(self, model: str, *, keep: int, older_than_s: float) -> int:
        """See Journal."""
        rows = await self._rows(PRUNE, model=model, keep=keep, older_than=utc(older_than_s))
        return int(rows[0][0])

    async def policy(self, model: str) -> StoredPolicy | None:
        """See Journal."""
        rows = await self._rows(POLICY, model=model)
        if not rows:
            return None
        row = rows[0]
        return StoredPolicy(
            row.model, row.version, json.loads(row.document), row.create_time.timestamp()
        )

    async def put_policy(self, policy: StoredPolicy, *, expected_version: int) -> StoredPolicy:
        """See Journal."""
        values = {
            "model": policy.model,
            "version": expected_version + 1,
            "expected": expected_version,
            "document": json.dumps(policy.document),
            "create_time": utc(policy.create_s),
        }
        stored = False
        with database_errors():
            try:
                async with self._engine.begin() as connection:
                    stored = (await connection.execute(PUT_POLICY, values)).rowcount == 1
            except IntegrityError:
                stored = False  # two writers saw the same version; the key let one of them in
        if not stored:
            found = await self.policy(policy.model)
            raise policy_conflict(
                policy.model, expected_version, 0 if found is None else found.version
            )
        return StoredPolicy(policy.model, expected_version + 1, policy.document, policy.create_s)

    async def next_epoch(self, model: str) -> int:
        """See Journal."""
        with database_errors():
            async with self._engine.begin() as connection:
                epoch = int(await connection.scalar(NEXT_EPOCH))
                await connection.execute(RAISE_FENCE, {"model": model, "epoch": epoch})
        return epoch

    async def _rows(self, statement: Any, **values: Any) -> Sequence[Row[Any]]:
        with database_errors():
            async with self._engine.begin() as connection:
                return (await connection.execute(statement, values)).all()


def _record(row: Row[Any], inputs: bytes = b"") -> Record:
    return Record(
        decision_id=row.decision_id,
        model=row.model,
        create_s=row.create_time.timestamp(),
        changed=row.changed,
        summary=row.summary,
        policy_version=row.policy_version,
        document=json.loads(row.document),
        inputs=inputs,
        sequence=row.sequence,
    )


def _outcome(row: Row[Any]) -> Outcome:
    return Outcome(
        row.decision_id,
        row.subject,
        row.kind,
        row.create_time.timestamp(),
        json.loads(row.document),
    )
