"""The catalogue in Postgres: `CatalogStore` over SQLAlchemy and asyncpg.

Owns the statements; the rules that no statement may break (a manifest's digest is its content, its
row never changes, a tag moves one version at a time) stand in the database, see `migrations`.
Handed to the service by `__main__`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Row, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from readyplane.core.canonical import canonical
from readyplane.core.trust import SIGNATURES_MAX, ManifestEvent, Signature, Trail
from readyplane.kit.clock import utc
from readyplane.kit.database import database_errors
from readyplane.ports import Tag
from readyplane_registry.store import (
    ManifestRecord,
    holding,
    retired_manifest,
    says_something,
    tag_conflict,
    tagged_manifest,
    too_many_signatures,
    unknown_manifest,
    unknown_tag,
)

LINE = "sequence, digest, kind, model, size_bytes, file_count, tensor_count, create_time"
PUT = text(
    "INSERT INTO manifests (digest, document, kind, model, size_bytes, file_count, tensor_count,"
    " create_time) VALUES (:digest, :document, :kind, :model, :size_bytes, :file_count,"
    f" :tensor_count, :create_time) ON CONFLICT (digest) DO NOTHING RETURNING {LINE}, document"
)
GET = text(f"SELECT {LINE}, document FROM manifests WHERE digest = :digest")
GET_MANY = text(f"SELECT {LINE}, document FROM manifests WHERE digest IN :digests").bindparams(
    bindparam("digests", expanding=True)
)
KNOWN = text("SELECT 1 FROM manifests WHERE digest = :digest")
# The last word on whether a manifest is hidden; `{digest}` is an expression.
STATE = (
    "(SELECT e.event FROM manifest_events AS e WHERE e.digest = {digest} AND e.event <> 'origin'"
    " ORDER BY e.version DESC LIMIT 1)"
)
NOT_RETIRED = STATE.format(digest="manifests.digest") + " IS DISTINCT FROM 'retired'"
LISTS = {
    (by_model, by_kind): text(
        f"SELECT {LINE} FROM manifests WHERE {NOT_RETIRED}"
        + (" AND model = :model" if by_model else "")
        + (" AND kind = :kind" if by_kind else "")
        + " AND sequence < :before ORDER BY sequence DESC LIMIT :limit"
    )
    for by_model in (False, True)
    for by_kind in (False, True)
}
# Whoever adds a reference takes it shared, whoever takes one away exclusively: see `postgres_keeping`.
LOCK_REFERENCES = text("SELECT pg_advisory_xact_lock_shared(hashtext('readyplane/references'))")
LOCK_REFERENCES_ALONE = text("SELECT pg_advisory_xact_lock(hashtext('readyplane/references'))")
LOCK_TRAIL = text(
    "SELECT pg_advisory_xact_lock(hashtextextended('readyplane/trail/' || :digest, 0))"
)
SIGNATURES = text(
    "SELECT key_id, public_key, envelope, create_time FROM manifest_signatures"
    " WHERE digest = :digest ORDER BY key_id"
)
ADD_SIGNATURE = text(
    "INSERT INTO manifest_signatures (digest, key_id, public_key, envelope, create_time)"
    " VALUES (:digest, :key_id, :public_key, :envelope, :create_time)"
)
EVENTS = text(
    "SELECT event, detail, create_time FROM manifest_events WHERE digest = :digest ORDER BY version"
)
ADD_EVENT = text(
    "INSERT INTO manifest_events (digest, version, event, detail, create_time)"
    " VALUES (:digest, :version, :event, :detail, :create_time)"
)
STATE_NOW = text("SELECT " + STATE.format(digest="CAST(:digest AS text)"))
TAG = "name, digest, version, create_time"
LOCK_TAG = text("SELECT pg_advisory_xact_lock(hashtextextended('readyplane/tag/' || :name, 0))")
GET_TAG = text(f"SELECT {TAG} FROM tags WHERE name = :name")
ADD_HISTORY = text(
    "INSERT INTO tag_history (name, version, digest, create_time)"
    " VALUES (:name, :version, :digest, :create_time)"
)
MOVE_TAG = text(
    "INSERT INTO tags (name, digest, version, change, create_time)"
    " VALUES (:name, :digest, :version, nextval('tag_changes'), :create_time)"
    " ON CONFLICT (name) DO UPDATE SET digest = excluded.digest, version = excluded.version,"
    " change = excluded.change, create_time = excluded.create_time"
)
LIST_TAGS = text(f"SELECT {TAG} FROM tags WHERE digest IS NOT NULL ORDER BY change DESC")
HISTORY = text(f"SELECT {TAG} FROM tag_history WHERE name = :name ORDER BY version DESC")
TAGS_OF = text("SELECT digest, name FROM tags WHERE digest IN :digests ORDER BY name").bindparams(
    bindparam("digests", expanding=True)
)


class PostgresCatalog:
    """See `CatalogStore`.

    Args:
        engine: of `readyplane.kit.database`; the schema is migrated.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def put_manifest(self, record: ManifestRecord) -> tuple[ManifestRecord, bool]:
        """See `CatalogStore`.

        An insert that meets a row returns nothing (B113): the row is then read, in a statement of
        its own that sees what the winner has committed.
        """
        values = {
            "digest": record.digest,
            "document": record.document,
            "kind": record.kind,
            "model": record.model,
            "size_bytes": record.size_bytes,
            "file_count": record.file_count,
            "tensor_count": record.tensor_count,
            "create_time": utc(record.created_s),
        }
        with database_errors():
            async with self._engine.begin() as connection:
                await connection.execute(LOCK_REFERENCES)
                row = (await connection.execute(PUT, values)).one_or_none()
                if row is not None:
                    return _record(row), True
                row = (await connection.execute(GET, {"digest": record.digest})).one()
                if await _state(connection, record.digest) == "retired":
                    await _append(connection, record.digest, "restored", {}, record.created_s)
                return _record(row), False

    async def put_signature(self, digest: str, signature: Signature, *, now_s: float) -> bool:
        """See `CatalogStore`."""
        with database_errors():
            async with self._engine.begin() as connection:
                await connection.execute(LOCK_TRAIL, {"digest": digest})
                if (await connection.execute(KNOWN, {"digest": digest})).first() is None:
                    raise unknown_manifest(digest)
                held = (await connection.execute(SIGNATURES, {"digest": digest})).all()
                if any(row.key_id == signature.key_id for row in held):
                    return False
                if len(held) >= SIGNATURES_MAX:
                    raise too_many_signatures(digest)
                values = {
                    "digest": digest,
                    "key_id": signature.key_id,
                    "public_key": signature.public_key,
                    "envelope": signature.envelope,
                    "create_time": utc(now_s),
                }
                await connection.execute(ADD_SIGNATURE, values)
                return True

    async def put_event(
        self, digest: str, event: str, detail: Mapping[str, str], *, now_s: float
    ) -> bool:
        """See `CatalogStore`. A retirement excludes whoever adds a reference meanwhile."""
        with database_errors():
            async with self._engine.begin() as connection:
                retires = event == "retired"
                await connection.execute(LOCK_REFERENCES_ALONE if retires else LOCK_REFERENCES)
                if (await connection.execute(KNOWN, {"digest": digest})).first() is None:
                    raise unknown_manifest(digest)
                if retires:
                    rows = (await connection.execute(TAGS_OF, {"digests": [digest]})).all()
                    tags = holding(digest, [row.name for row in rows])
                    if tags:
                        raise tagged_manifest(digest, tags)
                return await _append(connection, digest, event, detail, now_s)

    async def trail(self, digest: str) -> Trail:
        """See `CatalogStore`."""
        with database_errors():
            async with self._engine.connect() as connection:
                return await _trail(connection, digest)

    async def get_manifest(self, digest: str) -> ManifestRecord | None:
        """See `CatalogStore`."""
        rows = await self._read(GET, digest=digest)
        return _record(rows[0]) if rows else None

    async def get_manifests(self, digests: Sequence[str]) -> dict[str, ManifestRecord]:
        """See `CatalogStore`."""
        if not digests:
            return {}
        rows = await self._read(GET_MANY, digests=list(digests))
        return {row.digest: _record(row) for row in rows}

    async def list_manifests(
        self, *, model: str = "", kind: str = "", limit: int = 1000, before: int = 0
    ) -> list[ManifestRecord]:
        """See `CatalogStore`."""
        given = {"model": model, "kind": kind}
        values = {name: value for name, value in given.items() if value}
        statement = LISTS[bool(model), bool(kind)]
        rows = await self._read(statement, limit=limit, before=before or 2**62, **values)
        return [_record(row) for row in rows]

    async def set_tag(
        self, name: str, digest: str, *, expected_digest: str, force: bool, now_s: float
    ) -> Tag:
        """See `CatalogStore`.

        One writer per name at a time: the lock is on the name, since a tag that is not there yet
        has no row to lock.
        """
        with database_errors():
            async with self._engine.begin() as connection:
                await connection.execute(LOCK_REFERENCES)
                await connection.execute(LOCK_TAG, {"name": name})
                held = await _tag_now(connection, name)
                known = (await connection.execute(KNOWN, {"digest": digest})).first()
                if known is None:
                    raise unknown_manifest(digest)
                if held is not None and held.digest == digest:
                    return held
                found = held.digest if held else ""
                if not force and found != expected_digest:
                    raise tag_conflict(name, expected_digest, found)
                if await _state(connection, digest) == "retired":
                    raise retired_manifest(f"tag {name!r}", digest)
                return await _move(connection, name, digest, held, now_s)

    async def remove_tag(
        self, name: str, *, expected_digest: str, force: bool, now_s: float
    ) -> Tag:
        """See `CatalogStore`."""
        with database_errors():
            async with self._engine.begin() as connection:
                await connection.execute(LOCK_REFERENCES)
                await connection.execute(LOCK_TAG, {"name": name})
                held = await _tag_now(connection, name)
                if held is None:
                    raise unknown_tag(name)
                if not held.digest:
                    return held
                if not force and held.digest != expected_digest:
                    raise tag_conflict(name, expected_digest, held.digest)
                return await _move(connection, name, "", held, now_s)

    async def get_tag(self, name: str) -> Tag | None:
        """See `CatalogStore`."""
        rows = await self._read(GET_TAG, name=name)
        return _tag(rows[0]) if rows and rows[0].digest is not None else None

    async def list_tags(self) -> list[Tag]:
        """See `CatalogStore`."""
        return [_tag(row) for row in await self._read(LIST_TAGS)]

    async def tag_history(self, name: str) -> list[Tag]:
        """See `CatalogStore`."""
        return [_tag(row) for row in await self._read(HISTORY, name=name)]

    async def tags_of(self, digests: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """See `CatalogStore`."""
        if not digests:
            return {}
        found: dict[str, list[str]] = {}
        for row in await self._read(TAGS_OF, digests=list(digests)):
            found.setdefault(row.digest, []).append(row.name)
        return {digest: tuple(names) for digest, names in found.items()}

    async def _read(self, statement: Any, **values: object) -> Sequence[Row[Any]]:
        with database_errors():
            async with self._engine.connect() as connection:
                return (await connection.execute(statement, values)).all()


async def _move(
    connection: AsyncConnection, name: str, digest: str, held: Tag | None, now_s: float
) -> Tag:
    """The next version of a tag, whose name is locked; an empty digest is nowhere."""
    version = held.version + 1 if held else 1
    values = {
        "name": name,
        "digest": digest or None,
        "version": version,
        "create_time": utc(now_s),
    }
    await connection.execute(ADD_HISTORY, values)
    await connection.execute(MOVE_TAG, values)
    return Tag(name, digest, version, utc(now_s).timestamp())


async def _tag_now(connection: AsyncConnection, name: str) -> Tag | None:
    row = (await connection.execute(GET_TAG, {"name": name})).one_or_none()
    return None if row is None else _tag(row)


async def _state(connection: AsyncConnection, digest: str) -> str | None:
    found: str | None = (await connection.execute(STATE_NOW, {"digest": digest})).scalar()
    return found


async def _trail(connection: AsyncConnection, digest: str) -> Trail:
    signed = (await connection.execute(SIGNATURES, {"digest": digest})).all()
    events = (await connection.execute(EVENTS, {"digest": digest})).all()
    return Trail(
        tuple(
            Signature(r.key_id, bytes(r.public_key), r.envelope, r.create_time.timestamp())
            for r in signed
        ),
        tuple(
            ManifestEvent(r.event, json.loads(r.detail), r.create_time.timestamp()) for r in events
        ),
    )


async def _append(
    connection: AsyncConnection, digest: str, event: str, detail: Mapping[str, str], now_s: float
) -> bool:
    """Add an event if it is news; one writer of a trail at a time."""
    await connection.execute(LOCK_TRAIL, {"digest": digest})
    trail = await _trail(connection, digest)
    if not says_something(trail, event, detail):
        return False
    values = {
        "digest": digest,
        "version": len(trail.events) + 1,
        "event": event,
        "detail": canonical(dict(detail), where="detail").decode(),
        "create_time": utc(now_s),
    }
    await connection.execute(ADD_EVENT, values)
    return True


def _tag(row: Row[Any]) -> Tag:
    return Tag(row.name, row.digest or "", row.version, row.create_time.timestamp())


def _record(row: Row[Any]) -> ManifestRecord:
    return ManifestRecord(
        digest=row.digest,
        kind=row.kind,
        model=row.model,
        size_bytes=row.size_bytes,
        file_count=row.file_count,
        tensor_count=row.tensor_count,
        created_s=row.create_time.timestamp(),
        sequence=row.sequence,
        document=bytes(row._mapping.get("document", b"")),  # noqa: SLF001 - SQLAlchemy's public name
    )
