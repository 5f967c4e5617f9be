"""`readyplane replay`: a workload through the simulated world, production brains on virtual time."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

import typer

from readyplane.core.errors import InvalidField
from readyplane_lab.cli import output
from readyplane_lab.cli.flags import Json, examples, switch
from readyplane_lab.cli.versus import Versus, play_versus

if TYPE_CHECKING:
    from rich.console import Console

    from readyplane_lab.workload.request import WorkloadRequest

EXAMPLES = examples(
    "readyplane replay --trace azure2023_conv.csv.zst --out replay",
    "readyplane replay --conversation --rate 8 --duration 600 --seed 2 --out replay",
    "readyplane replay --trace trace.jsonl --limit 2000 --policy policy.yaml --out replay --json",
    "readyplane replay --scenario isl-burst --out replay",
    "readyplane replay --scenario az-conv --peak 16 --t-ready 180 --policy hpa:0.5 --out replay",
    "readyplane replay --scenario az-code --compare readyplane,hpa,kpa:0.5 --out replay",
)
RATE_RPS = 5.5
DURATION_S = 600.0
DURATION_S_MAX = 7 * 86_400.0


def replay(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Gets replay.json and replay.png.")],
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Azure CSV or Mooncake JSONL, plain or .zst."),
    ] = None,
    conversation: Annotated[
        bool, switch("--conversation", text="The built-in workload instead of a trace.")
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", help=f"Its mean requests/s (default: {RATE_RPS:g})."),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            metavar="S", help=f"End the arrivals then (default: {DURATION_S:g}; trace: its end)."
        ),
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A scenario of the proof instead of a trace."),
    ] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Only the first N requests; 0: all.")] = 0,
    seed: Annotated[int, typer.Option(metavar="N", help="Of every random draw.")] = 1,
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="YAML or JSON over the policy, or a rule of the proof as NAME[:knob=VALUE].",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Several such rules, side by side."),
    ] = None,
    peak: Annotated[
        float | None,
        typer.Option(metavar="N", help="Scale the load so that its peak needs N workers."),
    ] = None,
    t_ready: Annotated[
        float | None,
        typer.Option(metavar="S", help="A lone cold start takes that long (default: 60)."),
    ] = None,
    json: Json = False,
) -> None:
    """Replay a workload on virtual time: what would router and planner have done?

    The same router and planner code as in production decides; engines and starts are modelled.
    Equal arguments give equal files, on any machine.
    """
    given = [trace is not None, conversation, scenario is not None]
    if sum(given) != 1:
        names = ("--trace FILE", "--conversation", "--scenario NAME")
        shown = ", ".join(n for n, here in zip(names, given, strict=True) if here) or "neither"
        raise InvalidField("workload", shown, f"give one of {', '.join(names)}")
    if rate is not None and not conversation:
        raise InvalidField("--rate", rate, "leave it out: a trace has its own arrivals")
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise InvalidField("--rate", rate, "give requests per second above 0")
    if duration is not None and not 0 < duration <= DURATION_S_MAX:
        raise InvalidField(
            "--duration", duration, f"give seconds above 0, {DURATION_S_MAX:g} at most"
        )
    if limit < 0:
        raise InvalidField("--limit", limit, "give 0 (all) or more")
    if seed < 0:
        raise InvalidField("--seed", seed, "give 0 or more")
    check_writable(out)
    named = policy is not None and not _is_file(policy)
    if named or any(value is not None for value in (scenario, compare, peak, t_ready)):
        asked = Versus(scenario, policy, compare, peak, t_ready, seed)
        workload = None
        if scenario is not None and (limit or duration is not None):
            given_option = "--limit" if limit else "--duration"
            raise InvalidField(given_option, limit or duration, "a scenario is played whole")
        if scenario is None:
            workload = _workload(trace, rate or RATE_RPS, duration, limit, seed)
        play_versus(asked, workload, out, json=json)
        return
    path = None if policy is None else Path(policy)
    from readyplane.kit.clock import SystemClock
    from readyplane_lab.simulator.replay import Replay, run_replay, write_replay
    from readyplane_lab.up.demo_policy import demo_policy

    wanted = demo_policy(path)
    name, requests = _workload(trace, rate or RATE_RPS, duration, limit, seed)
    clock = SystemClock()
    began_s = clock.monotonic_s()
    with _progress(len(requests)) as advance:
        counted = Counted(requests, advance)
        report, result = run_replay(Replay(name, counted, seed=seed, policy=wanted))
    simulated_s = clock.monotonic_s() - began_s
    with output.console(stderr=True).status("drawing"):
        files = write_replay(out, report, result)
    if json:
        kept = {k: v for k, v in report.items() if k not in {"series", "workers", "decisions"}}
        counts = {"decisions": len(report["decisions"]), "workers": len(report["workers"])}
        output.emit({**kept, **counts, "files": [str(f) for f in files]})
        return
    show_report(output.console(), report, simulated_s=simulated_s)
    for file in files:
        print(file)


def _is_file(policy: str) -> bool:
    """Whether `--policy` means a file: it has the ending of one, or lies there."""
    return policy.endswith((".yaml", ".yml", ".json")) or Path(policy).is_file()


def check_writable(folder: Path) -> None:
    """Refuse before an hour is simulated, not after.

    Raises:
        InvalidField: the folder cannot be made or written.
    """
    import tempfile

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise InvalidField("--out", str(folder), f"give a writable folder ({why})") from error


def _workload(
    trace: Path | None, rate_rps: float, duration_s: float | None, limit: int, seed: int
) -> tuple[str, Sequence[WorkloadRequest]]:
    from itertools import islice

    if trace is None:
        from readyplane_lab.workload.conversation import Wave, conversation

        drawn = conversation(Wave(rate_rps), seed=seed, duration_s=duration_s or DURATION_S)
        requests = tuple(islice(drawn, limit or None))
        return f"conversation, {rate_rps:g} requests/s", requests
    from readyplane_lab.workload.trace import read_trace

    read = read_trace(trace, seed=seed, limit=limit)
    end_s = math.inf if duration_s is None else duration_s
    return read.name, tuple(r for r in read.requests if r.at_s <= end_s)


class Counted(Sequence["WorkloadRequest"]):
    """A workload that tells how far it has been gone through."""

    def __init__(self, requests: Sequence[WorkloadRequest], advance: Callable[[int], None]) -> None:
        self._requests, self._advance = requests, advance

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, index: int) -> WorkloadRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WorkloadRequest]: ...
    def __getitem__(self, index: int | slice) -> WorkloadRequest | Sequence[WorkloadRequest]:
        return self._requests[index]

    def __iter__(self) -> Iterator[WorkloadRequest]:
        for number, request in enumerate(self._requests, 1):
            yield request
            self._advance(number)


class _progress:  # noqa: N801 - used as a context manager, like a function
    """A bar on stderr while requests arrive; nothing where stderr is no terminal."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        self._bar = Progress(
            "simulating",
            BarColumn(),
            MofNCompleteColumn(),
            "requests",
            TimeRemainingColumn(),
            console=output.console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Callable[[int], None]:
        self._bar.start()
        return lambda done: self._bar.update(self._task, completed=done)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def show_report(screen: Console, report: Mapping[str, Any], *, simulated_s: float) -> None:
    """The report for a person."""
    slo = report["policy"]["slo"]
    outcomes = ", ".join(f"{count:,} {name}" for name, count in report["outcomes"].items())
    screen.print(f"[bold]{output.cell(report['workload'])}[/bold], seed {report['seed']}")
    screen.print(
        f"{report['virtual_s']:,.0f} virtual seconds in {simulated_s:.1f} s; "
        f"{report['requests']:,} requests: {outcomes}"
    )
    screen.print(
        f"attainment [bold]{report['attainment']:.1%}[/bold] of all arrivals met "
        f"TTFT ≤ {slo['ttft_s']:g} s and TPOT ≤ {slo['tpot_s']:g} s"
    )
    made = output.table("", "P50", "P90", "P99", right=("P50", "P90", "P99"))
    for label, key, digits in (
        ("TTFT", "ttft_s", 3),
        ("TPOT", "tpot_s", 4),
        ("T_ready", "t_ready_s", 1),
    ):
        found = report[key] or {}
        made.add_row(label, *(output.seconds(found.get(q), digits) for q in ("p50", "p90", "p99")))
    screen.print(made)
    hours = ", ".join(f"{role} {h:.3f}" for role, h in report["worker_hours"].items())
    screen.print(
        f"worker-hours {hours}; {len(report['workers'])} workers, "
        f"{len(report['decisions'])} decisions, {report['repaired']} re-paired, "
        f"prefix hit {output.share(report['prefix_hit'])}"
    )
