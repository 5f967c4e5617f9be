"""`make bench`: the main job in figures.

Prints these lines at the end:

    bench-main first_answer_s= attainment= unexplained= route_p50_us= route_p99_us= route_per_s_16=
               route_cpu_us= sim_hour_s=
    bench-tick decide_ms_10= decide_ms_32= decide_ms_1000= tick_ms_10= tick_ms_32= tick_ms_1000=
    bench-sim azure_hour_s= us_per_request_1x= us_per_request_32= tick_ms=
    bench-forecast wape= cover= pinball= cost=

first_answer_s: from a fresh clone, with the dependencies installed and nothing downloaded, to the
first answered request of `readyplane up`. attainment, unexplained: of `readyplane up --quick` on
the Azure conversation trace. route_*: gRPC route plus complete against a router process with real
stores, 8 prefill and 8 decode workers and prompts of 1,024 tokens; quantiles at 1 in flight,
rate at 16; route_cpu_us is the router's own CPU. sim_hour_s, azure_hour_s: CPU seconds of the Azure
conversation hour in the simulator on one core. decide_ms_*: CPU of one decision of the planner by
the number of workers; tick_ms_10: of the whole round around it, tick_ms_32 and tick_ms_1000: likewise
with eight classes and the start mode to choose among. us_per_request_*: CPU of a
simulated request, planner ticks included, in that hour and with some 32 workers; tick_ms: of a
decision in the latter. The forecast's figures are means of `bench.forecast`, which prints them all.

A figure that could not be taken is printed as nan, with the reason above it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.forecast import measure_forecast
from bench.route import measure_routes
from bench.sim import hour_s, measure_sim
from readyplane_lab.proof.ticktime import measure_ticks

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("READYPLANE_DATA", ROOT.parent / "shared" / "data"))
TRACE = DATA / "traces" / "azure2023_conv.csv.zst"


def run_up(clone: Path, *arguments: str) -> tuple[dict[str, object], float]:
    """`readyplane up` of a clone with this environment's dependencies; its report and seconds."""
    report = clone.parent / "report.json"
    parts = ["."] + [f"services/{n}" for n in ("registry", "router", "planner", "agent", "gateway")]
    paths = [str(clone / part) for part in [*parts, "lab"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    began_s = time.monotonic()
    command = [sys.executable, "-m", "readyplane_lab.cli", "up", "--plain"]
    subprocess.run(
        [*command, "--report", str(report), *arguments],
        env=environment,
        cwd=clone,
        check=False,
        stdout=subprocess.DEVNULL,
    )
    return json.loads(report.read_text()), time.monotonic() - began_s


def measure_up() -> dict[str, float]:
    """first_answer_s, attainment and unexplained."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "readyplane"
        began_s = time.monotonic()
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        cloned_s = time.monotonic() - began_s
        trace = ["--trace", str(TRACE)] if TRACE.exists() else []
        if not trace:
            print(f"no {TRACE}: the built-in workload is used instead", flush=True)
        report, _ = run_up(clone, "--quick", *trace)
    requests = report["requests"]
    starts = report["starts"]
    assert isinstance(requests, dict)
    assert isinstance(starts, list)
    if requests["attainment_void"]:
        print("attainment is void: the modelled engines ran late", flush=True)
    shares = [s["unexplained_s"] / s["wall_s"] for s in starts if s["wall_s"]]
    first = report["first_answer_s"]
    return {
        "first_answer_s": cloned_s + float(first) if isinstance(first, float) else math.nan,
        "attainment": requests["attainment"] if requests["attainment"] is not None else math.nan,
        "unexplained": max(shares, default=math.nan),
    }


def measure_hour() -> dict[str, float]:
    """sim_hour_s."""
    if not TRACE.exists():
        print(f"no {TRACE}: the simulator was not measured", flush=True)
        return {"sim_hour_s": math.nan}
    return {"sim_hour_s": hour_s(TRACE)}


def measure_simulator() -> dict[str, float]:
    """The figures of `bench.sim`."""
    return measure_sim(TRACE)


MEASURES = (
    ("up", "bench-main", measure_up),
    ("route", "bench-main", measure_routes),
    ("tick", "bench-tick", measure_ticks),
    ("hour", "bench-main", measure_hour),
    ("sim", "bench-sim", measure_simulator),
    ("forecast", "bench-forecast", measure_forecast),
)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="the main job in figures")
    parser.add_argument("--only", choices=[name for name, _, _ in MEASURES], action="append")
    only = parser.parse_args().only
    lines: dict[str, dict[str, float]] = {}
    for name, line, measure in MEASURES:
        if only is None or name in only:
            lines.setdefault(line, {}).update(measure())
    for line, figures in lines.items():
        print(f"{line} " + " ".join(f"{k}={v:.4g}" for k, v in figures.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
