"""Whether the byte store has an artifact whole, as far as a plan waits to learn it.

Owns for how long that is believed, one question at a time for each artifact, and the bound on
waiting: peers hold the same bytes, and a plan that waits for a store that hangs would keep a start
from them.
"""

from __future__ import annotations

import asyncio

from readyplane.core.errors import Unavailable
from readyplane.core.identity import Manifest
from readyplane.kit.clock import Clock
from readyplane_registry.blobs import Blobs

PLAN_WAITS_S_MAX = 1.5
"""A third of what a client waits for a plan: a slow store is waited for, one that hangs is not."""

LATE_BELIEVED_S = 10.0
"""An answer that came too late for its own plan is there for the next one: else none ever had it."""

ASKED_AT_ONCE_MAX = 64
"""Artifacts that the store is asked about at once; beyond, a plan is told so."""


class StorageAsked:
    """What a byte store lacks of artifacts.

    Args:
        believed_s: how long it is believed that the store has an artifact whole; 0: not at all.
            That it lacks something never is.
    """

    def __init__(self, blobs: Blobs, clock: Clock, *, believed_s: float) -> None:
        self._blobs, self._clock, self._believed_s = blobs, clock, believed_s
        self._whole_until_s: dict[str, float] = {}
        self._asking: dict[str, tuple[float, asyncio.Task[tuple[str, ...]]]] = {}

    async def missing(self, manifest: Manifest) -> str:
        """What the store lacks first, empty when it lacks nothing.

        Raises:
            Unavailable: it cannot be asked, or has not answered within `PLAN_WAITS_S_MAX`; the
                question goes on, and the next plan may find it answered.
        """
        digest, now_s = manifest.digest, self._clock.monotonic_s()
        if self._whole_until_s.get(digest, 0.0) > now_s:
            return ""
        since_s, asking = self._ask(manifest)
        done, _ = await asyncio.wait({asking}, timeout=PLAN_WAITS_S_MAX)
        if not done:
            silent_s = self._clock.monotonic_s() - since_s
            raise Unavailable(
                f"the byte store has not said for {silent_s:.0f} s whether it has all of it",
                "peers are read from meanwhile; look at the store",
            )
        missing = asking.result()
        return missing[0] if missing else ""

    def doubt(self, digest: str) -> None:
        """A reader got wrong bytes: the next plan asks."""
        self._whole_until_s.pop(digest, None)

    def _ask(self, manifest: Manifest) -> tuple[float, asyncio.Task[tuple[str, ...]]]:
        """The question that is under way, or a new one, and since when."""
        digest = manifest.digest
        if digest in self._asking:
            return self._asking[digest]
        if len(self._asking) >= ASKED_AT_ONCE_MAX:
            raise Unavailable(
                f"the byte store owes {ASKED_AT_ONCE_MAX} answers already", "look at the store"
            )
        since_s = self._clock.monotonic_s()
        asking = asyncio.create_task(self._look(manifest, since_s))
        self._asking[digest] = since_s, asking

        def answered(task: asyncio.Task[tuple[str, ...]]) -> None:
            self._asking.pop(digest, None)
            if not task.cancelled():
                task.exception()  # who waited was told; nobody may wait any more

        asking.add_done_callback(answered)
        return since_s, asking

    async def _look(self, manifest: Manifest, since_s: float) -> tuple[str, ...]:
        missing = await self._blobs.missing(manifest.files)
        now_s = self._clock.monotonic_s()
        late = now_s - since_s > PLAN_WAITS_S_MAX
        believed_s = max(self._believed_s, LATE_BELIEVED_S if late else 0.0)
        self._whole_until_s = {d: s for d, s in self._whole_until_s.items() if s > now_s}
        if not missing and believed_s > 0:
            self._whole_until_s[manifest.digest] = now_s + believed_s
        return missing
