"""Where the system is that a command talks to: flags, then `READYPLANE_…` variables, else the book.

Owns the options and the rule that addresses never mix: as soon as one address of a command is
given, the address book of a local `readyplane up` is not read, so that its token goes nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from readyplane.core.errors import InvalidField, Unavailable

if TYPE_CHECKING:
    from readyplane.client import PlannerClient, RegistryClient, RouterClient

T = TypeVar("T")
PANEL = "Where the system is (by default the running `readyplane up` of this user)"
TOKEN = "READYPLANE_TOKEN"  # noqa: S105 - the variable's name
REMEDIES = {
    "registry": "--registry HOST:PORT or READYPLANE_REGISTRY",
    "router": "--router HOST:PORT or READYPLANE_ROUTER",
    "planner": "--planner HOST:PORT or READYPLANE_PLANNER",
    "registry_http": "--registry-http http://HOST:PORT or READYPLANE_REGISTRY_HTTP",
}


def _address(name: str) -> Any:
    return typer.Option(
        f"--{name}",
        envvar=f"READYPLANE_{name.upper()}",
        metavar="HOST:PORT",
        help=f"gRPC address of the {name}.",
        rich_help_panel=PANEL,
        show_default=False,
    )


RegistryAddress = Annotated[str, _address("registry")]
RouterAddress = Annotated[str, _address("router")]
PlannerAddress = Annotated[str, _address("planner")]
RegistryHttp = Annotated[
    str,
    typer.Option(
        "--registry-http",
        envvar="READYPLANE_REGISTRY_HTTP",
        metavar="URL",
        help="Base URL of the registry's HTTP side, for bytes.",
        rich_help_panel=PANEL,
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True)
class Where:
    """Addresses, empty where not known, and the token that goes with them."""

    registry: str = ""
    router: str = ""
    planner: str = ""
    registry_http: str = ""
    token: str = ""
    model: str = ""
    from_book: bool = False


def find(*needed: str, **given: str) -> Where:
    """The addresses for one command.

    Args:
        needed: names of `Where` that must be known. given: from flags and variables.

    Raises:
        InvalidField: an address that is none, or some given but not all. Unavailable: nothing is
            given and nothing runs.
    """
    found: dict[str, Any] = {n: _checked(n, value.strip()) for n, value in given.items()}
    if any(found.values()):
        for name in needed:
            if not found.get(name):
                raise InvalidField(_flag(name), "", f"give {REMEDIES[name]} as well")
        return Where(token=os.environ.get(TOKEN, ""), **found)
    from readyplane_lab.up.address_book import read_book

    book = read_book()
    if book is None:
        remedies = " and ".join(REMEDIES[name] for name in needed)
        raise Unavailable(
            "no running system was found",
            f"start one with `make up` (or `readyplane up`), or give {remedies}",
        )
    values = {f.name: getattr(book, f.name) for f in fields(Where) if f.name != "from_book"}
    return Where(**values, from_book=True)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _checked(name: str, value: str) -> str:
    if not value:
        return ""
    if name.endswith("_http"):
        from urllib.parse import urlsplit

        parts = urlsplit(value)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise InvalidField(_flag(name), value, "write http://HOST:PORT")
        return value.rstrip("/")
    host, colon, port = value.rpartition(":")
    if "//" in value or not colon or not host or not (port.isdigit() and 0 < int(port) < 65536):
        raise InvalidField(_flag(name), value, "write HOST:PORT of the gRPC side")
    return value


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one command's work to its end."""
    import asyncio

    return asyncio.run(work)


@asynccontextmanager
async def router_of(where: Where) -> AsyncIterator[RouterClient]:
    """A client of the router, closed at the end."""
    from readyplane.client import RouterClient

    client = RouterClient(where.router, where.token)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def planner_of(where: Where) -> AsyncIterator[PlannerClient]:
    """A client of the planner, closed at the end."""
    from readyplane.client import PlannerClient

    client = PlannerClient(where.planner, where.token)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def registry_of(where: Where) -> AsyncIterator[RegistryClient]:
    """A client of the registry, closed at the end."""
    from readyplane.client import RegistryClient

    client = RegistryClient(where.registry, where.token)
    try:
        yield client
    finally:
        await client.aclose()


async def ask_http(
    method: str, url: str, token: str, *, what: str, timeout_s: float = 30.0
) -> dict[str, Any]:
    """One REST call that answers with an object.

    Raises:
        ReadyplaneError: what the service raised. Unavailable: it cannot be reached.
    """
    import aiohttp

    from readyplane.core.errors import ReadyplaneError
    from readyplane.kit.auth import token_headers
    from readyplane.wire import error_from_document

    limits = aiohttp.ClientTimeout(total=timeout_s, connect=5.0)
    try:
        async with (
            aiohttp.ClientSession(timeout=limits, headers=token_headers(token)) as session,
            session.request(method, url) as answer,
        ):
            body = await answer.json(content_type=None)
            if answer.status >= 400:
                raise error_from_document(body, status=answer.status)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unavailable(
            f"{what} at {url} does not answer ({str(error) or type(error).__name__})",
            "check that it runs and listens on that address",
        ) from error
    if not isinstance(body, dict):
        raise ReadyplaneError(f"{what} at {url} answered no object")
    return body


async def within(work: Awaitable[T], seconds: float, what: str) -> T:
    """The result, or Unavailable when it takes longer."""
    import asyncio

    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise Unavailable(
            f"{what} did not answer within {seconds:g} s", "check that it runs"
        ) from None
