"""The proof: which inputs are looked at how, in parallel, and the report of it all.

Owns the plan (a centre point with everything confirmed by events, then one factor at a time in the
fluid mode), the processes, and what is written. Wherever it is stopped, the same call goes on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any, Self

from readyplane.core.errors import InvalidField, ReadyplaneError
from readyplane_lab.proof import entrants
from readyplane_lab.proof.jobs import Results, code_digest
from readyplane_lab.proof.port import find
from readyplane_lab.proof.report.page import entry_hours
from readyplane_lab.proof.settle import Errand, RunFault, settle
from readyplane_lab.proof.verdict import OURS, Input, Summary, summary
from readyplane_lab.proof.whole_file import write_whole

CENTRE_T_READY_S, CENTRE_PEAK, CENTRE_SEED = 60.0, 8.0, 1
T_READY_GRID_S = (10.0, 30.0, 60.0, 180.0, 300.0)
PEAKS = (8.0, 32.0, 128.0)
SEEDS = (1, 2, 3, 4, 5)
QUICK_SCENARIOS = ("isl-burst", "flash-crowd")
QUICK_CONTENDERS = ("static-peak", "hpa", "kpa", "dynamo-throughput", "clairvoyant")
QUICK_PEAK = 5.0
QUICK_KNOBS = 3
RIVALS_FOLLOWED = 3
POLL_S = 0.5

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Ask:
    """What is to be proved.

    Attributes:
        scenarios, contenders: names; empty for all there are. attainment: asked of everybody.
        t_ready_s, peaks, seeds: the grid, centre first: the rest is varied one factor at a time,
            or, with `full`, all together. quick: two short inputs, few contenders and knobs.
        events: confirm by events (at the centre; with `full` everywhere).
        processes: side by side.
    """

    scenarios: tuple[str, ...] = ()
    contenders: tuple[str, ...] = ()
    attainment: float = 0.99
    t_ready_s: tuple[float, ...] = (
        CENTRE_T_READY_S,
        *(t for t in T_READY_GRID_S if t != CENTRE_T_READY_S),
    )
    peaks: tuple[float, ...] = PEAKS
    seeds: tuple[int, ...] = SEEDS
    quick: bool = False
    full: bool = False
    events: bool = True
    processes: int = field(default_factory=lambda: max(1, (os.cpu_count() or 2)))


@dataclass(frozen=True, slots=True)
class Proof:
    """What came of it.

    Attributes:
        centre: inputs of the centre point; summary: over them. factors: inputs off the centre.
        documents: by key, everything a report shows. skipped: key -> why.
        faults: key -> what broke in a run; the input has no figures.
    """

    centre: tuple[Input, ...]
    factors: tuple[Input, ...]
    summary: Summary
    documents: Mapping[str, Mapping[str, Any]]
    skipped: Mapping[str, str]
    faults: Mapping[str, str]
    attainment: float

    @property
    def undercut(self) -> tuple[str, ...]:
        """Runs without a miss that were billed less than is possible: faults of the proof."""
        return tuple(
            f"{key}: {why}" for key, one in self.documents.items() for why in one["undercut"]
        )


def prove(ask: Ask, out: Path, *, progress: Progress = lambda _text, _share: None) -> Proof:
    """Run the comparison; results are kept in `out/runs` as they come.

    Raises:
        InvalidField: a name that is not there, or a grid without a centre.
    """
    centre = list(_centre(ask))
    folder = out / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidField("--out", str(folder), f"make room for a folder ({error})") from error
    with _Crew(ask.processes, folder) as crew:
        first = crew.run(centre, lambda text, share: progress(text, share * _share(ask)))
        chosen = {key: _chosen(document) for key, (_, document) in first.done.items()}
        rest = list(_factors(ask, centre, chosen))
        second = crew.run(
            rest, lambda text, share: progress(text, _share(ask) + share * (1 - _share(ask)))
        )
    inputs = tuple(first.done[e.key][0] for e in centre if e.key in first.done)
    others = tuple(second.done[e.key][0] for e in rest if e.key in second.done)
    documents = {key: document for key, (_, document) in (first.done | second.done).items()}
    return Proof(
        centre=inputs,
        factors=others,
        summary=summary(inputs, attainment=ask.attainment),
        documents=documents,
        skipped=first.skipped | second.skipped,
        faults=first.faults | second.faults,
        attainment=ask.attainment,
    )


def _share(ask: Ask) -> float:
    """How much of the work the centre is."""
    return 1.0 if ask.quick else 0.75


def _centre(ask: Ask) -> Iterator[Errand]:
    """Every scenario at the first of each factor."""
    if not (ask.t_ready_s and ask.peaks and ask.seeds):
        raise InvalidField("grid", "empty", "give at least one T_ready, one peak and one seed")
    known = entrants.scenarios()
    every = tuple(name for name, one in known.items() if ask.full or not one.variant)
    names = ask.scenarios or (QUICK_SCENARIOS if ask.quick else every)
    for name in names:
        find(name, known, "--scenario")
        yield Errand(
            scenario=name,
            t_ready_s=ask.t_ready_s[0],
            peak=QUICK_PEAK if ask.quick and ask.peaks == PEAKS else ask.peaks[0],
            seed=ask.seeds[0],
            contenders=_contenders(ask),
            attainment=ask.attainment,
            knobs=QUICK_KNOBS if ask.quick else 8,
            events=ask.events,
        )


def _contenders(ask: Ask) -> tuple[str, ...]:
    known = entrants.contenders()
    names = ask.contenders or (QUICK_CONTENDERS if ask.quick else tuple(known))
    for name in names:
        find(name, known, "--policy")
    return tuple(dict.fromkeys((OURS, *names)))


def _factors(
    ask: Ask, centre: Sequence[Errand], chosen: Mapping[str, Mapping[str, float]]
) -> Iterator[Errand]:
    """Off the centre: one factor at a time, at the knobs that the centre chose."""
    if ask.quick:
        return
    for errand in centre:
        knobs = chosen.get(errand.key)
        if knobs is None:
            continue
        for t_ready_s, peak, seed in _grid(ask):
            yield Errand(
                scenario=errand.scenario,
                t_ready_s=t_ready_s,
                peak=peak,
                seed=seed,
                contenders=errand.contenders if ask.full else tuple(knobs),
                attainment=ask.attainment,
                events=ask.full and ask.events,
                centre=False,
                at=None if ask.full else knobs,
            )


def _grid(ask: Ask) -> list[tuple[float, float, int]]:
    t0, p0, s0 = ask.t_ready_s[0], ask.peaks[0], ask.seeds[0]
    if ask.full:
        every = [(t, p, s) for t in ask.t_ready_s for p in ask.peaks for s in ask.seeds]
        return [point for point in every if point != (t0, p0, s0)]
    return [
        *((t, p0, s0) for t in ask.t_ready_s[1:]),
        *((t0, p, s0) for p in ask.peaks[1:]),
        *((t0, p0, s) for s in ask.seeds[1:]),
    ]


def _chosen(document: Mapping[str, Any]) -> dict[str, float]:
    """Whom to follow off the centre, at which knob: ours, the bounds and the cheapest rivals."""
    entries: Mapping[str, Mapping[str, Any]] = document["entries"]
    rivals = [
        (entry_hours(entry), name)
        for name, entry in entries.items()
        if entry["reached"] and not entry["bound"] and name != OURS
    ]
    names = [
        *(name for _, name in sorted(rivals)[:RIVALS_FOLLOWED]),
        *(name for name, entry in entries.items() if entry["bound"]),
    ]
    ours = entrants.contenders()[OURS]
    return {OURS: ours.default, **{name: float(entries[name]["chosen"]) for name in names}}


@dataclass(slots=True)
class _Came:
    """Errands that ended, those that could not be run, and those that broke."""

    done: dict[str, tuple[Input, dict[str, Any]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


class _Crew:
    """Processes that settle errands side by side."""

    def __init__(self, processes: int, folder: Path) -> None:
        self._folder = folder
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=end_with_parent)
        self._manager = SyncManager(ctx=context)
        self._manager.start(initializer=end_with_parent)
        self._said: Any = self._manager.Queue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Wait for what runs; interrupted, end it: everything that ended before is kept."""
        if kind is not None:
            for child in multiprocessing.active_children():
                child.terminate()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._manager.shutdown()

    def run(self, errands: Sequence[Errand], progress: Progress) -> _Came:
        """Settle all of them; one that cannot be run is skipped with its reason."""
        came = _Came()
        waiting: dict[Future[Any], Errand] = {
            self._pool.submit(_settle, errand, str(self._folder), self._said): errand
            for errand in errands
        }
        shares = dict.fromkeys((errand.key for errand in errands), 0.0)
        while waiting:
            ended, _ = wait(waiting, timeout=POLL_S, return_when=FIRST_COMPLETED)
            self._listen(shares, progress)
            for future in ended:
                errand = waiting.pop(future)
                shares[errand.key] = 1.0
                try:
                    came.done[errand.key] = future.result()
                except ReadyplaneError as error:
                    came.skipped[errand.key] = str(error)
                except RunFault as error:
                    came.faults[errand.key] = str(error)
        return came

    def _listen(self, shares: dict[str, float], progress: Progress) -> None:
        text = ""
        while not self._said.empty():
            key, text, share = self._said.get()
            shares[key] = max(shares[key], share)
        if shares:
            progress(text, sum(shares.values()) / len(shares))


def end_with_parent() -> None:
    """End this process as soon as its parent is gone, whatever ended it.

    A process of a pool else finishes what it does, which may be hours of nobody's work.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "for processes that were started by another"

    def watch() -> None:
        wait_for_any([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end-with-parent").start()


def _settle(errand: Errand, folder: str, said: Any) -> tuple[Input, dict[str, Any]]:
    """In a process of the crew."""
    return settle(
        errand,
        Results(Path(folder)),
        lambda text, share: said.put((errand.key, text, share)),
    )


def document_of(proof: Proof, ask: Ask) -> dict[str, Any]:
    """The proof as JSON: everything in the report, without the time it took."""
    return {
        "attainment": ask.attainment,
        "code": code_digest(),
        "line": proof.summary.line(),
        "missed": list(proof.summary.missed),
        "one_knob": {
            name: {"knob": knob, "median_ratio": ratio}
            for name, (knob, ratio) in proof.summary.one_knob.items()
        },
        "inputs": {one.key: proof.documents[one.key] for one in (*proof.centre, *proof.factors)},
        "contenders": {
            name: {"title": c.title, "source": c.source, "knob": c.knob}
            for name, c in entrants.contenders().items()
            if any(name in one.entries for one in proof.centre)
        },
        "undercut": list(proof.undercut),
        "skipped": dict(proof.skipped),
        "faults": dict(proof.faults),
    }


def write_json(document: Mapping[str, Any], file: Path) -> None:
    """Whole or not at all."""
    write_whole(file, json.dumps(document, indent=1))
