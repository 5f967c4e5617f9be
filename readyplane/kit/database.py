"""One way to reach Postgres, and migrations that several processes may run at once.

Hands a bounded SQLAlchemy engine to the stores. Alembic is imported only while migrating.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from sqlalchemy import Connection, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from readyplane.core.errors import Conflict, InvalidField, Unavailable
from readyplane.kit.telemetry import mask_url

if TYPE_CHECKING:
    from alembic.runtime.migration import MigrationContext
    from alembic.script import ScriptDirectory

CONNECTIONS_MAX = 5
CONNECTIONS_EXTRA_MAX = 5
CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 15.0
MIGRATION_WAIT_S = 60
MIGRATION_S_MAX = 600.0
NOT_SERVING = frozenset({"57P01", "57P02", "57P03", "53300"})
"""SQLSTATE of a shutdown, a crash, a start under way, and of too many connections."""


def async_engine(url: str, *, call_timeout_s: float = CALL_TIMEOUT_S) -> AsyncEngine:
    """An engine over asyncpg; `postgres://` and `postgresql://` URLs are taken as they are.

    Args:
        url: database. call_timeout_s: bound of one statement.

    Raises:
        InvalidField: `database_url` is empty, malformed or not Postgres.
    """
    remedy = "write postgresql://user:password@host:port/database"
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise InvalidField("database_url", mask_url(url), remedy) from error
    if parsed.drivername.partition("+")[0] not in {"postgres", "postgresql"}:
        raise InvalidField("database_url", mask_url(url), remedy)
    query = dict(parsed.query)
    if "sslmode" in query:  # libpq's name for what asyncpg calls ssl
        query["ssl"] = query.pop("sslmode")
    return create_async_engine(
        parsed.set(drivername="postgresql+asyncpg", query=query),
        pool_size=CONNECTIONS_MAX,
        max_overflow=CONNECTIONS_EXTRA_MAX,
        pool_timeout=CONNECT_TIMEOUT_S,
        pool_pre_ping=True,
        connect_args={
            "timeout": CONNECT_TIMEOUT_S,
            "command_timeout": call_timeout_s,
            "server_settings": {"application_name": "readyplane"},
        },
    )


@contextlib.contextmanager
def database_errors(what: str = "Postgres") -> Iterator[None]:
    """Turn an unreachable database into `Unavailable`; errors of a statement pass unchanged."""
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeout, OSError, TimeoutError) as error:
        raise _unavailable(what, error) from error
    except DBAPIError as error:
        if error.connection_invalidated or _not_serving(error):
            raise _unavailable(what, error) from error
        raise


def _not_serving(error: DBAPIError) -> bool:
    """Whether the server says that it is starting, ending or full, rather than what is wrong."""
    return str(getattr(error.orig, "sqlstate", None)) in NOT_SERVING


def _unavailable(what: str, error: BaseException) -> Unavailable:
    cause = getattr(error, "orig", None) or error
    return Unavailable(
        f"{what} does not answer ({type(cause).__name__}: {mask_url(str(cause))})",
        "check that it runs and that database_url points at it",
    )


async def migrate(url: str, package: str) -> None:
    """Bring the tables of one package to the newest revision of its `migrations` folder.

    Each package keeps its own version table. All revisions run in one transaction under an
    advisory lock: of several processes one migrates, the others wait and then find it done.

    Args:
        url: database. package: import name; `<package>/migrations/versions` holds the revisions.

    Raises:
        Conflict: the schema is newer than this program.
        InvalidField: `database_url` is wrong. Unavailable: the database cannot be reached.
    """
    table = f"alembic_version_{package.removeprefix('readyplane_')}"
    engine = async_engine(url, call_timeout_s=MIGRATION_S_MAX)
    try:
        with database_errors():
            async with engine.begin() as connection:
                await connection.execute(text(f"SET LOCAL lock_timeout = '{MIGRATION_WAIT_S}s'"))
                key = xxhash.xxh3_64_intdigest(table.encode()) >> 1
                await connection.execute(
                    text("SELECT pg_advisory_xact_lock(:key)"),
                    {"key": key},
                )
                await connection.run_sync(_upgrade, package, table)
    finally:
        await engine.dispose()


def _upgrade(connection: Connection, package: str, table: str) -> None:
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    folder = Path(str(importlib.import_module(package).__file__)).parent / "migrations"
    config = Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    script = ScriptDirectory.from_config(config)

    def steps(revision: Any, context: MigrationContext) -> Any:
        _refuse_newer(script, context, package)
        return script._upgrade_revs("head", revision)  # noqa: SLF001 - as alembic.command does

    with EnvironmentContext(config, script, fn=steps) as environment:
        environment.configure(connection=connection, version_table=table, transactional_ddl=True)
        environment.run_migrations()


def _refuse_newer(script: ScriptDirectory, context: MigrationContext, package: str) -> None:
    known = {revision.revision for revision in script.walk_revisions()}
    for found in context.get_current_heads():
        if found not in known:
            raise Conflict(
                f"database schema of {package}",
                script.get_current_head(),
                found,
                "it was written by a newer version: start that one, or use another database",
            )
