"""Holds, uses and evictions in Postgres: `KeepingStore` over SQLAlchemy and asyncpg.

Owns the statements and the locks that order uploads against collection. Holds end by the
database's own clock. Handed to `collecting` by `__main__`.

One advisory lock orders references: `postgres` takes it shared when it adds a manifest or tag, a
hold takes it shared, a mark takes it alone; so a mark sees every hold and every manifest that was
there before it, and whoever comes after it sees the mark. Bytes are deleted while the mark's row
is locked; a holder deletes that row first, and so waits for the deletion, or forestalls it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY, BIGINT, TEXT
from sqlalchemy.ext.asyncio import AsyncEngine

from readyplane.core.errors import ReadyplaneError
from readyplane.kit.clock import utc
from readyplane.kit.database import database_errors
from readyplane_registry.keeping import HELD_MAX, Delete, Eviction, held_too_much
from readyplane_registry.postgres import LOCK_REFERENCES, LOCK_REFERENCES_ALONE, NOT_RETIRED, STATE
from readyplane_registry.retention import ManifestFacts

BATCH = 5_000


def _arrays(statement: str, **arrays: Any) -> Any:
    return text(statement).bindparams(
        *(bindparam(name, type_=ARRAY(kind)) for name, kind in arrays.items())
    )


HOLD = _arrays(
    "INSERT INTO upload_holds (upload_id, sha256, expire_time)"
    " SELECT :upload_id, name, now() + make_interval(secs => :ttl_s)"
    " FROM (SELECT DISTINCT unnest(:names) AS name) AS given ORDER BY name"
    " ON CONFLICT (upload_id, sha256) DO NOTHING",
    names=TEXT,
)
EXTEND = text(
    "UPDATE upload_holds SET expire_time = now() + make_interval(secs => :ttl_s)"
    " WHERE upload_id = :upload_id"
)
COUNT_HELD = text("SELECT count(*) FROM upload_holds WHERE upload_id = :upload_id")
FORGET_HOLDS = text("DELETE FROM upload_holds WHERE expire_time <= now()")
RESCUE = _arrays("DELETE FROM blob_evictions WHERE sha256 = ANY(:names)", names=TEXT)
RELEASE = text("DELETE FROM upload_holds WHERE upload_id = :upload_id")
USE = _arrays(
    "INSERT INTO manifest_uses (digest, use_time)"
    " SELECT digest, :use_time FROM manifests WHERE digest = ANY(:digests) ORDER BY digest"
    " ON CONFLICT (digest) DO UPDATE"
    " SET use_time = greatest(manifest_uses.use_time, excluded.use_time)",
    digests=TEXT,
)
# A tag moved away from a digest when the next version of that tag was made.
FACTS = text(
    "SELECT manifests.digest, model, kind, sequence, manifests.create_time, use_time, left_time,"
    " names FROM manifests"
    " LEFT JOIN manifest_uses USING (digest)"
    " LEFT JOIN (SELECT a.digest, max(b.create_time) AS left_time FROM tag_history AS a"
    "   JOIN tag_history AS b ON b.name = a.name AND b.version = a.version + 1 GROUP BY a.digest)"
    "   AS moved USING (digest)"
    " LEFT JOIN (SELECT digest, array_agg(name ORDER BY name) AS names FROM tags GROUP BY digest)"
    "   AS tagged USING (digest)"
    f" WHERE {NOT_RETIRED} ORDER BY sequence"
)
# Never null: a manifest without any event keeps its bytes.
RETIRED = STATE.format(digest="b.digest") + " IS NOT DISTINCT FROM 'retired'"
RETIRED_SINCE = (
    "(SELECT max(e.create_time) FROM manifest_events AS e"
    " WHERE e.digest = b.digest AND e.event = 'retired')"
)
NOTHING_KEEPS = (
    "NOT EXISTS (SELECT 1 FROM upload_holds AS h"
    "   WHERE h.sha256 = name AND h.expire_time > now())"
    " AND NOT EXISTS (SELECT 1 FROM manifest_blobs AS b"
    "   LEFT JOIN manifest_uses AS u ON u.digest = b.digest"
    f"   WHERE b.sha256 = name AND NOT ({RETIRED} AND"
    f"     greatest({RETIRED_SINCE}, u.use_time) <= :before))"
)
UNKEPT = _arrays(
    f"SELECT name FROM unnest(:names) AS name WHERE {NOTHING_KEEPS}"
    " AND NOT EXISTS (SELECT 1 FROM blob_evictions AS v WHERE v.sha256 = name) ORDER BY name",
    names=TEXT,
)
MARK = _arrays(
    "INSERT INTO blob_evictions (sha256, size_bytes) SELECT name, size FROM"
    f" unnest(:names, :sizes) AS given (name, size) WHERE {NOTHING_KEEPS}"
    " ON CONFLICT (sha256) DO NOTHING RETURNING sha256",
    names=TEXT,
    sizes=BIGINT,
)
EVICTING = text(
    "SELECT sha256, size_bytes, attempts, last_error FROM blob_evictions"
    " ORDER BY create_time, sha256 LIMIT :limit"
)
LOCK_MARK = text("SELECT 1 FROM blob_evictions WHERE sha256 = :sha256 FOR UPDATE SKIP LOCKED")
HELD = text("SELECT 1 FROM upload_holds WHERE sha256 = :sha256 AND expire_time > now() LIMIT 1")
UNMARK = text("DELETE FROM blob_evictions WHERE sha256 = :sha256")
FAILED = text(
    "UPDATE blob_evictions SET attempts = attempts + 1, last_error = :error WHERE sha256 = :sha256"
)


class PostgresKeeping:
    """See `KeepingStore`.

    Args:
        engine: of `readyplane.kit.database`; the schema is migrated.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def hold(self, upload_id: str, sha256: Sequence[str], *, ttl_s: float) -> None:
        """See `KeepingStore`."""
        names = sorted(set(sha256))
        values: dict[str, Any] = {"upload_id": upload_id, "ttl_s": ttl_s}
        with database_errors():
            async with self._engine.begin() as connection:
                await connection.execute(LOCK_REFERENCES)
                await connection.execute(FORGET_HOLDS)
                await connection.execute(HOLD, {**values, "names": names})
                await connection.execute(EXTEND, values)
                count = (await connection.execute(COUNT_HELD, values)).scalar_one()
                if count > HELD_MAX:
                    raise held_too_much(upload_id, count)
            # The hold is committed: from here on nothing is deleted anew. What is being deleted is
            # waited for, row by row.
            async with self._engine.begin() as connection:
                await connection.execute(RESCUE, {"names": names})

    async def release(self, upload_id: str) -> None:
        """See `KeepingStore`."""
        with database_errors():
            async with self._engine.begin() as connection:
                await connection.execute(RELEASE, {"upload_id": upload_id})

    async def note_uses(self, digests: Sequence[str], *, now_s: float) -> None:
        """See `KeepingStore`."""
        with database_errors():
            async with self._engine.begin() as connection:
                await connection.execute(USE, {"digests": list(digests), "use_time": utc(now_s)})

    async def facts(self) -> list[ManifestFacts]:
        """See `KeepingStore`."""
        with database_errors():
            async with self._engine.connect() as connection:
                rows = (await connection.execute(FACTS)).all()
        return [
            ManifestFacts(
                digest=row.digest,
                model=row.model,
                kind=row.kind,
                sequence=row.sequence,
                created_s=row.create_time.timestamp(),
                used_s=None if row.use_time is None else row.use_time.timestamp(),
                left_s=None if row.left_time is None else row.left_time.timestamp(),
                tags=tuple(row.names or ()),
            )
            for row in rows
        ]

    async def mark(
        self, stored: Mapping[str, int], *, now_s: float, grace_s: float
    ) -> tuple[str, ...]:
        """See `KeepingStore`."""
        found: list[str] = []
        names = sorted(stored)
        with database_errors():
            for begin in range(0, len(names), BATCH):
                batch = names[begin : begin + BATCH]
                async with self._engine.begin() as connection:
                    await connection.execute(LOCK_REFERENCES_ALONE)
                    values = {
                        "names": batch,
                        "sizes": [stored[name] for name in batch],
                        "before": utc(now_s - grace_s),
                    }
                    rows = (await connection.execute(MARK, values)).all()
                    found += [row.sha256 for row in rows]
        return tuple(sorted(found))

    async def unkept(
        self, stored: Sequence[str], *, now_s: float, grace_s: float
    ) -> tuple[str, ...]:
        """See `KeepingStore`."""
        values = {"names": list(stored), "before": utc(now_s - grace_s)}
        with database_errors():
            async with self._engine.connect() as connection:
                return tuple((await connection.execute(UNKEPT, values)).scalars())

    async def evicting(self, *, limit: int = 10_000) -> list[Eviction]:
        """See `KeepingStore`."""
        with database_errors():
            async with self._engine.connect() as connection:
                rows = (await connection.execute(EVICTING, {"limit": limit})).all()
        return [Eviction(r.sha256, r.size_bytes, r.attempts, r.last_error) for r in rows]

    async def evict(self, sha256: str, delete: Delete) -> int | None:
        """See `KeepingStore`.

        The deletion happens inside the transaction that holds the mark's row: when this process
        dies in between, the mark is still there and the next collection confirms it.
        """
        values = {"sha256": sha256}
        with database_errors():
            async with self._engine.begin() as connection:
                if (await connection.execute(LOCK_MARK, values)).first() is None:
                    return None
                if (await connection.execute(HELD, values)).first() is not None:
                    await connection.execute(UNMARK, values)
                    return None
                try:
                    freed = await delete(sha256)
                except (ReadyplaneError, OSError) as error:
                    failure = error
                else:
                    await connection.execute(UNMARK, values)
                    return freed
                await connection.execute(FAILED, {**values, "error": str(failure)[:500]})
        raise failure
