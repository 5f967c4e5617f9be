"""The agent process of `readyplane attach`, and what a person sees of its way to the gate.

The engine itself is never touched: when this ends, the agent drains and leaves, and the engine
goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from readyplane.core.errors import InvalidField, ReadyplaneError, Refused, Unavailable
from readyplane_lab.cli import output
from readyplane_lab.cli.faults import ExitCode
from readyplane_lab.cli.where import TOKEN, Where, router_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from readyplane.client import RouterClient
    from readyplane.core.worker import CheckResult, Fleet, Worker

POLL_S = 0.25
ENGINE_S_MAX = 10.0
LOG_LINES = 12
AGENT_LEFT, AGENT_USAGE = 0, 2


async def attach_engine(where: Where, url: str, flags: dict[str, str]) -> int:
    """From the engine's models to the agent's end; returns the exit code of the command.

    Args:
        flags: of the agent, by their names; `model` and `worker-class` may be empty.
    """
    screen = output.console()
    async with router_of(where) as router:
        flags["model"] = await choose_model(url, flags["model"])
        fleet = await router.list_workers()
        _check_free(flags["worker-id"], fleet)
        flags["worker-class"] = flags["worker-class"] or class_of(fleet, flags)
        screen.print(
            output.cell(
                f"{flags['worker-id']}: {flags['role']} of {flags['model']}, class "
                f"{flags['worker-class']}, engine {url}"
            )
        )
        with tempfile.TemporaryDirectory(prefix="readyplane-attach-") as folder:
            agent = await start_agent(where, url, flags, Path(folder))
            follower = Follower(router, flags["worker-id"], screen)
            try:
                return await follower.follow(agent, Path(folder) / "agent.log")
            finally:
                if agent.returncode is None:
                    agent.kill()
                    await agent.wait()


async def choose_model(url: str, wanted: str) -> str:
    """The engine's model of that name, or its only one.

    Raises:
        Unavailable: no OpenAI-style engine answers there. InvalidField: another model is served.
    """
    from readyplane_agent.engines.openai import OpenAiEngine

    try:
        async with asyncio.timeout(ENGINE_S_MAX):
            served = [str(m.get("id")) for m in await OpenAiEngine(url, model="").models()]
    except TimeoutError:
        raise Unavailable(f"the engine at {url} is silent", "check that it runs") from None
    if wanted in served:
        return wanted
    if wanted or len(served) != 1:
        names = ", ".join(served) or "none at all"
        raise InvalidField("--model", wanted, f"the engine serves {names}; name one of them")
    return served[0]


def _check_free(worker_id: str, fleet: Fleet) -> None:
    if worker_id in fleet.workers:
        raise InvalidField("--worker-id", worker_id, "a living worker has it; choose another")


def class_of(fleet: Fleet, flags: Mapping[str, str]) -> str:
    """The class that the model's other workers of this role have.

    Raises:
        InvalidField: there are none, or they differ; the known classes are named.
    """
    same = [w for w in fleet.workers.values() if w.offer.model == flags["model"]]
    alike = [w for w in same if str(w.role) in {flags["role"], "both"}] or same
    classes = sorted({w.offer.worker_class for w in alike})
    if len(classes) == 1:
        return classes[0]
    if flags["profile"]:
        raise InvalidField("--worker-class", "", "name the class that the profile describes")
    from readyplane import profiles

    known = ", ".join(classes or profiles.names())
    raise InvalidField("--worker-class", "", f"say what the engine runs on: {known}")


async def start_agent(
    where: Where, url: str, flags: Mapping[str, str], folder: Path
) -> asyncio.subprocess.Process:
    """The agent, in a session of its own: Ctrl-C reaches this command, which then asks it to end."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("READYPLANE_")}
    if where.token:
        environment[TOKEN] = where.token
    argv = [sys.executable, "-m", "readyplane_agent", "--engine", "attached", "--engine-url", url]
    argv += ["--router", where.router, "--work-dir", str(folder / "work")]
    if where.registry:
        argv += ["--registry", where.registry]
    for name, value in flags.items():
        if value:
            argv += [f"--{name}", value]
    with (folder / "agent.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *argv,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


class Follower:
    """Tells what becomes of the worker, and ends the agent when it is asked to."""

    def __init__(self, router: RouterClient, worker_id: str, screen: Console) -> None:
        self._router, self._worker_id, self._screen = router, worker_id, screen
        self._seen: Worker | None = None
        self._told: set[str] = set()
        self._admitted = False
        self._stops = 0

    async def follow(self, agent: asyncio.subprocess.Process, log: Path) -> int:
        """Until the agent has ended; returns the exit code of the command.

        Raises:
            Refused: it ended before it was asked to; the reasons are listed.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, agent)
        ended = asyncio.create_task(agent.wait())
        with output.console(stderr=True).status("asking for a lease") as status:
            while not ended.done():
                await asyncio.wait({ended}, timeout=POLL_S)
                status.update(output.cell(await self._look()))
        code = ended.result()
        if self._stops:
            left = code == AGENT_LEFT
            output.say(
                f"{self._worker_id} {'has left' if left else 'was cut off'}; the engine goes on"
            )
            return ExitCode.DONE if left and self._admitted else ExitCode.INTERRUPTED
        return self._ended_by_itself(code, log)

    def _stop(self, agent: asyncio.subprocess.Process) -> None:
        self._stops += 1
        if agent.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                agent.send_signal(signal.SIGTERM if self._stops == 1 else signal.SIGKILL)

    async def _look(self) -> str:
        try:
            found = (await self._router.list_workers()).workers.get(self._worker_id)
        except ReadyplaneError as error:
            return f"the router does not answer: {error}"
        if found is None:
            return "leaving" if self._stops else "asking for a lease"
        self._seen = found
        for segment in found.progress.segments if found.progress is not None else ():
            if segment.end_s is not None and segment.name not in self._told:
                self._told.add(segment.name)
                took = output.seconds(segment.end_s - segment.start_s)
                self._screen.print(f"  {segment.name:<22}{took:>9}  {segment.detail}", markup=False)
        state = str(found.state)
        if state == "ready" and not self._admitted:
            self._admitted = True
            self._screen.print(checks_table(found))
            self._screen.print(
                f"[green]admitted[/green]: {output.cell(self._worker_id)} is routable; Ctrl-C drains it"
            )
        if state == "draining" or self._stops:
            return f"draining, {found.active} requests are finishing (Ctrl-C again ends at once)"
        if state == "ready":
            return f"serving, {found.active} requests"
        waits = (
            [s.name for s in found.progress.segments if s.end_s is None] if found.progress else []
        )
        return f"starting: {waits[-1]}" if waits else "starting"

    def _ended_by_itself(self, code: int, log: Path) -> int:
        tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
        seen = self._seen
        if seen is not None and str(seen.state) == "draining" and code == AGENT_LEFT:
            output.say(f"{self._worker_id} was drained ({seen.drain_reason}) and has left")
            return 0
        if seen is not None and any(not c.passed for c in seen.checks):
            self._screen.print(checks_table(seen))
        if tail:
            self._screen.print("end of the agent's log:", *tail, sep="\n  ", markup=False)
        reasons = [f"{c.name}: {c.reason}" for c in (seen.checks if seen else ()) if not c.passed]
        if seen is not None and seen.progress is not None and seen.progress.failure:
            reasons.append(seen.progress.failure)
        if not reasons:
            said = tail[-1] if tail else "it said nothing"
            reasons = [f"the agent ended with code {code} ({said})"]
        if code == AGENT_USAGE:
            raise InvalidField("attach", self._worker_id, "; ".join(reasons))
        raise Refused(f"worker {self._worker_id}", reasons, "see the log above")


def checks_table(worker: Worker) -> Table:
    """The gate's verdict, check by check."""
    from rich.markup import escape

    made = output.table("check of the ready gate", "verdict", "evidence")
    for check in worker.checks:
        made.add_row(
            output.cell(check.name),
            _verdict(check),
            escape(check.reason or _evidence(check.evidence)),
        )
    return made


def _verdict(check: CheckResult) -> str:
    from readyplane.core.gate_checks import NOT_APPLICABLE

    if not check.passed:
        return "[red]refused[/red]"
    return (
        "[yellow]skipped[/yellow]" if NOT_APPLICABLE in check.evidence else "[green]passed[/green]"
    )


def _evidence(evidence: Mapping[str, Any]) -> str:
    shown = []
    for name, value in evidence.items():
        text = str(value)
        if value not in ("", [], None) and name != "document":
            shown.append(f"{name} {text if len(text) <= 30 else text[:29] + '…'}")
    return ", ".join(shown[:4])
