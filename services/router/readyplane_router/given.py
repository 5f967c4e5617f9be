"""What a router is given at its start: its policy, class profiles, and a first view of the store.

Owns reading the files and the wait for stores that are not there yet; used by the router's own
process and by a gateway that embeds a replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from pathlib import Path

from readyplane import profiles as shipped
from readyplane.core.errors import InvalidField, Unavailable
from readyplane.core.profile import ClassProfile
from readyplane_router.policy import RouterPolicy
from readyplane_router.service import RouterService

WAIT_FOR_STORES_S_MAX = 30.0

log = logging.getLogger(__name__)


def read_policy(path: Path | None) -> RouterPolicy:
    """The policy in a file, or the default.

    Raises:
        InvalidField: the file, or a field in it.
    """
    if path is None:
        return RouterPolicy()
    return RouterPolicy.from_document(_json(path, "policy_file"))


def read_profiles(folder: Path | None) -> dict[str, ClassProfile]:
    """The profiles that ship with Readyplane, and those of a folder, by name.

    Raises:
        InvalidField: the folder, or a profile in it.
    """
    found = {name: shipped.load(name) for name in shipped.names()}
    if folder is not None:
        if not folder.is_dir():
            raise InvalidField("profiles_dir", str(folder), "give a folder of *.json profiles")
        for path in sorted(folder.glob("*.json")):
            profile = shipped.load(str(path))
            found[profile.name] = profile
    return found


def _json(path: Path, field: str) -> dict[str, object]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidField(field, str(path), f"give a readable JSON file ({error})") from error
    if not isinstance(document, dict):
        raise InvalidField(field, str(path), "give a JSON object")
    return document


async def started(service: RouterService) -> None:
    """Take over what the store knows, waiting a while for it: not ready before (B51).

    Raises:
        Unavailable: the stores did not answer within `WAIT_FOR_STORES_S_MAX`.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_FOR_STORES_S_MAX):
            while True:
                try:
                    await service.start()
                    return
                except Unavailable as error:
                    log.warning("waiting for the stores", extra={"error": str(error)})
                    await asyncio.sleep(1.0)
    raise Unavailable("the stores did not answer", "check that Postgres and Redis run")
