"""The memory of a modelled device: what each part takes, and how many KV blocks are left.

Owns the account. With `--device-bytes` the engine measures its pool as real ones do, in the
`kv_profile` segment, or takes a size that was measured before when that still fits once weights and
graphs are in place; what does not fit is measured afresh, and says so. Without a modelled device
the pool is what the profile or `--kv-tokens` says, and there is no account.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from typing import Any

from readyplane.core.errors import Unavailable
from readyplane.core.profile import ClassProfile
from readyplane.core.startup import SegmentName
from readyplane.kit.clock import Clock
from readyplane_agent.engines.modelled.compiled import captured_shapes
from readyplane_agent.engines.modelled.settings import ModelledSettings
from readyplane_agent.engines.modelled.startup import StartupLog, modelled

LOG = logging.getLogger("engine")
MEMORY_SHARE = 0.9  # of the device, as engines fill it by default
HEADROOM_SHARE = 0.02
OTHER_BYTES = 256 * 2**20  # framework and driver
GRAPH_BYTES = 8 * 2**20  # of one captured shape


@dataclass(frozen=True, slots=True)
class Account:
    """Where the device's memory goes, bytes; see `core.kv_profile.MemoryParts`.

    Attributes:
        taken: by others, as `--device-taken-bytes` says. measured: False for a size that was taken
            over. refused: why one was not.
    """

    device_bytes: int
    taken: int
    weights: int
    activations: int
    graphs: int
    other: int
    block_bytes: int
    block_size: int
    blocks: int
    measured: bool
    refused: str = ""

    def document(self) -> dict[str, Any]:
        """For the start-up file."""
        return {**asdict(self), "memory_share": MEMORY_SHARE}


async def size_pool(
    log: StartupLog,
    clock: Clock,
    s: ModelledSettings,
    profile: ClassProfile,
    *,
    weights_bytes: int,
    block_size: int,
) -> int:
    """Blocks of the KV pool, and the `kv_profile` segment that found them.

    Raises:
        Unavailable: not even one block fits on the device.
    """
    if not s.device_bytes:
        await modelled(log, clock, s, SegmentName.KV_PROFILE)
        return (s.kv_tokens or profile.kv_capacity_tokens) // block_size
    shapes = () if s.graph_stages else None
    account = account_of(
        s, profile, weights_bytes=weights_bytes, block_size=block_size, shapes=shapes
    )
    if account.blocks < 1:
        raise Unavailable(
            f"out of memory: {account.device_bytes} B hold no KV block beside the weights",
            "take a larger device or a smaller model",
        )
    if account.measured:
        detail = f"refused: {account.refused}; measured afresh" if account.refused else "measured"
        await modelled(log, clock, s, SegmentName.KV_PROFILE, detail=detail)
    else:
        detail = f"reused: {account.blocks} blocks"
        with log.segment(SegmentName.KV_PROFILE, detail=detail, since_s=log.done_s):
            pass
    log.write(memory=account.document())
    LOG.info("KV pool: %s", account)
    return account.blocks


def blocks_of_a_graph(s: ModelledSettings, profile: ClassProfile, *, block_size: int) -> int:
    """KV blocks whose memory one captured shape takes; 0 where no device is modelled."""
    block_bytes = profile.kv_bytes_per_token * block_size
    return -(-GRAPH_BYTES // block_bytes) if s.device_bytes else 0


def account_of(
    s: ModelledSettings,
    profile: ClassProfile,
    *,
    weights_bytes: int,
    block_size: int,
    shapes: tuple[int, ...] | None = None,
) -> Account:
    """What a start finds on its device that captures these shapes, or all that it has."""
    block_bytes = profile.kv_bytes_per_token * block_size
    activations = (s.max_batch_tokens or profile.max_batch_tokens) * profile.kv_bytes_per_token
    graphs = len(captured_shapes(s) if shapes is None else shapes) * GRAPH_BYTES
    parts = weights_bytes + activations + graphs + OTHER_BYTES
    left = int(s.device_bytes * MEMORY_SHARE) - s.device_taken_bytes - parts
    blocks, measured, refused = max(0, left) // block_bytes, True, ""
    if s.kv_reuse_bytes:
        free = s.device_bytes - s.device_taken_bytes - parts
        needed = s.kv_reuse_bytes + int(s.device_bytes * HEADROOM_SHARE)
        if needed <= free and s.kv_reuse_bytes >= block_bytes:
            blocks, measured = s.kv_reuse_bytes // block_bytes, False
        else:
            refused = f"{needed} B needed with headroom, {free} B free"
    if s.kv_tokens:
        blocks = min(blocks, s.kv_tokens // block_size)
    return Account(
        device_bytes=s.device_bytes,
        taken=s.device_taken_bytes,
        weights=weights_bytes,
        activations=activations,
        graphs=graphs,
        other=OTHER_BYTES,
        block_bytes=block_bytes,
        block_size=block_size,
        blocks=blocks,
        measured=measured,
        refused=refused,
    )
