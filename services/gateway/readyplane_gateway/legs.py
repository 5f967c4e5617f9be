"""The two legs of a request as an engine sees them: what is sent, what came back, who is to blame.

Owns the bodies of the NIXL hand-over (prefill with `do_remote_decode`, its parameters verbatim to
decode) and of two legs that are sent at once (`meeting`), and the judgement of a leg that failed. A 4xx is the client's fault and passed on, 429 and
503 mean busy, everything else means that the worker failed (B70).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import msgspec

from readyplane.kit.telemetry import inject, tracing_on
from readyplane.ports import End
from readyplane_gateway.bounds import Bounds
from readyplane_gateway.engine_http import EngineHttp, EngineTrouble, Exchange, Trouble
from readyplane_gateway.openai import Ask, Failure, Kind, failure_of_engine
from readyplane_gateway.sse import MOVED, SseScan, Usage
from readyplane_gateway.tokens import ClientFault

# How engines say that the KV of a decode leg did not come (vLLM with kv_load_failure_policy=fail;
# SGLang: "KVTransferError", "bootstrap failed").
_LOST_SOURCE = re.compile(r"kv ?(load|transfer)|failed to load kv|nixl|bootstrap", re.IGNORECASE)
ANSWER_BYTES_MAX = 64 * 1024 * 1024
ERROR_BYTES_MAX = 256 * 1024
CLIENT_FAULTS = frozenset({400, 413, 422})
# Of a decode engine that says no more than that it has failed: vLLM 0.32 does when KV did not come.
UNSAID = frozenset({"http_500", "engine_error"})
GONE = frozenset({Trouble.CONNECT, Trouble.BROKEN})
BUSY = frozenset({408, 429, 503})
# So that tokens are counted exactly whatever an engine puts into one chunk.
COUNTED: Mapping[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
PREFILL_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class LegFailed(Exception):
    """A leg failed before its answer was complete.

    Attributes:
        leg: prefill, decode or local. end: the worker. trouble: for metrics.
        busy: the worker refused for lack of room, it has not failed. cut: it was ended from here,
            for the other leg had failed.
    """

    cut = False

    def __init__(self, leg: str, end: End, trouble: str, why: str, *, busy: bool = False) -> None:
        self.leg, self.end, self.trouble, self.why, self.busy = leg, end, trouble, why, busy
        super().__init__(why)

    @property
    def lost_source(self) -> bool:
        """A decode engine could not read the KV: whoever should have given it is to blame (B60)."""
        return self.leg == "decode" and _LOST_SOURCE.search(self.why) is not None

    def __str__(self) -> str:
        return f"{self.leg} leg on worker {self.end.worker_id}: {self.why}"

    def failure(self) -> Failure:
        """What the client is told when nothing else helped."""
        text = str(self)
        if self.busy:
            return Failure(503, "server_error", "workers_busy", text, retry_after_s=1.0)
        if self.trouble == Trouble.SLOW:
            return Failure(504, "server_error", "worker_timeout", text, retry_after_s=1.0)
        return Failure(502, "server_error", "worker_failed", text, retry_after_s=1.0)


@dataclass(slots=True)
class Handover:
    """What a prefill leg gave.

    Attributes:
        params: `kv_transfer_params` byte for byte, empty when the engine gave none. Of legs that
            are sent at once: the room in which their engines meet.
        cached_tokens: prompt tokens it did not compute, None when not told (yet).
        told: that it is over has been told.
    """

    params: bytes
    cached_tokens: int | None
    told: bool = False


@dataclass(frozen=True, slots=True)
class MovedOut:
    """What an engine gave away: both parts go to the next one byte for byte.

    Attributes:
        continuation: the tokens so far and the state behind the next. params: where the KV is.
        output: the tokens so far.
    """

    continuation: bytes
    params: bytes
    output: tuple[int, ...]


class _Prefilled(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"")
    usage: Usage | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answered(msgspec.Struct):
    usage: Usage | None = None
    choices: list[_Choice] | None = None


class _Continuation(msgspec.Struct):
    output_token_ids: list[int]


class _MovedOut(msgspec.Struct):
    continuation: msgspec.Raw
    kv_transfer_params: msgspec.Raw


class _Held(msgspec.Struct):
    remote_request_id: str | None = None


class _Aborted(msgspec.Struct):
    aborted: list[str] | None = None


class Abandoned(StrEnum):
    """What became of KV that nobody will read; the label of a counter.

    An engine that says what it did has `freed` it, or it was `not_held` (read, expired, or its
    request was cut off in time). One that does not say was `told`: vLLM answers so and lets the
    hold run out. `left_to_expire`: it has no such path. `unreachable`: it did not answer.
    """

    FREED = "freed"
    NOT_HELD = "not_held"
    TOLD = "told"
    LEFT_TO_EXPIRE = "left_to_expire"
    UNREACHABLE = "unreachable"


_continuation = msgspec.json.Decoder(_Continuation)
_moved_out = msgspec.json.Decoder(_MovedOut)
_prefilled = msgspec.json.Decoder(_Prefilled)
_answered = msgspec.json.Decoder(_Answered)
_held = msgspec.json.Decoder(_Held)
_aborted = msgspec.json.Decoder(_Aborted)


@dataclass(frozen=True, slots=True)
class Bodies:
    """The bodies of both legs; the prompt is encoded once."""

    ask: Ask
    shared: Mapping[str, Any]

    @classmethod
    def of(cls, ask: Ask, token_ids: tuple[int, ...] | None) -> Bodies:
        """`token_ids`: sent instead of a prompt's text, and beside a chat's messages, where they
        are known (neither None nor empty).

        Beside the messages as `prompt_token_ids`: an engine that has the field takes them, so that
        both legs read the same prompt and none tokenises again; to another one it is an unknown
        field, and it writes the messages out itself.
        """
        shared = dict(ask.body)
        shared.pop("request_id", None)  # the legs' id is ours: two clients may choose one
        if ask.kind is Kind.COMPLETIONS and token_ids:
            shared["prompt"] = msgspec.Raw(msgspec.json.encode(token_ids))
            shared.pop("add_special_tokens", None)
        elif ask.kind is Kind.CHAT and token_ids and ask.told_by_tokens:
            shared["prompt_token_ids"] = msgspec.Raw(msgspec.json.encode(token_ids))
        return cls(ask, shared)

    def prefill(self) -> bytes:
        """One token, not streamed, KV kept for a remote decode."""
        body = dict(self.shared)
        body.pop("stream_options", None)
        body |= {"stream": False, "max_tokens": 1, "kv_transfer_params": PREFILL_PARAMS}
        if self.ask.kind is Kind.CHAT:
            body["max_completion_tokens"] = 1
        if "min_tokens" in body:
            body["min_tokens"] = 1
        return msgspec.json.encode(body)

    def meeting(self, bootstrap: str, room: int, rid: str) -> bytes:
        """The request itself, the same for both engines, which meet at `bootstrap` (host:port)
        under the number `room`; `rid` is what they may be asked to abort.
        """
        host, _, port = bootstrap.rpartition(":")
        body = dict(self.shared)
        body["bootstrap_host"], body["bootstrap_port"] = host.strip("[]"), int(port)
        body["bootstrap_room"], body["rid"] = room, rid
        return msgspec.json.encode(self._counted(body))

    def decode(self, params: bytes, continuation: bytes = b"") -> bytes:
        """The request itself; `params` empty on a worker that serves both stages, `continuation`
        where another engine has begun it.
        """
        body = dict(self.shared)
        if params:
            body["kv_transfer_params"] = msgspec.Raw(params)
        if continuation:
            body["continuation"] = msgspec.Raw(continuation)
        return msgspec.json.encode(self._counted(body))

    def _counted(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.ask.stream:
            options = body.get("stream_options") or {}
            body["stream_options"] = {**options, **COUNTED}
        return body


class Legs:
    """Speaks to the engines of a pair."""

    def __init__(self, engines: EngineHttp, bounds: Bounds, engine_token: str = "") -> None:
        """`engine_token`: sent as bearer token to engines that want one."""
        self._engines = engines
        self._bounds = bounds
        self._token = engine_token
        self._open: dict[tuple[str, str], set[Exchange]] = {}

    def worker_gone(self, worker_id: str, incarnation: str) -> None:
        """Fail every open leg on a worker that is known to have ended."""
        for exchange in tuple(self._open.get((worker_id, incarnation), ())):
            exchange.fail(EngineTrouble(Trouble.BROKEN, "the worker has ended"))

    async def prefill(
        self, end: End, bodies: Bodies, *, request_id: str, within_s: float
    ) -> Handover:
        """Run the prefill leg.

        Raises:
            LegFailed, ClientFault.
        """
        answer = await self._prefilled(
            end,
            bodies.prefill(),
            bodies.ask.kind.path,
            request_id=request_id,
            within_s=within_s,
            doing="prefill",
        )
        try:
            read = _prefilled.decode(answer)
        except msgspec.MsgspecError as error:
            why = f"its answer cannot be read ({error})"
            raise LegFailed("prefill", end, "unreadable", why) from error
        params = bytes(read.kv_transfer_params)
        if params not in (b"", b"null") and not params.startswith(b"{"):
            raise LegFailed("prefill", end, "unreadable", "kv_transfer_params is not an object")
        cached = read.usage.cached_tokens if read.usage else None
        return Handover(b"" if params == b"null" else params, cached)

    async def _prefilled(
        self, end: End, body: bytes, path: str, *, request_id: str, within_s: float, doing: str
    ) -> bytes:
        """The whole, good answer of a prefill leg. Raises LegFailed, ClientFault."""
        try:
            exchange = await self._engines.open(
                end.engine_url,
                path,
                body,
                headers=self._headers(request_id),
                within_s=within_s,
                doing=doing,
            )
            with exchange, self._tracked(end, exchange):
                status = await exchange.head()
                answer = await exchange.whole(ANSWER_BYTES_MAX)
        except EngineTrouble as error:
            raise _failed("prefill", end, error) from error
        _check(status, answer, "prefill", end)
        return answer

    async def prefill_beside(
        self, end: End, body: bytes, path: str, *, request_id: str, within_s: float
    ) -> int | None:
        """Run a prefill leg beside its decode leg; prompt tokens it did not compute, if told.

        Raises:
            LegFailed, ClientFault.
        """
        answer = await self._prefilled(
            end,
            body,
            path,
            request_id=request_id,
            within_s=within_s,
            doing="prefill beside a decode leg",
        )
        if not answer.startswith(b"data:"):
            usage = _usage_of(answer)
            return usage.cached_tokens if usage else None
        scan = SseScan(keep_last=True)
        try:
            scan.feed(answer)
        except ValueError as error:
            raise LegFailed("prefill", end, "unreadable", str(error)) from error
        if scan.error:
            why = f"it answered with an error ({scan.error[:200].decode(errors='replace')})"
            raise LegFailed("prefill", end, "engine_error", why)
        return scan.usage.cached_tokens if scan.usage else None

    async def cut_off(self, end: End, rid: str) -> Abandoned:
        """Tell an engine that meets others that a request is over (SGLang's `/abort_request`)."""
        body = msgspec.json.encode({"rid": rid})
        try:
            status, _ = await self._told(end, "/abort_request", body, "aborting a request")
        except EngineTrouble:
            return Abandoned.UNREACHABLE
        return Abandoned.TOLD if status == 200 else Abandoned.LEFT_TO_EXPIRE

    async def _told(self, end: End, path: str, body: bytes, doing: str) -> tuple[int, bytes]:
        """Status and body of a short answer. Raises EngineTrouble."""
        exchange = await self._engines.open(
            end.engine_url,
            path,
            body,
            headers=self._headers(""),
            within_s=self._bounds.connect_s_max,
            doing=doing,
        )
        with exchange:
            return await exchange.head(), await exchange.whole(ERROR_BYTES_MAX)

    async def decode(
        self, leg: str, end: End, body: bytes, path: str, *, request_id: str, within_s: float
    ) -> DecodeLeg:
        """Start the decode leg (`leg`: decode, or local). Raises LegFailed, ClientFault."""
        try:
            exchange = await self._engines.open(
                end.engine_url,
                path,
                body,
                headers=self._headers(request_id),
                within_s=within_s,
                doing="waiting for the first token",
            )
        except EngineTrouble as error:
            raise _failed(leg, end, error) from error
        return DecodeLeg(self, leg, end, exchange, request_id)

    async def move_out(self, end: End, name: str) -> MovedOut:
        """Ask an engine to stop a request that decodes and to give it away.

        Raises:
            LegFailed: it does not decode there (any more), or the engine does not answer.
        """
        try:
            exchange = await self._engines.open(
                end.engine_url,
                "/move_out",
                msgspec.json.encode({"request_id": name}),
                headers=self._headers(""),
                within_s=self._bounds.connect_s_max,
                doing="moving a request",
            )
            with exchange:
                status = await exchange.head()
                answer = await exchange.whole(ANSWER_BYTES_MAX)
            if status != 200:
                failure = failure_of_engine(status, answer)
                raise LegFailed("decode", end, f"http_{status}", failure.message)
            read = _moved_out.decode(answer)
            output = tuple(_continuation.decode(read.continuation).output_token_ids)
        except EngineTrouble as error:
            raise _failed("decode", end, error) from error
        except msgspec.MsgspecError as error:
            why = f"its answer cannot be read ({error})"
            raise LegFailed("decode", end, "unreadable", why) from error
        return MovedOut(bytes(read.continuation), bytes(read.kv_transfer_params), output)

    async def lost(self, failed: LegFailed, source: End) -> bool:
        """Whether a decode leg failed for want of its KV: its engine says so, or says nothing and the
        source is not there any more.
        """
        if failed.lost_source or failed.leg != "decode" or failed.trouble not in UNSAID:
            return failed.lost_source
        try:
            await self._told(source, "/health", b"{}", "whether a source is still there")
        except EngineTrouble as error:
            return error.trouble in GONE
        return False

    async def abandon(self, end: End, *, params: bytes = b"", request_id: str = "") -> Abandoned:
        """Tell a prefill engine that nobody will read the KV it holds.

        Args:
            params: `kv_transfer_params` of a leg that ended well. request_id: `x-request-id` of
                one whose answer was not waited for: it may have ended all the same.
        """
        name = request_id or _held_id(params)
        if not name:
            return Abandoned.LEFT_TO_EXPIRE
        body = msgspec.json.encode({"request_ids": [name]})
        try:
            status, answer = await self._told(end, "/abort_requests", body, "abandoning KV")
        except EngineTrouble:
            return Abandoned.UNREACHABLE  # its own hold ends it, or it has gone with its KV
        if status != 200:
            return Abandoned.LEFT_TO_EXPIRE
        try:
            aborted = _aborted.decode(answer).aborted
        except msgspec.MsgspecError:  # vLLM's answer is empty
            aborted = None
        if aborted is None:
            return Abandoned.TOLD
        return Abandoned.FREED if name in aborted else Abandoned.NOT_HELD

    def _headers(self, request_id: str) -> list[tuple[str, str]]:
        headers = [("x-request-id", request_id)] if request_id else []
        if self._token:
            headers.append(("authorization", f"Bearer {self._token}"))
        if tracing_on():
            headers += inject()
        return headers

    def _tracked(self, end: End, exchange: Exchange) -> _Tracked:
        return _Tracked(self._open, (end.worker_id, end.incarnation), exchange)


class _Tracked:
    """Keeps an exchange findable by its worker while it runs."""

    __slots__ = ("_exchange", "_key", "_open")

    def __init__(
        self, open_: dict[tuple[str, str], set[Exchange]], key: tuple[str, str], exchange: Exchange
    ) -> None:
        self._open, self._key, self._exchange = open_, key, exchange

    def __enter__(self) -> None:
        self._open.setdefault(self._key, set()).add(self._exchange)

    def __exit__(self, *_exc: object) -> None:
        mine = self._open.get(self._key)
        if mine is not None:
            mine.discard(self._exchange)
            if not mine:
                del self._open[self._key]


class DecodeLeg:
    """A decode leg under way. Use as a context manager: leaving it cancels what is not complete.

    `name`: of the request at its engine.
    """

    def __init__(self, legs: Legs, leg: str, end: End, exchange: Exchange, name: str) -> None:
        self.leg, self.end, self.name = leg, end, name
        self._exchange = exchange
        self._cut = False
        self._tracked = legs._tracked(end, exchange)  # noqa: SLF001 - one module, two halves

    def __enter__(self) -> Self:
        self._tracked.__enter__()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._tracked.__exit__()
        self._exchange.close()

    def cut(self, why: str) -> None:
        """End it from here: the other leg has failed, and nothing will come of this one."""
        self._cut = True
        self._exchange.fail(EngineTrouble(Trouble.BROKEN, why))

    async def accepted(self) -> None:
        """Wait for a 200. Raises LegFailed, ClientFault."""
        try:
            status = await self._exchange.head()
            if status != 200:
                answer = await self._exchange.whole(ERROR_BYTES_MAX)
                _check(status, answer, self.leg, self.end)
        except EngineTrouble as error:
            raise self._failed(error) from error

    async def piece(self) -> bytes:
        """The next bytes, empty at the end. Raises LegFailed."""
        try:
            return await self._exchange.piece()
        except EngineTrouble as error:
            raise self._failed(error) from error

    async def whole(self) -> tuple[bytes, Usage | None, bool]:
        """An answer that is not streamed, and whether another engine goes on with it.

        Raises:
            LegFailed.
        """
        try:
            answer = await self._exchange.whole(ANSWER_BYTES_MAX)
            read = _answered.decode(answer)
            moved = any(choice.finish_reason == MOVED for choice in read.choices or ())
            return answer, read.usage, moved
        except EngineTrouble as error:
            raise self._failed(error) from error
        except msgspec.MsgspecError as error:
            why = f"its answer cannot be read ({error})"
            raise LegFailed(self.leg, self.end, "unreadable", why) from error

    def _failed(self, error: EngineTrouble) -> LegFailed:
        failed = _failed(self.leg, self.end, error)
        failed.cut = self._cut
        return failed

    def idle_within(self, bound_s: float) -> None:
        """From now on, silence between two chunks is bounded by this."""
        self._exchange.within(bound_s, "waiting for the next chunk")


def _usage_of(answer: bytes) -> Usage | None:
    try:
        return _answered.decode(answer).usage
    except msgspec.MsgspecError:
        return None


def _held_id(params: bytes) -> str:
    try:
        return _held.decode(params).remote_request_id or ""
    except msgspec.MsgspecError:
        return ""


def _failed(leg: str, end: End, error: EngineTrouble) -> LegFailed:
    return LegFailed(leg, end, error.trouble, error.why, busy=error.trouble is Trouble.FULL)


def _check(status: int, answer: bytes, leg: str, end: End) -> None:
    """Judge an answer's status. Raises ClientFault, LegFailed."""
    if status == 200:
        return
    failure = failure_of_engine(status, answer)
    if status in CLIENT_FAULTS:
        raise ClientFault(failure)
    raise LegFailed(
        leg, end, f"http_{status}", f"HTTP {status}: {failure.message}", busy=status in BUSY
    )
