"""`readyplane activate` and `readyplane flip`: a worker becomes what it is not yet.

Owns telling the router and waiting until it is done, with the seconds it took.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from readyplane.core.errors import InvalidField, Refused
from readyplane_lab.cli import output
from readyplane_lab.cli.flags import Json, examples, switch
from readyplane_lab.cli.where import RouterAddress, Where, find, router_of, run
from readyplane_lab.cli.workers import living, match, worker_row

if TYPE_CHECKING:
    from readyplane.client import RouterClient
    from readyplane.core.errors import Unavailable
    from readyplane.core.worker import Worker
    from readyplane.kit.clock import Clock

ACTIVATE_EXAMPLES = examples(
    "readyplane activate d-4-9f2c", "readyplane activate d-4-9f2c --wait --json"
)
FLIP_EXAMPLES = examples(
    "readyplane flip p-3-9f2c --to decode --wait",
    "readyplane flip d-1-9f2c --to prefill --reason 'a night of long prompts'",
)
STAGES = ("prefill", "decode")
EVERY_S = 0.1
SILENT_EVERY_S = 1.0
MORE_S = 30.0
ACTIVATE_S = 60.0
LOAD_S = 900.0

Told = Annotated[str, typer.Argument(metavar="WORKER", help="Its id, or a unique beginning.")]
Why = Annotated[str, typer.Option(metavar="TEXT", help="Kept with the worker.")]
Wait = Annotated[bool, switch("--wait", text="Until it serves so.")]


def activate(
    worker: Told,
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            help="The word is given for so long and no longer (60; 900 to one that has to load).",
            show_default=False,
        ),
    ] = None,
    reason: Why = "asked for by a person",
    wait: Wait = False,
    json: Json = False,
    router: RouterAddress = "",
) -> None:
    """Let a standby serve: loaded and proved already, it passes the gate and takes requests.

    One that holds a process only loads first, which takes most of a start.
    Standbys are kept by the policy (`prefill.standby`, `decode.standby`).
    --wait goes on while the router does not answer or the worker has lost its lease: the word stands.
    """

    async def tell(client: RouterClient, worker_id: str) -> Worker:
        return await client.activate(worker_id, reason=reason, deadline_s=deadline or 0.0)

    def done(now: Worker) -> bool:
        return str(now.state) == "ready"

    if deadline is not None:
        _check(deadline)
    where = find("router", router=router)
    run(_change(where, worker, tell, done, deadline, "serve", wait=wait, as_json=json))


def flip(
    worker: Told,
    to: Annotated[str, typer.Option("--to", metavar="STAGE", help="prefill or decode.")],
    deadline: Annotated[float, typer.Option(metavar="S", help="Longest drain before it.")] = 300.0,
    reason: Why = "asked for by a person",
    wait: Wait = False,
    json: Json = False,
    router: RouterAddress = "",
) -> None:
    """Let a worker serve the other stage: it drains, then proves itself for that one.

    Process, engine and weights stay; the epoch is new.
    The planner fills the pool it has left, if that needs it.
    """
    from readyplane.core.worker import Role

    _check(deadline)
    if to not in STAGES:
        raise InvalidField("--to", to, "write one of " + ", ".join(STAGES))
    role = Role(to)

    async def tell(client: RouterClient, worker_id: str) -> Worker:
        return await client.flip(worker_id, role=role, reason=reason, deadline_s=deadline)

    def done(now: Worker) -> bool:
        return str(now.state) == "ready" and now.role is role

    where = find("router", router=router)
    run(_change(where, worker, tell, done, deadline, f"serve {to}", wait=wait, as_json=json))


def _check(deadline: float) -> None:
    if not (math.isfinite(deadline) and deadline > 0):
        raise InvalidField("--deadline", deadline, "give seconds above 0")


async def _change(
    where: Where,
    given: str,
    tell: Callable[[RouterClient, str], Awaitable[Worker]],
    done: Callable[[Worker], bool],
    deadline_s: float | None,
    what: str,
    *,
    wait: bool,
    as_json: bool,
) -> None:
    from readyplane.kit.clock import SystemClock

    clock = SystemClock()
    async with router_of(where) as router:
        known = await living(router)
        worker_id = match(given, known)
        before = known[worker_id]
        if deadline_s is None:
            deadline_s = LOAD_S if _is_bare(before) else ACTIVATE_S
        watch = Watch(before, await tell(router, worker_id), done, what, clock, deadline_s + MORE_S)
        while wait and not watch.over():
            await watch.look(router, quiet=as_json)
    now, serves, took_s = watch.now, watch.serves, watch.waited_s()
    if as_json:
        told = serves if wait else None
        output.emit({"worker": worker_row(now), "done": told, "waited_s": took_s})
    elif serves and wait:
        output.say(f"{worker_id} serves as told after {took_s:.2f} s")
    elif not wait:
        output.say(f"{worker_id} is told to {what}")
    if wait and not serves:
        watch.refuse()


class Watch:
    """Waits until a worker does as it was told, for `limit_s` at most.

    A router that does not answer, and a worker that is not seen while its lease is lost, end no
    wait: the word stands until its deadline, and the worker may follow it meanwhile or under its
    next lease. Both are said on stderr.
    """

    def __init__(
        self,
        before: Worker,
        now: Worker,
        done: Callable[[Worker], bool],
        what: str,
        clock: Clock,
        limit_s: float,
    ) -> None:
        self.now, self.serves = now, done(now)
        self._before, self._done, self._what = before, done, what
        self._clock, self._limit_s = clock, limit_s
        self._began_s = clock.monotonic_s()
        self._ended, self._said, self._gone = "", "", ""
        self._silent: Unavailable | None = None
        self._away_s: float | None = None

    def waited_s(self) -> float:
        """Seconds since it was told."""
        return self._clock.monotonic_s() - self._began_s

    def over(self) -> bool:
        """Whether nothing is to be waited for any more."""
        return self.serves or bool(self._ended) or self.waited_s() >= self._limit_s

    async def look(self, router: RouterClient, *, quiet: bool) -> None:
        """Look once, after a moment; `quiet`: say nothing but that somebody is not there."""
        from readyplane.core.errors import Unavailable

        await self._clock.sleep(EVERY_S if self._silent is None else SILENT_EVERY_S)
        try:
            found = (await router.list_workers()).workers.get(self._before.worker_id)
        except Unavailable as error:
            self._silent = error
            self._say("the router does not answer, the word stands: asked again")
            return
        self._silent = None
        self._ended = why_over(self._before, self.now, found)
        if self._ended:
            self.now = self.now if found is None else found
            return
        if found is None or str(found.state) == "gone":
            self._away_s = self.waited_s() if self._away_s is None else self._away_s
            self._gone = self._gone or ("" if found is None else found.drain_reason)
            why = self._gone or "the router does not know it"
            self._say(
                f"{self._before.worker_id} is gone ({why}), and was {self.now.state} before: it may "
                "come back under its next lease and follow the word"
            )
            return
        self._away_s, self._gone = None, ""
        self.now, self.serves = found, self._done(found)
        if not (self.serves or quiet):
            self._say(step_of(found, self._what))

    def refuse(self) -> None:
        """Raises Refused: why it does not serve. Raises Unavailable: the router is silent still."""
        if self._silent is not None:
            raise self._silent
        took_s = self.waited_s()
        why = f"it is {self.now.state} {took_s:.0f} s after it was told to {self._what}"
        if self._away_s is not None:
            why = (
                f"it is gone for {took_s - self._away_s:.0f} s and did not come back "
                f"({self._gone or 'the router does not know it'}); it was {self.now.state} before"
            )
        raise Refused(
            f"change of {self._before.worker_id}",
            [self._ended or why],
            "look at it with `readyplane workers`",
        )

    def _say(self, text: str) -> None:
        """On stderr, once in a row."""
        if text != self._said:
            self._said = text
            line = f"{self.waited_s():6.1f} s  {text}, at most {self._limit_s:.0f} s"
            output.console(stderr=True).print(output.cell(line), soft_wrap=True)


def _is_bare(worker: Worker) -> bool:
    """Whether it holds a process only: what follows is a start without its imports."""
    return str(worker.holds or "") == "process"


def why_over(before: Worker, last: Worker, now: Worker | None) -> str:
    """Why nothing is to be waited for any more; empty while there is.

    Args:
        before: as it was told. last, now: the last look at it alive, and the one of now; None: the
            router does not know it, as after a lost lease.
    """
    seen = last if now is None else now
    failure = seen.progress.failure if seen.progress is not None else ""
    if failure:
        return f"its start has failed: {failure}"
    if now is None:
        return ""
    if str(now.state) == "gone":
        # Without a drain it is a lease that was lost, and a flip is a drain that ends in another
        # lease: the same process may come under the next one.
        drained = now.draining_s is not None and last.told != "flip"
        why = now.drain_reason or "no reason is told"
        return f"it was drained and has left ({why}), and was {last.state} before" * drained
    if now.offer.incarnation != before.offer.incarnation:
        return "another process of that name has taken its place"
    if last.told and not now.told and str(now.state) == "standby":
        return "the word was not followed in time and is taken back; it stands by"
    return ""


def step_of(worker: Worker, what: str) -> str:
    """What it does on its way, with the segment of its start that runs."""
    doing = f"{worker.worker_id} is {worker.state}, told to {what}"
    progress = worker.progress
    running = [] if progress is None else [s for s in progress.segments if s.end_s is None]
    if _is_bare(worker):
        return f"{doing}: it holds a process only and loads first"
    return f"{doing}: {running[-1].name}" if running else doing
