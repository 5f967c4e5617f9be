"""Epochs from a Postgres sequence (made by this package's migrations)."""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from readyplane.kit.database import database_errors

SEQUENCE = "router_epochs"


class PostgresEpochs:
    """Numbers that only grow, whoever asks and whatever is restarted."""

    def __init__(self, engine: AsyncEngine) -> None:
        """Use an engine of `readyplane.kit.database`."""
        self._engine = engine

    async def next(self) -> int:
        with database_errors():
            async with self._engine.connect() as connection:
                found = await connection.execute(text(f"SELECT nextval('{SEQUENCE}')"))
                return int(found.scalar_one())
