"""The catalogue in Postgres: `CatalogStore` over SQLAlchemy and asyncpg.

Owns the statements; the rules that no statement may break (a manifest's digest is its content, its
row never changes, a tag moves one version at a time) stand in the database, see `migrations`.
Handed to the service by `__main__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, bindparam, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from readyplane.kit.clock import utc
from readyplane.kit.database import database_errors
from readyplane.ports import Tag
from readyplane_registry.store import ManifestRecord, tag_conflict, unknown_manifest

LINE = "sequence, digest, kind, model, size_bytes, file_count, tensor_count, create_time"
PUT = text(
    "INSERT INTO manifests (digest, document, kind, model, size_bytes, file_count, tensor_count,"
    " create_time) VALUES (:digest, :document, :kind, :model, :size_bytes, :file_count,"
    f" :tensor_count, :create_time) ON CONFLICT (digest) DO NOTHING RETURNING {LINE}, document"
)
GET = text(f"SELECT {LINE}, document FROM manifests WHERE digest = :digest")
KNOWN = text("SELECT 1 FROM manifests WHERE digest = :digest")
LIST = text(
    f"SELECT {LINE} FROM manifests WHERE (:model = '' OR model = :model)"
    " AND (:kind = '' OR kind = :kind) AND (:before = 0 OR sequence < :before)"
    " ORDER BY sequence DESC LIMIT :limit"
)
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
LIST_TAGS = text(f"SELECT {TAG} FROM tags ORDER BY change DESC")
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
                row = (await connection.execute(PUT, values)).one_or_none()
                if row is not None:
                    return _record(row), True
                row = (await connection.execute(GET, {"digest": record.digest})).one()
                return _record(row), False

    async def get_manifest(self, digest: str) -> ManifestRecord | None:
        """See `CatalogStore`."""
        rows = await self._read(GET, digest=digest)
        return _record(rows[0]) if rows else None

    async def list_manifests(
        self, *, model: str = "", kind: str = "", limit: int = 1000, before: int = 0
    ) -> list[ManifestRecord]:
        """See `CatalogStore`."""
        rows = await self._read(LIST, model=model, kind=kind, limit=limit, before=before)
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
                version = held.version + 1 if held else 1
                values = {
                    "name": name,
                    "digest": digest,
                    "version": version,
                    "create_time": utc(now_s),
                }
                await connection.execute(ADD_HISTORY, values)
                await connection.execute(MOVE_TAG, values)
                return Tag(name, digest, version, utc(now_s).timestamp())

    async def get_tag(self, name: str) -> Tag | None:
        """See `CatalogStore`."""
        rows = await self._read(GET_TAG, name=name)
        return _tag(rows[0]) if rows else None

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


async def _tag_now(connection: AsyncConnection, name: str) -> Tag | None:
    row = (await connection.execute(GET_TAG, {"name": name})).one_or_none()
    return None if row is None else _tag(row)


def _tag(row: Row[Any]) -> Tag:
    return Tag(row.name, row.digest, row.version, row.create_time.timestamp())


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
