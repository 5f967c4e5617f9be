"""The agent's HTTP door: verified weights for peers, health, and this worker's own metrics.

Owns the L1 source that a worker is (R9), from its first verified chunk on:
`GET /v1/chunks/{digest}/{path}?incarnation=…&layout=…` with one range a request, straight from the
arena by sendfile, and `GET /v1/holdings/{digest}?incarnation=…`, what of it is there. What is given
and to whom is `offering`'s verdict, how fast is `pacing`'s, within bounds of readers. A source that
drains lets those that read finish, tells them to look elsewhere, and is gone after a bound (R22.3).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from urllib.parse import parse_qs, unquote, urlsplit

from readyplane.kit.clock import Clock
from readyplane_agent import pacing
from readyplane_agent.arena import Arena
from readyplane_agent.door import Doorway
from readyplane_agent.http_head import Answer, Request, parse
from readyplane_agent.nixl_way import GivingWay
from readyplane_agent.offering import DRAINING, PAUSED, READER, VIA, Offering
from readyplane_agent.sending import Sending

log = logging.getLogger("agent.transfer")

HEAD_BYTES_MAX = 16 * 1024
IDLE_LIMIT_S = 30.0
# So long a connection that has shown no right to weights may take for a request, its first or next.
REQUEST_LIMIT_S = 5.0
PIECE_BYTES = 2**20
PIECE_BYTES_MIN = 64 * 1024
SEND_LIMIT_S = 60.0
SMALL_SEND_LIMIT_S = 10.0
KINDS = ("chunks", "holdings", "nixl")
PAUSE_TURN_S = 0.05
# One reader opens a few connections, so that one slow stream does not hold it up.
REQUESTS_PER_READER = 4
# Connections beyond those that may ask for chunks: health, metrics, holdings.
SPARE_CONNECTIONS = 40
# A connection that asked for a chunk this lately belongs to somebody who will ask again.
READS_ON_S = 3.0
# Readers that are remembered by name: what they began here they may finish over new connections.
READERS_KNOWN_MAX = 256
READER_CHARS_MAX = 128
# A place that was granted just before a drain is used within so long.
PLACE_USED_S = 2.0
HAND_OVER_LIMIT_S = 30.0


class TransferServer:
    """The server of one agent.

    Args:
        incarnation: who we are. clock: time. host, port: where to bind, 0 for a free port.
        readers_max: peers at once. bytes_per_s: bound of all of them together, 0 for none.
        token: bearer token asked of peers, empty for none. health: (is well, why not).
        metrics: Prometheus text of this agent.
        ttft_target_s, tpot_target_s: what the requests served here are promised; 0 for nothing.

    Attributes:
        nixl: another way for the bytes, where there is one. nixl_bytes: what readers were let
            read that way, which counts among `bytes_served`.
        engine_told: JSON of where the engine is (`meeting.told`), empty for nothing to tell.
        pace: the rate now and why. seen: how requests fared lately. bytes_served: to peers. refused: answers above 399 by status.
    """

    def __init__(
        self,
        *,
        incarnation: str,
        clock: Clock,
        host: str = "127.0.0.1",
        port: int = 0,
        readers_max: int = 2,
        bytes_per_s: float = 0.0,
        token: str = "",
        health: Callable[[], tuple[bool, str]] = lambda: (True, "ok"),
        metrics: Callable[[], str] = lambda: "",
        ttft_target_s: float = 0.0,
        tpot_target_s: float = 0.0,
    ) -> None:
        self._incarnation, self._clock = incarnation, clock
        self._host, self._port = host, port
        self._requests_max = readers_max * REQUESTS_PER_READER
        self._token, self._health, self._metrics = token, health, metrics
        self.policy = pacing.PacingPolicy(
            ceiling_bytes_per_s=bytes_per_s or math.inf,
            ttft_target_s=ttft_target_s,
            tpot_target_s=tpot_target_s,
        )
        self.pace = pacing.begin(self.policy, now_s=clock.monotonic_s())
        self.seen = pacing.Foreground()
        self._offering: Offering | None = None
        self._withheld: Offering | None = None
        self._sending = Sending(clock, threads_max=self._requests_max)
        self._server: asyncio.Server | None = None
        self._doorway = Doorway(self._requests_max + SPARE_CONNECTIONS)
        self._readers: dict[asyncio.Task[None], float] = {}  # when each asked for a chunk last
        self._known: dict[str, None] = {}  # readers by name, the one that read last at the end
        self._active = 0
        self._gone_s: float | None = None  # draining: until when readers may finish
        self._drain_s = 0.0  # and since when
        self.nixl: GivingWay | None = None
        self.engine_told: Callable[[], str] = lambda: ""
        self.bytes_served = 0
        self.nixl_bytes = 0
        self.refused: dict[str, int] = {}

    @property
    def url(self) -> str:
        """Base URL, after `start`."""
        return f"http://{self._host}:{self._port}"

    @property
    def active(self) -> int:
        """Requests for weights being answered now."""
        return self._active

    @property
    def in_use(self) -> bool:
        """Whether somebody reads weights here and may still do so."""
        now_s = self._clock.monotonic_s()
        if self._gone_s is not None and now_s > self._gone_s:
            return False
        return self._active > 0 or any(now_s - at < READS_ON_S for at in self._readers.values())

    @property
    def slo_share(self) -> float | None:
        """The larger of TTFT and TPOT as a share of its target, None when it is not known."""
        return pacing.slo_share(self.seen, self.policy)

    @property
    def draining(self) -> bool:
        """Whether newcomers are sent elsewhere."""
        return self._gone_s is not None

    async def start(self) -> None:
        """Bind. Raises OSError when the port is taken."""
        self._server = await asyncio.start_server(
            self._connection, self._host, self._port, limit=HEAD_BYTES_MAX
        )
        self._port = self._server.sockets[0].getsockname()[1]

    def offer(self, arena: Arena) -> None:
        """Give this arena's verified chunks from now on; it may still be filling."""
        if self._offering is not None:
            self._offering.close()
        self._close_nixl()  # it leads to the arena before
        self._offering = Offering(arena, incarnation=self._incarnation)

    def withhold(self) -> None:
        """Give nothing more of what was offered: its bytes are not what was verified.

        Answers that are on their way end with their connections, and whoever asks is sent elsewhere.
        """
        if self._offering is None:
            return
        self._withheld, self._offering = self._offering, None
        self._close_nixl()
        for task in list(self._readers):
            task.cancel()

    def serve(self) -> None:
        """Requests are served here from now on: weights leave slowly until it is seen what it does."""
        self.pace = pacing.serve(self.pace, self.policy)

    def observe(self, seen: pacing.Foreground, *, given_bytes_per_s: float) -> None:
        """Take in how requests fared while so much went out; it sets the rate (R9.1)."""
        before, self.seen = self.pace.bytes_per_s, seen
        self.pace = pacing.observe(
            self.pace,
            seen,
            self.policy,
            given_bytes_per_s=given_bytes_per_s,
            now_s=self._clock.monotonic_s(),
        )
        if (before > 0) != (self.pace.bytes_per_s > 0):
            word = "resumed" if before <= 0 else "paused"
            log.info("giving weights is %s: %s", word, self.pace.why)

    def drain(self, *, limit_s: float = HAND_OVER_LIMIT_S) -> None:
        """Refuse new readers; those that read may finish within `limit_s` (R22.3).

        They may do so over further connections as well: a reader says its name with each request.

        They are told with every chunk, so that they go on elsewhere where somebody else has it.
        """
        if self._gone_s is None:
            self._drain_s = self._clock.monotonic_s()
            self._gone_s = self._drain_s + limit_s

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Let readers end within `grace_s`, then close everything."""
        self.drain()
        until_s = self._clock.monotonic_s() + grace_s
        while self.in_use and self._clock.monotonic_s() < until_s:
            await self._clock.sleep(0.05)
        if self._server is not None:
            self._server.close()
        await self._doorway.close()
        self._sending.close()
        for offering in (self._offering, self._withheld):
            if offering is not None:
                offering.close()
        self._offering = self._withheld = None
        self._close_nixl()

    def _close_nixl(self) -> None:
        way, self.nixl = self.nixl, None
        if way is not None:
            way.close()

    def counted(self, who: str) -> list[str]:
        """Prometheus lines: what was given and refused, and the pace; `who` are the labels."""
        lines = ["# TYPE readyplane_agent_peer_bytes_total counter"]
        lines.append(f"readyplane_agent_peer_bytes_total{{{who}}} {self.bytes_served}")
        lines.append("# TYPE readyplane_agent_peer_refusals_total counter")
        for status, count in sorted(self.refused.items()):
            lines.append(f'readyplane_agent_peer_refusals_total{{{who},status="{status}"}} {count}')
        lines.append("# TYPE readyplane_agent_giving_paused gauge")
        paused = int(self.pace.paused_s is not None)
        lines.append(f"readyplane_agent_giving_paused{{{who}}} {paused}")
        if math.isfinite(self.pace.bytes_per_s):
            lines.append("# TYPE readyplane_agent_giving_bytes_per_second gauge")
            rate = self.pace.bytes_per_s
            lines.append(f"readyplane_agent_giving_bytes_per_second{{{who}}} {rate:.0f}")
        return lines

    # ------------------------------------------------------------------- connections

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if not self._doorway.enter(task, now_s=self._clock.monotonic_s()):
            writer.close()
            return
        writer.transport.set_write_buffer_limits(high=0)  # a drain then means: all of it has gone
        try:
            await self._serve(task, reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            # The peer went away, or takes nothing; whatever it has it verifies itself. What it has
            # not taken is dropped, or the connection would stay open for as long as it likes.
            writer.transport.abort()
        except asyncio.CancelledError:
            # stop() ends connections; the server's own task must not see it as a crash
            writer.transport.abort()
        finally:
            self._doorway.leave(task)
            self._readers.pop(task, None)
            writer.close()

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            self._doorway.waits(task, now_s=self._clock.monotonic_s())
            limit_s = IDLE_LIMIT_S if self._doorway.trusts(task) else REQUEST_LIMIT_S
            try:
                async with asyncio.timeout(limit_s):
                    head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                answer = Answer("431 Request Header Fields Too Large")
                await self._send_small(writer, answer.head(close=True))
                return
            self._doorway.asked(task)
            request = parse(head)
            answer = self._answer(request, task)
            if answer.status[0] in "45":
                reason = answer.status.split(" ", 1)[0]
                self.refused[reason] = self.refused.get(reason, 0) + 1
            # A request body is never read, so the connection can not be used again after one.
            if not answer.size:  # a small answer that nobody takes holds no place against others
                self._doorway.waits(task, now_s=self._clock.monotonic_s())
            await self._send(writer, answer, request)
            if request.closes:
                return

    # ------------------------------------------------------------------- verdicts

    def _answer(self, request: Request, task: asyncio.Task[None]) -> Answer:
        if request.method not in {"GET", "HEAD"}:
            return Answer("405 Method Not Allowed", b"use GET\n")
        try:
            parts = urlsplit(request.target)
        except ValueError:
            return Answer("400 Bad Request", b"the target is no URL: ask for /path?query\n")
        if parts.path == "/healthz":
            well, why = self._health()
            status = "200 OK" if well else "503 Service Unavailable"
            return Answer(status, f"{why}\n".encode(), retry_after_s=0 if well else 1)
        if parts.path == "/metrics":
            return Answer("200 OK", self._metrics().encode(), "text/plain; version=0.0.4")
        kind, _, rest = parts.path.removeprefix("/v1/").partition("/")
        if parts.path == "/v1/engine":
            return self._engine(request)
        if not parts.path.startswith("/v1/") or kind not in KINDS:
            paths = b"/v1/chunks/{digest}/{path}, /v1/holdings/{digest}, /healthz or /metrics\n"
            return Answer("404 Not Found", paths)
        if self._token and not request.has_token(self._token):
            return Answer("401 Unauthorized", b"send the token as authorization: Bearer TOKEN\n")
        self._doorway.trust(task)
        return self._weights(kind, rest, parts.query, request, task)

    def _engine(self, request: Request) -> Answer:
        """Where the engine is, for another one that is to meet it."""
        if self._token and not request.has_token(self._token):
            return Answer("401 Unauthorized", b"send the token as authorization: Bearer TOKEN\n")
        told = self.engine_told()
        if not told:
            return Answer("404 Not Found", b"no engine that meets others is up here\n")
        return Answer("200 OK", told.encode(), "application/json")

    def _weights(
        self, kind: str, rest: str, query: str, request: Request, task: asyncio.Task[None]
    ) -> Answer:
        if parse_qs(query).get("incarnation", [""])[0] != self._incarnation:
            return Answer("409 Conflict", f"this is incarnation {self._incarnation}\n".encode())
        digest, _, path = rest.partition("/")
        if self._withheld is not None and self._offering is None:
            return Answer("404 Not Found", b"withheld: read from another source\n")
        if self._offering is None:
            return Answer("404 Not Found", b"this worker holds no artifact yet\n")
        refusal = self._offering.refusal(unquote(digest), query)
        if refusal is not None:
            return refusal
        if kind == "holdings":
            return self._offering.holdings(extra=self._drains())
        way = self.nixl if self.nixl is not None and self.nixl.alive else None
        via = kind == "nixl" or VIA.lower() in request.headers
        if via and way is None:
            return Answer("404 Not Found", b"there is no NIXL here: read over this connection\n")
        if kind == "nixl" and way is not None:
            return self._offering.nixl(way.metadata)
        who = request.headers.get(READER.lower(), "")[:READER_CHARS_MAX]
        busy = self._busy(task, who)
        if busy is not None:
            return busy
        answer = self._offering.chunk(path, request.headers.get("range", ""), extra=self._drains())
        if answer.path:
            self._readers[task] = self._clock.monotonic_s()
            self._remember(who)
            if via and way is not None:
                return self._offering.address(answer, way.base)
        return answer

    def _drains(self) -> str:
        if self._gone_s is None:
            return ""
        return f"{DRAINING}: {max(0.0, self._gone_s - self._clock.monotonic_s()):.0f}\r\n"

    def _remember(self, who: str) -> None:
        if not who:
            return
        self._known.pop(who, None)
        self._known[who] = None
        if len(self._known) > READERS_KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def _may_finish(self, who: str, now_s: float) -> bool:
        """Whether a drain lets this reader go on over a connection that has not read yet.

        It has read here, or comes so soon that its place was granted before: none is afterwards.
        """
        return bool(who) and (who in self._known or now_s <= self._drain_s + PLACE_USED_S)

    def _busy(self, task: asyncio.Task[None], who: str) -> Answer | None:
        """Why no chunk may go out now, None when one may; `who` is the reader's name for itself."""
        now_s, away = self._clock.monotonic_s(), "503 Service Unavailable"
        reads = task in self._readers
        goes_on = reads or self._may_finish(who, now_s)
        if self._gone_s is not None and (not goes_on or now_s > self._gone_s):
            return Answer(away, b"draining: read from another source\n", extra=self._drains())
        if self._active >= self._requests_max:
            return Answer(away, b"all readers' places are taken\n", retry_after_s=1)
        if self.pace.bytes_per_s > 0:
            return None
        if pacing.elsewhere(self.pace, self.policy, now_s=now_s):
            return Answer(away, b"paused, serving comes first: read from another source\n")
        if reads:
            self._readers[task] = now_s  # it waits here, and will ask again
        text = f"paused, serving comes first: {self.pace.why}\n".encode()
        return Answer(away, text, retry_after_s=1, extra=f"{PAUSED}: 1\r\n")

    # ------------------------------------------------------------------- bytes

    async def _send(self, writer: asyncio.StreamWriter, answer: Answer, request: Request) -> None:
        head_only = request.method == "HEAD"
        gives = answer.path and not head_only and answer.size
        if answer.size and not answer.path and not head_only:
            await self._pay_all(answer.size)
        body = b"" if head_only else answer.body
        head = answer.head(close=request.closes)
        if not gives:
            await self._send_small(writer, head + body)
            return
        self._active += 1
        try:
            await self._send_file(writer, head, answer)
        finally:
            self._active -= 1

    async def _send_small(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        async with asyncio.timeout(SMALL_SEND_LIMIT_S):
            await writer.drain()

    async def _send_file(self, writer: asyncio.StreamWriter, head: bytes, answer: Answer) -> None:
        assert self._offering is not None
        (file, at), left = self._offering.where(answer), answer.size
        while left:
            size = await self._paid(left)
            await self._sending.send(
                writer,
                file,
                at,
                size,
                head=head,
                limit_s=SEND_LIMIT_S,
                yielding=self.pace.serving,
            )
            head, at, left = b"", at + size, left - size
            self.bytes_served += size

    async def _pay_all(self, size: int) -> None:
        """Bytes that leave another way are paid for before their address is told."""
        self._active += 1
        try:
            left = size
            while left:
                left -= await self._paid(left)
        finally:
            self._active -= 1
        self.bytes_served += size
        self.nixl_bytes += size

    async def _paid(self, left: int) -> int:
        """Wait until the next piece may go; returns its size. Bytes are paid for before they go.

        Raises ConnectionResetError when a pause has lasted so long that the reader is better off
        elsewhere.
        """
        while True:
            now_s, rate = self._clock.monotonic_s(), self.pace.bytes_per_s
            if math.isinf(rate):
                return left
            piece = max(PIECE_BYTES_MIN, min(PIECE_BYTES, int(rate * self.policy.burst_s)))
            size = min(left, piece)
            self.pace, wait_s = pacing.spend(self.pace, size, self.policy, now_s=now_s)
            if math.isfinite(wait_s):
                if wait_s > 0:
                    await self._clock.sleep(wait_s)
                return size
            if pacing.elsewhere(self.pace, self.policy, now_s=now_s):
                raise ConnectionResetError("paused for too long")
            await self._clock.sleep(PAUSE_TURN_S)
