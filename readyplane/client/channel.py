"""One channel to one service: deadlines, token, trace context, and core errors instead of status.

Owned by the clients beside it. A channel is opened at the first call, in the caller's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar
from uuid import uuid4

import grpc
import grpc.aio

from readyplane.core.errors import InvalidField, ReadyplaneError, Unavailable
from readyplane.kit import telemetry
from readyplane.kit.auth import token_metadata
from readyplane.kit.clock import Clock, SystemClock
from readyplane.wire.errors import error_from_rpc

M = TypeVar("M")
CALL_TIMEOUT_S = 5.0
RECONNECT_FIRST_S = 0.1
RECONNECT_MAX_S = 2.0
CONNECT_S_MAX = 2.0
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", 32 * 1024),
    ("grpc.absolute_max_metadata_size", 64 * 1024),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A service that was restarted is found again within seconds, not minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name: how long one try to connect may take, until the service's first frame. A
    # busy one takes over a tenth of a second for it, which is no reason to call it unreachable.
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_S_MAX * 1000)),
    ("grpc.max_reconnect_backoff_ms", int(RECONNECT_MAX_S * 1000)),
    # The services of one system are never behind a forward proxy of the environment.
    ("grpc.enable_http_proxy", 0),
)
KEEPALIVE = (("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 5_000))
KEEPALIVE_OF_SEVERAL = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 1_500),
    # Clients that turned away from an address share no connection to it.
    ("grpc.use_local_subchannel_pool", 1),
)
"""Where there is another address to go to, one that hangs is left within seconds: its connection
stands, and the kernel takes new ones, so that nothing else tells of it."""
SHUFFLED = (
    ("grpc.service_config", '{"loadBalancingConfig":[{"pick_first":{"shuffleAddressList":true}}]}'),
)
"""A name may have several numbers, told to all in one order: each client tries them in its own."""


def options(address: str) -> tuple[tuple[str, Any], ...]:
    """Of a channel to one address, or to several separated by commas."""
    if "," in address:
        return (*OPTIONS, *KEEPALIVE_OF_SEVERAL)
    return (*OPTIONS, *KEEPALIVE, *SHUFFLED)


def target(address: str, *, first: int = 0) -> str:
    """What gRPC dials for `host:port`, or for several of them separated by commas.

    Of several one is used until it goes away: the one at `first`, or the next that answers. gRPC
    takes a list of numbers, not of names: the names of a list are looked up once, here. A single
    name is left to gRPC, which looks it up again when it must; see `SHUFFLED`.
    """
    parts = [part.strip() for part in address.split(",") if part.strip()]
    if len(parts) < 2:
        return address
    first %= len(parts)
    parts = parts[first:] + parts[:first]
    found: dict[int, list[str]] = {socket.AF_INET: [], socket.AF_INET6: []}
    for part in parts:
        host, _, port = part.rpartition(":")
        with contextlib.suppress(OSError):  # those that have a number must do
            told = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
            turn = first % len(told)
            for family, *_, where in told[turn:] + told[:turn]:
                number = f"[{where[0]}]" if family == socket.AF_INET6 else where[0]
                found[family].append(f"{number}:{port}")
    if found[socket.AF_INET]:
        return "ipv4:" + ",".join(found[socket.AF_INET])
    if found[socket.AF_INET6]:
        return "ipv6:" + ",".join(found[socket.AF_INET6])
    return parts[0]


def new_id() -> str:
    """A fresh id for a call that changes something."""
    return uuid4().hex


class ServiceClient:
    """What the four clients share.

    Args:
        address: `host:port` of the service, or several of it, separated by commas: calls go to
            one that answers, and to another when it goes away. token: the shared token, empty for none.
        timeout_s: bound of one call. clock: whose readings ages are turned into.
        make_id: source of request ids.
    """

    service = "service"

    def __init__(
        self,
        address: str,
        token: str = "",
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        clock: Clock | None = None,
        make_id: Callable[[], str] = new_id,
    ) -> None:
        if not address:
            remedy = f"give the gRPC address of the {self.service} as host:port"
            raise InvalidField(self.service, address, remedy)
        self.address = address
        self.timeout_s = timeout_s
        self._clock: Clock = clock or SystemClock()
        self._make_id = make_id
        self._token = token_metadata(token)
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._first = random.randrange(1_000)  # which one is used differs from client to client
        self._left: set[asyncio.Task[None]] = set()

    def _make_stub(self, channel: grpc.aio.Channel) -> Any:
        raise NotImplementedError

    @property
    def stub(self) -> Any:
        """The generated stub over this client's channel."""
        if self._stub is None:
            self._channel = grpc.aio.insecure_channel(
                target(self.address, first=self._first), options=options(self.address)
            )
            self._stub = self._make_stub(self._channel)
        return self._stub

    def turn_away(self) -> None:
        """Go on at the next of several addresses: this one hangs. Calls in flight may still end."""
        channel = self._channel
        if "," not in self.address or channel is None:
            return
        self._channel, self._stub = None, None
        self._first += 1
        task = asyncio.ensure_future(channel.close(grace=self.timeout_s))
        self._left.add(task)
        task.add_done_callback(self._left.discard)

    async def aclose(self) -> None:
        """Close the channel; calls in flight end."""
        channel, self._channel, self._stub = self._channel, None, None
        for task in self._left:
            task.cancel()
        if channel is not None:
            await channel.close()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What travels with every call."""
        if telemetry.tracing_on():
            return (*self._token, *telemetry.inject())
        return self._token

    def error(self, error: grpc.RpcError) -> ReadyplaneError:
        """The core error of a failed call, naming service and address if it never got there."""
        return error_from_rpc(error, service=f"the {self.service}", address=self.address)

    async def call(
        self, name: str, build: Callable[[], Any], timeout_s: float | None = None
    ) -> Any:
        """One unary call.

        Args:
            name: of the rpc. build: makes the request. timeout_s: overrides the default bound.

        Raises:
            ReadyplaneError: what the service raised; `Unavailable` when it cannot be reached;
                `InvalidField` when a value does not fit the message.
        """
        request = built(name, build)
        try:
            return await getattr(self.stub, name)(
                request, timeout=timeout_s or self.timeout_s, metadata=self.metadata()
            )
        except grpc.RpcError as error:
            raise self.error(error) from error

    async def follow(
        self, name: str, request: Any, read: Callable[[Any], M], degraded: Callable[[str], M]
    ) -> AsyncIterator[M]:
        """Values of a server stream, for ever: when it breaks, `degraded(why)` once, then again.

        Raises:
            ReadyplaneError: what asking again cannot mend (a token, a wrong request).
        """
        pause_s = RECONNECT_FIRST_S
        told = False
        while True:
            call = getattr(self.stub, name)(request, metadata=self.metadata())
            why = "the stream ended"
            try:
                async for message in call:
                    pause_s, told = RECONNECT_FIRST_S, False
                    yield read(message)
            except grpc.RpcError as error:
                fault = self.error(error)
                if not isinstance(fault, Unavailable):
                    raise fault from error
                why = str(fault)
            finally:
                call.cancel()
            if not told:
                told = True
                yield degraded(why)
            await self._clock.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(RECONNECT_MAX_S, pause_s * 2)


def built(name: str, build: Callable[[], M]) -> M:
    """The request, or which value does not fit it.

    Raises:
        InvalidField: a number beyond its range, a wrong type, text that is not valid Unicode.
    """
    try:
        return build()
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidField(
            f"{name} request", str(error), "use values that fit the field"
        ) from error


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    """The status of a stream that has ended, as the error that reading it would have raised."""
    code, details = await call.code(), await call.details()
    initial, trailing = await call.initial_metadata(), await call.trailing_metadata()
    return grpc.aio.AioRpcError(code, initial, trailing, details)


RPC_ENDED = (grpc.RpcError, asyncio.InvalidStateError)
"""What writing to or reading from a stream raises once it has ended."""
