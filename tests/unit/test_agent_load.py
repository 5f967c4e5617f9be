"""An engine that hangs holds up no renewal, and a late answer is as old as its question."""

import asyncio

import pytest

from readyplane.core.errors import Unavailable
from readyplane.core.worker import Lease, LoadReport, Role, WorkerOffer
from readyplane.kit.clock import SystemClock
from readyplane.ports import Renewal, RenewalAnswer
from readyplane_agent.engines.attached import AttachedEngine
from readyplane_agent.engines.modelled.adapter import ModelledEngine
from readyplane_agent.engines.openai import OpenAiEngine
from readyplane_agent.kv_events import KvForwarder
from readyplane_agent.load import LoadReader
from readyplane_agent.loop import News, Session
from tests.unit.agent_twins import TwinEngine, TwinRouter

TTL_S = 0.8


class HangingEngine(TwinEngine):
    """Answers while `goes`."""

    def __init__(self) -> None:
        super().__init__()
        self.goes = asyncio.Event()
        self.reads = 0

    async def load_report(self) -> LoadReport:
        self.reads += 1
        await self.goes.wait()
        return LoadReport(running=self.reads, iterations_total=7)


async def test_without_an_answer_in_time_what_is_known_is_told_with_its_age() -> None:
    engine, clock = HangingEngine(), SystemClock()
    reader = LoadReader(engine, clock)
    began_s = clock.monotonic_s()
    assert await reader.report(TTL_S) == LoadReport()  # not known, and not zero
    assert clock.monotonic_s() - began_s < TTL_S / 4
    engine.goes.set()
    assert await reader.report(TTL_S) == LoadReport(running=1, iterations_total=7)
    engine.goes.clear()
    await reader.report(TTL_S)
    old = await reader.report(TTL_S)
    assert (old.running, old.iterations_total) == (1, 7)
    assert 0.09 <= old.age_s < 2.0
    assert engine.reads == 2  # one question at a time, however long it takes
    engine.goes.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (await reader.report(TTL_S)).age_s < old.age_s
    assert not reader.asking


class AnswersLate(TwinRouter):
    """Whatever it says was asked for `age_s` ago."""

    age_s = 0.0

    async def renew(self, renewal: Renewal) -> RenewalAnswer:
        self.renewals.append(renewal)
        return RenewalAnswer(Lease("w1", "i1", 1, 8.0), age_s=self.age_s)


async def test_a_late_answer_is_contact_when_it_was_asked_for() -> None:
    async def news() -> News:
        return News()

    router, clock = AnswersLate(), SystemClock()
    session = Session(
        router,  # type: ignore[arg-type]
        clock=clock,
        offer=lambda: WorkerOffer("w1", "i1", Role.PREFILL, "m", "h200"),
        news=news,
        kv=KvForwarder(),
        on_directive=lambda _: None,
        on_regranted=lambda _: None,
        random=lambda: 0.5,
    )
    await session.register(limit_s=1.0)
    granted_s = session.contact_s
    assert granted_s is not None
    router.age_s = 5.0
    await session.renew()
    assert session.contact_s == granted_s  # never taken back
    session.contact_s = clock.monotonic_s() - 60.0
    await session.renew()
    assert session.contact_s == pytest.approx(clock.monotonic_s() - 5.0, abs=0.5)
    await session.renew()
    assert not router.renewals[-1].quiet  # an old answer is no reason to stay quiet


async def test_an_engine_that_is_frozen_is_as_old_as_its_last_answer_however_often_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A question that runs into its bound makes the last reading no younger."""
    frozen = asyncio.Event()

    async def page(self: OpenAiEngine, target: str, *, timeout_s: float = 10.0) -> bytes:
        del self, target, timeout_s
        if frozen.is_set():
            await asyncio.sleep(0.2)
            raise Unavailable("no answer in time", "look at it")
        return b"vllm:num_requests_running 0\n"

    monkeypatch.setattr(OpenAiEngine, "get", page)
    clock = SystemClock()
    modelled = ModelledEngine(clock)
    modelled._client = OpenAiEngine("http://127.0.0.1:9", model="m")
    attached = AttachedEngine("http://127.0.0.1:9", model="m", profile="h200", clock=clock)
    for engine in (modelled, attached):
        frozen.clear()
        reader = LoadReader(engine, clock)
        assert (await reader.report(TTL_S)).age_s == 0.0
        began_s = clock.monotonic_s()
        frozen.set()
        while (now_s := clock.monotonic_s()) < began_s + 0.9:
            old = await reader.report(TTL_S)
            assert old.running == 0
            grown_s = now_s - began_s - 0.1  # each takes its own look at the clock
            assert old.age_s >= grown_s, "it grows with the time, over several questions"
