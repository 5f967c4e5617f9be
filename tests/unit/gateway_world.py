"""A gateway with everything around it in memory, on virtual time: engines, router, clients.

The engines speak HTTP/1.1 bytes to the gateway's real client over an in-memory transport, so that
parsing, keep-alive, aborts and bounds are the real ones; hours of waiting cost nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from readyplane.core.errors import NoPair, ReadyplaneError
from readyplane.core.identity import KvFormat
from readyplane.core.work import EventKind, RequestEvent, RequestShape
from readyplane.core.worker import Fleet, Role, Serving, Worker, WorkerOffer, WorkerState
from readyplane.kit.telemetry import Metrics
from readyplane.ports import End, Pair
from readyplane_gateway.api import Api
from readyplane_gateway.bounds import Bounds
from readyplane_gateway.engine_http import EngineHttp, EngineTrouble, Trouble, _Connection
from readyplane_gateway.service import Gateway
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop, run_virtual

MODEL = "demo"
KV_PARAMS = (
    '{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3]],'
    '"remote_engine_id":"e-1","remote_request_id":"%s","remote_host":"10.0.0.1",'
    '"remote_port":5600,"tp_size":1,"remote_num_tokens":48,"dcp_size":1,"pp_size":1,'
    '"remote_blocks_expiry_time":1796.25,"transfer_mode":"pull"}'
)
TERMINAL = {EventKind.FINISHED, EventKind.ABORTED, EventKind.LEG_FAILED}


# --------------------------------------------------------------------------- engines


@dataclass
class Plan:
    """How an engine behaves at one call.

    `how`: ok, refuse (no connection), hang, reset, reset_mid, garbage, truncated, error_event,
    stall_mid, no_params, held_hang (a prefill that ends without a word), or an HTTP status as text. `together`: tokens in one chunk.
    """

    how: str = "ok"
    after_s: float = 0.02
    tokens: int = 5
    every_s: float = 0.01
    together: int = 1


@dataclass
class Seen:
    """One request as an engine got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    cut: bool = False
    done: bool = False


class MemoryEngine:
    """A scripted engine. `plans` are used up in order, then every call is `ok`."""

    def __init__(self, url: str, held: set[str]) -> None:
        """`held`: KV that prefill engines keep for readers, shared by all engines."""
        self.url = url
        self.plans: deque[Plan] = deque()
        self.seen: list[Seen] = []
        self.held = held
        self.open = 0
        self.connections = 0
        self.tokenized = 0
        self.tokenize_status = 200
        self.tokenize_says = "not here"
        self.move_status = 200
        self.fails_with = ""  # what an HTTP status of a plan says
        self.streams: dict[str, int] = {}  # tokens given so far, by `x-request-id`
        self.moved: set[str] = set()
        self.aborts = "freed"  # or told, left_to_expire: what /abort_requests does and says
        self.rooms: dict[int, set[str]] = {}  # who is there, by room; see `meets`
        self.cut_off: list[str] = []  # what /abort_request was told

    @property
    def stage(self) -> str:
        """`p` or `d`, by its name."""
        return self.url.removeprefix("http://")[0]

    async def meets(self, room: int) -> None:
        """As SGLang's engines: each waits for the other one, for ever."""
        here = self.rooms.setdefault(room, set())
        here.add(self.stage)
        while here < {"p", "d"}:
            await asyncio.sleep(0.001)

    def calls(self, path: str = "/v1/") -> list[Seen]:
        return [seen for seen in self.seen if seen.path.startswith(path)]


class _MemoryTransport(asyncio.Transport):
    """The gateway's end of a connection to a MemoryEngine."""

    def __init__(self, engine: MemoryEngine, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._engine = engine
        self._protocol = protocol
        self._buffer = b""
        self._task: asyncio.Task[None] | None = None
        self._seen: Seen | None = None
        self._closed = False
        self.paused = False
        engine.connections += 1
        protocol.connection_made(self)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._buffer += bytes(data)
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        size = int(headers["content-length"])
        if len(rest) < size:
            return
        raw, self._buffer = rest[:size], rest[size:]
        self._seen = Seen(lines[0].split(" ")[1], headers, json.loads(raw), raw)
        self._engine.seen.append(self._seen)
        self._engine.open += 1
        self._task = asyncio.ensure_future(self._serve(self._seen))

    async def _serve(self, seen: Seen) -> None:
        try:
            await self._answer(seen)
            seen.done = True
        except asyncio.CancelledError:
            seen.cut = True
        finally:
            self._engine.open -= 1

    async def _answer(self, seen: Seen) -> None:
        engine, body = self._engine, seen.body
        if seen.path == "/tokenize":
            engine.tokenized += 1
            if engine.tokenize_status != 200:
                self._json(engine.tokenize_status, {"error": {"message": engine.tokenize_says}})
                return
            text = body.get("prompt") or json.dumps(body["messages"])
            self._json(200, {"tokens": [byte + 3 for byte in text.encode()], "count": len(text)})
            return
        if seen.path == "/abort_requests":
            self._abort(body["request_ids"])
            return
        if seen.path == "/health":
            self._json(405, {"error": "ask with GET"})
            return
        if seen.path == "/abort_request":
            engine.cut_off.append(body["rid"])
            self._raw(200, b"")
            return
        if seen.path == "/move_out":
            self._move_out(body["request_id"])
            return
        plan = engine.plans.popleft() if engine.plans else Plan()
        await asyncio.sleep(plan.after_s)
        if plan.how == "held_hang":
            engine.held.add(f"r{len(engine.seen)}-{seen.headers['x-request-id']}")
        if plan.how in ("hang", "held_hang"):
            await asyncio.Event().wait()
        elif plan.how == "reset":
            self._lose()
        elif plan.how == "garbage":
            self._give(b"what is HTTP?\r\n\r\n")
        elif plan.how.isdigit():
            said = engine.fails_with or f"status {plan.how}"
            message = {"message": said, "type": "T", "param": "prompt", "code": 1}
            self._json(int(plan.how), {"error": message})
        else:
            await self._good(plan, seen)

    def _abort(self, ids: list[str]) -> None:
        engine = self._engine
        if engine.aborts == "left_to_expire":
            self._json(404, {"error": "no such path"})
            return
        gone = {
            held for held in engine.held if any(held == i or held.endswith("-" + i) for i in ids)
        }
        engine.held -= gone
        if engine.aborts == "told":
            self._raw(200, b"")
        else:
            self._json(200, {"aborted": ids if gone else [], "unknown": [] if gone else ids})

    def _move_out(self, name: str) -> None:
        engine = self._engine
        if engine.move_status != 200 or name not in engine.streams:
            status = engine.move_status if engine.move_status != 200 else 409
            self._json(status, {"error": {"message": "it does not decode here"}})
            return
        engine.moved.add(name)
        engine.held.add(f"m-{name}")
        output = list(range(engine.streams[name]))
        params = (KV_PARAMS % f"m-{name}").encode()
        state = json.dumps({"output_token_ids": output, "draws": "7"}).encode()
        self._raw(200, b'{"continuation":%b,"kv_transfer_params":%b}' % (state, params))

    async def _good(self, plan: Plan, seen: Seen) -> None:
        body = seen.body
        params = body.get("kv_transfer_params") or {}
        usage: dict[str, Any] = {"prompt_tokens": 10, "total_tokens": 99}
        usage["completion_tokens"] = plan.tokens
        if params.get("do_remote_decode"):
            self._prefilled(plan, seen, usage)
            return
        if "bootstrap_room" in body:
            await self._engine.meets(body["bootstrap_room"])
            if self._engine.stage == "p":
                plan = replace(plan, tokens=1)
                usage["prompt_tokens_details"] = {"cached_tokens": 4}
        if params.get("do_remote_prefill"):
            self._engine.held.discard(params["remote_request_id"])  # reads by naming it
        if not body.get("stream"):
            await asyncio.sleep(plan.tokens * plan.every_s)
            if plan.how == "reset_mid":
                self._lose()
            self._json(200, {"id": "x", "choices": [{"text": "a" * plan.tokens}], "usage": usage})
            return
        name = seen.headers.get("x-request-id", "")
        try:
            await self._stream(plan, usage, body, name)
        finally:
            self._engine.streams.pop(name, None)

    def _prefilled(self, plan: Plan, seen: Seen, usage: dict[str, Any]) -> None:
        held = f"r{len(self._engine.seen)}-{seen.headers.get('x-request-id', '')}"
        kv = b"null" if plan.how == "no_params" else (KV_PARAMS % held).encode()
        if plan.how != "no_params":
            self._engine.held.add(held)
        usage = {**usage, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
        self._raw(
            200,
            b'{"id":"p","choices":[{"text":"a"}],"usage":%b,"kv_transfer_params":%b}'
            % (json.dumps(usage).encode(), kv),
        )

    async def _stream(
        self, plan: Plan, usage: dict[str, Any], body: dict[str, Any], name: str
    ) -> None:
        begun = len(body.get("continuation", {}).get("output_token_ids", ()))
        chat = "messages" in body
        counted = body["stream_options"].get("continuous_usage_stats")
        self._give(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            b"transfer-encoding: chunked\r\n\r\n"
        )
        for n in range(begun, plan.tokens, plan.together):
            if name in self._engine.moved:
                end = {"index": 0, "text": "", "finish_reason": "moved"}
                self._event({"id": "x", "choices": [end]})
                break
            self._engine.streams[name] = n + plan.together
            if n == plan.tokens // 2:
                if plan.how == "reset_mid":
                    self._lose()
                    return
                if plan.how == "stall_mid":
                    await asyncio.Event().wait()
                if plan.how == "truncated":
                    self._give(b"0\r\n\r\n")
                    return
                if plan.how == "error_event":
                    self._event({"error": {"message": "boom", "type": "E", "code": 500}})
                    break
            choice: dict[str, Any] = {"index": 0, "finish_reason": None}
            choice |= {"delta": {"content": f"t{n}"}} if chat else {"text": f"t{n}"}
            so_far = {"prompt_tokens": 10, "completion_tokens": min(plan.tokens, n + plan.together)}
            self._event({"id": "x", "choices": [choice], "usage": so_far if counted else None})
            await asyncio.sleep(plan.every_s)
        else:
            self._event({"id": "x", "choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._give(b"0\r\n\r\n")

    def _event(self, document: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self._give(b"%x\r\n%b\r\n" % (len(data), data))

    def _json(self, status: int, document: object) -> None:
        self._raw(status, json.dumps(document).encode())

    def _raw(self, status: int, data: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        self._give(head + data)

    def _give(self, data: bytes) -> None:
        if not self._closed:
            self._protocol.data_received(data)

    def _lose(self, error: Exception | None = None) -> None:
        if not self._closed:
            self._closed = True
            self._engine.connections -= 1
            self._protocol.connection_lost(error or ConnectionResetError("reset"))

    def drop(self) -> None:
        """The engine closes an idle connection."""
        if not self._closed:
            self._closed = True
            self._engine.connections -= 1
            self._protocol.connection_lost(None)

    # asyncio.Transport

    def abort(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
        if not self._closed:
            self._closed = True
            self._engine.connections -= 1
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class MemoryHttp(EngineHttp):
    """The real client on in-memory connections."""

    engines: dict[str, MemoryEngine]
    transports: list[_MemoryTransport]

    async def _connect(self, url: str) -> _Connection:
        await asyncio.sleep(0.001)
        engine = self.engines.get(url)
        if engine is None or (engine.plans and engine.plans[0].how == "refuse"):
            if engine is not None:
                engine.plans.popleft()
            raise EngineTrouble(Trouble.CONNECT, "no connection (refused)")
        connection = _Connection(url)
        self.transports.append(_MemoryTransport(engine, connection))
        return connection


# --------------------------------------------------------------------------- router


@dataclass
class Reservation:
    """What the router knows of one pair it gave out, and every end it was told."""

    shape: RequestShape
    pair: Pair
    events: list[RequestEvent] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


class MemoryRouter:
    """Gives out pairs round robin; remembers everything; fails on demand."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.changed = asyncio.Event()
        self.reservations: dict[str, Reservation] = {}
        self.faults: deque[ReadyplaneError | float] = deque()
        self.complete_faults: deque[ReadyplaneError] = deque()
        self.unknown = 0
        self.disowned: list[str] = []
        self.batches: list[int] = []
        self.asked: list[dict[str, Any]] = []
        self.cancelled = 0
        self.moves: list[tuple[str, str, int]] = []
        self.onward: dict[str, str] = {}
        self.move_faults: deque[ReadyplaneError] = deque()
        self.local = False
        self.ttl_s = 60.0
        self._numbers = itertools.count(1)
        self._turn = itertools.count()

    def set_fleet(self, workers: Sequence[Worker]) -> None:
        self.fleet = Fleet(self.fleet.version + 1, {w.worker_id: w for w in workers})
        self.changed.set()

    async def watch(self, model: str = "") -> AsyncIterator[Fleet]:
        while True:
            self.changed.clear()
            yield self.fleet
            await self.changed.wait()

    async def route(
        self,
        shape: RequestShape,
        *,
        replaces: str = "",
        avoid: Sequence[str] = (),
        explain: bool = False,
        dry_run: bool = False,
    ) -> Pair:
        self.asked.append({"shape": shape, "replaces": replaces, "avoid": tuple(avoid)})
        try:
            await asyncio.sleep(0.002)
            while self.faults:
                fault = self.faults.popleft()
                if isinstance(fault, float):
                    await asyncio.sleep(fault)
                else:
                    raise fault
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        turn = next(self._turn)
        prefill = self._pick(shape.model, Role.PREFILL, avoid, turn)
        decode = self._pick(shape.model, Role.DECODE, avoid, turn)
        if replaces and not self.reservations[replaces].ends:
            self.reservations[replaces].ends.append("replaced")
        pair = Pair(
            f"res-{next(self._numbers)}", prefill, decode, self.local, 0.5, 0.02, 0.0, self.ttl_s
        )
        self.reservations[pair.reservation_id] = Reservation(shape, pair)
        return pair

    async def move(
        self, shape: RequestShape, *, reservation_id: str, worker_id: str, emitted: int
    ) -> Pair:
        self.moves.append((reservation_id, worker_id, emitted))
        await asyncio.sleep(0.002)
        if self.move_faults:
            raise self.move_faults.popleft()
        end = self._pick(shape.model, Role.DECODE, (worker_id,), 0)
        pair = Pair(f"res-{next(self._numbers)}", end, end, True, 0.0, 0.02, 0.0, self.ttl_s)
        old = self.reservations[reservation_id]
        old.ends.append("moved")
        self.reservations[pair.reservation_id] = Reservation(shape, pair)
        self.onward[reservation_id] = pair.reservation_id
        return pair

    def _pick(self, model: str, stage: Role, avoid: Sequence[str], turn: int) -> End:
        found = [
            w
            for w in self.fleet.of(model, stage, WorkerState.READY)
            if w.worker_id not in avoid and w.serving is not None
        ]
        if not found:
            raise NoPair(f"no ready {stage} worker", 2.0)
        worker = found[turn % len(found)]
        assert worker.serving is not None
        serving = worker.serving
        return End(
            worker.worker_id,
            worker.offer.incarnation,
            worker.epoch,
            serving.engine_url,
            bootstrap=serving.bootstrap,
        )

    async def complete(self, events: Sequence[RequestEvent]) -> int:
        await asyncio.sleep(0.001)
        if self.complete_faults:
            raise self.complete_faults.popleft()
        if events:
            self.batches.append(len(events))
        unknown = 0
        for event in events:
            while event.reservation_id in self.onward:  # a fact that was under way when it moved
                event = replace(event, reservation_id=self.onward[event.reservation_id])
            reservation = self.reservations.get(event.reservation_id)
            if reservation is None and not event.reservation_id.startswith("res-"):
                self.disowned.append(event.reservation_id)
                continue
            if reservation is None or reservation.ends:
                unknown += 1
                self.unknown += 1
            if reservation is None:
                continue
            reservation.events.append(event)
            if event.kind is EventKind.LEG_FAILED and reservation.ends == ["replaced"]:
                reservation.ends.clear()  # told late: the router was away
            if event.kind in TERMINAL:
                reservation.ends.append(str(event.kind))
        return unknown

    def kinds(self, reservation_id: str) -> list[str]:
        return [str(e.kind) for e in self.reservations[reservation_id].events]


def worker(name: str, role: Role, *, url: str = "", **changes: Any) -> Worker:
    """A ready worker."""
    serving = Serving(
        engine_url=url or f"http://{name}.test:8000",
        kv=KvFormat("sha256:" + "0" * 64),
        kv_total_blocks=1000,
        block_size=16,
        max_model_len=4096,
        profile="h200",
        tokenizer_digest="sha256:t",
    )
    offer = WorkerOffer(name, f"{name}-1", role, changes.pop("model", MODEL), "h200")
    return replace(Worker(offer, 1, WorkerState.READY, serving), **changes)


# --------------------------------------------------------------------------- client and world


@dataclass
class Got:
    """What a client got."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False
    left: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])

    @property
    def events(self) -> list[Any]:
        lines = [e.removeprefix("data: ") for e in self.body.decode().split("\n\n") if e]
        return [e if e == "[DONE]" else json.loads(e) for e in lines]

    @property
    def text(self) -> str:
        return "".join(
            e["choices"][0].get("text") or e["choices"][0].get("delta", {}).get("content", "")
            for e in self.events
            if e != "[DONE]" and e.get("choices")
        )


class World:
    """Two prefill and two decode engines, a router, a gateway and its API."""

    def __init__(
        self, loop: VirtualLoop, bounds: Bounds, *, workers: Sequence[Worker], key: str
    ) -> None:
        self.clock = VirtualClock(loop)
        self.metrics = Metrics()
        self.router = MemoryRouter()
        self.router.set_fleet(workers)
        self.gateway = Gateway(
            router=self.router,  # type: ignore[arg-type]  # what the gateway uses of the port
            registry=None,
            clock=self.clock,
            bounds=bounds,
            metrics=self.metrics,
            mover=self.router,
        )
        http = self.gateway.engines
        http.__class__ = MemoryHttp
        assert isinstance(http, MemoryHttp)
        self.http = http
        self.held: set[str] = set()
        self.engines = {
            w.serving.engine_url: MemoryEngine(w.serving.engine_url, self.held)
            for w in workers
            if w.serving is not None
        }
        self.http.engines, self.http.transports = self.engines, []
        self.rooms: dict[int, set[str]] = {}
        for engine in self.engines.values():
            engine.rooms = self.rooms
        numbers = itertools.count(1)
        self.api = Api(
            self.gateway,
            inner=_not_found,
            new_id=lambda: f"id-{next(numbers)}",
            api_key=key,
        )
        self._background: list[asyncio.Task[None]] = []

    def engine(self, name: str) -> MemoryEngine:
        return self.engines[f"http://{name}.test:8000"]

    async def __aenter__(self) -> Self:
        for work in (self.gateway.watch_fleet, self.gateway.tell_router):
            self._background.append(asyncio.ensure_future(work()))
        await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def ask(
        self,
        body: Any = None,
        *,
        path: str = "/v1/completions",
        method: str = "POST",
        headers: dict[str, str] | None = None,
        leave_after_s: float | None = None,
        read: Callable[[bytes], Coroutine[Any, Any, None]] | None = None,
        **fields: Any,
    ) -> Got:
        """One request through the ASGI application; `leave_after_s`: the client disconnects."""
        if body is None:
            body = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 5, **fields}
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        got = Got()
        gone = asyncio.Event()
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": raw, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                got.status = message["status"]
                got.headers = {k.decode(): v.decode() for k, v in message["headers"]}
                return
            data = message.get("body", b"")
            if read is not None:
                await read(data)
            got.body += data
            got.ended = not message.get("more_body", False)

        scope = {
            "type": "http",
            "path": path,
            "method": method,
            "headers": [
                (k.lower().encode(), v.encode())
                for k, v in {"content-length": str(len(raw)), **(headers or {})}.items()
            ],
        }
        task = asyncio.ensure_future(self.api(scope, receive, send))
        if leave_after_s is not None:
            await asyncio.wait({task}, timeout=leave_after_s)
            got.left = not task.done()
            gone.set()
        await task
        return got

    async def settle(self, seconds: float = 2.0) -> None:
        """Let batches go out and aborted connections close."""
        await asyncio.sleep(seconds)

    def ends(self) -> Counter[str]:
        return Counter(end for r in self.router.reservations.values() for end in r.ends)

    def drain(self, name: str) -> None:
        """A worker that can move its requests is to leave."""
        workers = []
        for w in self.router.fleet.workers.values():
            if w.worker_id == name and w.serving is not None:
                w = replace(w, state=WorkerState.DRAINING, serving=replace(w.serving, moves=True))
            workers.append(w)
        self.router.set_fleet(workers)

    def check_nothing_leaks(self, *, late: bool = False) -> None:
        """Every reservation has one end, no engine works for nobody, nothing is in flight.

        `late`: facts may have come after the end, because the router was away.
        """
        for name, reservation in self.router.reservations.items():
            assert len(reservation.ends) == 1, (name, reservation.ends, reservation.events)
        assert late or self.router.unknown == 0
        assert self.http.busy() == 0
        assert not self.gateway.requests
        assert self.gateway.reporter.buffered == 0
        for engine in self.engines.values():
            assert engine.open == 0, engine.url
        assert not self.held

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.get_sample_value(f"readyplane_gateway_{name}", labels) or 0.0


async def _not_found(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b""})


FLEET = (
    worker("p1", Role.PREFILL),
    worker("p2", Role.PREFILL),
    worker("d1", Role.DECODE),
    worker("d2", Role.DECODE),
)


def play(
    story: Callable[[World], Coroutine[Any, Any, None]],
    *,
    bounds: Bounds | None = None,
    workers: Sequence[Worker] = FLEET,
    key: str = "",
    late: bool = False,
) -> None:
    """Run a story on virtual time, then check that nothing leaked."""
    loop = VirtualLoop()
    run_virtual(_play(loop, story, bounds or Bounds(), workers, key, late), loop=loop)


async def _play(
    loop: VirtualLoop,
    story: Callable[[World], Coroutine[Any, Any, None]],
    bounds: Bounds,
    workers: Sequence[Worker],
    key: str,
    late: bool,
) -> None:
    world = World(loop, bounds, workers=workers, key=key)
    async with world:
        await story(world)
        await world.settle()
        world.check_nothing_leaks(late=late)
