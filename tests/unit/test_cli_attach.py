"""`readyplane attach`: what it asks of the agent, what it tells of the gate, and how it ends."""

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import InvalidField
from readyplane.core.gate_checks import NOT_APPLICABLE
from readyplane.core.worker import CheckResult, Fleet, Role, WorkerState
from readyplane_agent.settings import parse
from readyplane_lab.cli import attached
from readyplane_lab.cli.where import Where, run
from tests.unit.cli_world import (
    CLUSTER,
    FakeRouter,
    Terminal,
    clean_environment,
    fleet,
    stand_in,
    worker,
)

URL = "http://127.0.0.1:8123"
ADMITTED = (
    CheckResult("canary", passed=True, evidence={"eos_ok": True}),
    CheckResult(
        "tensor_checksums", passed=True, evidence={NOT_APPLICABLE: "x"}, reason="nobody saw it"
    ),
)


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    monkeypatch.setattr(attached, "POLL_S", 0.02)
    return Terminal(capfd)


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> FakeRouter:
    made = FakeRouter(fleet(worker("d-1-bbbb", role=Role.DECODE)))
    stand_in(monkeypatch, "RouterClient", made)

    async def models(_self: Any) -> list[dict[str, Any]]:
        return [{"id": "demo", "max_model_len": 8192}]

    monkeypatch.setattr("readyplane_agent.engines.openai.OpenAiEngine.models", models)
    return made


@dataclass
class Started:
    """What the agent's stand-in was given, and where it writes."""

    flags: list[Mapping[str, str]] = field(default_factory=list)
    log: Path = Path("/nonexistent")
    interrupted: bool = False


def interrupt_once_listening(started: Started) -> None:
    """Ctrl-C, as soon as the stand-in would take the signal that follows from it."""
    if not started.interrupted and started.log.exists() and started.log.read_text():
        started.interrupted = True
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Started]:
    """Puts a small program in the agent's place; returns the flags that it was started with."""

    def put(program: str) -> Started:
        started = Started()

        async def start(
            _where: Where, _url: str, flags: Mapping[str, str], folder: Path
        ) -> asyncio.subprocess.Process:
            started.flags.append(dict(flags))
            started.log = folder / "agent.log"
            with started.log.open("wb") as log:
                return await asyncio.create_subprocess_exec(
                    sys.executable, "-c", textwrap.dedent(program), stdout=log, stderr=log
                )

        monkeypatch.setattr(attached, "start_agent", start)
        return started

    return put


def _attach(cli: Terminal, *more: str) -> Any:
    argv = ("attach", URL, "--role", "decode", "--worker-id", "mine", *more, *CLUSTER)
    return cli(*argv)


LEAVES_ON_SIGTERM = """
    import signal, sys
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("listening", flush=True)
    while True:
        signal.pause()
"""


def _becomes(router: FakeRouter, state: WorkerState, **changes: Any) -> None:
    found = worker("mine", state, Role.DECODE, **changes)
    router.now = Fleet(version=9, workers={**router.now.workers, "mine": found})


def test_an_admitted_engine_is_shown_and_ctrl_c_drains_it(
    cli: Terminal, router: FakeRouter, agent: Callable[[str], Started]
) -> None:
    started = agent(LEAVES_ON_SIGTERM)

    def look(number: int) -> None:
        if number == 5:
            _becomes(router, WorkerState.READY, checks=ADMITTED)
        if number > 10:
            interrupt_once_listening(started)

    router.on_look = look
    said = _attach(cli)
    assert said.code == 0, said.err
    assert started.flags == [
        {
            "role": "decode",
            "model": "demo",
            "worker-id": "mine",
            "worker-class": "h200-slow10",
            "profile": "",
            "manifest": "",
            "node": "local",
            "drain-deadline-s": "60.0",
        }
    ]
    assert "weight_transfer" in said.out and "admitted: mine is routable" in said.out
    canary, checksums = (
        next(line for line in said.out.splitlines() if line.strip().startswith(name))
        for name in ("canary  ", "tensor_checksums")
    )
    assert "1.00 s" in canary and "skipped" in checksums and "nobody saw it" in checksums
    assert said.out.rstrip().endswith("mine has left; the engine goes on")


def test_ctrl_c_before_the_gate_is_an_interruption(
    cli: Terminal, router: FakeRouter, agent: Callable[[str], Started]
) -> None:
    started = agent(LEAVES_ON_SIGTERM)
    router.on_look = lambda _: interrupt_once_listening(started)
    assert _attach(cli).code == 130


def test_what_the_gate_refused_is_told(
    cli: Terminal, router: FakeRouter, agent: Callable[[str], Started]
) -> None:
    agent("import time; print('gate said no'); time.sleep(0.6); raise SystemExit(3)")
    bad = CheckResult("canary", passed=False, reason="two answers to one question")
    router.on_look = lambda n: (
        _becomes(router, WorkerState.PROVISIONED, checks=(bad, *ADMITTED[1:])) if n == 3 else None
    )
    said = _attach(cli)
    assert said.code == 1
    assert (
        said.err
        == "error worker mine refused: canary: two answers to one question; see the log above\n"
    )
    assert "refused" in said.out and "gate said no" in said.out


def test_an_agent_that_cannot_start(
    cli: Terminal, router: FakeRouter, agent: Callable[[str], Started]
) -> None:
    agent("import sys; print('readyplane_agent: profile is not known'); sys.exit(2)")
    said = _attach(cli)
    assert said.code == 2 and "profile is not known" in said.err


def test_a_worker_that_somebody_drained(
    cli: Terminal, router: FakeRouter, agent: Callable[[str], Started]
) -> None:
    agent("import time; time.sleep(0.6)")
    router.on_look = lambda n: (
        _becomes(router, WorkerState.DRAINING, drain_reason="kernel update") if n == 3 else None
    )
    said = _attach(cli)
    assert said.code == 0 and "was drained (kernel update)" in said.out


def test_the_model_must_be_the_engines(cli: Terminal, router: FakeRouter) -> None:
    said = _attach(cli, "--model", "other")
    assert said.code == 2 and "the engine serves demo" in said.err


def test_a_living_workers_id_is_refused(cli: Terminal, router: FakeRouter) -> None:
    said = cli("attach", URL, "--role", "decode", "--worker-id", "d-1-bbbb", *CLUSTER)
    assert said.code == 2 and "a living worker has it" in said.err


@pytest.mark.parametrize(
    ("known", "flags", "expected"),
    [
        (fleet(worker()), {"role": "prefill", "model": "demo"}, "h200-slow10"),
        (fleet(worker()), {"role": "decode", "model": "demo"}, "h200-slow10"),
        (fleet(worker()), {"role": "decode", "model": "other"}, None),
        (fleet(), {"role": "decode", "model": "demo"}, None),
        (
            fleet(worker(), worker("p-2", offer=replace(worker("p-2").offer, worker_class="b"))),
            {"role": "prefill", "model": "demo"},
            None,
        ),
    ],
)
def test_the_class_is_that_of_its_like(
    known: Fleet, flags: dict[str, str], expected: str | None
) -> None:
    if expected is not None:
        assert attached.class_of(known, {**flags, "profile": ""}) == expected
        return
    with pytest.raises(InvalidField, match="--worker-class"):
        attached.class_of(known, {**flags, "profile": ""})


def test_the_agent_understands_what_it_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The real argument parser of the agent takes the argv, and the token is not among it."""
    seen: list[Any] = []

    async def create(*argv: str, **how: Any) -> None:
        seen.append((argv, how))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create)
    monkeypatch.setenv("READYPLANE_ENGINE", "vllm")
    flags = {
        "role": "decode",
        "model": "demo",
        "worker-id": "mine",
        "worker-class": "h200-slow10",
        "profile": "",
        "manifest": "",
        "node": "local",
        "drain-deadline-s": "60.0",
    }
    where = Where(router="r:1", registry="g:2", token="secret")
    run(attached.start_agent(where, URL, flags, tmp_path))
    (argv, how), *_ = seen
    settings = parse(argv[3:], how["env"])
    assert (settings.engine, settings.engine_url, settings.role) == ("attached", URL, "decode")
    assert (settings.router, settings.registry, settings.token) == ("r:1", "g:2", "secret")
    assert settings.drain_deadline_s == 60.0 and "secret" not in " ".join(argv)
