"""Which optimiser proposes: found by name, asked within a time, and its answer kept for the record.

Owns the entry point group `readyplane.optimisers` and everything about an optimiser that is no pure
function: loading it, its time, its errors. What it answers is judged by `optimise.check` and by the
guard, like any other (R23.2); what it answered is journalled, so that a decision is replayed without
it and comes out the same.

An optimiser that takes too long is left to itself in one thread and not asked again until it is done:
the planner goes on with its conservative fallback.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from typing import Any, TypeVar

from readyplane.core.errors import InvalidField
from readyplane_planner.optimise import Optimiser, Problem, Proposal, size
from readyplane_planner.optimise.answer import Answer, answered
from readyplane_planner.optimise.tuned import read_parameters, tuned

GROUP = "readyplane.optimisers"
FIELD = "policy.optimiser"
DEFAULT = "size"
TUNED_FILE = "tuned.json"


Made = TypeVar("Made")


def load_optimiser(name: str) -> Optimiser:
    """The optimiser of that name.

    Raises:
        InvalidField: nobody offers it, or what offers it cannot be loaded; says why.
    """
    built_in = BUILT_IN.get(name)
    if built_in is not None:
        return built_in
    offered = [point for point in entry_points(group=GROUP) if point.name == name]
    if not offered:
        known = ", ".join(sorted({*BUILT_IN, *(p.name for p in entry_points(group=GROUP))}))
        remedy = f"known are {known}; others come with a package that offers it in {GROUP}"
        raise InvalidField(FIELD, name, remedy)
    if len(offered) > 1:
        values = ", ".join(sorted(p.value for p in offered))
        raise InvalidField(FIELD, name, f"keep one of those that offer it: {values}")
    return _loaded(offered[0])


def _loaded(point: EntryPoint) -> Optimiser:
    try:
        found: Any = point.load()
    except Exception as error:
        why = f"repair {point.value}, which cannot be loaded ({type(error).__name__}: {error})"
        raise InvalidField(FIELD, point.name, why) from error
    if not callable(found):
        why = f"let {point.value} be a function of a Problem; it is a {type(found).__name__}"
        raise InvalidField(FIELD, point.name, why)
    return found  # type: ignore[no-any-return]


def tuned_from_file(problem: Problem) -> Proposal:
    """The optimiser that was tuned in the simulator.

    Raises:
        InvalidField: its recorded parameters are not valid.
    """
    return _recorded()(problem)


@cache
def _recorded() -> Optimiser:
    return tuned(read_parameters(tuned_document()["parameters"]))


def tuned_document() -> dict[str, Any]:
    """Recorded parameters with where they come from: inputs, seed, evaluations, scores."""
    text = files("readyplane_planner.optimise").joinpath(TUNED_FILE).read_text("utf-8")
    return dict(json.loads(text))


BUILT_IN: dict[str, Optimiser] = {DEFAULT: size, "tuned": tuned_from_file}
"""There without any package's metadata, as in a checkout."""


def thinker(name: str, *, budget_s: float | None) -> Thinker | None:
    """Who asks the optimiser of that name; None for the planner's own, which needs nobody."""
    return None if name == DEFAULT else Thinker(load_optimiser(name), budget_s=budget_s)


def late(budget_s: float) -> Optimiser:
    """What stands in for one that has not answered in time."""
    return answered(Answer(error=f"no answer within {budget_s:g} s"))


class Thinker:
    """Runs a decision with a foreign optimiser beside the loop, within a time.

    Args:
        budget_s: after that the decision is made without the optimiser; None asks it directly, as
            where time is virtual.
    """

    def __init__(self, optimiser: Optimiser, *, budget_s: float | None) -> None:
        self._optimiser = optimiser
        self._budget_s = budget_s
        self._stray: Future[Any] | None = None

    async def ask(self, call: Callable[[Optimiser], Made]) -> Made:
        """What `call` makes with the optimiser, or with one that says it was late."""
        if self._budget_s is None:
            return call(self._optimiser)
        if self._stray is not None and not self._stray.done():
            return call(late(self._budget_s))
        self._stray = None
        running = self._begin(call)
        try:
            async with asyncio.timeout(self._budget_s):
                return await asyncio.wrap_future(running)
        except TimeoutError:
            self._stray = running
            return call(late(self._budget_s))

    def _begin(self, call: Callable[[Optimiser], Made]) -> Future[Made]:
        """In a thread that does not keep the process from ending, however long it takes."""
        running: Future[Made] = Future()
        running.set_running_or_notify_cancel()

        def work() -> None:
            try:
                running.set_result(call(self._optimiser))
            except BaseException as error:  # noqa: BLE001 - it is raised where it is awaited
                running.set_exception(error)

        threading.Thread(target=work, name="optimiser", daemon=True).start()
        return running
