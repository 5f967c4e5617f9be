"""Doctor's look at the stores: those that were given by address, else the embedded programs."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from readyplane.core.errors import ReadyplaneError
from readyplane_lab.cli.finding import Finding

AREA = "stores"
ANSWER_S_MAX = 5.0
POSTGRES_OLDEST = 14
PROGRAM_S_MAX = 10.0


async def findings(database_url: str, redis_url: str) -> AsyncIterator[Finding]:
    """One finding a store."""
    yield await (_given_postgres(database_url) if database_url else _own_postgres())
    yield await (_given_redis(redis_url) if redis_url else _own_redis())


async def _own_postgres() -> Finding:
    from readyplane_lab.up.folder import remove_outside
    from readyplane_lab.up.postgres_programs import find_programs

    name = "PostgreSQL (own)"
    with tempfile.TemporaryDirectory(prefix="readyplane-doctor-") as folder:
        try:
            programs = await asyncio.to_thread(find_programs, Path(folder))
        except ReadyplaneError as error:
            return _failed(name, error)
        finally:
            remove_outside(Path(folder))
    who = "" if programs.account is None else f", runs as user id {programs.account.uid}"
    return Finding(AREA, name, "ok", f"version {programs.major} runs here{who}")


async def _given_postgres(url: str) -> Finding:
    from sqlalchemy import text

    from readyplane.kit.database import async_engine
    from readyplane.kit.telemetry import mask_url
    from readyplane_lab.up.stores import check_database

    name = f"PostgreSQL at {mask_url(url)}"
    try:
        await check_database(url, within_s=ANSWER_S_MAX)
        engine = async_engine(url)
        try:
            async with engine.connect() as session:
                version = str((await session.execute(text("SHOW server_version"))).scalar_one())
        finally:
            await engine.dispose()
    except ReadyplaneError as error:
        return _failed(name, error)
    major = version.partition(".")[0]
    if major.isdigit() and int(major) < POSTGRES_OLDEST:
        remedy = f"use PostgreSQL {POSTGRES_OLDEST} or later"
        return Finding(AREA, name, "warn", f"version {version}", remedy)
    return Finding(AREA, name, "ok", f"version {version} answers")


async def _own_redis() -> Finding:
    from readyplane_lab.up.redis_server import find_program

    name = "Valkey (own)"
    try:
        program = await find_program()
    except ReadyplaneError as error:
        return _failed(name, error)
    asked = await asyncio.create_subprocess_exec(
        program, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    said = (await asyncio.wait_for(asked.communicate(), PROGRAM_S_MAX))[0].decode(
        "utf-8", "replace"
    )
    version = next((w.removeprefix("v=") for w in said.split() if w.startswith("v=")), "unknown")
    return Finding(AREA, name, "ok", f"version {version} runs here, it never evicts")


async def _given_redis(url: str) -> Finding:
    from readyplane.kit.telemetry import mask_url
    from readyplane_lab.up.stores import check_redis

    name = f"Redis at {mask_url(url)}"
    try:
        answered = await check_redis(url, within_s=ANSWER_S_MAX)
    except ReadyplaneError as error:
        return _failed(name, error)
    return Finding(AREA, name, "ok", f"{answered} answers, it never evicts")


def _failed(name: str, error: ReadyplaneError) -> Finding:
    remedy = str(getattr(error, "remedy", "") or "")
    said = str(error).removesuffix(f"; {remedy}") if remedy else str(error)
    return Finding(AREA, name, "fail", said, remedy)
