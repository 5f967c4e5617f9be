"""The side channel of KV hand-overs: a prefill engine gives, a decode engine pulls.

Owns the sockets and the table of what is held for readers. A pull moves what a KV amounts to here:
the prompt as P saw it and the digest of the KV that P's weights made of it, with a checksum; the
time of the bytes is modelled by the link class. Giver and reader check each other: engine id,
request, blocks and KV format must be those of the parameters, or the load fails as it does in vLLM
with `kv_load_failure_policy=fail`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash
import zmq

from readyplane_agent.engines.modelled.body import BadBody
from readyplane_agent.engines.modelled.sockets import Mailbox, bind

PEERS_MAX = 64
PULLS_MAX = 4096


@dataclass(frozen=True, slots=True)
class HeldKv:
    """What one prefill leg left behind for its reader; `name` is how its client calls it."""

    prompt: bytes
    kv: int
    block_ids: tuple[int, ...]
    name: str = ""


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """Where a decode leg finds its KV, read from `kv_transfer_params`."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    num_tokens: int | None
    tp_size: int


@dataclass(frozen=True, slots=True)
class PulledKv:
    """What a pull brought, or why it failed."""

    prompt: bytes = b""
    kv: int = 0
    failure: str = ""


def read_params(params: Mapping[str, Any]) -> RemoteKv | None:
    """The remote KV of a decode leg, None for a prefill leg.

    Raises:
        BadBody: parameters that are neither, or lack a field; the field is named.
    """
    where = "kv_transfer_params"
    decode, prefill = params.get("do_remote_decode"), params.get("do_remote_prefill")
    for name, value in (("do_remote_decode", decode), ("do_remote_prefill", prefill)):
        if value not in (None, True, False):
            raise BadBody(f"{where}.{name} must be true or false", f"{where}.{name}")
    if bool(decode) == bool(prefill):
        raise BadBody(f"{where}: set one of do_remote_decode and do_remote_prefill", where)
    if decode:
        return None
    for name, kind in (
        ("remote_engine_id", str),
        ("remote_request_id", str),
        ("remote_host", str),
        ("remote_port", int),
        ("remote_block_ids", list),
    ):
        if not isinstance(params.get(name), kind) or isinstance(params.get(name), bool):
            raise BadBody(
                f"{where}.{name} is missing; forward the prefill answer verbatim",
                f"{where}.{name}",
            )
    groups = params["remote_block_ids"]
    ids = groups[0] if len(groups) == 1 and isinstance(groups[0], list) else None
    if ids is None or not all(type(i) is int for i in ids):
        raise BadBody(
            f"{where}.remote_block_ids must hold one list of block ids",
            f"{where}.remote_block_ids",
        )
    if not 0 < params["remote_port"] < 65536:
        raise BadBody(f"{where}.remote_port must be 1 to 65535", f"{where}.remote_port")
    count = params.get("remote_num_tokens")
    return RemoteKv(
        engine_id=params["remote_engine_id"],
        request_id=params["remote_request_id"],
        host=params["remote_host"],
        port=params["remote_port"],
        block_ids=tuple(ids),
        num_tokens=count if type(count) is int else None,
        tp_size=params.get("tp_size") if type(params.get("tp_size")) is int else 1,  # type: ignore[arg-type]
    )


class HandoverChannel:
    """Both ends of one engine.

    Args:
        engine_id: of this life. kv_format: what both ends must share, field by field.
        on_pulled: a reader is done with a request, its blocks may go. on_extend: it will come.
        answer_limit_s: a giver that is silent for this long is taken to be gone.
        reads_others: False: a planted fault, only its own KV is read.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        host: str,
        port: int,
        engine_id: str,
        kv_format: Mapping[str, str],
        on_pulled: Callable[[str], None],
        on_extend: Callable[[str], None],
        answer_limit_s: float = 5.0,
        reads_others: bool = True,
    ) -> None:
        self._context, self._engine_id = context, engine_id
        self._format = dict(kv_format)
        self._limit_s, self._reads_others = answer_limit_s, reads_others
        self._on_pulled, self._on_extend = on_pulled, on_extend
        self.held: dict[str, HeldKv] = {}
        self._pulls: OrderedDict[int, asyncio.Future[dict[str, Any]]] = OrderedDict()
        self._next = 0
        self._peers: OrderedDict[tuple[str, int], Mailbox] = OrderedDict()
        router = context.socket(zmq.ROUTER)
        try:
            self.port = bind(router, host, port)
        except OSError:
            router.close(linger=0)
            raise
        self._router = Mailbox(router, self._on_ask)

    # ------------------------------------------------------------------ the giver

    def _on_ask(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            return
        try:
            ask = msgspec.msgpack.decode(frames[1])
            answer = self._answer(ask)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
            return
        if answer is not None:
            answer["id"] = ask["id"]
            self._router.send([frames[0], msgspec.msgpack.encode(answer)])

    def _answer(self, ask: Mapping[str, Any]) -> dict[str, Any] | None:
        request_id = str(ask["request_id"])
        if ask["engine_id"] != self._engine_id:
            return {"failure": f"engine {ask['engine_id']} is not here ({self._engine_id} is)"}
        held = self.held.get(request_id)
        if ask["op"] == "pull":
            differing = [
                f"{name}: {value} here, {ask['format'].get(name)} there"
                for name, value in self._format.items()
                if ask["format"].get(name) != value
            ]
            if differing:
                return {"failure": "KV formats differ: " + "; ".join(differing)}
            if held is None:
                return {"failure": f"no KV is held for request {request_id} (read or expired)"}
            if tuple(ask["block_ids"]) != held.block_ids:
                return {"failure": f"request {request_id} does not hold these blocks"}
            self._on_extend(request_id)
            check = xxhash.xxh3_64_intdigest(held.prompt)
            return {"prompt": held.prompt, "kv": held.kv, "check": check}
        if held is not None and ask["op"] == "extend":
            self._on_extend(request_id)
        if held is not None and ask["op"] == "done":
            self._on_pulled(request_id)
        return None

    # ------------------------------------------------------------------ the reader

    async def pull(self, remote: RemoteKv) -> PulledKv:
        """Ask for a KV; the answer within `answer_limit_s`, or why there is none."""
        if len(self._pulls) >= PULLS_MAX:
            return PulledKv(failure=f"more than {PULLS_MAX} pulls at once")
        if not self._reads_others and remote.engine_id != self._engine_id:
            return PulledKv(failure=f"cannot reach {remote.host}:{remote.port} (planted)")
        self._next += 1
        number = self._next
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._pulls[number] = future
        try:
            if not self._tell("pull", remote, number):
                return PulledKv(failure=f"cannot reach {remote.host}:{remote.port}")
            async with asyncio.timeout(self._limit_s):
                answer = await future
        except TimeoutError:
            return PulledKv(
                failure=f"no answer from {remote.host}:{remote.port} in {self._limit_s:g} s"
            )
        finally:
            self._pulls.pop(number, None)
        if "failure" in answer:
            return PulledKv(failure=str(answer["failure"]))
        prompt = bytes(answer["prompt"])
        if xxhash.xxh3_64_intdigest(prompt) != answer["check"]:
            return PulledKv(failure="the KV arrived damaged (checksum differs)")
        return PulledKv(prompt, int(answer["kv"]))

    def done(self, remote: RemoteKv) -> bool:
        """Tell the giver that its blocks may go."""
        return self._tell("done", remote, 0)

    def extend(self, remote: RemoteKv) -> bool:
        """Tell the giver that this reader still waits for its turn."""
        return self._tell("extend", remote, 0)

    def _tell(self, op: str, remote: RemoteKv, number: int) -> bool:
        message = {
            "op": op,
            "id": number,
            "engine_id": remote.engine_id,
            "request_id": remote.request_id,
            "block_ids": list(remote.block_ids),
            "reader": self._engine_id,
            "format": self._format,
        }
        try:
            peer = self._peer(remote.host, remote.port)
        except zmq.ZMQError:
            return False
        return peer.send([msgspec.msgpack.encode(message)])

    def _peer(self, host: str, port: int) -> Mailbox:
        mailbox = self._peers.get((host, port))
        if mailbox is None:
            socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IMMEDIATE, 0)
            try:
                socket.connect(f"tcp://{host}:{port}")
            except zmq.ZMQError:
                socket.close(linger=0)
                raise
            mailbox = self._peers[host, port] = Mailbox(socket, self._on_reply)
            if len(self._peers) > PEERS_MAX:
                self._peers.popitem(last=False)[1].close()
        self._peers.move_to_end((host, port))
        return mailbox

    def _on_reply(self, frames: list[bytes]) -> None:
        try:
            answer = msgspec.msgpack.decode(frames[-1])
            future = self._pulls.get(answer["id"])
        except (msgspec.DecodeError, KeyError, TypeError):
            return
        if future is not None and not future.done():
            future.set_result(answer)

    def close(self) -> None:
        """Close every socket."""
        self._router.close()
        for mailbox in self._peers.values():
            mailbox.close()
        self._peers.clear()
