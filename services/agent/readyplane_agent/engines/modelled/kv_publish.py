"""KV events as vLLM publishes them: ZMQ PUB with three frames, and replay on a ROUTER.

Owns numbering, encoding (tagged maps) and the replay buffer of one engine life. What happened
comes from the model, the token ids of stored blocks from whoever submitted the request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from readyplane_agent.engines.modelled.core_events import (
    EngineEvent,
    KvCleared,
    KvRemoved,
    KvStored,
)
from readyplane_agent.engines.modelled.sockets import Mailbox, bind

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
MEDIUM = "GPU"

# (request id, first block, blocks) -> (token ids, hash of the block before, cache salt)
BlockContent = Callable[[str, int, int], tuple[Sequence[int], int | None, str]]


class KvPublisher:
    """Publishes; `ports` are those of the live and the replay socket."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        host: str,
        port: int,
        replay_port: int,
        topic: str,
        block_size: int,
        buffer_steps: int,
        tokens_reversed: bool = False,
    ) -> None:
        """`tokens_reversed`: a planted fault, blocks are named by other tokens than they hold."""
        self._topic, self._block_size = topic.encode(), block_size
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=max(1, buffer_steps))
        self._reversed = tokens_reversed
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()
        pub = context.socket(zmq.PUB)
        pub.set_hwm(100_000)
        replay = context.socket(zmq.ROUTER)
        replay.set_hwm(0)  # a replay is as long as the buffer; a limit here would drop its middle
        try:
            self.ports = (bind(pub, host, port), bind(replay, host, replay_port))
        except OSError:
            pub.close(linger=0)
            replay.close(linger=0)
            raise
        self._live = Mailbox(pub)
        self._replay = Mailbox(replay, self._on_replay)

    def publish(self, events: Sequence[EngineEvent], content: BlockContent, wall_s: float) -> None:
        """One batch with the KV events among `events`, if any."""
        told = [doc for event in events if (doc := self._document(event, content)) is not None]
        if not told:
            return
        payload = self._encoder.encode({"ts": wall_s, "events": told, "data_parallel_rank": 0})
        sequence = self._sequence
        self._sequence += 1
        self._kept.append((sequence, payload))
        self._live.send([self._topic, sequence.to_bytes(8, "big"), payload])

    def _document(self, event: EngineEvent, content: BlockContent) -> dict[str, object] | None:
        if isinstance(event, KvStored):
            tokens, parent, salt = content(
                event.request_id, event.first_block, len(event.block_hashes)
            )
            if self._reversed:
                tokens = tokens[::-1]
            stored: dict[str, object] = {
                "type": "BlockStored",
                "block_hashes": list(event.block_hashes),
                "parent_block_hash": parent,
                "token_ids": list(tokens),
                "block_size": self._block_size,
                "lora_id": None,
                "medium": MEDIUM,
                "lora_name": None,
            }
            if salt:
                stored["cache_salt"] = salt
            return stored
        if isinstance(event, KvRemoved):
            hashes = list(event.block_hashes)
            return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM}
        if isinstance(event, KvCleared):
            return {"type": "AllBlocksCleared"}
        return None

    def _on_replay(self, frames: list[bytes]) -> None:
        """Answer `[client, empty, first sequence]` with every kept batch from there on."""
        if len(frames) != 3 or len(frames[2]) != 8:
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        for sequence, payload in self._kept:
            if sequence >= first:
                number = sequence.to_bytes(8, "big")
                self._replay.send([client, b"", self._topic, number, payload])
        self._replay.send([client, b"", b"", END_OF_REPLAY, b""])

    def close(self) -> None:
        """Close both sockets."""
        self._live.close()
        self._replay.close()
