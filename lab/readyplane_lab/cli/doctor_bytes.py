"""Doctor's look at the byte store: whether what tags point at is there in its full length.

Asks the registry's HTTP side, which asks the storage itself; lengths only, since reading every
byte is what `readyplane artifact verify` is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from readyplane.core.errors import ReadyplaneError
from readyplane_lab.cli.finding import Finding
from readyplane_lab.cli.where import Where, ask_http, find

if TYPE_CHECKING:
    import aiohttp

AREA, STORE = "bytes", "byte store"
ANSWER_S_MAX = 10.0
TOTAL_S_MAX = 60.0
ARTIFACTS_MAX = 50
FILES_MAX = 2_000
ASKED_AT_ONCE_MAX = 8
SHOWN_MAX = 5
STORE_REMEDY = (
    "check --blob-store (or --blob-dir) of the registry: that the folder is mounted and readable, "
    "or that endpoint and credentials of the object store are right; registry.log says more"
)


async def findings(given: Mapping[str, str]) -> AsyncIterator[Finding]:
    """One finding for each tagged artifact that is not whole, or one that says all is well."""
    from readyplane_lab.up.address_book import read_book

    if any(given.values()):
        if not given.get("registry_http"):
            return
        where = find("registry_http", **given)
    else:
        if read_book() is None:
            return
        where = find("registry_http")
    try:
        async with asyncio.timeout(TOTAL_S_MAX):
            found = await _checked(where)
    except ReadyplaneError as error:
        remedy = str(getattr(error, "remedy", "") or "check that the registry runs")
        said = str(error).removesuffix(f"; {remedy}")
        found = [Finding(AREA, STORE, "fail", said, remedy)]
    except TimeoutError:
        said = f"lengths of what tags point at were not told within {TOTAL_S_MAX:g} s"
        found = [Finding(AREA, STORE, "fail", said, STORE_REMEDY)]
    for finding in found:
        yield finding


async def _checked(where: Where) -> list[Finding]:
    import aiohttp

    from readyplane.kit.auth import token_headers

    told = await _ask(where, "/v1/tags")
    names: dict[str, list[str]] = {}
    for tag in told["tags"]:
        names.setdefault(tag["digest"], []).append(tag["name"])
    asked, files, found = 0, 0, list[Finding]()
    limits = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
    async with aiohttp.ClientSession(timeout=limits, headers=token_headers(where.token)) as session:
        for digest, tags in list(names.items())[:ARTIFACTS_MAX]:
            listed = (await _ask(where, f"/v1/artifacts/{digest}"))["manifest"]["files"]
            if asked and files + len(listed) > FILES_MAX:
                break
            asked, files = asked + 1, files + len(listed)
            wrong, silent = await _faults(session, where, digest, listed)
            if silent:
                said = f"the registry cannot say what is stored: {silent}"
                return [*found, Finding(AREA, STORE, "fail", said, STORE_REMEDY)]
            if wrong:
                found.append(_not_whole(tags, digest, wrong))
    if found:
        return found
    if asked < len(names):
        said = f"{asked} of {len(names)} tagged artifacts were looked at, these are whole"
        remedy = "look at others by `readyplane artifact verify REF`"
        return [Finding(AREA, STORE, "warn", said, remedy)]
    return [Finding(AREA, STORE, "ok", f"all {files} files of {asked} tagged artifacts are there")]


async def _ask(where: Where, path: str) -> dict[str, Any]:
    url = where.registry_http + path
    return await ask_http("GET", url, where.token, what="the registry", timeout_s=ANSWER_S_MAX)


async def _faults(
    session: aiohttp.ClientSession, where: Where, digest: str, files: list[dict[str, Any]]
) -> tuple[list[str], str]:
    """(What is missing or of the wrong length, in words; why the store does not tell, or empty)."""
    places = asyncio.Semaphore(ASKED_AT_ONCE_MAX)

    async def one(file: dict[str, Any]) -> tuple[str, str]:
        url = f"{where.registry_http}/v1/blobs/{digest}/{quote(file['path'])}"
        async with places, session.head(url) as answer:
            if answer.status == 404:
                return f"{file['path']} is missing", ""
            if answer.status >= 400:
                return "", f"status {answer.status} for {file['path']}"
            there = int(answer.headers.get("content-length", "-1"))
        if there != file["size_bytes"]:
            return f"{file['path']} has {there} of {file['size_bytes']} bytes", ""
        return "", ""

    import aiohttp

    try:
        told = await asyncio.gather(*(one(file) for file in files))
    except (aiohttp.ClientError, TimeoutError) as error:
        return [], str(error) or type(error).__name__
    silent = next((why for _, why in told if why), "")
    return [wrong for wrong, _ in told if wrong], silent


def _not_whole(tags: list[str], digest: str, wrong: list[str]) -> Finding:
    from readyplane_lab.cli.output import short

    more = f" and {len(wrong) - SHOWN_MAX} more" if len(wrong) > SHOWN_MAX else ""
    remedy = (
        f"publish it again from an intact folder, which brings the missing bytes; "
        f"`readyplane artifact verify {tags[0]}` reads all that is there"
    )
    name = f"artifact {', '.join(tags)} ({short(digest)})"
    return Finding(AREA, name, "fail", "; ".join(wrong[:SHOWN_MAX]) + more, remedy)
