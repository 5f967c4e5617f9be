"""Why a load has nobody to read from, whether waiting can help, and who is told (B132).

Owns the judgement of a plan without a source and the one segment of the trace that says what a
load waits for. Handed to `loader`, which waits or gives up.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from readyplane.core.errors import Unavailable
from readyplane.core.startup import NO_BYTES, NOT_WHOLE, OWN_REQUESTS, SegmentName
from readyplane.kit.clock import Clock
from readyplane.ports import Source
from readyplane_agent.trace import Span, StartTrace

log = logging.getLogger("agent.loader")

REASONS_MAX = 8
REASON_CHARS_MAX = 300
# Unchanged reasons are logged again after this long.
SAY_AGAIN_S = 30.0
# How ids of sources begin that workers announce: who is left out of these gives nothing better.
LIVE = ("peer:", "cache:")
# Most segments of one load that say what it waited for; after that the last one goes on.
SEGMENTS_MAX = 8
_NUMBERS = re.compile(r"[0-9.]+")


class BytesNowhere(Unavailable):
    """The bytes are wrong or missing wherever they are offered: waiting does not help."""


def bounded(reasons: Iterable[str], most: int = REASONS_MAX) -> tuple[str, ...]:
    """Each reason once, the last ones, cut to a length."""
    found = tuple(dict.fromkeys(text[:REASON_CHARS_MAX] for text in reasons))
    return found[-most:]


def hopeless(
    sources: Sequence[Source], *, wrong: AbstractSet[str], excluded: Sequence[str]
) -> bool:
    """Whether the bytes are wrong or missing wherever anybody has them, so that waiting is vain.

    A source that cannot be reached, or not now, may come back; one that still loads has only what
    it gets from such sources.

    Args:
        sources: of the latest plan. wrong: ids of sources whose bytes were wrong or missing.
        excluded: what the plan left out and why.
    """
    seen = bool(wrong)
    for text in excluded:
        if text.startswith(LIVE):
            if OWN_REQUESTS in text:
                return False
        elif NOT_WHOLE in text:
            seen = True
        elif NO_BYTES not in text and not any(text.startswith(f"{name}: ") for name in wrong):
            return False
    may = (s for s in sources if s.source_id not in wrong)
    return seen and all(s.worker_id and s.partial for s in may)


@dataclass(slots=True)
class Waiting:
    """What a load waits for, as its progress and its log say it."""

    trace: StartTrace
    clock: Clock
    _span: Span | None = None
    _segments: int = 0
    _said: str = ""
    _said_s: float = -math.inf

    def tell(self, reasons: Sequence[str], *, aloud: bool = True) -> None:
        """The load waits now, for these reasons; `aloud` when the log is to say so as well."""
        now_s = self.clock.monotonic_s()
        text = "; ".join(bounded(reasons)) or "nobody holds this artifact"
        if self._span is None:
            self._span = self.trace.add(SegmentName.WEIGHT_TRANSFER, now_s)
            self._segments += 1
        self._span.end_s = None
        self._span.detail = f"waiting for a source: {text}"
        if not aloud:
            return
        alike = _NUMBERS.sub("", text)  # seconds that go by are no news
        if alike != self._said or now_s - self._said_s >= SAY_AGAIN_S:
            log.warning("waiting for a source of the weights: %s", text)
            self._said, self._said_s = alike, now_s

    def end(self, *, moved: bool = False) -> None:
        """It reads again; `moved` when something has come, so that another wait is another one."""
        if self._span is None:
            return
        if self._span.end_s is None:
            self._span.end_s = self.clock.monotonic_s()
        if moved and self._segments < SEGMENTS_MAX:
            self._span = None
