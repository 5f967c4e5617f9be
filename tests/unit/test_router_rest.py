"""The router over REST: what becomes of a request whose client goes, and of text that is none."""

import asyncio
import json
from typing import Any

import pytest

from readyplane.core.worker import Role
from readyplane.kit.auth import TokenCheck
from readyplane.kit.http import make_app
from readyplane_router.api import routes
from readyplane_router.service import RouterService
from tests.router_world import MODEL, World, on_virtual_time

P, D = Role.PREFILL, Role.DECODE
BODY = {"request_id": "r1", "model": MODEL, "isl": 160, "max_tokens": 64}


class Caller:
    """An ASGI server with one request; the client goes when a test says so."""

    def __init__(self, service: RouterService, world: World) -> None:
        self.app = make_app("router", TokenCheck(""), set(), lambda: (True, ""))
        self.app.include_router(routes(service, world.clock))
        self.gone = asyncio.Event()
        self.status = 0
        self.answer = b""
        self._body: bytes | None = None

    async def post(self, path: str, body: bytes) -> Any:
        return await self.ask("POST", path, body)

    async def ask(self, method: str, path: str, body: bytes = b"", query: bytes = b"") -> Any:
        self._body, self.answer = body, b""
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": query,
            "root_path": "", "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        await self.app(scope, self._receive, self._send)
        return json.loads(self.answer)

    async def _receive(self) -> Any:
        body, self._body = self._body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)
        self.answer += message.get("body", b"")


def test_who_gives_up_is_not_paired_later() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p0", P)
        caller = Caller(router, world)
        asking = asyncio.create_task(caller.post("/v1/route", json.dumps(BODY).encode()))
        await asyncio.sleep(0.1)
        assert router.desks[MODEL].waiting
        caller.gone.set()
        await asyncio.wait_for(asking, 1.0)
        assert caller.status == 499
        await world.worker(router, "d0", D)  # now there would be a pair
        await asyncio.sleep(0.5)
        desk = router.desks[MODEL]
        assert (desk.waiting, dict(desk.held)) == ({}, {})
        usage = await world.store.usage(MODEL)
        assert sum(use.sequences for use in usage.values()) == 0

    on_virtual_time(main)


@pytest.mark.parametrize("dry_run", [False, True])
def test_who_stays_gets_the_pair(dry_run: bool) -> None:
    async def main(world: World) -> None:
        router = await world.router()
        for name, role in (("p0", P), ("d0", D)):
            await world.worker(router, name, role)
        caller = Caller(router, world)
        body = json.dumps(BODY | {"dry_run": dry_run}).encode()
        pair = await caller.post("/v1/route", body)
        assert caller.status == 200
        assert pair["prefill"]["worker_id"] == "p0"
        assert (pair["reservation_id"] in router.desks[MODEL].held) is not dry_run

    on_virtual_time(main)


def test_who_goes_in_the_moment_of_the_pair_gives_it_back() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        for name, role in (("p0", P), ("d0", D)):
            await world.worker(router, name, role)
        caller = Caller(router, world)
        caller.gone.set()  # heard in the turn in which the pair may be found
        await caller.post("/v1/route", json.dumps(BODY).encode())
        await asyncio.sleep(0.5)
        assert caller.status == 499
        assert not router.desks[MODEL].held
        usage = await world.store.usage(MODEL)
        assert sum(use.sequences for use in usage.values()) == 0

    on_virtual_time(main)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/route", BODY | {"tenant": "\ud800"}),
        ("/v1/route", BODY | {"avoid": ["\ud800"]}),
        ("/v1/complete", {"events": [{"reservation_id": "\ud800", "kind": "finished"}]}),
        ("/v1/complete", {"events": [{"reservation_id": "r", "kind": "\ud800"}]}),
        ("/v1/ration", {"model": MODEL, "priority": 1, "reason": "\ud800"}),
        ("/v1/workers/w/drain", {"reason": "\ud800"}),
    ],
)
def test_half_a_character_is_a_wrong_field(path: str, body: dict[str, Any]) -> None:
    async def main(world: World) -> None:
        caller = Caller(await world.router(), world)
        answer = await caller.post(path, json.dumps(body).encode())
        assert (caller.status, answer["error"]["reason"]) == (422, "InvalidField")

    on_virtual_time(main)


def test_workers_of_an_unknown_model_are_no_empty_list() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        caller = Caller(router, world)
        answer = await caller.ask("GET", "/v1/workers", query=b"model=nosuch")
        assert (caller.status, answer["error"]["reason"]) == (404, "NotFound")
        assert (await caller.ask("GET", "/v1/workers"))["workers"] == []
        await world.worker(router, "p0", P)
        answer = await caller.ask("GET", "/v1/workers", query=f"model={MODEL}".encode())
        assert len(answer["workers"]) == 1
        assert router.other_refused == 0, "nobody was refused a request"

    on_virtual_time(main)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", True),
        ("isl", True),
        ("priority", False),
        ("max_tokens", "64"),
        ("token_ids", [5, True]),
        ("slo", {"ttft_s": True, "tpot_s": 0.1}),
    ],
)
def test_what_is_no_number_is_a_wrong_field(field: str, value: Any) -> None:
    async def main(world: World) -> None:
        caller = Caller(await world.router(), world)
        answer = await caller.post("/v1/route", json.dumps({**BODY, field: value}).encode())
        assert (caller.status, answer["error"]["reason"]) == (422, "InvalidField")
        assert field in answer["error"]["field"]

    on_virtual_time(main)
