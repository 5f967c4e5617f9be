"""`make bench-validity`: how true the event simulator is, in four tables.

    queues     textbook queues with a known answer
    up         the modelled-engine processes of `readyplane up`, same requests, same fleet, real time
    dynosim    Dynamo's simulator with the same profile, trace and fleets (`.venv-dynosim`)
    measured   published measurements of deployments, predicted from other rows

`--only NAME` runs one of them. The tables are Markdown, as in docs/simulator-validity.md, which also
says why something differs. Each part ends with a line `bench-… key=value …`; the last line of all is

    bench-dynosim-validity mean_ttft_err= p99_ttft_err= mean_itl_err= worker_s_err= tau=

the largest relative difference over the static fleets of the Mooncake conversation (worker-seconds:
also of a run that scales), Dynamo's simulator computing prompts one by one as the profile was
measured; the line before it, with its own defaults, is `bench-dynosim-shipped`. A figure that could
not be taken is nan, with the reason above it.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import dynosim, measured, queue_cases, up_fleet
from readyplane_lab.workload.request import WorkloadRequest
from readyplane_lab.workload.trace import read_trace

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("READYPLANE_DATA", ROOT.parent / "shared" / "data"))
MOONCAKE_FLEETS = ((1, 1), (2, 1), (3, 1), (2, 2))
AZURE_FLEETS = ((1, 2), (2, 2), (2, 3))
UP_FLEET, UP_SECONDS = (3, 2), 150.0


def trace(name: str) -> tuple[WorkloadRequest, ...]:
    """A public trace, with the seeded jitter where its clock ticks."""
    return read_trace(DATA / "traces" / name, seed=0).requests


def queues() -> None:
    """Textbook queues."""
    print(
        "| queue | requests | simulated mean | 99.9 % | formula | worst request against recursion |"
    )
    print("|---|---|---|---|---|---|")
    inside = total = 0
    worst_s = 0.0
    for case in queue_cases.every_case():
        few = len(case.simulated) < 100
        found = case.estimate if not few else None
        cells = [case.name, str(len(case.simulated))]
        cells += [f"{found.mean_s:.4f} s", f"± {found.half_s:.4f}"] if found else ["", ""]
        if case.formula_s is not None and found:
            total += 1
            inside += found.holds(case.formula_s)
            cells.append(f"{case.formula_s:.4f} s")
        else:
            cells.append("")
        cells.append("" if case.recursion is None else f"{1e3 * case.path_error_s:.3f} ms")
        if case.recursion is not None and "infinity" not in case.name and "PS" not in case.name:
            worst_s = max(worst_s, case.path_error_s)
        print("| " + " | ".join(cells) + " |", flush=True)
    print(f"\nbench-queues-validity inside={inside}/{total} worst_request_us={1e6 * worst_s:.1f}")


def up() -> None:
    """The processes of `up`."""
    requests = [r for r in trace("azure2023_conv.csv.zst") if r.at_s < UP_SECONDS]
    found = up_fleet.compare(requests, UP_FLEET)
    late = "unknown" if found.late_p99_s is None else f"{1e3 * found.late_p99_s:.1f} ms"
    print(
        f"{len(requests)} requests, {UP_FLEET[0]}P{UP_FLEET[1]}D, engines at most {late} late (P99); "
        f"lost: {found.simulated.lost} in the simulator, {found.processes.lost} by the processes\n"
    )
    print("| figure | simulator | processes | difference |")
    print("|---|---|---|---|")
    errors = {}
    for name, ours, theirs in found.rows():
        errors[name] = ours / theirs - 1.0 if theirs else math.nan
        unit, scale = ("", 1.0) if name == "attainment" else (" ms", 1e3)
        print(
            f"| {name} | {scale * ours:.4g}{unit} | {scale * theirs:.4g}{unit} | {errors[name]:+.1%} |"
        )
    print(
        "\nbench-up-validity "
        + " ".join(
            f"{n.replace(' ', '_')}_err={errors[n]:.4f}" for n in errors if n != "attainment"
        )
    )


def dynamo() -> None:
    """Dynamo's simulator."""
    print(
        "| fleet | theirs | mean TTFT ours / theirs, ms | P99 TTFT, ms | mean ITL, ms "
        "| worker-seconds | attainment | cached | lost |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    conversation = trace("mooncake_conversation.jsonl.zst")
    rows = dynosim.compare(conversation, "h200-llama8b-fp8", MOONCAKE_FLEETS[:2], dynosim.STEPS)
    both = (dynosim.SHIPPED, dynosim.MATCHED)
    rows += dynosim.compare(conversation, "h200-llama8b-fp8", MOONCAKE_FLEETS[2:], both)
    scaled = dynosim.compare_scaling(conversation, "h200-llama8b-fp8", dynosim.MATCHED)
    print(dynosim.row_text(scaled))
    print("\nAzure conversation, class h100-tp4-llama70b\n")
    azure = dynosim.compare(
        trace("azure2023_conv.csv.zst"), "h100-tp4-llama70b", AZURE_FLEETS, both
    )
    for name, some in (("azure-shipped", azure), ("azure-matched", azure)):
        print(_line(name, [r for r in some if r.variant == name.removeprefix("azure-")]))
    print(_line("shipped", [r for r in rows if r.variant == "shipped"]))
    bill = abs(scaled.error("worker_s"))
    print(_line("validity", [r for r in rows if r.variant == "matched"], worker_s=bill))


def _line(name: str, rows: Sequence[dynosim.Compared], *, worker_s: float = 0.0) -> str:
    worst = {n: max((abs(r.error(n)) for r in rows), default=math.nan) for n in dynosim.COMPARED}
    worst["worker_s"] = max(worst["worker_s"], worker_s)
    parts = " ".join(f"{n}_err={v:.4f}" for n, v in worst.items())
    return f"bench-dynosim-{name} {parts} tau={dynosim.kendall_tau(rows):.2f}"


def deployments() -> None:
    """Published measurements."""
    found = measured.judge(DATA / "profiles" / "measured" / "aic_end_to_end.csv.zst")
    print("| GPU | rows predicted | TTFT error, mean | median | TPOT error, mean | median |")
    print("|---|---|---|---|---|---|")
    for name, count, *errors in found.table():
        print(f"| {name} | {count} | " + " | ".join(f"{e:.1%}" for e in errors) + " |")
    print("\n| clients | rows | TTFT error, mean | median, signed | TPOT error, mean | median |")
    print("|---|---|---|---|---|---|")
    for ends, count, ttft, ttft_sign, tpot, tpot_sign in found.by_clients():
        print(
            f"| {ends} | {count} | {ttft:.1%} | {ttft_sign:+.1%} | {tpot:.1%} | {tpot_sign:+.1%} |"
        )
    left_out = sum(found.left_out.values())
    print(
        f"\n{found.groups} deployments; {found.formed} rows formed profiles, "
        f"{len(found.predicted)} were predicted, {left_out} could not be used:"
    )
    for why, count in found.left_out.most_common():
        print(f"- {count}: {why}")
    *_, (_, count, ttft, ttft_half, tpot, tpot_half) = found.table()
    print(
        f"\nbench-measured-validity rows={count} ttft_mape={ttft:.4f} ttft_median={ttft_half:.4f} "
        f"tpot_mape={tpot:.4f} tpot_median={tpot_half:.4f}"
    )


PARTS: dict[str, Callable[[], None]] = {
    "queues": queues,
    "up": up,
    "measured": deployments,
    "dynosim": dynamo,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.validity", description=__doc__)
    parser.add_argument("--only", choices=list(PARTS), action="append", help="run only this part")
    wanted = parser.parse_args().only or list(PARTS)
    for name, part in PARTS.items():
        if name in wanted:
            print(f"\n## {name}\n", flush=True)
            try:
                part()
            except FileNotFoundError as error:
                print(f"left out: {error}\nbench-{name}-validity nan", flush=True)


if __name__ == "__main__":
    main()
