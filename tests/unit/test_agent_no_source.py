"""A load that has nobody to read from says why, waits for as long as it may, and not in vain."""

import asyncio
import logging
import time

import pytest

from readyplane.core.errors import Unavailable
from readyplane.ports import Source
from readyplane_agent import loader as loader_module
from readyplane_agent.no_source import REASON_CHARS_MAX, REASONS_MAX, bounded, hopeless
from readyplane_agent.settings import parse
from readyplane_agent.source_use import USES_MAX, Fetched, SourceUse
from readyplane_agent.trace import StartTrace
from tests.unit.agent_twins import TwinRegistry, artifact, serving, source
from tests.unit.test_agent_loader import make, ranked, same

CUT = "storage:r: its bytes are not whole: model-0: 6000000 bytes are stored, not 10486344"
AWAY = "storage:r: s3://blobs/pre cannot be asked: refused"
SIBLING = source("http://x/y", "peer:w2", worker_id="w2", partial=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "ROUND_WAIT_S", 0.02)
    monkeypatch.setattr(loader_module, "HOPELESS_S", 0.2)


def told(trace: StartTrace) -> list[str]:
    return [s.detail for s in trace.segments() if s.detail.startswith("waiting for a source")]


async def until_told(trace: StartTrace, text: str) -> None:
    async with asyncio.timeout(2.0):
        while not any(text in each for each in told(trace)):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("sources", "wrong", "excluded", "vain"),
    [
        ([], set(), [], False),
        ([], set(), [CUT], True),
        ([], set(), [AWAY], False),
        ([], set(), ["storage:r: this registry serves no bytes"], False),
        ([], {"rack:1"}, ["storage:r: this registry serves no bytes"], True),
        ([], {"rack:1"}, [AWAY], False),
        ([], {"storage:r"}, ["storage:r: it gave wrong bytes; offered again in 50 s"], True),
        ([], {"rack:1"}, ["no plan: the registry does not answer"], False),
        ([], set(), [CUT, "peers: not known now, Redis does not answer"], False),
        ([], set(), [CUT, "peer:w1: it is the target itself"], True),
        ([], set(), [CUT, "peer:w3: its own requests take 99% of their target"], False),
        ([], set(), [CUT, "cache:n2:abc: its files lie on node n2, the target is elsewhere"], True),
        ([SIBLING], set(), [CUT], True),
        ([source("http://x", "peer:w3", worker_id="w3")], set(), [CUT], False),
        ([source("http://x", "rack:1")], set(), [CUT], False),
        ([source("http://x", "rack:1")], {"rack:1"}, [CUT], True),
    ],
)
def test_b132_when_waiting_is_vain(
    sources: list[Source], wrong: set[str], excluded: list[str], vain: bool
) -> None:
    assert hopeless(sources, wrong=wrong, excluded=excluded) is vain


async def test_b132_bytes_that_are_not_whole_end_the_load_with_what_is_wrong(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Within the time for hopeless loads, far below the limit; and it is said while it waits."""
    art, registry = artifact(), TwinRegistry()
    registry.excluded = (CUT,)
    load, arena, trace = make(art, registry)
    begun_s = time.monotonic()
    running = asyncio.create_task(load.run([], excluded=[CUT]))
    await until_told(trace, "6000000 bytes are stored, not 10486344")
    with pytest.raises(Unavailable, match="6000000 bytes are stored, not 10486344") as caught:
        await running
    assert "waiting does not help" in str(caught.value)
    assert 0.2 <= time.monotonic() - begun_s < 5.0
    said = [r for r in caplog.records if "6000000 bytes" in r.getMessage()]
    assert len(said) == 1 and said[0].levelno == logging.WARNING, "said once, not every round"
    arena.close()


async def test_a_store_that_cannot_be_asked_is_waited_for_and_named() -> None:
    """Beyond any count of tries; when it comes back the load goes on."""
    art, registry = artifact(), TwinRegistry()
    registry.excluded = (AWAY,)
    load, arena, trace = make(art, registry)
    running = asyncio.create_task(load.run([]))
    await until_told(trace, "s3://blobs/pre cannot be asked")
    await asyncio.sleep(0.5)
    assert not running.done()
    with serving(art.files) as store:
        registry.excluded, registry.sources = (), [source(store.url)]
        await asyncio.wait_for(running, 10)
    assert same(arena, art)
    assert all(s.end_s is not None for s in trace.segments()), "it waits for nothing any more"
    arena.close()


async def test_the_limit_of_the_load_ends_the_waiting_and_the_reason_is_kept() -> None:
    art, registry = artifact(), TwinRegistry()
    registry.excluded = (AWAY,)
    load, arena, _ = make(art, registry, limit_s=0.4)
    with pytest.raises(Unavailable, match="s3://blobs/pre cannot be asked"):
        await asyncio.wait_for(load.run(ranked(source("http://127.0.0.1:9/x"))), 5)
    arena.close()


async def test_a_file_that_a_store_has_not_ends_the_load() -> None:
    """404 of the only store is a fault that lasts; it is not asked for half an hour."""
    art, registry = artifact(), TwinRegistry()
    load, arena, _ = make(art, registry)
    with serving(art.files, lambda *_: "missing") as store:
        registry.sources = [source(store.url)]
        with pytest.raises(Unavailable, match="answered 404"):
            await asyncio.wait_for(load.run(ranked(*registry.sources)), 10)
    arena.close()


async def test_a_long_wait_keeps_a_bounded_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "ROUND_WAIT_MAX_S", 0.02)
    monkeypatch.setattr("readyplane_agent.reading.VAIN_SEGMENTS_MAX", 3)
    monkeypatch.setattr("readyplane_agent.source_use.USES_MAX", 4)
    art, registry = artifact(), TwinRegistry()
    registry.sources = [source("http://127.0.0.1:9/x")]
    load, arena, trace = make(art, registry, limit_s=1.0)
    with pytest.raises(Unavailable, match="could not be fetched"):
        await load.run(ranked(*registry.sources))
    assert len(load.fetched.uses) == 4 and registry.plans > 6
    assert len(trace.segments()) <= 3 + 1
    arena.close()


def test_reasons_are_bounded() -> None:
    found = bounded([f"{n}: {'x' * 1000}" for n in range(50)] * 2)
    assert len(found) == REASONS_MAX and {len(text) for text in found} == {REASON_CHARS_MAX}
    fetched = Fetched()
    given = SourceUse("s", source("http://x").tier, bytes_read=1)
    fetched.add(given)
    assert fetched.uses == [given] and USES_MAX > 1


def test_help_names_the_cache_folder_and_what_ends_a_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse(["--help"], {})
    text = " ".join(capsys.readouterr().out.split())
    assert "(tier L2) (default: WORK_DIR/../weight-cache)" in text
    assert "waiting for a source included" in text
