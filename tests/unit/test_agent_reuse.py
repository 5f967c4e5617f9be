"""What a start that failed says of what it took over, and how an engine's last words are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from readyplane.core.startup import Segment, SegmentName
from readyplane_agent.engines.child import log_end
from readyplane_agent.reuse import Reuse
from readyplane_agent.trace import StartTrace
from readyplane_lab.simulator.loop import VirtualClock, VirtualLoop, run_virtual

IMPORTED = (Segment(SegmentName.RUNTIME_IMPORT, 0.0, 1.0),)
COMPILES = (*IMPORTED, Segment(SegmentName.COMPILE, 1.0, None))


@pytest.mark.parametrize(
    ("segments", "returncode", "stopped", "withdrawn"),
    [
        (COMPILES, None, False, ["kv", "code"]),  # it hangs in the code
        (COMPILES, -11, False, ["kv", "code"]),  # it crashed
        (IMPORTED, 1, False, ["kv", "code"]),  # it gave up: what on is not known
        (IMPORTED, None, False, ["kv"]),  # it hangs, and has not come to the code
        (COMPILES, -9, False, ["kv"]),  # killed: by hand, or for its memory
        (COMPILES, -15, False, ["kv"]),
        (COMPILES, None, True, []),  # held still by a signal
        (IMPORTED, None, True, []),
    ],
)
async def test_code_is_withdrawn_only_by_a_start_that_may_have_failed_on_it(
    segments: tuple[Segment, ...], returncode: int | None, stopped: bool, withdrawn: list[str]
) -> None:
    told: list[str] = []

    def part(name: str) -> Any:
        async def failed() -> None:
            told.append(name)

        return SimpleNamespace(failed=failed)

    reuse = cast("Reuse", SimpleNamespace(_kv=part("kv"), _compiled=part("code")))
    await Reuse.failed(reuse, segments, returncode=returncode, stopped=stopped)
    assert told == withdrawn


def test_a_log_without_words_is_not_quoted() -> None:
    assert log_end("out of memory") == "its log ends: out of memory"
    assert log_end("") == log_end(" \n") == "it has logged nothing"


@pytest.mark.parametrize("found", [True, False])
def test_finding_the_key_of_a_start_that_compiles_nothing_is_explained(found: bool) -> None:
    """Its key is looked for only for the KV size, and asks this machine's tools, which takes a while."""
    loop = VirtualLoop()
    clock = VirtualClock(loop)

    async def key_of(*_: object) -> str:
        await clock.sleep(3.0)
        if not found:
            raise OSError("no such tool")
        return "key"

    async def code(*_: object) -> None:
        return None

    async def size(spec: object, *_: object) -> tuple[object, str]:
        return spec, "KV size to be measured: nothing is published"

    async def start() -> tuple[Segment, ...]:
        parts = {
            "_compiled": SimpleNamespace(prepare=code, key_of=key_of),
            "_kv": SimpleNamespace(prepare=size),
        }
        trace = StartTrace(clock, process_start_s=clock.monotonic_s())
        spec = cast("Any", SimpleNamespace(mode="eager"))
        reuse = cast("Reuse", SimpleNamespace(**parts))
        assert await Reuse.prepare(reuse, spec, cast("Any", None), trace) is spec
        return trace.segments()

    code_s, size_s = run_virtual(start(), loop=loop)
    assert size_s.end_s == code_s.start_s + 3.0, "no time of it is nobody's"
    assert ("without a key" in size_s.detail) is not found
