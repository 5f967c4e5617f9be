"""`readyplane up`: the main job, end to end, on this machine.

Owns the course of a run: start the stack, wait for a first pair, drive traffic, watch, stop, sum up.
Exit codes: 0 well, 1 the run failed (or the self-check of `--quick` did), 2 bad arguments.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from readyplane.core.errors import InvalidField, ReadyplaneError
from readyplane.core.work import Slo
from readyplane.kit.clock import Clock, SystemClock
from readyplane_lab.up.observe import Observer, Seen, until_ready
from readyplane_lab.up.options import UpOptions
from readyplane_lab.up.pids import carriers
from readyplane_lab.up.processes import write_atomically
from readyplane_lab.up.serving import FIRST_PAIR_WITHIN_S
from readyplane_lab.up.stack import Stack, StartInterrupted, running_stack
from readyplane_lab.up.summary import Ended, print_summary, report, verdict
from readyplane_lab.up.terminal import Terminal
from readyplane_lab.up.traffic import Tally, Traffic
from readyplane_lab.workload.conversation import Wave, conversation
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.trace import read_trace

QUICK_TRAFFIC_S = 35.0
QUICK_BURST_S = 22.0
QUICK_BURST_FACTOR = 6.0
QUICK_OSL_MAX = 300
QUICK_DRAIN_WITHIN_S = 45.0
REAL_LENGTHS = 0.25
"""Prompts and answers of the built-in workload on a real engine, over those published."""
REAL_OSL_MAX = 128
PIPED_COLUMNS = 140


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests and a sentence that says what they are."""

    text: str
    requests: Iterable[WorkloadRequest]


@dataclass(slots=True)
class _Run:
    """State of one run that outlives its stack."""

    tally: Tally
    seen: Seen
    worker_seconds: dict[str, float]
    restarts: dict[str, int]
    run_id: str = ""


def main(options: UpOptions) -> int:
    """Run until the end of the traffic, Ctrl-C or a failure; returns the exit code."""
    import uvloop

    console, complaints = _consoles()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        workload = make_workload(options)
        return uvloop.run(_up(options, workload, console, SystemClock()))
    except InvalidField as error:
        complaints.print(f"[red]error[/red] {error}", highlight=False, soft_wrap=True)
        return 2
    except ReadyplaneError as error:
        complaints.print(f"[red]error[/red] {error}", highlight=False, soft_wrap=True)
        return 1


def _consoles() -> tuple[Console, Console]:
    """For what was asked, and for errors; piped output is wide enough for one line a second."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_COLUMNS
    return Console(width=width), Console(width=width, stderr=True)


def make_workload(options: UpOptions) -> Workload:
    """Read or draw the workload; nothing has been started when this refuses.

    Raises:
        InvalidField: a trace that cannot be read, or a self-check without traffic.
    """
    if options.quick and not options.load:
        raise InvalidField("--quick", True, "leave out --no-load: the self-check needs traffic")
    if not options.load:
        return Workload("no traffic (--no-load)", ())
    if options.trace is not None:
        trace = read_trace(options.trace, seed=options.seed)
        requests = _until(trace.requests, options)
        note = f"; {trace.note}" if trace.note else ""
        speed = f" at {options.speed:g} times its speed" if options.speed != 1 else ""
        text = f"trace {trace.name} ({len(trace.requests)} requests){speed}{note}"
        if options.quick:
            text += f", its first {QUICK_TRAFFIC_S:.0f} s"
        return Workload(text, requests)
    text = f"built-in conversation, mean {options.rate_rps:g} requests/s, seed {options.seed}"
    if options.quick:
        calm = 0.2 * options.rate_rps
        wave = Wave(calm, swing=0.0, bursts=((0.0, QUICK_BURST_S, QUICK_BURST_FACTOR),))
        drawn = conversation(wave, seed=options.seed, osl_max=QUICK_OSL_MAX)
        text = (
            f"built-in conversation, {QUICK_BURST_FACTOR * calm:g} requests/s for "
            f"{QUICK_BURST_S:.0f} s, then {calm:g}; outputs cut to {QUICK_OSL_MAX} tokens; "
            f"seed {options.seed}"
        )
        return Workload(text, _until(drawn, options))
    if options.engine != "modelled":
        drawn = conversation(
            Wave(options.rate_rps),
            seed=options.seed,
            isl_factor=REAL_LENGTHS,
            osl_factor=REAL_LENGTHS,
            osl_max=REAL_OSL_MAX,
        )
        text += f", as English text, lengths times {REAL_LENGTHS:g}"
        return Workload(text, _until(drawn, options))
    drawn = conversation(Wave(options.rate_rps), seed=options.seed)
    return Workload(text, _until(drawn, options))


def _until(requests: Iterable[WorkloadRequest], options: UpOptions) -> Iterator[WorkloadRequest]:
    end_s = options.duration_s or (QUICK_TRAFFIC_S if options.quick else math.inf)
    return itertools.takewhile(lambda r: r.at_s / options.speed <= end_s, requests)


async def _up(options: UpOptions, workload: Workload, console: Console, clock: Clock) -> int:
    terminal = Terminal(console, plain=options.plain)
    stop = asyncio.Event()
    _on_signals(stop, asyncio.current_task(), terminal.say)
    began_s = clock.monotonic_s()
    run = _Run(Tally(), Seen(), {}, {})
    failure = ""
    try:
        async with running_stack(options, clock=clock, say=terminal.say, stop=stop) as stack:
            run.run_id = stack.table.run_id
            failure = await _course(stack, workload, run, terminal, stop, clock)
            terminal.close()
    except StartInterrupted:
        terminal.say("interrupted while starting")
    except asyncio.CancelledError:
        failure = "interrupted before the end"
    finally:
        terminal.close()
    left = tuple(f"pid {pid}" for pid, _ in carriers({run.run_id})) if run.run_id else ()
    first_s = run.tally.first_answer_s
    ended = Ended(
        left,
        run.worker_seconds,
        run.restarts,
        clock.monotonic_s() - began_s,
        None if first_s is None else first_s - began_s,
    )
    print_summary(console, run.seen, run.tally, ended, workload=workload.text)
    conditions = verdict(run.seen, run.tally, ended) if options.quick else []
    for condition in conditions:
        mark = "[green]yes[/green]" if condition.holds else "[red]no [/red]"
        console.print(f"{mark} {condition.name}: {condition.found}", highlight=False)
    if options.report_file is not None:
        document = report(run.seen, run.tally, ended, conditions, workload=workload.text)
        write_atomically(options.report_file, json.dumps(document, indent=1))
    if failure:
        console.print(f"[red]error[/red] {failure}", highlight=False, soft_wrap=True)
    good = not failure and not left and all(c.holds for c in conditions)
    return 0 if good else 1


async def _course(
    stack: Stack,
    workload: Workload,
    run: _Run,
    terminal: Terminal,
    stop: asyncio.Event,
    clock: Clock,
) -> str:
    """From a started stack to its orderly end; returns why it failed, empty if it did not."""
    book = stack.book
    async with Observer(
        book.planner_http, book.token, book.model, stack.actuator, clock=clock
    ) as observer:
        run.seen = observer.seen
        watching = asyncio.create_task(observer.run())
        try:
            failure = await _drive(stack, workload, run, observer, terminal, stop, clock)
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await observer.look()
            run.worker_seconds = stack.actuator.worker_seconds()
            run.restarts = stack.services.restarts
    return failure


async def _drive(
    stack: Stack,
    workload: Workload,
    run: _Run,
    observer: Observer,
    terminal: Terminal,
    stop: asyncio.Event,
    clock: Clock,
) -> str:
    book = stack.book
    terminal.say(f"page:    {stack.page_url}")
    terminal.say(f"gateway: {book.gateway_http}/v1 (OpenAI-compatible, model {book.model!r})")
    terminal.say("waiting for the first prefill and decode worker to pass the gate")
    within_s = FIRST_PAIR_WITHIN_S[stack.options.engine]
    ready = asyncio.create_task(until_ready(observer, within_s=within_s, clock=clock))
    await _first_of(ready, stop, stack.failed)
    if stack.failed.done():
        ready.cancel()
        return stack.failed.result()
    if stop.is_set():
        ready.cancel()
        return ""
    if not ready.result():
        reasons = "; ".join(f"{w}: {r}" for w, r in observer.seen.start_failures().items())
        return f"no pair of workers within {within_s:.0f} s ({reasons or 'see the logs'})"
    terminal.say("a first pair is routable")
    if not stack.options.load:
        terminal.say("no traffic is driven; press Ctrl-C to stop")
    wanted = stack.serving.policy["slo"]
    traffic = Traffic(
        book.gateway_http,
        book.model,
        slo=Slo(float(wanted["ttft_s"]), float(wanted["tpot_s"])),
        clock=clock,
        speed=stack.options.speed,
        body=stack.serving.body,
    )
    run.tally = traffic.tally
    began_s = clock.monotonic_s()
    driving = asyncio.create_task(_traffic(traffic, workload, stack, observer, stop, clock))
    ending = asyncio.create_task(_ending(stack, traffic, observer, stop))
    try:
        while not (driving.done() or stack.failed.done()):
            terminal.show(observer.seen, run.tally, at_s=clock.monotonic_s() - began_s)
            await asyncio.wait({driving}, timeout=0.5)
        if stop.is_set():
            await ending
    finally:
        ending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ending
        if not driving.done():
            driving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await driving
    return stack.failed.result() if stack.failed.done() else driving.result()


async def _ending(stack: Stack, traffic: Traffic, observer: Observer, stop: asyncio.Event) -> None:
    """Once the end is asked for: no request is sent and no worker ordered any more, at once.

    Open requests take their time; a planner that saw them to their end would grow the fleet.
    """
    await stop.wait()
    traffic.stop()
    stack.actuator.take_no_more()
    await observer.look()  # the last word of the planner, for the summary
    await stack.end_ordering()


async def _traffic(
    traffic: Traffic,
    workload: Workload,
    stack: Stack,
    observer: Observer,
    stop: asyncio.Event,
    clock: Clock,
) -> str:
    if not stack.options.load:
        await stop.wait()
        return ""
    await traffic.run(workload.requests)
    if not stack.options.quick:
        return ""
    deadline_s = clock.monotonic_s() + QUICK_DRAIN_WITHIN_S
    while not (observer.seen.drained() or stop.is_set()):
        if clock.monotonic_s() > deadline_s:
            return f"no drain finished within {QUICK_DRAIN_WITHIN_S:.0f} s after the traffic"
        await asyncio.sleep(0.25)
    return ""


async def _first_of(
    task: asyncio.Task[bool], stop: asyncio.Event, failed: asyncio.Future[str]
) -> None:
    stopping = asyncio.create_task(stop.wait())
    waited: set[asyncio.Future[Any]] = {task, stopping, failed}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()


def _on_signals(
    stop: asyncio.Event, task: asyncio.Task[int] | None, say: Callable[[str], None]
) -> None:
    """First signal: end in order. Second: end at once, still leaving nothing behind."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set() and task is not None:
            say("ending at once")
            task.cancel()
        elif not stop.is_set():
            say(
                "ending: nothing is ordered any more and open requests are finished;"
                " Ctrl-C again ends at once"
            )
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


__all__ = ["UpOptions", "main", "make_workload"]
