"""An agent that is given a name instead of a digest finds out what it means before it asks for a lease."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from readyplane.core.errors import NotFound, ReadyplaneError, Unavailable
from readyplane_agent.__main__ import NAME_S_MAX, with_digest
from readyplane_agent.settings import AgentSettings, WrongSetting, parse

DIGEST = "sha256:" + "b" * 64
CHUNK_BYTES = 4 * 2**20


class Hours:
    def __init__(self) -> None:
        self.now_s = 50.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Names:
    """A registry that knows names; raises what it is told first."""

    def __init__(self, first: Sequence[ReadyplaneError] = ()) -> None:
        self.asked: list[str] = []
        self._first = list(first)

    async def resolve(self, reference: str) -> Any:
        self.asked.append(reference)
        if self._first:
            raise self._first.pop(0)
        if reference not in {"demo", "demo:latest"}:
            raise NotFound("artifact", reference, "publish it")
        return SimpleNamespace(digest=DIGEST, chunk_bytes=CHUNK_BYTES, size_bytes=10**9)


def settings(*more: str) -> AgentSettings:
    given = ["--worker-id=w", "--role=prefill", "--model=demo", "--router=r:1", "--registry=g:1"]
    return parse([*given, "--work-dir=/tmp/w", *more], {})


@pytest.mark.parametrize(
    ("flags", "asked"), [((), "demo"), (("--manifest=demo:latest",), "demo:latest")]
)
async def test_a_name_becomes_a_digest(flags: tuple[str, ...], asked: str) -> None:
    names = Names()
    found = await with_digest(settings(*flags), names, Hours())  # type: ignore[arg-type]
    assert (found.manifest, names.asked) == (DIGEST, [asked])


async def test_a_registry_that_is_away_is_waited_for_within_a_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Hours()
    names = Names([Unavailable("the registry is away", "wait")] * 3)
    found = await with_digest(settings(), names, clock)  # type: ignore[arg-type]
    assert found.manifest == DIGEST and 50.0 < clock.now_s < 60.0
    assert [r.message for r in caplog.records if "the registry is away" in r.message][2:], "said"
    names = Names([Unavailable("the registry is away", "wait")] * 1000)
    with pytest.raises(Unavailable):
        await with_digest(settings(), names, clock)  # type: ignore[arg-type]
    assert clock.now_s < 60.0 + NAME_S_MAX


async def test_a_name_that_means_nothing_ends_the_start_at_once() -> None:
    clock = Hours()
    with pytest.raises(NotFound, match="nonsense"):
        await with_digest(settings("--manifest=nonsense"), Names(), clock)  # type: ignore[arg-type]
    assert clock.now_s == 50.0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--staging-bytes=2097152",), r"--staging-bytes: 2097152 .*artifact, 4194304 bytes"),
        (
            ("--staging-node-bytes=8388608", "--node-processes=4"),
            r"--staging-node-bytes: 8388608 .*4 processes .* artifact 16777216 bytes",
        ),
    ],
)
async def test_no_room_for_a_chunk_is_known_before_a_lease_is_asked_for(
    flags: tuple[str, ...], told: str
) -> None:
    with pytest.raises(WrongSetting, match=told):
        await with_digest(settings(*flags), Names(), Hours())  # type: ignore[arg-type]
