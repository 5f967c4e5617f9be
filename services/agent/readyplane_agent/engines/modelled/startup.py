"""The start of a modelled engine: what is real, what is only slept, and the file that tells both.

Owns the segments of one start and the mapping of the arena. Real: import, the mapping and the
reading of every tensor (`host_to_device`), and the files of the compile cache (`compiled`). Slept,
and marked `modelled`: the set-up of parallel groups, compilation, graph capture, KV profiling and
warm-up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from readyplane.core.errors import InvalidField, NotFound, Unavailable
from readyplane.core.identity import parse
from readyplane.core.startup import Segment, SegmentName, StartMode
from readyplane.kit.clock import Clock
from readyplane_agent.engines.layout import read_tensor_table
from readyplane_agent.engines.mapping import ArenaMap, read_file_parts
from readyplane_agent.engines.modelled.answer import fingerprint, tensor_digest
from readyplane_agent.engines.modelled.compiled import (
    captured_shapes,
    compile_key,
    compile_miss,
    keep_compiled,
)
from readyplane_agent.engines.modelled.plants import (
    Plant,
    spoiled_bytes,
    spoiled_slots,
    spoiled_weights,
)
from readyplane_agent.engines.modelled.settings import ModelledSettings

LOG = logging.getLogger("engine")
# Of a compilation whose result is cached. Measured with a real engine (a tiny model on CPU): its
# initialisation took 25.3 s with an empty compile cache and 9.9 s with a filled one, 9.9 / 25.3.
# `--compile-hit-s` says it in seconds instead.
CACHE_HIT_FACTOR = 0.4
AOT_HIT_FACTOR = 0.02  # artifacts that were compiled ahead are only read
POLL_S = 0.02
SEEN_AFTER_S_MAX = 1.0
# Which modelled segments a start mode has.
_GRAPHS = (SegmentName.COMPILE, SegmentName.CUDA_GRAPH)


class StartupLog:
    """Segments so far and what is known by then, written to a file after every change."""

    def __init__(self, clock: Clock, path: Path | None, about: Mapping[str, Any]) -> None:
        self._clock, self._path = clock, path
        self.about: dict[str, Any] = dict(about)
        self.segments: list[Segment] = []

    def add(
        self,
        name: SegmentName,
        start_s: float,
        end_s: float,
        detail: str = "",
        *,
        saved_s: float = 0.0,
    ) -> None:
        """A segment that was measured elsewhere."""
        self.segments.append(Segment(name, start_s, end_s, detail=detail, saved_s=saved_s))
        self.write()

    @property
    def done_s(self) -> float | None:
        """When the last segment ended, on the monotonic clock; None while one runs or none was."""
        return self.segments[-1].end_s if self.segments else None

    @contextmanager
    def segment(
        self,
        name: SegmentName,
        *,
        modelled: bool = False,
        detail: str = "",
        since_s: float | None = None,
    ) -> Iterator[None]:
        """Measure what runs inside, and what led to it from `since_s` on."""
        at = len(self.segments)
        begin_s = self._clock.monotonic_s() if since_s is None else since_s
        self.segments.append(Segment(name, begin_s, None, modelled, detail))
        LOG.info("%s begins%s %s", name, " (modelled)" if modelled else "", detail)
        self.write()
        yield
        done = replace(self.segments[at], end_s=self._clock.monotonic_s())
        self.segments[at] = done
        assert done.end_s is not None
        LOG.info("%s took %.3f s", name, done.end_s - done.start_s)
        self.write()

    def write(self, **about: Any) -> None:
        """Bring the file up to date (whole or not at all)."""
        self.about.update(about)
        if self._path is None:
            return
        document = {
            **self.about,
            "segments": [
                {
                    "name": str(s.name),
                    "start_s": s.start_s,
                    "end_s": s.end_s,
                    "modelled": s.modelled,
                    "detail": s.detail,
                    "saved_s": s.saved_s,
                }
                for s in self.segments
            ],
        }
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        part.write_text(json.dumps(document))
        part.replace(self._path)


class Weights:
    """The mapped arena and its fingerprint; keeps the mapping alive."""

    def __init__(self, arena: Path, table: Path, plants: Collection[Plant] = ()) -> None:
        """Raises NotFound, InvalidField or Unavailable, each naming file and remedy."""
        try:
            text = table.read_bytes()
        except OSError as error:
            raise NotFound(
                "tensor table", str(table), f"let the agent write it ({error})"
            ) from None
        slots, size = read_tensor_table(text)
        if not slots:
            raise InvalidField("tensor_table.tensors", [], "list every tensor of the weights")
        try:
            self._map = ArenaMap(arena, size, read_file_parts(text))
        except OSError as error:
            raise NotFound("arena", str(arena), f"load the weights there first ({error})") from None
        except ValueError as error:
            raise Unavailable(f"cannot map {arena} ({error})", "check the arena") from error
        self.tensor_count, self.size_bytes = len(slots), size
        view = self._map.view[:]
        slots = spoiled_slots(slots, plants)
        first = next((slot.name for slot in slots if slot.size_bytes), "")
        found_weights = fingerprint(
            tensor_digest(
                slot.name,
                slot.dtype,
                slot.shape,
                spoiled_bytes(
                    view[slot.offset_bytes : slot.offset_bytes + slot.size_bytes],
                    plants if slot.name == first else (),
                ),
            )
            for slot in slots
        )
        self.fingerprint = spoiled_weights(found_weights, plants)
        view.release()


async def wait_for(path: Path, *, limit_s: float, clock: Clock) -> None:
    """Wait until a file is there. Raises NotFound after `limit_s`."""
    until_s = clock.monotonic_s() + limit_s
    if not path.exists():
        LOG.info("waiting for %s", path)
    while not path.exists():
        if clock.monotonic_s() > until_s:
            raise NotFound("tensor table", str(path), f"let the agent write it in {limit_s:g} s")
        await clock.sleep(POLL_S)


def there_since_s(path: Path, *, clock: Clock) -> float:
    """When a file that was waited for came, on the monotonic clock; at most SEEN_AFTER_S_MAX ago."""
    try:
        age_s = clock.wall_s() - path.stat().st_mtime
    except OSError:
        age_s = 0.0
    return clock.monotonic_s() - min(SEEN_AFTER_S_MAX, max(0.0, age_s))


def read_config(path: Path) -> dict[str, Any]:
    """The manifest's config. Raises NotFound, InvalidField."""
    try:
        doc = parse(path.read_bytes(), where="config")
    except OSError as error:
        raise NotFound("config", str(path), f"write the manifest's config ({error})") from None
    if not isinstance(doc, dict):
        raise InvalidField("config", doc, "write a JSON object")
    for name, default in (("max_model_len", None), ("vocab_size", 512), ("block_size", 16)):
        value = doc.setdefault(name, default)
        if type(value) is not int or not 1 <= value <= 2**31:
            raise InvalidField(f"config.{name}", value, "use a whole number of at least 1")
    return doc


def read_tokenizer(path: Path | None) -> None:
    """Check that the artifact's tokenizer is the one this engine has: bytes plus 3."""
    if path is None:
        return
    try:
        doc = parse(path.read_bytes(), where="tokenizer")
    except OSError as error:
        raise NotFound("tokenizer", str(path), f"give the artifact's tokenizer ({error})") from None
    if not isinstance(doc, dict) or doc.get("type") != "bytes" or doc.get("offset") != 3:
        raise InvalidField("tokenizer", str(path), 'use {"type": "bytes", "offset": 3}')


async def modelled(
    log: StartupLog, clock: Clock, s: ModelledSettings, name: SegmentName, *, detail: str = ""
) -> None:
    """Sleep through one modelled segment, if this start has it."""
    seconds = s.segments.get(name)
    if seconds is None or (s.mode is StartMode.EAGER and name in _GRAPHS):
        return
    key: dict[str, str] = {}
    shapes: tuple[int, ...] = ()
    begin_s = log.done_s  # what lies between two segments prepares the later one
    if name is SegmentName.COMPILE:
        key, shapes = compile_key(s, read_config(s.config)), captured_shapes(s)
        missing = compile_miss(s.compile_cache, key, shapes)
        detail = f"cache=miss:{missing}" if missing else "cache=hit"
        if not missing:
            seconds = _of_a_hit(s, seconds)
    with log.segment(name, modelled=True, detail=detail, since_s=begin_s):
        if s.stall_in is name:
            LOG.warning("stalled in %s as asked (--stall-in)", name)
            await asyncio.Event().wait()
        await clock.sleep(seconds)
        if key and s.compile_cache is not None and "miss" in detail:
            keep_compiled(s.compile_cache, key, shapes)


def _of_a_hit(s: ModelledSettings, compile_s: float) -> float:
    if s.mode is StartMode.AOT:
        return compile_s * AOT_HIT_FACTOR
    return compile_s * CACHE_HIT_FACTOR if s.compile_hit_s is None else s.compile_hit_s
