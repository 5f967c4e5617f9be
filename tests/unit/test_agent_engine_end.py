"""A start that fails because its engine went: the engine's own end is the reason that is told."""

import asyncio

import pytest

from readyplane.core.errors import IdentityMismatch, ReadyplaneError, Refused, Unavailable
from readyplane_agent.engine_end import END_AWAITED_S_MAX, end_text, explained
from tests.unit.agent_twins import TwinEngine


class Steps:
    """Time that passes only by sleeping; at `ends_s` the engine has ended."""

    def __init__(self, engine: TwinEngine, *, ends_s: float) -> None:
        self.now_s, self._engine, self._ends_s = 100.0, engine, 100.0 + ends_s

    def monotonic_s(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now_s += seconds
        if self.now_s >= self._ends_s:
            self._engine.returncode = -9


CLOSED = Unavailable("http://127.0.0.1:1/v1/completions: connection refused", "look at it")
GATE = Refused("admission", ["canary: no answer"])


@pytest.mark.parametrize("error", [CLOSED, GATE, ConnectionResetError("reset")])
async def test_the_end_comes_after_the_error_that_it_causes(error: ReadyplaneError) -> None:
    engine = TwinEngine()
    clock = Steps(engine, ends_s=1.2)
    told = await explained(error, engine, clock)
    assert "the engine ended with -9 (SIGKILL" in told
    assert str(error) in told
    assert clock.now_s - 100.0 == pytest.approx(1.2, abs=0.1)


async def test_an_end_that_was_there_before_the_error_is_told_with_it() -> None:
    engine = TwinEngine()
    engine.returncode = 4
    clock = Steps(engine, ends_s=3600.0)
    told = await explained(CLOSED, engine, clock)
    assert told.startswith("the engine ended with 4;")
    assert str(CLOSED) in told
    assert clock.now_s == 100.0


async def test_an_engine_that_lives_on_leaves_the_error_as_it_is() -> None:
    engine = TwinEngine()
    clock = Steps(engine, ends_s=3600.0)
    assert await explained(CLOSED, engine, clock) == str(CLOSED)
    assert clock.now_s - 100.0 == pytest.approx(END_AWAITED_S_MAX, abs=0.1)
    assert end_text(engine) == ""


async def test_what_no_end_of_an_engine_explains_is_told_at_once() -> None:
    engine = TwinEngine()
    clock = Steps(engine, ends_s=0.0)
    other = IdentityMismatch("the tokenizer", ["it is another"], "publish it again")
    assert await explained(other, engine, clock) == str(other)
    engine.pid = 0  # nothing was started yet: the registry was away, say
    assert await explained(CLOSED, engine, clock) == str(CLOSED)
    engine.pid, engine.returncode = 4242, 3
    died = Unavailable("the engine ended with 3: no memory", "see its log")
    assert await explained(died, engine, clock) == str(died)
    assert clock.now_s == 100.0
